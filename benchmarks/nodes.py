"""Several nodes on this machine for the benchmarks: a network namespace each, a shaped cable, a core, a CPU quota.

The ranks that run there are the shipped trainer's. Needs root and iproute2 (`ip`, `tc`); what was made is removed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
APP = ROOT / "app"
sys.path.insert(0, str(APP))

SUBNET = "10.211.77"
PORT = "29500"
CPU_PERIOD_US = 20_000
WARMUP_STEPS = 2
"""First steps of a run that are not counted."""


def missing() -> str:
    """Why no nodes can be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") and shutil.which("tc") else "needs iproute2 (`ip` and `tc`)"


def _call(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True, text=True)


@dataclass
class Quota:
    """A CPU quota in cores for processes of this machine, by cgroup v1 or v2."""

    name: str
    cores: float
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        v1 = Path("/sys/fs/cgroup/cpu")
        self.folder = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / self.name
        self.folder.mkdir()
        self.set(self.cores)

    def set(self, cores: float) -> None:
        """Change the quota."""
        micros = int(cores * CPU_PERIOD_US)
        if (self.folder / "cpu.cfs_quota_us").exists():
            (self.folder / "cpu.cfs_period_us").write_text(str(CPU_PERIOD_US))
            (self.folder / "cpu.cfs_quota_us").write_text(str(micros))
        else:
            (self.folder / "cpu.max").write_text(f"{micros} {CPU_PERIOD_US}")

    def add(self, pid: int) -> None:
        """Put a process, with all it starts from now on, under the quota."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the cgroup; its processes have ended."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


@dataclass
class Nodes:
    """Namespaces with an address each, all on one switch."""

    names: list[str]
    quotas: list[Quota | None]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    first: int = 0
    """The place of the first among the nodes that were made together; it decides the core."""

    def alone(self, node: int) -> Nodes:
        """One of them, to train by itself."""
        return Nodes([self.names[node]], [self.quotas[node]], self.processes, self.first + node)

    def address(self, node: int) -> str:
        """IPv4 address of a node."""
        return f"{SUBNET}.{10 + self.first + node}"

    def command(self, node: int, line: Sequence[str]) -> list[str]:
        """`line` as it runs on a node: in its namespace, on one core (they take turns where there are fewer)."""
        core = sorted(os.sched_getaffinity(0))[(self.first + node) % len(os.sched_getaffinity(0))]
        return ["ip", "netns", "exec", self.names[node], "taskset", "-c", str(core), *line]

    def start(self, node: int, line: Sequence[str], env: dict[str, str], log: Path) -> subprocess.Popen[str]:
        """Start a process on a node, under its quota from the first instruction on."""
        shell = ["sh", "-c", 'read go; exec "$@"', "sh", *self.command(node, line)]
        with log.open("w") as file:
            process = subprocess.Popen(
                shell, env={**os.environ, **env}, cwd=APP, stdin=subprocess.PIPE, stdout=file,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        self.processes.append(process)
        quota = self.quotas[node]
        if quota is not None:
            quota.add(process.pid)
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.close()
        return process

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def nodes(count: int, *, mbit: float | None = None, quotas: Sequence[float] | None = None) -> Iterator[Nodes]:
    """`count` nodes; each cable lets through `mbit` Mbit/s each way (None: what the kernel can), CPU by `quotas`."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is removed then, too
    mark = f"lt{os.getpid()}"
    switch, names = f"{mark}s", [f"{mark}n{i}" for i in range(count)]
    made = Nodes(names, [Quota(f"{mark}n{i}", cores) for i, cores in enumerate(quotas)] if quotas else [None] * count)
    try:
        _call(f"ip netns add {switch}")
        _call(f"ip -n {switch} link add br0 type bridge")
        _call(f"ip -n {switch} link set br0 up")
        for node, name in enumerate(names):
            _call(f"ip netns add {name}")
            _call(f"ip -n {name} link set lo up")
            _call(f"ip -n {switch} link add p{node} type veth peer name eth0 netns {name}")
            _call(f"ip -n {switch} link set p{node} master br0 up")
            _call(f"ip -n {name} address add {made.address(node)}/24 dev eth0")
            _call(f"ip -n {name} link set eth0 up")
            if mbit is not None:
                # A burst of 2 ms and a short queue, as the buffers of a card and a switch have them.
                shape = f"tbf rate {mbit:g}mbit burst {max(16000, int(mbit * 250))} latency 10ms"
                _call(f"tc -n {name} qdisc add dev eth0 root {shape}")
                _call(f"tc -n {switch} qdisc add dev p{node} root {shape}")
        yield made
    finally:
        made.end()
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        for quota in made.quotas:
            if quota is not None:
                quota.close()


