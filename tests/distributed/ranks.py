"""Starting real ranks: separate processes that talk over Gloo on loopback, each with an environment of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from lantrain.cluster.group import form_groups, leave_groups

APP = Path(__file__).resolve().parents[2] / "app"
GUARD_SECONDS = 300
"""Ends a run that hangs; no test waits for it in the good case."""

TINY = [
    "--depth=2", "--aspect-ratio=32", "--head-dim=32", "--max-seq-len=64", "--device-batch-size=2",
    "--total-batch-size=512", "--sample-every=-1", "--eval-every=-1", "--core-metric-every=-1",
    "--wire-dtype=float32",
]  # fmt: skip
"""A model of some 200 thousand parameters; 8 rows a step. Exact on the wire also between hosts."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Rank:
    process: subprocess.Popen[str]
    output: str = ""

    @property
    def code(self) -> int:
        return int(self.process.returncode)


@dataclass
class Run:
    ranks: list[Rank]
    base: Path
    tag: str
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def wait(self) -> Run:
        for rank in self.ranks:
            try:
                rank.output, _ = rank.process.communicate(timeout=GUARD_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        path = self.base / "base_checkpoints" / self.tag / "metrics.jsonl"
        if path.exists():
            self.metrics = [json.loads(line) for line in path.read_text().splitlines()]
        return self

    def leader_says(self, text: str) -> str:
        """Read on in the leader's output until `text` has come; returns what was read."""
        stdout = self.ranks[0].process.stdout
        assert stdout is not None
        head = ""
        while text not in head:
            line = stdout.readline()
            assert line, head
            head += line
        return head

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(signal.SIGKILL)
                rank.process.wait()

    @property
    def codes(self) -> list[int]:
        return [rank.code for rank in self.ranks]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.metrics if "loss" in record]

    @property
    def log(self) -> str:
        return "\n".join(rank.output for rank in self.ranks)

    def ok(self) -> Run:
        assert self.codes == [0] * len(self.ranks), self.log
        return self


def damage_pages(shard: Path) -> None:
    """Overwrite the middle of a parquet file: its metadata still reads, its pages do not."""
    whole = bytearray(shard.read_bytes())
    middle = slice(len(whole) // 3, len(whole) // 2)
    whole[middle] = b"\xff" * len(whole[middle])
    shard.write_bytes(whole)


def start_ranks(
    world: int, base: Path, flags: list[str], *, tag: str, per_rank: dict[int, list[str]] | None = None,
    env: dict[str, str] | None = None, worker_env: dict[str, str] | None = None, alone: bool = False,
) -> Run:  # fmt: skip
    """Start `world` trainers on `base` with the variables that torchrun would set (none when `alone`)."""
    port = str(free_port())
    ranks = []
    for rank in range(world):
        variables = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1", **(env or {})}
        variables.pop("NANOCHAT_DATA_DIR", None)
        if not alone:
            variables |= {
                "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
        if rank:
            variables |= worker_env or {}
        command = [sys.executable, "-u", "-m", "scripts.base_train", *flags, f"--model-tag={tag}"]
        command += (per_rank or {}).get(rank, [])
        process = subprocess.Popen(
            command, cwd=APP, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        ranks.append(Rank(process))
    return Run(ranks, base, tag)


def run_ranks(world: int, base: Path, flags: list[str], **options: Any) -> Run:
    """Start the ranks and wait for all of them."""
    return start_ranks(world, base, flags, **options).wait()


def _as_rank(rank: int, world: int, port: int, body: Any, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ranks = form_groups()
    results[rank] = body(ranks)
    leave_groups(ranks)


def together(world: int, body: Any) -> list[Any]:
    """Run `body(ranks)`, a function of a module, in `world` processes and return what each gave."""
    # The server imports torch once and each rank is a fork of it: importing it per rank took most of the time.
    multiprocessing.set_forkserver_preload(["torch", "lantrain.cluster.group", "lantrain.optim.sharded"])
    with multiprocessing.get_context("forkserver").Manager() as manager:
        results = manager.dict()
        arguments = (world, free_port(), body, results)
        mp.start_processes(_as_rank, args=arguments, nprocs=world, start_method="forkserver")
        return [results[rank] for rank in range(world)]
