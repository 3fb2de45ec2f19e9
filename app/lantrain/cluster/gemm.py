"""How fast this machine multiplies matrices, and which dtype that speaks for."""

from __future__ import annotations

import os
import time

import torch

SLOW_FLOPS = 5e9
"""Below this rate on a small product a big one is not tried: bf16 without the instructions is up to 500x slower."""


def gemm_rate(dtype: torch.dtype, size: int = 1024, seconds: float = 0.4) -> float:
    """FLOP/s of a (size, size) matrix product in `dtype` with the current threads, kept up for `seconds`.

    Over a while, because a CPU quota lets a burst of some 40 ms pass at full speed. A small product comes first and
    bounds the time on a machine that emulates the dtype.
    """

    def rate(n: int, seconds: float) -> float:
        a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
        torch.mm(a, b)  # page faults and the start of threads
        start, done, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < seconds:
            torch.mm(a, b)
            done, elapsed = done + 1, time.perf_counter() - start
        return 2 * n**3 * done / elapsed

    small = rate(128, 0.01)
    return small if small < SLOW_FLOPS else rate(size, seconds)


def fastest(dtype: torch.dtype, size: int, seconds: float) -> float:
    """FLOP/s of one thread's fastest (size, size) product of those that fit in `seconds`, two at least.

    For comparing dtypes: on a busy machine a rate over a while says more about the other programs, and several threads
    wait for the one that has no core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        out = torch.mm(a, b)
        best, end, runs = float("inf"), time.perf_counter() + seconds, 0
        while runs < 2 or time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            best, runs = min(best, time.perf_counter() - start), runs + 1
        return 2 * size**3 / best
    finally:
        torch.set_num_threads(threads)


def native_bf16() -> bool:
    """Whether this CPU has bf16 matrix instructions (AVX512_BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_tile", "amx_bf16"))


def choose_dtype() -> tuple[torch.dtype, str]:
    """Compute dtype and the reason, from NANOCHAT_DTYPE: float32 (default), bfloat16, or auto.

    auto takes bf16 only where the CPU has the instructions and a product is at least 1.3 times as fast.
    """
    given = os.environ.get("NANOCHAT_DTYPE") or "float32"
    if given != "auto":
        return getattr(torch, given), f"NANOCHAT_DTYPE={given}" if "NANOCHAT_DTYPE" in os.environ else "default"
    if not native_bf16():
        return torch.float32, "auto: this CPU has no bf16 matrix instructions"
    # A small product first: where the instructions may not be used (a limit in the environment) bf16 takes up to 500
    # times as long, and a large product half a minute.
    if fastest(torch.bfloat16, 128, 0.1) < max(SLOW_FLOPS, fastest(torch.float32, 128, 0.1) / 4):
        return torch.float32, "auto: bf16 is emulated here"
    rates = {torch.float32: 0.0, torch.bfloat16: 0.0}
    for _ in range(3):  # in turns, so that another program's work falls on both
        for dtype in rates:
            rates[dtype] = max(rates[dtype], fastest(dtype, 512, 0.05))
    fp32, bf16 = rates.values()
    reason = f"auto: fp32 {fp32 / 1e9:.0f}, bf16 {bf16 / 1e9:.0f} GFLOP/s a core"
    return (torch.bfloat16 if bf16 > 1.3 * fp32 else torch.float32), reason
