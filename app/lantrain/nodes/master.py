"""The launcher that leads: it opens the hub, waits for the nodes, and sees the run to its end."""

from __future__ import annotations

import os
import platform
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lantrain.cluster.addresses import interfaces, own_address
from lantrain.errors import UserError
from lantrain.nodes.admission import Admission, parse_networks
from lantrain.nodes.agent import BEAT_SECONDS, Agent, Ended
from lantrain.nodes.arithmetic import cpu_class, update_digest
from lantrain.nodes.engine import adopt_orphans
from lantrain.nodes.hub import DEFAULT_PORT, Arithmetic, Hub, RunSettings
from lantrain.nodes.hub_server import HubServer
from lantrain.nodes.launcher import STOP_GRACE_SECONDS, StopRequest, code_fingerprint, describe_node, say
from lantrain.nodes.members import Limits
from lantrain.nodes.membership import Membership
from lantrain.nodes.predict import chooser
from lantrain.paths import base_dir
from lantrain.probes.preflight import check_master_network, check_master_room
from lantrain.probes.room import vocabulary

DEFAULT_TRAIN_PORT = 29500
FAREWELL_SECONDS = 30.0
"""How long the hub stays at most to tell the workers that the run has ended."""
ANSWER_SECONDS = 10.0
"""How long it then stays for whoever asked for the end on this machine."""
LIST_EVERY = 15.0


@dataclass
class MasterOptions:
    """What `make up-master` can set."""

    nodes: int = 2
    address: str = ""
    hub_port: int = DEFAULT_PORT
    train_port: int = DEFAULT_TRAIN_PORT
    arguments: list[str] = field(default_factory=list)
    allow: str = ""
    token: str = ""
    prepare: Callable[[], None] = lambda: None
    limits: Limits = field(default_factory=Limits)
    keep_slow: bool = False


