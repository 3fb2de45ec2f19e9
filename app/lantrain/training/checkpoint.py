"""Checkpoints that are complete or absent (invariant 4).

Every file is written under a temporary name, hashed while it is written, synced and renamed; the marker
`complete_<step>.json` with the sizes and SHA-256 of the others comes last. What has no marker does not count. The model
and meta files are nanochat's own; `state_<step>.pt` holds the optimizer and the row stream, whole tensors by name, so
it is free of the number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lantrain.data.files import sha256_of, sync_folder
from lantrain.errors import UserError
from lantrain.paths import how_to_write

SPARE_BYTES = 64 * 2**20
"""Free space that must be left after a checkpoint, for the logs and everybody else."""


class CheckpointError(UserError):
    """A checkpoint could not be written or read; earlier ones are untouched."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: the model's state dict, nanochat's meta, and our optimizer and row-stream state."""

    step: int
    model: dict[str, Tensor]
    meta: dict[str, Any]
    state: dict[str, Any]


def file_names(step: int) -> dict[str, str]:
    """Names of a checkpoint's files by role. `model` and `meta` are nanochat's names."""
    return {"model": f"model_{step:06d}.pt", "meta": f"meta_{step:06d}.json", "state": f"state_{step:06d}.pt"}


def marker_name(step: int) -> str:
    """Name of the file whose presence says that the checkpoint of `step` is complete."""
    return f"complete_{step:06d}.json"


class _HashingFile:
    """A binary file for torch.save that keeps count and hash of what goes through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.size, self._sha256 = file, 0, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._sha256.update(data)
        self.size += len(memoryview(data).cast("B"))
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def hash(self) -> str:
        return self._sha256.hexdigest()


def _write(path: Path, write: Callable[[Any], None]) -> dict[str, Any]:
    """Write `path` whole or not at all; returns its size and hash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            hashing = _HashingFile(file)
            write(hashing)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return {"bytes": hashing.size, "sha256": hashing.hash}


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(_tensor_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(item) for item in value)
    return 0


def prepare_folder(folder: Path) -> None:
    """Make the checkpoint folder and prove that it can be written. Raises CheckpointError with the reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob(".*.tmp"):
            left_over.unlink()
        _write(folder / "writable", lambda file: file.write(b""))
        (folder / "writable").unlink()
    except OSError as error:
        raise CheckpointError(_explain(error, folder), how_to_write(error, folder)) from None


def _explain(error: OSError, folder: Path) -> str:
    return f"cannot write checkpoints in {folder}: {error.strerror or error}"


def save(
    folder: Path, step: int, model: Mapping[str, Tensor], meta: Mapping[str, Any], state: Mapping[str, Any],
    *, keep_last: int = 0,
) -> Path:  # fmt: skip
    """Write a complete checkpoint and drop older ones beyond `keep_last` (0 keeps all). Returns the marker's path.

    Checkpoints of later steps are another run's, or what this one did before it was taken back; they stop counting.
    Raises CheckpointError, with every earlier checkpoint intact, when the space or the permission is missing.
    """
    need = _tensor_bytes(model) + _tensor_bytes(state)
    names = file_names(step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < need + SPARE_BYTES:
            raise CheckpointError(
                f"checkpoint of step {step} needs {(need + SPARE_BYTES) / 2**20:.1f} MiB, "
                f"{folder} has {free / 2**20:.1f} MiB free",
                "free some space, or set NANOCHAT_BASE_DIR to a bigger disk",
            )
        # Saving a step again (after a resume) must not leave an old marker beside new files.
        (folder / marker_name(step)).unlink(missing_ok=True)
        text = json.dumps(meta, indent=2).encode()
        files = {
            names["model"]: _write(folder / names["model"], lambda file: torch.save(dict(model), file)),
            names["state"]: _write(folder / names["state"], lambda file: torch.save(dict(state), file)),
            names["meta"]: _write(folder / names["meta"], lambda file: file.write(text)),
        }
        sync_folder(folder)
        _set_aside_later(folder, step)
        marker = json.dumps({"step": step, "files": files}, indent=2).encode()
        _write(folder / marker_name(step), lambda file: file.write(marker))
        sync_folder(folder)
    except (OSError, RuntimeError) as error:
        # torch reports a failed write as RuntimeError and keeps the OSError as its context.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise CheckpointError(_explain(cause, folder), how_to_write(cause, folder)) from None
    _drop_older(folder, keep_last)
    return folder / marker_name(step)


def _set_aside_later(folder: Path, step: int) -> None:
    """Rename the markers of steps after `step`: `--resume auto` would go on from them, `keep_last` drop the new one.

    The files stay, since they may be the only result of a run that was started anew by mistake.
    """
    later = [other for other in complete_steps(folder) if other > step]
    for other in later:
        os.replace(folder / marker_name(other), folder / f"earlier_{marker_name(other)}")
    if later:
        print(
            f"warning: {folder} has checkpoints of later steps, from before: {', '.join(map(str, later))}. They do not "
            "count any more (their files stay; rename earlier_complete_*.json back to use them)",
            flush=True,
        )


def _drop_older(folder: Path, keep_last: int) -> None:
    if keep_last <= 0:
        return
    for step in complete_steps(folder)[:-keep_last]:
        # The marker goes first: a checkpoint that is half removed must not look complete.
        for name in (marker_name(step), *file_names(step).values()):
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)


def _read_marker(folder: Path, step: int) -> dict[str, Any] | None:
    try:
        marker = json.loads((folder / marker_name(step)).read_bytes())
        return marker if isinstance(marker["files"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_complete(folder: Path, step: int) -> bool:
    """Whether the marker is there and every file has the size it names (hashes are compared when loading)."""
    marker = _read_marker(folder, step)
    if marker is None:
        return False
    try:
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in marker["files"].items())
    except OSError:
        return False


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint in `folder`, ascending; empty when there is no such folder."""
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"complete_(\d{6,})\.json", path.name) for path in folder.iterdir())
    return sorted(step for step in (int(match[1]) for match in found if match) if is_complete(folder, step))


