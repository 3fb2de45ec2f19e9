"""Sampling from the model, one token at a time, with a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lantrain.model.gpt import GPT
from lantrain.model.kv_cache import KVCache


def generate(
    model: GPT,
    tokens: list[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 42,
) -> Iterator[int]:
    """Yield up to `max_tokens` token ids that continue `tokens` (at least one).

    temperature 0 takes the likeliest token every time; otherwise the logits are divided by it, and with top_k only the
    top_k likeliest tokens can be drawn. The same seed gives the same tokens. Raises ValueError for an empty prompt, a
    negative temperature or a top_k below 1.
    """
    if not tokens:
        raise ValueError("a prompt of at least one token is needed; start with the <|bos|> token")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError("temperature must be at least 0 and top_k at least 1")
    return _sample(model, tokens, max_tokens, temperature, top_k, torch.Generator().manual_seed(seed))


def _sample(
    model: GPT, tokens: list[int], max_tokens: int, temperature: float, top_k: int | None, random: torch.Generator
) -> Iterator[int]:
    config = model.config
    room = len(tokens) + max_tokens
    cache = KVCache(config.n_layer, 1, config.n_kv_head, config.head_dim, room, model.compute_dtype)
    unread = tokens
    for _ in range(max_tokens):
        with torch.inference_mode():  # not around the yield: the caller's code must not run in it
            logits = model.logits(torch.tensor([unread]), cache, last_only=True)[0, -1]
            token = _choose(logits, temperature, top_k, random)
        yield token
        unread = [token]


def _choose(logits: Tensor, temperature: float, top_k: int | None, random: torch.Generator) -> int:
    """One token id by logits (vocab,)."""
    if temperature == 0:
        return int(logits.argmax())
    candidates: Tensor | None = None
    if top_k is not None and top_k < logits.numel():
        logits, candidates = torch.topk(logits, top_k)
    choice = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=random)
    return int(choice if candidates is None else candidates[choice])
