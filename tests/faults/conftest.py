"""A LAN for each test, the undisturbed run that all are compared with, and the table of times at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.containers import engine
from tests.containers.conftest import client, image, pytest_runtest_makereport
from tests.distributed.conftest import corpus
from tests.faults.hosts import TAG, Lan, archive, flags
from tests.faults.hosts import lan as make_lan

__all__ = ["client", "corpus", "image", "pytest_runtest_makereport"]

TIMES: pytest.StashKey[list[str]] = pytest.StashKey()

COMPARED = 400
"""Steps whose losses are compared; later ones have to be there, each once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/faults/" in item.nodeid:
            item.add_marker(pytest.mark.containers)
            item.add_marker(pytest.mark.timeout(2 * engine.LIMIT_S))


@pytest.fixture(scope="session")
def data(corpus: Path) -> bytes:
    """What a master's volume has before the run: shards and a tokenizer."""
    return archive(corpus)


@pytest.fixture
def lan(client: docker.DockerClient, image: str, data: bytes) -> Iterator[Lan]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("killing containers and cutting links from outside needs root and the `ip` command")
    with make_lan(client, image, data) as made:
        yield made


@pytest.fixture(scope="session")
def undisturbed(client: docker.DockerClient, image: str, data: bytes) -> dict[int, float]:
    """Losses of one rank alone with the same flags, by step."""
    with make_lan(client, image, data) as made:
        host = made.add(0, ["python", "-m", "scripts.base_train", *flags(COMPARED)])
        host.container.put_archive("/data", data)
        host.start()
        assert host.code() == 0, made.explain()
        return {record["step"]: record["loss"] for record in made.records()}


@pytest.fixture
def check(lan: Lan, undisturbed: dict[int, float]) -> Callable[[int | None], list[dict[str, Any]]]:
    """Compare an ended run (of so many steps) with the undisturbed one; gives its records, in order of steps."""

    def compare(steps: int | None) -> list[dict[str, Any]]:
        records = lan.records()
        assert [record["step"] for record in records] == list(range(1, (steps or lan.step()) + 1)), lan.explain()
        worst = max(records[:COMPARED], key=lambda record: abs(record["loss"] - undisturbed[record["step"]]))
        difference = abs(worst["loss"] - undisturbed[worst["step"]])
        assert difference < 1e-4, f"{TAG}: step {worst['step']} differs by {difference:.2e}"
        return records

    return compare


@pytest.fixture
def times(pytestconfig: pytest.Config) -> Callable[[str, float], None]:
    """Keep a row of the table of seconds from an event to the next training step."""
    rows = pytestconfig.stash.setdefault(TIMES, [])
    return lambda event, seconds: rows.append(f"{event:64} {seconds:6.1f}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(TIMES, [])
    if rows:
        terminalreporter.section("seconds from event to next training step")
        terminalreporter.write_line("\n".join(rows))
