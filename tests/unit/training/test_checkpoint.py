"""A checkpoint is complete or absent, whatever happens while it is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lantrain.training import checkpoint
from lantrain.training.checkpoint import CheckpointError
from tests.distributed.ranks import APP

META = {"step": 1, "model_config": {"n_layer": 2}}


def _save(folder: Path, step: int, **options: Any) -> Path:
    model = {"weight": torch.full((300, 10), float(step))}
    state = {"optimizer": {"weight.exp_avg": torch.ones(300, 10)}, "rows": {"epoch": 1}}
    return checkpoint.save(folder, step, model, {**META, "step": step}, state, **options)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    marker = _save(tmp_path, 7)
    assert marker.name == "complete_000007.json"
    loaded = checkpoint.load(tmp_path, 7)
    assert loaded.meta["step"] == 7
    assert torch.equal(loaded.model["weight"], torch.full((300, 10), 7.0))
    assert loaded.state["rows"] == {"epoch": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "complete_000007.json", "meta_000007.json", "model_000007.pt", "state_000007.pt",
    ]  # fmt: skip


def test_marker_names_true_sizes_and_hashes(tmp_path: Path) -> None:
    import hashlib

    marker = json.loads(_save(tmp_path, 3).read_text())
    for name, entry in marker["files"].items():
        content = (tmp_path / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_missing_or_short_file_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("model_000002.pt", "state_000002.pt", "meta_000002.json", "complete_000002.json"):
        _save(tmp_path, 1)
        _save(tmp_path, 2)
        assert checkpoint.complete_steps(tmp_path) == [1, 2]
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-1] if path.suffix == ".pt" else b"")
        assert checkpoint.complete_steps(tmp_path) == [1]
        with pytest.raises(CheckpointError, match="no complete checkpoint of step 2"):
            checkpoint.load(tmp_path, 2)


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    path = tmp_path / "state_000002.pt"
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state_000002\.pt is damaged.*resume from another step: 1"):
        checkpoint.load(tmp_path, 2)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        _save(tmp_path, step, keep_last=2)
    assert checkpoint.complete_steps(tmp_path) == [4, 5]
    assert not list(tmp_path.glob("*_000003.*"))


def test_a_run_that_starts_anew_is_not_taken_for_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first checkpoint is the newest one from then on: kept, and what `--resume auto` takes."""
    for step in (80, 90, 100):
        _save(tmp_path, step, keep_last=3)
    _save(tmp_path, 10, keep_last=3)
    assert checkpoint.complete_steps(tmp_path) == [10]
    assert "from before: 80, 90, 100." in capsys.readouterr().out
    _save(tmp_path, 20, keep_last=3)
    assert capsys.readouterr().out == ""
    (tmp_path / "earlier_complete_000090.json").rename(tmp_path / "complete_000090.json")
    assert torch.equal(checkpoint.load(tmp_path, 90).model["weight"], torch.full((300, 10), 90.0))


def test_files_reach_the_disk_before_their_names_and_the_marker_is_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        fsync(handle)
        events.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))

    def named(source: Path, target: Path) -> None:
        replace(source, target)
        events.append(("name", str(target)))
        assert events[-2] == ("sync", str(source)), "the contents were not on the disk when the file got its name"

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    marker = _save(tmp_path, 5)
    names = [name for event, name in events if event == "name"]
    assert sorted(names[:-1]) == sorted(str(tmp_path / name) for name in checkpoint.file_names(5).values())
    assert names[-1] == str(marker)
    # The folder, too: after the files and before the marker, and once more at the end.
    assert events[-4:] == [
        ("sync", str(tmp_path)), ("sync", str(tmp_path / f".{marker.name}.{os.getpid()}.tmp")), ("name", str(marker)),
        ("sync", str(tmp_path)),
    ]  # fmt: skip


def test_killed_at_any_moment_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """A process saves step after step and is killed with SIGKILL while it does; what counts as complete loads."""
    code = f"""
import sys; sys.path.insert(0, {str(APP)!r})
import torch
from pathlib import Path
from lantrain.training import checkpoint
model = {{f"w{{i}}": torch.randn(200000) for i in range(4)}}
step = max(checkpoint.complete_steps(Path({str(tmp_path)!r})), default=0)
while True:
    step += 1
    checkpoint.save(Path({str(tmp_path)!r}), step, model, {{"step": step}}, {{"o": model}}, keep_last=2)
    print(step, flush=True)
"""
    for round_number in range(4):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(2 + 3 * round_number):
            printed = int(process.stdout.readline())
        process.kill()
        process.wait()
        process.stdout.close()
        steps = checkpoint.complete_steps(tmp_path)
        assert steps
        assert max(steps) >= printed
        for step in steps:
            assert checkpoint.load(tmp_path, step).meta["step"] == step


def test_left_over_temporary_files_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".model_000001.pt.77.tmp").write_bytes(b"half")
    checkpoint.prepare_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "d4").write_text("")
    with pytest.raises(CheckpointError, match="cannot write checkpoints"):
        checkpoint.prepare_folder(tmp_path / "d4")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_full_disk_leaves_the_last_checkpoint_and_says_what_to_do(tmp_path: Path) -> None:
    """A real small file system: the first checkpoint fits, the second does not."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=66m", "tmpfs", tmp_path], check=True)
    try:
        _save(tmp_path, 1)
        (tmp_path / "other").write_bytes(b"x" * 2**22)
        with pytest.raises(CheckpointError, match=r"needs 64\.0 MiB, .* has 62\.0 MiB free \(free some space"):
            _save(tmp_path, 2)
        assert checkpoint.complete_steps(tmp_path) == [1]
        checkpoint.load(tmp_path, 1)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_disk_that_fills_up_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program takes the space after we looked: the write fails in the middle and leaves no trace."""
    monkeypatch.setattr(checkpoint, "SPARE_BYTES", -(2**40))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", tmp_path], check=True)
    try:
        small = {"w": torch.ones(10)}
        checkpoint.save(tmp_path, 1, small, META, {})
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoint.save(tmp_path, 2, {"w": torch.ones(100_000)}, META, {})
        assert checkpoint.complete_steps(tmp_path) == [1]
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    """A model file that would run a command when unpickled is refused."""
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path}/ran",)

    _save(tmp_path, 1)
    with open(tmp_path / "model_000001.pt", "wb") as file:
        torch.save({"weight": Evil()}, file, pickle_module=pickle)
    with pytest.raises((CheckpointError, pickle.UnpicklingError)):
        checkpoint.load_model(tmp_path, 1)
    assert not (tmp_path / "ran").exists()


def test_model_without_our_marker_is_nanochats(tmp_path: Path) -> None:
    torch.save({"_orig_mod.weight": torch.ones(2)}, tmp_path / "model_000010.pt")
    (tmp_path / "meta_000010.json").write_text(json.dumps({"step": 10}))
    step, model, meta = checkpoint.load_model(tmp_path)
    assert (step, list(model), meta["step"]) == (10, ["weight"], 10)
