"""Every setting that a compose file, the Makefile or a script reads is explained in .env.example, and no other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# What the recipes set for what they call, and what compose itself knows.
NOT_SETTINGS = {"MFLAGS", "COMPOSE_PROJECT_NAME", "NANOCHAT_BASE_DIR", "NANOCHAT_DATA_DIR", "UV"}


def documented() -> set[str]:
    return set(re.findall(r"^#?([A-Z][A-Z0-9_]*)=", (ROOT / ".env.example").read_text(), re.M))


def read_by_compose() -> set[str]:
    files = "".join((ROOT / name).read_text() for name in ("compose.yaml", "compose.multinode.yaml"))
    text = re.sub(r"^\s*#.*$", "", files, flags=re.M)
    interpolated = re.findall(r"\$\{([A-Z][A-Z0-9_]*)", text)
    handed_on = re.findall(r"^\s+([A-Z][A-Z0-9_]*):\s*$", text, re.M)
    return {*interpolated, *handed_on}


def read_by_make() -> set[str]:
    scripts = [*(ROOT / "tools").glob("*.sh"), *(ROOT / "docker").glob("*.sh")]
    with_default = {name for path in scripts for name in re.findall(r"\$\{([A-Z][A-Z0-9_]*):-", path.read_text())}
    return with_default | set(re.findall(r"^([A-Z][A-Z0-9_]*) \?=", (ROOT / "Makefile").read_text(), re.M))


# Who sets them, where that is not a person: torchrun, the launchers for their trainers, the image, compose.yaml.
SET_BY_PROGRAMS = {
    "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "LANTRAIN_BEACON", "LANTRAIN_GENERATION",
    "LANTRAIN_RUN", "LANTRAIN_STACKS", "LANTRAIN_NODES_ON_HOST",
}  # fmt: skip


def read_by_the_code() -> set[str]:
    """Names in `os.environ` and `lantrain.settings`, written there or in a constant of the same file."""
    found: set[str] = set()
    for path in (ROOT / "app").rglob("*.py"):
        text = path.read_text()
        constants = dict(re.findall(r'^([A-Z_]+)(?:: \w+)? = "([A-Z][A-Z0-9_]+)"', text, re.M))
        read = r"""(?:environ(?:\.get\(|\[|\.pop\()|getenv\(|positive_number\(|positive_integer\(|port\()\s*"""
        found |= set(re.findall(read + r"""["']([A-Z][A-Z0-9_]+)["']""", text))
        found |= {constants[name] for name in re.findall(read + r"([A-Z][A-Z0-9_]+)\b", text)}
    return found


def test_each_variable_that_the_code_reads_is_explained_somewhere() -> None:
    """.env.example has those of the containers, docs/internals.md those of the commands and for development."""
    internals = set(re.findall(r"^\| `([A-Z][A-Z0-9_]+)` \|", (ROOT / "docs/internals.md").read_text(), re.M))
    read = read_by_the_code()
    assert {"NANOCHAT_BASE_DIR", "HUB_PORT", "KEEP_SLOW", "LANTRAIN_KERNELS"} <= read  # the search finds some
    assert read - documented() - internals - SET_BY_PROGRAMS == set()
    assert read >= SET_BY_PROGRAMS


def test_each_setting_is_documented_and_each_documented_one_is_read() -> None:
    read = (read_by_compose() | read_by_make()) - NOT_SETTINGS
    assert documented() - {"PYTHON"} == read - {"PYTHON"}
    assert "${PYTHON" in (ROOT / "tools/venv.sh").read_text()


def make_value(folder: Path, *arguments: str, **env: str) -> str:
    """What make hands to compose as TRAIN_ARGS, in a folder with the Makefile and a .env of its own."""
    (folder / "Makefile").write_text(
        (ROOT / "Makefile").read_text() + '\nshow:\n\t@printf %s "$$TRAIN_ARGS"\n.PHONY: show\n'
    )
    done = subprocess.run(
        ["make", "--silent", "show", *arguments],
        cwd=folder, env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


LINES = [
    "TRAIN_ARGS=--depth 4 --run a#b", "TRAIN_ARGS='--depth 4 --run a#b'", 'TRAIN_ARGS="--depth 4 --run a#b"',
    "TRAIN_ARGS=--depth 4 --run a#b  # what for", 'TRAIN_ARGS="--depth 4 --run a#b" # what for',
    "TRAIN_ARGS=--depth 4 --run a#b   ", "TRAIN_ARGS=--depth 4 --run a#b\r", "export TRAIN_ARGS=--depth 4 --run a#b",
    "TRAIN_ARGS=--depth 8\nTRAIN_ARGS=--depth 4 --run a#b",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_make_reads_env_as_compose_does(tmp_path: Path, line: str) -> None:
    (tmp_path / ".env").write_text(f"# comment\n{line}\n#TRAIN_ARGS=--depth 9\n")
    assert make_value(tmp_path) == "--depth 4 --run a#b"


@pytest.mark.skipif(not shutil.which("docker"), reason="compose itself is asked, and there is no Docker here")
@pytest.mark.parametrize("line", LINES)
def test_compose_reads_these_lines_so(tmp_path: Path, line: str) -> None:
    (tmp_path / ".env").write_text(f"{line}\n")
    (tmp_path / "compose.yaml").write_text("services: {a: {image: x, environment: {GOT: '${TRAIN_ARGS}'}}}\n")
    done = subprocess.run(
        ["docker", "compose", "config", "--format", "json"],
        cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["services"]["a"]["environment"]["GOT"] == "--depth 4 --run a#b"


def test_environment_and_command_line_win_over_env_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TRAIN_ARGS=--depth 4\n")
    assert make_value(tmp_path, TRAIN_ARGS="--depth 5") == "--depth 5"
    assert make_value(tmp_path, "TRAIN_ARGS=--depth 6") == "--depth 6"


def test_make_alone_lists_every_target_in_one_line_each() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^\.PHONY: (\S+)$", makefile, re.M)) - {"help"}
    env = {"PATH": os.environ["PATH"]}  # without MAKEFLAGS: these tests may run under make themselves
    done = subprocess.run(["make"], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    listing = done.stdout.splitlines()
    assert {line.split()[1] for line in listing} == targets
    assert len(listing) == len(targets)


@pytest.mark.parametrize(("lock", "extra"), [("requirements.txt", None), ("requirements-dev.txt", "dev")])
def test_lock_file_has_what_pyproject_asks_for(lock: str, extra: str | None) -> None:
    """A dependency added without `docker/lock.sh` would be missing from the image and from everybody's venv."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else [])]
    text = (ROOT / "docker" / lock).read_text()
    pinned = dict(re.findall(r"^([a-z0-9._-]+)==([^ ;\n]+)", text, re.MULTILINE))
    for requirement in map(Requirement, wanted):
        if requirement.name != "torch":  # from the index of CPU builds, pinned in pyproject.toml itself
            version = pinned.get(requirement.name.lower().replace("_", "-"), "missing")
            assert version != "missing", f"{requirement.name} is not in docker/{lock}: run docker/lock.sh"
            assert requirement.specifier.contains(version)
    assert not re.findall(r"^(?:nvidia|cuda|triton)\S*==", text, re.MULTILINE)
