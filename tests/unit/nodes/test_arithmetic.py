"""The same bits on every machine that takes part."""

from __future__ import annotations

import pytest
import torch

from lantrain.nodes.arithmetic import cpu_class, under, update_digest
from lantrain.nodes.messages import NodeInfo
from lantrain.probes.compare import arithmetic

LEVEL = torch.backends.cpu.get_cpu_capability()


def node(cpu: str, update: str) -> NodeInfo:
    return NodeInfo(version="1", torch="2", cpu=cpu, update=update)


def test_digest_is_the_same_for_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    digests = set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        digests.add(update_digest())
    torch.set_num_threads(threads)
    assert len(digests) == 1


@pytest.mark.skipif(LEVEL not in ("AVX2", "AVX512"), reason=f"this CPU is {LEVEL}")
def test_digest_tells_the_classes_apart_that_differ_and_no_others() -> None:
    plain, avx2 = under("default"), under("avx2")
    assert plain[0].endswith(" DEFAULT")
    assert avx2[0].endswith(" AVX2")
    assert avx2[1] == update_digest(), "AVX2 and AVX-512 round alike"
    assert plain[1] != avx2[1]
    assert under("") == (cpu_class(), update_digest())


def test_what_differs_is_refused_with_what_to_type() -> None:
    assert arithmetic(node("x86_64 AVX2", "ab"), "x86_64 AVX512", "ab").status == "ok"
    assert arithmetic(node("x86_64 AVX2", "ab"), "", "").status == "ok", "nothing to compare with"
    other = arithmetic(node("x86_64 DEFAULT", "cd"), "x86_64 AVX512", "ab")
    assert other.status == "fail"
    assert "ATEN_CPU_CAPABILITY=default" in other.line()
    assert "on the master" in other.line()
    far = arithmetic(node("aarch64 NEON", "cd"), "x86_64 AVX512", "ab")
    assert "one architecture" in far.line()
