"""Bits per byte on the validation rows: a loss that does not depend on the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lantrain.cluster.group import Ranks
from lantrain.cluster.shares import micro_batches
from lantrain.data.feed import Feed
from lantrain.model.gpt import GPT


class EvaluationStopped(Exception):
    """A stop signal came while evaluating; raised by every rank after the same batch."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@torch.no_grad()
def evaluate_bpb(
    model: GPT, feed: Feed, steps: int, token_bytes: Tensor, device_batch_size: int, ranks: Ranks,
    stop_signal: Callable[[], int] = lambda: 0,
) -> float:  # fmt: skip
    """Bits per byte over `steps` batches of `feed`, every rank computing its own rows. Collective.

    `token_bytes` (vocab,) holds the bytes of each token, 0 for special tokens, which do not count. Sums are kept in
    double precision so that the number of ranks does not show. Returns inf when no byte was seen. `stop_signal` gives
    this rank's; raises EvaluationStopped on all ranks when any has one: an evaluation may take hours.
    """
    nats_and_bytes = torch.zeros(2, dtype=torch.float64)
    for step in range(steps):
        more = step + 1 < steps
        rows = feed.next(more=more).rows
        number = _highest(stop_signal(), ranks)
        if number:
            if more:
                feed.next(more=False)  # they are on their way, and who sends them waits until they are taken
            raise EvaluationStopped(number)
        start = 0
        for size in micro_batches(len(rows), device_batch_size):
            micro = rows[start : start + size]
            start += size
            targets = micro[:, 1:].contiguous()
            losses = model.loss(micro[:, :-1].contiguous(), targets, reduction="none").reshape(-1)
            size_of = token_bytes[targets.reshape(-1)]
            nats_and_bytes[0] += (losses.double() * (size_of > 0)).sum()
            nats_and_bytes[1] += size_of.sum()
    if ranks.world > 1:
        dist.all_reduce(nats_and_bytes)
    nats, count = nats_and_bytes.tolist()
    return nats / (math.log(2) * count) if count else math.inf


def _highest(number: int, ranks: Ranks) -> int:
    if ranks.world == 1:
        return number
    highest = torch.tensor(number)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest)
