"""A volume with shards and a tokenizer, made once a session, and tables to print at its end."""

from __future__ import annotations

from collections.abc import Iterator

import docker
import pytest

from tests.containers import engine

TABLES: pytest.StashKey[list[tuple[str, str]]] = pytest.StashKey()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/containers/" in item.nodeid:
            item.add_marker(pytest.mark.containers)
            item.add_marker(pytest.mark.timeout(2 * engine.LIMIT_S))


@pytest.fixture(scope="session")
def prepared(client: docker.DockerClient, image: str) -> Iterator[str]:
    """A volume with the sample corpus and a tokenizer where the report's user had them: under ~/.cache/nanochat."""
    with engine.volume(client) as name:
        engine.finish(
            engine.Node(
                image,
                ["python", "-m", "scripts.prepare", "--source", "sample"],
                volume=name,
                env={
                    "NANOCHAT_BASE_DIR": "/data/.cache/nanochat",
                    "NANOCHAT_DATA_DIR": "/data/.cache/nanochat/base_data_small",
                },
            )
        )
        yield name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, table in config.stash.get(TABLES, []):
        terminalreporter.section(title)
        terminalreporter.write_line(f"\n{table}\n")


@pytest.fixture
def tables(pytestconfig: pytest.Config) -> list[tuple[str, str]]:
    """Title and text of tables to print after the tests, whatever pytest captures."""
    return pytestconfig.stash.setdefault(TABLES, [])
