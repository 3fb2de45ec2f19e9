"""The launcher that follows: it finds the hub, passes the checks, and does what it is told until the run ends."""

from __future__ import annotations

import platform
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2

from lantrain.cluster.addresses import clean_host, resolve
from lantrain.cluster.interfaces import interface_with_address, local_address_towards
from lantrain.errors import UserError
from lantrain.nodes.agent import BEAT_SECONDS, Agent, Ended
from lantrain.nodes.client import HubClient, HubRefused, why_unreachable
from lantrain.nodes.engine import adopt_orphans
from lantrain.nodes.hub import DEFAULT_PORT
from lantrain.nodes.launcher import STOP_GRACE_SECONDS, StopRequest, describe_node, say
from lantrain.nodes.members import Limits, duration
from lantrain.probes.between import Answering
from lantrain.probes.here import refuse_loopback
from lantrain.probes.preflight import check_before_joining


@dataclass
class WorkerOptions:
    """What `make up-worker` can set."""

    host: str
    hub_port: int = DEFAULT_PORT
    token: str = ""
    wait_seconds: float = 600.0
    limits: Limits = field(default_factory=Limits)


def run_worker(options: WorkerOptions) -> int:
    """Follow the master at `options.host` to the end of the run. Returns the exit code. Raises UserError."""
    stop = StopRequest()
    adopt_orphans()
    host = clean_host(options.host)
    address = resolve(host)
    local = local_address_towards(address, options.hub_port)
    card = interface_with_address(local) or ""
    say(f"master {host}" + ("" if host == address else f" = {address}") + f", this machine {local} on {card or '?'}")
    refuse_loopback(host, address, lambda: not why_unreachable(address, options.hub_port))
    client = HubClient(address, options.hub_port, options.token)
    if client.wait(options.wait_seconds, say, stop.wait) is None:
        return 128 + stop.number
    info = describe_node(card)
    agent = Agent(say)
    while True:
        try:
            checked = check_before_joining(client, info, say, stop.wait, options.wait_seconds)
            if checked is None:
                return 128 + stop.number
            info = checked
            client.join(platform.node(), info)
        except (httpx2.HTTPError, OSError):
            result: Ended | str = "the master went away again"
        else:
            speed = f"{info.gemm_gflops:g} GFLOP/s in {info.dtype}, {info.threads} threads"
            say(f"joined as {platform.node()} ({local}): {speed}")
            agent.forget_generations()
            result = _follow(client, agent, stop, options)
        if isinstance(result, Ended):
            agent.end_now(result.why)
            client.leave()
            say(f"the run has ended: {result.why}")
            return result.code
        if stop.number:
            return 128 + stop.number
        say(f"{result}; waiting for the master to return")
        agent.end_now(result)
        if not _wait_for_return(client, stop, options.wait_seconds, options.limits.patience):
            return 128 + stop.number


def _wait_for_return(client: HubClient, stop: StopRequest, seconds: float, patience: float) -> bool:
    """Wait up to `patience` seconds for a master that was there before, with a line each `seconds`.

    Whether it returned; not, when this node must stop. Raises HubRefused when it returned as another, for example with
    other code, and UserError when it did not return: the run may have ended while this machine's link was down, so
    that Docker must not start the node again.
    """
    until = time.monotonic() + patience
    while not stop.wait(BEAT_SECONDS):
        left = until - time.monotonic()
        try:
            return client.wait(max(0.0, min(seconds, left)), say, stop.wait) is not None
        except HubRefused:
            raise
        except UserError as error:
            if left <= seconds:
                raise UserError(
                    f"the master at {client.address} has not returned within {duration(patience)}",
                    "when it is up again, on this machine: make up-worker HOST=...; PATIENCE=<seconds> waits longer",
                ) from None
            say(f"{error}; still waiting")
    return False


def _follow(client: HubClient, agent: Agent, stop: StopRequest, options: WorkerOptions) -> Ended | str:
    """Report and obey until the run ends (Ended), or until the hub is lost or this node must stop (why, in words)."""
    heard, peers = time.monotonic(), Answering(client, local_address_towards(client.address), say)
    while not stop.wait(BEAT_SECONDS):
        try:
            order = client.beat(agent.report())
        except HubRefused as error:
            return str(error)
        except (httpx2.HTTPError, OSError):
            silent = time.monotonic() - heard
            if silent > options.limits.silence:
                return f"the master has been silent for {silent:.0f} s"
            continue
        heard = time.monotonic()
        peers.take(order.pop("peers", []))
        if order["order"] == "join":
            return "the master no longer knows this node"
        if order["order"] == "away":
            return "the master is going down and will return"
        ended = agent.obey(order)
        if ended is not None:
            return ended
    agent.leaving = True

    def tell() -> dict[str, Any]:
        try:
            return client.beat(agent.report())
        except (httpx2.HTTPError, OSError, UserError):
            return {"order": "wait"}

    # A machine that shuts down, or `make down` on the master's, may stop this node before it has heard of the end.
    order = tell()
    if order["order"] == "end":
        return Ended(int(order["code"]), str(order["why"]))
    say(f"{signal.Signals(stop.number).name}: leaving at the next step; the others go on without this machine")
    agent.stop_at_boundary(STOP_GRACE_SECONDS, tell)
    client.leave()
    return "left"
