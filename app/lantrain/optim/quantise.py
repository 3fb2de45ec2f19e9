"""Blockwise quantisation of fp32 vectors to 8 or 4 bits, for what crosses a slow link.

Each block of 256 values has a scale of its own, its largest magnitude over the top level (Dettmers et al., arXiv
2110.02861, with linear levels). Rounding is to the nearest and deterministic; what it loses is for the caller to keep
and send later (error feedback). 32 bits means no rounding, so that the same code runs as the plain fp32 path.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Values that share a scale; 4 bytes of scale a block are 1.6% on 8 bits and 3.1% on 4."""

TOP = {8: 127, 4: 7}
SMALLEST_SCALE = 1e-30
"""Keeps the division finite in a block of zeros."""


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of `numel` quantised values (a multiple of BLOCK), scales included."""
    return numel * 4 if bits == 32 else numel * bits // 8 + 4 * (numel // BLOCK)


def quantise(values: Tensor, bits: int) -> Tensor:
    """Pack `values` (n,) float32, n a multiple of BLOCK, into uint8 (packed_bytes(n, bits),): levels, then scales.

    A block with a value that is not finite comes out as not-a-numbers.
    """
    if bits == 32:
        return values.clone().view(torch.uint8)
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).div_(TOP[bits]).clamp_min_(SMALLEST_SCALE)
    # nan_to_num: the conversion of a not-a-number to an integer is undefined; its scale carries it instead.
    levels = (blocks / scales).round_().nan_to_num_(0.0).clamp_(-TOP[bits], TOP[bits]).to(torch.int8)
    if bits == 8:
        packed = levels.view(torch.uint8).view(-1)
    else:
        pairs = (levels + 8).to(torch.uint8).view(-1, 2)
        packed = pairs[:, 0] | (pairs[:, 1] << 4)
    return torch.cat([packed, scales.view(torch.uint8).view(-1)])


def dequantise(packed: Tensor, numel: int, bits: int) -> Tensor:
    """The float32 values (numel,) of what `quantise` packed."""
    if bits == 32:
        return packed.view(torch.float32)
    size = numel * bits // 8
    scales = packed[size:].view(torch.float32).view(-1, 1)
    if bits == 8:
        levels = packed[:size].view(torch.int8).view(-1, BLOCK).float()
    else:
        pairs = torch.stack([packed[:size] & 15, packed[:size] >> 4], dim=1)
        levels = pairs.view(-1, BLOCK).float().sub_(8)
    return levels.mul_(scales).view(-1)
