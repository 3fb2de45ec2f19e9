"""The hub's half of the probes: facts to compare, ports to try, a stream to measure, and a place to say what is wrong.

The hub connects only to the address that asks, only to ports from 1024 on, a few at a time, so it cannot be used to
look at other machines. What it opens is bound to the master's address and closed after some seconds.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

import lantrain
from lantrain.cluster.addresses import interfaces
from lantrain.errors import UserError
from lantrain.nodes.hub import Hub
from lantrain.nodes.messages import Facts
from lantrain.probes.mend import firewall_seen, first_ephemeral_port, lan_of, open_firewall, port_range
from lantrain.probes.ports import (
    CONNECT_SECONDS,
    HIGH_PORTS,
    fixed_port,
    high_ports,
    holder_of,
    state_of,
)
from lantrain.probes.result import Attempt, HighPort, State, TriedPort
from lantrain.probes.room import Need, estimate, vocabulary

DOOR_SECONDS = 6.0
"""A listener for a worker's probe is open so long; the worker tries it for CONNECT_SECONDS."""
MAX_DOORS = 60
GROUPS_OF_A_CALLER = 3
MAX_CONNECTS = 8
"""Callers that are connected back to at one time."""
STREAM_BYTES, STREAM_SECONDS = 64 * 2**20, 3.0
BUSY_STREAM_BYTES = 8 * 2**20
"""While ranks are training on this link."""
MAX_STREAMS = 2
CHUNK = os.urandom(256 * 1024)
REPEAT_SECONDS = 60.0
"""The master's log tells of one machine's blocked ports not more often."""

BUSY = "too many probes at one time; try again in some seconds"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ConnectRequest(_Strict):
    """Ports of the caller that the hub shall connect to."""

    ports: Annotated[list[HighPort], Field(min_length=1, max_length=HIGH_PORTS)]


class BlockedRequest(_Strict):
    """What a worker could not reach: the master's log then says what to type there."""

    probe: Literal["train-port", "ports-to-master"]
    ports: Annotated[list[TriedPort], Field(min_length=1, max_length=HIGH_PORTS)]


