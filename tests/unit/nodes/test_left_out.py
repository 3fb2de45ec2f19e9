"""A node that would make a step longer waits beside the run; the hub and the node say so once, with the numbers."""

from __future__ import annotations

from typing import Any

from lantrain.nodes.agent import Agent
from lantrain.nodes.members import Node, Report
from lantrain.nodes.predict import chooser
from tests.unit.nodes.test_membership import World

FLAGS = "--depth 4 --max-seq-len 512 --total-batch-size 4096 --num-iterations 10".split()
MASTER = {"gemm_gflops": 200.0}
GOOD = {"gemm_gflops": 150.0, "link_mbs": 110.0, "round_trip_ms": 0.3}
SLOW = {"gemm_gflops": 150.0, "link_mbs": 0.5, "round_trip_ms": 3.0}


def world(wanted: int) -> World:
    made = World(wanted)
    made.hub.choose = chooser(FLAGS, 32768)
    return made


def join(world: World, name: str, info: dict[str, Any], **options: Any) -> Node:
    return world.hub.join(name, f"10.0.0.{len(name)}", info, **options)


def said(world: World, words: str) -> list[str]:
    return [line for line in world.lines if words in line]


def test_a_slow_link_is_left_out_and_the_master_trains_alone() -> None:
    run = world(2)
    master, worker = join(run, "master", MASTER, master=True), join(run, "worker1", SLOW)
    run.pass_time(30, master, worker, step=3)
    assert run.hub.members == [master.id]
    assert (run.hub.generation, run.order(master)["world"]) == (1, 1)
    (line,) = said(run, "is left out")
    assert line.startswith("worker1 (10.0.0.7) is left out: a step is expected to take ")
    assert "KEEP_SLOW=1 on the master" in line
    order = run.order(worker, Report("idle"))
    assert order["order"] == "wait"
    assert order["why"] in line
    assert run.hub.share_of(worker.id) == "left out"


def test_without_the_rule_everybody_takes_part() -> None:
    run = World(2)
    master, worker = join(run, "master", MASTER, master=True), join(run, "worker1", SLOW)
    run.hub.tick()
    assert run.hub.members == [master.id, worker.id]


def test_a_slow_node_that_comes_later_does_not_stop_the_run_and_a_good_one_does() -> None:
    run = world(2)
    master, worker = join(run, "master", MASTER, master=True), join(run, "worker1", GOOD)
    run.pass_time(5, master, worker, step=1)
    slow = join(run, "worker22", SLOW)
    run.pass_time(30, master, worker, slow, step=7)
    assert (run.hub.phase, run.hub.generation) == ("running", 1)
    assert len(said(run, "worker22 (10.0.0.8) is left out")) == 1
    good = join(run, "worker333", GOOD)
    run.pass_time(5, master, worker, slow, good, step=9)
    assert run.hub.phase == "draining"
    assert said(run, "worker333 (10.0.0.9) joined")
    run.stopped(master)
    run.stopped(worker)
    run.hub.tick()
    assert run.hub.members == [master.id, worker.id, good.id]
    lines = said(run, "worker22 (10.0.0.8) is left out")
    assert len(lines) == len(set(lines)) == 2, "said again for the new members, with their numbers"


def test_a_node_that_comes_back_with_a_better_link_takes_part() -> None:
    run = world(2)
    master, worker = join(run, "master", MASTER, master=True), join(run, "worker1", SLOW)
    run.pass_time(5, master, worker, step=1)
    run.hub.leave(worker.id)
    again = join(run, "worker1", GOOD)
    run.pass_time(5, master, again, step=4)
    assert run.hub.phase == "draining"
    run.stopped(master)
    run.hub.tick()
    assert run.hub.members == [master.id, again.id]


def test_the_node_says_once_why_it_waits() -> None:
    lines: list[str] = []
    agent = Agent(lines.append)
    for why in ("", "9 s with it", "9 s with it", ""):
        assert agent.obey({"order": "wait", "generation": 1, "why": why}) is None
    assert lines == ["this machine is left out for now: 9 s with it"]
