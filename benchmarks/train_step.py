"""Speed and memory of one training step, against the machine's own matrix-multiplication rate and other programs.

    python benchmarks/train_step.py [--depth 4 8] [--dtype fp32 bf16] [--tokens 2048] [--json FILE]
                                    [--nanochat CHECKOUT] [--transformers] [--compiled]

A step is 2048 tokens (or --tokens) in micro-batches: forward, backward, optimizer, in one process (depth 4: rows of
512, two at a time; depth 8 and 12: rows of 1024, one at a time). Each configuration has a fresh process, so that its
peak memory and its start are its own: "ready" is the time from process start to the beginning of the first step. What
the steps leave for later, of the rows of the tables, is done after them, and counted with them. "GEMM alone" is the
time that the step's matrix products take by themselves (into memory that is there already), timed in the same process
right after; "share" is that / step. "ours / its" compares model FLOP/s as the recipe counts them, on the same model
(nanochat) or on one of equal size (a Llama): for the former it is the ratio of tokens a second, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "app")]

from benchmarks.measuring import (  # noqa: E402
    RATES,
    SHAPES,
    STEPS,
    VOCAB,
    median_seconds,
    peak_megabytes,
    process_age,
    token_rows,
)
from benchmarks.peers import INSTALL, PEERS, measure_peer  # noqa: E402

OWN = "lantrain"


class Trainer:
    """One process's training step with the model and optimizers of this project."""

    def __init__(self, depth: int, dtype: Any, tokens: int = 2048, moments: str = "float32") -> None:
        import torch

        from lantrain.cluster.group import Ranks
        from lantrain.model.gpt import GPT, config_for_depth
        from lantrain.model.memory import keep_freed_memory
        from lantrain.optim.groups import parameter_groups
        from lantrain.optim.sharded import LATE, ShardedOptimizer

        keep_freed_memory()
        length, _ = SHAPES[depth]
        self.model = GPT(config_for_depth(depth, sequence_len=length, vocab_size=VOCAB), dtype)
        self.model.init_weights()
        self.dtype, self.data, self.tokens = dtype, token_rows(depth, tokens), tokens
        self.weights = dict(self.model.named_parameters())
        self.groups = parameter_groups(self.model, **RATES, weight_decay=0.1)
        tables = set(self.model.embedding_tables())
        self.optimizer = ShardedOptimizer(
            self.weights, self.groups, tables, Ranks(0, 1), muon_dtype=dtype, moments_dtype=getattr(torch, moments),
            late=LATE,
        )  # fmt: skip

    def step(self) -> float:
        """One step as the trainer makes it; returns its mean loss."""
        rows, total = self.optimizer.gather_rows(self.data[..., :-1]), 0.0
        for tokens in self.data:
            loss = self.model.loss(tokens[:, :-1], tokens[:, 1:], scale=1 / self.tokens, rows=rows)
            loss.backward()
            total += loss.item()
        self.optimizer.step(rows, lr_multiplier=1.0, muon_momentum=0.9, muon_weight_decay=0.1)
        return total

    def settle_seconds(self) -> float:
        """Seconds a step for what steps leave for later, rows of the tables that nobody has read: of all so far."""
        began = time.perf_counter()
        self.optimizer.finish()
        return (time.perf_counter() - began) / self.optimizer.steps


def roofline_seconds(trainer: Trainer) -> dict[str, float]:
    """Seconds a step that its matrix products take alone, same shapes and dtype: by part.

    Weights: forward, gradient of the input, gradient of the weight. Attention: six products a head (two forward, four
    backward; recomputing the scores is not counted) over half of T x T, or over the window. Muon: the products of Polar
    Express by torch.mm, in the form of its twin in PyTorch: whole ones, although the C++ step in bfloat16 computes but
    half of those that are symmetric.
    """
    import torch

    from lantrain.model.gpt import Linear
    from lantrain.optim.muon import GRAM_ASPECT, POLAR_EXPRESS

    config, dtype = trainer.model.config, trainer.dtype
    micro_batches, batch, length = trainer.data.shape[0], trainer.data.shape[1], trainer.data.shape[2] - 1
    tokens = batch * length
    shapes: dict[tuple[int, int], int] = {}
    for module in trainer.model.modules():
        if isinstance(module, Linear):
            shape = (module.weight.size(0), module.weight.size(1))
            shapes[shape] = shapes.get(shape, 0) + 1

    def seconds(a: torch.Tensor, b: torch.Tensor) -> float:
        out = torch.empty(a.size(0), b.size(1), dtype=dtype)
        return median_seconds(partial(torch.mm, a, b, out=out))

    def product(rows: int, inner: int, columns: int) -> float:
        return seconds(torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype).t())

    weights = 0.0
    for (outputs, inputs), count in shapes.items():
        if outputs < 64:
            continue  # the gates: a few products too small to matter
        x, w = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        g = torch.randn(tokens, outputs).to(dtype)
        for left, right in ((x, w.t()), (g, w), (g.t(), x)):
            weights += count * seconds(left, right)

    attention = 0.0
    square = product(length, config.head_dim, length) / 2  # causal: half of the square
    for window in config.windows():
        seen = square if window >= length else product(length, config.head_dim, window)
        attention += 6 * seen * config.n_head * batch

    def polar_express(rows: int, columns: int) -> float:
        x, gram = torch.randn(rows, columns).to(dtype) / columns, torch.randn(rows, rows).to(dtype) / columns
        wide, small, steps = seconds(x, x.t()), seconds(gram, gram), len(POLAR_EXPRESS)
        if columns >= GRAM_ASPECT * rows and dtype != torch.bfloat16:  # on the Gram matrix alone
            return wide + (steps + (steps - 1) + 2 * (steps - 1)) * small + seconds(gram, x)
        return steps * (wide + small + seconds(gram, x))

    muon = 0.0
    for group in trainer.groups:
        if group.kind == "muon" and min(trainer.weights[group.names[0]].shape) >= 64:
            muon += len(group.names) * polar_express(*sorted(trainer.weights[group.names[0]].shape))
    return {"weights": weights * micro_batches, "attention": attention * micro_batches, "muon": muon}


