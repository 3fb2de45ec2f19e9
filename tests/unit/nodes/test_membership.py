"""The membership's decisions, event by event, on a clock that the test moves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from lantrain.nodes.members import Limits, Node, Report
from lantrain.nodes.membership import Membership

LIMITS = Limits(silence=15, stop_answer=10, drain=60, settle=3, first_step=100, stall=50)


class World:
    """A membership with a clock, and nodes that do what they are told."""

    def __init__(self, wanted: int = 2) -> None:
        self.now, self.lines = 100.0, []
        self.hub = Membership(lambda: self.now, wanted, self.lines.append, LIMITS)
        self.steps: dict[str, int] = {}

    def join(self, name: str, **options: Any) -> Node:
        return self.hub.join(name, f"10.0.0.{len(name)}", {}, **options)

    def pass_time(self, seconds: float, *alive: Node, step: int | None = None, phase: str = "step") -> None:
        """Let time pass in beats of half a second; `alive` nodes report that they run their generation."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for node in alive:
                member = node.id in self.hub.members
                if step is not None:
                    self.steps[node.id] = step
                running = Report("running", self.hub.generation, self.steps.get(node.id, 1), phase)
                self.hub.beat(node.id, running if member else Report("idle"))
            self.hub.tick()

    def order(self, node: Node, report: Report | None = None) -> dict[str, Any]:
        return self.hub.beat(node.id, report or Report("running", self.hub.generation, 5, "step"))

    def stopped(self, node: Node, outcome: str = "stopped", message: str = "") -> dict[str, Any]:
        return self.hub.beat(node.id, Report("stopped", self.hub.generation, 5, "ended", outcome, message))


def running(wanted: int = 2) -> tuple[World, Node, Node]:
    """A run of two nodes in its first generation, some steps made."""
    world = World(wanted)
    master, worker = world.join("master", master=True), world.join("worker1")
    world.hub.tick()
    world.pass_time(2, master, worker, step=1)
    world.pass_time(2, master, worker, step=3)
    assert (world.hub.phase, world.hub.generation) == ("running", 1)
    return world, master, worker


def test_the_run_waits_for_its_nodes_and_the_master_is_rank_0() -> None:
    world = World(wanted=3)
    first = world.join("aaa")
    master = world.join("zzzz", master=True)
    world.pass_time(5, first, master)
    assert world.hub.phase == "gathering"
    assert world.order(first)["order"] == "wait"
    other = world.join("bbbbb")
    world.hub.tick()
    assert [world.order(node)["rank"] for node in (master, first, other)] == [0, 1, 2]
    assert world.order(master)["world"] == 3


def test_silence_names_the_node_and_the_others_go_on_without_it() -> None:
    world, master, worker = running()
    began = world.now
    while world.hub.phase == "running":
        world.pass_time(0.5, master)
    assert world.now - began <= LIMITS.silence + 1
    assert any("worker1 (10.0.0.7) has been silent for 1" in line for line in world.lines)
    assert world.order(master)["order"] == "kill"
    world.stopped(master, "failed")
    world.hub.tick()
    assert (world.hub.phase, world.hub.generation, world.hub.members) == ("running", 2, [master.id])
    assert world.order(worker) == {"order": "join"}


def test_flap_shorter_than_the_limit_changes_nothing() -> None:
    world, master, worker = running()
    world.pass_time(10, master)
    world.pass_time(5, master, worker)
    assert (world.hub.phase, world.hub.generation) == ("running", 1)


def test_killed_trainer_starts_a_generation_with_the_same_nodes() -> None:
    world, master, worker = running()
    world.stopped(worker, "failed", "it ended without a word")
    assert world.hub.phase == "killing"
    assert world.order(master)["order"] == "kill"
    world.stopped(master, "failed")
    world.hub.tick()
    assert (world.hub.phase, world.hub.generation) == ("running", 2)
    assert set(world.hub.members) == {master.id, worker.id}


