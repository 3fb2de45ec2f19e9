"""A node's loop with real processes: a trainer that cannot start, ends, is frozen, or belongs to another generation."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lantrain.cluster import stacks
from lantrain.nodes import engine
from lantrain.nodes.agent import FROZEN, Agent

TRAINER = """
import os, signal, sys, time
sys.path.insert(0, {app!r})
from lantrain.cluster import beacon
stop = []
signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))
{body}
"""
WORKS = "beacon.tell('step', 7)\nwhile not stop: time.sleep(0.01)\nbeacon.tell('ended', 8, 'stopped')"


def order(what: str = "run", generation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "order": what, "generation": generation, "rank": 1, "world": 2, "master_address": "127.0.0.1",
        "master_port": 29500, "arguments": ["--depth", "2"], "environment": {}, "run": "ab12", **more,
    }  # fmt: skip


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    made = Agent(lambda line: None)
    trains(monkeypatch, WORKS)
    yield made
    made.end_now("the test is over")


def trains(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Let a small program stand where torchrun would; the rest is as it is."""
    import sys

    app = str(Path(engine.__file__).parents[2])
    program = TRAINER.format(app=app, body=body)
    monkeypatch.setattr(engine, "torchrun_command", lambda generation: [sys.executable, "-c", program])


def test_idle_until_told(agent: Agent) -> None:
    assert agent.obey({"order": "wait", "generation": 0}) is None
    assert (agent.report().state, agent.report().generation) == ("idle", 0)


def test_runs_reports_and_stops_at_a_boundary(agent: Agent) -> None:
    agent.obey(order())
    until(lambda: agent.report().step == 7)
    assert (agent.report().state, agent.report().phase) == ("running", "step")
    agent.obey(order("drain"))
    until(lambda: agent.report().state == "stopped")
    report = agent.report()
    assert (report.generation, report.outcome) == (1, "stopped")
    agent.obey(order())  # the same order again starts nothing
    assert agent.trainer is None
    agent.obey(order(generation=2))
    assert agent.report().state == "running"


def test_another_hub_counts_from_one_again(agent: Agent) -> None:
    agent.obey(order(generation=5))
    agent.end_now("the hub is lost")
    agent.forget_generations()
    assert agent.report().state == "idle"
    agent.obey(order(generation=1, run="cd34"))
    assert (agent.report().state, agent.report().generation) == ("running", 1)


def test_a_trainer_of_an_older_generation_is_ended_first(agent: Agent) -> None:
    agent.obey(order())
    assert agent.trainer is not None
    old = psutil.Process(agent.trainer.process.pid)
    agent.obey(order(generation=2))
    assert not old.is_running() or old.status() == psutil.STATUS_ZOMBIE
    assert agent.report().generation == 2


def test_kill_is_for_its_generation_only(agent: Agent) -> None:
    agent.obey(order(generation=2))
    agent.obey({"order": "kill", "generation": 1, "why": "late"})
    assert agent.report().state == "running"
    agent.obey({"order": "kill", "generation": 2, "why": "the link is down"})
    assert (agent.report().state, agent.report().outcome) == ("stopped", "failed")


def test_a_killed_trainer_is_a_failure_with_its_place(agent: Agent) -> None:
    agent.obey(order())
    until(lambda: agent.report().step == 7)
    assert agent.trainer is not None
    os.kill(agent.trainer.process.pid, signal.SIGKILL)
    until(lambda: agent.report().state == "stopped")
    assert agent.report().outcome == "failed"
    assert "in step 7, phase step" in agent.report().message


