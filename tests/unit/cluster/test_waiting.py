from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (it brings the OpenMP that is asked for)

from lantrain.cluster import waiting as waiting_module
from lantrain.cluster.waiting import CONTENDED, QUIET, QUIET_LOOKS, SETTINGS, Waiting, delays, openmp

APP = Path(__file__).resolve().parents[3] / "app"
SPUN = """
import time
from pathlib import Path
import torch
from lantrain.cluster.waiting import Waiting

def threads():
    return {task.name for task in Path("/proc/self/task").iterdir()}

torch.set_num_threads(2)
before = threads()
data = torch.ones(1 << 20)
(second,) = threads() - before

def spun():
    "CPU seconds of the second thread for 30 short sums with pauses of 20 ms, which it spends waiting."
    read = lambda: int(Path(f"/proc/self/task/{second}/schedstat").read_text().split()[0]) / 1e9
    before = read()
    for _ in range(30):
        data.sum()
        time.sleep(0.02)
    return read() - before

waiting = Waiting(2)
awake = spun()
waiting.decide(0.5)
assert waiting.asleep
asleep = spun()
for _ in range(5):
    assert waiting.asleep
    waiting.decide(0.0)
assert not waiting.asleep
print(awake, asleep, spun())
"""


def test_what_threads_waited_is_read_by_thread(tmp_path: Path) -> None:
    for name, text in (("1", "5 70 2\n"), ("2", "5 80 2"), ("3", "nonsense"), ("4", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "5").mkdir()  # ended in between
    assert delays(tmp_path) == {"1": 70, "2": 80}
    assert delays(tmp_path / "nothing") == {}
    assert str(os.getpid()) in delays()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="a team of two spins only where there are two cores")
def test_threads_spin_until_the_cores_are_wanted_and_again_when_they_are_free() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPUN], cwd=APP, env=_environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    awake, asleep, again = (float(word) for word in done.stdout.split())
    assert asleep < awake / 2
    assert asleep < again / 2


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """No policy in the environment."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("free")
def test_one_thread_and_the_environments_policy_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, setting in ((1, ""), (2, "1000")):
        monkeypatch.setenv("GOMP_SPINCOUNT", setting)
        waiting = Waiting(threads)
        waiting.decide(0.9)
        assert not waiting.asleep


@pytest.mark.on_ci
@pytest.mark.skipif(openmp() is None, reason="torch brings no GNU OpenMP here")
@pytest.mark.usefixtures("free")
def test_a_little_waiting_changes_nothing() -> None:
    waiting, between = Waiting(2), (CONTENDED + QUIET) / 2
    waiting.decide(between)
    assert not waiting.asleep
    waiting.decide(CONTENDED + 0.01)
    assert waiting.asleep
    for share in [0.0] * (QUIET_LOOKS - 1) + [between] + [0.0] * (QUIET_LOOKS - 1):
        waiting.decide(share)
        assert waiting.asleep, "it was not quiet for so long"
    waiting.decide(0.0)
    assert not waiting.asleep


@pytest.mark.on_ci
@pytest.mark.skipif(openmp() is None, reason="torch brings no GNU OpenMP here")
@pytest.mark.usefixtures("free")
def test_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = [100.0], [0]
    monkeypatch.setattr(waiting_module, "delays", lambda: {"1": waited[0]})
    monkeypatch.setattr(waiting_module.time, "monotonic", lambda: clock[0])
    waiting = Waiting(2)
    lines = []
    for seconds, share in ((0.5, 1.0), (0.5, 0.6), *[(2.0, 0.0)] * QUIET_LOOKS, (1.0, 0.6)):
        clock[0] += seconds
        waited[0] += int(seconds * share * 1e9)
        lines.append(waiting.observe())
    assert waiting.asleep
    waiting.close()
    assert lines[0] is None, "too soon"
    assert lines[1] is not None
    assert "80%" in lines[1]
    assert lines[2:] == [None] * (QUIET_LOOKS + 1)
