from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (it brings the OpenMP that is asked for)

from lantrain.cluster.waiting import CONTENDED, QUIET, Waiting, delays, openmp

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
assert waiting.decide(0.5) and waiting.asleep
asleep = spun()
assert waiting.decide(0.0) and not waiting.asleep
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


def test_one_thread_and_the_environments_policy_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert Waiting(1).decide(0.9) is None
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert Waiting(2).decide(0.9) is None


@pytest.mark.skipif(openmp() is None, reason="torch brings no GNU OpenMP here")
def test_a_little_waiting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    waiting = Waiting(2)
    between = (CONTENDED + QUIET) / 2
    assert waiting.decide(between) is None
    assert not waiting.asleep
    assert waiting.observe() is None  # a second has not passed
    line = waiting.decide(CONTENDED + 0.01)
    assert line is not None
    assert "asleep" in line
    assert waiting.decide(between) is None
    assert waiting.asleep
    waiting.close()
    assert not waiting.asleep