def test_returning_node_is_taken_back_at_a_step_boundary() -> None:
    world, master, worker = running()
    world.hub.leave(worker.id)
    world.stopped(master, "failed")
    world.hub.tick()
    world.pass_time(2, master, step=1)
    world.pass_time(1, master, step=4)
    again = world.join("worker1")
    world.pass_time(2, master, again)
    assert world.hub.phase == "running"  # it may not be the last to come
    world.pass_time(2, master, again)
    assert world.hub.phase == "draining"
    assert world.order(master)["order"] == "drain"
    assert world.order(again, Report("idle"))["order"] == "wait"
    world.stopped(master)
    world.hub.tick()
    assert (world.hub.phase, world.hub.generation) == ("running", 3)
    assert world.hub.members == [master.id, again.id]


def test_leaving_node_is_waited_for_and_left_out() -> None:
    world, master, worker = running()
    world.order(worker, Report("leaving", 1, 5, "step"))
    assert world.hub.phase == "draining"
    world.stopped(master)
    world.hub.tick()
    assert (world.hub.generation, world.hub.members) == (2, [master.id])
    world.hub.leave(worker.id)
    assert (world.hub.phase, world.hub.generation) == ("running", 2)


def test_planned_stop_that_takes_too_long_is_forced() -> None:
    world, master, worker = running()
    world.order(worker, Report("leaving", 1, 5, "step"))
    world.pass_time(LIMITS.drain + 1, master)
    assert world.hub.phase == "killing"


def test_node_that_does_not_answer_a_stop_is_dropped() -> None:
    world, master, worker = running()
    world.stopped(master, "failed")
    world.pass_time(LIMITS.stop_answer + 1, worker)  # it beats, but never stops its trainer
    assert any("worker1 (10.0.0.7) did not stop within 10 s" in line for line in world.lines)
    assert world.hub.members == [master.id]


def test_rank_that_did_not_enter_the_step_is_named() -> None:
    world, master, worker = running()
    for _ in range(int(2 * LIMITS.stall) + 10):
        world.now += 0.5
        world.hub.beat(master.id, Report("running", 1, 4, "step"))
        world.hub.beat(worker.id, Report("running", 1, 3, "step"))
        world.hub.tick()
        if world.hub.phase == "killing":
            break
    assert world.hub.phase == "killing"
    assert "worker1 (10.0.0.7) did not finish step 4" in world.hub.why


def test_long_evaluation_is_no_stall() -> None:
    world, master, worker = running()
    world.pass_time(3 * LIMITS.stall, master, worker, phase="evaluate")
    assert world.hub.phase == "running"


def test_slow_steps_are_no_stall() -> None:
    world, master, worker = running()
    for step in range(4, 12):
        world.pass_time(30, master, worker, step=step)
    world.pass_time(4 * LIMITS.stall, master, worker)  # 200 s without a step, of 30 s usually
    assert world.hub.phase == "running"


def test_generation_without_a_first_step_is_ended() -> None:
    world = World()
    master, worker = world.join("master", master=True), world.join("worker1")
    world.hub.tick()
    world.pass_time(LIMITS.first_step + 2, master, worker, step=0, phase="connect")
    assert world.hub.phase == "killing"
    assert "no first step within 100 s" in world.hub.why


def test_finished_training_ends_everybody_with_0() -> None:
    world, master, worker = running()
    world.stopped(master, "done")
    assert world.order(worker) == {"order": "end", "code": 0, "why": "training is finished"}


def test_fatal_error_ends_everybody_with_its_message() -> None:
    world, master, worker = running()
    world.stopped(worker, "fatal", "the loss of rank 1 is not a number in step 6")
    order = world.order(master)
    assert (order["order"], order["code"]) == ("end", 1)
    assert "not a number in step 6" in order["why"]


