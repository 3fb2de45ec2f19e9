"""The table of bytes that --dry-run prints."""

from __future__ import annotations

import re

import pytest
import torch

from lantrain.cluster.group import Ranks
from lantrain.model.gpt import GPT, config_for_depth
from lantrain.optim import wire
from lantrain.optim.groups import parameter_groups
from lantrain.optim.owners import Piece
from lantrain.optim.sharded import ShardedOptimizer
from lantrain.optim.wire import Parcel
from lantrain.training.config import parse
from lantrain.training.plan import make_plan, plan_lines
from lantrain.training.wire_plan import native_bytes, sent_bytes

CONFIG = config_for_depth(3, aspect_ratio=32, head_dim=32, sequence_len=16, vocab_size=200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shares", [[5, 0, 3], [4, 1, 0, 7, 2, 2, 30]], ids=["3 ranks", "7 ranks"])
def test_the_plan_names_the_bytes_that_the_optimizer_sends(shares: list[int], dtype: torch.dtype) -> None:
    world, weights = len(shares), [share or 0.5 for share in shares]
    planned = sent_bytes(CONFIG, shares, weights, dtype)
    for rank, parts in enumerate(planned):
        model = GPT(CONFIG)
        model.init_weights()
        optimizer = ShardedOptimizer(
            dict(model.named_parameters()), parameter_groups(model), set(model.embedding_tables()), Ranks(rank, world),
            weights=weights, wire_dtype=dtype,
        )  # fmt: skip
        assert {name: parts[name] for name in ("gradients", "weights")} == optimizer.bytes_per_step()
        tokens = min(16 * shares[rank], 200)
        assert parts["tables"] == (world - 1) * tokens * optimizer.tables.bytes_per_row()
    assert [parts["feed"] > 0 for parts in planned] == [True, *[False] * (world - 1)]


def test_every_byte_of_gradients_and_weights_goes_to_all_others_once() -> None:
    """Rank r sends the gradients of what the others own to them, and the weights of what it owns to each of them."""
    planned = sent_bytes(CONFIG, [1] * 7, [1.0, 2.0, 0.0, 4.0, 1.0, 1.0, 9.0], torch.bfloat16)
    everything = planned[2]["gradients"]  # owns nothing
    assert planned[2]["weights"] == 0
    for parts in planned:
        assert parts["weights"] == 6 * (everything - parts["gradients"])
    assert sum(parts["weights"] for parts in planned) == 6 * everything


def test_a_plan_for_many_ranks_makes_each_parcel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With parcels for the wire of each rank, a plan for 256 ranks took half a minute."""
    made: list[Parcel] = []

    def parcel(pieces: tuple[Piece, ...], narrow: torch.dtype) -> Parcel:
        made.append(Parcel(pieces, narrow))
        return made[-1]

    monkeypatch.setattr(wire, "Parcel", parcel)
    counts = []
    for world in (8, 16, 32):
        made.clear()
        sent_bytes(CONFIG, [1] * world, [1.0] * world, torch.bfloat16)
        counts.append(len(made))
    assert counts[0] % 8 == 0
    assert counts == [counts[0], 2 * counts[0], 4 * counts[0]]


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
