"""When checkpoints are made, and how without stopping: a consistent copy is taken, a thread writes it.

By step (--save-every), by time (--save-minutes), before a long evaluation, and at the end. A machine may die at any
time, so what it costs is weighed against what would be lost: by time, all of it together stays below 2% of the run.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lantrain.training import checkpoint

SHARE_OF_TIME = 0.02
"""Checkpoints by time may take this share of the run: after one that cost c seconds none comes for c / 0.02."""


class Saver:
    """Writes the leader's checkpoints; on other ranks it only knows what is due by step."""

    def __init__(
        self, folder: Path, *, every_steps: int, every_seconds: float, keep_last: int, saved_step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`every_steps` and `every_seconds` of 0 or less are off; `saved_step` is what is on the disk already."""
        self.folder, self.every_steps, self.every_seconds, self.keep_last = (
            folder,
            every_steps,
            every_seconds,
            keep_last,
        )
        self.saved_step = saved_step
        self._clock = clock
        self._last = clock()
        self._pause = every_seconds
        self._writer: threading.Thread | None = None
        self._failure: checkpoint.CheckpointError | None = None

    def due_by_step(self, step: int) -> bool:
        """Whether --save-every asks for one after `step`; the same on every rank."""
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0

    def due_by_time(self) -> bool:
        """Whether one is due by the leader's clock, and nothing is being written."""
        if self.every_seconds <= 0 or (self._writer is not None and self._writer.is_alive()):
            return False
        return self._clock() - self._last >= self._pause

    def save(
        self, step: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], rows: Mapping[str, Any],
        meta: Mapping[str, Any], *, began: float, final: bool,
    ) -> None:  # fmt: skip
        """Write the checkpoint of `step`: now when `final`, else in a thread from a copy taken now.

        `began` is when the ranks began to gather it, by this saver's clock. Raises CheckpointError for a final one that
        failed; the failure of another is told by a line, and training goes on.
        """
        self.wait()
        if step == self.saved_step:
            return
        if final:
            self._write(step, model, {"optimizer": dict(optimizer), "rows": dict(rows)}, meta, began, 0.0)
            if self._failure is not None:
                raise self._failure
            return
        model = {name: tensor.detach().clone() for name, tensor in model.items()}
        # The owned state was gathered into tensors of its own; the tables' state is the optimizer's, and goes on.
        copy = {name: tensor.clone() for name, tensor in optimizer.items()}
        blocked = self._clock() - began
        arguments = (step, model, {"optimizer": copy, "rows": dict(rows)}, meta, began, blocked)
        self._writer = threading.Thread(target=self._write, args=arguments, name="checkpoint writer")
        self._writer.start()

    def _write(
        self, step: int, model: Mapping[str, Tensor], state: Mapping[str, Any], meta: Mapping[str, Any],
        began: float, blocked: float,
    ) -> None:  # fmt: skip
        self._failure = None
        try:
            checkpoint.save(self.folder, step, model, meta, state, keep_last=self.keep_last)
        except checkpoint.CheckpointError as error:
            self._failure = error
            line = f"warning: {error}; training goes on, the last checkpoint is as it was"
            print(line, file=sys.stderr, flush=True)
        else:
            self.saved_step = step
            seconds = self._clock() - began
            how = f"{blocked:.1f} s of them in everyone's way" if blocked else "training waited for it"
            print(f"Saved checkpoint of step {step} in {self.folder} ({seconds:.1f} s, {how})", flush=True)
        self._last = self._clock()
        self._pause = max(self.every_seconds, (self._last - began) / SHARE_OF_TIME)

    def wait(self) -> None:
        """Let a checkpoint that is being written be finished."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
