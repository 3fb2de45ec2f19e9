"""The commands that people type: `make up-master`, `make up-worker HOST=...`, `make status`, `make down`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import docker
import pytest

from tests.containers import engine
from tests.distributed.ranks import free_port
from tests.faults.hosts import Host, flags, until


def make(target: str, *variables: str, **env: str) -> subprocess.CompletedProcess[str]:
    # As a person's make: these tests run under `make test`, whose level and flags would show in what is printed.
    outer = {"MAKELEVEL": "0", "MAKEFLAGS": "", "MFLAGS": "", "MAKEOVERRIDES": ""}
    return engine.run(["make", "--no-print-directory", target, *variables], **outer, **env)


@pytest.fixture
def env(client: docker.DockerClient, image: str, data: bytes) -> Iterator[dict[str, str]]:
    """A project of its own, whose volume has data. On the host's network: its ports must be free."""
    variables = {
        "COMPOSE_PROJECT_NAME": engine.PROJECT, "LANTRAIN_IMAGE": image, "PROGRESS": "plain", "OMP_NUM_THREADS": "1",
        "HUB_PORT": str(free_port()), "MASTER_PORT": str(free_port()), "TRAIN_ARGS": " ".join(flags()),
    }  # fmt: skip
    compose = ["docker", "compose", "--file", "compose.multinode.yaml", "--profile", "master", "--profile", "worker"]
    made = engine.run([*compose, "create", "master"], **variables)
    assert made.returncode == 0, made.stderr
    client.containers.get(f"{engine.PROJECT}-master-1").put_archive("/data", data)
    try:
        yield variables
    finally:
        engine.run([*compose, "down", "--volumes", "--timeout", "5"], **variables)


def containers(client: docker.DockerClient, service: str) -> list[Host]:
    found = client.containers.list(
        all=True,
        filters={"label": [f"com.docker.compose.project={engine.PROJECT}", f"com.docker.compose.service={service}"]},
    )
    return [Host(container, service, "") for container in found]


@pytest.mark.parametrize(("host", "words"), [((), "HOST is missing"), (("HOST= '' ",), "HOST is missing")])
def test_a_missing_host_is_one_line_before_anything_is_started(host: tuple[str, ...], words: str) -> None:
    done = make("up-worker", *host, COMPOSE_PROJECT_NAME=engine.PROJECT, HOST="")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert words in line
    assert "make up-worker HOST=192.168.1.36" in line
    assert done.stdout == ""


def test_a_wrong_host_is_told_at_the_keyboard(client: docker.DockerClient, env: dict[str, str]) -> None:
    done = make("up-worker", "HOST=192.168.1", **env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "error: HOST='192.168.1' is neither a name nor an address" in done.stdout + done.stderr
    assert containers(client, "worker") == []


def test_status_without_a_node_is_one_line(client: docker.DockerClient) -> None:
    done = make("status", COMPOSE_PROJECT_NAME=f"{engine.PROJECT}-none")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no node runs on this machine (mend: make up-master")


def test_two_commands_then_status_then_down(client: docker.DockerClient, env: dict[str, str]) -> None:
    """Master and worker on this machine; `down` ends the run everywhere, with a checkpoint of the last step."""
    up = make("up-master", "NODES=2", **env)
    assert up.returncode == 0, up.stdout + up.stderr
    (master,) = containers(client, "master")
    until(lambda: master.says("make up-worker HOST="), "command for the workers", master.logs)
    typed = re.search(r"make up-worker (HOST=\S+) (HUB_PORT=\d+)", master.logs())
    assert typed, master.logs()
    assert typed[2] == f"HUB_PORT={env['HUB_PORT']}"
    up = make("up-worker", typed[1], **env)
    assert up.returncode == 0, up.stdout + up.stderr
    (worker,) = containers(client, "worker")
    until(lambda: master.says("^step 00025/"), "step 25", lambda: master.logs() + worker.logs())
    status = make("status", **env)
    assert re.search(r"^running, generation 1, step \d+", status.stdout), status.stdout + status.stderr
    assert len(re.findall(r"^[01] ", status.stdout, re.M)) == 2, status.stdout
    listed = make("ps", **env).stdout
    assert f"{engine.PROJECT}-master-1" in listed, listed
    assert f"{engine.PROJECT}-worker-1" in listed, listed
    logs = engine.run(["docker", "compose", "logs", "--tail", "100"], **env).stdout  # `make logs`, without following
    assert "rank 0" in logs, logs
    assert "rank 1" in logs, logs
    for host in (master, worker):
        attributes = host.container.attrs
        assert attributes["HostConfig"]["NetworkMode"] == "host"
        assert attributes["HostConfig"]["ReadonlyRootfs"]
        assert attributes["HostConfig"]["CapDrop"] == ["ALL"]
        assert attributes["HostConfig"]["RestartPolicy"]["Name"] == "on-failure"
        assert attributes["Config"]["StopTimeout"] == 120
    followed = subprocess.Popen(
        ["docker", "logs", "--follow", str(worker.container.id)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    down = make("down", **env)
    assert down.returncode == 0, down.stdout + down.stderr
    assert containers(client, "master") == containers(client, "worker") == []
    said, _ = followed.communicate(timeout=60)
    assert b"the run has ended: the master was told to end" in said
    listing = engine.shell(env["LANTRAIN_IMAGE"], "ls /data/base_checkpoints/lan", f"{engine.PROJECT}_data")
    steps = [int(step) for step in re.findall(r"^complete_(\d+)\.json", listing, re.M)]
    assert max(steps) > 20
    assert max(steps) % 20 or len(steps) > 1
