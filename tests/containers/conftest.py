"""The engine, the shipped image, and a volume with shards and a tokenizer, made once a session."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

# Ryuk is an image of its own that no registry here may have; engine.sweep does its work. Read when imported.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")

import docker
import pytest

from tests.containers import engine

TABLES: pytest.StashKey[list[tuple[str, str]]] = pytest.StashKey()
HINT = "install Docker with its compose and buildx plugins and start it: https://docs.docker.com/engine/install/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/containers/" in item.nodeid:
            item.add_marker(pytest.mark.containers)
            item.add_marker(pytest.mark.timeout(2 * engine.LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """On CI a skipped container test is a failure: it would pass for a green one."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"skipped on CI: {report.longrepr}"
    return report


def _why_not() -> str | None:
    try:
        docker.from_env(timeout=10).ping()
    except docker.errors.DockerException as error:
        return f"no Docker engine answers ({error})"
    for plugin in ("compose", "buildx"):
        if engine.run(["docker", plugin, "version"]).returncode:
            return f"docker has no {plugin} plugin"
    return None


@pytest.fixture(scope="session")
def client() -> Iterator[docker.DockerClient]:
    """The engine; without one all tests here skip and say why."""
    reason = _why_not()
    if reason:
        pytest.skip(f"{reason}: {HINT}")
    connected = docker.from_env(timeout=engine.LIMIT_S)
    engine.sweep(connected, everything_of=engine.dead_sessions(connected))
    yield connected
    engine.sweep(connected, everything_of={os.getpid()})
    connected.close()


@pytest.fixture(scope="session")
def image(client: docker.DockerClient) -> str:
    """The image of this working tree. Docker's layer cache makes this a second's work when nothing changed."""
    name = os.environ.get("LANTRAIN_IMAGE", "lantrain:latest")
    built = engine.run(["docker/build.sh"], LANTRAIN_IMAGE=name, PROGRESS="plain")
    assert built.returncode == 0, built.stdout + built.stderr
    return name


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
