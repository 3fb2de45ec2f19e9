"""One generation on one node: a torchrun that runs the trainer, started, watched and ended by the launcher.

torchrun is static with no restarts of its own (docs/internals.md: its elastic modes lose nodes). It flattens every exit
code to 1 and starts the trainer in a session of its own, so how the trainer ended is read from the beacon, and ending a
generation means ending all descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lantrain.cluster import beacon, stacks

PR_SET_CHILD_SUBREAPER = 36
STOP_SIGNAL = signal.SIGUSR1
"""Asks a trainer to stop at the next step boundary with a checkpoint."""


@dataclass(frozen=True)
class Generation:
    """What a node needs to know to take part in a generation."""

    number: int
    rank: int
    world: int
    master_address: str
    master_port: int
    arguments: tuple[str, ...]
    run: str = ""
    """The hub's own mark: generations of a hub that was restarted count from one again."""


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, so that none of them is lost sight of (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def torchrun_command(generation: Generation) -> list[str]:
    """The torchrun of a generation: static, one trainer, no restarts."""
    return [
        sys.executable, "-m", "lantrain.nodes.torchrun",
        f"--nnodes={generation.world}", "--nproc_per_node=1", f"--node_rank={generation.rank}",
        f"--master_addr={generation.master_address}", f"--master_port={generation.master_port}",
        "--max-restarts=0", "--monitor-interval=0.2", "--shutdown-timeout=90",
        f"--rdzv-id={generation.run}g{generation.number}",
        "-m", "scripts.base_train", "--", *generation.arguments,
    ]  # fmt: skip


class Trainer:
    """The processes of one generation on this node."""

    def __init__(self, generation: Generation, beacon_path: Path, environment: dict[str, str]) -> None:
        """Start them. `environment` is added to this process's own. Raises OSError when no process can be made."""
        self.generation, self.beacon_path = generation, beacon_path
        self.stacks_path = beacon_path.with_suffix(".stacks")
        for path in (beacon_path, self.stacks_path):
            path.unlink(missing_ok=True)
        variables = {
            # Of each lost connection torch and torchrun would print some 40 lines that name no machine.
            "TORCH_CPP_LOG_LEVEL": "ERROR", "LOGLEVEL": "CRITICAL",
            **os.environ, **environment,
            "LANTRAIN_BEACON": str(beacon_path), "LANTRAIN_STACKS": str(self.stacks_path),
            "LANTRAIN_GENERATION": str(generation.number),
            "LANTRAIN_RUN": generation.run, "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        variables.pop("TOKEN", None)  # the hub's alone; a trainer's crash report may list its environment
        self.process = subprocess.Popen(torchrun_command(generation), env=variables, start_new_session=True)
        self._asked = False

    def running(self) -> bool:
        """Whether torchrun is still there."""
        return self.process.poll() is None

    def beacon(self) -> beacon.Beacon | None:
        """The trainer's last word."""
        return beacon.read(self.beacon_path, self.generation.number)

    def ask_to_stop(self) -> None:
        """Ask for a stop at the next step boundary, once the trainer is there to hear it."""
        said = self.beacon()
        if self._asked or said is None or said.phase in ("start", "connect", "load") or said.outcome:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(said.pid, STOP_SIGNAL)
            self._asked = True

    def frozen(self) -> bool:
        """Whether the trainer has been stopped (SIGSTOP, a debugger) and takes no step until it is continued."""
        said = self.beacon()
        with contextlib.suppress(psutil.Error):
            return said is not None and psutil.Process(said.pid).status() == psutil.STATUS_STOPPED
        return False

    def stacks(self) -> tuple[str, str]:
        """The stacks of all threads of the trainer, and in one phrase where it is; no stacks if it does not answer."""
        said = self.beacon()
        if said is None:
            return "", "before its first word"
        text = stacks.ask(said.pid, self.stacks_path)
        place = f"step {said.step}, phase {said.phase}"
        if not text:
            return "", f"{place}; its stack cannot be had: {stacks.state(said.pid)}"
        return text, f"{place}: {stacks.where(text)}"

    def kill(self) -> None:
        """End torchrun, the trainer and whatever they started, at once."""
        kill_descendants(self._family())
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process inside a dead disk's driver cannot be ended
            self.process.wait(timeout=10)

    def _family(self) -> Sequence[psutil.Process]:
        found: dict[int, psutil.Process] = {}
        said = self.beacon()
        for pid in (self.process.pid, said.pid if said else None):
            if pid is None:
                continue
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if psutil.Process().pid in [parent.pid for parent in process.parents()]:
                    found |= {p.pid: p for p in [process, *process.children(recursive=True)]}
        return list(found.values())


def kill_descendants(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL `processes` and wait until they are gone; stopped (SIGSTOP) ones end too."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