def test_flapping_node_gets_a_growing_pause() -> None:
    world, master, _ = running()
    waits = []
    for _ in range(4):
        node = world.join("flappy")
        began = world.now
        while node.id not in world.hub.members:
            world.pass_time(0.5, master, node, step=int(world.now))
            if world.hub.phase in ("draining", "killing"):
                world.stopped(master)
                world.hub.tick()
            assert world.now - began < 700
        waits.append(world.now - began)
        world.pass_time(2, master, node, step=int(world.now))
        while node.id in world.hub.nodes:  # it falls silent
            world.pass_time(0.5, master, step=int(world.now))
        world.stopped(master, "failed")
        world.hub.tick()
    assert waits[1] < 10 <= waits[2] < 20 <= waits[3]
    assert any("failed 2 times lately: it is taken back after 10 s" in line for line in world.lines)


def test_node_that_comes_back_before_it_was_missed_replaces_itself() -> None:
    world, master, worker = running()
    again = world.join("worker1")
    assert worker.id not in world.hub.nodes
    assert world.hub.phase == "killing"
    world.stopped(master, "failed")
    world.hub.beat(again.id, Report("idle"))
    world.hub.tick()
    assert world.hub.members == [master.id, again.id]


@pytest.mark.parametrize("outcome", ["stopped", "failed"])
def test_report_of_an_old_generation_changes_nothing(outcome: str) -> None:
    world, master, worker = running()
    world.hub.beat(worker.id, Report("stopped", 0, 5, "ended", outcome, "late"))
    assert (world.hub.phase, world.hub.generation) == ("running", 1)
    assert world.order(master)["order"] == "run"


def test_the_machine_that_is_gone_is_named_when_a_survivor_is_heard_first() -> None:
    world, master, worker = running()
    world.stopped(master, "failed", "rank 0 lost contact with another rank: Connection closed by peer [10.0.0.7]:4711")
    assert any("lost contact with worker1 (10.0.0.7)" in line for line in world.lines)
    assert len(worker.failures) == 1
    assert master.failures == []


def test_a_frozen_trainer_is_blamed_though_all_are_in_the_same_step() -> None:
    world, master, worker = running()
    for _ in range(150):
        world.now += 0.5
        world.hub.beat(worker.id, Report("running", 1, 5, "step", "", "its trainer is stopped (SIGSTOP)"))
        world.hub.beat(master.id, Report("running", 1, 5, "step"))
        world.hub.tick()
    (line,) = [line for line in world.lines if "no step for" in line]
    assert "worker1 (10.0.0.7) did not finish step 5 (its trainer is stopped (SIGSTOP))" in line
    assert "master" not in line


def test_a_node_that_leaves_as_planned_does_not_have_the_masters_checkpoint_killed() -> None:
    world, master, worker = running()
    world.order(worker, Report("leaving", 1, 5, "step"))
    assert world.hub.phase == "draining"
    world.hub.beat(worker.id, Report("leaving", 1, 0, "", "stopped"))
    world.hub.leave(worker.id)
    world.pass_time(5, master, phase="save")
    assert world.hub.phase == "draining"
    assert world.order(master)["order"] == "drain"
    world.stopped(master)
    world.hub.tick()
    assert (world.hub.phase, world.hub.members) == ("running", [master.id])


def test_generations_that_make_no_step_are_started_less_and_less_often() -> None:
    world, master, worker = running()
    starts = []
    for _ in range(600):
        world.now += 0.5
        for node in (master, worker):
            world.stopped(node, "failed", "address already in use")
        before = world.hub.generation
        world.hub.tick()
        if world.hub.generation > before:
            starts.append(world.now)
    gaps = [after - before for before, after in pairwise(starts)]
    assert gaps[0] <= 1
    assert 59 <= gaps[-1] <= 61
    assert gaps == sorted(gaps)


def test_a_worker_on_the_masters_machine_is_another_node() -> None:
    world = World()
    master = world.join("pc", master=True)
    worker = world.join("pc")
    world.hub.tick()
    assert [world.order(node)["rank"] for node in (master, worker)] == [0, 1]


