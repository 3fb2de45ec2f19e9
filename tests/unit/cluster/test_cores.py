from __future__ import annotations

import os
from pathlib import Path

import pytest

from lantrain.cluster.cores import cgroup_quota, choose_threads, usable_cores


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
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_cores_are_the_smaller_of_affinity_and_quota(tmp_path: Path) -> None:
    assert usable_cores(_v2(tmp_path, "30000 100000")) == 1
    assert usable_cores(_v2(tmp_path, "6400000 100000")) == len(os.sched_getaffinity(0))


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
    assert choose_threads() == (1, f"{usable_cores()} usable cores / {2 * usable_cores()} ranks")
