"""Probes between workers: one that joins and each that is there connect to each other's random high ports.

The hub carries the questions (nodes/hub_peers.py). What a firewall blocks is printed on the machine where it is mended:
by the one that joins, and by the worker that cannot be reached.
"""

from __future__ import annotations

import ipaddress
import platform
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
from pydantic import TypeAdapter, ValidationError

from lantrain.cluster.addresses import Interface
from lantrain.nodes.client import HubClient
from lantrain.probes.here import on_route
from lantrain.probes.mend import firewall_seen, lan_of, lan_towards, open_firewall, port_range
from lantrain.probes.ports import CONNECT_SECONDS, HIGH_PORTS, high_ports, listening, try_ports
from lantrain.probes.result import Attempt, HighPort, Result, TriedPort

LISTEN_SECONDS = 2 * CONNECT_SECONDS + 1
"""The other side tries silence twice."""
REPEAT_SECONDS = 60.0
PORTS = TypeAdapter(list[HighPort])


def _as_attempts(tried: Any) -> list[Attempt]:
    return [Attempt(port.port, port.state) for port in TypeAdapter(list[TriedPort]).validate_python(tried)]


def _as_json(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    return [{"port": attempt.port, "state": attempt.state} for attempt in attempts]


class Answering:
    """A worker's side: does what the hub hands to it, in threads, as it may take seconds."""

    def __init__(self, client: HubClient, local: str, say: Callable[[str], None]) -> None:
        self._client, self._local, self._say = client, local, say
        self._said: dict[str, float] = {}

    def take(self, orders: Any) -> None:
        """Begin with each of `orders`; what makes no sense is left."""
        for order in orders if isinstance(orders, list) else []:
            threading.Thread(target=self._do, args=(order,), name="peer probe", daemon=True).start()

    def _do(self, order: dict[str, Any]) -> None:
        try:
            if "blocked" in order:
                self._tell(str(ipaddress.ip_address(order["blocked"])), _as_attempts(order["tried"]))
            else:
                address = str(ipaddress.ip_address(order["address"]))
                self._meet(str(order["task"]), address, PORTS.validate_python(order["ports"])[:HIGH_PORTS])
        except (ValueError, KeyError, TypeError, OSError, httpx2.HTTPError):  # ValidationError is a ValueError
            return

    def _meet(self, task: str, address: str, ports: list[int]) -> None:
        until = time.monotonic() + LISTEN_SECONDS
        with listening(self._local) as own:
            self._client.answer_peer(task, own, [])
            self._client.answer_peer(task, [], _as_json(try_ports(address, ports)))
            time.sleep(max(0.0, until - time.monotonic()))

    def _tell(self, caller: str, attempts: list[Attempt]) -> None:
        now = time.monotonic()
        if now - self._said.get(caller, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        self._said[caller] = now
        here = f"this machine ({platform.node()}, {self._local})"
        result = high_ports(
            "ports-to-workers", attempts, connects=caller, listens=here, mend=open_here(caller, on_route(caller))
        )
        if result.status == "fail":
            self._say(f"{caller} cannot join yet, and goes on trying\n{result.block()}")


def open_here(peer: str, used: Interface | None) -> dict[str, str]:
    """Commands for this machine's firewall that let `peer` in, with the whole LAN where both are on it."""
    return open_firewall(lan_of(peer, used), port_range([]), firewall_seen())


def _meet_one(client: HubClient, peer: dict[str, str], used: Interface) -> list[Result]:
    address = str(ipaddress.ip_address(peer["address"]))
    here, there = f"this machine ({platform.node()}, {used.address})", f"the worker {peer['name']} ({address})"
    with listening(used.address) as ports:
        asked = client.probe("peer", {"peer": peer["id"], "ports": ports})
        theirs = PORTS.validate_python(asked["ports"])
        if not theirs:
            return []  # it is busy, or leaving
        to_them = try_ports(address, theirs)
        if any(attempt.state == "filtered" for attempt in to_them):
            to_them = try_ports(address, theirs)  # a busy machine may be late to answer
        from_them = _as_attempts(client.probe(f"peer/{asked['task']}", post=False)["tried"])
    mend_there = open_firewall(lan_towards(address, used), port_range([]))
    results = [high_ports("ports-to-workers", to_them, connects=here, listens=there, mend=mend_there)]
    if results[0].status == "fail":
        client.probe("peer-blocked", {"peer": peer["id"], "tried": _as_json(to_them)})
    if from_them:
        mend = open_here(address, used)
        results.append(high_ports("ports-from-workers", from_them, connects=there, listens=here, mend=mend))
    return results


def peer_probes(client: HubClient, used: Interface | None) -> list[Result]:
    """Both ways between this machine and every worker that is there; one result where all is well.

    Raises what HubClient raises.
    """
    peers = client.probe("peers", post=False)["peers"]
    if not peers or used is None:
        return []
    try:
        with ThreadPoolExecutor(len(peers)) as pool:
            found = list(pool.map(lambda peer: _meet_one(client, peer, used), peers))
    except (KeyError, TypeError, ValidationError) as error:
        raise httpx2.RemoteProtocolError(f"the hub's answer makes no sense: {error}") from None
    bad = [result for results in found for result in results if result.status == "fail"]
    names = ", ".join(peer["name"] for peer, results in zip(peers, found, strict=True) if results)
    silent = ", ".join(peer["name"] for peer, results in zip(peers, found, strict=True) if not results)
    seen = [f"{names}: both ways open"] if names else []
    seen += [f"{silent}: not tried, as it did not answer"] if silent else []
    tried = f"connected to random ports of {names or silent}, and had them connect to this machine"
    return bad or [Result("ports-to-workers", "ok", tried, "; ".join(seen))]
