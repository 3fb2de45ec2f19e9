"""The hub between two workers: it tells one that joins where the others are, and has them listen and connect.

Gloo connects every pair of machines. A worker reaches only the hub, so the hub hands what is asked of another worker to
that one with the answer to its next beat (probes/between.py does it there). Workers connect only to the address of the
one that joins, as the hub sees it, on ports from 1024 on.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from lantrain.nodes.hub import Hub
from lantrain.nodes.peer_desk import Ask
from lantrain.probes.ports import HIGH_PORTS
from lantrain.probes.result import HighPort, TriedPort

ANSWER_SECONDS = 5.0
"""A worker beats twice a second, and tries to connect for 2.5 s."""

Ports = Annotated[list[HighPort], Field(max_length=HIGH_PORTS)]
Id = Annotated[str, Field(min_length=1, max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PeerRequest(_Strict):
    """The caller listens on `ports`; the worker `peer` shall listen, and connect to them."""

    peer: Id
    ports: Ports


class PeerAnswer(_Strict):
    """What that worker has done: it listens on `ports`, or has tried the caller's."""

    node: Id
    task: Id
    ports: Ports = []
    tried: Annotated[list[TriedPort], Field(max_length=HIGH_PORTS)] = []


class PeerBlocked(_Strict):
    """The caller could not reach these ports of `peer`: its log then says what to type there."""

    peer: Id
    tried: Annotated[list[TriedPort], Field(min_length=1, max_length=HIGH_PORTS)]


def peer_routes(hub: Hub) -> APIRouter:
    """The routes between workers, under /probes of `hub`."""
    router, desk = APIRouter(prefix="/probes"), hub.peers

    def caller_of(request: Request) -> str:
        return request.client.host if request.client else ""

    def others(caller: str) -> list[dict[str, str]]:
        with hub.lock:
            nodes, master = list(hub.membership.nodes.values()), hub.membership.master
        return [
            {"id": node.id, "name": node.name, "address": node.address}
            for node in nodes
            if node is not master and node.address not in (caller, hub.settings.master_address, "127.0.0.1", "::1")
        ]

    def of_caller(task: str, caller: str) -> Ask:
        ask = desk.asks.get(task)
        if ask is None or ask.caller != caller:
            raise HTTPException(404, "no such question")
        return ask

    async def until(ready: Any) -> None:
        end = time.monotonic() + ANSWER_SECONDS
        while not ready() and time.monotonic() < end:
            await asyncio.sleep(0.05)

    @router.get("/peers")
    def peers(request: Request) -> dict[str, Any]:
        return {"peers": others(caller_of(request))}

    @router.post("/peer")
    async def peer(body: PeerRequest, request: Request) -> dict[str, Any]:
        caller = caller_of(request)
        if body.peer not in [other["id"] for other in others(caller)]:
            raise HTTPException(404, "no such worker")
        task = desk.ask(caller, body.peer, body.ports)
        ask = desk.asks[task]
        await until(lambda: ask.ports is not None)
        return {"task": task, "ports": ask.ports or []}

    @router.get("/peer/{task}")
    async def tried(task: str, request: Request) -> dict[str, Any]:
        ask = of_caller(task, caller_of(request))
        await until(lambda: ask.tried is not None)
        return {"tried": [port.model_dump() for port in ask.tried or []]}

    @router.post("/peer-answer")
    def answer(body: PeerAnswer, request: Request) -> dict[str, Any]:
        with hub.lock:
            known = hub._node(body.node, request.headers.get("x-secret", ""))
        ask = desk.asks.get(body.task)
        if known is not None and ask is not None and ask.node == body.node:
            if ask.ports is None:
                ask.ports = body.ports
            else:
                ask.tried = body.tried
        return {}

    @router.post("/peer-blocked")
    def blocked(body: PeerBlocked, request: Request) -> dict[str, Any]:
        caller = caller_of(request)
        if body.peer in [other["id"] for other in others(caller)]:
            desk.order(body.peer, {"blocked": caller, "tried": [port.model_dump() for port in body.tried]})
        return {}

    return router
