"""What a run will do: sizes, batch arithmetic, horizon and schedules, from the arguments and the vocabulary alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lantrain.cluster.balance import Balance
from lantrain.cluster.shares import micro_batches
from lantrain.errors import UserError
from lantrain.flags import LARGEST
from lantrain.model.gpt import GPT, SMEAR_CHANNELS, GPTConfig, config_for_depth
from lantrain.optim.schedule import (
    REFERENCE_BATCH,
    REFERENCE_DEPTH,
    Schedule,
    auto_batch,
    lr_scale,
    scaled_weight_decay,
)
from lantrain.training.config import Config, check_batch, evaluation_rows, first_weights
from lantrain.training.local_plan import local_lines
from lantrain.training.wire_plan import wire_lines


@dataclass(frozen=True)
class Plan:
    """Everything about a run that follows from the configuration."""

    model: GPTConfig
    counts: dict[str, int]
    flops_per_token: int
    total_batch: int
    rows: int
    num_iterations: int
    horizon_reason: str
    lr_scale: float
    weight_decay: float
    schedule: Schedule
    eval_rows: int

    def describe(self) -> dict[str, Any]:
        """The plan as JSON values, to be compared and sent between ranks."""
        return {**asdict(self), "schedule": asdict(self.schedule), "model": asdict(self.model)}


def _on_meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def _scaling_params(counts: dict[str, int]) -> int:
    return counts["transformer_matrices"] + counts["lm_head"]


def make_plan(config: Config, vocab_size: int) -> Plan:
    """Derive the plan. Raises UserError where the batch or horizon cannot work."""
    args = config.args

    def model_config(depth: int) -> GPTConfig:
        return config_for_depth(
            depth, aspect_ratio=args.aspect_ratio, head_dim=args.head_dim, sequence_len=args.max_seq_len,
            vocab_size=vocab_size, window_pattern=args.window_pattern,
        )  # fmt: skip

    width = model_config(args.depth).n_embd
    if width < SMEAR_CHANNELS:
        raise UserError(
            f"--depth {args.depth} times --aspect-ratio {args.aspect_ratio} gives {width} channels, and the gates read "
            f"{SMEAR_CHANNELS}", "give a larger --depth, --aspect-ratio or --head-dim"
        )  # fmt: skip
    model = _on_meta(model_config(args.depth))
    counts, flops = model.parameter_counts(), model.flops_per_token()
    reference_counts = _on_meta(model_config(REFERENCE_DEPTH)).parameter_counts()
    target_tokens = int(args.target_param_data_ratio * _scaling_params(counts))
    reference_tokens = args.target_param_data_ratio * _scaling_params(reference_counts)
    batch = args.total_batch_size if args.total_batch_size != -1 else auto_batch(target_tokens, reference_tokens)
    check_batch(batch, args.max_seq_len)
    decay = scaled_weight_decay(args.weight_decay, batch, target_tokens, reference_tokens)
    if args.num_iterations > 0:
        iterations, reason = args.num_iterations, "--num-iterations"
    elif args.target_flops > 0:
        iterations, reason = round(args.target_flops / (flops * batch)), "--target-flops"
    else:
        iterations, reason = target_tokens // batch, "--target-param-data-ratio"
    if iterations < 1:
        raise UserError(f"{reason} gives no full step of {batch} tokens", "give --num-iterations")
    if iterations > LARGEST:
        raise UserError(f"{reason} gives {float(iterations):.1e} steps", "give --num-iterations")
    schedule = Schedule(iterations, args.warmup_steps, args.warmdown_ratio, args.final_lr_frac, decay)
    rows = batch // args.max_seq_len
    return Plan(
        model.config, counts, flops, batch, rows, iterations, reason, lr_scale(batch), decay, schedule,
        evaluation_rows(config, rows, args.max_seq_len),
    )  # fmt: skip


def first_balance(plan: Plan, config: Config, world: int) -> Balance:
    """The rows of each rank at the start, and whether they follow its speed. Raises UserError for wrong shares."""
    follow = config.args.rebalance and config.args.shares is None
    return Balance(plan.rows, first_weights(config.args, world), follow=follow)


def plan_lines(plan: Plan, config: Config, world: int) -> Iterator[str]:
    """The plan in words, as the leader prints it at the start of a run and `--dry-run` by itself."""
    args = config.args
    yield f"Model config: {json.dumps(asdict(plan.model))}"
    yield "Parameter counts:"
    for name, count in plan.counts.items():
        yield f"  {name:22s}: {count:,}"
    yield f"Estimated FLOPs per token: {plan.flops_per_token:e}"
    if args.total_batch_size == -1:
        yield f"Batch chosen for this horizon: {plan.total_batch:,} tokens"
    yield f"Scaling LRs by {plan.lr_scale:.4f} for batch size {plan.total_batch:,} (reference: {REFERENCE_BATCH:,})"
    yield f"Scaling weight decay from {args.weight_decay:.6f} to {plan.weight_decay:.6f} for depth {args.depth}"
    adamw = (plan.model.n_embd / 768) ** -0.5
    yield f"Scaling the LR for the AdamW parameters by (n_embd/768)^-0.5 = {adamw:.6f} (n_embd {plan.model.n_embd})"
    shares = first_balance(plan, config, world).shares
    yield f"Rows per step: {plan.rows} of {args.max_seq_len} tokens = {plan.total_batch:,} tokens"
    for rank, share in enumerate(shares):
        batches = micro_batches(share, args.device_batch_size)
        sizes = f" {batches}" if 0 < len(batches) <= 8 else ""
        yield f"  rank {rank}: {share} rows in {len(batches)} micro-batches{sizes}"
    # Before a run nothing says that all ranks are on one host.
    narrow = torch.float32 if args.wire_dtype == "float32" else torch.bfloat16
    if args.dry_run and args.sync != "local":
        yield from wire_lines(plan.model, plan.counts["total"], shares, first_weights(args, world), narrow)
    if args.sync != "step":
        yield (
            f"Synchronised: --sync {args.sync}; local rounds of {args.local_steps} steps, changes in {args.delta_bits} "
            f"bits, outer learning rate {args.outer_lr:g} and momentum {args.outer_momentum:g}"
        )
    if args.dry_run and args.sync != "step":
        yield from local_lines(
            plan.model, plan.counts, plan.rows, local_steps=args.local_steps, bits=args.delta_bits, world=world
        )
    scaling = _scaling_params(plan.counts)
    tokens = plan.total_batch * plan.num_iterations
    yield f"Steps: {plan.num_iterations:,} ({plan.horizon_reason})"
    yield f"Tokens: {tokens:,}, {tokens / scaling:.2f} per scaling parameter"
    yield f"Total training FLOPs estimate: {plan.flops_per_token * tokens:e}"
    yield (
        f"Schedule: warmup {plan.schedule.warmup_steps} steps, warmdown the last {plan.schedule.warmdown_steps} "
        f"to {plan.schedule.final_lr_frac:g}"
    )
    yield "  step, lr multiplier, Muon momentum, weight decay:"
    for step in sorted({0, plan.num_iterations // 2, plan.num_iterations - 1}):
        s = plan.schedule
        yield f"  {step:6d} {s.lr_multiplier(step):.4f} {s.muon_momentum(step):.4f} {s.muon_weight_decay(step):.6f}"
    if args.eval_every > 0:
        tokens = plan.eval_rows * args.max_seq_len
        given = "" if "eval_tokens" in config.explicit else " (--eval-tokens sets it; nanochat's 41,943,040 take hours)"
        yield f"Evaluation: every {args.eval_every} steps on {tokens:,} tokens{given}"
    if args.core_metric_every > 0:
        yield "CORE metric: not there yet, the run goes on without it"
