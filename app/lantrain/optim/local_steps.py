"""Local steps for slow links: every rank trains by itself, and every H steps the ranks exchange what they learned.

DiLoCo (arXiv 2311.08105) with Muon inside, MuLoCo (arXiv 2505.23725). A round is H steps of the inner optimizer on a
rank's own rows. At its end the pseudo-gradient, the shared weights at the start of the round minus the rank's own, is
averaged over the ranks, weighted by the tokens that each has seen, and an outer Nesterov step moves the shared weights,
in fp32 and with the same bits on every rank.

What crosses the wire is quantised twice: each rank sends every other the slice that it sums, and gets the rounded sums
back, so a rank sends 2 (N-1)/N values of 8 or 4 bits whatever the number of ranks (cluster/exchange.py). What
rounding loses stays in a residual on the rank that rounded and is sent in the next round (error feedback). Of the
embedding tables only rows that some rank has touched lately travel.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lantrain.cluster.exchange import start_exchange
from lantrain.cluster.group import Ranks, broadcast_json
from lantrain.errors import WRONG_NUMBERS_EXIT, UserError
from lantrain.model.embedding import EmbeddingRows
from lantrain.optim.groups import ParamGroup
from lantrain.optim.quantise import BLOCK, dequantise, packed_bytes, quantise
from lantrain.optim.sharded import ShardedOptimizer

CHUNK = 2**20
"""Values exchanged at a time: some are rounded and summed while others travel, and the work space is bounded."""

SMALL = 2**12
"""Smaller parameters travel in fp32: the scalars of the layers would share blocks with neighbours that change by a
hundred times more, and a level of those is a jump for the whole network."""

TAIL_STEPS = 10
"""AdamW's momentum (0.8) still moves a table's row so many steps after it was touched: 0.8^10 = 0.1 of a step."""

MOMENTUM_BITS = 8
"""Momenta travel in so many bits when a run is resumed; second moments as bf16, which has no zero below them."""


def _split(flat: Tensor, parts: list[tuple[str, int]]) -> Iterator[tuple[str, Tensor]]:
    sizes = [count for _, count in parts]
    yield from zip((name for name, _ in parts), flat[: sum(sizes)].split(sizes), strict=True)


def all_finite(values: Tensor) -> bool:
    """Whether no value is infinite or not a number: both show in the extremes.

    At depth 4 that takes 7 ms of a round's end; torch.isfinite of each value took 250. A sum can be infinite by itself.
    """
    return not values.numel() or all(math.isfinite(extreme.item()) for extreme in torch.aminmax(values))


class LocalSteps:
    """Steps a rank by itself; `outer_step` makes the replicas equal again. The interface is ShardedOptimizer's.

    Memory beyond the inner optimizer: the shared weights, the outer momentum and, with more than one rank, the
    residual, each of the size of the model in fp32.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        groups: list[ParamGroup],
        tables: set[str],
        ranks: Ranks,
        *,
        every: int,
        outer_lr: float,
        outer_momentum: float,
        delta_bits: int,
        muon_dtype: torch.dtype = torch.float32,
        moments_dtype: torch.dtype = torch.float32,
        late: Collection[str] = (),
    ) -> None:
        """Prepare rounds of `every` steps from the weights in `params`, which must be equal on all ranks.

        late, moments_dtype: as the ShardedOptimizer's. delta_bits: 8 or 4, or 32 for no rounding. With 32, outer_lr 1
        and outer_momentum 0 a round ends at the average of the ranks' weights.
        """
        self.params, self.tables, self.ranks = dict(params), sorted(tables), ranks
        self.every, self.outer_lr, self.outer_momentum, self.bits = every, outer_lr, outer_momentum, delta_bits
        self.inner = ShardedOptimizer(
            params, groups, tables, Ranks(0, 1), muon_dtype=muon_dtype, moments_dtype=moments_dtype, late=late
        )
        self.steps_since = 0
        self.sent_bytes = 0
        self._tokens = 0
        self._source = 0
        self._shared = {name: param.detach().clone() for name, param in self.params.items()}
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self._shared.items()}
        small = [name for name, param in self.params.items() if param.numel() < SMALL and name not in self.tables]
        large = [name for name in self.params if name not in small]
        self._exchanges = [(names, bits) for names, bits in ((small, 32), (large, delta_bits)) if names]
        rounds_off = ranks.world > 1 and delta_bits < 32
        self._residual = {name: torch.zeros_like(self._shared[name]) for name in large} if rounds_off else {}
        vocab = max((self.params[name].shape[0] for name in self.tables), default=0)
        self._touched_at = torch.full((vocab,), -TAIL_STEPS - 1, dtype=torch.int64)

    @torch.no_grad()
    def step(
        self, rows: EmbeddingRows | None, *, lr_multiplier: float, muon_momentum: float, muon_weight_decay: float
    ) -> None:
        """Update this rank's own weights from its own gradients, which are means over its own tokens. Not collective.

        `rows` is None on a rank that had no rows this step; it then keeps its weights.
        """
        self.steps_since += 1
        if rows is None:
            return
        self._touched_at[rows.ids] = self.steps_since
        self.inner.step(
            rows, lr_multiplier=lr_multiplier, muon_momentum=muon_momentum, muon_weight_decay=muon_weight_decay
        )

    def gradients_become_final(self) -> None:
        """Nothing: gradients stay on their rank."""

    def send_gradients(self) -> None:
        """Nothing: gradients stay on their rank."""

    def skip_step(self) -> None:
        """Drop this rank's gradients of this step. Not collective."""
        for param in self.params.values():
            param.grad = None

    def finish(self) -> None:
        """Bring all rows of the tables up to date: from now on, to the next step, all parameters may be read."""
        self.inner.finish()

    def gather_rows(self, idx: Tensor) -> EmbeddingRows:
        """What the next forward passes read for token ids `idx` (any shape), up to date."""
        return self.inner.gather_rows(idx)

    @property
    def waited(self) -> float:
        """Seconds in which a step has waited for other ranks: none, steps are this rank's own."""
        return 0.0

    def count_tokens(self, tokens: int) -> None:
        """Add to this rank's weight in the average at the end of the round."""
        self._tokens += tokens

    @torch.no_grad()
    def outer_step(self) -> None:
        """End the round: average the ranks' changes, move the shared weights, and start from them. Collective.

        Raises UserError on every rank, before the shared weights are touched, when a change is not a number.
        """
        self.finish()
        weight, ids = self._agree_on_round()
        averages = []
        for names, bits in self._exchanges:
            parts = self._parts(names, ids)
            flat = self._gather(parts, weight, ids)
            average = self._average(flat, bits)
            if not all_finite(average):
                raise UserError(
                    "a rank's change in this round is not a number; checkpoints are as they were",
                    "resume from the last checkpoint with lower learning rates",
                    WRONG_NUMBERS_EXIT,
                )
            if bits < 32 and self._residual:
                self._keep_residual(parts, flat, ids)
            averages.append((parts, average))
        for parts, average in averages:
            self._move(parts, average, ids)
        self._touched_at -= self.steps_since
        self._touched_at.clamp_min_(-TAIL_STEPS - 1)
        self.steps_since, self._tokens = 0, 0

    def _agree_on_round(self) -> tuple[float, Tensor]:
        """This rank's share of the round's tokens, and the ids (U,) of table rows that any rank has moved."""
        mine = self._touched_at > -TAIL_STEPS
        if self.ranks.world == 1:
            return 1.0, mine.nonzero().view(-1)
        padded = torch.nn.functional.pad(mine.to(torch.uint8), (0, -mine.numel() % 8)).view(-1, 8)
        bits = (padded << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        message = torch.cat([torch.tensor([self._tokens]).view(torch.uint8), bits])
        everyone = [torch.empty_like(message) for _ in range(self.ranks.world)]
        dist.all_gather(everyone, message)
        self.sent_bytes += message.numel() * (self.ranks.world - 1)
        tokens = [int(message[:8].view(torch.int64)) for message in everyone]
        union = torch.zeros_like(bits)
        for message in everyone:
            union |= message[8:]
        ids = ((union[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).view(-1)[: mine.numel()].nonzero().view(-1)
        # A rank without rows has no inner state worth keeping; the first that has some lends it to the checkpoint.
        self._source = next((rank for rank, count in enumerate(tokens) if count), 0)
        return self._tokens / max(sum(tokens), 1), ids

    def _parts(self, names: list[str], ids: Tensor) -> list[tuple[str, int]]:
        """Each parameter's name and count of values that travel: of tables, the rows `ids`."""
        params = {name: self.params[name] for name in names}
        return [
            (name, ids.numel() * param.shape[1] if name in self.tables else param.numel())
            for name, param in params.items()
        ]

    def _gather(self, parts: list[tuple[str, int]], weight: float, ids: Tensor) -> Tensor:
        """Weighted changes of this round and the residual of earlier ones, flat, padded to whole blocks a rank."""
        size = sum(count for _, count in parts)
        flat = torch.zeros(size + -size % (BLOCK * self.ranks.world))
        for name, part in _split(flat, parts):
            shared, own = self._shared[name], self.params[name].detach()
            residual = self._residual.get(name)
            if name in self.tables:
                shared, own = shared[ids], own[ids]
                residual = residual[ids] if residual is not None else None
            torch.sub(shared.view(-1), own.reshape(-1), out=part)
            part.mul_(weight)
            if residual is not None:
                part.add_(residual.view(-1))
        return flat

    def _average(self, flat: Tensor, bits: int) -> Tensor:
        """Sum of the ranks' `flat` with the same bits everywhere; with error feedback, `flat` becomes what is left."""
        if self.ranks.world == 1:
            return flat
        result = torch.empty_like(flat)
        chunk = CHUNK // (BLOCK * self.ranks.world) * BLOCK * self.ranks.world
        running: deque[Iterator[None]] = deque()
        for number, (values, target) in enumerate(zip(flat.split(chunk), result.split(chunk), strict=True)):
            running.append(self._average_chunk(values, target, bits, tag=2 * number))
            self._one_stage_further(running)
        while running:
            self._one_stage_further(running)
        return result

    @staticmethod
    def _one_stage_further(running: deque[Iterator[None]]) -> None:
        """The newest chunk first, so that its slices travel while the sums of the one before are made."""
        for chunk in reversed(list(running)):
            try:
                next(chunk)
            except StopIteration:
                running.remove(chunk)

    def _average_chunk(self, values: Tensor, target: Tensor, bits: int, tag: int) -> Iterator[None]:
        """In three stages: send slices, sum this rank's and send the sum, take the sums of the others."""
        world, rank = self.ranks.world, self.ranks.rank
        slices = values.view(world, -1)
        size = slices.shape[1]
        sent = [quantise(part, bits) for part in slices]
        received = [sent[rank] if other == rank else torch.empty_like(sent[rank]) for other in range(world)]
        exchange = start_exchange(self.ranks, lambda other: sent[other], received, tag=tag)
        for part, packed in zip(slices, sent, strict=True):
            part.sub_(dequantise(packed, size, bits))
        yield
        exchange.wait()
        total = torch.zeros(size)
        for packed in received:  # in rank order: the same bits each time
            total.add_(dequantise(packed, size, bits))
        mine = quantise(total, bits)
        parts = [mine if other == rank else torch.empty_like(mine) for other in range(world)]
        exchange = start_exchange(self.ranks, lambda _: mine, parts, tag=tag + 1)
        slices[rank].add_(total.sub_(dequantise(mine, size, bits)))
        yield
        exchange.wait()
        torch.cat([dequantise(packed, size, bits) for packed in parts], out=target)
        self.sent_bytes += 2 * (world - 1) * packed_bytes(size, bits)

    def _keep_residual(self, parts: list[tuple[str, int]], flat: Tensor, ids: Tensor) -> None:
        for name, part in _split(flat, parts):
            if name in self.tables:
                self._residual[name][ids] = part.view(ids.numel(), -1)
            else:
                self._residual[name].view(-1).copy_(part)

    def _move(self, parts: list[tuple[str, int]], average: Tensor, ids: Tensor) -> None:
        """Nesterov SGD as torch's: v <- m v + g, w <- w - lr (g + m v). Rows that nobody touched have g = 0."""
        for name, part in _split(average, parts):
            shared, momentum = self._shared[name], self._momentum[name]
            momentum.mul_(self.outer_momentum)
            if name in self.tables:
                gradient = part.view(ids.numel(), -1)
                momentum[ids] += gradient
                shared.add_(momentum, alpha=-self.outer_lr * self.outer_momentum)
                shared[ids] -= self.outer_lr * gradient
            else:
                gradient = part.view_as(shared)
                momentum.add_(gradient)
                shared.add_(momentum, alpha=-self.outer_lr * self.outer_momentum)
                shared.add_(gradient, alpha=-self.outer_lr)
            self.params[name].detach().copy_(shared)

    def bytes_per_step(self) -> dict[str, int]:
        """Bytes that this rank sends in a step, averaged over a round: dense tensors, and all rows of the tables.

        Rows of the tables that no rank touches do not travel, so the last figure is an upper bound.
        """
        world = self.ranks.world
        tables = sum(self.params[name].numel() for name in self.tables)
        dense = sum(param.numel() for param in self.params.values()) - tables

        def share(numel: int) -> int:
            size = -(-numel // (BLOCK * world)) * BLOCK
            return 2 * (world - 1) * packed_bytes(size, self.bits) // self.every

        return {"deltas": share(dense), "tables at most": share(tables)}

    def full_weights(self) -> dict[str, Tensor]:
        """Nothing: the model's weights are the fp32 ones."""
        return {}

    def full_state(self) -> dict[str, Tensor] | None:
        """The state for a checkpoint on the leader, None elsewhere. Collective; the replicas must be equal.

        The inner state of one rank stands for all (the first that had rows; each has its own, and they are worth about
        the same), in ShardedOptimizer's form, so `--sync step` can go on from it; and the outer momentum. Residuals,
        at most half a level of rounding, are not kept.
        """
        state = self.inner.full_state()
        assert state is not None
        if self._source:
            for key in sorted(state):
                if self.ranks.rank == self._source:
                    dist.send(state[key].contiguous(), 0)
                elif self.ranks.leader:
                    dist.recv(state[key], self._source)
        if not self.ranks.leader:
            return None
        return state | {f"{name}.outer_momentum": tensor for name, tensor in self._momentum.items()}

    def load_full_state(self, state: Mapping[str, Tensor] | None, steps: int) -> None:
        """Start every rank from the leader's state, at any number of ranks. Collective.

        For more than one rank, momenta travel rounded to 8 bits a value and second moments as bf16: a third of the
        bytes. A state without outer momentum (of a step-synchronous run) starts with none.
        """
        if self.ranks.leader:
            assert state is not None
            self.check_state(state)
        inner = self.inner.full_state()
        assert inner is not None
        for key in sorted(inner):
            if state is not None:
                inner[key].copy_(state[key])
            # The leader keeps its exact state: inner states need not be equal.
            shared = self._from_leader(inner[key], rounded=not key.endswith(("exp_avg_sq", "second_moment")))
            if not self.ranks.leader:
                inner[key].copy_(shared)
        self.inner.load_full_state(inner, steps)
        self._touched_at.zero_()  # momentum may still move any row, so the first round takes all of them
        resumed = broadcast_json(
            state is not None and all(f"{n}.outer_momentum" in state for n in self.params), self.ranks
        )
        for name, momentum in self._momentum.items():
            if not resumed:
                momentum.zero_()
                continue
            if state is not None:
                momentum.copy_(state[f"{name}.outer_momentum"])
            momentum.copy_(self._from_leader(momentum, rounded=True))

    def _from_leader(self, tensor: Tensor, *, rounded: bool) -> Tensor:
        """The leader's tensor, rounded to MOMENTUM_BITS or to bf16, with the same bits on every rank."""
        if self.ranks.world == 1:
            return tensor
        if not rounded:
            copy = tensor.to(torch.bfloat16).view(-1).view(torch.uint8)
            dist.broadcast(copy, 0)
            return copy.view(torch.bfloat16).float().view_as(tensor)
        values = torch.nn.functional.pad(tensor.float().reshape(-1), (0, -tensor.numel() % BLOCK))
        packed = quantise(values, MOMENTUM_BITS)
        dist.broadcast(packed, 0)
        return dequantise(packed, values.numel(), MOMENTUM_BITS)[: tensor.numel()].view_as(tensor)

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError, naming the tensor, when `state` is not one of this model's."""
        self.inner.check_state(state)
        for name, tensor in self._momentum.items():
            found = state.get(f"{name}.outer_momentum")
            if found is not None and found.shape != tensor.shape:
                raise ValueError(f"optimizer state {name}.outer_momentum has shape {tuple(found.shape)}")
