"""The same bits on every machine that takes part, of whatever kind its CPU is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lantrain.nodes.arithmetic import cpu_class, update_digest
from lantrain.nodes.messages import NodeInfo
from lantrain.optim import adamw
from lantrain.probes.compare import arithmetic

APP = Path(__file__).parents[3] / "app"
LEVEL = torch.backends.cpu.get_cpu_capability()


def node(cpu: str, update: str) -> NodeInfo:
    return NodeInfo(version="1", torch="2", cpu=cpu, update=update)


def elsewhere(**variables: str) -> tuple[str, str]:
    """Class and digest of a process with these variables: torch reads its limit once."""
    env = {**os.environ, **variables, "PYTHONPATH": str(APP)}
    command = [sys.executable, "-m", "lantrain.nodes.arithmetic"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    name, digest = done.stdout.strip().rsplit(" ", 1)
    return name, digest


def test_digest_is_the_same_for_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    digests = set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        digests.add(update_digest())
    torch.set_num_threads(threads)
    assert len(digests) == 1


@pytest.mark.on_ci
@pytest.mark.skipif(LEVEL not in ("AVX2", "AVX512"), reason=f"this CPU is {cpu_class()}")
@pytest.mark.parametrize("level", ["default", "avx2"])
def test_digest_is_the_same_for_every_class(level: str) -> None:
    assert elsewhere(ATEN_CPU_CAPABILITY=level) == (f"x86_64 {level.upper()}", update_digest())


def test_digest_is_the_same_without_the_operations_in_cpp() -> None:
    assert elsewhere(LANTRAIN_KERNELS="off") == (cpu_class(), update_digest())


@pytest.mark.parametrize("name", ["adamw_update", "advance_rows"])
def test_digest_tells_of_one_wrong_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last place of one weight, in whole updates and in rows that were left behind."""
    right, good = update_digest(), getattr(adamw, name)

    def wrong(param: torch.Tensor, *others: object, **options: object) -> None:
        good(param, *others, **options)
        param.view(-1).view(torch.int32)[-1] += 1

    monkeypatch.setattr(adamw, name, wrong)
    assert update_digest() != right


def test_what_differs_is_refused_with_what_to_type() -> None:
    assert arithmetic(node("x86_64 AVX2", "ab"), "x86_64 AVX512", "ab").status == "ok"
    assert arithmetic(node("aarch64 DEFAULT", "ab"), "x86_64 AVX512", "ab").status == "ok"
    assert arithmetic(node("x86_64 AVX2", "ab"), "", "").status == "ok", "nothing to compare with"
    other = arithmetic(node("x86_64 AVX2", "cd"), "x86_64 AVX512", "ab")
    assert other.status == "fail"
    assert "(on this machine: make image; " in other.line()
