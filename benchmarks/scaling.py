"""How the cost of a step grows with the number of nodes: 2 to 64 simulated, and a forecast held against real ones.

    python benchmarks/scaling.py --base DIR [--mbit 300] [--quota 0.5] [--json FILE] [--plot docs/scaling.png]

Measured: seconds of a row and of an update by one node alone, bytes a second by the trainer's own exchange between two
idle nodes, CPU seconds of a heartbeat in the hub. The simulation is the launchers' own prediction (nodes/predict.py)
with these. Then 1 to 4 real nodes train with another batch (--check-batch), and the errors of what was forecast for
them are printed; nothing of these runs goes into the simulation. Nodes are network namespaces with a shaped cable and a
CPU quota (benchmarks/nodes.py): four halves of a core are nodes that do not take time from each other on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app"))

from benchmarks.nodes import PORT, Measured, missing, nodes, train
from lantrain.nodes.predict import EFFICIENCY, Prediction, Speed, Work, step_seconds, work_of

REAL = (1, 2, 3, 4)
SIMULATED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LINKS = (100.0, 1000.0, 2500.0)
PAYLOAD = 0.117e6
"""Bytes of payload a second that TCP carries for each Mbit/s of Ethernet."""
HEADER_BYTES = 2048
PROBE_ELEMENTS, PROBE_TIMES = 2**21, 9
HUB_BEATS = 400
BEATS_PER_SECOND = 2
VOCABULARY = 32768


@dataclass(frozen=True)
class Figures:
    """What was measured, and on what. Seconds, bytes a second."""

    row: float
    """Forward and backward of one row on one node."""
    update: float
    """The rest of one node's step."""
    link: float
    """Bytes a second each way while two nodes exchange, at best."""
    usual_link: float
    """The median of the same."""
    trip: float
    """A barrier between two."""
    cpu: float
    """CPU seconds of a node for a byte that it sends or receives: packing, rounding, summing, TCP."""
    beat: float
    """CPU seconds of a heartbeat, both sides: an upper bound for the hub's."""
    quota: float
    mbit: float
    batch: int

    @property
    def work(self) -> Work:
        """The run that the figures come from."""
        return work_of([*flags(self.batch), "--num-iterations=1"], VOCABULARY)

    @property
    def row_flops(self) -> float:
        """Flops of the row that took `row` seconds."""
        return self.work.row_flops


def flags(batch: int, seq_len: int = 512, depth: int = 4) -> list[str]:
    """The run that is measured; rows of a micro-batch are few, so that four nodes have whole ones."""
    return [
        f"--depth={depth}", f"--max-seq-len={seq_len}", "--device-batch-size=2", f"--total-batch-size={batch}",
        "--wire-dtype=bfloat16",
    ]  # fmt: skip


def probe() -> None:
    """As one of two ranks: the trainer's exchange of gradients, timed. The leader prints JSON."""
    import torch
    import torch.distributed as dist

    from lantrain.cluster.group import form_groups, gather_json, leave_groups
    from lantrain.optim.owners import Piece
    from lantrain.optim.wire import Wire

    ranks = form_groups()
    owned = [[Piece(f"p{rank}", 0, 0, 1, PROBE_ELEMENTS, 0.0, True)] for rank in range(ranks.world)]
    wire, values = Wire([owned], ranks, torch.bfloat16), torch.zeros(PROBE_ELEMENTS)
    seconds, trips, used = [], [], []
    for _ in range(PROBE_TIMES):
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        wire.send_gradients(0, lambda _: values)()
        used.append(time.process_time() - busy)
        seconds.append(max(gather_json(time.perf_counter() - start, ranks)))
        start = time.perf_counter()
        dist.barrier()
        trips.append(time.perf_counter() - start)
    # The quickest: the others had an interruption of the machine in them.
    size = 2 * PROBE_ELEMENTS * (ranks.world - 1)
    found = {
        "link": size / min(seconds), "usual": size / statistics.median(seconds), "trip": statistics.median(trips),
        "cpu": statistics.median(used) / (2 * size),
    }  # fmt: skip
    if ranks.leader:
        print("PROBE " + json.dumps(found), flush=True)
    leave_groups(ranks)


