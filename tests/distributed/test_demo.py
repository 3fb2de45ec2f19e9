"""`make demo`, with a smaller model and fewer steps: all six parts, what they show, and nothing done twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import demo
from tests.distributed.ranks import APP, TINY


@pytest.mark.slow
def test_the_demo_from_nothing_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(APP)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_DATA_DIR", str(tmp_path / "shards"))
    monkeypatch.setattr(demo, "STEPS", 6)
    monkeypatch.setattr(demo, "ONE_RANK_STEPS", 4)
    flags = [*TINY, "--num-iterations=6", "--eval-every=3", "--eval-tokens=1024", "--tracker=none", "--resume=auto"]
    monkeypatch.setattr(demo, "TRAIN_FLAGS", " ".join(flags))
    assert demo.main() == 0
    said = capfd.readouterr().out
    assert re.findall(r"^\[(\d)/6\]", said, re.M) == list("123456")
    assert len(re.findall(r"^step 00001/00006 .* eta: \S+$", said, re.M)) == 2, said
    assert "step | 1 rank: loss | 2 ranks: loss | 1 rank: tok/s | 2 ranks: tok/s" in said
    rows = re.findall(r"^ *(0000\d) \| +(\d+\.\d{6}) \| +(\d+\.\d{6}) \| +[\d,]+ \| +[\d,]+$", said, re.M)
    assert [step for step, _, _ in rows] == ["00001", "00004"]
    assert all(float(one) == pytest.approx(float(two), abs=1e-5) for _, one, two in rows)
    assert "over 4 common steps" in said
    picture = tmp_path / "loss.png"
    assert f"loss curve: {picture}" in said
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert all(prompt in said.partition("[6/6]")[2] for prompt in demo.PROMPTS)
    assert "[demo-2ranks, step 6 (complete), val bpb " in said

    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path != picture}
    assert demo.main() == 0
    said = capfd.readouterr().out
    assert said.count("already trained: ") == 2
    assert said.count(" is there") == 2  # corpus and tokenizer
    assert "over 4 common steps" in said
    left_alone = {path for path in made if path.name != ".prepare.lock"}
    assert {path: path.stat().st_mtime_ns for path in left_alone} == {path: made[path] for path in left_alone}
