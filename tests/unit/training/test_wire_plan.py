"""The table of bytes that --dry-run prints."""

from __future__ import annotations

import re

import pytest
import torch

from lantrain.cluster.group import Ranks
from lantrain.model.gpt import GPT, config_for_depth
from lantrain.optim.groups import parameter_groups
from lantrain.optim.sharded import ShardedOptimizer
from lantrain.training.config import parse
from lantrain.training.plan import make_plan, plan_lines
from lantrain.training.wire_plan import native_bytes, sent_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_names_the_bytes_that_the_optimizer_sends(dtype: torch.dtype) -> None:
    config = config_for_depth(3, aspect_ratio=32, head_dim=32, sequence_len=16, vocab_size=200)
    planned = sent_bytes(config, [5, 0, 3], [5.0, 1.0, 3.0], dtype)
    for rank, parts in enumerate(planned):
        model = GPT(config)
        model.init_weights()
        optimizer = ShardedOptimizer(
            dict(model.named_parameters()), parameter_groups(model), set(model.embedding_tables()), Ranks(rank, 3),
            weights=[5.0, 1.0, 3.0], wire_dtype=dtype,
        )  # fmt: skip
        assert {name: parts[name] for name in ("gradients", "weights")} == optimizer.bytes_per_step()
        tokens = [80, 0, 48][rank]
        assert parts["tables"] == 2 * tokens * optimizer.tables.bytes_per_row()
    assert [parts["feed"] > 0 for parts in planned] == [True, False, False]


def test_dry_run_prints_the_table_and_the_share_of_the_native_scheme() -> None:
    """Depth 8: 25 million matrix weights and 16.8 of the head travel, in 2 bytes, half of them each way."""
    flags = "--depth 8 --max-seq-len 1024 --device-batch-size 2 --total-batch-size 8192 --num-iterations 10 --dry-run"
    config = parse(flags.split())
    plan = make_plan(config, 32768)
    lines = list(plan_lines(plan, config, 2))
    (first,) = (line for line in lines if line.startswith("     0  "))
    gradients, weights, _, _, total = map(float, first.split()[1:6])
    travelling = plan.counts["lm_head"] + plan.counts["transformer_matrices"]
    assert gradients == pytest.approx(2 * travelling / 2 / 1e6, rel=1e-3)
    assert weights == pytest.approx(gradients, rel=0.05)
    share = re.search(r"([\d.]+)% of (\d+) MB", first)
    assert share is not None
    assert float(share[2]) == pytest.approx(native_bytes(plan.counts["total"], 2) / 1e6, abs=1)
    assert float(share[1]) == pytest.approx(100 * total / float(share[2]), abs=0.1)
    assert float(share[1]) < 20
    assert not any("Sent in a step" in line for line in plan_lines(plan, config, 1))
