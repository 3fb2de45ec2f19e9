"""What a trainer tells the launcher beside it: which step and phase it has entered, and how it ended.

A small JSON file that LANTRAIN_BEACON names, replaced as a whole. It says what was *entered*, not what was finished: of
several ranks that wait for each other, the one that did not enter the step is the one that is stuck.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Phase = Literal["start", "connect", "load", "step", "evaluate", "sample", "save", "ended"]
Outcome = Literal["", "done", "stopped", "failed", "fatal"]


@dataclass(frozen=True)
class Beacon:
    """A trainer's place in the run. `outcome` is empty while it runs: done, stopped (at a step boundary with a
    checkpoint), failed (a peer or the network is to blame), fatal (starting again would not help)."""

    generation: int
    pid: int
    phase: Phase = "start"
    step: int = 0
    outcome: Outcome = ""
    message: str = ""


def tell(phase: Phase, step: int = 0, outcome: Outcome = "", message: str = "") -> None:
    """Write the beacon, if a launcher asked for one. Never raises: training does not depend on being watched."""
    path = os.environ.get("LANTRAIN_BEACON")
    if not path:
        return
    generation = os.environ.get("LANTRAIN_GENERATION", "0")
    beacon = Beacon(int(generation) if generation.isdigit() else 0, os.getpid(), phase, step, outcome, message[:1000])
    temporary = Path(f"{path}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({**asdict(beacon), "time": time.time()}))
        os.replace(temporary, path)
    except OSError as error:
        print(f"warning: cannot write LANTRAIN_BEACON={path}: {error.strerror}", flush=True)
        os.environ.pop("LANTRAIN_BEACON")


def read(path: Path, generation: int) -> Beacon | None:
    """The beacon of this generation's trainer, or None before its first word."""
    try:
        values = json.loads(path.read_text())
        values.pop("time", None)
        beacon = Beacon(**values)
    except (OSError, ValueError, TypeError):
        return None
    return beacon if beacon.generation == generation else None
