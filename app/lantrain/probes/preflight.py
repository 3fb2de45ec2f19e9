"""The probes in order: before a worker joins, before a master opens its hub, and for `make doctor`.

A firewall that blocks the random high ports is mended by a command on one of the machines, so the worker does not give
up there: it says what to type, tries again every RETRY_SECONDS, and joins by itself once the way is open.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx2
from pydantic import ValidationError

from lantrain.cluster.addresses import Interface, interfaces
from lantrain.errors import UserError
from lantrain.nodes.client import HubClient
from lantrain.nodes.messages import Facts, NodeInfo
from lantrain.probes import compare as probes_peer
from lantrain.probes import here as probes_here
from lantrain.probes import ports as probes_ports
from lantrain.probes import room as probes_room
from lantrain.probes.between import peer_probes
from lantrain.probes.mend import firewall_seen, lan_of, lan_towards, open_firewall, port_range
from lantrain.probes.ports import listening, try_connect, try_ports
from lantrain.probes.result import RETRYABLE, Attempt, Result, failed

RETRY_SECONDS = 10.0
FACTS_SECONDS = 30.0
"""The master may have to import torch for its answer."""
LINK_TRIES = 5
"""A second apart, while the hub measures for others."""
PORT_FREE_SECONDS = 10.0
"""The trainers of a launcher that was killed go within some seconds."""


@dataclass(frozen=True)
class Sides:
    """The two machines of a worker's probes, in words and as addresses."""

    client: HubClient
    facts: Facts
    used: Interface | None

    @property
    def master(self) -> str:
        """The master, for people."""
        return f"the master ({self.facts.host}, {self.facts.address})"

    @property
    def here(self) -> str:
        """This machine, for people."""
        return f"this machine ({platform.node()}, {self.used.address if self.used else '?'})"

    def open_master(self) -> dict[str, str]:
        """Commands for the master's firewall."""
        ports = port_range([self.facts.train_port, self.client.port], self.facts.first_ephemeral)
        return open_firewall(lan_towards(self.facts.address, self.used), ports, self.facts.firewall)

    def open_here(self) -> dict[str, str]:
        """Commands for this machine's firewall."""
        return open_firewall(lan_of(self.facts.address, self.used), port_range([]), firewall_seen())


def ask_facts(client: HubClient) -> Facts:
    """What the master says of itself. Raises UserError when it speaks another version's language."""
    try:
        return Facts(**client.probe("facts", post=False, seconds=FACTS_SECONDS))
    except httpx2.HTTPStatusError as error:
        if error.response.status_code != 404:
            raise
    except ValidationError:
        pass
    raise UserError(
        "versions: the master's hub answers otherwise than this version expects",
        "use the same version on both machines: git pull && make image",
    )


def local_probes(master: str) -> list[Result]:
    """This machine's network, seen from the way to `master`."""
    have = interfaces()
    used = probes_here.on_route(master, have)
    results = [] if used is not None and used.address == master else [probes_here.route(master)]
    results += [probes_here.hostname(), probes_here.container_network()]
    if ":" not in master:
        results += [probes_here.same_subnet(master, have, used), probes_here.vpn(master, have, used)]
    return results


def train_port(sides: Sides) -> Result:
    """Whether torchrun's port on the master can be reached; the hub listens on it while no trainer does."""
    port = sides.facts.train_port
    answer = sides.client.probe("train-port")
    tried = f"{sides.here} asked the hub to listen on port {port}"
    if answer["listening"]:
        attempt = try_connect(sides.facts.address, port)
        return probes_ports.fixed_port(
            "train-port", attempt, connects=sides.here, listens=sides.master, what="the hub for torchrun",
            mend=sides.open_master(),
        )  # fmt: skip
    if answer["why"] == "held":
        means = "torchrun cannot use this port: an earlier run that was not ended, or another service"
        see = {"see who": f"sudo ss -ltnp 'sport = :{port}'", "use another": f"make up-master MASTER_PORT={port + 100}"}
        seen = f"port {port} of the master is held by {str(answer['holder'])[:200]}"
        return Result("train-port", "fail", tried, seen, means, see, sides.master)
    return Result("train-port", "ok", tried, "not tried: training is running on it")


