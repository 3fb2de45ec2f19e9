"""How many cores this process may use, which of them, and how many threads to give PyTorch.

A container sees every core of its host whatever its CPU quota (measured: `cpus: 0.5` still shows all cores to
PyTorch), and threads beyond the quota only wait for each other. Two hyperthreads of a core share its multipliers: a
matrix product gains nothing from the second. Efficiency cores do add to performance cores, but each product is cut into
equal parts, and the slowest part decides: which is faster is measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
MUCH_SLOWER = 0.8
"""Cores below this share of the fastest one's capacity or clock are efficiency cores; the best cores of a chip of equal
ones differ by a few percent."""


def cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPU quota of this cgroup in cores (cgroup v2, then v1), or None without one."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        micros = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        return micros / int((root / "cpu" / "cpu.cfs_period_us").read_text()) if micros > 0 else None
    except (OSError, ValueError):
        return None


def cpus_allowed() -> set[int]:
    """Logical CPUs that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _list(path: Path) -> set[int]:
    """A list of CPUs as the kernel writes them, "0-7,16"; empty without the file."""
    try:
        ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
        return {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def physical_cores(cpus: Iterable[int], root: Path = CPUS) -> int:
    """Cores that the logical CPUs `cpus` belong to: hyperthreads of one core count once."""
    return len({min(_list(root / f"cpu{cpu}" / "topology" / "thread_siblings_list") or {cpu}) for cpu in cpus})


def performance_cpus(cpus: set[int], root: Path = CPUS) -> set[int]:
    """Those of `cpus` that are on performance cores: all of them where the cores are alike or nothing is known."""
    named = _list(root.parent.parent / "cpu_core" / "cpus") & cpus  # Intel's hybrid chips
    if named:
        return named
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        found = {cpu: _number(root / f"cpu{cpu}" / file) for cpu in cpus}
        speeds = {cpu: speed for cpu, speed in found.items() if speed}
        if len(speeds) == len(cpus):
            return {cpu for cpu, speed in speeds.items() if speed >= MUCH_SLOWER * max(speeds.values())}
    return set(cpus)


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process can really use: the smaller of its physical cores and cgroup quota, at least one."""
    cores, quota = physical_cores(cpus_allowed()), cgroup_quota(root)
    return max(1, min(cores, math.ceil(quota))) if quota is not None else cores


def _run_on(cpus: set[int]) -> None:
    """Keep every thread of this process, and those to come, on `cpus`."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cpus)


def settle_threads(rate: Callable[[], float], root: Path = CPUS) -> tuple[int, str]:
    """Give PyTorch its threads, and cores: those of `choose_threads`, on performance cores alone where that is faster.

    `rate` measures the speed with the threads as they are. It is asked only where one process has a chip with both
    kinds of cores for itself, with no quota and no OMP_NUM_THREADS.
    """
    import torch

    threads, reason = choose_threads()
    cpus = cpus_allowed()
    fast = performance_cpus(cpus, root)
    all_are_ours = threads == physical_cores(cpus, root) and not os.environ.get("OMP_NUM_THREADS")
    if fast != cpus and all_are_ours:
        torch.set_num_threads(threads)
        with_all, few = rate(), physical_cores(fast, root)
        torch.set_num_threads(few)
        _run_on(fast)
        fast_alone = rate()
        rates = f"{fast_alone / 1e9:.0f} GFLOP/s, with the efficiency cores {with_all / 1e9:.0f}"
        if fast_alone >= with_all:
            threads, reason = few, f"{few} performance cores: {rates}"
        else:
            _run_on(cpus)
            reason = f"{reason}: {few} performance cores alone {rates}"
    torch.set_num_threads(threads)
    return threads, reason


def choose_threads() -> tuple[int, str]:
    """Threads for PyTorch's operators and the reason: OMP_NUM_THREADS when set, else the usable cores.

    The ranks of a machine share its cores: torchrun says how many ranks its node has, LANTRAIN_NODES_ON_HOST how many
    nodes (containers) are on this machine. torchrun sets OMP_NUM_THREADS=1 by itself when it starts several ranks.
    """
    nodes = os.environ.get("LANTRAIN_NODES_ON_HOST", "")
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * (int(nodes) if nodes.isdigit() and int(nodes) else 1)
    given = os.environ.get("OMP_NUM_THREADS", "")
    cores = usable_cores()
    if given.isdigit() and int(given) > 0:
        reason = f"OMP_NUM_THREADS={given}"
        if given == "1" and ranks_here > 1 and cores >= 2 * ranks_here:
            reason += f", torchrun's default for several ranks a node; OMP_NUM_THREADS={cores // ranks_here} uses all"
        return int(given), reason
    logical = len(cpus_allowed())
    hyperthreads = f", {logical} hyperthreads" if logical > physical_cores(cpus_allowed()) else ""
    reason = f"{cores} usable cores{hyperthreads}" + (f" / {ranks_here} ranks" if ranks_here > 1 else "")
    return max(1, cores // ranks_here), reason
