import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lantrain.model.kernels import runnable
from lantrain.optim.adamw import Constants, adamw_update, advance_rows, moments_like

APP = Path(__file__).parents[3] / "app"


@pytest.mark.parametrize("shape", [(1,), (7,), (33, 65), (1, 24), (0, 8)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_steps_equal_the_formula_in_double(shape, weight_decay):
    random = torch.Generator().manual_seed(5)
    param, m, v = torch.randn(shape, generator=random), torch.zeros(shape), torch.zeros(shape)
    p64, m64, v64 = (z.double() for z in (param, m, v))
    lr, (b1, b2), eps = 0.03, (0.8, 0.995), 1e-10
    for step in range(1, 8):
        grad = torch.randn(shape, generator=random) * 10.0 ** (-2 * step)  # late ones near epsilon
        g64 = grad.double()
        p64 = p64 * (1 - lr * weight_decay)
        m64, v64 = b1 * m64 + (1 - b1) * g64, b2 * v64 + (1 - b2) * g64**2
        p64 = p64 - lr / (1 - b1**step) * m64 / ((v64 / (1 - b2**step)).sqrt() + eps)
        adamw_update(param, grad, m, v, step=step, lr=lr, betas=(b1, b2), eps=eps, weight_decay=weight_decay)
        torch.testing.assert_close(param.double(), p64, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(m.double(), m64, atol=1e-9, rtol=1e-5)
        torch.testing.assert_close(v.double(), v64, atol=1e-15, rtol=1e-5)


def test_epsilon_is_added_after_the_bias_correction():
    """With a gradient of the size of epsilon the two places differ by far more than rounding."""
    param, m, v = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    adamw_update(param, torch.tensor([1e-10]), m, v, step=1, lr=1.0, betas=(0.8, 0.995), eps=1e-10, weight_decay=0.0)
    assert param.item() == pytest.approx(-0.5, rel=1e-4)


def test_rows_that_no_token_touched_decay_as_if_their_gradient_were_zero():
    param, m, v = torch.ones(2, 4), torch.full((2, 4), 0.5), torch.ones(2, 4)
    grad = torch.zeros(2, 4)
    adamw_update(param, grad, m, v, step=3, lr=0.1, betas=(0.8, 0.995), eps=1e-10, weight_decay=0.01)
    torch.testing.assert_close(m, torch.full((2, 4), 0.4))
    torch.testing.assert_close(v, torch.full((2, 4), 0.995))


DIGESTS = """
import torch
from lantrain.model.kernels import describe
from lantrain.nodes.arithmetic import cpu_class, update_digest

for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    print(cpu_class(), describe(), update_digest(), sep=" | ")
"""


def test_same_bits_on_every_cpu_and_any_number_of_threads():
    """Embedding state is replicated on machines that differ in both, without being exchanged."""
    ways = [("default", "off"), ("avx2", "off"), ("avx512", "off"), *(("avx512", name) for name in runnable())]
    lines = []
    for capability, operations in ways:  # avx512 falls back to what the CPU has
        env = os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(APP)}
        env["LANTRAIN_KERNELS"] = operations
        command = [sys.executable, "-c", DIGESTS]
        lines += subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == 3 * len(ways)
    digests = {line.rsplit(" | ", 1)[1] for line in lines}
    assert len(digests) == 1, lines
    assert len({line.rsplit(" | ", 1)[0] for line in lines}) > 1, "every way used the same operations"


V, STEPS = 23, 90


def _learning_rates() -> list[float]:
    """Warmup, a constant part, a zero, and the end of a schedule."""
    return [0.3 * min(1, (t + 1) / 10) * (1 if t < 60 else 0.95 ** (t - 60)) * (t != 40) for t in range(STEPS)]


def _touched(random: torch.Generator, step: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a step, some often, some seldom, some never, and their gradients; sometimes none."""
    chance = torch.linspace(0.0, 0.6, V) ** 2
    ids = (torch.rand(V, generator=random) < chance).nonzero().view(-1)
    return ids, torch.randn(ids.numel(), width, generator=random) * 10.0 ** -(step % 9)


def _table(random: torch.Generator, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    param = torch.randn(V, width, generator=random)
    param[3] = 0.0
    return [param, *moments_like(param, dtype)]


@pytest.mark.parametrize("width", [1, 40, 128, 200])
@pytest.mark.parametrize("operations", ["", "off"])
@pytest.mark.parametrize("every", [1, 7, STEPS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_left_behind_get_the_bits_of_a_step_each(width, operations, every, dtype, monkeypatch):
    """What a table gets when rows wait for a token, or for `every` steps, is what it gets when all rows step."""
    monkeypatch.setenv("LANTRAIN_KERNELS", operations)
    random = torch.Generator().manual_seed(width)
    dense = _table(random, width, dtype)
    lazy = [tensor.clone() for tensor in dense]
    constants, behind, steps = Constants((0.8, 0.995), 1e-10, 0.01), torch.zeros(V, dtype=torch.int32), []
    for number, lr in enumerate(_learning_rates(), 1):
        ids, grads = _touched(random, number, width)
        whole = torch.zeros(V, width).index_copy_(0, ids, grads)
        adamw_update(dense[0], whole, *dense[1:], step=number, lr=lr, betas=(0.8, 0.995), eps=1e-10, weight_decay=0.01)
        steps.append(constants.step(number, lr))
        behind += 1
        advance_rows(*lazy, ids, grads, behind, steps, constants)
        behind[ids] = 0
        if number % every == 0:
            advance_rows(*lazy, slice(5, V), None, behind, steps, constants)
            behind[5:] = 0
    advance_rows(*lazy, slice(0, V), None, behind, steps, constants)
    for one, other in zip(dense, lazy, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(dense[0][-1], dense[0][-2])


def test_rounded_moments_end_near_whole_ones():
    """After 90 steps the weights differ by a hundredth of their way: each moment is within 1/256 of its value."""
    random = torch.Generator().manual_seed(0)
    runs = [_table(random, 64, torch.float32)]
    runs.append([runs[0][0].clone(), *moments_like(runs[0][0], torch.bfloat16)])
    start = runs[0][0].clone()
    for number, lr in enumerate(_learning_rates(), 1):
        ids, grads = _touched(random, number, 64)
        whole = torch.zeros(V, 64).index_copy_(0, ids, grads)
        for run in runs:
            adamw_update(run[0], whole, *run[1:], step=number, lr=lr, betas=(0.8, 0.995), eps=1e-10, weight_decay=0.01)
    difference, way = (runs[1][0] - runs[0][0]).norm(), (runs[0][0] - start).norm()
    assert 0 < difference < 0.01 * way


@pytest.mark.parametrize("operations", ["", "off"])
def test_moments_of_a_row_that_is_not_seen_again_end_at_zero(operations, monkeypatch):
    """Not among the numbers below the normal ones, which are slow; and the weight stays where it came to rest."""
    monkeypatch.setenv("LANTRAIN_KERNELS", operations)
    constants, count = Constants((0.8, 0.995), 1e-10, 0.0), 700
    param, m, v = torch.ones(1, 64), torch.full((1, 64), 1e-3), torch.full((1, 64), 1e-29)
    steps = [constants.step(1000 + number, 1e-3) for number in range(count)]
    advance_rows(param, m, v, slice(0, 1), None, torch.tensor([count], dtype=torch.int32), steps, constants)
    assert (m == 0).all()
    assert (v == 0).all()
    assert torch.isfinite(param).all()


@pytest.mark.parametrize("operations", ["", "off"])
def test_numbers_that_are_none_are_not_hidden(operations, monkeypatch):
    monkeypatch.setenv("LANTRAIN_KERNELS", operations)
    constants = Constants((0.8, 0.995), 1e-10, 0.01)
    param, m, v = torch.ones(2, 64), torch.zeros(2, 64), torch.zeros(2, 64)
    m[0, 5], param[1, 7] = torch.nan, torch.nan
    behind, steps = torch.full((2,), 3, dtype=torch.int32), [constants.step(t, 0.1) for t in (1, 2, 3)]
    advance_rows(param, m, v, slice(0, 2), None, behind, steps, constants)
    assert param.isnan().nonzero().tolist() == [[0, 5], [1, 7]]
