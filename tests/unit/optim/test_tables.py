"""Embedding tables, whose rows wait until they are read."""

from __future__ import annotations

import pytest
import torch

from lantrain.cluster.group import Ranks
from lantrain.optim.adamw import adamw_update, moments_like
from lantrain.optim.groups import ParamGroup
from lantrain.optim.tables import WINDOW, Tables

V, STEPS = 300, 2 * WINDOW + 9
SHAPES = {"wte": (V, 48), "values": (V, 16)}
GROUPS = {
    "wte": ParamGroup("adamw", ["wte"], 0.3, betas=(0.8, 0.995), weight_decay=0.001),
    "values": ParamGroup("adamw", ["values"], 0.15, betas=(0.8, 0.995), weight_decay=0.01),
}


def _multiplier(step: int) -> float:
    return min(1.0, step / 40) * (1 - max(0, step - 100) / 60)


class Dense:
    """The same tables, all of whose rows step in every step."""

    def __init__(self, params: dict[str, torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.state = {name: [param.detach().clone(), *moments_like(param, dtype)] for name, param in params.items()}

    def step(self, ids: torch.Tensor, gradients: list[torch.Tensor], number: int) -> None:
        for (name, (param, m, v)), rows in zip(self.state.items(), gradients, strict=True):
            group, whole = GROUPS[name], torch.zeros_like(param).index_add_(0, ids, rows)
            adamw_update(
                param, whole, m, v, step=number, lr=group.lr * _multiplier(number), betas=group.betas,
                eps=group.eps, weight_decay=group.weight_decay,
            )  # fmt: skip


@pytest.mark.parametrize("operations", ["", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whoever_reads_rows_finds_what_a_step_of_all_rows_would_have_left(operations, dtype, monkeypatch):
    """At every step, for the rows that it reads; and for all of them in the middle and at the end."""
    monkeypatch.setenv("LANTRAIN_KERNELS", operations)
    random = torch.Generator().manual_seed(3)
    params = {name: torch.nn.Parameter(torch.randn(*shape, generator=random)) for name, shape in SHAPES.items()}
    tables, dense, waited = Tables(params, GROUPS, Ranks(0, 1), torch.float32, dtype), Dense(params, dtype), False
    for number in range(1, STEPS + 1):
        idx = (torch.rand(4, 5, generator=random) ** 3 * V).long()
        tables.settle_rows(idx)
        ids = idx.unique()
        for name, param in params.items():
            assert torch.equal(param[ids], dense.state[name][0][ids]), number
            waited |= not torch.equal(param, dense.state[name][0])
        gradients = [torch.randn(ids.numel(), shape[1], generator=random) / number for shape in SHAPES.values()]
        # As two ranks send them: what both touched is summed.
        half = [gradient * 0.5 for gradient in gradients]
        tables.update([(ids, half), (ids, half)], step=number, lr_multiplier=_multiplier(number))
        dense.step(ids, gradients, number)
        if number in (30, STEPS):
            tables.settle()
            for name, param in params.items():
                for mine, theirs in zip((param, *tables.state[name]), dense.state[name], strict=True):
                    assert torch.equal(mine, theirs), (number, name)
    assert waited, "no row ever waited"


def test_no_row_waits_longer_than_the_window():
    params = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    tables, nothing = Tables(params, GROUPS, Ranks(0, 1), torch.float32), torch.empty(0, dtype=torch.int64)
    for number in range(1, STEPS + 1):
        tables.update([(nothing, [torch.empty(0, 48), torch.empty(0, 16)])], step=number, lr_multiplier=1.0)
        assert int(tables._behind.max()) <= WINDOW
    assert all(len(steps) <= WINDOW + 1 for steps in tables._steps.values())
    assert int(tables._behind.max()) == WINDOW - 1
