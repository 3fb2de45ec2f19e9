"""Muon and AdamW with owners: each tensor's optimizer state lives on one rank, for any number of ranks.

A step sends every gradient to its owner, who sums, updates, and sends the new weights to all ranks (optim/wire.py).
Embedding tables are the exception: they are updated alike on every rank (optim/tables.py). After a step not all new
weights need be there: those of `late` parameters, the head's, may still travel when the next forward pass begins, and
rows of the tables are brought up to date when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lantrain.cluster.group import Ranks
from lantrain.model.embedding import EmbeddingRows, GradientSink, WeightCasts
from lantrain.optim.adamw import adamw_update, moments_like
from lantrain.optim.groups import ParamGroup
from lantrain.optim.muon import muon_update, second_moment_shape
from lantrain.optim.owners import Piece, assign_owners, pieces_of
from lantrain.optim.tables import Tables
from lantrain.optim.wire import Wire, make_buckets

LARGE = 2**12
"""AdamW's moments of smaller parameters are float32 always: gates and scalars."""

LATE = ("lm_head.weight",)
"""What GPT's forward pass uses last, and its backward pass first."""

PART_ROWS = 2**12
"""Rows of the head's gradient that are made at a time."""


class ShardedOptimizer:
    """Steps all parameters of a model; holds only the state of the pieces that this rank owns, and of the tables."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        groups: list[ParamGroup],
        tables: set[str],
        ranks: Ranks,
        *,
        weights: list[float] | None = None,
        muon_dtype: torch.dtype = torch.float32,
        wire_dtype: torch.dtype = torch.float32,
        moments_dtype: torch.dtype = torch.float32,
        late: Collection[str] = (),
    ) -> None:
        """Prepare owners for `params` (by state-dict name); `tables` names the replicated embedding tables.

        late: names of parameters that the forward pass uses last. They are updated last, and `step` does not wait for
        their new weights. Like rows of the tables they are read through `gather_rows`, which takes their gradients too;
        whoever reads them otherwise calls `finish` before.
        moments_dtype: of AdamW's state for the tables and the head; the same on every rank.
        wire_dtype: of gradients and weights while they travel, float32 or bfloat16. With bfloat16 the large parameters
        are rounded here, on every rank alike, and their owners keep what they were (`full_weights`).
        """
        self.params = dict(params)
        self.groups = groups
        self.ranks = ranks
        self.muon_dtype = muon_dtype
        self.steps = 0
        narrow = wire_dtype if ranks.world > 1 else torch.float32
        table_groups = {name: group for group in groups for name in group.names if name in tables}
        table_params = {name: self.params[name] for name in table_groups}
        self.tables = Tables(table_params, table_groups, ranks, narrow, moments_dtype)
        self.moments_dtype = moments_dtype
        shapes = {name: param.shape for name, param in self.params.items()}
        pieces = pieces_of(shapes, groups, tables, ranks.world)
        self.owned = assign_owners(pieces, weights or [1.0] * ranks.world)
        self.mine = self.owned[ranks.rank]
        # The backward pass finishes the parameters in about the reverse of the model's order.
        buckets = make_buckets(self.owned, list(reversed(list(self.params))))
        self.wire = Wire(buckets, ranks, narrow)
        self.masters: dict[Piece, Tensor] = {}
        self.adamw_state: dict[Piece, tuple[Tensor, Tensor]] = {}
        self.muon_state: dict[Piece, tuple[Tensor, Tensor]] = {}
        self._make_owned_state()
        if narrow != torch.float32:
            self._round_weights(pieces, narrow)
        self._pending: list[Callable[[], dict[Piece, Tensor]]] = []
        self._final, self._missing = False, self._names_by_bucket()
        self._late = {id(self.params[name]): name for name in late}
        late_buckets = [names <= set(late) for names in self._names_by_bucket()]
        self._order = sorted(enumerate(late_buckets), key=lambda pair: pair[1])
        self._on_their_way: list[Callable[[], Iterator[tuple[Piece, Tensor]]]] = []
        if ranks.world > 1:
            for name in {piece.name for piece in pieces}:
                self.params[name].register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))

    def _make_owned_state(self) -> None:
        for piece in self.mine:
            view = self._view(piece)
            if self.groups[piece.group].kind == "muon":
                rows, columns = view.shape
                second = torch.zeros(second_moment_shape((rows, columns)))
                self.muon_state[piece] = (torch.zeros_like(view), second)
            else:
                self.adamw_state[piece] = moments_like(view, self._state_dtype(piece.name, "exp_avg"))

    def _round_weights(self, pieces: list[Piece], narrow: torch.dtype) -> None:
        for piece in pieces:
            if not piece.worth_rounding:
                continue
            view = self._view(piece)
            if piece in self.adamw_state or piece in self.muon_state:
                self.masters[piece] = view.clone()
            view.copy_(view.to(narrow))

    def _view(self, piece: Piece) -> Tensor:
        return self.params[piece.name].data[piece.start : piece.stop]

    def _weights(self, piece: Piece) -> Tensor:
        """The fp32 weights of a piece that this rank owns: the master copy where the model's are rounded."""
        return self.masters[piece] if piece in self.masters else self._view(piece)

    # Gradients leave for their owners while the last backward pass of the step still runs.

    def _names_by_bucket(self) -> list[set[str]]:
        return [{piece.name for parcel in bucket for piece in parcel.pieces} for bucket in self.wire.parcels]

    def gradients_become_final(self) -> None:
        """The next backward pass is the last one of this step: what it completes may be sent at once."""
        self._final = True

    def _arrived(self, name: str) -> None:
        """A gradient is complete, if this is the last backward pass: send the buckets that are, in order."""
        if not self._final:
            return
        self._missing[len(self._pending)].discard(name)
        for later in self._missing[len(self._pending) + 1 :]:
            later.discard(name)
        while len(self._pending) < len(self._missing) and not self._missing[len(self._pending)]:
            self._send_bucket()

    def _send_bucket(self) -> None:
        bucket = len(self._pending)
        self._pending.append(self.wire.send_gradients(bucket, self._take_gradient))
        for parcel in self.wire.parcels[bucket]:
            for piece in parcel.pieces:
                self.params[piece.name].grad = None

    def _take_gradient(self, piece: Piece) -> Tensor:
        """This rank's gradient of a piece; zeros where it had no rows."""
        gradient = self.params[piece.name].grad
        return torch.zeros(piece.numel) if gradient is None else gradient[piece.start : piece.stop]

    @property
    def waited(self) -> float:
        """Seconds in which this rank has waited for others, or for the cable, since it was made."""
        return self.wire.waited + self.tables.waited

    def send_gradients(self) -> None:
        """Send all gradients that have not been sent yet: the step's backward passes are over. Every rank calls it."""
        while len(self._pending) < len(self._missing):
            self._send_bucket()
        self._final, self._missing = False, self._names_by_bucket()

    def skip_step(self) -> None:
        """Drop this step's gradients everywhere. Collective."""
        self.send_gradients()
        for arrived in self._pending:
            arrived()
        self._pending.clear()

    @torch.no_grad()
    def step(
        self, rows: EmbeddingRows | None, *, lr_multiplier: float, muon_momentum: float, muon_weight_decay: float
    ) -> None:
        """Sum the gradients over the ranks, update, and leave the same new weights on every rank.

        Reads `.grad` of the parameters and of `rows` (None on a rank that had no rows this step), and clears the
        former. Collective: every rank calls it.
        """
        self._take_late_weights()
        self.steps += 1
        self.send_gradients()
        touched = self.tables.send_rows(rows)
        returning: list[Callable[[], Iterator[tuple[Piece, Tensor]]]] = []
        for bucket, late in self._order:
            for piece, gradient in self._pending[bucket]().items():
                self._update(piece, gradient, lr_multiplier, muon_momentum, muon_weight_decay)
            # The weights of this bucket travel while the next one is updated.
            if self.ranks.world > 1:
                (self._on_their_way if late else returning).append(self.wire.send_weights(bucket, self._weights))
        self._pending.clear()
        # The tables are large, and updated alike everywhere: there is time for that while the weights travel.
        self.tables.update(touched(), step=self.steps, lr_multiplier=lr_multiplier)
        self._take_weights(returning)

    def _take_weights(self, returning: list[Callable[[], Iterator[tuple[Piece, Tensor]]]]) -> None:
        for returned in returning:
            for piece, values in returned():
                view = self._view(piece)
                view.copy_(values.view_as(view))

    @torch.no_grad()
    def _take_late_weights(self) -> None:
        self._take_weights(self._on_their_way)
        self._on_their_way.clear()

    def finish(self) -> None:
        """Wait for the late weights of the last step, and bring all rows of the tables up to date: from now on, to the
        next step, all parameters may be read.
        """
        self._take_late_weights()
        self.tables.settle()

    def gather_rows(self, idx: Tensor) -> EmbeddingRows:
        """What the next forward passes read for token ids `idx` (any shape): the rows of the tables, up to date, and
        weights in the compute dtype, of which a late one is waited for when it is asked for.
        """
        self.tables.settle_rows(idx)
        rows = EmbeddingRows.gather(self.tables.params, idx, self.tables.vocab)
        return replace(rows, casts=_StepCasts(self))

    def _add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add left^T right to the gradient of a parameter (K, C): left (N, up to K), right (N, C).

        In parts that fit the cache, each made and then added: the sum that autograd makes, to the bit, so that ranks
        which share the micro-batches out get the gradient of one rank.
        """
        param, count = self.params[name], left.shape[1]
        fresh = param.grad is None
        if param.grad is None:
            param.grad = torch.empty_like(param)
            param.grad[count:] = 0.0
        for start in range(0, count, PART_ROWS):
            product = torch.mm(left[:, start : start + PART_ROWS].t(), right)
            target = param.grad[start : start + len(product)]
            _ = target.copy_(product) if fresh else target.add_(product)
        if self.ranks.world > 1:
            self._arrived(name)

    def _update(self, piece: Piece, gradient: Tensor, lr_multiplier: float, momentum: float, decay: float) -> None:
        group, weights = self.groups[piece.group], self._weights(piece)
        lr, gradient = group.lr * lr_multiplier, gradient.view_as(weights)
        if group.kind == "adamw":
            adamw_update(
                weights, gradient, *self.adamw_state[piece],
                step=self.steps, lr=lr, betas=group.betas, eps=group.eps, weight_decay=group.weight_decay,
            )  # fmt: skip
            return
        # One matrix at a time: its result then does not depend on which others this rank owns.
        momentum_buffer, second_moment = self.muon_state[piece]
        muon_update(
            weights[None], gradient[None], momentum_buffer[None], second_moment[None],
            lr=lr, momentum=momentum, beta2=group.beta2, weight_decay=decay, dtype=self.muon_dtype,
        )  # fmt: skip

    def bytes_per_step(self) -> dict[str, int]:
        """Bytes that this rank sends in a step, by part, dense tensors only (touched rows vary with the text)."""
        return self.wire.bytes_per_step()

    def full_weights(self) -> dict[str, Tensor]:
        """The fp32 weights of the parameters that are rounded on the ranks, whole, on the leader. Collective."""
        self.finish()
        whole: dict[str, Tensor] = {}
        for owner, owned in enumerate(self.owned):
            for piece in owned:
                if self.wire.narrow == torch.float32 or not piece.worth_rounding:
                    continue
                if self.ranks.leader:
                    if piece.name not in whole:
                        whole[piece.name] = torch.empty_like(self.params[piece.name].data)
                    part = whole[piece.name][piece.start : piece.stop]
                    if owner == 0:
                        part.copy_(self.masters[piece])
                    else:
                        dist.recv(part, owner)
                elif owner == self.ranks.rank:
                    dist.send(self.masters[piece], 0)
        return whole

    def _state_tensors(self) -> dict[tuple[str, str], list[tuple[Piece, int, Tensor | None]]]:
        """For each (parameter, kind of state): the pieces with their owners, and the tensor where it is ours."""
        local: dict[tuple[Piece, str], Tensor] = {}
        for piece, (exp_avg, exp_avg_sq) in self.adamw_state.items():
            local[piece, "exp_avg"], local[piece, "exp_avg_sq"] = exp_avg, exp_avg_sq
        for piece, (momentum, second) in self.muon_state.items():
            local[piece, "momentum"], local[piece, "second_moment"] = momentum, second
        table: dict[tuple[str, str], list[tuple[Piece, int, Tensor | None]]] = {}
        for owner, owned in enumerate(self.owned):
            for piece in owned:
                muon = self.groups[piece.group].kind == "muon"
                for kind in ("momentum", "second_moment") if muon else ("exp_avg", "exp_avg_sq"):
                    table.setdefault((piece.name, kind), []).append((piece, owner, local.get((piece, kind))))
        return table

    def _state_shape(self, name: str, kind: str) -> tuple[int, ...]:
        shape = tuple(self.params[name].shape)
        return second_moment_shape((shape[0], shape[1])) if kind == "second_moment" else shape

    def _state_dtype(self, name: str, kind: str) -> torch.dtype:
        """float32 for what is small, and for Muon."""
        large = self.params[name].dim() == 2 and self.params[name].numel() >= LARGE
        return self.moments_dtype if large and kind in ("exp_avg", "exp_avg_sq") else torch.float32

    def full_state(self) -> dict[str, Tensor] | None:
        """The whole state by `name.kind` on the leader, None elsewhere: free of the number of ranks. Collective."""
        self.tables.settle()
        state: dict[str, Tensor] = {}
        for (name, kind), pieces in sorted(self._state_tensors().items()):
            shape, dtype = self._state_shape(name, kind), self._state_dtype(name, kind)
            whole = torch.empty(shape, dtype=dtype) if self.ranks.leader else None
            for piece, owner, tensor in pieces:
                if whole is not None:
                    part = whole[piece.start : piece.stop] if kind != "second_moment" else whole
                    if tensor is not None:
                        part.copy_(tensor)
                    else:
                        dist.recv(part, owner)
                elif tensor is not None:
                    dist.send(tensor.contiguous(), 0)
            if whole is not None:
                state[f"{name}.{kind}"] = whole
        for name, (exp_avg, exp_avg_sq) in self.tables.state.items():
            state[f"{name}.exp_avg"], state[f"{name}.exp_avg_sq"] = exp_avg, exp_avg_sq
        return state if self.ranks.leader else None

    def load_full_state(self, state: Mapping[str, Tensor] | None, steps: int) -> None:
        """Spread the leader's whole state over the owners. Collective; raises KeyError or ValueError on the leader."""
        self.tables.settle()
        self.steps = steps
        if self.ranks.leader:
            assert state is not None
            self.check_state(state)
        for (name, kind), pieces in sorted(self._state_tensors().items()):
            for piece, owner, tensor in pieces:
                part = None
                if state is not None:
                    whole = state[f"{name}.{kind}"]
                    part = (whole[piece.start : piece.stop] if kind != "second_moment" else whole).contiguous()
                    part = part.to(self._state_dtype(name, kind))
                if tensor is not None and part is not None:
                    tensor.copy_(part)
                elif part is not None:
                    dist.send(part, owner)
                elif tensor is not None:
                    dist.recv(tensor, 0)
        for name, tensors in self.tables.state.items():
            for kind, tensor in zip(("exp_avg", "exp_avg_sq"), tensors, strict=True):
                if state is not None:
                    tensor.copy_(state[f"{name}.{kind}"])
                if self.ranks.world > 1:
                    dist.broadcast(tensor.view(torch.uint8), 0)

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError, naming the tensor, when `state` is not one of this model's."""
        wanted = {f"{name}.{kind}": self._state_shape(name, kind) for name, kind in self._state_tensors()}
        for name in self.tables.state:
            wanted[f"{name}.exp_avg"] = wanted[f"{name}.exp_avg_sq"] = tuple(self.params[name].shape)
        for key, shape in wanted.items():
            if key not in state:
                raise ValueError(f"optimizer state lacks {key}")
            if tuple(state[key].shape) != tuple(shape):
                raise ValueError(f"optimizer state {key} has shape {tuple(state[key].shape)}, the model {tuple(shape)}")


class _StepCasts(WeightCasts):
    """The casts of a step, which wait for late weights at their first use, and add up late parameters' gradients."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if id(weight) in self._optimizer._late:
            self._optimizer._take_late_weights()
        return super().of(weight, dtype)

    def gradient_sink(self, weight: Tensor) -> GradientSink | None:
        name = self._optimizer._late.get(id(weight))
        return None if name is None else partial(self._optimizer._add_product, name)
