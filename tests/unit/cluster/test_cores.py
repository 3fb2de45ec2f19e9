from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lantrain.cluster import cores
from lantrain.cluster.cores import (
    cgroup_quota,
    choose_threads,
    performance_cpus,
    physical_cores,
    settle_threads,
    usable_cores,
)


def _v2(root: Path, text: str) -> Path:
    (root / "cpu.max").write_text(text)
    return root


def test_quota_of_cgroup_v2(tmp_path: Path) -> None:
    assert cgroup_quota(_v2(tmp_path, "150000 100000\n")) == 1.5
    assert cgroup_quota(_v2(tmp_path, "max 100000\n")) is None


def test_quota_of_cgroup_v1(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("50000")
    assert cgroup_quota(tmp_path) == 0.5
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1")
    assert cgroup_quota(tmp_path) is None


def test_no_cgroup_files_is_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path) is None
    assert usable_cores(tmp_path) == physical_cores(os.sched_getaffinity(0))


def test_cores_are_the_smaller_of_affinity_and_quota(tmp_path: Path) -> None:
    assert usable_cores(_v2(tmp_path, "30000 100000")) == 1
    assert usable_cores(_v2(tmp_path, "6400000 100000")) == physical_cores(os.sched_getaffinity(0))


def test_threads_follow_omp_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose_threads() == (3, "OMP_NUM_THREADS=3")
    monkeypatch.setenv("OMP_NUM_THREADS", "nonsense")
    assert choose_threads()[0] == usable_cores()


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * usable_cores()))
    assert choose_threads()[0] == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("LANTRAIN_NODES_ON_HOST", str(2 * usable_cores()))
    assert choose_threads()[0] == 1
    assert choose_threads()[1].endswith(f" / {2 * usable_cores()} ranks")


def _chip(folder: Path, siblings: list[str], capacities: list[int] | None = None) -> Path:
    """A folder as /sys/devices/system/cpu: one entry a logical CPU."""
    root = folder / "devices" / "system" / "cpu"
    for cpu, threads in enumerate(siblings):
        (root / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (root / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(threads + "\n")
        if capacities:
            (root / f"cpu{cpu}" / "cpu_capacity").write_text(f"{capacities[cpu]}\n")
    return root


def test_hyperthreads_of_a_core_count_once(tmp_path: Path) -> None:
    root = _chip(tmp_path, ["0,4", "1,5", "2-3", "2-3", "0,4", "1,5"])
    assert physical_cores(range(6), root) == 3
    assert physical_cores({0, 4}, root) == 1
    assert physical_cores({4, 5}, root) == 2
    assert physical_cores({0, 1}, tmp_path / "nothing") == 2


def test_performance_cores_by_capacity_clock_or_intels_list(tmp_path: Path) -> None:
    alone = ["0", "1", "2", "3"]
    assert performance_cpus({0, 1, 2, 3}, _chip(tmp_path / "arm", alone, [1024, 446, 1024, 446])) == {0, 2}
    assert performance_cpus({1, 3}, tmp_path / "arm/devices/system/cpu") == {1, 3}
    equal = _chip(tmp_path / "amd", alone)
    assert performance_cpus({0, 1, 2, 3}, equal) == {0, 1, 2, 3}
    for cpu, hertz in enumerate([5_000_000, 4_850_000, 4_900_000, 3_600_000]):
        (equal / f"cpu{cpu}/cpufreq").mkdir()
        (equal / f"cpu{cpu}/cpufreq/cpuinfo_max_freq").write_text(str(hertz))
    assert performance_cpus({0, 1, 2, 3}, equal) == {0, 1, 2}
    intel = _chip(tmp_path / "intel", ["0-1", "0-1", "2", "3"])
    (intel.parent.parent / "cpu_core").mkdir()
    (intel.parent.parent / "cpu_core" / "cpus").write_text("0-1\n")
    assert performance_cpus({0, 1, 2, 3}, intel) == {0, 1}


@pytest.mark.parametrize(("alone", "together", "runs_on"), [(2e9, 1e9, {0}), (1e9, 2e9, {0, 1})])
def test_efficiency_cores_are_used_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: float, together: float, runs_on: set[int]
) -> None:
    root = _chip(tmp_path, ["0", "1"], [1024, 400])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given: list[set[int]] = [{0, 1}]
    monkeypatch.setattr(cores, "cpus_allowed", lambda: {0, 1})
    monkeypatch.setattr(cores, "_run_on", given.append)
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    threads, reason = settle_threads(lambda: together if len(given) == 1 else alone, root)
    assert (threads, given[-1]) == (len(runs_on), runs_on)
    assert f"{alone / 1e9:.0f} GFLOP/s, with the efficiency cores {together / 1e9:.0f}" in reason
    assert "1 performance cores" in reason
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert settle_threads(lambda: pytest.fail("nothing to choose"), root) == (2, "OMP_NUM_THREADS=2")


def test_all_threads_of_the_process_move() -> None:
    before, left = os.sched_getaffinity(0), threading.Event()
    other = threading.Thread(target=left.wait)
    other.start()
    try:
        cores._run_on({min(before)})
        assert all(os.sched_getaffinity(int(task.name)) == {min(before)} for task in Path("/proc/self/task").iterdir())
    finally:
        cores._run_on(before)
        left.set()
        other.join()
