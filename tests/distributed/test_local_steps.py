"""Local steps: the round against a plain reference, equal replicas at any number of ranks, bytes, and resuming."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lantrain.cluster.group import Ranks
from lantrain.model.gpt import GPT, config_for_depth
from lantrain.optim.groups import ParamGroup, parameter_groups
from lantrain.optim.local_steps import LocalSteps
from lantrain.optim.sharded import ShardedOptimizer
from tests.distributed.ranks import together

SCHEDULE = {"lr_multiplier": 0.05, "muon_momentum": 0.9, "muon_weight_decay": 0.1}
"""Small steps: with large ones AdamW makes another sign, and another run, of the last bit of a gradient near zero."""
VOCAB, LENGTH = 200, 16
Weights = dict[str, torch.Tensor]


def _model() -> GPT:
    model = GPT(
        config_for_depth(3, aspect_ratio=32, head_dim=32, sequence_len=LENGTH, vocab_size=VOCAB, window_pattern="L")
    )
    model.init_weights(seed=3)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.02)
    return model


def _weights(model: GPT) -> Weights:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _groups(model: GPT) -> list[ParamGroup]:
    """Without the decay of table rows that no step touches: local steps leave it out."""
    groups = parameter_groups(model)
    for group in groups:
        if set(group.names) <= set(model.embedding_tables()):
            group.weight_decay = 0.0
    return groups


def _local(model: GPT, ranks: Ranks, **options: Any) -> LocalSteps:
    values = {"every": 4, "outer_lr": 0.8, "outer_momentum": 0.5, "delta_bits": 8} | options
    tables = set(model.embedding_tables())
    return LocalSteps(dict(model.named_parameters()), _groups(model), tables, ranks, **values)


def _data(step: int, rank: int, rows: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCAB // 2, (rows, LENGTH + 1), generator=random)


def _step(model: GPT, optimizer: LocalSteps | ShardedOptimizer, step: int, rank: int, rows: int) -> None:
    """One step of one rank on rows of its own, its gradient the mean over its own tokens."""
    touched = None
    if rows:
        data = _data(step, rank, rows)
        inputs, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        touched = optimizer.gather_rows(inputs)
        model.loss(inputs, targets, scale=1 / inputs.numel(), rows=touched).backward()
    optimizer.step(touched, **SCHEDULE)
    if isinstance(optimizer, LocalSteps):
        optimizer.count_tokens(rows * LENGTH)


def _train(ranks: Ranks, shares: list[int], rounds: list[int], **options: Any) -> list[Weights]:
    """Rounds of the given lengths; the weights after each."""
    model = _model()
    optimizer = _local(model, ranks, **options)
    step, seen = 0, []
    for length in rounds:
        for _ in range(length):
            _step(model, optimizer, step, ranks.rank, shares[ranks.rank])
            step += 1
        optimizer.outer_step()
        seen.append(_weights(model))
    return seen


def _reference(shares: list[int], rounds: list[int], outer_lr: float, outer_momentum: float) -> list[Weights]:
    """The same in one process, with torch's own SGD as the outer optimizer, in float64 and without quantisation."""
    models = [_model() for _ in shares]
    inner = [
        ShardedOptimizer(dict(m.named_parameters()), _groups(m), set(m.embedding_tables()), Ranks(0, 1)) for m in models
    ]
    shared = {name: torch.nn.Parameter(weight.double()) for name, weight in _weights(models[0]).items()}
    momentum = {"momentum": outer_momentum, "nesterov": True} if outer_momentum else {}
    outer = torch.optim.SGD(shared.values(), lr=outer_lr, **momentum)
    step, seen = 0, []
    for length in rounds:
        for _ in range(length):
            for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
                if shares[rank]:
                    _step(model, optimizer, step, rank, shares[rank])
            step += 1
        for optimizer in inner:
            optimizer.finish()
        own = [_weights(model) for model in models]
        for name, param in shared.items():
            mean = sum(share * w[name].double() for share, w in zip(shares, own, strict=True)) / sum(shares)
            param.grad = param.detach() - mean
        outer.step()
        seen.append({name: param.detach().float() for name, param in shared.items()})
        for model in models:
            model.load_state_dict(seen[-1], strict=True)
    return seen


def _furthest(one: Weights, other: Weights) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def _distance(one: Weights, other: Weights) -> float:
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


