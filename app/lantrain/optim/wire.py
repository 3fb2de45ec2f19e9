"""The wire: gradients go to their owners and new weights come back, a bucket of parameters at a time.

Both ways every rank sends each other one what is meant for it, and no more. Against Gloo's own reduce_scatter, which is
an all-reduce inside, and all_gather that is less than half the bytes, and 2.7 times faster (docs/internals.md); rounded
to bfloat16 it is half of that again. Buckets let the exchange begin while the backward pass still runs, and let weights
travel while the next matrices are being updated.

The owner sums in fp32 and in rank order, so a run repeats bit for bit. Its own gradient is never rounded. Weights that
are rounded for the wire are rounded on every rank, the owner included, who keeps the fp32 master copy: all ranks
compute with the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lantrain.cluster.exchange import start_exchange
from lantrain.cluster.group import Ranks
from lantrain.optim.owners import Piece

ALIGNMENT = 8
"""Bytes: a parcel begins where a tensor of any dtype may begin."""
BUCKET_ELEMENTS = 2**20
"""A bucket is closed when it holds so many: 2 MiB in bfloat16, some 20 ms at 1 Gbit/s. The last one's gradients leave
when the backward pass is over; with buckets four times as large a step of 1 s took 1% longer at 1 Gbit/s."""


@dataclass(frozen=True)
class Parcel:
    """Pieces of one owner that travel together, as bytes: those in fp32 first, then those in `narrow`."""

    pieces: tuple[Piece, ...]
    narrow: torch.dtype

    @cached_property
    def dtypes(self) -> list[tuple[Piece, torch.dtype]]:
        """Every piece with its dtype on the wire, in the order of travel."""
        marked = [(piece, self.narrow if piece.worth_rounding else torch.float32) for piece in self.pieces]
        return sorted(marked, key=lambda pair: -pair[1].itemsize)

    @cached_property
    def bytes(self) -> int:
        """Size, padded to ALIGNMENT."""
        size = sum(piece.numel * dtype.itemsize for piece, dtype in self.dtypes)
        return -(-size // ALIGNMENT) * ALIGNMENT

    def pack(self, values: Callable[[Piece], Tensor]) -> Tensor:
        """The values of every piece (any shape of its size) as (self.bytes,) uint8."""
        buffer = torch.empty(self.bytes, dtype=torch.uint8)
        for piece, room in self.unpack(buffer):
            room.copy_(values(piece).reshape(-1))
        return buffer

    def unpack(self, buffer: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Views (numel,) of `buffer` (self.bytes,) uint8, each piece's in its dtype on the wire."""
        start = 0
        for piece, dtype in self.dtypes:
            stop = start + piece.numel * dtype.itemsize
            yield piece, buffer[start:stop].view(dtype)
            start = stop


def make_buckets(owned: Sequence[Sequence[Piece]], order: Sequence[str]) -> list[list[list[Piece]]]:
    """Cut the owned pieces into buckets: for each bucket the pieces of every owner, in the order of `order`.

    `order` names the parameters as the backward pass finishes them. Small ones go into the last bucket: their gradients
    are complete only when all layers are done, or are too few bytes to matter.
    """
    place = {name: index for index, name in enumerate(order)}
    everyone = [(piece, owner) for owner, mine in enumerate(owned) for piece in mine]
    large = sorted((p for p in everyone if p[0].worth_rounding), key=lambda p: place[p[0].name])
    small = [p for p in everyone if not p[0].worth_rounding]
    buckets: list[list[tuple[Piece, int]]] = [[]]
    elements = 0
    for index, pair in enumerate(large):
        # A parameter is never split over buckets: its gradient is complete all at once.
        if elements >= BUCKET_ELEMENTS and pair[0].name != large[index - 1][0].name:
            buckets.append([])
            elements = 0
        buckets[-1].append(pair)
        elements += pair[0].numel
    buckets.append(small)
    return [
        [[piece for piece, owner in bucket if owner == rank] for rank in range(len(owned))]
        for bucket in buckets
        if bucket
    ]


class Wire:
    """The exchanges of one model's buckets. Every rank starts those of one kind in the same order.

    `waited` counts the seconds in which this rank waited for others or for the cable.
    """

    def __init__(self, buckets: list[list[list[Piece]]], ranks: Ranks, narrow: torch.dtype = torch.float32) -> None:
        """`narrow`: dtype of the large pieces while they travel, float32 or bfloat16."""
        self.ranks, self.narrow = ranks, narrow
        self.waited = 0.0
        self.parcels = [[Parcel(tuple(pieces), narrow) for pieces in bucket] for bucket in buckets]

    def _start(self, tag: int, back: list[int], message: Callable[[int], Tensor]) -> Callable[[], list[Tensor]]:
        """Send `message(rank)` to each rank and receive `back[rank]` bytes from each."""
        received = [torch.empty(size, dtype=torch.uint8) for size in back]
        exchange = start_exchange(self.ranks, message, received, tag=tag)

        def wait() -> list[Tensor]:
            self.waited += exchange.wait()
            return received

        return wait

    def send_gradients(self, bucket: int, take: Callable[[Piece], Tensor]) -> Callable[[], dict[Piece, Tensor]]:
        """Start sending a bucket's gradients to their owners; `take` gives this rank's of a piece (any shape, fp32).

        The returned function waits, and gives the sum (numel,) over all ranks of each piece that this rank owns. It
        may be written to: nobody else reads it.
        """
        me, parcels = self.ranks.rank, self.parcels[bucket]
        own = {piece: take(piece).reshape(-1) for piece in parcels[me].pieces}
        if self.ranks.world == 1:
            return lambda: own
        back = [0 if rank == me else parcels[me].bytes for rank in range(self.ranks.world)]
        arrived = self._start(2 * bucket, back, lambda rank: parcels[rank].pack(take))

        def wait() -> dict[Piece, Tensor]:
            sums: dict[Piece, Tensor] = {}
            for rank, buffer in enumerate(arrived()):
                theirs = own.items() if rank == me else parcels[me].unpack(buffer)
                for piece, values in theirs:
                    sums[piece] = sums[piece].add_(values.float()) if piece in sums else values.float()
            return sums

        return wait

    def send_weights(
        self, bucket: int, values: Callable[[Piece], Tensor]
    ) -> Callable[[], Iterator[tuple[Piece, Tensor]]]:
        """Start sending this rank's new weights of a bucket to all others.

        The returned function waits and gives every piece of the bucket with its weights (numel,), in the dtype of the
        wire; those of this rank as well, rounded as the others get them.
        """
        me, parcels = self.ranks.rank, self.parcels[bucket]
        mine = parcels[me].pack(values)
        back = [0 if rank == me else parcel.bytes for rank, parcel in enumerate(parcels)]
        arrived = self._start(2 * bucket + 1, back, lambda _: mine)

        def wait() -> Iterator[tuple[Piece, Tensor]]:
            for rank, buffer in enumerate(arrived()):
                yield from parcels[rank].unpack(mine if rank == me else buffer)

        return wait

    def bytes_per_rank(self) -> list[dict[str, int]]:
        """Bytes that each rank sends in a step: its gradients to the owners, and its new weights to the others."""
        owned = [sum(bucket[rank].bytes for bucket in self.parcels) for rank in range(self.ranks.world)]
        everything, others = sum(owned), self.ranks.world - 1
        return [{"gradients": everything - mine, "weights": others * mine} for mine in owned]

    def bytes_per_step(self) -> dict[str, int]:
        """Those of this rank."""
        return self.bytes_per_rank()[self.ranks.rank]
