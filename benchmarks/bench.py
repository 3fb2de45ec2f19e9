"""All benchmarks with one table: `make bench`, or python benchmarks/bench.py [--parts step rows ...] [--nanochat DIR]

Each part runs in processes of its own and leaves its figures in OUT/<part>.json (OUT: data/bench); the table, also in
OUT/bench.json and OUT/bench.md, is made from those of this call, or with --table from what is there: parts may be
measured one by one. Ratios are of figures of one part, measured one after the other. All parts take some ten minutes on
two cores; quieten the machine first. Parts that need root, a second core or `tc` say so and are left out.

--compare OLD.json (an earlier OUT/bench.json) adds each figure's change. Noise: rates of one machine differ by up to
10% from run to run, ratios within a run by up to 5 points; what changed by more than both is marked, and makes the exit
code 2.
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

RATE_NOISE, RATIO_NOISE = 0.10, 0.05
BEYOND_NOISE_EXIT = 2

Row = dict[str, Any]
"""A line of the table: COLUMNS, and for comparisons `value` (the figure of `ours`) and `of` (the first ratio)."""
COLUMNS = ("what", "ours", "limit", "nanochat", "transformers", "ratio", "how")


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
    peer = ["--nanochat", str(args.nanochat)] if args.nanochat else []
    peer += [flag for flag, given in (("--transformers", args.transformers), ("--compiled", args.compiled)) if given]
    steps = ["--depth", *map(str, args.depth), "--dtype", *(args.dtype or dtypes())]
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
        "step": script("train_step.py", *steps, *peer),
        "busy": script("busy.py", "--base", str(base)),
        "rows": rows,
        "wire": wire_table,
        "equal": script("two_nodes.py", *pair, "--part", "equal", "--batch", str(args.batch)),
        "unequal": script("two_nodes.py", *pair, "--part", "unequal", "--batch", "16384"),
        "scaling": script("scaling.py", "--base", str(base), "--steps", str(max(2, args.steps - 1)), *plot),
    }


def dtypes() -> list[str]:
    """What the part `step` measures by itself: bf16 too where the CPU has its instructions."""
    sys.path.insert(0, str(ROOT / "app"))
    from lantrain.cluster.gemm import native_bf16

    return ["fp32", "bf16"] if native_bf16() else ["fp32"]


def own(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our results of the part `step`: "lantrain, " and the C++ library that was used."""
    return [r for r in found if r["program"].split(",")[0] == "lantrain"]


def step_rows(found: list[dict[str, Any]]) -> list[Row]:
    """Tokens a second against the matrix products alone, and model FLOP/s against the best of nanochat and a Llama."""
    lines = []
    for r in own(found):
        same = [p for p in found if (p["depth"], p["dtype"], p["tokens"]) == (r["depth"], r["dtype"], r["tokens"])]
        line = {
            "what": f"one step, depth {r['depth']}, {r['dtype']}", "ours": f"{r['tokens_per_s']:.0f} tok/s",
            "limit": f"{r['tokens_per_s'] / r['share']:.0f} tok/s", "ratio": f"{r['share']:.0%} of the limit",
            "how": f"median of 5, {r['threads']} threads; limit: the step's matrix products alone, same process",
            "value": r["tokens_per_s"], "of": r["share"],
        }  # fmt: skip
        for program, column in (("nanochat", "nanochat"), ("llama", "transformers")):
            peers = [p for p in same if p["program"].startswith(program)]
            if peers:
                best = max(peers, key=lambda p: p["model_gflops"])
                way = best["program"].split(", ")[-1]
                line[column] = f"{best['tokens_per_s']:.0f} tok/s, {best['model_gflops']:.0f} GFLOP/s ({way})"
                line["ratio"] += f", {r['model_gflops'] / best['model_gflops']:.2f}x {column}"
        lines.append(line)
        lines.append({
            "what": f"first step done, depth {r['depth']}, {r['dtype']}", "ours": f"{r['first_step_s']:.1f} s",
            "ratio": f"begun after {r['ready_s']:.1f} s", "how": "since process start, same process",
            "value": r["first_step_s"],
        })  # fmt: skip
    return lines