@pytest.mark.parametrize(
    ("shares", "rounds", "outer_lr", "outer_momentum"),
    [([2, 2], [1, 1, 1], 1.0, 0.0), ([3, 1], [3, 3, 2], 0.7, 0.9), ([2, 0, 1], [4, 1, 3], 0.9, 0.6)],
    ids=["H=1 is the average", "unequal shares", "a rank without rows"],
)
def test_without_rounding_a_round_is_the_plain_outer_step(
    shares: list[int], rounds: list[int], outer_lr: float, outer_momentum: float
) -> None:
    expected = _reference(shares, rounds, outer_lr, outer_momentum)
    options = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "delta_bits": 32}
    body = partial(_train, shares=shares, rounds=rounds, **options)
    start = _weights(_model())
    for weights in together(len(shares), body):
        # In later rounds AdamW makes another sign of the last bit of a gradient that is nearly zero, here and there.
        assert _furthest(weights[0], expected[0]) < 2e-6
        for got, wanted in zip(weights, expected, strict=True):
            assert _distance(got, wanted) < 1e-3 * _distance(wanted, start)


@pytest.mark.parametrize("bits", [8, 4, 32])
@pytest.mark.parametrize("shares", [[2, 2], [3, 0, 1], [0, 2, 1]], ids=["2", "3 unequal", "leader without rows"])
def test_replicas_are_equal_bit_for_bit_after_a_round(bits: int, shares: list[int]) -> None:
    results = together(len(shares), partial(_train, shares=shares, rounds=[3, 1, 3], delta_bits=bits))
    for weights in results[1:]:
        for mine, leaders in zip(weights, results[0], strict=True):
            assert all(torch.equal(mine[name], leaders[name]) for name in leaders)
    again = together(len(shares), partial(_train, shares=shares, rounds=[3, 1, 3], delta_bits=bits))
    assert all(torch.equal(again[0][-1][name], results[0][-1][name]) for name in again[0][-1])


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.02), (4, 0.2)])
def test_rounding_stays_small_beside_the_movement(bits: int, limit: float) -> None:
    """Over three rounds, relative to how far the weights went, in the norm of all parameters together."""
    body = partial(_train, shares=[2, 1], rounds=[3, 3, 3])
    rounded, plain = (together(2, partial(body, delta_bits=b))[0][-1] for b in (bits, 32))
    assert 0 < _distance(rounded, plain) < limit * _distance(plain, _weights(_model()))


def _drift(ranks: Ranks, bits: int, rounds: int) -> tuple[Weights, Weights]:
    """Weights moved by hand by known amounts, far below a level in most places: what arrives, and what was sent."""
    model = _model()
    optimizer = _local(model, ranks, outer_lr=1.0, outer_momentum=0.0, delta_bits=bits)
    start = _weights(model)
    moves = {name: torch.full_like(tensor, 1e-6) for name, tensor in start.items()}
    for move in moves.values():
        move.view(-1)[::256] = 1e-4
    for _ in range(rounds):
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.add_(moves[name], alpha=ranks.rank + 1.0)
        optimizer.steps_since = 1
        optimizer._touched_at.fill_(1)
        optimizer.count_tokens(1)
        optimizer.outer_step()
    got = {name: tensor - start[name] for name, tensor in _weights(model).items()}
    return got, {name: move * 1.5 * rounds for name, move in moves.items()}


@pytest.mark.parametrize("bits", [8, 4])
def test_what_rounding_loses_is_sent_later(bits: int) -> None:
    """Small changes beside large ones in a block: the sum over many rounds arrives, to within a level of one round."""
    (got, wanted), _ = together(2, partial(_drift, bits=bits, rounds=60))
    level = 1.5e-4 / (127 if bits == 8 else 7)
    for name in wanted:
        error = (got[name] - wanted[name]).abs().max()
        assert float(error) < 4 * level + 60 * 2e-7, name
    matrix = got["transformer.h.0.mlp.c_fc.weight"].view(-1)[1:256]
    assert abs(float(matrix.mean()) / (1.5e-6 * 60) - 1) < 0.2


def _bytes(ranks: Ranks, bits: int) -> tuple[int, int, dict[str, int]]:
    model = _model()
    optimizer = _local(model, ranks, every=4, delta_bits=bits)
    for step in range(4):
        _step(model, optimizer, step, ranks.rank, 2)
    optimizer.outer_step()
    return optimizer.sent_bytes, sum(p.numel() for p in model.parameters()), optimizer.bytes_per_step()


@pytest.mark.parametrize(("world", "bits"), [(2, 8), (2, 4), (4, 8)])
def test_bytes_of_a_round_follow_the_bits_and_not_the_ranks(world: int, bits: int) -> None:
    """2 (N-1)/N values of so many bits; half of the table rows are never touched, and never sent."""
    sent, numel, planned = together(world, partial(_bytes, bits=bits))[0]
    assert sent < 2 * (world - 1) / world * numel * bits / 8 * 1.05
    assert sent > planned["deltas"] * 4
    assert sent < (planned["deltas"] + 0.6 * planned["tables at most"]) * 4 + 200


