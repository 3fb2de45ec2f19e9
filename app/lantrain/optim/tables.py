"""Embedding tables: replicated, updated alike on every rank from the rows that a step touched.

A step touches few of a table's rows, so ranks exchange those rows alone and every rank applies the same AdamW update to
its own copy: at depth 8 that keeps 84 of 126 million gradients off the wire.

The other rows move too, by momentum and decay, but nobody reads them before a token does. They stay behind for up to
WINDOW steps, which are then taken at once (optim/adamw.py), with the same bits: whoever reads rows brings them up to
date first, with `settle_rows`, or with `settle` all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lantrain.cluster.group import Ranks
from lantrain.model.embedding import EmbeddingRows
from lantrain.optim.adamw import Constants, advance_rows, moments_like
from lantrain.optim.groups import ParamGroup

WINDOW = 64
"""Steps that a row may stay behind: each step brings one row of so many up to date, whether it is read or not."""


class Tables:
    """The embedding tables of a model with their AdamW state. `waited` counts the seconds of waiting for others."""

    def __init__(
        self, params: Mapping[str, nn.Parameter], groups: Mapping[str, ParamGroup], ranks: Ranks, narrow: torch.dtype,
        moments: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        """`params` and `groups` by table name, as many rows in each; `narrow`: dtype of gradients that travel.
        `moments`: of AdamW's state.
        """
        self.params, self.groups, self.ranks, self.narrow = dict(params), dict(groups), ranks, narrow
        self.state = {name: moments_like(param, moments) for name, param in self.params.items()}
        self.waited = 0.0
        self._constants = {
            name: Constants(groups[name].betas, groups[name].eps, groups[name].weight_decay) for name in self.params
        }
        self.vocab = max((param.shape[0] for param in self.params.values()), default=0)
        self._behind = torch.zeros(self.vocab, dtype=torch.int32)  # steps that a row lacks
        self._steps: dict[str, list[tuple[float, float, float]]] = {name: [] for name in self.params}

    def send_rows(self, rows: EmbeddingRows | None) -> Callable[[], list[tuple[Tensor, list[Tensor]]]]:
        """Start sending this rank's touched `rows` (None: it had none) to all others. Collective.

        The returned function waits, and gives every rank's touched ids (U,) and their fp32 gradients, one (U, C) a
        table, in rank order.
        """
        widths = [param.shape[1] for param in self.params.values()]
        ids = rows.ids if rows is not None else torch.empty(0, dtype=torch.int64)
        gradients = [self._gradient(rows, name) for name in self.params]
        if self.ranks.world == 1:
            return lambda: [(ids, gradients)]
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks.world)]
        began = time.perf_counter()
        dist.all_gather(counts, torch.tensor([ids.numel()]))
        self.waited += time.perf_counter() - began
        everyone, works = [], []
        for rank, count in enumerate(int(count) for count in counts):
            if rank == self.ranks.rank:
                # Rounded here as well: every rank adds the same numbers.
                payload, theirs = torch.cat(gradients, dim=1).to(self.narrow), ids.int()
            else:
                payload = torch.empty(count, sum(widths), dtype=self.narrow)
                theirs = torch.empty(count, dtype=torch.int32)
            if count:
                works.append(dist.broadcast(theirs, rank, async_op=True))
                works.append(dist.broadcast(payload.view(torch.uint8), rank, async_op=True))
            everyone.append((theirs, payload))

        def wait() -> list[tuple[Tensor, list[Tensor]]]:
            began = time.perf_counter()
            for work in works:
                work.wait()
            self.waited += time.perf_counter() - began
            return [(theirs.long(), list(payload.float().split(widths, dim=1))) for theirs, payload in everyone]

        return wait

    @torch.no_grad()
    def update(self, touched: list[tuple[Tensor, list[Tensor]]], *, step: int, lr_multiplier: float) -> None:
        """One AdamW step on all tables from what `send_rows` gathered: the same on every rank."""
        ids, gradients = self._sums(touched)
        for name, steps in self._steps.items():
            steps.append(self._constants[name].step(step, self.groups[name].lr * lr_multiplier))
            del steps[: -WINDOW - 1]
        self._behind += 1
        self._advance(ids, gradients)
        turn = step % WINDOW
        self._advance(slice(self.vocab * turn // WINDOW, self.vocab * (turn + 1) // WINDOW))

    def _sums(self, touched: list[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, list[Tensor]]:
        """The ids (U,) of all ranks' rows, and the sums of their gradients in rank order, one (U, C) a table."""
        if len(touched) == 1:
            return touched[0]
        ids, places = torch.cat([ids for ids, _ in touched]).unique(return_inverse=True)
        sums = [torch.zeros(ids.numel(), param.shape[1]) for param in self.params.values()]
        for place, (_, gradients) in zip(places.split([ids.numel() for ids, _ in touched]), touched, strict=True):
            for total, gradient in zip(sums, gradients, strict=True):
                total.index_add_(0, place, gradient)
        return ids, sums

    def _advance(self, rows: Tensor | slice, gradients: list[Tensor] | None = None) -> None:
        for column, (name, param) in enumerate(self.params.items()):
            advance_rows(
                param.data, *self.state[name], rows, gradients[column].contiguous() if gradients else None,
                self._behind, self._steps[name], self._constants[name],
            )  # fmt: skip
        self._behind[rows] = 0

    @torch.no_grad()
    def settle_rows(self, idx: Tensor) -> None:
        """Bring the rows that a forward pass will read up to date. idx: token ids of any shape, repeats allowed."""
        wanted = torch.zeros(self.vocab, dtype=torch.bool)
        wanted[idx.reshape(-1)] = True
        self._advance((wanted & (self._behind > 0)).nonzero().view(-1))

    @torch.no_grad()
    def settle(self) -> None:
        """Bring all rows up to date."""
        self._advance(slice(0, self.vocab))

    def _gradient(self, rows: EmbeddingRows | None, name: str) -> Tensor:
        width = self.params[name].shape[1]
        if rows is None:
            return torch.empty(0, width)
        gradient = rows.rows[name].grad
        return torch.zeros(rows.ids.numel(), width) if gradient is None else gradient

    def bytes_per_row(self) -> int:
        """Bytes that a touched row costs on the wire: its id, and its gradient in every table."""
        return 4 + self.narrow.itemsize * sum(param.shape[1] for param in self.params.values())
