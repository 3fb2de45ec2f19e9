"""What the benchmark of one step measures, and what its table says."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import train_step
from benchmarks.measuring import SHAPES, VOCAB, median_seconds, token_rows
from benchmarks.peers import INSTALL

ROOT = Path(__file__).resolve().parents[2]


def result(program: str, gflops: float, **more: float) -> dict[str, Any]:
    return {
        "program": program, "depth": 4, "dtype": "fp32", "tokens": 2048, "step_s": 1.0, "tokens_per_s": 2048.0,
        "model_gflops": gflops, "peak_mb": 900.0, "ready_s": 2.0, "first_step_s": 3.0, **more,
    }  # fmt: skip


def test_the_age_of_a_process_is_what_its_parent_waited() -> None:
    code = "import time; time.sleep(0.3); from benchmarks.measuring import process_age; print(process_age())"
    began = time.monotonic()
    age = float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))
    waited = time.monotonic() - began
    assert 0.3 <= age <= waited + 0.02  # the kernel counts in hundredths


def test_rows_are_the_same_for_every_program_and_within_the_vocabulary() -> None:
    rows = token_rows(4, 2048)
    length, batch = SHAPES[4]
    assert rows.shape == (2048 // length // batch, batch, length + 1)
    assert (rows == token_rows(4, 2048)).all()
    assert 0 <= int(rows.min()) <= int(rows.max()) < VOCAB


def test_the_first_call_is_not_timed() -> None:
    calls: list[float] = []

    def work() -> None:
        calls.append(0.2 if not calls else 0.0)
        time.sleep(calls[-1])

    assert median_seconds(work, 3) < 0.1
    assert len(calls) == 4


def test_peers_are_compared_with_ours_of_the_same_configuration() -> None:
    lines = train_step.table(
        [
            result("lantrain, v3", 150.0, roofline_s=0.8, share=0.8),
            result("nanochat, eager", 100.0),
            result("lantrain, v3", 300.0, roofline_s=0.9, share=0.9),
            result("llama, compiled", 150.0),
        ]
    ).splitlines()
    assert lines[2].split("|")[7:10] == [" 0.800 ", " 80% ", " 150 "]
    assert [line.split("|")[10].strip() for line in lines[2:]] == ["", "1.50", "", "2.00"]
    assert len({line.count("|") for line in lines}) == 1


def test_what_is_measured_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    checkout = Path("nanochat")
    assert train_step.programs(None, False, True) == ["lantrain"]
    assert train_step.programs(checkout, False, False) == ["lantrain", "nanochat-eager"]
    monkeypatch.setattr(train_step.importlib.util, "find_spec", lambda name: None)
    assert train_step.programs(checkout, True, True) == ["lantrain", "nanochat-eager", "nanochat-compiled"]
    assert capsys.readouterr().err.strip() == INSTALL
    monkeypatch.setattr(train_step.importlib.util, "find_spec", lambda name: object())
    assert train_step.programs(None, True, True) == ["lantrain", "llama-eager", "llama-compiled"]