class Doors:
    """Listeners that are open for callers, for a short time; all on one event loop."""

    def __init__(self) -> None:
        self.open: dict[str, list[list[asyncio.Server]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._shared: dict[int, float] = {}

    async def listen(self, address: str, caller: str, count: int) -> list[int]:
        """Open `count` ports that the kernel picks; the caller's oldest close when it has too many.

        Raises HTTPException 429 when other callers have too many open.
        """
        mine = self.open.setdefault(caller, [])
        while len(mine) >= GROUPS_OF_A_CALLER:
            self._close(mine.pop(0))
        if sum(len(servers) for groups in self.open.values() for servers in groups) + count > MAX_DOORS:
            raise HTTPException(429, BUSY)
        servers = [await self._serve(address, 0) for _ in range(count)]
        mine.append(servers)
        self._later(self._close_after(servers, caller))
        return [int(server.sockets[0].getsockname()[1]) for server in servers]

    async def share(self, address: str, port: int, wanted: Any) -> bool:
        """Open `port` itself, for everyone, while `wanted()` holds. False when a program holds it."""
        fresh = port not in self._shared
        self._shared[port] = time.monotonic() + DOOR_SECONDS
        if fresh:
            try:
                server = await self._serve(address, port)
            except OSError:
                del self._shared[port]
                return False
            self._later(self._close_shared(server, port, wanted))
        return True

    @staticmethod
    async def _serve(address: str, port: int) -> asyncio.Server:
        def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            return await asyncio.start_server(hang_up, sock=listener)
        except OSError:
            listener.close()
            raise

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _close(servers: list[asyncio.Server]) -> None:
        for server in servers:
            server.close()

    async def _close_after(self, servers: list[asyncio.Server], caller: str) -> None:
        try:
            await asyncio.sleep(DOOR_SECONDS)
        finally:
            self._close(servers)
            left = [group for group in self.open.get(caller, []) if group is not servers]
            if left:
                self.open[caller][:] = left
            else:
                self.open.pop(caller, None)

    async def _close_shared(self, server: asyncio.Server, port: int, wanted: Any) -> None:
        try:
            while time.monotonic() < self._shared[port] and wanted():
                await asyncio.sleep(0.1)
        finally:
            server.close()
            del self._shared[port]


async def _connect_back(caller: str, port: int, source: str) -> Attempt:
    local = None if caller.startswith("127.") or caller == "::1" else (source, 0)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(caller, port, local_addr=local)
    except OSError as error:  # TimeoutError is one
        state, _ = state_of(error)
        return Attempt(port, state)
    writer.close()
    return Attempt(port, "open")


async def _stream(size: int) -> AsyncIterator[bytes]:
    until = time.monotonic() + STREAM_SECONDS
    while size > 0 and time.monotonic() < until:
        yield CHUNK[:size]
        size -= len(CHUNK)


class ProbeDesk:
    """What the routes share."""

    def __init__(self, hub: Hub) -> None:
        self.hub, self.doors = hub, Doors()
        self.busy: Counter[str] = Counter()
        self._said: dict[tuple[str, str], float] = {}
        self._needs: dict[int, Need | None] = {}

    def need(self) -> Need | None:
        """What a worker's rank needs; None where the flags cannot be planned (the trainer then says why)."""
        size = vocabulary()  # while the master still prepares its data, another one than later
        if size not in self._needs:
            arguments, world = self.hub.settings.arguments, max(2, self.hub.membership.wanted)
            try:
                self._needs[size] = estimate(arguments, size, world, leader=False)
            except UserError:
                self._needs[size] = None
        return self._needs[size]

    @cached_property
    def firewall(self) -> str:
        """The firewall that can be seen on the master."""
        return firewall_seen()

    @property
    def gathering(self) -> bool:
        """Whether no trainer is, or is about to be, on the train port."""
        return self.hub.membership.phase == "gathering"

    def ask_place(self, kind: str, caller: str, most: int) -> None:
        """Raise HTTPException 429 unless one of `most` places for this kind of work is free, one a caller."""
        if self.busy[f"{kind} {caller}"] or self.busy[kind] >= most:
            raise HTTPException(429, BUSY)

    @contextmanager
    def place(self, kind: str, caller: str) -> Iterator[None]:
        """Hold a place while the body runs."""
        key = f"{kind} {caller}"
        self.busy[key] += 1
        self.busy[kind] += 1
        try:
            yield
        finally:
            self.busy[key] -= 1
            self.busy[kind] -= 1
            self.busy += Counter()  # drops the zeros

    def facts(self) -> Facts:
        """Versions, addresses, needs."""
        import torch

        hub, need = self.hub, self.need()
        return Facts(
            lantrain=lantrain.__version__, code=hub.code, torch=str(torch.__version__), time=time.time(),
            host=platform.node(), address=hub.settings.master_address, train_port=hub.settings.master_port,
            first_ephemeral=first_ephemeral_port(), firewall=self.firewall, running=not self.gathering,
            need=need.parts if need else {}, sends_mib=need.sends if need else 0, **vars(hub.arithmetic),
        )  # fmt: skip

    def say_blocked(self, request: BlockedRequest, caller: str, hub_port: int) -> None:
        """Print in the master's log what has to be typed there for `caller`."""
        now = time.monotonic()
        if now - self._said.get((caller, request.probe), -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        if len(self._said) > 1000:
            self._said.clear()
        self._said[caller, request.probe] = now
        settings = self.hub.settings
        here = next((i for i in interfaces() if i.address == settings.master_address), None)
        ports = port_range([settings.master_port, hub_port])
        mend = open_firewall(lan_of(caller, here), ports, self.firewall)
        attempts = [Attempt(port.port, port.state) for port in request.ports]
        master = f"this machine ({platform.node()}, {settings.master_address}, the master)"
        if request.probe == "train-port":
            result = fixed_port(
                "train-port", attempts[0], connects=caller, listens=master, what="the hub for torchrun", mend=mend
            )
        else:
            result = high_ports("ports-to-master", attempts, connects=caller, listens=master, mend=mend)
        if result.status == "fail":
            self.hub.membership.say(f"{caller} cannot join yet, and goes on trying\n{result.block()}")


def probe_routes(hub: Hub) -> APIRouter:
    """The routes under /probes of `hub`."""
    router, desk = APIRouter(prefix="/probes"), ProbeDesk(hub)

    def caller_of(request: Request) -> str:
        return request.client.host if request.client else ""

    @router.get("/facts")
    def facts() -> Facts:
        return desk.facts()

    @router.post("/listen")
    async def listen(request: Request) -> dict[str, Any]:
        return {"ports": await desk.doors.listen(hub.settings.master_address, caller_of(request), HIGH_PORTS)}

    @router.post("/train-port")
    async def train_port() -> dict[str, Any]:
        port = hub.settings.master_port
        if not desk.gathering:
            return {"listening": False, "holder": "", "why": "a generation is running"}
        if await desk.doors.share(hub.settings.master_address, port, lambda: desk.gathering):
            return {"listening": True, "holder": "", "why": ""}
        return {"listening": False, "holder": holder_of(port) or "a program that cannot be seen", "why": "held"}

    @router.post("/connect")
    async def connect(body: ConnectRequest, request: Request) -> dict[str, Any]:
        caller = caller_of(request)
        desk.ask_place("connect", caller, MAX_CONNECTS)
        with desk.place("connect", caller):
            tries: list[Awaitable[Attempt]] = [
                _connect_back(caller, port, hub.settings.master_address) for port in body.ports
            ]
            attempts = await asyncio.gather(*tries)
        states: dict[int, State] = {attempt.port: attempt.state for attempt in attempts}
        return {"states": states}

    @router.get("/stream")
    async def stream(request: Request) -> StreamingResponse:
        size, caller = STREAM_BYTES if desk.gathering else BUSY_STREAM_BYTES, caller_of(request)
        desk.ask_place("stream", caller, MAX_STREAMS)

        async def guarded() -> AsyncIterator[bytes]:
            with desk.place("stream", caller):
                async for chunk in _stream(size):
                    yield chunk

        return StreamingResponse(guarded(), media_type="application/octet-stream")

    @router.post("/blocked")
    def blocked(body: BlockedRequest, request: Request) -> dict[str, Any]:
        desk.say_blocked(body, caller_of(request), int(request.scope["server"][1]))
        return {}

    return router
