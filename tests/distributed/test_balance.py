"""Shares follow a rank that really becomes slow while it runs, and neither the rows nor the losses show it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantrain.cluster.group import Ranks
from lantrain.data.feed import Feed, PackedAhead
from tests.distributed.ranks import TINY, Run, run_ranks, start_ranks, together
from tests.distributed.test_feed import SEQ_LEN, _stream

ROWS = 32
FOLLOW_STEPS = 20
"""Issue: shares follow within so many steps."""
FLAGS = [
    *TINY, f"--total-batch-size={ROWS * 64}", "--num-iterations=100000", "--warmup-steps=200", "--matrix-lr=0.005",
    "--embedding-lr=0.05", "--unembedding-lr=0.002", "--scalar-lr=0.05",
]  # fmt: skip
"""Low learning rates, so that rounding is not enlarged from step to step, by a schedule of one length for all runs."""
ON_SECONDS, OFF_SECONDS = 0.004, 0.016


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Let the process `pid` run a fifth of the time, as a CPU quota of 0.2 or a busy desktop would."""
    enough = threading.Event()

    def duty_cycle() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            while not enough.is_set():
                os.kill(pid, signal.SIGSTOP)
                enough.wait(OFF_SECONDS)
                os.kill(pid, signal.SIGCONT)
                enough.wait(ON_SECONDS)

    thread = threading.Thread(target=duty_cycle)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


class Reader:
    """The leader's output, line by line, until a step or to the end."""

    def __init__(self, run: Run) -> None:
        self.run, self.text = run, ""

    def until_step(self, step: int) -> None:
        stream = self.run.ranks[0].process.stdout
        assert stream is not None
        while f"step {step:05d}/" not in self.text:
            line = stream.readline()
            assert line, self.text
            self.text += line


def test_feed_gives_new_shares_to_the_rows_that_are_not_on_their_way(corpus: Path) -> None:
    """Rows of a step are the stream's, whatever the shares do (invariant 1)."""
    plan = [[3, 2], [0, 5], [5, 0], [4, 1], [1, 4], [2, 3], [2, 3]]
    results = together(2, partial(_take_as_planned, base=corpus, plan=plan))
    expected = _stream(corpus).next_rows(5 * len(plan)).reshape(len(plan), 5, SEQ_LEN + 1)
    for step, shares in enumerate(plan):
        assert [len(results[rank][step]) for rank in range(2)] == shares
        assert np.array_equal(np.concatenate([results[rank][step] for rank in range(2)]), expected[step])


def _take_as_planned(ranks: Ranks, base: Path, plan: list[list[int]]) -> list[Any]:
    feed = Feed(PackedAhead(_stream(base), 5) if ranks.leader else None, ranks, SEQ_LEN, False, 0)
    feed.start(plan[0])
    taken = []
    for step in range(len(plan)):
        if step + 1 < len(plan):
            feed.reshare(plan[step + 1])
        taken.append(feed.next(more=step + 1 < len(plan)).rows.numpy())
    feed.close()
    return taken


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "worker"])
def test_a_slowed_rank_gets_fewer_rows_within_20_steps_and_the_losses_are_the_same(
    who: int, corpus: Path, base: Path
) -> None:
    run = start_ranks(2, base, FLAGS, tag="slowed")
    reader = Reader(run)
    reader.until_step(20)
    with slowed(run.ranks[who].process.pid):
        from_step = int(re.findall(r"step (\d+)/", reader.text)[-1])
        reader.until_step(from_step + 40)
    reader.until_step(from_step + 70)
    run.ranks[0].process.send_signal(signal.SIGTERM)
    run.wait()
    records = [record for record in run.metrics if "loss" in record]
    rows = {record["step"]: record["rows"] for record in records}
    assert all(sum(shares) == ROWS for shares in rows.values())
    # The leader's lines are read with some delay, so the rank was slowed by `from_step` or up to a few steps later.
    slow = [rows[step][who] for step in range(from_step + FOLLOW_STEPS + 2, from_step + 40)]
    assert max(slow) <= ROWS // 3, rows
    assert rows[len(rows)][who] > ROWS // 3, rows
    assert re.search(
        r"^rows of each rank from step \d+ on: \d+, \d+ \(before: 16, 16\); a row takes", reader.text, re.M
    )
    alone = run_ranks(1, corpus, [*FLAGS, f"--stop-after={len(records)}"], tag=f"slowed{who}", alone=True).ok()
    assert max(abs(a - b) for a, b in zip(alone.losses, run.losses, strict=True)) < 1e-5


@pytest.mark.parametrize("flags", [["--no-rebalance"], ["--shares=1,1"]], ids=["switched off", "given by hand"])
def test_shares_that_are_fixed_stay(flags: list[str], base: Path) -> None:
    run = start_ranks(2, base, [*FLAGS, *flags, "--stop-after=40"], tag="fixed")
    Reader(run).until_step(5)
    with slowed(run.ranks[1].process.pid):
        run.wait()
    run.ok()
    assert {tuple(record["rows"]) for record in run.metrics if "loss" in record} == {(16, 16)}
    assert "rows of each rank" not in run.log


def test_first_shares_are_by_the_rates_of_joining(base: Path) -> None:
    run = run_ranks(2, base, [*FLAGS, "--rates=300,100", "--no-rebalance", "--stop-after=2"], tag="rates").ok()
    assert [record["rows"] for record in run.metrics] == [[24, 8]] * 2


@pytest.mark.parametrize("sync", ["step", "local"])
def test_each_rank_tells_what_its_update_takes(sync: str, base: Path) -> None:
    """Step by step it is that of the step before; a rank without rows takes no local step, but shares a common one."""
    run = run_ranks(3, base, [*FLAGS, "--shares=3,0,1", f"--sync={sync}", "--stop-after=4"], tag="update").ok()
    records = [record for record in run.metrics if "loss" in record]
    assert [len(record["rank_update_s"]) for record in records] == [3] * 4
    told = [[seconds > 0 for seconds in record["rank_update_s"]] for record in records]
    assert told == [[True, False, True]] * 4 if sync == "local" else [[False] * 3, *[[True] * 3] * 3]
    for record in records:
        assert all(seconds < record["dt"] + records[0]["dt"] for seconds in record["rank_update_s"])
