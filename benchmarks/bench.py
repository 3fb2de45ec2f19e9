"""All benchmarks with one table: `make bench`, or python benchmarks/bench.py [--parts step rows ...] [--nanochat DIR]

Each part runs in processes of its own and leaves its figures in OUT/<part>.json (OUT: data/bench); the table, also in
OUT/bench.json and OUT/bench.md, is made from those of this call, or with --table from what is there. Ratios are of
figures of one part, measured one after the other. All parts take some seven minutes on two cores; quieten the machine
first. Parts that need root, a second core or `tc` say so and are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
NATIVE_WIRE_GOAL = 0.20
WIRE_DEPTH, WIRE_ROWS, WIRE_SEQ_LEN, VOCABULARY = 8, 32, 1024, 32768

Row = dict[str, str]


def _script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(HERE / name), *arguments]


def _run(command: list[str], **options: Any) -> None:
    print(f"\n$ {' '.join(Path(word).name if word == sys.executable else word for word in command)}", flush=True)
    subprocess.run(command, check=True, **options)


def prepare(base: Path) -> None:
    """Shards of the sample text and a tokenizer in `base`, unless they are there."""
    if (base / "tokenizer" / "tokenizer.json").exists():
        return
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(base)}
    env.pop("NANOCHAT_DATA_DIR", None)
    _run([sys.executable, "-m", "scripts.prepare", "--source", "sample"], cwd=ROOT / "app", env=env)


def wire_table(path: Path) -> None:
    """Bytes of a step by part from the plan, for two and four ranks, against Gloo's own collectives."""
    sys.path.insert(0, str(ROOT / "app"))
    import torch

    from lantrain.model.gpt import GPT, config_for_depth
    from lantrain.training.wire_plan import native_bytes, sent_bytes

    config = config_for_depth(WIRE_DEPTH, sequence_len=WIRE_SEQ_LEN, vocab_size=VOCABULARY)
    with torch.device("meta"):
        parameters = GPT(config).parameter_counts()["total"]
    found = []
    for world in (2, 4):
        parts = sent_bytes(config, [WIRE_ROWS // world] * world, [1.0] * world, torch.bfloat16)
        busiest = max(parts, key=lambda rank: sum(rank.values()))
        found.append({"world": world, "parts": busiest, "native": native_bytes(parameters, world)})
    path.write_text(json.dumps(found, indent=1))


def part_commands(args: argparse.Namespace) -> dict[str, Callable[[Path], None]]:
    """What each part does; each writes its figures to the path it is given."""
    peer = ["--nanochat", str(args.nanochat), *(["--compiled"] if args.compiled else [])] if args.nanochat else []
    base = args.out / "base"
    data = ["--data", str(base / "base_data_climbmix"), "--tokenizer", str(base / "tokenizer")]

    def rows(path: Path) -> None:
        done = subprocess.run(
            _script("rows.py", "--json", *data), check=True, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        path.write_text(done.stdout)

    def script(name: str, *given: str) -> Callable[[Path], None]:
        return lambda path: _run(_script(name, *given, "--json", str(path)))

    plot = ["--plot", str(args.plot)]
    pair = ["--base", str(base), "--steps", str(args.steps)]
    return {
        "step": script("train_step.py", "--depth", "4", "--dtype", *args.dtype, *peer),
        "rows": rows,
        "wire": wire_table,
        "equal": script("two_nodes.py", *pair, "--part", "equal", "--batch", str(args.batch)),
        "unequal": script("two_nodes.py", *pair, "--part", "unequal", "--batch", "16384"),
        "scaling": script("scaling.py", "--base", str(base), "--steps", str(max(2, args.steps - 1)), *plot),
    }


def step_rows(found: list[dict[str, Any]]) -> list[Row]:
    """Tokens a second against the matrix products alone, and against nanochat."""
    lines = []
    for own in (r for r in found if r["program"] == "lantrain"):
        peers = [r for r in found if r["program"] != "lantrain" and r["dtype"] == own["dtype"]]
        best = max((r["tokens_per_s"] for r in peers), default=0.0)
        limit = own["tokens_per_s"] / own["share"]
        lines.append({
            "what": f"one step, depth {own['depth']}, {own['dtype']}", "ours": f"{own['tokens_per_s']:.0f} tok/s",
            "limit": f"{limit:.0f} tok/s", "nanochat": f"{best:.0f} tok/s" if best else "",
            "ratio": f"{own['share']:.0%} of the limit" + (f", {own['tokens_per_s'] / best:.2f}x" if best else ""),
            "how": f"median of 5, {own['threads']} threads; limit: the step's matrix products alone, same process",
        })  # fmt: skip
    return lines


def rows_rows(found: dict[str, Any], step: list[dict[str, Any]] | None) -> list[Row]:
    """Rows packed against the rows that training takes."""
    taken = max((r["tokens_per_s"] for r in step or [] if r["program"] == "lantrain"), default=0.0)
    return [{
        "what": "packing rows, one thread", "ours": f"{found['tokens_per_second']:,.0f} tok/s",
        "limit": f"{taken:.0f} tok/s are needed" if taken else "", "nanochat": "",
        "ratio": f"{found['tokens_per_second'] / taken:.0f}x" if taken else "",
        "how": f"5 s at T={found['seq_len']}, tokenization included",
    }]  # fmt: skip


def wire_rows(found: list[dict[str, Any]]) -> list[Row]:
    """Bytes of a step against Gloo's own collectives."""
    return [
        {
            "what": f"bytes a step, depth {WIRE_DEPTH}, {r['world']} ranks",
            "ours": f"{sum(r['parts'].values()) / 1e6:.0f} MB",
            "limit": f"{NATIVE_WIRE_GOAL * r['native'] / 1e6:.0f} MB (goal)", "nanochat": "",
            "ratio": f"{sum(r['parts'].values()) / r['native']:.1%} of {r['native'] / 1e6:.0f} MB",
            "how": "of the plan, busiest rank, touched rows at most; of fp32 reduce_scatter + all_gather in Gloo",
        }
        for r in found
    ]  # fmt: skip


def equal_rows(found: list[dict[str, Any]]) -> list[Row]:
    """Two nodes against one."""
    one = sum(r["tokens_per_s"] for r in found if r["what"].startswith("one")) / 2
    return [
        {
            "what": r["what"] + (f" (--sync auto: {r['sync']})" if r["sync"] != "step" else ""),
            "ours": f"{r['tokens_per_s']:.0f} tok/s", "limit": f"{2 * one:.0f} tok/s", "nanochat": "",
            "ratio": f"{r['against_one']:.2f}x one node", "how": "depth 4, medians; limit: twice one node, same run",
        }
        for r in found if r["what"].startswith("two")
    ]  # fmt: skip


def unequal_rows(found: list[dict[str, Any]]) -> list[Row]:
    """A fast and a slow node against the sum of their rates."""
    alone, both = found[:-1], found[-1]
    return [{
        "what": "fast and slow node (quota 1.0 and 0.4)", "ours": f"{both['tokens_per_s']:.0f} tok/s",
        "limit": f"{sum(r['tokens_per_s'] for r in alone):.0f} tok/s", "nanochat": "",
        "ratio": f"{both['of_sum']:.1%} of the sum", "how": f"depth 4, rows {both['rows']} found while running",
    }]  # fmt: skip


def scaling_rows(found: dict[str, Any]) -> list[Row]:
    """Real nodes against their simulation."""
    return [
        {
            "what": f"{r['nodes']} real nodes of half a core, {found['figures']['mbit']:g} Mbit/s",
            "ours": f"{r['real_s']:.2f} s a step", "limit": f"{r['simulated_s']:.2f} s simulated", "nanochat": "",
            "ratio": f"{r['error']:+.1%} error", "how": "benchmarks/scaling.py; its table goes to 64 nodes",
        }
        for r in found["compared"] if r["nodes"] > 1
    ]  # fmt: skip


def summary(figures: dict[str, Any]) -> list[Row]:
    """The rows of the table, from the parts that there are."""
    rows: list[Row] = []
    if "step" in figures:
        rows += step_rows(figures["step"])
    if "rows" in figures:
        rows += rows_rows(figures["rows"], figures.get("step"))
    for part, make in (
        ("wire", wire_rows),
        ("equal", equal_rows),
        ("unequal", unequal_rows),
        ("scaling", scaling_rows),
    ):
        if figures.get(part):
            rows += make(figures[part])
    return rows


def markdown(rows: list[Row]) -> str:
    """The table."""
    heads = {"what": "what", "ours": "ours", "limit": "limit", "nanochat": "nanochat", "ratio": "ratio", "how": "how"}
    lines = ["| " + " | ".join(heads.values()) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row[key] for key in heads) + " |" for row in rows])


def main() -> int:
    """Run the parts, print the table. Returns 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["step", "rows", "wire", "equal", "unequal", "scaling"]
    parser.add_argument("--parts", nargs="+", default=names, choices=names)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "bench")
    parser.add_argument("--plot", type=Path, default=None, help="of scaling (default: OUT/scaling.png)")
    parser.add_argument("--dtype", nargs="+", default=["fp32"], choices=["fp32", "bf16"], help="of the part `step`")
    parser.add_argument("--batch", type=int, default=8192, help="tokens a step of the part `equal`")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each run of several nodes")
    parser.add_argument("--nanochat", type=Path, help="a checkout to measure beside")
    parser.add_argument("--compiled", action="store_true", help="nanochat under torch.compile too")
    parser.add_argument("--table", action="store_true", help="only make the table of what is in OUT")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.plot = args.plot or args.out / "scaling.png"
    failed = []
    if not args.table:
        prepare(args.out / "base")
        for part, work in ((name, part_commands(args)[name]) for name in args.parts):
            path, began = args.out / f"{part}.json", time.monotonic()
            path.unlink(missing_ok=True)
            try:
                work(path)
            except subprocess.CalledProcessError as error:
                failed.append(part)
                print(f"{part}: failed with {error.returncode}", file=sys.stderr, flush=True)
            print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
        shutil.rmtree(args.out / "base" / "base_checkpoints", ignore_errors=True)
    wanted = names if args.table else args.parts
    figures = {part: json.loads(path.read_text()) for part in wanted if (path := args.out / f"{part}.json").exists()}
    rows = summary(figures)
    (args.out / "bench.json").write_text(json.dumps({"rows": rows, "figures": figures}, indent=1))
    (args.out / "bench.md").write_text(markdown(rows) + "\n")
    print("\n" + markdown(rows), flush=True)
    print(f"\nfigures: {args.out / 'bench.json'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