def ports_to_master(sides: Sides) -> Result:
    """From here to random high ports of the master."""
    ports = [int(port) for port in sides.client.probe("listen")["ports"]]
    attempts = try_ports(sides.facts.address, ports)
    return probes_ports.high_ports(
        "ports-to-master", attempts, connects=sides.here, listens=sides.master, mend=sides.open_master()
    )


def ports_to_worker(sides: Sides) -> Result:
    """From the master to random high ports of this machine."""
    address = sides.used.address if sides.used else ""
    if probes_here.is_loopback(sides.client.address):
        address = sides.client.address  # a worker on the master's own machine: this is where the hub sees it
    with listening(address) as ports:
        states = sides.client.probe("connect", {"ports": ports})["states"]
    attempts = [Attempt(port, states.get(str(port), "filtered")) for port in ports]
    return probes_ports.high_ports(
        "ports-to-worker", attempts, connects=sides.master, listens=sides.here, mend=sides.open_here()
    )


PORT_PROBES = {"train-port": train_port, "ports-to-master": ports_to_master, "ports-to-worker": ports_to_worker}


def _together(sides: Sides, names: list[str]) -> list[Result]:
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda name: PORT_PROBES[name](sides), names))


def port_probes(sides: Sides) -> list[Result]:
    """All of them at the same time: in a dropped network each takes its whole limit.

    Silence is tried once more, as a machine that is busy training may be late to see an answer.
    """
    results = {result.name: result for result in _together(sides, list(PORT_PROBES))}
    silent = [
        result.name for result in results.values() if any(attempt.state == "filtered" for attempt in result.attempts)
    ]
    if silent:
        results |= {result.name: result for result in _together(sides, silent)}
    return list(results.values())


def measure_link(client: HubClient) -> tuple[float, float]:
    """MB/s and milliseconds; a rate of 0 where the hub goes on measuring for others."""
    # A TCP handshake is one round trip. HTTP over a kept connection gave 44 ms on a link of 0.1: Nagle's algorithm and
    # delayed acknowledgements wait for each other.
    milliseconds = probes_peer.round_trip(lambda: try_connect(client.address, client.port))
    for _ in range(LINK_TRIES):
        try:
            with client.stream() as chunks:
                return probes_peer.link_rate(chunks), milliseconds
        except httpx2.HTTPStatusError:
            time.sleep(1)
    return 0.0, milliseconds


def compare(sides: Sides, info: NodeInfo, asked: float) -> list[Result]:
    """Versions, clock, memory and GEMM rate; `asked` is this machine's time when the facts were read."""
    from lantrain.cluster.gemm import native_bf16

    results = [probes_peer.versions(info, sides.facts.model_dump()), probes_peer.clock(sides.facts.time, asked)]
    results.append(probes_peer.arithmetic(info, sides.facts.cpu, sides.facts.update))
    if sides.facts.need:
        results.append(probes_room.memory(sides.facts.need))
    return [*results, probes_peer.gemm(info, native_bf16())]


def worker_probes(client: HubClient, info: NodeInfo) -> tuple[list[Result], NodeInfo, Sides]:
    """All probes of a worker, and its info with what was measured. Raises what HubClient raises."""
    before = time.time()
    facts = ask_facts(client)
    sides = Sides(client, facts, probes_here.on_route(facts.address))
    results = [*local_probes(facts.address), *compare(sides, info, (before + time.time()) / 2)]
    if failed(result for result in results if result.name == "route"):
        return results, info, sides
    results += port_probes(sides)
    if not failed(results):
        results += peer_probes(client, sides.used)
    if not info.link_mbs and not failed(results):
        mbs, milliseconds = measure_link(client)
        info = info.model_copy(update={"link_mbs": mbs, "round_trip_ms": milliseconds})
    if info.link_mbs:
        results.append(probes_peer.link(info.link_mbs, info.round_trip_ms, facts.sends_mib))
    return results, info, sides


