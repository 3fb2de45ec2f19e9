"""The hub's state: who takes part, what the run is, what a node is to do next. hub_server.py serves it over HTTP."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException

import lantrain
from lantrain.nodes.admission import Admission
from lantrain.nodes.members import MAX_NODES, Report
from lantrain.nodes.membership import Membership
from lantrain.nodes.messages import BeatRequest, JoinRequest, LeaveRequest
from lantrain.nodes.peer_desk import PeerDesk

DEFAULT_PORT = 29501


@dataclass
class RunSettings:
    """What the master gives to every node: where torchrun meets, and the trainer's flags."""

    master_address: str
    master_port: int
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Arithmetic:
    """The master's CPU class and the digest of its updates (arithmetic.py); empty where nothing is to be compared."""

    cpu: str = ""
    update: str = ""


def shares_for(arguments: list[str], world: int, rates: list[float]) -> list[str]:
    """`arguments` for `world` ranks: the user's --shares if it fits, else --rates to start from (GFLOP/s a rank).

    A --shares for another number of ranks is dropped: a lost node must not end the run. Without a rate for every rank
    the shares are equal at first.
    """
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--shares" or word.startswith("--shares="):
            value = word.partition("=")[2] if "=" in word else next(words, "")
            if value.count(",") + 1 == world:
                kept.append(f"--shares={value}")
        else:
            kept.append(word)
    if world > 1 and len(rates) == world and min(rates) > 0 and not any(w.startswith("--shares=") for w in kept):
        kept.append("--rates=" + ",".join(f"{rate:g}" for rate in rates))
    return kept


class Hub:
    """The hub's state behind one lock: requests come on uvicorn's thread, the master's own loop on another."""

    def __init__(
        self, membership: Membership, admission: Admission, settings: RunSettings, code: str,
        arithmetic: Arithmetic = Arithmetic(),
    ) -> None:  # fmt: skip
        self.membership, self.admission, self.settings, self.code = membership, admission, settings, code
        self.arithmetic = arithmetic
        self.run = secrets.token_hex(8)
        self.lock = threading.Lock()
        self.started = time.time()
        self.going_down = False
        self.peers = PeerDesk()
        self.end_asked = ""
        self.end_answered = threading.Event()

    def _node(self, node_id: str, secret: str) -> Any:
        node = self.membership.nodes.get(node_id)
        if node is not None and not hmac.compare_digest(secret.encode(), node.secret.encode()):
            raise HTTPException(403, "wrong secret for this node")
        return node

    def join(self, request: JoinRequest, address: str) -> dict[str, Any]:
        """Admit a node, or refuse it with the item that differs (invariant 6)."""
        ours = {"version": lantrain.__version__, "code": self.code}
        for item, value in ours.items():
            theirs = getattr(request.info, item)
            if value and theirs != value:
                raise HTTPException(409, f"{item} differs: {theirs or 'unknown'} there, {value} on the master")
        if self.arithmetic.update and request.info.update != self.arithmetic.update:
            cpus = f"{request.info.cpu or 'unknown'} there, {self.arithmetic.cpu} on the master"
            raise HTTPException(412, f"the optimizer's bits differ: {cpus}")
        with self.lock:
            if len(self.membership.nodes) >= MAX_NODES:
                raise HTTPException(503, f"there are {MAX_NODES} nodes already")
            node = self.membership.join(request.name, address, request.info.model_dump())
        return {"node": node.id, "secret": node.secret, "run": self.run}

    def beat(self, request: BeatRequest, secret: str) -> dict[str, Any]:
        """Take a report, give an order; `run` orders carry everything that torchrun needs."""
        report = Report(**request.model_dump(exclude={"node"}))
        with self.lock:
            if self.going_down:
                return {"order": "away"}
            self._node(request.node, secret)
            order = self.membership.beat(request.node, report)
        asked = self.peers.orders_for(request.node)
        return self.with_settings({**order, "peers": asked} if asked else order)

    def with_settings(self, order: dict[str, Any]) -> dict[str, Any]:
        """An order that starts a generation, with all that torchrun needs; others as they are."""
        if order["order"] not in ("run", "drain"):
            return order
        arguments = shares_for(self.settings.arguments, int(order["world"]), order.pop("rates"))
        return {**order, **vars(self.settings), "arguments": arguments, "run": self.run}

    def leave(self, request: LeaveRequest, secret: str) -> dict[str, Any]:
        """Forget a node that has ended its trainer."""
        with self.lock:
            self._node(request.node, secret)
            self.membership.leave(request.node)
        return {}

    def ask_to_end(self, why: str) -> None:
        """Have the master's loop end the run: a step boundary and a checkpoint come first."""
        self.end_asked = why or "told to end"

    def status(self) -> dict[str, Any]:
        """The run as `make status` shows it. No secrets."""
        with self.lock:
            m, now = self.membership, self.membership.clock()
            nodes = [
                {
                    "name": node.name, "address": node.address, "state": node.state, "step": node.step,
                    "phase": node.phase, "silent_s": round(now - node.last_seen, 1), **node.info,
                    "rank": m.members.index(node.id) if node.id in m.members else None,
                    "share": m.share_of(node.id),
                }
                for node in m.nodes.values()
            ]  # fmt: skip
            return {
                "run": self.run, "phase": m.phase, "generation": m.generation, "wanted": m.wanted, "why": m.why,
                "up_s": round(time.time() - self.started), "nodes": nodes, "over": self._over(),
            }  # fmt: skip

    def _over(self) -> bool:
        """Whether the run has ended and every worker that could hear it has said goodbye."""
        return self.membership.phase == "ended" and not self.membership.still_to_leave()

    def over(self) -> bool:
        """The same, for callers without the lock."""
        with self.lock:
            return self._over()
