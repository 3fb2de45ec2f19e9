"""The exchange that gradients, weights, changes of local steps and the probe of the link are sent by."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lantrain.cluster.exchange import start_exchange
from lantrain.cluster.group import Ranks
from tests.distributed.ranks import together

SIZES = [[0, 5, 3], [7, 0, 0], [2, 100_000, 0]]
"""Bytes from each rank to each other one; some have nothing to say."""


def _message(sender: int, receiver: int, kind: int) -> torch.Tensor:
    size = SIZES[sender][receiver]
    return torch.arange(size).add_(100 * sender + 10 * receiver + kind).to(torch.uint8)


def _two_at_a_time(ranks: Ranks) -> Any:
    """Two exchanges under way at once, waited for in the other order."""
    received = [[torch.zeros(SIZES[r][ranks.rank], dtype=torch.uint8) for r in range(ranks.world)] for _ in range(2)]
    under_way = [
        start_exchange(ranks, partial(_message, ranks.rank, kind=kind), received[kind], tag=kind) for kind in range(2)
    ]
    waited = [exchange.wait() for exchange in reversed(under_way)]
    assert [exchange.wait() < 1 for exchange in under_way] == [True, True], "what has arrived is not waited for again"
    return received, waited


def test_each_rank_gets_what_was_meant_for_it() -> None:
    for me, (received, waited) in enumerate(together(3, _two_at_a_time)):
        assert all(seconds >= 0 for seconds in waited)
        for kind in range(2):
            for sender in range(3):
                if sender != me:
                    assert torch.equal(received[kind][sender], _message(sender, me, kind))


def _late(ranks: Ranks) -> float:
    received = [torch.zeros(8, dtype=torch.uint8) for _ in range(ranks.world)]
    start_exchange(ranks, lambda _: torch.ones(8, dtype=torch.uint8), received).wait()
    dist.barrier()
    if ranks.rank == 1:
        time.sleep(0.5)
    return start_exchange(ranks, lambda _: torch.ones(8, dtype=torch.uint8), received).wait()


def test_the_time_of_waiting_for_a_late_rank_is_given() -> None:
    waited = together(2, _late)
    assert waited[0] > 0.2
    assert waited[1] < waited[0]