def busy_rows(found: list[dict[str, Any]]) -> list[Row]:
    """The trainer beside one busy program."""
    return [
        {
            "what": f"beside one busy program, threads wait: {r['way']}", "ours": f"{r['busy_tokens_per_s']:.0f} tok/s",
            "limit": f"{r['quiet_tokens_per_s']:.0f} tok/s quiet", "ratio": f"falls by {r['fall']:.0%}",
            "how": f"the trainer, depth {r['depth']}, medians, same run", "value": r["busy_tokens_per_s"],
            "of": 1 - r["fall"],
        }
        for r in found
    ]  # fmt: skip


def rows_rows(found: dict[str, Any], step: list[dict[str, Any]] | None) -> list[Row]:
    """Rows packed against the rows that training takes."""
    taken = max((r["tokens_per_s"] for r in own(step or [])), default=0.0)
    return [{
        "what": "packing rows, one thread", "ours": f"{found['tokens_per_second']:,.0f} tok/s",
        "limit": f"{taken:.0f} tok/s are needed" if taken else "",
        "ratio": f"{found['tokens_per_second'] / taken:.0f}x" if taken else "",
        "how": f"5 s at T={found['seq_len']}, tokenization included", "value": found["tokens_per_second"],
    }]  # fmt: skip


def wire_rows(found: list[dict[str, Any]]) -> list[Row]:
    """Bytes of a step against Gloo's own collectives."""
    return [
        {
            "what": f"bytes a step, depth {WIRE_DEPTH}, {r['world']} ranks",
            "ours": f"{sum(r['parts'].values()) / 1e6:.0f} MB",
            "limit": f"{NATIVE_WIRE_GOAL * r['native'] / 1e6:.0f} MB (goal)",
            "ratio": f"{sum(r['parts'].values()) / r['native']:.1%} of {r['native'] / 1e6:.0f} MB",
            "how": "of the plan, busiest rank, touched rows at most; of fp32 reduce_scatter + all_gather in Gloo",
            "value": sum(r["parts"].values()), "of": sum(r["parts"].values()) / r["native"],
        }
        for r in found
    ]  # fmt: skip


def equal_rows(found: list[dict[str, Any]]) -> list[Row]:
    """Two nodes against one."""
    one = sum(r["tokens_per_s"] for r in found if r["what"].startswith("one")) / 2
    return [
        {
            "what": r["what"] + (f" (--sync auto: {r['sync']})" if r["sync"] != "step" else ""),
            "ours": f"{r['tokens_per_s']:.0f} tok/s", "limit": f"{2 * one:.0f} tok/s",
            "ratio": f"{r['against_one']:.2f}x one node, {r['of_apart']:.1%} of both apart at once",
            "how": "depth 4, medians; limit: twice one node, same run",
            "value": r["tokens_per_s"], "of": r["against_one"],
        }
        for r in found if r["what"].startswith("two")
    ]  # fmt: skip


def unequal_rows(found: list[dict[str, Any]]) -> list[Row]:
    """A fast and a slow node against the sum of their rates."""
    alone, both = found[:-1], found[-1]
    return [{
        "what": "fast and slow node (quota 1.0 and 0.4)", "ours": f"{both['tokens_per_s']:.0f} tok/s",
        "limit": f"{sum(r['tokens_per_s'] for r in alone):.0f} tok/s",
        "ratio": f"{both['of_sum']:.1%} of the sum, {both['of_apart']:.1%} of both apart at once",
        "how": f"depth 4, rows {both['rows']} found while running",
        "value": both["tokens_per_s"], "of": both["of_sum"],
    }]  # fmt: skip


