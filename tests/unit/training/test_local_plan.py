"""What --dry-run says about local steps is what the optimizer sends."""

from __future__ import annotations

import pytest
import torch

from lantrain.cluster.group import Ranks
from lantrain.model.gpt import GPT
from lantrain.optim.groups import parameter_groups
from lantrain.optim.local_steps import LocalSteps
from lantrain.training.config import parse
from lantrain.training.local_plan import local_bytes
from lantrain.training.plan import make_plan, plan_lines
from lantrain.training.wire_plan import native_bytes

FLAGS = "--depth 4 --max-seq-len 512 --total-batch-size 4096 --num-iterations 100 --dry-run --sync local".split()


@pytest.mark.parametrize(("world", "bits", "every"), [(2, 8, 30), (4, 4, 10)])
def test_planned_bytes_are_those_of_the_optimizer(world: int, bits: int, every: int) -> None:
    plan = make_plan(parse(FLAGS), 4096)
    with torch.device("meta"):
        model = GPT(plan.model)
    model = model.to_empty(device="cpu")
    local = LocalSteps(
        dict(model.named_parameters()), parameter_groups(model), set(model.embedding_tables()), Ranks(0, world),
        every=every, outer_lr=1, outer_momentum=0, delta_bits=bits,
    )  # fmt: skip
    planned = local_bytes(plan.model, plan.counts, plan.rows, local_steps=every, bits=bits, world=world)
    of_optimizer = local.bytes_per_step()
    assert planned["dense"] == pytest.approx(of_optimizer["deltas"], rel=1e-3)
    # A round has more tokens than the vocabulary, so that all rows may travel.
    assert planned["tables"] == pytest.approx(of_optimizer["tables at most"], rel=1e-3)


def test_defaults_send_at_most_one_hundredth_of_the_native_bytes_at_any_depth_and_number_of_ranks() -> None:
    """Rounds alone, and the largest share that the tables can have."""
    args = parse(FLAGS).args
    for depth in (4, 8, 12):
        for world in (2, 4, 12):
            plan = make_plan(parse([*FLAGS, f"--depth={depth}"]), 32768)
            parts = local_bytes(
                plan.model, plan.counts, plan.rows, local_steps=args.local_steps, bits=args.delta_bits, world=world
            )
            assert sum(parts.values()) < 0.01 * native_bytes(plan.counts["total"], world)


def test_plan_says_how_the_ranks_keep_together() -> None:
    text = "\n".join(plan_lines(make_plan(parse(FLAGS), 32768), parse(FLAGS), 2))
    assert "Synchronised: --sync local; local rounds of" in text
    assert "Sent in a local step by the leader" in text
    step = parse([flag for flag in FLAGS if flag not in ("--sync", "local")])
    assert "Synchronised" not in "\n".join(plan_lines(make_plan(step, 32768), step, 2))
