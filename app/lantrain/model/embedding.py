"""Embedding tables, read row by row.

A step of a few thousand tokens touches a few hundred to a few thousand of the 32768 rows of each table. Letting
autograd build a dense gradient costs about 10 ms per table and micro-batch and 32 MB or more per table (measured,
depth 4 and 8), most of it for zeros; gathering the touched rows once a step costs under 1 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """A (rows, width) table named `weight`, uninitialised until `GPT.init_weights` or a state dict fills it."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, idx: Tensor) -> Tensor:
        """Rows of idx (any shape): (*idx.shape, width) in the table's dtype."""
        return F.embedding(idx, self.weight)


GradientSink = Callable[[Tensor, Tensor], None]
"""Adds left^T right to the gradient of a weight (K, C), or of its first rows: left (N, up to K), right (N, C)."""


class WeightCasts:
    """Weights in the compute dtype, each cast once for all micro-batches of a step."""

    def __init__(self) -> None:
        self._casts: dict[int, Tensor] = {}

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` itself when it has the dtype, else its copy in `dtype` from when it was first asked for."""
        if weight.dtype == dtype:
            return weight.detach()
        if id(weight) not in self._casts:
            self._casts[id(weight)] = weight.detach().to(dtype)
        return self._casts[id(weight)]

    def gradient_sink(self, weight: Tensor) -> GradientSink | None:
        """Where the gradient of `weight` is added up without autograd; None: autograd does it."""
        return None


@dataclass(frozen=True)
class EmbeddingRows:
    """What one step reads of the weights: copies of the touched rows of every embedding table, as leaves that collect
    gradients, and the other weights' copies in the compute dtype. A new one is gathered when the weights have changed.

    After `GPT.loss(..., rows=rows).backward()` the gradient of table `name` is `rows.rows[name].grad` for the rows
    `rows.ids`, and zero elsewhere; the table's own `.grad` stays None.
    """

    ids: Tensor  # (U,) int64, sorted, unique
    rows: dict[str, Tensor]  # table name -> (U, C) float32 leaf
    _lookup: Tensor  # (vocab,) int64: id -> its place in ids; -1 where not gathered
    casts: WeightCasts = field(default_factory=WeightCasts)

    @classmethod
    def gather(cls, tables: Mapping[str, Tensor], ids: Tensor, vocab: int) -> EmbeddingRows:
        """Copy each table's rows `ids` (int64 below `vocab`, any shape, repeats allowed, may be empty)."""
        present = torch.zeros(vocab, dtype=torch.bool)
        present[ids.reshape(-1)] = True
        unique = present.nonzero().view(-1)
        lookup = torch.full((vocab,), -1, dtype=torch.int64)
        lookup[unique] = torch.arange(unique.numel())
        rows = {name: table.detach().index_select(0, unique).requires_grad_() for name, table in tables.items()}
        return cls(unique, rows, lookup)

    def positions(self, idx: Tensor) -> Tensor:
        """Where each token of idx (any shape) stands in `ids`; all of them must have been gathered."""
        places = self._lookup[idx]
        if places.numel() and int(places.min()) < 0:
            raise ValueError("a token was not among the gathered rows: gather the ids of the whole step first")
        return places
