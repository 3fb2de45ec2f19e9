"""Containers, networks and volumes of one test session, all labelled, so that nothing is left behind.

testcontainers removes what its context managers made, also after a failure; the labels catch the rest (a killed
pytest, a volume, a compose project), at the end of the session and at the start of the next one.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

ROOT = Path(__file__).parents[2]
LABEL = "lantrain.test.pid"
PROJECT = f"lantrain-test-{os.getpid()}"
# What compose.yaml gives a container, and nothing more.
HARDENED: dict[str, Any] = {
    "user": "1000:1000",
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "shm_size": "256m",
    "init": True,
}
# No run of the shipped image may outlast this: a hang is a failure, not a stuck CI.
LIMIT_S = 600


def labels() -> dict[str, str]:
    return {LABEL: str(os.getpid())}


def run(command: Sequence[str], timeout: float = LIMIT_S, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's root with `env` added; output captured, never raises on a non-zero exit."""
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout, check=False
    )


def sweep(client: docker.DockerClient, *, everything_of: set[int]) -> None:
    """Remove all that carries the label of one of these processes, compose projects included."""

    def theirs(object_labels: dict[str, str] | None) -> bool:
        found = object_labels or {}
        project = found.get("com.docker.compose.project", "")
        owner = found.get(LABEL) or (project.removeprefix("lantrain-test-") if "lantrain-test-" in project else "")
        return owner.isdigit() and int(owner) in everything_of

    for container in client.containers.list(all=True):
        if theirs(container.labels):
            container.remove(force=True, v=True)
    for network in client.networks.list():
        if theirs(network.attrs.get("Labels")):
            network.remove()
    for volume in client.volumes.list():
        if theirs(volume.attrs.get("Labels")):
            volume.remove(force=True)


def dead_sessions(client: docker.DockerClient) -> set[int]:
    """Processes that left labelled objects and live no more."""
    owners = set()
    for found in [
        *(container.labels for container in client.containers.list(all=True)),
        *(network.attrs.get("Labels") or {} for network in client.networks.list()),
        *(volume.attrs.get("Labels") or {} for volume in client.volumes.list()),
    ]:
        owner = found.get(LABEL) or found.get("com.docker.compose.project", "").removeprefix("lantrain-test-")
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            owners.add(int(owner))
    return owners


@contextmanager
def volume(client: docker.DockerClient) -> Iterator[str]:
    """A fresh named volume; yields its name."""
    made = client.volumes.create(labels=labels())
    try:
        yield made.name
    finally:
        made.remove(force=True)


def copy_volume(client: docker.DockerClient, image: str, source: str, target: str) -> None:
    mounts = {source: {"bind": "/from", "mode": "ro"}, target: {"bind": "/data", "mode": "rw"}}
    command = ["cp", "--archive", "--no-target-directory", "/from/.cache", "/data/.cache"]
    client.containers.run(image, command, volumes=mounts, labels=labels(), remove=True, network_mode="none")


@contextmanager
def network() -> Iterator[Network]:
    with Network(docker_network_kw={"driver": "bridge", "labels": labels()}) as made:
        yield made


class Node:
    """One container of the shipped image, hardened as compose.yaml does it, started on entry and removed on exit."""

    def __init__(
        self,
        image: str,
        command: Sequence[str],
        *,
        volume: str | None = None,
        network: Network | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._made = (
            DockerContainer(image)
            # docker-py splits a string and hands a list on as it is; testcontainers' annotation knows only strings.
            .with_command(list(command))  # type: ignore[arg-type]
            .with_envs(**(env or {}))
            .with_tmpfs_mount("/tmp")
            .with_kwargs(**{**HARDENED, "labels": labels(), **options})
        )
        if volume:
            self._made.with_volume_mapping(volume, "/data", "rw")
        if network:
            self._made.with_network(network)

    def __enter__(self) -> Node:
        self._made.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._made.stop()

    @property
    def container(self) -> Container:
        return self._made.get_wrapped_container()

    def address(self) -> str:
        self.container.reload()
        (attached,) = self.container.attrs["NetworkSettings"]["Networks"].values()
        return str(attached["IPAddress"])

    def wait(self) -> int:
        """Exit code; raises when the container does not end within LIMIT_S."""
        return int(self.container.wait(timeout=LIMIT_S)["StatusCode"])

    def logs(self) -> str:
        return self.container.logs().decode(errors="replace")


def finish(node: Node) -> str:
    """Run a node to its end; returns its log. Raises AssertionError with the log on a non-zero exit."""
    with node:
        code = node.wait()
        log = node.logs()
    assert code == 0, f"exit {code}\n{log}"
    return log


def shell(image: str, line: str, volume: str | None = None, **options: Any) -> str:
    """Output of a shell line in a container of the image."""
    return finish(Node(image, ["bash", "-c", line], volume=volume, **options))


def read_file(image: str, volume: str, path: str) -> str:
    return shell(image, f"cat {shlex.quote(path)}", volume)
