"""Causal attention with full or sliding window, for training and for generation.

A query at position t sees the keys t - window .. t: itself and `window` tokens to its left. torch's
`scaled_dot_product_attention` is fast when it may skip whole blocks (is_causal) but reads a T x T mask in full, so
that a masked window saves nothing: 41 ms against 25 ms for one depth-8 layer of 1024 tokens and window 256. Windows are
therefore cut into blocks of queries, each with just the keys that it can see.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lantrain.model.kernels import Kernels, fits, integers, is_bf16, kernels


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention of one sequence with itself.

    q (B, H, T, D); k, v (B, H_kv, T, D) with H a multiple of H_kv; window >= 1. Returns (B, H, T, D).
    """
    k, v = _repeat_heads(q, k, v)
    if window >= q.size(2) - 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return _local_attention(q, k, v, window)


def normed_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """`causal_attention` of queries and keys whose length is bounded, as `rotary_norm` leaves them.

    The C++ operation relies on |q k| / sqrt(D) < 80 (16.3 at most after the norm with D = 128) and needs no running
    maximum: 1.5 to 2.5 times as fast as torch's (docs/log.md).
    """
    found = kernels()
    if found is None or not fits(q, k, v) or q.size(-1) % 64 or not q.numel():
        return causal_attention(q, k, v, window)
    return cast(Tensor, _NormedAttention.apply(q, k, v, window, found))


class _NormedAttention(Function):
    """The C++ operation. Keeps one number a query besides its operands and result."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, found: Kernels) -> Tensor:
        out, inverse = _by_position(q), torch.empty(q.shape[:3])
        shape = integers([*q.shape[:2], k.size(1), *q.shape[2:], window])
        found.library.lantrain_attention_forward(
            *(tensor.data_ptr() for tensor in (q, k, v, out)), inverse.data_ptr(), shape, _steps(q, k, v, out),
            is_bf16(q), q.size(-1) ** -0.5, torch.get_num_threads(),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, inverse)
        ctx.shape, ctx.kernels = shape, found
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, inverse = ctx.saved_tensors
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        grads = [_by_position(tensor) for tensor in (q, k, v)]
        tensors = [q, k, v, out, grad, *grads]
        ctx.kernels.library.lantrain_attention_backward(
            *(tensor.data_ptr() for tensor in tensors), inverse.data_ptr(), ctx.shape, _steps(*tensors),
            is_bf16(q), q.size(-1) ** -0.5, torch.get_num_threads(),
        )  # fmt: skip
        return *grads, None, None


def _by_position(like: Tensor) -> Tensor:
    """An empty (B, H, T, D) whose memory runs (B, T, H, D), as the projections before and after read it."""
    batch, heads, length, width = like.shape
    return torch.empty(batch, length, heads, width, dtype=like.dtype).transpose(1, 2)


def _steps(*tensors: Tensor) -> Any:
    return integers([step for tensor in tensors for step in tensor.stride()[:3]])


def cached_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention of the last T_q positions of a sequence whose keys and values are all at hand; no gradient needed.

    q (B, H, T_q, D); k, v (B, H_kv, T_k, D), T_k >= T_q. Returns (B, H, T_q, D).
    """
    queries, total = q.size(2), k.size(2)
    first = max(0, total - queries - window)  # the oldest key that the first query sees
    k, v = _repeat_heads(q, k[:, :, first:], v[:, :, first:])
    if queries == 1:
        return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_window_mask(queries, k.size(2), window))


def masked_attention_reference(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """What `causal_attention` computes, written with an explicit mask and softmax: the twin for tests."""
    k, v = _repeat_heads(q, k, v)
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    scores = scores.masked_fill(~_window_mask(q.size(2), k.size(2), window), float("-inf"))
    return scores.softmax(-1) @ v


def _repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Grouped-query attention: each key-value head serves H / H_kv neighbouring query heads."""
    groups = q.size(1) // k.size(1)
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def _window_mask(queries: int, keys: int, window: int) -> Tensor:
    """(queries, keys) bool, True where visible; the last query is aligned with the last key."""
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (distance >= 0) & (distance <= window)


@lru_cache(maxsize=8)
def _block_bias(block: int, window: int, dtype: torch.dtype) -> Tensor:
    """(block, window + block) additive mask of a block whose keys start `window` before its first query."""
    return torch.zeros(block, window + block, dtype=dtype).masked_fill_(
        ~_window_mask(block, window + block, window), float("-inf")
    )


def _local_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Sliding window: the first `window` queries are plain causal, the others go in blocks of keys window + block."""
    batch, heads, length, width = q.shape
    block = _block_size(window)
    head = F.scaled_dot_product_attention(q[:, :, :window], k[:, :, :window], v[:, :, :window], is_causal=True)
    missing = -(length - window) % block
    if missing:
        q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
    blocks = (length + missing - window) // block
    queries = q[:, :, window:].unflatten(2, (blocks, block)).transpose(1, 2)
    # Overlapping views, no copies when B is 1: (B, H, blocks, D, window + block) -> (B, blocks, H, window + block, D)
    keys, values = (x.unfold(2, window + block, block).permute(0, 2, 1, 4, 3) for x in (k, v))
    tail = F.scaled_dot_product_attention(
        queries.flatten(0, 1),
        keys.flatten(0, 1),
        values.flatten(0, 1),
        attn_mask=_block_bias(block, window, q.dtype),
    )
    tail = tail.transpose(1, 2).reshape(batch, blocks * block, heads, width)[:, : length - window]
    return torch.cat([head.transpose(1, 2), tail], dim=1).transpose(1, 2)


def _block_size(window: int) -> int:
    """Queries a block: half a window wastes least (1.5 windows of keys) while the matmuls stay large enough."""
    return max(64, window // 2)
