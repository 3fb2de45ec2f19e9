"""What one other busy program costs the trainer: its rate beside `while True`, against the same run's quiet steps.

    python benchmarks/busy.py --base DIR [--depth 4] [--dtype auto] [--steps 10] [--ways ours spinning sleeping]

Runs the shipped trainer (DIR has shards and tokenizer, see scripts.prepare) with its own way of waiting at OpenMP's
barriers (lantrain/cluster/waiting.py), with threads that spin as GNU OpenMP does by itself, and with threads that
always sleep. A goal: with the first the rate falls by at most 45%.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import SHAPES

APP = Path(__file__).resolve().parents[1] / "app"
WAYS = {"ours": {}, "spinning": {"GOMP_SPINCOUNT": "300000"}, "sleeping": {"OMP_WAIT_POLICY": "passive"}}
"""Environment of each way; 300000 is what libgomp takes where nothing is said."""
SETTLE_SECONDS = 7.0
FIRST_STEPS = 3
STEP_LINE = re.compile(r"^step .* dt: ([0-9.]+)ms")


def step_seconds(lines: Iterator[str]) -> Iterator[float]:
    """Seconds of each step that the trainer's log tells of."""
    for line in lines:
        if found := STEP_LINE.match(line):
            yield float(found[1]) / 1000


def after_settling(steps: Iterator[float], count: int) -> list[float]:
    """The next `count` steps once SETTLE_SECONDS have passed."""
    begun = time.monotonic()
    while time.monotonic() - begun < SETTLE_SECONDS:
        next(steps)
    return [next(steps) for _ in range(count)]


def measure(base: Path, depth: int, dtype: str, way: str, count: int) -> dict[str, Any]:
    """One run: `count` quiet steps, as many beside a busy program, as many quiet ones again."""
    length, batch = SHAPES[depth]
    line = [
        sys.executable, "-m", "scripts.base_train", f"--depth={depth}", f"--max-seq-len={length}",
        f"--device-batch-size={batch}", "--total-batch-size=2048", "--model-tag=busy", "--num-iterations=1000000",
        "--eval-every=-1", "--sample-every=-1", "--core-metric-every=-1", "--save-minutes=0",
    ]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    env |= {"NANOCHAT_BASE_DIR": str(base), "NANOCHAT_DTYPE": {"fp32": "float32", "bf16": "bfloat16"}.get(dtype, dtype)}
    trainer = subprocess.Popen(line, cwd=APP, env=env | WAYS[way], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    other: subprocess.Popen[bytes] | None = None
    try:
        steps = step_seconds(trainer.stdout)
        for _ in range(FIRST_STEPS):
            next(steps)
        quiet = [next(steps) for _ in range(count)]
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        busy = after_settling(steps, count)
        other.kill()
        quiet += after_settling(steps, count)
    except StopIteration:
        raise RuntimeError(f"the trainer ended with {trainer.wait()}") from None
    finally:
        for process in (other, trainer):
            if process is not None:
                process.kill()
                process.wait()
        shutil.rmtree(base / "base_checkpoints" / "busy", ignore_errors=True)
    quiet_s, busy_s = statistics.median(quiet), statistics.median(busy)
    return {
        "way": way, "depth": depth, "dtype": dtype, "quiet_s": quiet_s, "busy_s": busy_s,
        "quiet_tokens_per_s": 2048 / quiet_s, "busy_tokens_per_s": 2048 / busy_s, "fall": 1 - quiet_s / busy_s,
    }  # fmt: skip


def main() -> None:
    """Measure each way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--depth", type=int, default=4, choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=10, help="of each part of a run")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    results = [measure(args.base, args.depth, args.dtype, way, args.steps) for way in args.ways]
    print(
        "| threads wait | quiet s | busy s | quiet tok/s | busy tok/s | the rate falls by |\n|---|---|---|---|---|---|"
    )
    for r in results:
        rates = f"{r['quiet_tokens_per_s']:.0f} | {r['busy_tokens_per_s']:.0f}"
        print(f"| {r['way']} | {r['quiet_s']:.3f} | {r['busy_s']:.3f} | {rates} | {r['fall']:.0%} |")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
