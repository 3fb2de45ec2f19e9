"""Questions of one worker to another, on their way through the hub (hub_peers.py)."""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException

from lantrain.probes.result import TriedPort

MAX_ASKS = 64
KEEP_SECONDS = 60.0


@dataclass
class Ask:
    """What one caller wants of one worker, and what has come of it."""

    caller: str
    node: str
    since: float = field(default_factory=time.monotonic)
    ports: list[int] | None = None
    tried: list[TriedPort] | None = None


class PeerDesk:
    """Questions on their way. Used by the hub's threads and its event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: dict[str, list[dict[str, Any]]] = {}
        self.asks: dict[str, Ask] = {}

    def orders_for(self, node: str) -> list[dict[str, Any]]:
        """What `node` has to do, handed over once."""
        with self._lock:
            return self._orders.pop(node, [])

    def order(self, node: str, what: dict[str, Any]) -> None:
        """Have `node` do something when it beats next."""
        with self._lock:
            waiting = self._orders.setdefault(node, [])
            waiting.append(what)
            del waiting[:-MAX_ASKS]

    def ask(self, caller: str, node: str, ports: list[int]) -> str:
        """Have `node` listen, and connect to `ports` of `caller`. Raises HTTPException 429 when there are too many."""
        now = time.monotonic()
        self.asks = {task: ask for task, ask in self.asks.items() if now - ask.since < KEEP_SECONDS}
        if len(self.asks) >= MAX_ASKS:
            raise HTTPException(429, "too many probes at one time; try again in some seconds")
        task = secrets.token_hex(8)
        self.asks[task] = Ask(caller, node)
        self.order(node, {"task": task, "address": caller, "ports": ports})
        return task