def test_a_trainer_killed_for_lack_of_memory_says_so(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    agent.say = said.append
    kills = iter([2, 3])
    monkeypatch.setattr("lantrain.nodes.agent.out_of_memory_kills", lambda: next(kills))
    monkeypatch.setattr("lantrain.nodes.agent.memory_limit", lambda: (1200, "this container"))
    agent.obey(order())
    until(lambda: agent.report().step == 7)
    assert agent.trainer is not None
    os.kill(agent.trainer.process.pid, signal.SIGKILL)
    until(lambda: agent.report().state == "stopped")
    where = "in step 7, phase step"
    assert agent.report().message == f"out of memory: the kernel killed it {where}; this container has 1,200 MiB in all"
    assert said[-1] == f"the trainer of this machine is gone: {agent.report().message}"


def test_a_torchrun_that_says_nothing_is_a_failure(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    trains(monkeypatch, "sys.exit(1)")
    agent.obey(order())
    until(lambda: agent.report().state == "stopped")
    assert agent.report().outcome == "failed"
    assert "before its first word" in agent.report().message


def test_a_torchrun_that_cannot_be_started_is_a_failure(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "torchrun_command", lambda generation: ["/no/such/python"])
    agent.obey(order())
    report = agent.report()
    assert (report.state, report.generation, report.outcome) == ("stopped", 1, "failed")
    assert "No such file" in report.message


def test_a_frozen_trainer_is_told_and_can_be_ended(agent: Agent) -> None:
    agent.obey(order())
    until(lambda: agent.report().step == 7)
    assert agent.report().message == ""
    assert agent.trainer is not None
    os.kill(agent.trainer.process.pid, signal.SIGSTOP)
    until(lambda: agent.report().message == FROZEN)
    agent.obey({"order": "kill", "generation": 1, "why": "frozen"})
    assert agent.report().state == "stopped"


HANGS = """
from lantrain.cluster import stacks
stacks.offer()
def stuck_here():
    held = threading.Lock()
    held.acquire()
    held.acquire()
beacon.tell('step', 7)
import threading
stuck_here()
"""


@pytest.mark.parametrize("frozen", [False, True])
def test_a_hanging_trainer_shows_where(
    frozen: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lock that is never released takes the main thread as an endless collective does: no Python runs any more."""
    said: list[str] = []
    agent = Agent(said.append)
    trains(monkeypatch, HANGS)
    agent.obey(order())
    until(lambda: agent.report().step == 7)
    trainer = agent.trainer
    assert trainer is not None
    process = psutil.Process(trainer.process.pid)
    until(lambda: process.status() == psutil.STATUS_SLEEPING)
    if frozen:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: agent.report().message == FROZEN)
    agent.obey({"order": "kill", "generation": 1, "why": "no step for 6 s", "stacks": True})
    report = agent.report()
    assert report.message.startswith("its trainer hung in step 7, phase step: stuck_here (<string>:"), report.message
    assert said[-1] == report.message
    assert " in stuck_here\n" in capsys.readouterr().out
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_trainer_that_cannot_answer_is_told_by_the_kernels_word(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains(monkeypatch, "signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n" + WORKS)
    agent.obey(order())
    until(lambda: agent.report().step == 7)
    agent.obey({"order": "kill", "generation": 1, "why": "no step for 6 s", "stacks": True})
    assert "its stack cannot be had: " in agent.report().message


def test_the_place_is_ours_and_says_what_it_called() -> None:
    dump = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/app/lantrain/data/feed.py", line 50 in _pack
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007e (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2800 in all_reduce
  File "/app/lantrain/training/evaluate.py", line 39 in evaluate_bpb
  File "/app/scripts/base_train.py", line 31 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""
    assert stacks.where(dump) == "evaluate_bpb (training/evaluate.py:39), calling all_reduce"
    assert stacks.where("") == "its main thread is in no Python"


def test_descendants_in_sessions_of_their_own_end_too(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts its trainers in a new session: killing its group would miss them."""
    child = "import time; time.sleep(600)"
    body = f"import subprocess\np = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
    trains(monkeypatch, body + "beacon.tell('step', p.pid)\nwhile True: time.sleep(0.01)")
    agent.obey(order())
    until(lambda: agent.report().step > 0)
    pid = agent.report().step
    agent.end_now("enough")
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_grace_period_has_an_end(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    trains(monkeypatch, "beacon.tell('step', 7)\nwhile True: time.sleep(0.01)")
    agent.obey(order())
    until(lambda: agent.report().step == 7)
    beats: list[int] = []
    assert not agent.stop_at_boundary(0.5, lambda: beats.append(1))
    assert beats
    assert agent.trainer is None


def test_the_token_stays_with_the_launcher(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "correct-horse")
    trains(monkeypatch, "beacon.tell('step', 1 + ('correct-horse' in str(dict(os.environ))))\ntime.sleep(600)")
    agent.obey(order())
    until(lambda: agent.report().step > 0)
    assert agent.report().step == 1


def test_torchruns_command_names_run_and_generation() -> None:
    generation = engine.Generation(3, 1, 2, "192.168.1.36", 29500, ("--depth", "2"), "ab12")
    command = engine.torchrun_command(generation)
    assert "--rdzv-id=ab12g3" in command
    assert "--max-restarts=0" in command
    assert command[command.index("--") + 1 :] == ["--depth", "2"]
