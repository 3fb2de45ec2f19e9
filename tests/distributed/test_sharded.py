"""The sharded optimizer: the same update for any number of ranks, a state that is free of it, balanced owners."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lantrain.cluster.group import Ranks
from lantrain.model.embedding import EmbeddingRows
from lantrain.model.gpt import GPT, config_for_depth
from lantrain.optim.groups import parameter_groups
from lantrain.optim.owners import Piece, assign_owners
from lantrain.optim.sharded import ShardedOptimizer
from tests.distributed.ranks import together

SCHEDULE = {"lr_multiplier": 0.7, "muon_momentum": 0.9, "muon_weight_decay": 0.1}


def _model() -> GPT:
    model = GPT(config_for_depth(3, aspect_ratio=32, head_dim=32, sequence_len=16, vocab_size=200, window_pattern="L"))
    model.init_weights(seed=3)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.02)
    return model


def _optimizer(
    model: GPT, ranks: Ranks, weights: list[float] | None, wire_dtype: torch.dtype = torch.float32,
    moments_dtype: torch.dtype = torch.float32,
) -> ShardedOptimizer:  # fmt: skip
    groups = parameter_groups(model)
    params, tables = dict(model.named_parameters()), set(model.embedding_tables())
    return ShardedOptimizer(
        params, groups, tables, ranks, weights=weights, wire_dtype=wire_dtype, moments_dtype=moments_dtype
    )


def _gradient(shape: torch.Size, seed: int) -> torch.Tensor:
    """Multiples of 1/64 up to 1/4: sums of a few of them are exact in fp32, so the order of the ranks cannot show."""
    return torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)).float() / 64


def _mine(ranks: Ranks) -> range:
    return range(ranks.rank * 6 // ranks.world, (ranks.rank + 1) * 6 // ranks.world)


def _train(model: GPT, optimizer: ShardedOptimizer, ranks: Ranks, steps: range) -> None:
    """Six rows a step, split over the ranks in order, each with gradients of its own; some ranks may get no row."""
    mine = _mine(ranks)
    for step in steps:
        rows = _add_gradients(model, optimizer, step, mine) if len(mine) else None
        optimizer.step(rows, **SCHEDULE)
        assert all(param.grad is None for param in model.parameters())
    optimizer.finish()


def _add_gradients(model: GPT, optimizer: ShardedOptimizer, step: int, mine: range) -> EmbeddingRows:
    tables = model.embedding_tables()
    data = torch.randint(0, 200, (6, 16), generator=torch.Generator().manual_seed(step))
    rows = optimizer.gather_rows(data[mine.start : mine.stop])
    for place, (name, param) in enumerate(model.named_parameters()):
        target = rows.rows[name] if name in tables else param
        target.grad = torch.zeros_like(target)
        for row in mine:
            seed = 1000 * step + 10 * place + row
            if name in tables:
                ids = rows.positions(data[row])
                target.grad.index_add_(0, ids, _gradient(torch.Size([16, target.shape[1]]), seed))
            else:
                target.grad += _gradient(target.shape, seed)
    return rows


def _three_steps(ranks: Ranks, weights: list[float] | None = None) -> Any:
    model = _model()
    optimizer = _optimizer(model, ranks, weights)
    _train(model, optimizer, ranks, range(3))
    state = optimizer.full_state()
    names = {name: tensor.detach() for name, tensor in model.named_parameters()}
    dense = sum(piece.numel for owned in optimizer.owned for piece in owned)
    return names, state, dense, optimizer.bytes_per_step()


@pytest.mark.parametrize(
    ("world", "weights"), [(2, None), (3, [1.0, 0.0, 4.0]), (5, None), (7, None)], ids=["2", "3 unequal", "5", "7"]
)
def test_update_is_the_single_rank_update(world: int, weights: list[float] | None) -> None:
    alone, alone_state, _, _ = _three_steps(Ranks(0, 1))
    results = together(world, partial(_three_steps, weights=weights))
    for rank, (names, state, _, _) in enumerate(results):
        for name, tensor in names.items():
            assert torch.equal(tensor, results[0][0][name]), f"rank {rank} differs in {name}"
            # A batched product of other matrices beside it may round differently; all else is exact.
            exact = not name.startswith("transformer.h.")
            torch.testing.assert_close(tensor, alone[name], rtol=0, atol=0 if exact else 1e-6)
        assert (state is not None) == (rank == 0)
    state = results[0][1]
    assert set(state) == set(alone_state)
    for key, tensor in state.items():
        torch.testing.assert_close(tensor, alone_state[key], rtol=1e-6, atol=1e-9)


def test_no_table_is_sent_and_dense_bytes_are_the_lower_bound() -> None:
    """Each gradient goes to its owner once and each weight back to the others once: 2 (N-1)/N of the dense bytes."""
    results = together(4, _three_steps)
    dense = results[0][2]
    tables = sum(tensor.numel() for tensor in _model().embedding_tables().values())
    assert dense == sum(tensor.numel() for tensor in results[0][0].values()) - tables
    sent = sum(sum(bytes_per_part.values()) for _, _, _, bytes_per_part in results)
    padding = 8 * 4 * 4 * 3  # at most, a bucket's parcels
    assert 2 * (4 - 1) * dense * 4 <= sent <= 2 * (4 - 1) * dense * 4 + padding


def _save_at(ranks: Ranks, moments: torch.dtype) -> Any:
    model = _model()
    optimizer = _optimizer(model, ranks, None, moments_dtype=moments)
    _train(model, optimizer, ranks, range(2))
    return {name: t.detach() for name, t in model.named_parameters()}, optimizer.full_state()


def _go_on(ranks: Ranks, weights: dict[str, torch.Tensor], state: dict[str, torch.Tensor], moments: torch.dtype) -> Any:
    model = _model()
    model.load_state_dict(weights)
    optimizer = _optimizer(model, ranks, None, moments_dtype=moments)
    optimizer.load_full_state(state if ranks.leader else None, 2)
    _train(model, optimizer, ranks, range(2, 4))
    return {name: t.detach() for name, t in model.named_parameters()}


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_state_moves_between_numbers_of_ranks(moments: torch.dtype) -> None:
    model = _model()
    optimizer = _optimizer(model, Ranks(0, 1), None, moments_dtype=moments)
    _train(model, optimizer, Ranks(0, 1), range(4))
    weights, state = together(3, partial(_save_at, moments=moments))[0]
    rounded = {name for name, tensor in state.items() if tensor.dtype == torch.bfloat16}
    large = {"lm_head.weight", *model.embedding_tables()} if moments == torch.bfloat16 else set()
    assert rounded == {f"{name}.{kind}" for name in large for kind in ("exp_avg", "exp_avg_sq")}
    for result in together(2, partial(_go_on, weights=weights, state=state, moments=moments)):
        for name, param in model.named_parameters():
            torch.testing.assert_close(result[name], param.detach(), rtol=0, atol=1e-6)


def test_state_of_another_model_is_named() -> None:
    optimizer = _optimizer(_model(), Ranks(0, 1), None)
    state = optimizer.full_state()
    assert state is not None
    short = {key: value for key, value in state.items() if key != "lm_head.weight.exp_avg"}
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight\.exp_avg"):
        optimizer.load_full_state(short, 1)
    state["lm_head.weight.exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"lm_head\.weight\.exp_avg has shape \(3, 3\)"):
        optimizer.load_full_state(state, 1)


def test_owners_are_balanced_by_cost_and_speed() -> None:
    pieces = [Piece(str(index), 0, 0, 1, 1, cost) for index, cost in enumerate([5, 4, 3, 3, 2, 1, 1, 1])]
    owned = assign_owners(pieces, [1.0, 1.0])
    assert sorted(piece.name for mine in owned for piece in mine) == [piece.name for piece in pieces]
    assert [sum(piece.cost for piece in mine) for mine in owned] == [10, 10]
    fast, slow = assign_owners(pieces, [3.0, 1.0])
    assert sum(piece.cost for piece in fast) == 15
    assert assign_owners(pieces, [1.0, 0.0])[1] == []
    assert sum(piece.cost for piece in slow) == 5
