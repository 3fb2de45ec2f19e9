"""The shipped image: what is in it, what is not, and that it runs as an ordinary user who may do nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from typing import Any

import docker
import pytest

import lantrain
from tests.containers import engine


@pytest.fixture(scope="module")
def attributes(client: docker.DockerClient, image: str) -> dict[str, Any]:
    return dict(client.images.get(image).attrs)


def test_labels_name_version_and_commit(attributes: dict[str, Any]) -> None:
    labels = attributes["Config"]["Labels"]
    commit = engine.run(["git", "rev-parse", "HEAD"]).stdout.strip()
    assert labels["org.opencontainers.image.title"] == "lantrain"
    assert labels["org.opencontainers.image.version"] == lantrain.__version__
    assert labels["org.opencontainers.image.revision"].removesuffix("-dirty") == (commit or "unknown")


def test_user_is_ordinary(attributes: dict[str, Any], image: str) -> None:
    assert attributes["Config"]["User"] == "1000:1000"
    assert engine.shell(image, "id -u; id -g; cat /proc/self/status | grep CapEff").split() == [
        "1000", "1000", "CapEff:", "0000000000000000",
    ]  # fmt: skip


def test_size_unpacked(image: str) -> None:
    """At most 1.25 GB; the engine's figure counts base and layers, this one what a person finds on the disk."""
    blocks = engine.shell(image, "du -xs --block-size=1000000 / 2>/dev/null | cut -f1", user="0:0")
    assert int(blocks) <= 1250


def test_packages_are_the_locked_ones_and_none_is_for_gpus(image: str) -> None:
    listing = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    found = {item.lower().replace("_", "-") for item in finish_python(image, listing).split()}
    assert not [item for item in found if re.match(r"(nvidia|cuda|triton)", item)]
    assert "torch==2.13.0+cpu" in found or "torch==2.13.0" in found
    locked = set(re.findall(r"^([a-z0-9.-]+==[^ \n]+)", (engine.ROOT / "docker/requirements.txt").read_text(), re.M))
    assert {item for item in found if not item.startswith("torch==")} <= locked
    assert {"pyarrow", "tiktoken", "rustbpe", "numpy"} <= {item.split("==")[0] for item in found}


def finish_python(image: str, code: str, **options: Any) -> str:
    return engine.finish(engine.Node(image, ["python", "-c", code], **options))


def test_no_compiler_and_no_installer(image: str) -> None:
    line = (
        "for tool in gcc cc g++ clang pip; do command -v $tool && exit 1; done; python -m pip --version && exit 1; true"
    )
    engine.shell(image, line)


def test_cpp_operations_are_compiled_in(image: str) -> None:
    """Where the build had a compiler. One OpenMP, torch's, and a step of the loss that runs them."""
    if engine.run(["docker", "image", "inspect", "lantrain-build:bookworm"]).returncode:
        pytest.skip("no lantrain-build:bookworm: run `make base-image`")
    code = (
        "import torch\n"
        "from lantrain.model.kernels import describe\n"
        "from lantrain.model.loss import token_losses\n"
        "print(describe())\n"
        "print(token_losses(torch.zeros(1, 64), torch.zeros(64, 64), torch.tensor([1]), vocab_size=50).tolist())\n"
        "print('openmp', len({x.split()[-1] for x in open('/proc/self/maps') if 'libgomp' in x}))\n"
    )
    output = finish_python(image, code)
    assert "C++ operations" in output
    assert "openmp 1" in output
    assert "3.91" in output  # log 50


@pytest.mark.parametrize("user", ["1000:1000", "4321:4321"])
def test_any_user_has_a_home_and_writes_only_to_the_volume(client: docker.DockerClient, image: str, user: str) -> None:
    """A uid that /etc/passwd does not know has no name and no home, and torch asks for both."""
    code = (
        "import getpass, os, pathlib, tempfile, torch, torch.distributed.run, matplotlib.pyplot, pyarrow.parquet\n"
        "print(getpass.getuser(), pathlib.Path.home(), torch.distributed.is_gloo_available())\n"
        "tempfile.TemporaryFile(); pathlib.Path('/data/mine').mkdir()\n"
        "try: pathlib.Path('/app/x').write_text('x')\n"
        "except OSError as error: print(error.strerror)\n"
    )
    with engine.volume(client) as name:
        output = finish_python(image, code, volume=name, user=user)
        owner = engine.shell(image, "stat -c %u:%g /data/mine", name)
    assert "trainer /tmp True" in output
    assert "Read-only file system" in output
    assert owner.strip() == user


def test_first_line_within_five_seconds(image: str) -> None:
    """From `docker run` to the trainer's first line: a person must see that something happens. Best of three."""
    docker_run = ["docker", "run", "--rm", "--network", "none", "--label", f"{engine.LABEL}={os.getpid()}"]
    times = []
    for _ in range(3):
        begun = time.monotonic()
        with subprocess.Popen(
            [*docker_run, image, "python", "-m", "scripts.base_train", "--dry-run"],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            times.append(time.monotonic() - begun)
            process.communicate(timeout=engine.LIMIT_S)
        assert process.returncode == 0
        assert first.startswith("lantrain")
    assert min(times) < 5, times


def test_builds_without_any_network(image: str, attributes: dict[str, Any]) -> None:
    """Base image and wheelhouse present: no build step may reach for the network. Cached layers do not count."""
    if not list((engine.ROOT / "wheelhouse").glob("torch-*.whl")):
        pytest.skip("wheelhouse/ is empty: run `make wheels`")
    base = "lantrain-base:bookworm"
    if engine.run(["docker", "image", "inspect", base]).returncode:
        pytest.skip(f"no {base}: run `make base-image`")
    tag = f"{engine.PROJECT}:offline"
    command = ["docker", "build", "--no-cache", "--network", "none", "--file", "docker/Dockerfile", "--tag", tag]
    try:
        built = engine.run([*command, "--build-arg", f"BASE_IMAGE={base}", "."], DOCKER_BUILDKIT="1")
        assert built.returncode == 0, built.stderr
        code = "import json, torch; print(json.dumps([torch.__version__, torch.distributed.is_gloo_available()]))"
        version, gloo = json.loads(finish_python(tag, code))
        assert version.startswith("2.13.0")
        assert gloo
    finally:
        engine.run(["docker", "image", "rm", "--force", tag])