def _save_and_load(ranks: Ranks, shares: list[int], **options: Any) -> Any:
    model = _model()
    optimizer = _local(model, ranks, **options)
    for step in range(3):
        _step(model, optimizer, step, ranks.rank, shares[ranks.rank])
    optimizer.outer_step()
    return _weights(model), optimizer.full_state(), optimizer.inner.full_state()


def test_checkpoint_has_the_inner_state_of_a_rank_that_trained() -> None:
    results = together(3, partial(_save_and_load, shares=[0, 2, 1]))
    assert [state is not None for _, state, _ in results] == [True, False, False]
    state, trained = results[0][1], results[1][2]
    assert all(torch.equal(state[key], tensor) for key, tensor in trained.items())
    assert set(state) - set(trained) == {f"{name}.outer_momentum" for name in results[0][0]}
    assert any(bool(state[f"{name}.outer_momentum"].any()) for name in results[0][0])


def _go_on(ranks: Ranks, weights: Weights, state: dict[str, torch.Tensor], **options: Any) -> Any:
    model = _model()
    model.load_state_dict(weights)
    optimizer = _local(model, ranks, **options)
    optimizer.load_full_state(state if ranks.leader else None, 3)
    inner = {key: tensor.clone() for key, tensor in (optimizer.inner.full_state() or {}).items()}
    for step in range(3, 5):
        _step(model, optimizer, step, ranks.rank, 2)
    optimizer.outer_step()
    return inner, _weights(model)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 3])
def test_state_moves_to_another_number_of_ranks(world: int, moments: torch.dtype) -> None:
    weights, state, _ = together(2, partial(_save_and_load, shares=[2, 1], moments_dtype=moments))[0]
    assert state["lm_head.weight.exp_avg"].dtype == moments
    body = partial(_go_on, weights=weights, state=state, moments_dtype=moments)
    results = together(world, body) if world > 1 else [body(Ranks(0, 1))]
    for rank, (inner, after) in enumerate(results):
        for key, tensor in inner.items():
            if rank == 0:
                assert torch.equal(tensor, state[key])
            scale = float(state[key].abs().max())
            assert float((tensor - state[key]).abs().max()) <= scale / 127, key
        assert all(torch.equal(after[name], results[0][1][name]) for name in after)
        assert bool(torch.isfinite(after["lm_head.weight"]).all())


def test_alone_a_resumed_run_is_the_one_that_was_not_stopped() -> None:
    """One rank rounds nothing, so its checkpoint has everything."""
    whole = _train(Ranks(0, 1), [2], [3, 2])
    model = _model()
    optimizer = _local(model, Ranks(0, 1))
    for step in range(3):
        _step(model, optimizer, step, 0, 2)
    optimizer.outer_step()
    again = _model()
    again.load_state_dict(_weights(model))
    resumed = _local(again, Ranks(0, 1))
    resumed.load_full_state(optimizer.full_state(), 3)
    for step in range(3, 5):
        _step(again, resumed, step, 0, 2)
    resumed.outer_step()
    assert _furthest(_weights(again), whole[-1]) < 1e-6


def test_state_of_a_step_synchronous_run_is_taken() -> None:
    model = _model()
    params, tables = dict(model.named_parameters()), set(model.embedding_tables())
    sharded = ShardedOptimizer(params, parameter_groups(model), tables, Ranks(0, 1))
    _step(model, sharded, 0, 0, 2)
    local = _local(model, Ranks(0, 1))
    local.load_full_state(sharded.full_state(), 1)
    state = local.full_state()
    assert state is not None
    assert not any(bool(state[f"{name}.outer_momentum"].any()) for name in params)
    sharded.check_state(state)
    del state["lm_head.weight.exp_avg"]
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight\.exp_avg"):
        local.check_state(state)


def _with_bad_numbers(ranks: Ranks) -> str:
    from lantrain.errors import UserError

    model = _model()
    optimizer = _local(model, ranks)
    _step(model, optimizer, 0, ranks.rank, 2)
    if not ranks.leader:
        with torch.no_grad():
            model.lm_head.weight[3, 3] = float("nan")
    before = {name: tensor.clone() for name, tensor in optimizer._shared.items()}
    try:
        optimizer.outer_step()
    except UserError as error:
        assert all(torch.equal(before[name], tensor) for name, tensor in optimizer._shared.items())
        return str(error)
    return ""


def test_bad_numbers_of_one_rank_stop_all_before_the_weights_move() -> None:
    assert ["not a number" in error for error in together(2, _with_bad_numbers)] == [True, True]