def _check_hashes(folder: Path, step: int) -> None:
    marker = _read_marker(folder, step)
    assert marker is not None
    for name, entry in marker["files"].items():
        if sha256_of(folder / name) != entry["sha256"]:
            others = [str(other) for other in complete_steps(folder) if other != step]
            raise CheckpointError(
                f"{folder / name} is damaged: its SHA-256 is not the one in {marker_name(step)}",
                f"resume from another step: {', '.join(others)}" if others else "there is no other complete checkpoint",
            )


def load(folder: Path, step: int) -> Checkpoint:
    """Load a complete checkpoint. Raises CheckpointError when it is missing, incomplete or damaged.

    Files are read with weights_only: a checkpoint from somebody else cannot run code.
    """
    if not is_complete(folder, step):
        steps = complete_steps(folder)
        raise CheckpointError(
            f"no complete checkpoint of step {step} in {folder}; complete: {', '.join(map(str, steps)) or 'none'}",
            f"--resume-from-step {steps[-1]}" if steps else _other_tags(folder),
        )
    _check_hashes(folder, step)
    names = file_names(step)
    return Checkpoint(
        step,
        torch.load(folder / names["model"], map_location="cpu", weights_only=True),
        json.loads((folder / names["meta"]).read_text()),
        torch.load(folder / names["state"], map_location="cpu", weights_only=True),
    )


def _other_tags(folder: Path) -> str:
    """What else could be resumed: people forget --depth, and the folder is named after it."""
    parent = folder.parent
    tags = sorted(path.name for path in parent.iterdir() if complete_steps(path)) if parent.is_dir() else []
    if not tags:
        return "start anew"
    return f"there are checkpoints of: {', '.join(tags)}; give the same --depth or --model-tag"


def load_model(folder: Path, step: int | None = None) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    """Step, state dict and meta of a model, ours or nanochat's, for sampling and evaluation.

    Takes the newest step when none is given. Raises CheckpointError when there is none.
    """
    steps = complete_steps(folder)
    if step is None and not steps and folder.is_dir():
        # nanochat writes no marker; its newest model file with a meta beside it is as good as it gets.
        found = (re.fullmatch(r"model_(\d+)\.pt", path.name) for path in folder.iterdir())
        steps = sorted(int(m[1]) for m in found if m and (folder / file_names(int(m[1]))["meta"]).exists())
    if step is None:
        if not steps:
            raise CheckpointError(f"no checkpoint in {folder}", _other_tags(folder))
        step = steps[-1]
    names = file_names(step)
    try:
        model = torch.load(folder / names["model"], map_location="cpu", weights_only=True)
        meta = json.loads((folder / names["meta"]).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"no model of step {step} in {folder}: {error.filename} is missing") from None
    except (RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{folder / names['model']} cannot be read: {str(error).splitlines()[0]}") from None
    return step, {name.removeprefix("_orig_mod."): tensor for name, tensor in model.items()}, meta
