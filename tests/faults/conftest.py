"""A LAN for each test, the undisturbed run that all are compared with, and the table of times at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.containers import engine
from tests.faults.hosts import Check, Lan, archive, flags
from tests.faults.hosts import lan as make_lan

TIMES: pytest.StashKey[list[str]] = pytest.StashKey()

COMPARED = 400
"""Steps whose losses are compared in each test; later ones have to be there, each once."""
COMPARED_LONG = 2000
"""The same for the long test."""


def limit_at(step: int) -> float:
    """How far the loss of `step` may be from the undisturbed run's.

    Rounding, which differs with the number of ranks, is enlarged from step to step: two undisturbed runs, of one rank
    and of two, differ by 5e-7 in their first 800 steps, by 2e-5 in 1600 and by 9e-3 in 2000. From one step's rows to
    the next step's the loss differs by 0.08 on average, so that a row read twice, or none, would show.
    """
    return 1e-4 if step <= 1000 else 0.03


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
    if os.geteuid() != 0:
        pytest.skip("killing containers and cutting links from outside needs root")
    with make_lan(client, image, data) as made:
        yield made


@pytest.fixture(scope="session")
def undisturbed(client: docker.DockerClient, image: str, data: bytes) -> Callable[[int], dict[int, float]]:
    """Losses by step, at least up to a step, of one rank alone with the same flags."""
    known: dict[int, float] = {}

    def losses(steps: int) -> dict[int, float]:
        if len(known) < steps:
            with make_lan(client, image, data) as made:
                host = made.add(0, ["python", "-m", "scripts.base_train", *flags(steps)])
                host.container.put_archive("/data", data)
                assert host.start().code(engine.LIMIT_S) == 0, made.explain()
                known.update((record["step"], record["loss"]) for record in made.records())
        return known

    return losses


@pytest.fixture
def check(lan: Lan, undisturbed: Callable[[int], dict[int, float]]) -> Check:
    """Compare an ended run (of so many steps) with the undisturbed one; gives its records, in order of steps."""

    def compare(steps: int | None, *, compared: int = COMPARED) -> list[dict[str, Any]]:
        records = lan.records()
        assert [record["step"] for record in records] == list(range(1, (steps or lan.step()) + 1)), lan.explain()
        losses = undisturbed(compared)
        for record in records[:compared]:
            step, loss = record["step"], record["loss"]
            assert abs(loss - losses[step]) < limit_at(step), f"step {step}: {loss}, undisturbed {losses[step]}"
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
