"""The launcher's loop on every node: report twice a second, get an order, make it so.

The master's own node uses the same loop; its reports go to the membership directly, a worker's over HTTP.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantrain.nodes.engine import Generation, Trainer
from lantrain.nodes.members import Report
from lantrain.nodes.membership import ENDED_BY_HUB
from lantrain.probes.room import memory_limit, out_of_memory_kills

BEAT_SECONDS = 0.5
FROZEN = "its trainer is stopped (SIGSTOP, or a debugger)"


@dataclass(frozen=True)
class Ended:
    """How the run ended for this node."""

    code: int
    why: str


class Agent:
    """Runs this node's trainers as the hub orders."""

    def __init__(self, say: Callable[[str], None], on_phase: Callable[[str], None] = lambda phase: None) -> None:
        self.say, self.on_phase = say, on_phase
        self.trainer: Trainer | None = None
        self.last_outcome = ("", "")
        self.last_generation = 0
        self.leaving = False
        self._kills_before = 0
        self._waits_because = ""
        self._folder = Path(tempfile.mkdtemp(prefix="lantrain-"))

    def report(self) -> Report:
        """What this node is doing now."""
        self._reap()
        if self.trainer is None:
            state = "stopped" if self.last_generation else "idle"
            outcome, message = self.last_outcome
            return Report(
                "leaving" if self.leaving else state,  # type: ignore[arg-type]
                self.last_generation, 0, "", outcome, message,
            )  # fmt: skip
        said = self.trainer.beacon()
        number = self.trainer.generation.number
        return Report(
            "leaving" if self.leaving else "running", number,
            said.step if said else 0, said.phase if said else "start", "",
            FROZEN if self.trainer.frozen() else "",
        )  # fmt: skip

    def _reap(self) -> None:
        """Notice that the trainer has ended, and keep what it said last."""
        if self.trainer is None or self.trainer.running():
            return
        said = self.trainer.beacon()
        outcome = said.outcome if said else ""
        message = said.message if said else ""
        if not outcome:
            where = f"in step {said.step}, phase {said.phase}" if said else "before its first word"
            outcome, message = "failed", f"it ended without a word {where} (killed?)"
            if out_of_memory_kills() > self._kills_before:
                mib, owner = memory_limit()
                message = f"out of memory: the kernel killed it {where}; {owner} has {mib:,} MiB in all"
            self.say(f"the trainer of this machine is gone: {message}")
        self._end_trainer(outcome, message)

    def _end_trainer(self, outcome: str, message: str) -> None:
        assert self.trainer is not None
        self.trainer.kill()
        self.last_generation = self.trainer.generation.number
        self.last_outcome = (outcome, message)
        self.trainer = None

    def obey(self, order: dict[str, Any]) -> Ended | None:
        """Make `order` so. Returns how the run ended, when it has."""
        what = order["order"]
        if what in ("run", "drain"):
            self._run(order)
            if what == "drain" and self.trainer is not None:
                self.trainer.ask_to_stop()
        elif what == "wait" and order.get("why", "") != self._waits_because:
            self._waits_because = str(order.get("why", ""))
            if self._waits_because:
                self.say(f"this machine is left out for now: {self._waits_because}")
        elif what == "kill":
            if self.trainer is not None and self.trainer.generation.number == order["generation"]:
                self.say(f"ending generation {order['generation']}: {order['why']}")
                self._end_trainer("failed", self._tell_stacks() if order.get("stacks") else ENDED_BY_HUB)
        elif what == "end":
            return Ended(int(order["code"]), str(order["why"]))
        return None

    def _run(self, order: dict[str, Any]) -> None:
        number = int(order["generation"])
        if self.trainer is not None and self.trainer.generation.number != number:
            self._end_trainer("failed", "another generation began")
        if self.trainer is not None or self.last_generation >= number or self.leaving:
            return
        generation = Generation(
            number, int(order["rank"]), int(order["world"]), str(order["master_address"]),
            int(order["master_port"]), tuple(map(str, order["arguments"])), str(order.get("run", "")),
        )  # fmt: skip
        self._kills_before = out_of_memory_kills()
        self.say(f"generation {number}: starting as rank {generation.rank} of {generation.world}")
        try:
            self.trainer = Trainer(generation, self._folder / "beacon.json", dict(order.get("environment", {})))
        except OSError as error:
            self.last_generation = number
            self.last_outcome = ("failed", f"torchrun cannot be started: {error.strerror}")
            self.say(self.last_outcome[1])

    def _tell_stacks(self) -> str:
        """Show where every thread of a trainer that hangs is; returns where the main one is, in one line."""
        assert self.trainer is not None
        text, where = self.trainer.stacks()
        for line in text.splitlines():
            print(f"    {line}", flush=True)
        place = f"its trainer hung in {where}"
        self.say(place)
        return place

    def forget_generations(self) -> None:
        """A new hub counts from one again."""
        self.last_generation, self.last_outcome = 0, ("", "")

    def end_now(self, why: str) -> None:
        """End the trainer at once, if there is one."""
        if self.trainer is not None:
            self._end_trainer("failed", why)

    def stop_at_boundary(self, seconds: float, beat: Callable[[], object] = lambda: None) -> bool:
        """Ask the trainer to stop at a step boundary; end it after `seconds`. Returns whether it stopped by itself."""
        until = time.monotonic() + seconds
        while self.trainer is not None and self.trainer.running() and time.monotonic() < until:
            self.trainer.ask_to_stop()
            beat()
            time.sleep(BEAT_SECONDS / 2)
        if self.trainer is not None and self.trainer.running():
            self._tell_stacks()
        self._reap()
        stopped = self.trainer is None and self.last_outcome[0] in ("stopped", "done")
        self.end_now("the grace period is over")
        return stopped
