"""How OpenMP's threads wait for each other: spinning on cores of their own, asleep where other programs want them.

GNU OpenMP's threads spin for some milliseconds at the end of a parallel region before they sleep. That is the fastest
on a quiet machine. Beside one other busy program it holds a core while a thread that has work waits for one: two cores
fell to 39% of their rate, with hardly any spinning to 56%; but always sleeping costs a quiet machine 5 to 15%
(docs/log.md). libgomp spins a hundred times only when it has more threads than CPUs (GOMP_SPINCOUNT in its manual), and
looks at every wait: a second team of threads, asleep for good, is the switch.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

CONTENDED, QUIET = 0.15, 0.05
"""Seconds a second that this process's threads wait for a core: above the first they sleep, below the second spin.

One busy program beside two threads on two cores: 0.5 to 0.9 however they wait. A quiet machine: 0.00 to 0.03."""
INTERVAL_SECONDS = 1.0
QUIET_LOOKS = 5
"""Quiet seconds one after the other until threads spin again: a desktop's programs come and go."""
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def openmp() -> ctypes.CDLL | None:
    """The GNU OpenMP that torch has loaded, or None where it uses another or none."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        path = line.split(maxsplit=5)[-1]
        if "libgomp" in path.rpartition("/")[2]:
            library = ctypes.CDLL(path)
            return library if hasattr(library, "GOMP_parallel") else None
    return None


def delays(tasks: Path = Path("/proc/self/task")) -> dict[str, int]:
    """Nanoseconds that each thread of this process has waited for a core; empty where the kernel does not say."""
    found = {}
    for task in tasks.iterdir() if tasks.exists() else ():
        try:
            found[task.name] = int((task / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # the thread has ended, or the kernel does not count
    return found


class SleepingTeam:
    """A second team of OpenMP threads that does nothing: while it is there, libgomp's threads hardly spin."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self._leave, made = threading.Event(), threading.Event()
        nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)

        def member() -> None:
            # libgomp keeps a team for each thread that begins a parallel region, and ends it with that thread.
            library.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
            made.set()
            self._leave.wait()

        self._thread = threading.Thread(target=member, name="sleeping OpenMP team", daemon=True)
        self._thread.start()
        made.wait()

    def close(self) -> None:
        """End the team: the others spin again."""
        self._leave.set()
        self._thread.join()


class Waiting:
    """Watches whether other programs take cores from this process, and lets its threads spin or sleep accordingly."""

    def __init__(self, threads: int) -> None:
        """`threads` is the size of torch's team; with one there is nothing to wait for. The environment has its way."""
        self._library = openmp() if threads > 1 and not any(os.environ.get(name) for name in SETTINGS) else None
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._size = max(2, cpus - threads + 2)  # of teams that are more than the CPUs together
        self._team: SleepingTeam | None = None
        self._quiet_looks, self._told = 0, False
        self._since, self._before = time.monotonic(), delays()

    @property
    def asleep(self) -> bool:
        """Whether threads sleep now instead of spinning."""
        return self._team is not None

    def observe(self) -> str | None:
        """Look again, a second after the last time at the earliest. Returns a line for the log the first time."""
        elapsed = time.monotonic() - self._since
        if self._library is None or elapsed < INTERVAL_SECONDS:
            return None
        now = delays()
        share = sum(ns - self._before.get(thread, 0) for thread, ns in now.items()) / 1e9 / elapsed
        self._since, self._before = time.monotonic(), now
        self.decide(share)
        if self._told or not self.asleep:
            return None
        self._told = True
        return f"other programs want the cores ({share:.0%} of one waited for): threads wait asleep while that is so"

    def decide(self, share: float) -> None:
        """Spin or sleep, by the seconds a second that threads waited for a core since the last look."""
        self._quiet_looks = self._quiet_looks + 1 if share < QUIET else 0
        if self._team is None and share > CONTENDED and self._library is not None:
            self._team = SleepingTeam(self._library, self._size)
        elif self._quiet_looks >= QUIET_LOOKS:
            self.close()

    def close(self) -> None:
        """Spin from now on."""
        if self._team is not None:
            self._team.close()
            self._team = None
