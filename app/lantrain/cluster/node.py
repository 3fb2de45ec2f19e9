"""The launchers: `master` opens the hub and leads, `worker` finds the hub and follows. Both run until training ends."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import psutil

import lantrain
from lantrain.cluster.addresses import clean_host, interfaces, own_address, resolve
from lantrain.cluster.admission import Admission, parse_networks
from lantrain.cluster.agent import BEAT_SECONDS, Agent, Ended
from lantrain.cluster.client import HubClient, HubRefused, why_unreachable
from lantrain.cluster.cores import usable_cores
from lantrain.cluster.engine import adopt_orphans
from lantrain.cluster.hub import DEFAULT_PORT, Arithmetic, Hub, HubServer, NodeInfo, RunSettings
from lantrain.cluster.interfaces import interface_with_address, local_address_towards
from lantrain.cluster.membership import Limits, Membership, duration
from lantrain.cluster.predict import chooser
from lantrain.cluster.preflight import check_before_joining, check_master_network, check_master_room
from lantrain.cluster.probes_between import Answering
from lantrain.cluster.probes_here import refuse_loopback
from lantrain.cluster.probes_room import vocabulary
from lantrain.errors import UserError
from lantrain.paths import base_dir

DEFAULT_TRAIN_PORT = 29500
STOP_GRACE_SECONDS = 90.0
"""For a step, and the checkpoint after it, when this node is told to stop; compose's grace period is longer."""
FAREWELL_SECONDS = 30.0
"""How long the hub stays at most to tell the workers that the run has ended."""
ANSWER_SECONDS = 10.0
"""How long it then stays for whoever asked for the end on this machine."""
LIST_EVERY = 15.0


def say(line: str) -> None:
    """A line of the launcher, told apart from the trainer's."""
    print(f"[lantrain] {line}", flush=True)


def code_fingerprint() -> str:
    """A short hash of this package's sources: two machines with different code do not train together."""
    digest = hashlib.sha256()
    root = Path(lantrain.__file__).parent
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def describe_node(interface: str) -> NodeInfo:
    """This machine, as the node table shows it."""
    import torch

    from lantrain.cluster.arithmetic import cpu_class, update_digest
    from lantrain.cluster.cores import choose_threads
    from lantrain.cluster.gemm import choose_dtype, gemm_rate

    threads, _ = choose_threads()
    torch.set_num_threads(threads)
    dtype, _ = choose_dtype()
    return NodeInfo(
        version=lantrain.__version__, code=code_fingerprint(), torch=str(torch.__version__),
        python=platform.python_version(), interface=interface, cores=usable_cores(), threads=threads,
        memory_mib=int(psutil.virtual_memory().available / 2**20), gemm_gflops=round(gemm_rate(dtype) / 1e9, 1),
        dtype=str(dtype).removeprefix("torch."), cpu=cpu_class(), update=update_digest(),
    )  # fmt: skip


class StopRequest:
    """SIGTERM and SIGINT, remembered; `wait` returns early when one comes."""

    def __init__(self) -> None:
        self.number = 0
        self._interrupt = False
        self._event = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._event.set()
        if self._interrupt:
            raise SystemExit(128 + number)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal ends the process where it is: nothing needs a step boundary yet."""
        self._interrupt = True
        try:
            yield
        finally:
            self._interrupt = False

    def wait(self, seconds: float) -> bool:
        """Sleep, but not through a signal. Whether one has come."""
        return self._event.wait(seconds)


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
    hub = Hub(membership, Admission(list(networks), options.token), settings, code_fingerprint())
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
            hub.arithmetic = Arithmetic(info.cpu, info.update, os.environ.get("ATEN_CPU_CAPABILITY", ""))
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
