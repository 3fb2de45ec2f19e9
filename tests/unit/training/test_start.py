from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lantrain.cluster.group import Ranks
from lantrain.model.gpt import GPT, GPTConfig
from lantrain.training import start

CONFIG = GPTConfig(sequence_len=64, vocab_size=512, n_layer=2, n_head=2, n_kv_head=2, n_embd=64)


def plan() -> Any:
    return SimpleNamespace(model=CONFIG)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", ""])
def test_weights_drawn_while_dtypes_are_measured_are_the_same_bits(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setenv("NANOCHAT_DTYPE", dtype)
    model, reason = start.make_model(plan(), None)
    alone = GPT(CONFIG)
    alone.init_weights()
    assert reason
    assert model.compute_dtype == {"bfloat16": torch.bfloat16, "": torch.float32}.get(dtype, model.compute_dtype)
    theirs = alone.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())


def test_weights_of_a_checkpoint_are_taken_and_another_models_refused() -> None:
    saved = GPT(CONFIG)
    saved.init_weights(7)
    resumed: Any = SimpleNamespace(model=saved.state_dict())
    model, _ = start.make_model(plan(), resumed)
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)
    resumed.model.pop("lm_head.weight")
    with pytest.raises(RuntimeError, match="lm_head"):
        start.make_model(plan(), resumed)


def test_the_look_at_the_machine_is_short_only_where_nothing_follows_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[dict[str, float]] = []
    monkeypatch.setattr(start, "gemm_rate", lambda dtype, **given: looked.append(given) or 1e9)
    for world, quota in ((1, None), (2, None), (1, 0.5)):
        monkeypatch.setattr(start, "cgroup_quota", lambda quota=quota: quota)
        assert start._gemm_rate(torch.float32, Ranks(0, world)) == 1e9
    assert looked == [{"seconds": 0.1}, {}, {}]
