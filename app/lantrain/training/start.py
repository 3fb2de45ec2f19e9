"""Everything between forming the ranks and step 0: the leader opens what lasts, and all ranks agree on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantrain import paths
from lantrain.cluster.cores import cgroup_quota
from lantrain.cluster.gemm import choose_dtype, gemm_rate
from lantrain.cluster.group import Ranks, broadcast_json, gather_json
from lantrain.cluster.replicas import copy_from_leader
from lantrain.data.shards import ShardSet, open_shards
from lantrain.data.tokenizer import Tokenizer
from lantrain.errors import UserError
from lantrain.model import kernels
from lantrain.model.gpt import GPT
from lantrain.model.memory import keep_freed_memory
from lantrain.optim.groups import ParamGroup, parameter_groups
from lantrain.optim.local_steps import LocalSteps
from lantrain.optim.sharded import LATE, ShardedOptimizer
from lantrain.training import checkpoint
from lantrain.training.config import Config, first_weights
from lantrain.training.plan import Plan, make_plan
from lantrain.training.sync import steps_locally

NOT_COMPARED = frozenset({"run", "tracker", "mlflow_uri", "mlflow_experiment"})
"""Flags that may differ between the ranks: they only say where the leader reports to."""


@dataclass
class Setup:
    """What the loop needs. Shards, tokenizer and checkpoint are the leader's alone."""

    plan: Plan
    model: GPT
    optimizer: ShardedOptimizer | LocalSteps
    token_bytes: Tensor
    start_step: int
    shards: ShardSet | None
    tokenizer: Tokenizer | None
    resumed: checkpoint.Checkpoint | None
    machine_flops: float
    """Sum of all machines' GEMM rates in the dtype of the computation, FLOP/s."""


@dataclass
class _LeaderFiles:
    shards: ShardSet
    tokenizer: Tokenizer
    resumed: checkpoint.Checkpoint | None


def _open_leader_files(config: Config) -> _LeaderFiles:
    shards = open_shards(paths.data_dir())
    print(f"shards in {paths.data_dir()}: {shards.summary()}", flush=True)
    tokenizer = Tokenizer.load(paths.tokenizer_dir())
    folder = paths.checkpoint_dir(config.tag)
    checkpoint.prepare_folder(folder)
    return _LeaderFiles(shards, tokenizer, _checkpoint_to_resume(config, folder))


def _checkpoint_to_resume(config: Config, folder: Path) -> checkpoint.Checkpoint | None:
    if config.args.resume_from_step >= 0:
        return checkpoint.load(folder, config.args.resume_from_step)
    if config.args.resume != "auto":
        return None
    for step in reversed(checkpoint.complete_steps(folder)):
        try:
            resumed = checkpoint.load(folder, step)
        except checkpoint.CheckpointError as error:
            print(f"warning: {error}; trying the one before", flush=True)
            continue
        print(f"--resume auto: newest complete checkpoint is of step {step}", flush=True)
        return resumed
    print("--resume auto: no checkpoint yet, starting anew", flush=True)
    return None


def compare_configurations(config: Config, ranks: Ranks) -> None:
    """Raise UserError on every rank when a flag differs from the leader's, naming it and both values (invariant 6)."""
    mine = {name: value for name, value in config.user.items() if name not in NOT_COMPARED}
    mine["NANOCHAT_DTYPE"] = os.environ.get("NANOCHAT_DTYPE") or "float32"
    everyone = gather_json(mine, ranks)
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other.get(name) != value:
                flag = name if name.isupper() else f"--{name.replace('_', '-')}"
                raise UserError(
                    f"rank {rank} was started with {flag} {other.get(name)}, the leader with {flag} {value}",
                    "give every rank the leader's command",
                )


