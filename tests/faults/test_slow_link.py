"""A worker behind a link so slow that every step would be longer: left out, with the numbers; or taken by force."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults.hosts import Check, Host, Lan

RATE = "1mbit"


def shape(host: Host) -> None:
    """Let through to the host no more than RATE, by a token bucket on our side of its cable."""
    if not shutil.which("tc"):
        pytest.skip("shaping a link needs `tc` (iproute2)")
    index = host.exec("cat /sys/class/net/eth0/iflink").strip()
    (card,) = (card for card in Path("/sys/class/net").iterdir() if (card / "ifindex").read_text().strip() == index)
    bucket = ["tbf", "rate", RATE, "burst", "16kb", "latency", "200ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", card.name, "root", *bucket], check=True)


def test_a_worker_behind_a_slow_link_is_left_out_and_the_run_goes_on(lan: Lan, check: Check) -> None:
    master = lan.up_master(60, KEEP_SLOW="")
    worker = lan.up_worker()
    shape(worker)
    assert lan.codes() == {"i9": 0, "i5": 0}, lan.explain()
    line = re.search(
        r"^\[lantrain\] i5 \(\S+\) is left out: (a step is expected .* round trip .*)$", master.logs(), re.M
    )
    assert line, lan.explain()
    assert re.search(r"KEEP_SLOW=1", line[1])
    assert re.search(r"^\[lantrain\] this machine is left out for now: a step is expected", worker.logs(), re.M)
    assert master.says(r"^\[lantrain\] generation 1: 1 ranks: 0 i9")
    assert not worker.says("starting as rank")
    assert {record["ranks"] for record in check(60)} == {1}


def test_keep_slow_takes_it_all_the_same(lan: Lan) -> None:
    master = lan.up_master(3, KEEP_SLOW="1")
    worker = lan.up_worker()
    shape(worker)
    assert lan.codes() == {"i9": 0, "i5": 0}, lan.explain()
    assert "is left out" not in master.logs()
    assert {record["ranks"] for record in lan.records()} == {2}
