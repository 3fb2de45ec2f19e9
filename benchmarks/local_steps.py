"""What local steps cost in learning: validation bits per byte after the same tokens, against step by step.

    python benchmarks/local_steps.py BASE                        # data, tokenizer, all runs, table, picture in docs/
    python benchmarks/local_steps.py BASE --only local           # one run; it goes on where it was stopped
    python benchmarks/local_steps.py BASE --table                # table and picture of what is there
    python benchmarks/local_steps.py BASE --link 20              # tokens/s over 20 Mbit/s; needs root, ip and tc

Real ranks on this machine, one thread each, on the sample corpus (Python's own library) with a vocabulary of 4096: a
GPT of depth 3 that takes a minute or two on two cores. BASE is an empty folder, or what an earlier call left.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "app")]

from lantrain.errors import UserError, run_main  # noqa: E402
from lantrain.training.report import RunFigures, read_run  # noqa: E402
from lantrain.training.wire_plan import native_bytes  # noqa: E402

STEPS = 360
MODEL = [
    "--depth=3",
    "--aspect-ratio=64",
    "--head-dim=64",
    "--max-seq-len=256",
    "--device-batch-size=4",
    "--total-batch-size=2048",
]
FLAGS = [
    *MODEL, f"--num-iterations={STEPS}", "--eval-every=60", "--eval-tokens=49152", "--sample-every=-1",
    "--core-metric-every=-1", "--save-minutes=0", "--no-rebalance", "--resume=auto",
]  # fmt: skip
RUNS: dict[str, tuple[int, list[str]]] = {
    "step by step": (2, ["--sync=step", "--wire-dtype=float32"]),
    "local": (2, ["--sync=local"]),
    "local, 4 bits": (2, ["--sync=local", "--delta-bits=4"]),
    "local, shares 3:1": (2, ["--sync=local", "--shares=3,1"]),
    "local, 4 ranks": (4, ["--sync=local"]),
}
"""Number of ranks and flags of each run."""


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends for a token, counted by the optimizer, and those of the native scheme."""

    local: float
    native: float


def _tag(name: str) -> str:
    return name.replace(" ", "-").replace(",", "").replace(":", "")


def _call(base: Path, arguments: list[str]) -> None:
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(base)}
    env.pop("NANOCHAT_DATA_DIR", None)
    subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT / "app", env=env, check=True)


def prepare(base: Path) -> None:
    """The sample corpus and its tokenizer, where they are missing."""
    if not (base / "base_data_climbmix").exists():
        _call(base, ["scripts.prepare_data", "--source", "sample"])
    if not (base / "tokenizer").exists():
        _call(base, ["scripts.tok_train", "--vocab-size", "4096"])


