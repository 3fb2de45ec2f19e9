"""How many cores this process may use, and how many threads to give PyTorch.

A container sees every core of its host whatever its CPU quota (measured: `cpus: 0.5` still shows all cores to
PyTorch), and threads beyond the quota only wait for each other.
"""

from __future__ import annotations

import math
import os
from pathlib import Path


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


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process can really use: the smaller of CPU affinity and cgroup quota, at least one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cgroup_quota(root)
    return max(1, min(affinity, math.ceil(quota))) if quota is not None else affinity


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
    reason = f"{cores} usable cores" + (f" / {ranks_here} ranks" if ranks_here > 1 else "")
    return max(1, cores // ranks_here), reason