def leader_does(ranks: Ranks, work: Any) -> Any:
    """Run `work` on the leader; a UserError there becomes one on every rank, so that nobody waits for it."""
    result, failure = None, None
    if ranks.leader:
        try:
            result = work()
        except UserError as error:
            failure = error
    report = broadcast_json({"error": str(failure)} if failure else {}, ranks)
    if failure:
        raise failure
    if "error" in report:
        raise UserError(f"the leader cannot start: {report['error']}")
    return result


def check_resumed(plan: Plan, config: Config, resumed: checkpoint.Checkpoint) -> list[str]:
    """Compare a checkpoint with this run. Returns notes to print; raises UserError when the model is another."""
    theirs, ours = resumed.meta["model_config"], plan.describe()["model"]
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise UserError(
                f"the checkpoint of step {resumed.step} has {name} {theirs.get(name)}, this run {name} {value}",
                "give the flags of the run that wrote it, or another --model-tag",
            )
    if resumed.step > plan.num_iterations:
        raise UserError(
            f"the checkpoint is of step {resumed.step}, beyond --num-iterations {plan.num_iterations}",
            f"give --num-iterations above {resumed.step}",
        )
    notes = []
    before = resumed.meta.get("num_iterations", plan.num_iterations)
    if before != plan.num_iterations:
        old = plan.schedule.__class__(**{**plan.describe()["schedule"], "num_iterations": before})
        step = min(resumed.step, before - 1)
        notes.append(
            f"warning: {before} steps became {plan.num_iterations}: the learning-rate multiplier of step {resumed.step}"
            f" is {plan.schedule.lr_multiplier(resumed.step):.4f} instead of {old.lr_multiplier(step):.4f}"
        )
    if resumed.meta["total_batch_size"] != plan.total_batch:
        notes.append(
            f"warning: the checkpoint was made with {resumed.meta['total_batch_size']} tokens a step, "
            f"this run has {plan.total_batch}"
        )
    return notes


def prepare(config: Config, ranks: Ranks, hosts: Sequence[str]) -> Setup:
    """Open files on the leader, agree on the plan, build model and optimizer, and make all ranks equal. Collective.

    `hosts` has the name of each rank's machine.
    """
    keep_freed_memory()
    compare_configurations(config, ranks)
    files: _LeaderFiles | None = leader_does(ranks, lambda: _open_leader_files(config))
    vocab_size = broadcast_json(files.tokenizer.vocab_size if files else None, ranks)
    plan = make_plan(config, vocab_size)
    resumed = files.resumed if files else None
    notes = leader_does(ranks, lambda: check_resumed(plan, config, resumed) if resumed else [])
    for note in notes or []:
        print(note, flush=True)
    model, reason = make_model(plan, resumed)
    dtype = model.compute_dtype
    computing = f"computing in {str(dtype).removeprefix('torch.')} ({reason}) with {kernels.describe()}"
    print(f"rank {ranks.rank}: {computing}", flush=True)
    params = dict(model.named_parameters())
    if copy_from_leader(params, ranks) and ranks.leader:
        print("the leader's weights were sent to every rank", flush=True)
    optimizer: ShardedOptimizer | LocalSteps
    machine_flops = sum(gather_json(_gemm_rate(dtype, ranks), ranks))
    if steps_locally(config, plan, ranks, machine_flops):
        optimizer = make_local_optimizer(config, plan, model, ranks)
    else:
        optimizer = make_optimizer(config, plan, model, ranks, choose_wire_dtype(config, ranks, hosts))
    start_step = broadcast_json(resumed.step if resumed else 0, ranks)
    if start_step:
        state = resumed.state["optimizer"] if resumed else None
        leader_does(ranks, lambda: _check_optimizer_state(optimizer, state))
        optimizer.load_full_state(state, start_step)
    token_bytes = torch.zeros(vocab_size, dtype=torch.int32)
    if files:
        token_bytes.copy_(torch.from_numpy(files.tokenizer.token_bytes()))
    if ranks.world > 1:
        torch.distributed.broadcast(token_bytes, 0)
    shards, tokenizer = (files.shards, files.tokenizer) if files else (None, None)
    return Setup(plan, model, optimizer, token_bytes, start_step, shards, tokenizer, resumed, machine_flops)


