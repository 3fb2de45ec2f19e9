from __future__ import annotations

import time

import pytest
import torch

from lantrain.cluster import gemm
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


def test_emulated_bf16_is_not_chosen_however_slow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held to AVX2, a CPU with the instructions emulates bf16; and a busy machine shows any rate at all."""
    monkeypatch.setenv("NANOCHAT_DTYPE", "auto")
    monkeypatch.setattr(gemm, "native_bf16", lambda: True)
    rates = {torch.float32: 3e9, torch.bfloat16: 4e9}  # a machine on which nothing gets done
    monkeypatch.setattr(gemm, "fastest", lambda dtype, size, seconds: rates[dtype])
    assert choose_dtype() == (torch.float32, "auto: bf16 is emulated here")
    rates |= {torch.float32: 2e11, torch.bfloat16: 4e10}
    assert choose_dtype()[0] == torch.float32
    rates |= {torch.bfloat16: 4e11}
    assert choose_dtype() == (torch.bfloat16, "auto: fp32 200, bf16 400 GFLOP/s a core")
    rates |= {torch.bfloat16: 2.4e11}
    assert choose_dtype()[0] == torch.float32