def measure(depth: int, dtype_name: str, tokens: int, repeats: int, moments: str = "float32") -> dict[str, Any]:
    """All figures of one configuration, in this process."""
    import torch

    from lantrain.model.kernels import kernels

    imported = process_age()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
    trainer = Trainer(depth, dtype, tokens, moments)
    ready = process_age()
    trainer.step()
    first = process_age()
    seconds = median_seconds(trainer.step, repeats, warm=repeats < STEPS) + trainer.settle_seconds()
    peak = peak_megabytes()  # before the roofline allocates
    parts = roofline_seconds(trainer)
    square = torch.randn(1024, 1024).to(dtype)
    rate = 2 * 1024**3 / median_seconds(lambda: square @ square)
    flops = trainer.model.flops_per_token()
    return {
        "program": f"{OWN}, {found.name}" if (found := kernels()) else f"{OWN}, no C++",
        "depth": depth,
        "tokens": tokens,
        "dtype": dtype_name,
        "threads": torch.get_num_threads(),
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "roofline_s": sum(parts.values()),
        "roofline_parts_s": parts,
        "share": sum(parts.values()) / seconds,
        "model_gflops": flops * tokens / seconds / 1e9,
        "mfu": flops * tokens / seconds / rate,
        "gemm_gflops": rate / 1e9,
        "peak_mb": peak,
        "imported_s": imported,
        "ready_s": ready,
        "first_step_s": first,
    }


def in_fresh_process(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run one configuration in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    heads = (
        "| program | depth | dtype | tokens | step s | tok/s | GEMM alone s | share | model GFLOP/s | ours / its "
        "| peak MB | ready s | first step s |"
    )
    lines = [heads, "|---" * 13 + "|"]
    own: dict[str, Any] = {}  # the last of ours: what follows is of its configuration
    for r in results:
        own = r if "share" in r else own
        alone = f"{r['roofline_s']:.3f} | {r['share']:.0%}" if r is own else " | "
        times = f"{own['model_gflops'] / r['model_gflops']:.2f}" if own and r is not own else ""
        lines.append(
            f"| {r['program']} | {r['depth']} | {r['dtype']} | {r['tokens']} | {r['step_s']:.3f} "
            f"| {r['tokens_per_s']:.0f} | {alone} | {r['model_gflops']:.0f} | {times} "
            f"| {r['peak_mb']:.0f} | {r['ready_s']:.1f} | {r['first_step_s']:.1f} |"
        )
    return "\n".join(lines)


def programs(nanochat: Path | None, transformers: bool, compiled: bool) -> list[str]:
    """What is to be measured: ours, and the PEERS that were asked for and are there."""
    asked = {"nanochat": nanochat is not None, "llama": transformers}
    if transformers and importlib.util.find_spec("transformers") is None:
        print(INSTALL, file=sys.stderr)
        asked["llama"] = False
    ways = ("eager", "compiled") if compiled else ("eager",)
    return [OWN, *(peer for peer in PEERS if asked[peer.split("-")[0]] and peer.split("-")[1] in ways)]


def main() -> None:
    """Measure every configuration asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, nargs="+", default=[4, 8], choices=sorted(SHAPES))
    parser.add_argument("--dtype", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, a multiple of 1024")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed; fewer for steps of a minute")
    parser.add_argument("--moments-dtype", default="float32", choices=["float32", "bfloat16"], help="as the trainer's")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--nanochat", type=Path, help="a checkout to measure beside")
    parser.add_argument("--transformers", action="store_true", help="measure a Llama of the same size beside")
    parser.add_argument("--compiled", action="store_true", help="these under torch.compile too (90 s each, a compiler)")
    parser.add_argument("--only", nargs="+", choices=[OWN, *PEERS], help="of these programs, e.g. to measure in parts")
    parser.add_argument("--one", choices=[OWN, *PEERS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        what = args.depth[0], args.dtype[0], args.tokens, args.steps
        own = args.one == OWN
        print(json.dumps(measure(*what, args.moments_dtype) if own else measure_peer(args.one, *what)))
        return
    asked = programs(args.nanochat, args.transformers, args.compiled)
    results = []
    for depth in args.depth:
        for dtype in args.dtype:
            configuration = ["--depth", str(depth), "--dtype", dtype, "--tokens", str(args.tokens)]
            configuration += ["--steps", str(args.steps), "--moments-dtype", args.moments_dtype, "--one"]
            for program in (name for name in asked if name in (args.only or asked)):
                environment = {"NANOCHAT_DTYPE": {"fp32": "float32"}.get(dtype, "bfloat16")}
                if program.startswith("nanochat"):
                    environment["PYTHONPATH"] = str(args.nanochat)
                results.append(in_fresh_process([*configuration, program], environment))
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
