"""Machines with less: of processor, of memory, of disk; and volumes that cannot be written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.hosts import Check, Host, Lan


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own size, in memory; its files are there again after a restart of the container."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # the container that has it goes later


def fill_up(file: Path) -> None:
    """Write to `file` until the disk is full to the last byte."""
    with file.open("wb", buffering=0) as ballast:
        for size in (2**20, 2**12, 1):
            try:
                while ballast.write(bytes(size)):
                    pass
            except OSError:
                continue


def test_a_full_disk_costs_checkpoints_and_nothing_else(lan: Lan, check: Check, tmp_path: Path) -> None:
    """Metrics and checkpoints have no room for a while; those from before stay, and those after have every step.

    A change of the membership then costs the steps since the last checkpoint, and does not end the run.
    """
    with small_disk(tmp_path / "disk", "200m") as disk:
        lan.fill(disk)
        master, worker = lan.up_master(folder=disk), lan.up_worker()
        lan.until(lambda: master.says("^Saved checkpoint of step 20 "), "first checkpoint")
        fill_up(disk / "ballast")
        lan.until(
            lambda: master.says("^warning: .* MiB free .*; training goes on, the last checkpoint is as it was"),
            "warning of a checkpoint that has no room",
        )
        assert master.says(r"^warning: cannot write \S+/metrics\.jsonl: No space left on device"), master.logs()
        assert re.search(r"^complete_0*20\.json$", master.exec("ls /data/base_checkpoints/lan"), re.M)
        worker.stop()
        lan.until_again(1, after=1)
        saved = master.logs().count("Saved checkpoint")
        (disk / "ballast").unlink()
        lan.until(lambda: master.logs().count("Saved checkpoint") > saved, "a checkpoint again")
        lan.end()
        assert lan.codes() == {"i9": 0, "i5": 128 + 15}, lan.explain()
        assert "Traceback" not in lan.explain()
        assert lan.generations() == [2, 1]
        assert master.says(f"^Saved checkpoint of step {lan.step()} "), master.logs()
        check(None)


def end_by_itself(lan: Lan, host: Host) -> str:
    """Log of a host that cannot start: it ends soon, and for good."""
    assert host.code(90) == 0, lan.explain()
    log = host.logs()
    assert "Traceback" not in log
    assert "ending with code 0, so that Docker does not start this again" in log, log
    assert host.container.attrs["RestartCount"] == 0, log
    return log


@pytest.mark.parametrize("with_data", [False, True])
def test_a_volume_of_another_user_is_one_line_and_no_endless_restarts(
    lan: Lan, tmp_path: Path, with_data: bool
) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()
    if with_data:
        lan.fill(folder)
        shutil.chown(folder, 0, 0)
    log = end_by_itself(lan, lan.up_master(40, folder=folder, NODES="1"))
    assert re.search(r"^error: .*Permission denied.* sudo chown -R 1000:1000", log, re.M), log


def test_a_read_only_volume_is_one_line_and_no_endless_restarts(lan: Lan, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "200m") as disk:
        lan.fill(disk)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        log = end_by_itself(lan, lan.up_master(40, folder=disk, NODES="1"))
        assert re.search(r"^error: .*Read-only file system", log, re.M), log


def test_a_node_that_runs_out_of_memory_is_named_on_every_node(lan: Lan, check: Check) -> None:
    """The limit passes the check at joining; a program beside the trainer then takes what is left."""
    limit = 1200
    master = lan.up_master()
    worker = lan.up_worker(options={"mem_limit": f"{limit}m", "memswap_limit": f"{limit}m"})
    lan.until_step(30)
    trainer = worker.trainer()
    Path(f"/proc/{trainer}/oom_score_adj").write_text("1000")  # so that it is the one that the kernel takes
    worker.exec(f"python -c 'held = bytearray({limit} << 20)' || true")
    lan.until(lambda: not os.path.exists(f"/proc/{trainer}"), "death of the trainer")
    lan.until(lambda: worker.says(f"is gone: out of memory: .* has {limit:,} MiB in all"), "word of the worker")
    lan.until(lambda: master.says(r"i5 \(\S+\).*: out of memory: the kernel killed it"), "word of the master")
    lan.until_again(2, after=1)
    lan.end()
    assert lan.codes() == {"i9": 0, "i5": 0}, lan.explain()
    check(None)


@pytest.mark.long
def test_a_slow_machine_gets_fewer_rows(lan: Lan, check: Check) -> None:
    """CPU quotas of 1.0 and 0.3: what each keeps up is measured at joining, and the rows are shared by it."""
    steps = 60
    master = lan.up_master(steps, options={"cpu_period": 100_000, "cpu_quota": 100_000})
    lan.up_worker(options={"cpu_period": 100_000, "cpu_quota": 30_000})
    assert lan.codes() == {"i9": 0, "i5": 0}, lan.explain()
    rows = [int(count) for count in re.findall(r"^  rank \d: (\d+) rows", master.logs(), re.MULTILINE)]
    assert sum(rows) == 8, lan.explain()
    assert rows[0] > rows[1] > 0, lan.explain()
    check(steps)
