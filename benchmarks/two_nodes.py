"""Two nodes against one: equal ones on a shaped cable, and a fast with a slow one, all in one run, as ratios.

    python benchmarks/two_nodes.py --base DIR [--batch 16384] [--steps 3] [--part PART] [--json FILE]

Each node is a network namespace with one core (benchmarks/nodes.py); needs root, two cores, `ip` and `tc`. DIR has
shards and a tokenizer: NANOCHAT_BASE_DIR=DIR python -m scripts.prepare --source sample. One node alone is measured
before and after the pairs, and its mean counts. So are both at once, each training by itself ("apart"): cores of one
machine share its memory and its clock, as two machines do not, and that is no cost of training together. The slow node
has a CPU quota. The pair starts with the nodes' rates, as the launchers measure and give them (owners of optimizer
state follow these alone), or with --from-equal from equal shares; the rows of each find their place in steps that are
not counted. Where local steps are taken, the mean over a round counts, with the exchange that ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measuring import SHAPES
from benchmarks.nodes import WARMUP_STEPS, Measured, missing, nodes, train, train_apart

SLOW_QUOTA = 0.4
SETTLE_STEPS = 8
"""Steps that are not counted, until the rows have found their place: window, patience, the step on its way."""

ROUND = 30
"""Local steps of a round: the trainer's default."""
SHORT_ROWS = 128
"""Tokens of a row for unequal nodes: 32 rows are 23 and 9 for speeds of 1 and 0.4, 99% of their sum; 16 give 95%."""


def flags(batch: int, seq_len: int = 512, depth: int = 4) -> list[str]:
    """2048 tokens a micro-batch, gradients in bfloat16 on the wire as between hosts."""
    return [
        f"--depth={depth}", f"--max-seq-len={seq_len}", f"--device-batch-size={2048 // seq_len}",
        f"--total-batch-size={batch}", "--wire-dtype=bfloat16",
    ]  # fmt: skip


def _figures(what: str, run: Measured) -> dict[str, Any]:
    return {
        "what": what, "tokens_per_s": run.rate, "step_s": run.seconds, "rows": run.rows, "compute_s": run.compute,
        "update_s": run.update, "steps_s": run.steps, "rounds_s": run.rounds,
    }  # fmt: skip


