from __future__ import annotations

import time

import pytest
import torch

from lantrain.cluster.gemm import choose_dtype, gemm_rate, native_bf16


def test_rate_is_of_work_that_was_done() -> None:
    """A product of 256 done by hand in the same minute: no other order of magnitude than that."""
    a = torch.randn(256, 256)
    start = time.perf_counter()
    for _ in range(50):
        torch.mm(a, a)
    by_hand = 50 * 2 * 256**3 / (time.perf_counter() - start)
    assert by_hand / 100 < gemm_rate(torch.float32, 256, 0.05) < by_hand * 100


def test_dtype_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOCHAT_DTYPE", raising=False)
    assert choose_dtype() == (torch.float32, "default")
    monkeypatch.setenv("NANOCHAT_DTYPE", "bfloat16")
    assert choose_dtype() == (torch.bfloat16, "NANOCHAT_DTYPE=bfloat16")
    monkeypatch.setenv("NANOCHAT_DTYPE", "auto")
    dtype, reason = choose_dtype()
    assert reason.startswith("auto: ")
    assert dtype == torch.float32 or native_bf16(), "bf16 only where the CPU has the instructions"
