"""Without Docker the container tests skip and say why; on CI that is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HINT

ROOT = Path(__file__).parents[2]
ONE = "tests/containers/test_image.py::test_labels_name_version_and_commit"


def without_docker(test: str, ci: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock", "CI": ci, "COLUMNS": "1000"}
    env.pop("NANOCHAT_CHECKOUT", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_container_tests_skip_with_the_reason_and_the_hint() -> None:
    done = without_docker(ONE, "")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 skipped" in done.stdout
    assert "no Docker engine answers" in done.stdout
    assert HINT in done.stdout


@pytest.mark.parametrize("test", [ONE, "tests/faults/test_slow_link.py"])
def test_on_ci_a_skipped_container_test_is_a_failure(test: str) -> None:
    done = without_docker(test, "true")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "skipped on CI: " in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_on_ci_a_test_skipped_for_lack_of_a_compiler_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    test = "tests/unit/model/test_model_kernels.py::test_build_makes_every_library_of_this_architecture"
    assert without_docker(test, "").returncode == 0
    done = without_docker(test, "true")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "skipped on CI: " in done.stdout


def test_a_missing_nanochat_is_a_skip_that_says_so_everywhere() -> None:
    done = without_docker("tests/unit/test_nanochat_interop.py", "true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NANOCHAT_CHECKOUT is not set: point it at a clone of karpathy/nanochat" in done.stdout