def tell_master(sides: Sides, results: list[Result]) -> None:
    """Have the master's log print what has to be typed there."""
    for result in results:
        if result.name in ("train-port", "ports-to-master") and result.attempts:
            ports = [{"port": attempt.port, "state": attempt.state} for attempt in result.attempts]
            sides.client.probe("blocked", {"probe": result.name, "ports": ports})


def check_before_joining(
    client: HubClient, info: NodeInfo, say: Callable[[str], None], pause: Callable[[float], bool], wait_seconds: float
) -> NodeInfo | None:
    """Run the probes until none fails; the info with the link's rate, or None when this node was told to stop.

    Blocked ports are tried again for `wait_seconds`. Raises UserError for what trying again cannot mend, and
    httpx2.HTTPError when the master goes away meanwhile.
    """
    start = time.monotonic()
    told: set[str] = set()
    while True:
        waited = time.monotonic() - start
        try:
            results, info, sides = worker_probes(client, info)
            bad = failed(results)
            for result in results:
                if result.status == "warn" and result.name not in told:
                    say(f"note: {result.line()}")
            for result in bad:
                if result.name not in told:
                    say(result.block())
            told |= {result.name for result in results if result.status != "ok"}
            if not bad:
                if waited > RETRY_SECONDS:
                    say("the way is open now")
                return info
            if waited > wait_seconds or any(result.name not in RETRYABLE for result in bad):
                names = ", ".join(result.name for result in bad)
                raise UserError(f"not joined: {names}", "see above what to type, and where")
            tell_master(sides, bad)
            trouble = "; ".join(f"{result.name} blocked" for result in bad)
        except httpx2.HTTPStatusError as error:
            if error.response.status_code != 429 or waited > wait_seconds:
                raise
            trouble = "the master is being probed by others"
        say(f"{trouble}; next try in {RETRY_SECONDS:.0f} s ({waited:.0f} s of {wait_seconds:.0f})")
        if pause(RETRY_SECONDS):
            return None


def master_ports(hub_port: int, train_port: int) -> Result:
    """Whether the master's two ports are free."""
    return probes_ports.port_held({"MASTER_PORT": train_port, "HUB_PORT": hub_port})


def master_room(arguments: list[str], world: int, folder: Path) -> list[Result]:
    """Memory and disk on the master. Raises UserError for flags that cannot train."""
    from lantrain.training.config import parse

    need = probes_room.estimate(arguments, probes_room.vocabulary(), world, leader=True)
    keep = parse(arguments).args.keep_last
    return [probes_room.memory(need.parts), probes_room.disk(folder, need.checkpoint, keep)]


def _refuse_failed(results: list[Result], say: Callable[[str], None]) -> None:
    for result in results:
        if result.status == "warn":
            say(f"note: {result.line()}")
    bad = failed(results)
    for result in bad:
        say(result.block())
    if bad:
        raise UserError(f"not started: {', '.join(result.name for result in bad)}", "see above what to type")


def check_master_network(here: Interface, hub_port: int, train_port: int, say: Callable[[str], None]) -> None:
    """Before anything slow: address, container and ports of the master. Raises UserError."""
    _refuse_failed([probes_here.address(here), probes_here.container_network()], say)
    until = time.monotonic() + PORT_FREE_SECONDS
    held = master_ports(hub_port, train_port)
    while held.status == "fail" and time.monotonic() < until:
        time.sleep(0.5)
        held = master_ports(hub_port, train_port)
    _refuse_failed([held], say)


def check_master_room(arguments: list[str], world: int, folder: Path, say: Callable[[str], None]) -> None:
    """Memory and disk of the master, once its data is there. Raises UserError."""
    _refuse_failed(master_room(arguments, world, folder), say)