def train(base: Path, name: str, steps: int) -> None:
    """Train the run called `name`, or go on with it, up to `steps`. Raises UserError when a rank fails."""
    world, extra = RUNS[name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(world):
        env = {
            **os.environ, "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": "0",
            "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        line = [sys.executable, "-m", "scripts.base_train", *FLAGS, *extra, f"--model-tag={_tag(name)}"]
        with (base / f"{_tag(name)}-{rank}.log").open("a") as log:
            processes.append(
                subprocess.Popen(
                    [*line, f"--stop-after={steps}"], cwd=ROOT / "app", env=env, stdout=log, stderr=subprocess.STDOUT
                )
            )
    codes = [process.wait() for process in processes]
    if any(codes):
        raise UserError(f"{name}: a rank failed", f"see {base}/{_tag(name)}-*.log")


def sent_bytes(base: Path, name: str) -> Sent:
    """From the leader's records of the rounds, and from the number of parameters in the checkpoint's meta."""
    folder = base / "base_checkpoints" / _tag(name)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [record["outer_bytes"] for record in records if "outer_bytes" in record]
    steps = sum("loss" in record for record in records)
    meta = json.loads(sorted(folder.glob("meta_*.json"))[-1].read_text())
    import torch

    from lantrain.model.gpt import GPT, GPTConfig

    with torch.device("meta"):
        numel = sum(param.numel() for param in GPT(GPTConfig(**meta["model_config"])).parameters())
    world, tokens = RUNS[name][0], meta["total_batch_size"]
    return Sent(sum(rounds) / (steps * tokens), native_bytes(numel, world) / tokens)


def table(base: Path) -> list[RunFigures]:
    """Print the comparison of the runs that are there; returns them."""
    names = [name for name in RUNS if (base / "base_checkpoints" / _tag(name) / "metrics.jsonl").exists()]
    runs = [read_run(name, base / "base_checkpoints" / _tag(name) / "metrics.jsonl") for name in names]
    if not runs or runs[0].name != "step by step":
        raise UserError("the run step by step is missing", "leave --table out")
    steps = sorted(runs[0].bpb)
    print("| validation bits per byte after step | " + " | ".join(map(str, steps)) + " | last, relative | bytes |")
    print("|---|" + "---|" * (len(steps) + 2))
    for run in runs:
        cells = [f"{run.bpb[step]:.4f}" if step in run.bpb else "" for step in steps]
        last = f"{100 * (run.bpb[steps[-1]] / runs[0].bpb[steps[-1]] - 1):+.2f}%" if steps[-1] in run.bpb else ""
        share = ""
        if run.name != "step by step":
            sent = sent_bytes(base, run.name)
            share = f"{sent.local:.1f} a token, {100 * sent.local / sent.native:.2f}% of native"
        print(f"| {run.name} | " + " | ".join(cells) + f" | {last} | {share} |")
    return runs


def plot(runs: list[RunFigures], path: Path) -> None:
    """Validation bits per byte by step, one line a run, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for index, run in enumerate(runs):
        steps = sorted(run.bpb)
        style = "k-" if index == 0 else "o--"
        axes.plot(steps, [run.bpb[step] for step in steps], style, label=run.name, markersize=4, linewidth=1.5)
    axes.set_xlabel("step of 2048 tokens")
    axes.set_ylabel("validation bits per byte")
    axes.set_title("Local steps against step by step, depth 3, two ranks where not said")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def over_link(base: Path, mbit: float, batch: int) -> None:
    """Print tokens/s of a fast and a slow node (CPU quotas 1.0 and 0.4) behind cables of `mbit` Mbit/s.

    `batch` is the tokens of a step. The limit is the sum of the two nodes' speeds while they compute. The mean over two
    whole rounds counts, or over ten steps where ranks exchange every step.
    """
    from benchmarks.nodes import missing, nodes, train

    if missing():
        raise UserError(f"no shaped links here: {missing()}")
    print(f"| over {mbit:g} Mbit/s | tokens/s | limit | share | rows at the end | updates s | rounds s |")
    print("|---|---|---|---|---|---|---|")
    settle = 28  # the shares have found their place, and with the warm-up a round has ended
    ways = {"step": (["--sync=step", "--wire-dtype=bfloat16"], 10), "local": ([], 60), "auto": (["--sync=auto"], 60)}
    for name, (extra, steps) in ways.items():
        with nodes(2, mbit=mbit, quotas=[1.0, 0.4]) as made:
            flags = [*MODEL, f"--total-batch-size={batch}", *(extra or ["--sync=local"])]
            run = train(made, base, flags, steps, f"link-{name}", settle=settle if name != "step" else 15)
        rate, limit = run.tokens * len(run.steps) / sum(run.steps), sum(256 / seconds for seconds in run.per_row)
        updates = ", ".join(f"{seconds:.2f}" for seconds in run.update)
        rounds = ", ".join(f"{seconds:.2f}" for seconds in run.rounds)
        print(
            f"| {name} | {rate:.0f} | {limit:.0f} | {100 * rate / limit:.0f}% | {run.rows} | {updates} | {rounds} |",
            flush=True,
        )
        for line in run.log.splitlines():
            if line.startswith("--sync auto"):
                print(line)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("--only", choices=list(RUNS), default=None)
    parser.add_argument("--stop-after", type=int, default=STEPS)
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--link", type=float, default=None, help="Mbit/s; measure speed instead of learning")
    parser.add_argument("--batch", type=int, default=2048, help="tokens of a step, with --link")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "local-steps.png")
    args = parser.parse_args()
    base = args.base.resolve()
    if args.link is not None:
        prepare(base)
        over_link(base, args.link, args.batch)
        return
    if not args.table:
        base.mkdir(parents=True, exist_ok=True)
        prepare(base)
        for name in [args.only] if args.only else RUNS:
            train(base, name, args.stop_after)
    if args.only is None:
        plot(table(base), args.plot)


if __name__ == "__main__":
    run_main(main)
