"""The container's health: a step was made lately."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.health import verdict

APP = Path(__file__).parents[2] / "app"


@pytest.mark.parametrize(("age", "healthy"), [(0, True), (60, True), (61, False)])
def test_age_of_the_last_step_decides(tmp_path: Path, age: float, healthy: bool) -> None:
    heartbeat = tmp_path / "heartbeat"
    heartbeat.touch()
    os.utime(heartbeat, (1000, 1000))
    assert verdict(heartbeat, 60, 1000 + age) == (healthy, f"last step {age} s ago (limit 60 s)")


def test_no_step_yet_is_unhealthy_and_says_so(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "LANTRAIN_HEARTBEAT": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "-m", "scripts.health"], cwd=APP, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no step yet" in done.stdout
