"""Blockwise quantisation: its error bound, its extremes, and that error feedback loses nothing over many rounds."""

from __future__ import annotations

import pytest
import torch

from lantrain.optim.quantise import BLOCK, TOP, dequantise, packed_bytes, quantise


def _values(blocks: int, seed: int = 0) -> torch.Tensor:
    """Blocks of very unequal size, as changes of different tensors are."""
    random = torch.Generator().manual_seed(seed)
    size = torch.logspace(-12, 3, blocks)[:, None]
    return (torch.randn(blocks, BLOCK, generator=random) * size).view(-1)


@pytest.mark.parametrize("bits", [4, 8])
def test_error_is_at_most_half_a_level_of_the_block(bits: int) -> None:
    values = _values(20)
    packed = quantise(values, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_bytes(values.numel(), bits)
    error = (dequantise(packed, values.numel(), bits) - values).view(-1, BLOCK).abs().amax(1)
    level = values.view(-1, BLOCK).abs().amax(1) / TOP[bits]
    assert bool((error <= level * 0.5001).all())
    assert bool((error > level * 0.3).all()), "the bound would hold for a finer quantiser than was asked for"


@pytest.mark.parametrize("bits", [4, 8])
def test_extremes_of_a_block_and_zero_are_exact(bits: int) -> None:
    values = torch.zeros(2 * BLOCK)
    values[0], values[1] = 3.5, -3.5
    back = dequantise(quantise(values, bits), 2 * BLOCK, bits)
    torch.testing.assert_close(back, values, rtol=1e-6, atol=0)
    assert not bool(back[BLOCK:].any())


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_does_not_become_finite(bits: int, bad: float) -> None:
    values = _values(3)
    values[BLOCK + 7] = bad
    back = dequantise(quantise(values, bits), values.numel(), bits)
    assert not bool(torch.isfinite(back).all())
    assert bool(torch.isfinite(back[:BLOCK]).all())


def test_32_bits_round_nothing() -> None:
    values = _values(5)
    assert torch.equal(dequantise(quantise(values, 32), values.numel(), 32), values)


@pytest.mark.parametrize("bits", [4, 8])
def test_equal_values_give_equal_bytes(bits: int) -> None:
    assert torch.equal(quantise(_values(9), bits), quantise(_values(9).clone(), bits))


@pytest.mark.parametrize("bits", [4, 8])
def test_error_feedback_sends_everything_in_the_end(bits: int) -> None:
    """A value far below half a level is lost in every single round, and with the residual arrives after enough."""
    small = torch.full((BLOCK,), 0.03 / TOP[bits])
    small[0] = 1.0  # sets the level
    rounds = 400
    without = dequantise(quantise(small, bits), BLOCK, bits) * rounds
    assert not bool(without[1:].any())
    residual, total = torch.zeros(BLOCK), torch.zeros(BLOCK, dtype=torch.float64)
    for _ in range(rounds):
        wanted = small + residual
        sent = dequantise(quantise(wanted, bits), BLOCK, bits)
        residual = wanted - sent
        total += sent
    error = (total - small.double() * rounds).abs()
    assert float(error.max()) <= 0.51 / TOP[bits] + 1e-3
    assert float(total[1:].min()) > 0.5 * 0.03 / TOP[bits] * rounds
