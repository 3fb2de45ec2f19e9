"""The trainer's command line: nanochat's `base_train` flags with their names and defaults, and what a CPU changes.

Arguments are checked here, before anything slow, and nowhere else. A test freezes the flags.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from typing import Any

from lantrain.errors import UserError
from lantrain.flags import LARGEST, Parser, check_numbers

NANOCHAT_EVAL_TOKENS = 80 * 524288
"""nanochat's default for --eval-tokens: hours on a CPU, so an evaluation that was not asked for by size is shorter."""

DEFAULT_EVAL_STEPS = 8
"""Evaluation without --eval-tokens: the tokens of so many training steps, about 3 steps' time (forward only)."""

TRACKERS = ("none", "mlflow", "tensorboard", "wandb")


def build_parser() -> argparse.ArgumentParser:
    """The command line of `python -m scripts.base_train`."""
    parser = Parser(
        prog="python -m scripts.base_train", description="Train a GPT on CPUs, alone or under torchrun.",
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--run", default="dummy", help="name of the run, for trackers and logs")
    add("--device-type", default="", help="cpu, or empty; this trainer has no other device")
    add("--fp8", action="store_true", help="not on a CPU")
    add("--fp8-recipe", default="tensorwise", choices=["rowwise", "tensorwise"], help="not on a CPU")
    add("--depth", type=int, default=20, help="layers; sets the width and everything else")
    add("--aspect-ratio", type=int, default=64, help="width = depth * aspect ratio, rounded up to the head size")
    add("--head-dim", type=int, default=128, help="size of an attention head")
    add("--max-seq-len", type=int, default=2048, help="tokens of context (T)")
    add("--window-pattern", default="SSSL", help="attention windows tiled over the layers: L full, S a quarter")
    add("--num-iterations", type=int, default=-1, help="steps (-1: from the flags below)")
    add("--target-flops", type=float, default=-1.0, help="total FLOPs to spend (-1: off)")
    add("--target-param-data-ratio", type=float, default=12.0, help="tokens per scaling parameter")
    add("--device-batch-size", type=int, default=32, help="rows of a micro-batch: what fits in memory")
    add("--total-batch-size", type=int, default=-1, help="tokens a step over all ranks (-1: automatic)")
    add("--embedding-lr", type=float, default=0.3, help="AdamW learning rate of the embeddings")
    add("--unembedding-lr", type=float, default=0.008, help="AdamW learning rate of the head")
    add("--weight-decay", type=float, default=0.28, help="cautious weight decay of Muon")
    add("--matrix-lr", type=float, default=0.02, help="Muon learning rate")
    add("--scalar-lr", type=float, default=0.5, help="learning rate of the per-layer scalars")
    add("--warmup-steps", type=int, default=40, help="steps of learning-rate warmup")
    add("--warmdown-ratio", type=float, default=0.65, help="share of the run for the warmdown")
    add("--final-lr-frac", type=float, default=0.05, help="last learning rate as a share of the first")
    add("--resume-from-step", type=int, default=-1, help="continue from this step's checkpoint (-1: start anew)")
    add("--eval-every", type=int, default=250, help="steps between evaluations (-1: never)")
    add("--eval-tokens", type=int, default=NANOCHAT_EVAL_TOKENS, help="tokens of an evaluation, see the README")
    add("--core-metric-every", type=int, default=2000, help="steps between CORE evaluations (-1: never)")
    add("--core-metric-max-per-task", type=int, default=500, help="examples of each CORE task")
    add("--sample-every", type=int, default=2000, help="steps between samples (-1: never)")
    add("--save-every", type=int, default=-1, help="steps between checkpoints (-1: only at the end)")
    add("--model-tag", default=None, help="name of the checkpoint folder (default d<depth>)")
    add("--tracker", default="none", choices=TRACKERS, help="where metrics go besides metrics.jsonl")
    add("--mlflow-uri", default=None, help="for --tracker mlflow")
    add("--mlflow-experiment", default=None, help="for --tracker mlflow")
    own = parser.add_argument_group("lantrain's own")
    own.add_argument("--resume", choices=["auto"], default=None, help="auto: the newest complete checkpoint, if any")
    own.add_argument("--save-minutes", type=float, default=10.0, help="minutes between checkpoints by time (0: off)")
    own.add_argument("--skip-outliers", action="store_true", help="do not take steps whose loss is an outlier")
    own.add_argument("--keep-last", type=int, default=3, help="complete checkpoints kept; older ones go (0: all)")
    own.add_argument("--shares", default=None, help="fixed relative rows of each rank, for example 3,1")
    own.add_argument("--rates", default=None, help="speed of each rank, to start from (the launchers measure it)")
    own.add_argument(
        "--rebalance", action=argparse.BooleanOptionalAction, default=True,
        help="let the rows of each rank follow its measured speed, unless --shares fixes them",
    )  # fmt: skip
    own.add_argument(
        "--wire-dtype", choices=["auto", "float32", "bfloat16"], default="auto",
        help="dtype of gradients and weights between the ranks; auto: bfloat16, or float32 when all are on one host",
    )  # fmt: skip
    own.add_argument(
        "--moments-dtype", choices=["float32", "bfloat16"], default="float32",
        help="dtype of AdamW's moments for embedding tables and head; bfloat16 saves memory, 0.4 GB at depth 8",
    )  # fmt: skip
    own.add_argument(
        "--sync", choices=["step", "local", "auto"], default="step",
        help="step: exchange gradients every step; local: train apart and average every --local-steps steps, for slow "
        "links; auto: by the measured link",
    )  # fmt: skip
    own.add_argument("--local-steps", type=int, default=30, help="--sync local: steps of a round")
    own.add_argument("--outer-lr", type=float, default=1.0, help="--sync local: learning rate of the averaged change")
    own.add_argument("--outer-momentum", type=float, default=0.7, help="--sync local: its Nesterov momentum")
    own.add_argument(
        "--delta-bits", type=int, choices=[32, 8, 4], default=8,
        help="--sync local: bits of a value on the wire; 32: no rounding",
    )  # fmt: skip
    own.add_argument("--stop-after", type=int, default=-1, help="stop with a checkpoint after this step (-1: off)")
    own.add_argument("--dry-run", action="store_true", help="print the plan and leave; needs no data")
    own.add_argument("--world-size", type=int, default=None, help="ranks to plan for, with --dry-run")
    return parser


@dataclass(frozen=True)
class Config:
    """Checked arguments. `user` keeps them as given, for meta_*.json."""

    args: argparse.Namespace
    explicit: frozenset[str]

    @property
    def user(self) -> dict[str, Any]:
        """All arguments by flag name with underscores."""
        return vars(self.args).copy()

    @property
    def tag(self) -> str:
        """Name of the checkpoint folder."""
        return str(self.args.model_tag or f"d{self.args.depth}")


def parse(argv: list[str]) -> Config:
    """Parse and check `argv`. Raises UserError for anything that could not train."""
    # torchrun passes its own "--" separator on.
    argv = argv[1:] if argv[:1] == ["--"] else argv
    parser = build_parser()
    args = parser.parse_args(argv)
    explicit = frozenset(word.split("=")[0][2:].replace("-", "_") for word in argv if word.startswith("--"))
    config = Config(args, explicit)
    _check_device(args)
    _check_numbers(args)
    _check_later_issues(config)
    return config


def _check_device(args: argparse.Namespace) -> None:
    if args.fp8:
        raise UserError("--fp8 needs an H100; this trainer runs on CPUs", "leave --fp8 out")
    if args.device_type not in ("", "cpu"):
        raise UserError(f"--device-type {args.device_type}: this trainer runs on CPUs only", "use --device-type cpu")
    dtype = os.environ.get("NANOCHAT_DTYPE", "")
    if dtype not in ("", "float32", "bfloat16", "auto"):
        raise UserError(f"NANOCHAT_DTYPE={dtype} is not known", "use float32, bfloat16 or auto")


# The upper ends are much too large even for the plan alone: sizes of tensors overflow, and lists of ranks or of
# micro-batches fill the memory. 256 ranks are as many as the hub takes.
_RANGES: dict[str, tuple[float, float]] = {
    "depth": (1, 1000), "aspect_ratio": (1, 4096), "head_dim": (1, 4096), "max_seq_len": (1, LARGEST),
    "device_batch_size": (1, LARGEST), "total_batch_size": (-math.inf, 2**26), "world_size": (1, 256),
    "target_param_data_ratio": (-math.inf, 10**6), "warmup_steps": (0, LARGEST),
    **dict.fromkeys(
        ("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "weight_decay", "final_lr_frac"), (0, math.inf)
    ),
}  # fmt: skip


def _check_numbers(args: argparse.Namespace) -> None:
    check_numbers(args, _RANGES)
    if not 0 <= args.warmdown_ratio <= 1:
        raise UserError(f"--warmdown-ratio {args.warmdown_ratio} is not a share of the run", "use 0 to 1")
    if args.head_dim % 2:
        raise UserError(f"--head-dim {args.head_dim} is odd; rotary embeddings need pairs", "use 64 or 128")
    if args.max_seq_len < 2:
        raise UserError("--max-seq-len must be at least 2: each token is mixed with the one before it")
    if not args.window_pattern or set(args.window_pattern.upper()) - {"S", "L"}:
        raise UserError(f"--window-pattern {args.window_pattern!r} may have only the letters S and L", "use SSSL or L")
    if args.num_iterations == 0 or args.num_iterations < -1:
        raise UserError(f"--num-iterations {args.num_iterations} is not a number of steps", "use at least 1")
    if args.num_iterations < 0 and args.target_flops <= 0 and args.target_param_data_ratio <= 0:
        raise UserError("nothing says how long to train", "give --num-iterations, for example 1000")
    if args.target_param_data_ratio <= 0:
        raise UserError("--target-param-data-ratio must be above 0: the weight decay is scaled by it", "leave it out")
    if args.total_batch_size != -1:
        check_batch(args.total_batch_size, args.max_seq_len)
    if args.resume_from_step < -1:
        raise UserError(f"--resume-from-step {args.resume_from_step} is not a step")
    if not args.save_minutes >= 0:
        raise UserError(f"--save-minutes {args.save_minutes} is not a time", "use 0 to switch it off")
    if args.local_steps < 1:
        raise UserError(f"--local-steps {args.local_steps} is not a number of steps", "use at least 1")
    if not 0 < args.outer_lr <= 10 or not 0 <= args.outer_momentum < 1:
        raise UserError(
            f"--outer-lr {args.outer_lr:g} and --outer-momentum {args.outer_momentum:g}: the rate must be above 0, the "
            "momentum from 0 to below 1", "leave them out"
        )  # fmt: skip
    if args.keep_last < 0:
        raise UserError(f"--keep-last {args.keep_last} is not a number of checkpoints", "use 0 to keep all")
    if args.world_size is not None and not args.dry_run:
        raise UserError("--world-size is for --dry-run; in a run torchrun sets the number of ranks")
    if args.model_tag is not None and (not args.model_tag.strip() or "/" in args.model_tag or args.model_tag[0] == "."):
        raise UserError(f"--model-tag {args.model_tag!r} is not a folder name")
    if 0 < args.eval_tokens < args.max_seq_len or args.eval_tokens < 0:
        raise UserError(f"--eval-tokens {args.eval_tokens} is less than one row of {args.max_seq_len}")


def check_batch(total_batch_size: int, seq_len: int) -> None:
    """Raise UserError with the nearest valid values unless the batch is a positive multiple of the row length."""
    if total_batch_size > 0 and total_batch_size % seq_len == 0:
        return
    below = max(total_batch_size, 0) // seq_len * seq_len
    nearest = [str(value) for value in (below, below + seq_len) if value > 0]
    raise UserError(
        f"total-batch-size {total_batch_size} is not a multiple of max-seq-len {seq_len}; nearest: {', '.join(nearest)}"
    )


def _check_later_issues(config: Config) -> None:
    if config.args.tracker != "none":
        raise UserError(
            f"--tracker {config.args.tracker} is not there yet", "use --tracker none; metrics are in metrics.jsonl"
        )
    if "core_metric_every" in config.explicit and config.args.core_metric_every > 0:
        raise UserError("the CORE metric is not there yet", "leave --core-metric-every out, or give -1")


def first_weights(args: argparse.Namespace, world: int) -> list[float]:
    """Relative speeds of the ranks at the start: --shares, else --rates, else equal. Raises UserError."""
    if args.shares is None:
        return parse_shares(args.rates, world, "--rates")
    return parse_shares(args.shares, world)


def parse_shares(text: str | None, world: int, flag: str = "--shares") -> list[float]:
    """Relative rows of each rank from `flag`'s value. Raises UserError unless there is one number a rank."""
    if text is None:
        return [1.0] * world
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != world or not 0 < sum(shares) < math.inf or min(shares) < 0:
        raise UserError(f"{flag} {text} must be {world} non-negative numbers, one a rank", f"for example {flag} 3,1")
    return shares


def evaluation_rows(config: Config, rows_per_step: int, seq_len: int) -> int:
    """Rows of an evaluation: --eval-tokens when given, else the tokens of DEFAULT_EVAL_STEPS training steps."""
    if "eval_tokens" in config.explicit:
        return max(1, int(config.args.eval_tokens) // seq_len)
    return DEFAULT_EVAL_STEPS * rows_per_step
