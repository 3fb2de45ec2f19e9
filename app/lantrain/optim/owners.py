"""Who owns what: every tensor's optimizer state lives on one rank, for any number of ranks of any speed.

Whole matrices, and pieces of large AdamW tensors, are handed out by cost and speed, so nothing needs to divide by the
number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lantrain.optim.groups import ParamGroup

POLAR_EXPRESS_STEPS = 5
GEMM_FLOPS = 1e11
"""Rough rate of one core's fp32 GEMM; only the ratio to ELEMENT_SECONDS matters, and only for the balance."""
ELEMENT_SECONDS = 3e-8
"""Cost of an owned element: its 4 bytes, in and out in bfloat16, take so long at 1 Gbit/s. With less, an owner of many
elements and few matrices had a cable twice as busy as the others' (docs/log.md)."""
WORTH_CUTTING = 2**16
"""Elements from which on an AdamW tensor is cut into pieces."""
WORTH_ROUNDING = 2**12
"""Elements from which on a parameter is rounded for the wire; scalars and gates are few bytes, and it hurts them."""


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a parameter, the unit of ownership. Muon matrices are never cut, AdamW tensors may be."""

    name: str
    group: int
    start: int
    stop: int
    numel: int
    cost: float
    worth_rounding: bool = False
    """Whether the bytes of the whole parameter count on the wire."""


def pieces_of(
    shapes: Mapping[str, Sequence[int]], groups: Sequence[ParamGroup], tables: set[str], world: int
) -> list[Piece]:
    """The pieces of all parameters but the embedding `tables`, for `world` ranks; `shapes` by state-dict name."""
    return [
        piece
        for index, group in enumerate(groups)
        for name in group.names
        if name not in tables
        for piece in _cut(name, shapes[name], index, group.kind, world)
    ]


def _cut(name: str, shape: Sequence[int], group: int, kind: str, world: int) -> Iterator[Piece]:
    rows, numel = shape[0], math.prod(shape)
    if kind == "muon":
        short, long = sorted(shape)
        # Wide matrices are iterated on their Gram matrix (optim/muon.py): two products with the long side in all.
        if long >= 2 * short:
            flops = 4 * short * short * long + 34 * short**3
        else:
            flops = POLAR_EXPRESS_STEPS * (4 * short * short * long + 2 * short**3)
        cost = flops / GEMM_FLOPS + numel * ELEMENT_SECONDS
        yield Piece(name, group, 0, rows, numel, cost, numel >= WORTH_ROUNDING)
        return
    # A head of millions of elements on a single owner would make that rank the slow one, so it is cut into more
    # pieces than ranks; a vector of a few scalars is not worth cutting.
    count = min(rows, 4 * world) if world > 1 and numel >= WORTH_CUTTING else 1
    per_row = numel // rows
    for index in range(count):
        start, stop = rows * index // count, rows * (index + 1) // count
        part = (stop - start) * per_row
        yield Piece(name, group, start, stop, part, part * ELEMENT_SECONDS, numel >= WORTH_ROUNDING)


def assign_owners(pieces: list[Piece], weights: Sequence[float]) -> list[list[Piece]]:
    """Give every piece an owner: dearest first, each to the rank that would finish it soonest at its speed.

    Returns the pieces of each rank in model order. Deterministic, so every rank computes the same answer. A rank with
    weight zero owns nothing.
    """
    load = [0.0] * len(weights)
    owned: list[list[Piece]] = [[] for _ in weights]
    order = {id(piece): index for index, piece in enumerate(pieces)}

    def finish_time(rank: int, piece: Piece) -> float:
        return (load[rank] + piece.cost) / weights[rank] if weights[rank] > 0 else math.inf

    for piece in sorted(pieces, key=lambda piece: -piece.cost):
        owner = min(range(len(weights)), key=lambda rank: finish_time(rank, piece))
        load[owner] += piece.cost
        owned[owner].append(piece)
    return [sorted(mine, key=lambda piece: order[id(piece)]) for mine in owned]