def test_share_of_the_rows_is_by_the_rates() -> None:
    world = World()
    master = world.hub.join("i9", "10.0.0.1", {"gemm_gflops": 60.0}, master=True)
    worker = world.hub.join("i5", "10.0.0.2", {"gemm_gflops": 20.0})
    assert world.hub.share_of(master.id) == ""
    world.hub.tick()
    assert [world.hub.share_of(node.id) for node in (master, worker)] == ["75%", "25%"]
    assert world.order(worker)["rates"] == [60.0, 20.0]


def test_an_ended_run_is_left_by_who_heard_and_not_waited_for_by_who_is_lost() -> None:
    world, master, worker = running()
    world.hub.end(0, "finished")
    assert world.hub.still_to_leave() == [worker.label]
    world.now += LIMITS.silence
    assert world.hub.still_to_leave() == [worker.label], "slow, and not lost yet"
    world.now += 1
    assert world.hub.still_to_leave() == []
    assert world.order(worker)["order"] == "end"
    assert world.hub.still_to_leave() == [worker.label], "its goodbye is on the way"
    world.now += 5
    assert world.hub.still_to_leave() == [], "its goodbye was lost"
    assert master.id in world.hub.nodes


def test_a_master_waits_for_its_nodes_so_long_and_names_who_came() -> None:
    world = World(wanted=3)
    master, worker = world.join("master", master=True), world.join("worker1")
    world.now += LIMITS.patience - 1
    for _ in range(2):
        world.hub.beat(worker.id, Report("idle"))
        world.hub.tick()
        assert world.hub.phase == "gathering"
    world.now += 2
    world.hub.beat(worker.id, Report("idle"))
    world.hub.tick()
    order = world.order(master)
    assert (order["order"], order["code"]) == ("end", 2)
    assert order["why"] == f"3 nodes were not here within 24 h, only {master.label}, {worker.label}"


def test_after_a_stall_every_node_shows_where_it_was_and_the_master_says_so() -> None:
    world, master, worker = running()
    world.pass_time(LIMITS.stall + 1, master, worker)
    assert world.hub.phase == "killing"
    assert world.order(worker)["stacks"]
    world.stopped(worker, "failed", "its trainer hung in step 5, phase step: all_reduce")
    assert world.lines[-1] == f"{worker.label}: its trainer hung in step 5, phase step: all_reduce"
    world.stopped(master, "failed")
    world.hub.tick()
    assert world.hub.generation == 2
    world.stopped(worker, "failed", "killed")
    assert not world.order(master)["stacks"], "a crash is no hang"


def test_a_cause_that_is_heard_after_its_effect_is_told_too() -> None:
    world, master, worker = running()
    world.stopped(master, "failed", f"rank 0 lost contact with another rank: closed by [{worker.address}]:4711")
    assert world.hub.phase == "killing"
    world.stopped(worker, "failed", "out of memory: the kernel killed it")
    assert world.lines[-1] == f"{worker.label}: out of memory: the kernel killed it"
    world, master, worker = running()
    world.stopped(worker, "failed", "out of memory: the kernel killed it")
    before = list(world.lines)
    world.stopped(master, "failed", "rank 0 lost contact with another rank: closed")
    assert world.lines == before, "an echo"


@pytest.mark.parametrize("phase", ["evaluate", "connect"])
def test_a_trainer_stopped_in_any_phase_is_named_after_a_while(phase: str) -> None:
    """A long evaluation is no alarm, and an exchange that waits for a frozen rank has only Gloo's limit."""
    world, master, worker = running()
    world.pass_time(10 * LIMITS.stall, master, worker, phase="evaluate")
    frozen = Report("running", world.hub.generation, 5, phase, "", "its trainer is stopped")
    for seconds, expected in ((LIMITS.stall - 2, "running"), (4, "killing")):
        for _ in range(int(seconds * 2)):
            world.pass_time(0.5, master, phase="evaluate")
            world.hub.beat(worker.id, frozen)
        world.hub.tick()
        assert world.hub.phase == expected
    assert any(f"{worker.label} did not finish step 5 (its trainer is stopped)" in line for line in world.lines)
