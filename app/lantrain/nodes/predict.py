"""How long a step would take with a set of nodes, and which nodes are worth having.

From what was measured when they joined (GEMM rate, link, round trip) and what the run will do (flops and bytes of a
step). A network can cost more than a second machine brings: the report's two machines were slower than one.

The model: computation until the last rank is done, then gradients to their owners, the update, and weights back. It is
a guide for yes or no; benchmarks/scaling.py compares it with real runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lantrain.cluster.balance import longest
from lantrain.cluster.shares import soonest_rows
from lantrain.nodes.members import Node
from lantrain.nodes.membership import Choose

EFFICIENCY = 0.6
"""Model FLOP/s of forward and backward as a share of the GEMM rate of joining (docs/log.md: 0.55 to 0.65)."""
ELEMENT_SECONDS = 1e-9
"""Update of one element by AdamW, and what belongs to it: sum, copy. A quarter to a half of this was measured alone."""
WAITING = 0.3
"""Update of a table's element against that: most rows wait, and several steps are taken at once (docs/log.md)."""
TOUCHED, TOUCHED_POWER = 2.2, 0.75
"""Different tokens in n tokens of text: 2.2 n^0.75, a third of 2048 and a fifth of 16384 (training/wire_plan.py)."""
HIDDEN = 0.5
"""Share of the gradients' way that a backward pass can hide, and of a micro-batch's time that may go by meanwhile."""
EXCHANGES = 8
"""Round trips of a step that nothing hides: the loss, counts of touched rows, and the starts of the others."""
BETTER = 0.8
"""A node is named as the better master where it alone would need so much less."""
MANY_NODES = 16
"""Up to so many, owners are laid out for each set that is looked at; beyond, they are taken to be in proportion."""


@dataclass(frozen=True)
class Speed:
    """One node as it was measured: GEMM rate in FLOP/s, link to the master in bytes/s and its round trip in s.

    The master has no link to itself; it is as fast as the fastest that was measured to it.
    """

    flops: float
    link: float = 0.0
    round_trip: float = 0.0


@dataclass(frozen=True)
class Work:
    """What a step is made of. Flops of one row's forward and backward; `update_flops` is Muon's; parameters by kind."""

    rows: int
    row_flops: float
    row_tokens: int
    update_flops: float
    dense: int
    """Parameters that have owners: their gradients and weights travel."""
    tables: int
    """Parameters of the embedding tables: every rank updates all of them."""
    width: int
    """Sum of the tables' widths: values that travel for each touched row."""
    vocabulary: int
    wire_bytes: int = 4
    """Bytes of a value on the wire."""
    micro_rows: int = 0
    """Rows of the last micro-batch, whose backward pass hides the first gradients' way. 0: nothing hides them."""
    owned: Callable[[Sequence[float]], Sequence[float]] | None = None
    """Dense parameters of each owner, for nodes of these speeds. None: in proportion to the speeds."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, by part, and the bytes that the busiest link carries in one direction."""

    compute: float
    update: float
    wire: float
    bytes: float
    rows: list[int]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.update + self.wire


def step_seconds(work: Work, nodes: Sequence[Speed], seconds_per_row: Sequence[float] | None = None) -> Prediction:
    """Predict a step of `nodes`. `seconds_per_row` by node, where it is known better than from the GEMM rate.

    Raises ValueError when a node has no rate, or one of several has no link (the first excepted).
    """
    world = len(nodes)
    if any(node.flops <= 0 for node in nodes) or any(node.link <= 0 for node in nodes[1:]):
        raise ValueError("a node was not measured")
    per_row = list(seconds_per_row or [work.row_flops / (EFFICIENCY * node.flops) for node in nodes])
    rows = soonest_rows(work.rows, per_row)
    total = sum(node.flops for node in nodes)
    own = [node.flops / total for node in nodes]  # owners are chosen by speed
    if work.owned is not None and world > 1:
        own = [parameters / work.dense for parameters in work.owned([node.flops for node in nodes])]
    elements = WAITING * work.tables + work.dense * max(own)
    update = work.update_flops / (EFFICIENCY * total) + ELEMENT_SECONDS * elements
    if world == 1:
        return Prediction(longest(rows, per_row), update, 0.0, 0.0, rows)
    links = [node.link for node in nodes]
    links[0] = max(links)
    touched = [min(work.vocabulary, TOUCHED * (count * work.row_tokens) ** TOUCHED_POWER) for count in rows]
    dense, row_bytes = work.dense * work.wire_bytes, work.width * work.wire_bytes + 4
    most, wire = 0.0, 0.0
    for rank in range(world):
        # Each way of a full-duplex link: what goes to the owners, or comes from all to this one; weights the other way.
        there, here = (1 - own[rank]) * dense, own[rank] * dense * (world - 1)
        looked_up = max(touched[rank] * (world - 1), sum(touched) - touched[rank]) * row_bytes
        carried = 2 * max(there, here) + looked_up
        hidden = min(HIDDEN * max(there, here) / links[rank], HIDDEN * per_row[rank] * min(work.micro_rows, rows[rank]))
        if carried / links[rank] - hidden > wire:
            most, wire = carried, carried / links[rank] - hidden
    return Prediction(
        longest(rows, per_row), update, wire + EXCHANGES * max(node.round_trip for node in nodes), most, rows
    )


