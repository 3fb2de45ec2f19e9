"""Speed and memory of one training step, against the machine's own matrix-multiplication rate.

    python benchmarks/train_step.py [--depth 4 8] [--dtype fp32 bf16] [--tokens 2048] [--json FILE]
                                    [--nanochat CHECKOUT [--compiled]]

A step is 2048 tokens (or --tokens) in micro-batches: forward, backward, optimizer, in one process (depth 4: rows of
512, two at a time; depth 8: rows of 1024, one at a time). Each configuration runs in a fresh process, so that its peak
memory and the time from process start to the end of the first step are its own. "roofline" is the time that the step's
matrix products take by themselves (into memory that is there already), timed in the same process right after; "share"
is roofline / step. "mfu" counts the recipe's model FLOPs a token against the rate of one square product, 1024 wide.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "app"))

VOCAB = 32768
SHAPES = {4: (512, 2), 8: (1024, 1), 12: (1024, 1)}  # depth: (row length, rows in a micro-batch)
STEPS = 5
RATES = {"unembedding_lr": 5e-4, "embedding_lr": 2e-2, "matrix_lr": 1e-3, "scalar_lr": 3e-2}


def token_rows(depth: int, tokens: int) -> Any:
    """(micro-batches, B, T + 1) token ids with the frequencies of text: 1 / rank, over the whole vocabulary."""
    import torch

    length, batch = SHAPES[depth]
    weights = 1.0 / torch.arange(1, VOCAB + 1)
    count = tokens // length * (length + 1)
    ids = torch.multinomial(weights, count, replacement=True, generator=torch.Generator().manual_seed(0))
    return ids.view(-1, batch, length + 1)


def median_seconds(work: Callable[[], object], repeats: int = STEPS) -> float:
    """Median wall time of `work` after one untimed call."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def process_age() -> float:
    """Seconds since this process was started, interpreter and imports included."""
    import psutil

    return time.time() - psutil.Process().create_time()


def peak_megabytes() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Trainer:
    """One process's training step with the model and optimizers of this project."""

    def __init__(self, depth: int, dtype: Any, tokens: int = 2048) -> None:
        import torch

        from lantrain.model.gpt import GPT, config_for_depth
        from lantrain.model.memory import keep_freed_memory
        from lantrain.optim.groups import parameter_groups
        from lantrain.optim.muon import second_moment_shape

        keep_freed_memory()
        length, _ = SHAPES[depth]
        self.model = GPT(config_for_depth(depth, sequence_len=length, vocab_size=VOCAB), dtype)
        self.model.init_weights()
        self.dtype, self.data, self.step_count = dtype, token_rows(depth, tokens), 0
        self.tokens = tokens
        self.weights = dict(self.model.named_parameters())
        self.groups = parameter_groups(self.model, **RATES, weight_decay=0.1)
        self.state: dict[str, tuple[Any, Any]] = {}
        for group in self.groups:
            for name in group.names:
                first = torch.zeros(self.weights[name].shape)
                shape = second_moment_shape((first.size(0), first.size(1))) if group.kind == "muon" else first.shape
                self.state[name] = first, torch.zeros(shape)

    def step(self) -> float:
        """One step; returns its mean loss."""
        from lantrain.model.embedding import EmbeddingRows

        rows = EmbeddingRows.gather(self.model.embedding_tables(), self.data[..., :-1], VOCAB)
        total = 0.0
        for tokens in self.data:
            loss = self.model.loss(tokens[:, :-1], tokens[:, 1:], scale=1 / self.tokens, rows=rows)
            loss.backward()
            total += loss.item()
        self.step_count += 1
        self._update({name: leaf.grad for name, leaf in rows.rows.items()}, rows.ids)
        self.model.zero_grad(set_to_none=True)
        return total

    def _update(self, row_grads: dict[str, Any], ids: Any) -> None:
        import torch

        from lantrain.optim.adamw import adamw_update
        from lantrain.optim.muon import muon_update

        dense: Any = None  # one table's gradient, reused for the next
        for group in self.groups:
            for name in group.names:
                weight, grad = self.weights[name].detach(), self.weights[name].grad
                first, second = self.state[name]
                if group.kind == "muon":
                    stacks = [tensor[None] for tensor in (weight, grad, first, second) if tensor is not None]
                    muon_update(*stacks, lr=group.lr, momentum=0.9, weight_decay=0.1, dtype=self.dtype)
                    continue
                if name in row_grads:
                    if dense is None or dense.shape != weight.shape:
                        dense = torch.zeros_like(weight)
                    grad = dense.index_copy_(0, ids, row_grads[name])
                assert grad is not None
                constants: Any = {"betas": group.betas, "eps": group.eps, "weight_decay": group.weight_decay}
                adamw_update(weight, grad, first, second, step=self.step_count, lr=group.lr, **constants)


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


