"""Embedding tables: replicated, updated alike on every rank from the rows that a step touched.

A step touches few of a table's rows, so ranks exchange those rows alone and every rank applies the same AdamW update to
its own copy: at depth 8 that keeps 84 of 126 million gradients off the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lantrain.cluster.group import Ranks
from lantrain.model.embedding import EmbeddingRows
from lantrain.optim.adamw import adamw_update
from lantrain.optim.groups import ParamGroup


class Tables:
    """The embedding tables of a model with their AdamW state. `waited` counts the seconds of waiting for others."""

    def __init__(
        self, params: Mapping[str, nn.Parameter], groups: Mapping[str, ParamGroup], ranks: Ranks, narrow: torch.dtype
    ) -> None:
        """`params` and `groups` by table name; `narrow`: dtype of the gradients while they travel."""
        self.params, self.groups, self.ranks, self.narrow = dict(params), dict(groups), ranks, narrow
        self.state = {name: (torch.zeros_like(param), torch.zeros_like(param)) for name, param in self.params.items()}
        self.waited = 0.0
        # Zeros but for the rows of the step that is being taken; tables of one shape take turns.
        self._dense = {param.shape: torch.zeros_like(param) for param in self.params.values()}

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
        for column, (name, param) in enumerate(self.params.items()):
            group, dense = self.groups[name], self._dense[param.shape]
            for ids, gradients in touched:
                dense.index_add_(0, ids, gradients[column])
            adamw_update(
                param.data, dense, *self.state[name],
                step=step, lr=group.lr * lr_multiplier, betas=group.betas, eps=group.eps,
                weight_decay=group.weight_decay,
            )  # fmt: skip
            for ids, _ in touched:
                dense[ids] = 0.0

    def _gradient(self, rows: EmbeddingRows | None, name: str) -> Tensor:
        width = self.params[name].shape[1]
        if rows is None:
            return torch.empty(0, width)
        gradient = rows.rows[name].grad
        return torch.zeros(rows.ids.numel(), width) if gradient is None else gradient

    def bytes_per_row(self) -> int:
        """Bytes that a touched row costs on the wire: its id, and its gradient in every table."""
        return 4 + self.narrow.itemsize * sum(param.shape[1] for param in self.params.values())
