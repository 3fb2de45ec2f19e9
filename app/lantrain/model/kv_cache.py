"""Keys and values of the tokens read so far, so that generating a token costs one token's work."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer for a batch whose rows are all at the same position.

    Layout (layers, B, H, T_max, D), the order in which attention reads them. `previous_embedding` (B, 1, C) is the
    normalised embedding of the last token, which the model mixes into the next one ("smear").
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (layers, batch, kv_heads, max_tokens, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)
        self.position = 0
        self.previous_embedding: Tensor | None = None

    @property
    def max_tokens(self) -> int:
        """How many tokens there is room for."""
        return self.keys.size(3)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, H, T, D) keys and values after the current position; returns all up to their end as views.

        Does not move the position: every layer of one forward pass writes at the same place, then `advance` is called.
        Raises ValueError when the cache is too small.
        """
        end = self.position + keys.size(2)
        if end > self.max_tokens:
            raise ValueError(f"the cache has room for {self.max_tokens} tokens, {end} needed")
        self.keys[layer, :, :, self.position : end] = keys
        self.values[layer, :, :, self.position : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, tokens: int) -> None:
        """Move the position past `tokens` tokens that all layers have stored."""
        self.position += tokens
