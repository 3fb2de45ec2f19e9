"""What folders share, each made once a session: the corpus, Docker's engine, the shipped image."""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Iterator
from pathlib import Path

# Ryuk is an image of its own that no registry here may have; engine.sweep does its work. Read when imported.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")

import docker
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lantrain.data.tokenizer import Tokenizer
from tests.containers import engine

HINT = "install Docker with its compose and buildx plugins and start it: https://docs.docker.com/engine/install/"
VOCABULARY = 512


def _documents(seed: int, count: int) -> list[str]:
    """Sentences of a little grammar, of very unequal length, so that packing has something to decide."""
    words = random.Random(0)
    lexicon = ["".join(words.choices("abcdefghijklmnop", k=words.randint(2, 9))) for _ in range(400)]
    draw = random.Random(seed)
    return [" ".join(draw.choices(lexicon, k=draw.randint(1, 120))) + "." for _ in range(count)]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory with three shards and a tokenizer; read-only by agreement."""
    base = tmp_path_factory.mktemp("corpus")
    data = base / "base_data_climbmix"
    data.mkdir()
    for index in range(3):
        table = pa.table({"text": _documents(index, 900)})
        pq.write_table(table, data / f"shard_{index:05d}.parquet", row_group_size=200)
    texts = (text for index in range(2) for text in _documents(index, 900))
    Tokenizer.train(texts, VOCABULARY).save(base / "tokenizer")
    return base


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """On CI a skipped test of what CI has is a failure: it would pass for a green one."""
    report = yield
    there = item.get_closest_marker("containers") or item.get_closest_marker("on_ci")
    if report.skipped and there and os.environ.get("CI") == "true":
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