def measure_link(mbit: float, quota: float, base: Path) -> dict[str, float]:
    """Two nodes run `probe`."""
    with nodes(2, mbit=mbit, quotas=[quota] * 2) as made:
        ranks = []
        for node in range(2):
            env = {
                "RANK": str(node), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": made.address(0), "MASTER_PORT": PORT, "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            line = [sys.executable, str(Path(__file__).resolve()), "--probe"]
            ranks.append(made.start(node, line, env, base / f"probe{node}.log"))
        codes = [rank.wait() for rank in ranks]
    text = (base / "probe0.log").read_text()
    if any(codes):
        raise RuntimeError(f"the probe failed: {codes}\n{text}")
    (said,) = (line for line in text.splitlines() if line.startswith("PROBE "))
    found: dict[str, float] = json.loads(said.removeprefix("PROBE "))
    return found


def measure_beat() -> float:
    """CPU seconds of this process for one beat of a node over HTTP, both sides: an upper bound for the hub."""
    import ipaddress

    from lantrain import __version__
    from lantrain.nodes.admission import Admission
    from lantrain.nodes.client import HubClient
    from lantrain.nodes.hub import Hub, RunSettings
    from lantrain.nodes.hub_server import HubServer
    from lantrain.nodes.membership import Membership, Report
    from lantrain.nodes.messages import NodeInfo

    admission = Admission([ipaddress.ip_network("127.0.0.0/8")], "")
    hub = Hub(Membership(time.monotonic, 2, lambda _: None), admission, RunSettings("127.0.0.1", 1, []), "")
    server = HubServer(hub, ["127.0.0.1"], port := 29577)
    try:
        client = HubClient("127.0.0.1", port)
        client.join("node", NodeInfo(version=__version__, torch="none"))
        start, done = time.process_time(), 0
        while done < HUB_BEATS:
            client.beat(Report("idle"))
            done += 1
            time.sleep(0.005)  # below the hub's limit of requests a second
        return (time.process_time() - start) / done
    finally:
        server.close()


def simulate(work: Work, figures: Figures, world: int, link: float) -> Prediction:
    """A step of `world` equal nodes, each of the measured speed."""
    node = Speed(work.row_flops / (EFFICIENCY * figures.row * work.row_flops / figures.row_flops), link, figures.trip)
    known = step_seconds(figures.work, [node]).update
    found = step_seconds(work, [node] * world)
    assert work.owned is not None
    own = [parameters / work.dense for parameters in work.owned([1.0] * world)]
    # Gradients out and in, and weights the other way. The CPU has no time for anything else meanwhile.
    moved = 2 * work.dense * work.wire_bytes * max(1 - part + part * (world - 1) for part in own) if world > 1 else 0
    busy = moved * figures.cpu / figures.quota
    return replace(found, update=found.update * figures.update / known, wire=found.wire + busy)


def real_run(base: Path, world: int, batch: int, mbit: float, quota: float, steps: int) -> Measured:
    """`world` real nodes with equal shares."""
    with nodes(world, mbit=mbit, quotas=[quota] * world) as made:
        return train(made, base, [*flags(batch), "--no-rebalance"], steps, f"scaling{world}")


def compare(figures: Figures, batch: int, runs: dict[int, Measured]) -> list[dict[str, Any]]:
    """The forecast for steps of `batch` tokens against real runs with them."""
    rows, work = [], work_of([*flags(batch), "--num-iterations=1"], VOCABULARY)
    for world, run in runs.items():
        step = simulate(work, figures, world, figures.link)
        rows.append({
            "nodes": world, "batch": batch, "real_s": run.seconds, "simulated_s": step.seconds,
            "error": step.seconds / run.seconds - 1,
            "real_compute_s": max(run.compute), "compute_s": step.compute, "wire_s": step.wire, "rows": run.rows,
            "steps_s": run.steps,
        })  # fmt: skip
    return rows


def grow(name: str, work: Work, figures: Figures, mbit: float) -> list[dict[str, Any]]:
    """The simulated table of one kind of run on one kind of cable: hub, feed, wire and checkpoint."""
    cable = mbit * PAYLOAD
    exchange = cable * min(1.0, figures.link / (figures.mbit * PAYLOAD))
    alone, rows = simulate(work, figures, 1, exchange), []
    for world in SIMULATED:
        step = simulate(work, figures, world, exchange)
        # What the leader sends to all others before a step, two bytes a token and a header, while they compute.
        feed = (1 - 1 / world) * work.rows * (work.row_tokens + 1) * 2 + HEADER_BYTES * (world - 1)
        # What it gathers from the other owners for a checkpoint: moments and fp32 weights, 8 to 12 bytes a parameter.
        checkpoint = (1 - 1 / world) * work.dense * 12
        rows.append({
            "run": name, "mbit": mbit, "nodes": world, "step_s": step.seconds, "compute_s": step.compute,
            "update_s": step.update, "wire_s": step.wire, "speedup": alone.seconds / step.seconds,
            "wire_mb": step.bytes / 1e6, "feed_mb": feed / 1e6, "feed_s": feed / cable,
            "checkpoint_s": checkpoint / cable, "hub_cores": figures.beat * BEATS_PER_SECOND * (world - 1),
        })  # fmt: skip
    return rows


def tables(figures: Figures, compared: list[dict[str, Any]], grown: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        f"One node ({figures.quota:g} of a core, {figures.batch} tokens): {figures.row:.3f} s a row, "
        f"{figures.update:.3f} s an update; "
        f"exchange {figures.link / 1e6:.1f} MB/s each way on {figures.mbit:g} Mbit/s at best, "
        f"{figures.usual_link / 1e6:.1f} usually; "
        f"a heartbeat {figures.beat * 1e3:.2f} ms of CPU.",
        "",
        "| nodes | tokens | real step s | forecast s | error | of these on the wire s | steps s |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in compared:
        steps = ", ".join(f"{one:.2f}" for one in r["steps_s"])
        lines.append(
            f"| {r['nodes']} | {r['batch']} | {r['real_s']:.3f} | {r['simulated_s']:.3f} | {r['error']:+.1%} "
            f"| {r['wire_s']:.3f} | {steps} |"
        )
    head = "| run | Mbit/s | nodes | step s | speed-up | wire s | wire MB | feed MB | checkpoint s | hub cores |"
    lines += ["", "Simulated, nodes of a whole core:", "", head, "|" + "---|" * 10]
    for r in grown:
        lines.append(
            f"| {r['run']} | {r['mbit']:g} | {r['nodes']} | {r['step_s']:.2f} | {r['speedup']:.2f} | {r['wire_s']:.2f} "
            f"| {r['wire_mb']:.0f} | {r['feed_mb']:.2f} | {r['checkpoint_s']:.1f} | {r['hub_cores']:.3f} |"
        )
    return "\n".join(lines)


def plot(compared: list[dict[str, Any]], grown: list[dict[str, Any]], path: Path) -> None:
    """Speed-up against nodes for each run and cable, and the real runs beside their simulation."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    for style, run in zip(("-", "--"), dict.fromkeys(r["run"] for r in grown), strict=False):
        for colour, mbit in zip(("tab:red", "tab:blue", "tab:green"), LINKS, strict=True):
            some = [r for r in grown if r["run"] == run and r["mbit"] == mbit]
            label = f"{run}, {mbit:g} Mbit/s"
            left.plot([r["nodes"] for r in some], [r["speedup"] for r in some], style, color=colour, label=label)
    left.plot(SIMULATED, SIMULATED, ":", color="grey", label="ideal")
    left.set(xscale="log", yscale="log", xlabel="nodes", ylabel="times one node", title="simulated")
    left.legend(fontsize=7)
    one = compared[0]["real_s"]
    right.plot([r["nodes"] for r in compared], [one / r["real_s"] for r in compared], "o", label="real")
    right.plot([r["nodes"] for r in compared], [one / r["simulated_s"] for r in compared], "x-", label="forecast")
    right.plot(REAL, REAL, ":", color="grey", label="ideal")
    right.set(xlabel="nodes", ylabel="times one node", title="real nodes and the forecast")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, compare, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--mbit", type=float, default=300, help="cable of the real nodes")
    parser.add_argument("--quota", type=float, default=0.5, help="of a core, for each of the real nodes")
    parser.add_argument("--batch", type=int, default=4096, help="tokens of a step of the one node that is measured")
    parser.add_argument("--check-batch", type=int, default=8192, help="tokens of a step of the real nodes")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--from-json", type=Path, help="simulate again from the figures of an earlier run")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        return probe()
    if args.from_json:
        saved = json.loads(args.from_json.read_text())
        figures = Figures(**saved["figures"])
        runs = {int(world): Measured(**run) for world, run in saved["runs"].items()}
        args.check_batch = saved["check_batch"]
    else:
        why = missing() or ("" if args.base else "needs --base")
        if why:
            print(f"not measured: {why}")
            return None
        os.environ.setdefault("NANOCHAT_DTYPE", "auto")
        beat, link = measure_beat(), measure_link(args.mbit, args.quota, args.base)
        one = real_run(args.base, 1, args.batch, args.mbit, args.quota, args.steps)
        figures = Figures(
            row=one.compute[0] / one.rows[0], update=one.seconds - one.compute[0], link=link["link"],
            usual_link=link["usual"], trip=link["trip"], cpu=link["cpu"], beat=beat, quota=args.quota,
            mbit=args.mbit, batch=args.batch,
        )  # fmt: skip
        runs = {w: real_run(args.base, w, args.check_batch, args.mbit, args.quota, args.steps) for w in REAL}
    compared = compare(figures, args.check_batch, runs)
    whole = replace(figures, row=figures.row * figures.quota, update=figures.update * figures.quota, quota=1.0)
    grown = [
        row
        for name, work in (
            ("depth 4, 32k", work_of([*flags(32768), "--num-iterations=1"], VOCABULARY)),
            ("depth 8, 262k", work_of([*flags(262144, 1024, 8), "--num-iterations=1"], VOCABULARY)),
        )
        for mbit in LINKS
        for row in grow(name, work, whole, mbit)
    ]
    print(tables(figures, compared, grown))
    if args.plot:
        plot(compared, grown, args.plot)
    if args.json:
        saved_runs = {world: {**asdict(run), "log": ""} for world, run in runs.items()}
        args.json.write_text(
            json.dumps(
                {
                    "figures": asdict(figures), "check_batch": args.check_batch, "runs": saved_runs,
                    "compared": compared, "grown": grown,
                },
                indent=1,
            )
        )  # fmt: skip
    return None


if __name__ == "__main__":
    main()
