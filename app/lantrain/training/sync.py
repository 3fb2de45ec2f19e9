"""Whether ranks exchange gradients every step or train apart: what `--sync` says, or what the link allows."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lantrain.cluster.exchange import start_exchange
from lantrain.cluster.group import Ranks, gather_json
from lantrain.training.config import Config
from lantrain.training.plan import Plan

GEMM_SHARE = 0.8
"""Share of the machines' GEMM rate that training reaches: the goal of this trainer, met on a quiet machine."""
WORTH_IT = 1.1
"""Local steps are taken where a step is so many times faster by them: they learn a little less from a token."""
PROBE_BYTES = (2**16, 2**20, 2**23)
"""Sent to each peer: the first opens the connections, the last is left out where the second took longer than this."""
QUICK_PROBE_SECONDS = 0.1


@dataclass(frozen=True)
class Estimate:
    """What a step would take. Rates in bytes/s that each rank sends at the same time, sizes in bytes per rank."""

    link: float
    compute_seconds: float
    step_bytes: float
    local_bytes: float

    @property
    def step_seconds(self) -> float:
        """Of a step that exchanges gradients and weights, nothing overlapped."""
        return self.compute_seconds + self.step_bytes / self.link

    @property
    def local_seconds(self) -> float:
        """Of a local step, with its share of the exchange at the end of the round."""
        return self.compute_seconds + self.local_bytes / self.link

    @property
    def local(self) -> bool:
        """Whether local steps are worth it."""
        return self.step_seconds > WORTH_IT * self.local_seconds

    def line(self, local_steps: int) -> str:
        """The choice and its reason."""
        chosen = f"local, rounds of {local_steps} steps" if self.local else "step"
        return (
            f"--sync auto: {chosen}: the link carries {self.link / 1e6:.3g} MB/s from each rank at once, computing a "
            f"step takes about {self.compute_seconds:.2g} s; exchanging every step sends {self.step_bytes / 1e6:.3g} "
            f"MB in {self.step_bytes / self.link:.2g} s, local steps {self.local_bytes / 1e6:.3g} MB in "
            f"{self.local_bytes / self.link:.2g} s a step"
        )


def measure_link(ranks: Ranks) -> float:
    """Bytes/s that each rank sends while all send to all, by the slowest. The same on every rank. Collective."""
    rate = float("inf")
    for size in PROBE_BYTES:
        slowest = max(gather_json(_seconds_to_send(size, ranks), ranks))
        rate = size * (ranks.world - 1) / max(slowest, 1e-9)
        if size > PROBE_BYTES[0] and slowest > QUICK_PROBE_SECONDS:
            break
    return rate


def _seconds_to_send(size: int, ranks: Ranks) -> float:
    """Of this rank, to send `size` bytes to each other one and receive as many."""
    sent = torch.zeros(size, dtype=torch.uint8)
    received = [torch.empty(size if rank != ranks.rank else 0, dtype=torch.uint8) for rank in range(ranks.world)]
    dist.barrier()  # a rank that comes late is not the cable's fault
    began = time.perf_counter()
    start_exchange(ranks, lambda _: sent, received).wait()
    return time.perf_counter() - began


def estimate(config: Config, plan: Plan, ranks: Ranks, machine_flops: float) -> Estimate:
    """Measure the link, given the sum of the machines' GEMM rates. The same on every rank. Collective."""
    args, counts = config.args, plan.counts
    compute = plan.flops_per_token * plan.total_batch / (GEMM_SHARE * machine_flops)
    tables = counts["wte"] + counts["value_embeds"]
    exchanged = 2 * (ranks.world - 1) / ranks.world
    width = 4 if args.wire_dtype == "float32" else 2
    return Estimate(
        link=measure_link(ranks),
        compute_seconds=compute,
        step_bytes=exchanged * width * (counts["total"] - tables),
        local_bytes=exchanged * args.delta_bits / 8 * counts["total"] / args.local_steps,
    )


def steps_locally(config: Config, plan: Plan, ranks: Ranks, machine_flops: float) -> bool:
    """Whether this run takes local steps; with `--sync auto` the leader says why. Collective.

    `machine_flops` is the sum of all machines' GEMM rates in FLOP/s, the same on every rank.
    """
    if config.args.sync != "auto":
        return bool(config.args.sync == "local")
    if ranks.world == 1:
        return False
    found = estimate(config, plan, ranks, machine_flops)
    if ranks.leader:
        print(found.line(config.args.local_steps), flush=True)
    return found.local