def scaling_rows(found: dict[str, Any]) -> list[Row]:
    """Real nodes against their simulation."""
    return [
        {
            "what": f"{r['nodes']} real nodes of half a core, {found['figures']['mbit']:g} Mbit/s",
            "ours": f"{r['real_s']:.2f} s a step", "limit": f"{r['simulated_s']:.2f} s simulated",
            "ratio": f"{r['error']:+.1%} error", "how": "benchmarks/scaling.py; its table goes to 64 nodes",
            "value": r["real_s"], "of": 1 + r["error"],
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
        ("busy", busy_rows),
        ("wire", wire_rows),
        ("equal", equal_rows),
        ("unequal", unequal_rows),
        ("scaling", scaling_rows),
    ):
        if figures.get(part):
            rows += make(figures[part])
    return rows


def markdown(rows: list[Row], columns: tuple[str, ...] = COLUMNS) -> str:
    """The table, without the columns that are empty throughout."""
    heads = [key for key in columns if any(row.get(key) for row in rows)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(str(row.get(key, "")) for key in heads) + " |" for row in rows])


def comparison(old: list[Row], new: list[Row]) -> list[Row]:
    """What changed since an earlier run, for the lines that both have: `beyond` is set where noise does not explain it.

    A figure is beyond noise when it changed by more than RATE_NOISE and its ratio, where it has one, by more than
    RATIO_NOISE points: another clock or a neighbour changes rates, and not what they are measured against.
    """
    before, lines = {row["what"]: row for row in old}, []
    for row in new:
        then = before.get(row["what"])
        if then is None or not then.get("value"):
            continue
        rate = row["value"] / then["value"] - 1
        ratio = row["of"] - then["of"] if "of" in row and "of" in then else None
        beyond = abs(rate) > RATE_NOISE and (ratio is None or abs(ratio) > RATIO_NOISE)
        lines.append({
            "what": row["what"], "before": then["ours"], "now": row["ours"], "change": f"{rate:+.1%}",
            "ratio": "" if ratio is None else f"{then['of']:.3f} -> {row['of']:.3f}",
            "noise": "BEYOND" if beyond else "within", "beyond": beyond,
        })  # fmt: skip
    return lines


def main() -> int:
    """Run the parts, print the table. Returns 1 when a part failed, 2 when a figure changed by more than noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["step", "rows", "busy", "wire", "equal", "unequal", "scaling"]
    parser.add_argument("--parts", nargs="+", default=names, choices=names)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "bench")
    parser.add_argument("--plot", type=Path, default=None, help="of scaling (default: OUT/scaling.png)")
    parser.add_argument("--depth", nargs="+", type=int, default=[4, 8], choices=[4, 8, 12], help="of the part `step`")
    parser.add_argument(
        "--dtype", nargs="+", choices=["fp32", "bf16"], help="of the part `step` (default: what is fast)"
    )
    parser.add_argument("--batch", type=int, default=8192, help="tokens a step of the part `equal`")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each run of several nodes")
    parser.add_argument("--nanochat", type=Path, help="a checkout to measure beside")
    parser.add_argument("--transformers", action="store_true", help="measure a Llama of transformers beside")
    parser.add_argument("--compiled", action="store_true", help="these under torch.compile too")
    parser.add_argument("--table", action="store_true", help="only make the table of what is in OUT")
    parser.add_argument("--compare", type=Path, help="an earlier bench.json: print each figure's change")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.plot = args.plot or args.out / "scaling.png"
    old = json.loads(args.compare.read_text())["rows"] if args.compare else []
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
    changes = comparison(old, rows)
    if args.compare:
        print("\n" + markdown(changes, ("what", "before", "now", "change", "ratio", "noise")), flush=True)
    if failed:
        return 1
    return BEYOND_NOISE_EXIT if any(line["beyond"] for line in changes) else 0


if __name__ == "__main__":
    sys.exit(main())
