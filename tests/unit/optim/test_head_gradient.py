"""The head's gradient, which the optimizer adds up without autograd."""

from __future__ import annotations

import pytest
import torch

from lantrain.cluster.group import Ranks
from lantrain.model.embedding import EmbeddingRows
from lantrain.model.gpt import GPT, config_for_depth
from lantrain.optim import sharded
from lantrain.optim.groups import parameter_groups
from lantrain.optim.sharded import LATE, ShardedOptimizer

VOCAB = 203  # padded to 256 rows


def _model(dtype: torch.dtype) -> GPT:
    model = GPT(config_for_depth(2, aspect_ratio=32, head_dim=64, sequence_len=16, vocab_size=VOCAB), dtype)
    model.init_weights()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    return model


def _rows(model: GPT, idx: torch.Tensor, late: tuple[str, ...]) -> EmbeddingRows:
    params, tables = dict(model.named_parameters()), set(model.embedding_tables())
    return ShardedOptimizer(params, parameter_groups(model), tables, Ranks(0, 1), late=late).gather_rows(idx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_gradients_are_those_of_autograd(dtype, micro_batches, factor, monkeypatch):
    monkeypatch.setattr(sharded, "PART_ROWS", 64)  # 203 rows are three parts and a rest
    data = torch.randint(0, VOCAB, (micro_batches, 2, 17), generator=torch.Generator().manual_seed(2))
    found = []
    for late in ((), LATE):
        model = _model(dtype)
        rows = _rows(model, data[..., :-1], late)
        for micro in data:
            (model.loss(micro[:, :-1], micro[:, 1:], scale=1 / 96, rows=rows) * factor).backward()
        found.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    assert set(found[0]) == set(found[1])
    for name, grad in found[0].items():
        if name in LATE:
            scale = float(grad.abs().max())
            # A part of a product may be blocked otherwise than the whole.
            assert float((grad - found[1][name]).abs().max()) <= (1e-6 if dtype == torch.float32 else 1e-2) * scale
            assert not grad[VOCAB:].any()
            assert not found[1][name][VOCAB:].any()
        else:
            assert torch.equal(grad, found[1][name]), name


def test_a_loss_between_a_loss_and_its_backward_pass_is_an_error():
    """It has overwritten the logits; a wrong gradient would be the alternative."""
    model = _model(torch.float32)
    data = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(2))
    rows = _rows(model, data[:, :-1], LATE)
    first = model.loss(data[:, :-1], data[:, 1:], rows=rows)
    model.loss(data[:, :-1], data[:, 1:], rows=rows)
    with pytest.raises(RuntimeError, match="another loss"):
        first.backward()
