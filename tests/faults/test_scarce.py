"""Machines with less: a slow one among fast ones."""

from __future__ import annotations

import re

import pytest

from tests.faults.hosts import Check, Lan

pytestmark = pytest.mark.long


def test_a_slow_machine_gets_fewer_rows(lan: Lan, check: Check) -> None:
    """CPU quotas of 1.0 and 0.3: what each keeps up is measured at joining, and the rows are shared by it."""
    steps = 60
    master = lan.up_master(steps)
    worker = lan.up_worker()
    for host, quota in ((master, 100_000), (worker, 30_000)):
        host.container.update(cpu_period=100_000, cpu_quota=quota)
    assert lan.codes() == {"i9": 0, "i5": 0}, lan.explain()
    rows = [int(count) for count in re.findall(r"^  rank \d: (\d+) rows", master.logs(), re.MULTILINE)]
    assert sum(rows) == 8, lan.explain()
    assert rows[0] > rows[1] > 0, lan.explain()
    check(steps)