@dataclass(frozen=True)
class Measured:
    """A run's steps after the warm-up, and every step's seconds."""

    tokens: int
    seconds: float
    """A step's: the median; with local steps the mean, as only the step that ends a round has what the round costs."""
    compute: list[float]
    """Median seconds of forward and backward, by rank."""
    rows: list[int]
    """Rows of each rank in the last step."""
    steps: list[float]
    log: str
    update: list[float] = field(default_factory=list)
    """Median seconds of the update without waiting, by rank."""
    per_row: list[float] = field(default_factory=list)
    """Median seconds of forward and backward for a row, by rank; infinite for one that had none."""
    rounds: list[float] = field(default_factory=list)
    """Seconds of the ends of rounds among the steps; empty for a run that exchanges every step."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def train(
    made: Nodes, base: Path, flags: Sequence[str], steps: int, tag: str, *, settle: int = 0, more: int = 0
) -> Measured:
    """Run the trainer on all nodes for `steps` counted steps after `settle` that let the shares find their place.

    `more` steps follow that are not counted. With local steps, a whole number of rounds' steps gives the round its
    right weight wherever it ends among them; but the last step of a run ends one too early and should not be counted.
    `base` has shards and tokenizer. Raises RuntimeError with the log when a rank fails.
    """
    world, skipped = len(made.names), WARMUP_STEPS + settle
    folder = base / "base_checkpoints" / tag
    shutil.rmtree(folder, ignore_errors=True)
    line = [
        sys.executable, "-m", "scripts.base_train", *flags, f"--model-tag={tag}", "--num-iterations=1000000",
        f"--stop-after={skipped + steps + more}", "--eval-every=-1", "--sample-every=-1", "--core-metric-every=-1",
        "--save-minutes=0",
    ]  # fmt: skip
    logs, ranks = [base / f"{tag}.rank{node}.log" for node in range(world)], []
    for node in range(world):
        env = {"NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        if world > 1:
            env |= {
                "RANK": str(node), "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": made.address(0), "MASTER_PORT": PORT,
            }  # fmt: skip
        ranks.append(made.start(node, line, env, logs[node]))
    codes = [rank.wait() for rank in ranks]
    text = "\n".join(f"== rank {node}\n{log.read_text()}" for node, log in enumerate(logs))
    if any(codes):
        raise RuntimeError(f"{tag}: exit codes {codes}\n{text}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = list(map(json.loads, lines))
    shutil.rmtree(folder)
    return _measured(records, skipped + 1, skipped + steps, text)


def train_apart(made: Nodes, base: Path, flags: Sequence[str], steps: Sequence[int], tag: str) -> list[Measured]:
    """Every node trains by itself, all at the same time; `steps` of each, best so that all end together.

    The cores of one machine share its memory and its clock: each is slower while the others work. Machines are not, so
    this is what nodes of one machine are to be compared with.
    """
    with ThreadPoolExecutor(len(made.names)) as pool:
        runs = [
            pool.submit(train, made.alone(node), base, flags, count, f"{tag}-{node}")
            for node, count in enumerate(steps)
        ]
        return [run.result() for run in runs]


def _measured(records: Sequence[dict[str, Any]], first: int, last: int, log: str) -> Measured:
    """Steps `first` to `last` of a run's metrics.jsonl."""
    counted = [record for record in records if first <= record["step"] <= last]
    steps = [record for record in counted if "loss" in record]
    rounds = [record["outer_s"] for record in counted if "outer_s" in record]
    average = statistics.mean if any("outer_s" in record for record in records) else statistics.median
    return Measured(
        tokens=round(statistics.median(record["tok_per_sec"] * record["dt"] for record in steps)),
        seconds=average([record["dt"] for record in steps]),
        compute=_medians(steps, "rank_compute_s"),
        rows=steps[-1]["rows"],
        steps=[record["dt"] for record in steps],
        log=log,
        update=_medians(steps, "rank_update_s"),
        per_row=[_median_of_a_row(steps, rank) for rank in range(len(steps[-1]["rows"]))],
        rounds=rounds,
    )


def _median_of_a_row(records: Sequence[dict[str, Any]], rank: int) -> float:
    seen = [record["rank_compute_s"][rank] / record["rows"][rank] for record in records if record["rows"][rank]]
    return statistics.median(seen) if seen else math.inf


def _medians(records: Sequence[dict[str, Any]], key: str) -> list[float]:
    """By rank."""
    return [statistics.median(rank) for rank in zip(*(record[key] for record in records), strict=True)]
