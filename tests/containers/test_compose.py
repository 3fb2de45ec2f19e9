"""`docker compose up` on compose.yaml, as any compose user would, to the end of a short run and away again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import docker
import pytest

from tests.containers import engine

SERVICES = ("prepare", "master", "worker")
SHORT_RUN = (
    "--depth 4 --max-seq-len 256 --device-batch-size 2 --total-batch-size 1024 --num-iterations 6 "
    "--eval-every 3 --eval-tokens 2048 --tracker none --run compose"
)


@dataclass(frozen=True)
class Stack:
    """The project's environment, and how its containers ended."""

    env: dict[str, str]
    image: str
    codes: dict[str, int]
    logs: dict[str, str]

    @property
    def volume(self) -> str:
        return f"{engine.PROJECT}_data"


def compose(env: dict[str, str], *arguments: str) -> str:
    done = engine.run(["docker", "compose", *arguments], **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def stack(client: docker.DockerClient, image: str) -> Iterator[Stack]:
    env = {"COMPOSE_PROJECT_NAME": engine.PROJECT, "LANTRAIN_IMAGE": image, "TRAIN_ARGS": SHORT_RUN}
    try:
        compose(env, "up", "--detach", "--no-build")
        containers = {
            name: client.containers.get(compose(env, "ps", "--all", "--quiet", name).strip()) for name in SERVICES
        }
        codes = {name: int(container.wait(timeout=engine.LIMIT_S)["StatusCode"]) for name, container in containers.items()}
        logs = {name: compose(env, "logs", "--no-color", "--no-log-prefix", name) for name in SERVICES}
        yield Stack(env, image, codes, logs)
    finally:
        engine.run(["docker", "compose", "down", "--volumes", "--timeout", "5"], **env)


def test_all_end_well(stack: Stack) -> None:
    assert stack.codes == dict.fromkeys(SERVICES, 0), stack.logs


def test_logs_tell_the_whole_run(stack: Stack) -> None:
    assert "ready: " in stack.logs["prepare"]
    steps = re.findall(r"^step (\d{5})/00006 .* loss: (\d+\.\d+)", stack.logs["master"], re.M)
    assert [step for step, _ in steps] == [f"{step:05d}" for step in range(1, 7)]
    assert "Validation bpb" in stack.logs["master"]
    assert "rank 1" in stack.logs["worker"]


def test_checkpoint_is_on_the_volume_and_belongs_to_the_user(stack: Stack) -> None:
    listing = engine.shell(stack.image, "cd /data && find . -type f -printf '%p %U:%G\\n'", stack.volume).splitlines()
    owners = dict(line.split() for line in listing)
    assert {f"./base_checkpoints/d4/{name}" for name in ("model_000006.pt", "complete_000006.json")} <= set(owners)
    assert "./tokenizer/tokenizer.json" in owners
    assert set(owners.values()) == {"1000:1000"}


def test_containers_may_do_nothing_they_need_not(stack: Stack, client: docker.DockerClient) -> None:
    for service in SERVICES:
        attributes = client.containers.get(compose(stack.env, "ps", "--all", "--quiet", service).strip()).attrs
        host = attributes["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert host["LogConfig"]["Config"] == {"max-size": "10m", "max-file": "5"}
        assert host["Init"]
        assert attributes["Config"]["User"] == "1000:1000"
    (mount,) = client.containers.get(compose(stack.env, "ps", "--all", "--quiet", "worker").strip()).attrs["Mounts"]
    assert not mount["RW"]


def test_a_second_up_goes_on_where_the_first_ended(stack: Stack) -> None:
    """prepare finds its work done, the trainer its steps."""
    compose({**stack.env, "TRAIN_ARGS": f"{SHORT_RUN} --resume auto"}, "up", "--no-build", "--exit-code-from", "master")
    log = compose(stack.env, "logs", "--no-color", "--no-log-prefix", "master")
    assert "step 00001/" not in log
    prepared = compose(stack.env, "logs", "--no-color", "--no-log-prefix", "prepare")
    assert "is there" in prepared


def test_make_sample_writes_text_from_the_volume(stack: Stack) -> None:
    done = engine.run(["make", "--no-print-directory", "sample", "PROMPT=def main(a='b', $x"], **stack.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "def main(a='b', $x" in done.stdout


def test_down_leaves_nothing(stack: Stack, client: docker.DockerClient) -> None:
    compose(stack.env, "down", "--volumes")
    project = {"label": f"com.docker.compose.project={engine.PROJECT}"}
    left = [
        *client.containers.list(all=True, filters=project),
        *client.networks.list(filters=project),
        *client.volumes.list(filters=project),
    ]
    assert left == []


def test_plain_compose_has_the_defaults_that_env_example_shows() -> None:
    """Every `#NAME=value` of .env.example that compose.yaml uses is compose's own default: the two cannot drift."""
    text = (engine.ROOT / ".env.example").read_text()
    shown = {name: value for name, value in re.findall(r"^#([A-Z_]+)=(.+)$", text, re.M)}
    unset = {name: "" for name in shown}
    bare = json.loads(compose_config({}))
    told = json.loads(compose_config({name: value for name, value in shown.items() if name in unset and used(name)}))
    assert told == bare


def used(name: str) -> bool:
    return f"${{{name}:-" in (engine.ROOT / "compose.yaml").read_text()


def compose_config(env: dict[str, str]) -> str:
    return compose(env, "--env-file", "/dev/null", "config", "--format", "json")