def worth_having(work: Work, nodes: Sequence[Speed]) -> list[int]:
    """Which of `nodes` to take, by number, so that a step is short. The first, the master, always is.

    Nodes that do not help go one after the other, the one first without which the step is shortest; then any that
    helps those that are left comes back. Not measured ones are taken.
    """
    measured = [i for i, node in enumerate(nodes) if node.flops > 0 and (i == 0 or node.link > 0)]
    if 0 not in measured:
        return list(range(len(nodes)))

    def seconds(chosen: Sequence[int]) -> float:
        return step_seconds(work, [nodes[i] for i in chosen]).seconds

    kept = measured
    while len(kept) > 1:
        fewer = [[i for i in kept if i != out] for out in kept[1:]]
        best = min(fewer, key=seconds)
        if seconds(best) > seconds(kept):
            break
        kept = best
    # One of two may not be missed, and still both are not worth what a network costs at all.
    if seconds([0]) <= seconds(kept):
        kept = [0]
    while True:
        more = [sorted([*kept, i]) for i in measured if i not in kept]
        best = min(more, key=seconds, default=kept)
        if seconds(best) >= seconds(kept):
            break
        kept = best
    return sorted(kept + [i for i in range(len(nodes)) if i not in measured])


def why_left_out(work: Work, nodes: Sequence[Speed], kept: Sequence[int], out: int) -> str:
    """The numbers behind leaving out node `out` where `kept` are taken."""
    kept = [i for i in kept if nodes[i].flops > 0 and (i == 0 or nodes[i].link > 0)]
    with_it = step_seconds(work, [nodes[i] for i in sorted([*kept, out])])
    without = step_seconds(work, [nodes[i] for i in kept])
    alone = step_seconds(work, [nodes[out]]).seconds
    # The data is on the master, so nobody else can be left to train alone.
    better = f"; alone it would take {alone:.2g} s: make it the master" if alone < BETTER * without.seconds else ""
    return (
        f"a step is expected to take {with_it.seconds:.2g} s with it and {without.seconds:.2g} s without: "
        f"{with_it.bytes / 1e6:.3g} MB a step take {with_it.wire:.2g} s, computing {with_it.compute:.2g} s instead of "
        f"{without.compute:.2g} s ({nodes[out].flops / 1e9:.3g} GFLOP/s, {nodes[out].link / 1e6:.3g} MB/s, round trip "
        f"{nodes[out].round_trip * 1000:.2g} ms){better}"
    )


def speed_of(info: dict[str, Any]) -> Speed:
    """A node's figures as it gave them when it joined (hub.NodeInfo)."""
    return Speed(
        1e9 * float(info.get("gemm_gflops", 0)), 1e6 * float(info.get("link_mbs", 0)),
        float(info.get("round_trip_ms", 0)) / 1000,
    )  # fmt: skip


def chooser(arguments: list[str], vocab_size: int) -> Choose:
    """What the membership asks before each generation, for the run with these flags.

    Only for runs that exchange every step: with local steps a slow link costs little.
    """
    from lantrain.training.config import parse

    if getattr(parse(arguments).args, "sync", "step") != "step":
        return lambda nodes: (nodes, {})
    work = work_of(arguments, vocab_size)
    rough = replace(work, owned=None)

    def choose(nodes: list[Node]) -> tuple[list[Node], dict[str, str]]:
        speeds = [speed_of(node.info) for node in nodes]
        figures = work if len(nodes) <= MANY_NODES else rough
        kept = worth_having(figures, speeds)
        why = {
            node.id: f"{why_left_out(figures, speeds, kept, i)}; KEEP_SLOW=1 on the master takes it all the same"
            for i, node in enumerate(nodes)
            if i not in kept
        }
        return [nodes[i] for i in kept], why

    return choose


def orthogonalise_flops(rows: int, columns: int) -> float:
    """Flops of Polar Express on a matrix, as optim/muon.py does it: on the Gram matrix where the sides differ much."""
    short, long = sorted((rows, columns))
    if long >= 2 * short:
        return 4.0 * short * short * long + 34.0 * short**3
    return 5 * (4.0 * short * short * long + 2.0 * short**3)


def work_of(arguments: list[str], vocab_size: int) -> Work:
    """The work of a step of the run with these flags. Raises UserError for flags that cannot train."""
    import torch

    from lantrain.model.gpt import GPT
    from lantrain.optim.groups import parameter_groups
    from lantrain.optim.owners import assign_owners, pieces_of
    from lantrain.training.config import parse
    from lantrain.training.plan import make_plan

    config = parse(arguments)
    plan = make_plan(config, vocab_size)
    with torch.device("meta"):
        model = GPT(plan.model)
    tables = model.embedding_tables()
    matrices = [
        (p.shape[0], p.shape[1])
        for name, p in model.named_parameters()
        if p.dim() == 2 and name.startswith("transformer.h.")
    ]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    groups = parameter_groups(model)

    def owned(weights: Sequence[float]) -> list[float]:
        pieces = pieces_of(shapes, groups, set(tables), len(weights))
        return [float(sum(piece.numel for piece in mine)) for mine in assign_owners(pieces, weights)]

    narrow = getattr(config.args, "wire_dtype", "float32") != "float32"
    return Work(
        rows=plan.rows,
        row_flops=float(plan.flops_per_token) * plan.model.sequence_len,
        row_tokens=plan.model.sequence_len,
        update_flops=sum(orthogonalise_flops(*shape) for shape in matrices),
        dense=plan.counts["total"] - sum(t.numel() for t in tables.values()),
        tables=sum(t.numel() for t in tables.values()),
        width=sum(t.shape[1] for t in tables.values()),
        vocabulary=plan.model.padded_vocab_size,
        wire_bytes=2 if narrow else 4,
        micro_rows=config.args.device_batch_size,
        owned=owned,
    )
