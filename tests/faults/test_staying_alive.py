"""Machines die, cables are pulled, people press buttons: training goes on, with the losses of an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.faults.conftest import COMPARED_LONG
from tests.faults.hosts import Check, Host, Lan

Times = Callable[[str, float], None]


def pair(lan: Lan, **env: str) -> tuple[Host, Host]:
    """A master and a worker in a run without an end: on machines fast and slow the event comes in the middle of it."""
    master, worker = lan.up_master(**env), lan.up_worker(**env)
    lan.until_step(30)
    return master, worker


def all_ended_well(lan: Lan, check: Check) -> list[dict[str, Any]]:
    assert set(lan.codes().values()) == {0}, lan.explain()
    assert "Traceback" not in lan.explain()
    return check(None)


def ranks_over_time(records: list[dict[str, Any]]) -> list[int]:
    """World sizes in the order in which they changed."""
    ranks = [record["ranks"] for record in records]
    return ranks[:1] + [after for before, after in pairwise(ranks) if after != before]


def test_trainer_of_a_worker_is_killed(lan: Lan, check: Check, times: Times) -> None:
    _, worker = pair(lan)
    event = time.time()
    os.kill(worker.trainer(), signal.SIGKILL)
    lan.until_again(2, after=1)
    lan.end()
    all_ended_well(lan, check)
    times("worker's trainer killed (SIGKILL)", lan.seconds_to_next_step(event))
    assert lan.generations() == [2, 2]


def test_a_worker_crashes_and_is_taken_back(lan: Lan, check: Check, times: Times) -> None:
    master, worker = pair(lan)
    event = time.time()
    worker.crash()
    lan.until_again(2, after=1)
    lan.end()
    all_ended_well(lan, check)
    times("worker's container killed, started again by Docker", lan.seconds_to_next_step(event))
    assert worker.container.attrs["RestartCount"] == 1
    assert master.says(r"ending: .*(the trainer of i5|lost contact with i5|i5 \(\S+\) has been silent)"), master.logs()


def test_a_silent_link_is_noticed_and_the_worker_taken_back(lan: Lan, check: Check, times: Times) -> None:
    master, worker = pair(lan, SILENCE="6")
    event = time.time()
    worker.link("down")
    lan.until_ranks(1, event)
    times("worker's link down without a word, SILENCE=6: others alone", lan.seconds_to_next_step(event))
    assert master.says(r"i5 \(\S+\) has been silent for")
    lan.until(lambda: worker.says("the master has been silent"), "word of the worker")
    back = time.time()
    worker.link("up")
    lan.until_ranks(2, back)
    joined = [record["time"] for record in lan.records() if record["time"] > back and record["ranks"] == 2]
    times("link up again: training with both", min(joined) - back)
    lan.end()
    records = all_ended_well(lan, check)
    assert ranks_over_time(records) == [2, 1, 2]


def test_a_flapping_link_stops_nothing(lan: Lan, check: Check, times: Times) -> None:
    _, worker = pair(lan)
    event = time.time()
    worker.link("down")
    lan.until(lambda: time.time() - event > 10, "10 s")
    worker.link("up")
    lan.until_ranks(2, time.time() + 1)
    lan.end()
    all_ended_well(lan, check)
    times("link down for 10 s", lan.seconds_to_next_step(event))
    assert lan.generations() == [2], "nothing was started again"


def test_the_master_crashes_and_goes_on(lan: Lan, check: Check, times: Times) -> None:
    master, worker = pair(lan)
    event = time.time()
    master.crash()
    lan.until_again(2, after=1)
    lan.end()
    all_ended_well(lan, check)
    times("master's container killed, started again by Docker", lan.seconds_to_next_step(event))
    assert master.logs().count("master starting") == 2
    assert worker.logs().count("worker starting") == 1


def test_a_worker_that_is_told_to_stop_leaves_at_a_step_boundary(lan: Lan, check: Check, times: Times) -> None:
    master, worker = pair(lan)
    event = time.time()
    worker.stop()
    assert worker.code() == 128 + signal.SIGTERM, "137 would be Docker's patience"
    lan.until_again(1, after=1)
    lan.end()
    assert lan.codes(master) == {"i9": 0}, lan.explain()
    records = check(None)
    times("worker told to stop (SIGTERM)", lan.seconds_to_next_step(event))
    assert ranks_over_time(records) == [2, 1]
    assert switch(records) in saved_steps(master.logs()), "not a step is lost"


def saved_steps(log: str) -> list[int]:
    return [int(step) for step in re.findall(r"^Saved checkpoint of step (\d+) ", log, re.MULTILINE)]


def switch(records: list[dict[str, Any]]) -> int:
    """The last step before the number of ranks changed."""
    return next(a["step"] for a, b in pairwise(records) if a["ranks"] != b["ranks"])


def test_a_master_that_is_told_to_stop_saves_and_its_worker_waits(lan: Lan, check: Check, times: Times) -> None:
    master, worker = pair(lan)
    master.stop()
    assert master.code() == 128 + signal.SIGTERM, "137 would be Docker's patience"
    assert saved_steps(master.logs())[-1] == lan.step(), "not a step is lost"
    lan.until(lambda: worker.says("waiting for the master to return"), "word of the worker")
    event = time.time()
    master.start()
    lan.until_again(2, after=1)
    lan.end()
    all_ended_well(lan, check)
    times("master started again after a stop", lan.seconds_to_next_step(event))
    assert worker.logs().count("worker starting") == 1


def test_make_down_on_the_master_ends_every_node_with_a_checkpoint(lan: Lan) -> None:
    master, worker = pair(lan)
    assert "every node ends at the next step" in master.exec("python -m scripts.node end")
    assert lan.codes() == {"i9": 0, "i5": 0}, lan.explain()
    assert saved_steps(master.logs())[-1] == lan.step()
    assert worker.says("the run has ended: the master was told to end")


@pytest.mark.long
def test_a_worker_that_did_not_hear_of_the_end_gives_up_for_good(lan: Lan) -> None:
    master, worker = pair(lan, SILENCE="6", PATIENCE="5")
    worker.link("down")
    lan.until_again(1, after=1)
    lan.end()
    assert lan.codes(master) == {"i9": 0}, lan.explain()
    lan.until(lambda: worker.says("not starting again: the master at"), "end of the worker's patience")
    assert worker.code() == 0
    assert worker.says(r"^error: the master at \S+ has not returned within 5 s \(.*PATIENCE"), worker.logs()


@pytest.mark.long
def test_a_frozen_trainer_is_named_and_started_again(lan: Lan, check: Check, times: Times) -> None:
    master, worker = pair(lan, STALL="6")
    event = time.time()
    os.kill(worker.trainer(), signal.SIGSTOP)
    lan.until_again(2, after=1)
    lan.end()
    all_ended_well(lan, check)
    times("worker's trainer frozen (SIGSTOP), STALL=6", lan.seconds_to_next_step(event))
    assert master.says(r"no step for \d+ s; i5 \(\S+\) did not finish step \d+ \(its trainer is stopped"), master.logs()
    assert master.says(r"i5 \(\S+\): its trainer hung in step \d+, phase \w+: \w+ \(\w+/\w+\.py:\d+\)"), master.logs()
    assert worker.says("^    (Current thread|Thread) 0x"), worker.logs()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nodes_killed_at_random_moments(lan: Lan, check: Check) -> None:
    """Rounds of one long run: each kills something at a moment that nobody chose."""
    rounds, seed = int(os.environ.get("ROUNDS", "30")), int(os.environ.get("SEED", "0")) or random.randrange(1 << 30)
    draw = random.Random(seed)
    print(f"SEED={seed} ROUNDS={rounds}")  # pytest shows it when the test fails
    master, worker = pair(lan, SILENCE="6")
    done, event = 0, 0.0
    while done < rounds:
        moment = time.monotonic() + draw.uniform(0, 8)
        lan.until(lambda moment=moment: time.monotonic() >= moment, "moment")
        what = draw.choice(["master", "worker", "trainer"])
        event = time.time()
        try:
            if what == "trainer":
                os.kill(draw.choice([master, worker]).trainer(), signal.SIGKILL)
            else:
                {"master": master, "worker": worker}[what].crash()
        except (AssertionError, ProcessLookupError):
            continue  # it was being started again
        done += 1
        lan.until(lambda event=event: any(r["time"] > event for r in lan.records()), f"step after round {done}")
    lan.until_again(2, after=1)
    lan.end()
    all_ended_well(lan, check)
    check(None, compared=COMPARED_LONG)