def _result(what: str, run: Measured, alone: float, apart: float, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """`alone`: a node's rate on a quiet machine; `apart`: the sum of both nodes', each by itself at the same time."""
    ratios = {"against_one": run.rate / alone, "of_apart": run.rate / apart}
    return {**_figures(what, run), **ratios, **(more or {})}


def _choice(log: str) -> str:
    """What --sync auto chose, in its own words."""
    found = re.search(r"^--sync auto: (\w+)", log, re.M)
    return found[1] if found else ""


def equal_nodes(base: Path, batch: int, steps: int, links: list[float | None]) -> list[dict[str, Any]]:
    """One node, then two on each cable, then one again."""
    given = flags(batch)

    def alone() -> Measured:
        with nodes(1) as made:
            return train(made, base, given, steps, "bench-one")

    first = alone()
    with nodes(2) as made:
        apart = sum(run.rate for run in train_apart(made, base, given, [steps, steps], "bench-apart"))
    pairs: list[tuple[str, Measured, str]] = []
    for mbit in links:
        # What --sync auto decides is part of the measurement.
        auto = mbit is not None and mbit < 1000
        sync, count = (["--sync=auto", f"--local-steps={ROUND}"], ROUND) if auto else ([], steps)
        with nodes(2, mbit=mbit) as made:
            run = train(made, base, [*given, *sync], count, "bench-two", more=int(auto))
        name = "an unlimited link" if mbit is None else f"{mbit:g} Mbit/s"
        pairs.append((f"two equal nodes, {name}", run, _choice(run.log) if auto else "step"))
    last = alone()
    rate = (first.rate + last.rate) / 2
    ones = [_result(f"one node, {when}", run, rate, apart) for when, run in (("before", first), ("after", last))]
    return [*ones, *(_result(what, run, rate, apart, {"sync": sync}) for what, run, sync in pairs)]


def over_links(base: Path, batch: int, steps: int, links: list[float], depth: int) -> list[dict[str, Any]]:
    """Two equal nodes that exchange every step, on each cable, against an unlimited one before and after."""
    given = flags(batch, SHAPES[depth][0], depth)
    runs: list[tuple[str, Measured]] = []
    for mbit in (None, *links, None):
        with nodes(2, mbit=mbit) as made:
            name = "an unlimited link" if mbit is None else f"{mbit:g} Mbit/s"
            runs.append((f"depth {depth}, {name}", train(made, base, given, steps, "bench-links")))
    rate = (runs[0][1].rate + runs[-1][1].rate) / 2
    return [{**_figures(what, run), "of_unlimited": run.rate / rate} for what, run in runs]


def fast_and_slow(base: Path, batch: int, steps: int, from_equal: bool) -> list[dict[str, Any]]:
    """A node of a whole core, one of SLOW_QUOTA, and both together, against the sum of their rates."""
    given, runs = flags(batch, SHORT_ROWS), []
    for quota in (1.0, SLOW_QUOTA):
        with nodes(1, quotas=[quota]) as made:
            runs.append(train(made, base, given, max(2, steps - 1), "bench-quota"))
    with nodes(2, quotas=[1.0, SLOW_QUOTA]) as made:
        many = round((WARMUP_STEPS + 2) / SLOW_QUOTA) - WARMUP_STEPS  # of the fast one in the time of the slow one's
        apart = sum(run.rate for run in train_apart(made, base, given, [many, 2], "bench-apart"))
    with nodes(2, quotas=[1.0, SLOW_QUOTA]) as made:
        start = [] if from_equal else [f"--rates=1,{SLOW_QUOTA}"]
        both = train(made, base, [*given, *start], steps, "bench-unequal", settle=SETTLE_STEPS)
    total = sum(run.rate for run in runs)
    results = [
        _result(f"alone, quota {q:g}", run, runs[0].rate, apart) for q, run in zip((1.0, SLOW_QUOTA), runs, strict=True)
    ]
    return [*results, _result("fast and slow together", both, runs[0].rate, apart, {"of_sum": both.rate / total})]


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    heads = "| nodes | tok/s | step s | rows | against one | of the sum of both | of both apart at once |"
    lines = [heads, "|---" * 7 + "|"]
    for r in results:
        share = f"{r['of_sum']:.1%}" if "of_sum" in r else ""
        sync = f" ({r['sync']})" if r.get("sync", "step") != "step" else ""
        rows = " + ".join(map(str, r["rows"]))
        figures = f"{r['tokens_per_s']:.0f} | {r['step_s']:.2f} | {rows} | {r['against_one']:.2f}x"
        apart = "" if len(r["rows"]) == 1 else f"{r['of_apart']:.1%}"
        lines.append(f"| {r['what']}{sync} | {figures} | {share} | {apart} |")
    return "\n".join(lines)


def links_table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| pair | tok/s | step s | rows | of the unlimited link's rate |", "|---" * 5 + "|"]
    for r in results:
        rows = " + ".join(map(str, r["rows"]))
        lines.append(
            f"| {r['what']} | {r['tokens_per_s']:.0f} | {r['step_s']:.2f} | {rows} | {r['of_unlimited']:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--link", type=float, nargs="*", default=[1000, 100], help="Mbit/s, besides the unlimited one")
    parser.add_argument(
        "--part", choices=["equal", "unequal", "both", "links"], default="both",
        help="links: no single nodes, the pair on each cable against the pair on an unlimited one",
    )  # fmt: skip
    parser.add_argument("--depth", type=int, choices=sorted(SHAPES), default=4, help="of --part links")
    parser.add_argument("--from-equal", action="store_true", help="let the rows of unequal nodes start equal")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    why = missing() or ("needs two cores" if len(os.sched_getaffinity(0)) < 2 else "")
    if why:
        print(f"not measured: {why}")
        return
    os.environ.setdefault("NANOCHAT_DTYPE", "auto")
    results = []
    if args.part == "links":
        results = over_links(args.base, args.batch, args.steps, args.link, args.depth)
    if args.part in ("equal", "both"):
        results = equal_nodes(args.base, args.batch, args.steps, [None, *args.link])
    if args.part in ("unequal", "both"):
        results += fast_and_slow(args.base, args.batch, args.steps, args.from_equal)
    print(links_table(results) if args.part == "links" else table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
