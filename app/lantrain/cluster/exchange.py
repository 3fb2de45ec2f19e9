"""Every rank sends each other one a message of its own, and both ways of each cable are used at once.

Receives are posted before sends. Gloo's all_to_all does the opposite, and often used a cable one way at a time (8 MiB
each way at 100 Mbit/s: 0.73 or 1.40 s, by chance; docs/log.md): a rank that comes late says that it is ready to receive
behind its own data, on the same connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from lantrain.cluster.group import Ranks


class Exchange:
    """An exchange that is under way. Tensors that are being sent are kept alive until `wait` has returned."""

    def __init__(self, works: list[dist.Work | None], sent: list[Tensor]) -> None:
        self._works, self._sent = works, sent

    def wait(self) -> float:
        """Wait until all has arrived, and all that this rank sends may be written to. Returns the seconds waited."""
        began = time.perf_counter()
        for work in self._works:
            assert work is not None
            work.wait()
        self._works, self._sent = [], []
        return time.perf_counter() - began


def start_exchange(
    ranks: Ranks, message: Callable[[int], Tensor | None], received: Sequence[Tensor], *, tag: int = 0
) -> Exchange:
    """Send `message(rank)` to each other rank, receive into `received[rank]` from each. Collective, on `ranks.wire`.

    None, or a tensor of no elements, is not sent; the rank that it was for must have a tensor of no elements in its
    place. `received` of this rank itself is left alone. Two exchanges that are under way at the same time have
    different tags.
    """
    me, world = ranks.rank, ranks.world
    # Each rank begins with its neighbour, so that not all send to rank 0 first.
    others = [(me + distance) % world for distance in range(1, world)]
    works = [
        dist.irecv(received[rank], rank, group=ranks.wire, tag=tag)
        for rank in reversed(others)
        if received[rank].numel()
    ]
    sent = []
    for rank in others:
        mine = message(rank)
        if mine is not None and mine.numel():
            sent.append(mine)
            works.append(dist.isend(mine, rank, group=ranks.wire, tag=tag))
    return Exchange(works, sent)
