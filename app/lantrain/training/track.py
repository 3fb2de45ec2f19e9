"""What a run tells: the step line on the terminal, metrics.jsonl beside the checkpoints, and a heartbeat file."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lantrain.errors import UserError
from lantrain.paths import how_to_write

EMA_BETA = 0.9
UNTIMED_STEPS = 10
"""The first steps are left out of the total time and the ETA, as in nanochat."""


@dataclass
class Progress:
    """Running figures of a run; `to_dict` goes into the checkpoint as nanochat's loop_state."""

    smooth_loss: float = 0.0
    total_seconds: float = 0.0
    timed_steps: int = 0
    min_val_bpb: float = float("inf")
    val_bpb: float | None = None
    val_step: int = -1
    step_seconds: float = 0.0
    began: float = field(default_factory=time.time)
    outliers: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """nanochat's loop_state, and the number of steps inside the total time."""
        return {
            "min_val_bpb": self.min_val_bpb,
            "smooth_train_loss": self.smooth_loss,
            "total_training_time": self.total_seconds,
            "timed_steps": self.timed_steps,
            "val_step": self.val_step,
            "step_seconds": self.step_seconds,
            "began": self.began,
            "outliers": self.outliers,
        }

    @classmethod
    def from_dict(cls, loop_state: dict[str, Any], val_bpb: float | None) -> Progress:
        """Restore from a checkpoint's meta."""
        return cls(
            loop_state["smooth_train_loss"], loop_state["total_training_time"], loop_state.get("timed_steps", 0),
            loop_state["min_val_bpb"], val_bpb, loop_state.get("val_step", -1), loop_state.get("step_seconds", 0.0),
            loop_state.get("began", time.time()), loop_state.get("outliers", []),
        )  # fmt: skip

    def add_step(self, step: int, loss: float, seconds: float) -> float:
        """Count the step that ended as number `step` (1-based); returns the debiased moving average of the loss."""
        self.smooth_loss = EMA_BETA * self.smooth_loss + (1 - EMA_BETA) * loss
        self.step_seconds += seconds
        if step > UNTIMED_STEPS:
            self.total_seconds += seconds
            self.timed_steps += 1
        return self.smooth_loss / (1 - EMA_BETA**step)

    def effective_share(self, now: float) -> tuple[float, float]:
        """Share of the time since the run began that went into steps which count (ETTR), and that time in hours.

        Steps that were lost with a machine and done again count once; waiting, starting and saving do not count.
        """
        elapsed = max(now - self.began, 1e-9)
        return min(1.0, self.step_seconds / elapsed), elapsed / 3600

    def eta_seconds(self, step: int, num_iterations: int, seconds: float) -> float:
        """Seconds to the end of the run, by the mean of the timed steps, or by this step while there is none."""
        mean = self.total_seconds / self.timed_steps if self.timed_steps else seconds
        return (num_iterations - step) * mean


class OutlierWatch:
    """Mean and deviation of the latest losses, by exponential averages; the same on every rank.

    llm.c logs and skips steps whose loss is an outlier; a spike on a small batch can undo hours.
    """

    WARMUP, BETA = 50, 0.98

    def __init__(self) -> None:
        self.count, self.mean, self.square = 0.0, 0.0, 0.0

    def to_list(self) -> list[float]:
        """For the checkpoint."""
        return [self.count, self.mean, self.square]

    @classmethod
    def from_list(cls, values: list[float]) -> OutlierWatch:
        """Restore what `to_list` gave; an empty list is a fresh start."""
        watch = cls()
        if values:
            watch.count, watch.mean, watch.square = values
        return watch

    def sigmas_above(self, loss: float) -> float:
        """How many standard deviations `loss` is above the mean; 0 during the first WARMUP steps."""
        if self.count < self.WARMUP:
            return 0.0
        debias = 1 - self.BETA**self.count
        mean = self.mean / debias
        deviation = max(self.square / debias - mean**2, 1e-12) ** 0.5
        return (loss - mean) / deviation

    def add(self, loss: float) -> None:
        """Count a step's loss."""
        self.count += 1
        self.mean = self.BETA * self.mean + (1 - self.BETA) * loss
        self.square = self.BETA * self.square + (1 - self.BETA) * loss**2


def duration(seconds: float) -> str:
    """`seconds` for a person: 42s, 3.5m, 7.2h, 3.1d."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds:.0f}s"


def step_line(
    step: int, num_iterations: int, *, loss: float, lr_multiplier: float, seconds: float, tokens: int, mfu: float,
    epoch: int, total_seconds: float, eta_seconds: float,
) -> str:  # fmt: skip
    """The line of one finished step, in the form of the report and of nanochat."""
    return (
        f"step {step:05d}/{num_iterations:05d} ({100 * step / num_iterations:.2f}%) | loss: {loss:.6f} | "
        f"lrm: {lr_multiplier:.2f} | dt: {seconds * 1000:.2f}ms | tok/sec: {int(tokens / seconds):,} | "
        f"mfu: {100 * mfu:.2f} | epoch: {epoch} | total time: {total_seconds / 60:.2f}m | eta: {duration(eta_seconds)}"
    )


class Metrics:
    """metrics.jsonl: one JSON object a step or evaluation, written at once, so that a crash loses nothing.

    While the disk is full, records wait in memory, and training goes on.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Keep what earlier parts of this run wrote up to `resumed_step`; a fresh run (0) starts an empty file.

        Records are in the order of their steps, so what is kept is the file's beginning: cutting the rest off takes no
        space. Raises UserError when the file cannot be written.
        """
        self._path, self._waiting, self._warned = path, b"", False
        try:
            self._file = path.open("ab", buffering=0)
            kept = 0
            for line in path.read_bytes().splitlines(keepends=True) if resumed_step > 0 else []:
                if not line.endswith(b"\n") or _step_of(line) > resumed_step:
                    break
                kept += len(line)
            os.ftruncate(self._file.fileno(), kept)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}", how_to_write(error, path.parent)) from None

    def add(self, **values: Any) -> None:
        """Append one record; its key `step` is the number of finished steps."""
        self._waiting += json.dumps(values).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting:  # a disk that is nearly full takes part of a line
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._warned = False
        except OSError as error:
            if not self._warned:
                print(f"warning: cannot write {self._path}: {error.strerror}; its records wait in memory", flush=True)
            self._warned = True

    def close(self) -> None:
        """Write what waits, if it can be written now, and close the file."""
        self._write()
        self._file.close()


def _step_of(line: bytes) -> float:
    """Step of a record; a line cut short by a crash counts as after everything."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def heartbeat(step: int) -> None:
    """Touch the file that LANTRAIN_HEARTBEAT names: a container is healthy while steps are made."""
    path = os.environ.get("LANTRAIN_HEARTBEAT")
    if path:
        try:
            Path(path).write_text(f"{step}\n")
        except OSError as error:
            print(f"warning: cannot write LANTRAIN_HEARTBEAT={path}: {error.strerror}", flush=True)
            os.environ.pop("LANTRAIN_HEARTBEAT")
