"""What a rank needs, and what a machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from lantrain.probes.room import disk, estimate, free_memory, memory, memory_limit, out_of_memory_kills

FLAGS = ["--depth=4", "--max-seq-len=512", "--device-batch-size=2", "--total-batch-size=4096", "--num-iterations=10"]
VOCABULARY = 32768


def test_estimate_follows_from_the_models_sizes() -> None:
    """Depth 4: width 256, two value tables of the width, 36.7 million parameters in all."""
    alone = estimate(FLAGS, VOCABULARY, 1, leader=False).parts
    mib = VOCABULARY * 256 * 4 / 2**20
    assert alone["weights"] == pytest.approx(36.7e6 * 4 / 2**20, abs=2)
    assert alone["logits"] == 2 * 512 * VOCABULARY * 4 / 2**20
    assert alone["gradients"] == pytest.approx(alone["weights"] - 3 * mib, abs=1)  # none for the tables
    assert alone["optimizer"] > 2 * 3 * mib
    rounded = estimate([*FLAGS, "--moments-dtype=bfloat16"], VOCABULARY, 1, leader=False).parts
    assert alone["optimizer"] - rounded["optimizer"] == pytest.approx(4 * mib, abs=1)  # three tables and the head


def test_ranks_share_the_optimizer_state_and_the_leader_needs_a_copy() -> None:
    one, two, four = (estimate(FLAGS, VOCABULARY, world, leader=False) for world in (1, 2, 4))
    assert one.parts["optimizer"] > two.parts["optimizer"] > four.parts["optimizer"]
    assert (one.sends, two.sends < four.sends) == (0, True)
    leader = estimate(FLAGS, VOCABULARY, 2, leader=True)
    assert leader.total - two.total == pytest.approx(leader.checkpoint, abs=2)


def test_micro_batch_is_no_larger_than_the_step() -> None:
    many = ["--device-batch-size=32" if "device" in flag else flag for flag in FLAGS]
    assert estimate(many, VOCABULARY, 1, leader=False).parts["logits"] == 8 * 512 * VOCABULARY * 4 / 2**20


@pytest.mark.parametrize(("free", "status"), [(10_000, "ok"), (1_550, "warn"), (1_300, "warn"), (900, "fail")])
def test_memory_says_what_it_needs_and_has(free: int, status: str) -> None:
    result = memory({"weights": 1000, "activations": 500}, free, "the container's limit")
    assert result.status == status
    assert result.seen == f"needs about 1,500 MiB, has {free:,} free (the container's limit)"
    assert "weights 1,000" in result.tried


def test_containers_limit_counts_when_it_is_the_smaller(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{300 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{200 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {50 * 2**20}\n")
    assert free_memory(tmp_path) == (150, "the container's limit")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path)[1] == "this machine"


def test_containers_limit_of_the_older_cgroup(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{100 * 2**20}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{40 * 2**20}\n")
    (folder / "memory.stat").write_text("total_inactive_file 0\n")
    assert free_memory(tmp_path) == (60, "the container's limit")


@pytest.mark.parametrize(
    ("limit", "counts"),
    [("memory.max", "memory.events"), ("memory/memory.limit_in_bytes", "memory/memory.oom_control")],
    ids=["cgroup 2", "cgroup 1"],
)
def test_kills_for_lack_of_memory_are_counted(tmp_path: Path, limit: str, counts: str) -> None:
    (tmp_path / "memory").mkdir()
    assert out_of_memory_kills(tmp_path) == 0, "the kernel does not say"
    assert memory_limit(tmp_path)[1] == "this machine"
    (tmp_path / limit).write_text(f"{300 * 2**20}\n")
    (tmp_path / counts).write_text("oom 4\noom_kill 3\noom_group_kill 0\n")
    assert out_of_memory_kills(tmp_path) == 3
    assert memory_limit(tmp_path) == (300, "this container")
    (tmp_path / limit).write_text("9223372036854771712\n")
    assert memory_limit(tmp_path)[1] == "this machine"


@pytest.mark.parametrize(("free", "status"), [(500, "ok"), (250, "warn"), (99, "fail")])
def test_disk_has_room_for_the_kept_checkpoints_and_one_more(free: int, status: str) -> None:
    result = disk(Path("/data"), 100, 3, free)
    assert result.status == status
    assert "needs 400 MiB" in result.seen


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert disk(tmp_path / "a" / "b", 1, 3).status == "ok"