def node_table(nodes: list[dict[str, Any]]) -> str:
    """The nodes in a table: rank, host, address, interface, cores, threads, GEMM rate, dtype, link, share of rows."""
    columns = {
        "rank": "rank", "name": "host", "address": "address", "interface": "card", "cores": "cores",
        "threads": "threads", "gemm_gflops": "GFLOP/s", "dtype": "dtype", "link_mbs": "MB/s", "round_trip_ms": "ms",
        "share": "rows",
    }  # fmt: skip
    heads = tuple(columns.values())
    unmeasured = {"link_mbs": 0.0, "round_trip_ms": 0.0}  # the master's own
    rows = [
        heads,
        *(tuple("" if node.get(c) in (None, unmeasured.get(c)) else str(node[c]) for c in columns) for node in nodes),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def run_master(options: MasterOptions) -> int:
    """Lead a run to its end. Returns the exit code: 0 when training is finished or was told to end."""
    stop = StopRequest()
    adopt_orphans()
    here = own_address(options.address)
    networks = parse_networks(options.allow) or [interface.network for interface in interfaces() if interface == here]
    refuse_public(here.address, options.allow)
    arguments = with_resume(options.arguments)
    membership = Membership(time.monotonic, options.nodes, say, options.limits)
    settings = RunSettings(here.address, options.train_port, arguments, trainer_environment())
    check_master_network(here, options.hub_port, options.train_port, say)
    # Before anybody can join; it takes the import of torch.
    bits = Arithmetic(cpu_class(), update_digest())
    hub = Hub(membership, Admission(list(networks), options.token), settings, code_fingerprint(), bits)
    server = HubServer(hub, sorted({here.address, "127.0.0.1"}), options.hub_port)
    port = "" if options.hub_port == DEFAULT_PORT else f" HUB_PORT={options.hub_port}"
    token = ", with this TOKEN in its .env" if options.token else ""
    say(f"this is the master, {here.address} on {here.name}; on each other machine{token}, type:")
    say(f"    make up-worker HOST={here.address}{port}")
    try:
        with stop.at_once():
            options.prepare()
            check_master_room(arguments, options.nodes, base_dir(), say)
            if not options.keep_slow:
                membership.choose = chooser(arguments, vocabulary())
        info = describe_node(here.name)
        with hub.lock:
            node = membership.join(platform.node(), here.address, info.model_dump(), master=True)
        return _lead(hub, Agent(say), node.id, stop)
    finally:
        server.close()


def _lead(hub: Hub, agent: Agent, node_id: str, stop: StopRequest) -> int:
    membership, listed, generation = hub.membership, 0.0, 0
    while not stop.wait(BEAT_SECONDS / 2):
        report = agent.report()
        with hub.lock:
            membership.tick()
            order = membership.beat(node_id, report)
            waiting = membership.phase == "gathering"
            names = [node.label for node in membership.nodes.values()]
        order = hub.with_settings(order)
        if hub.end_asked and order["order"] != "end":
            return _end_as_asked(hub, agent, hub.end_asked)
        ended = agent.obey(order)
        if ended is not None:
            return _say_farewell(hub, agent, ended)
        now = time.monotonic()
        if waiting and now - listed > LIST_EVERY:
            say(f"waiting for {membership.wanted} nodes, {len(names)} here: {', '.join(names)}")
            listed = now
        if membership.generation != generation:
            generation = membership.generation
            say("nodes:\n" + node_table(hub.status()["nodes"]))
    return _step_down(hub, agent, stop.number)


def _end_as_asked(hub: Hub, agent: Agent, why: str) -> int:
    """`make down` on the master: a step boundary, a checkpoint, and the end for every node."""
    say(f"{why}: every node ends at the next step, with a checkpoint")
    agent.leaving = True
    agent.stop_at_boundary(STOP_GRACE_SECONDS)
    with hub.lock:
        hub.membership.end(0, why)
    code = _say_farewell(hub, agent, Ended(0, why))
    hub.end_answered.wait(ANSWER_SECONDS)  # `node end` asks in this container, and would be killed with it
    return code


def _say_farewell(hub: Hub, agent: Agent, ended: Ended) -> int:
    """Stay until every worker that still reports has heard that the run is over, or for FAREWELL_SECONDS."""
    agent.end_now(ended.why)
    say(f"the run has ended: {ended.why}")
    until = time.monotonic() + FAREWELL_SECONDS
    while time.monotonic() < until and not hub.over():
        time.sleep(BEAT_SECONDS / 2)
    return ended.code


def _step_down(hub: Hub, agent: Agent, number: int) -> int:
    """The master was told to stop: every rank finishes its step, a checkpoint is written, the workers wait for it."""
    name = signal.Signals(number).name
    with hub.lock:
        ended = hub.membership.phase == "ended"
    if ended:
        return _say_farewell(hub, agent, Ended(hub.membership.end_code, hub.membership.why))
    say(f"{name}: stopping at the next step, with a checkpoint; the workers wait for this machine to return")
    agent.leaving = True
    if agent.trainer is not None:
        stopped = agent.stop_at_boundary(STOP_GRACE_SECONDS)
        say("stopped with a checkpoint" if stopped else "stopped; the last checkpoint is the one before")
    with hub.lock:
        hub.going_down = True
    time.sleep(2 * BEAT_SECONDS)  # every worker asks once more and hears "away"
    return 128 + number


def refuse_public(address: str, allow: str) -> None:
    """Raise UserError when `address` is reachable from the internet and nobody said that this is wanted."""
    import ipaddress

    ip = ipaddress.ip_address(address)
    if ip.is_global and not allow:
        raise UserError(
            f"{address} is a public address; Gloo has no authentication",
            "choose a LAN address with ADDRESS=..., or say who may join: ALLOW=203.0.113.0/24",
        )


def with_resume(arguments: list[str]) -> list[str]:
    """The trainer's flags with --resume auto: every generation goes on from the newest checkpoint.

    Raises UserError for flags that would keep it from that, or from training at all.
    """
    flags = [word.split("=")[0] for word in arguments]
    for flag in ("--resume-from-step", "--dry-run", "--world-size"):
        if flag in flags:
            raise UserError(
                f"TRAIN_ARGS: {flag} is not for a run of several machines",
                "leave it out: such a run goes on from the newest complete checkpoint",
            )
    return arguments if "--resume" in flags else [*arguments, "--resume", "auto"]


def trainer_environment() -> dict[str, str]:
    """Variables of the master that every trainer must share: the ranks compare them."""
    return {name: os.environ[name] for name in ("NANOCHAT_DTYPE", "ATEN_CPU_CAPABILITY") if os.environ.get(name)}


def split_arguments(text: str) -> list[str]:
    """TRAIN_ARGS as words. Raises UserError for an open quote."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"TRAIN_ARGS: {error}", "close the quotes") from None