def measure(depth: int, dtype_name: str, tokens: int) -> dict[str, Any]:
    """All figures of one configuration, in this process."""
    import torch

    from lantrain.model.kernels import kernels

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
    trainer = Trainer(depth, dtype, tokens)
    trainer.step()
    first = process_age()
    seconds = median_seconds(trainer.step)
    peak = peak_megabytes()  # before the roofline allocates
    parts = roofline_seconds(trainer)
    square = torch.randn(1024, 1024).to(dtype)
    rate = 2 * 1024**3 / median_seconds(lambda: square @ square)
    return {
        "program": f"lantrain, {found.name}" if (found := kernels()) else "lantrain, no C++",
        "depth": depth,
        "tokens": tokens,
        "dtype": dtype_name,
        "threads": torch.get_num_threads(),
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "roofline_s": sum(parts.values()),
        "roofline_parts_s": parts,
        "share": sum(parts.values()) / seconds,
        "mfu": trainer.model.flops_per_token() * tokens / seconds / rate,
        "gemm_gflops": rate / 1e9,
        "peak_mb": peak,
        "first_step_s": first,
    }


def measure_nanochat(depth: int, dtype_name: str, tokens: int, compiled: bool) -> dict[str, Any]:
    """The same step by nanochat's own model and optimizer (its checkout must be on the path), in this process."""
    import torch

    if not compiled:
        torch.compile = lambda *_, **__: lambda function: function  # type: ignore[assignment]
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    from lantrain.model.gpt import config_for_depth

    config = config_for_depth(depth, sequence_len=SHAPES[depth][0], vocab_size=VOCAB)
    with torch.device("meta"):
        model = GPT(GPTConfig(**vars(config)))
    model.to_empty(device="cpu")
    model.init_weights()
    optimizer = model.setup_optimizer(**RATES, weight_decay=0.1)
    run = torch.compile(model, dynamic=False) if compiled else model
    data = token_rows(depth, tokens)

    def step() -> None:
        for rows in data:
            loss = run(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            (loss / len(data)).backward()
            loss.item()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    step()
    first = process_age()
    seconds = median_seconds(step)
    return {
        "program": "nanochat, compiled" if compiled else "nanochat, eager",
        "depth": depth,
        "tokens": tokens,
        "dtype": dtype_name,
        "threads": torch.get_num_threads(),
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "peak_mb": peak_megabytes(),
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
        "| program | depth | dtype | tokens | step s | tok/s | GEMM alone s | share | mfu | peak MB | first step s |"
    )
    lines = [heads, "|---" * 11 + "|"]
    for r in results:
        own = f"{r['roofline_s']:.3f} | {r['share']:.0%} | {r['mfu']:.0%}" if "share" in r else "| |"
        lines.append(
            f"| {r['program']} | {r['depth']} | {r['dtype']} | {r['tokens']} | {r['step_s']:.3f} "
            f"| {r['tokens_per_s']:.0f} | {own} | {r['peak_mb']:.0f} | {r['first_step_s']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every configuration asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, nargs="+", default=[4, 8], choices=sorted(SHAPES))
    parser.add_argument("--dtype", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, a multiple of 1024")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--nanochat", type=Path, help="a checkout to measure beside")
    parser.add_argument("--compiled", action="store_true", help="nanochat under torch.compile too (90 s, a compiler)")
    parser.add_argument("--one", choices=["lantrain", "eager", "compiled"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        what = args.depth[0], args.dtype[0], args.tokens
        own = args.one == "lantrain"
        print(json.dumps(measure(*what) if own else measure_nanochat(*what, args.one == "compiled")))
        return
    results = []
    for depth in args.depth:
        for dtype in args.dtype:
            configuration = ["--depth", str(depth), "--dtype", dtype, "--tokens", str(args.tokens), "--one"]
            results.append(in_fresh_process([*configuration, "lantrain"], {}))
            environment = {
                "PYTHONPATH": str(args.nanochat),
                "NANOCHAT_DTYPE": {"fp32": "float32"}.get(dtype, "bfloat16"),
            }
            for peer in ["eager", "compiled"] if args.compiled else ["eager"]:
                if args.nanochat:
                    results.append(in_fresh_process([*configuration, peer], environment))
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
