"""`docker compose up` on compose.yaml, as any compose user would, to the end of a short run and away again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import docker
import pytest
from docker.models.containers import Container

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


def container(client: docker.DockerClient, env: dict[str, str], service: str) -> Container:
    return client.containers.get(compose(env, "ps", "--all", "--quiet", service).strip())


def up(client: docker.DockerClient, image: str, train_args: str) -> Stack:
    """`docker compose up` to the end of all services."""
    env = {"COMPOSE_PROJECT_NAME": engine.PROJECT, "LANTRAIN_IMAGE": image, "TRAIN_ARGS": train_args}
    compose(env, "up", "--detach", "--no-build")
    ended = {name: container(client, env, name).wait(timeout=engine.LIMIT_S) for name in SERVICES}
    # The service's name stands before each line.
    logs = {
        name: re.sub(r"^\S+ +\| ", "", compose(env, "logs", "--no-color", name), flags=re.MULTILINE)
        for name in SERVICES
    }
    return Stack(env, image, {name: int(end["StatusCode"]) for name, end in ended.items()}, logs)


@pytest.fixture(scope="module")
def stack(client: docker.DockerClient, image: str) -> Iterator[Stack]:
    try:
        yield up(client, image, SHORT_RUN)
    finally:
        engine.run(["docker", "compose", "down", "--volumes", "--timeout", "5"], COMPOSE_PROJECT_NAME=engine.PROJECT)


def test_all_end_well(stack: Stack) -> None:
    assert stack.codes == dict.fromkeys(SERVICES, 0), stack.logs


def test_logs_tell_the_whole_run(stack: Stack) -> None:
    assert "ready: " in stack.logs["prepare"]
    steps = re.findall(r"^step (\d{5})/00006 .* loss: (\d+\.\d+)", stack.logs["master"], re.MULTILINE)
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
        attributes = container(client, stack.env, service).attrs
        host = attributes["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert host["LogConfig"]["Config"] == {"max-size": "10m", "max-file": "5"}
        assert host["Init"]
        assert attributes["Config"]["User"] == "1000:1000"
    (mount,) = container(client, stack.env, "worker").attrs["Mounts"]
    assert not mount["RW"]


def test_a_second_up_goes_on_where_the_first_ended(stack: Stack, client: docker.DockerClient) -> None:
    """prepare finds its work done, the trainer its steps."""
    again = up(client, stack.image, SHORT_RUN.replace("--num-iterations 6", "--num-iterations 8 --resume auto"))
    assert again.codes == dict.fromkeys(SERVICES, 0), again.logs
    assert again.logs["prepare"].count("is there") == 2
    assert re.findall(r"^step (\d{5})/00008 ", again.logs["master"], re.MULTILINE) == ["00007", "00008"]


def test_make_sample_writes_text_from_the_volume(stack: Stack) -> None:
    done = engine.run(["make", "--no-print-directory", "sample", "PROMPT=def main(a='b', x"], **stack.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "def main(a='b', x" in done.stdout


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
    shown = dict(re.findall(r"^#([A-Z_]+)=(.+)$", text, re.MULTILINE))
    bare = json.loads(compose_config({}))
    told = json.loads(compose_config({name: value for name, value in shown.items() if used(name)}))
    assert told == bare


def used(name: str) -> bool:
    return f"${{{name}:-" in (engine.ROOT / "compose.yaml").read_text()


def compose_config(env: dict[str, str]) -> str:
    return compose(env, "--env-file", "/dev/null", "config", "--format", "json")