def make_model(plan: Plan, resumed: checkpoint.Checkpoint | None) -> tuple[GPT, str]:
    """The model with its first weights, or those of `resumed`, and the reason for its compute dtype.

    Drawing takes one core 0.6 s at depth 8: a thread does it while the dtypes are measured on another.
    """
    model = GPT(plan.model)
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(lambda: model.load_state_dict(resumed.model) if resumed else model.init_weights())
        model.compute_dtype, reason = choose_dtype()
    drawn.result()
    return model, reason


def _gemm_rate(dtype: torch.dtype, ranks: Ranks) -> float:
    """FLOP/s of this machine, in a short look where it only scales the step line: alone, with no quota of bursts."""
    alone = ranks.world == 1 and cgroup_quota() is None
    return gemm_rate(dtype, seconds=0.1) if alone else gemm_rate(dtype)


def _check_optimizer_state(optimizer: ShardedOptimizer | LocalSteps, state: dict[str, Tensor] | None) -> None:
    try:
        optimizer.check_state(state or {})
    except ValueError as error:
        raise UserError(f"the checkpoint does not fit: {error}", "resume from another step") from None


def choose_wire_dtype(config: Config, ranks: Ranks, hosts: Sequence[str]) -> torch.dtype:
    """float32 or bfloat16 for gradients and weights between the ranks, by --wire-dtype; the leader says what it chose.

    On one host the wire is its memory, and rounding would only cost time.
    """
    asked, count = config.args.wire_dtype, len(set(hosts))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(asked)
    reason = f"--wire-dtype {asked}" if dtype else f"{count} hosts"
    if dtype is None:
        dtype = torch.bfloat16 if count > 1 else torch.float32
    if ranks.leader and ranks.world > 1:
        name = str(dtype).removeprefix("torch.")
        print(f"gradients and weights travel in {name} ({reason}; sums and optimizer are float32)", flush=True)
    return dtype


def make_optimizer(
    config: Config, plan: Plan, model: GPT, ranks: Ranks, wire_dtype: torch.dtype = torch.float32
) -> ShardedOptimizer:
    """The optimizer of this run, with the learning rates of the flags scaled to the batch."""
    args = config.args
    return ShardedOptimizer(
        dict(model.named_parameters()), _groups(config, plan, model), set(model.embedding_tables()), ranks,
        weights=first_weights(args, ranks.world), muon_dtype=model.compute_dtype,
        wire_dtype=wire_dtype, moments_dtype=getattr(torch, args.moments_dtype), late=LATE,
    )  # fmt: skip


def make_local_optimizer(config: Config, plan: Plan, model: GPT, ranks: Ranks) -> LocalSteps:
    """The optimizer of a run with local steps; the learning rates are those of the whole batch."""
    args = config.args
    return LocalSteps(
        dict(model.named_parameters()), _groups(config, plan, model), set(model.embedding_tables()), ranks,
        every=args.local_steps, outer_lr=args.outer_lr, outer_momentum=args.outer_momentum,
        delta_bits=args.delta_bits, muon_dtype=model.compute_dtype, moments_dtype=getattr(torch, args.moments_dtype),
        late=LATE,
    )  # fmt: skip


def _groups(config: Config, plan: Plan, model: GPT) -> list[ParamGroup]:
    args = config.args
    return parameter_groups(
        model,
        unembedding_lr=args.unembedding_lr * plan.lr_scale,
        embedding_lr=args.embedding_lr * plan.lr_scale,
        scalar_lr=args.scalar_lr * plan.lr_scale,
        matrix_lr=args.matrix_lr * plan.lr_scale,
        weight_decay=plan.weight_decay,
    )
