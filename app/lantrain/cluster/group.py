"""The ranks of one run: forming the Gloo groups within a limit, and the small exchanges between ranks.

Messages are JSON in byte tensors: torch's own object collectives unpickle what a peer sent, and a peer on a network
without authentication must not be able to run code here.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import lantrain
from lantrain.cluster.interfaces import choose_interface
from lantrain.errors import UserError
from lantrain.settings import positive_number

DEFAULT_TIMEOUT = 600.0
"""Seconds that a collective may take: the slowest step, evaluation or checkpoint of the slowest machine is inside."""

CONNECT_TIMEOUT = 120.0
"""Seconds for all ranks to connect. Gloo's passive side waits five times its own limit, so we keep our own clock."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks.

    `feed` is a group of its own, so rows never queue behind gradients; so is `wire`, where gradients and weights
    travel, so nothing that is small and waited for queues behind them.
    """

    rank: int
    world: int
    feed: dist.ProcessGroup | None = None
    wire: dist.ProcessGroup | None = None
    interface: str | None = None

    @property
    def leader(self) -> bool:
        """Rank 0 owns what lasts: configuration, rows, checkpoints, metrics."""
        return self.rank == 0


@contextmanager
def deadline(seconds: float, what: str, mend: str) -> Iterator[None]:
    """End the process with one line when the body takes longer than `seconds`: some waits inside Gloo have no end."""

    def expire() -> None:
        print(f"error: {what} took more than {seconds:.0f} s ({mend})", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def launched_by_torchrun() -> bool:
    """Whether torchrun's variables are here; without them the run is a single process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _own_store(timeout: datetime.timedelta) -> dict[str, Any]:
    """Keys of this generation's own: a straggler of the last one, at the same port, can then disturb nothing."""
    generation = os.environ.get("LANTRAIN_GENERATION")
    if not generation:
        return {}
    store, rank, world = next(iter(dist.rendezvous("env://", timeout=timeout)))
    prefix = f"{os.environ.get('LANTRAIN_RUN', '')}generation{generation}"
    return {"store": dist.PrefixStore(prefix, store), "rank": rank, "world_size": world}


def form_groups() -> Ranks:
    """Join the run that torchrun describes, or stand alone. Raises UserError when the ranks cannot be formed."""
    if not launched_by_torchrun() or int(os.environ["WORLD_SIZE"]) == 1:
        return Ranks(0, 1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master = os.environ["MASTER_ADDR"]
    interface, reason = choose_interface(master)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    print(f"rank {rank}/{world}: network interface {interface or 'chosen by Gloo'} ({reason})", flush=True)
    timeout = datetime.timedelta(seconds=positive_number("LANTRAIN_TIMEOUT", DEFAULT_TIMEOUT, "seconds"))
    connect = positive_number("LANTRAIN_CONNECT_TIMEOUT", CONNECT_TIMEOUT, "seconds")
    hint = "a firewall may drop Gloo's random high ports: make doctor HOST=..., or see docs/troubleshooting.md"
    with deadline(connect, f"rank {rank}: connecting {world} ranks over {interface or 'Gloo'}", hint):
        try:
            dist.init_process_group("gloo", timeout=timeout, **_own_store(timeout))
            feed = dist.new_group(backend="gloo", timeout=timeout)
            wire = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"rank {rank} could not connect to the other ranks: {first_line}", hint, 1) from None
    assert not isinstance(feed, int)
    assert not isinstance(wire, int)
    return Ranks(rank, world, feed, wire, interface)


def leave_groups(ranks: Ranks) -> None:
    """Destroy the groups, if there are any."""
    if ranks.world > 1 and dist.is_initialized():
        dist.destroy_process_group()


def broadcast_json(value: Any, ranks: Ranks) -> Any:
    """Give every rank the leader's JSON value; what the other ranks pass is not looked at."""
    if ranks.world == 1:
        return value
    payload = torch.empty(0, dtype=torch.uint8)
    if ranks.leader:
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([payload.numel()])
    dist.broadcast(size, 0)
    if not ranks.leader:
        payload = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(payload, 0)
    return json.loads(payload.numpy().tobytes())


def gather_json(value: Any, ranks: Ranks) -> list[Any]:
    """Every rank's JSON value, in rank order, on every rank."""
    if ranks.world == 1:
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.world)]
    dist.all_gather(sizes, torch.tensor([mine.numel()]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(ranks.world)]
    dist.all_gather(parts, padded)
    return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def agree_on_versions(ranks: Ranks) -> list[dict[str, Any]]:
    """Compare code and torch versions with the leader's (invariant 6) and return every rank's description.

    Raises UserError on every rank, naming the item and both values, when a rank differs.
    """
    mine = {
        "host": platform.node(),
        "lantrain": lantrain.__version__,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }
    everyone = gather_json(mine, ranks)
    for rank, other in enumerate(everyone):
        for item in ("lantrain", "torch"):
            if other[item] != everyone[0][item]:
                raise UserError(
                    f"rank {rank} ({other['host']}) has {item} {other[item]}, "
                    f"the leader ({everyone[0]['host']}) has {everyone[0][item]}",
                    "use the same image on every machine",
                )
    return everyone
