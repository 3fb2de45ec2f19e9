"""The hub: the master's one port for joining, reporting and looking, over HTTP with JSON.

Routes are thin; decisions are those of `membership` and `admission`. Inputs are validated by pydantic models with
limits, and bodies larger than MAX_BODY are refused before they are read.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

import lantrain
from lantrain.cluster.admission import Admission
from lantrain.cluster.hub_peers import PeerDesk, peer_routes
from lantrain.cluster.hub_probes import probe_routes
from lantrain.cluster.membership import Membership, Report
from lantrain.errors import UserError

DEFAULT_PORT = 29501
MAX_BODY = 64 * 1024
MAX_NODES = 256
LOOPBACK = ("127.0.0.1", "::1")


def _printable(text: str) -> str:
    """What nodes say is shown on terminals: no escape sequences, no line breaks."""
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


Name = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_printable)]
Word = Annotated[str, Field(max_length=64), AfterValidator(_printable)]
Text = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NodeInfo(_Strict):
    """What a node says of itself when it joins."""

    version: Name
    code: Word = ""
    torch: Name
    python: Word = ""
    interface: Word = ""
    cores: Annotated[int, Field(ge=1, le=4096)] = 1
    threads: Annotated[int, Field(ge=1, le=4096)] = 1
    memory_mib: Annotated[int, Field(ge=0)] = 0
    gemm_gflops: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    dtype: Word = "float32"
    cpu: Word = ""
    update: Word = ""
    link_mbs: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    round_trip_ms: Annotated[float, Field(ge=0, le=1e6)] = 0.0


class JoinRequest(_Strict):
    """A node asks to take part."""

    name: Name
    info: NodeInfo


class BeatRequest(_Strict):
    """A node's report, twice a second."""

    node: Annotated[str, Field(min_length=1, max_length=64)]
    state: Literal["idle", "running", "stopped", "leaving"]
    generation: Annotated[int, Field(ge=0, le=2**31)] = 0
    step: Annotated[int, Field(ge=0, le=2**40)] = 0
    phase: Word = ""
    outcome: Word = ""
    message: Text = ""


class LeaveRequest(_Strict):
    """A node says goodbye."""

    node: Annotated[str, Field(min_length=1, max_length=64)]


class EndRequest(_Strict):
    """The master's `make down`: every node ends."""

    why: Text = "the master was told to end"


@dataclass
class RunSettings:
    """What the master gives to every node: where torchrun meets, and the trainer's flags."""

    master_address: str
    master_port: int
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Arithmetic:
    """The master's CPU class and the digest of its updates (arithmetic.py), and what ATEN_CPU_CAPABILITY limits it to.

    All empty until the master has measured itself: then nothing is compared.
    """

    cpu: str = ""
    update: str = ""
    capability: str = ""


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

    def __init__(self, membership: Membership, admission: Admission, settings: RunSettings, code: str) -> None:
        self.membership, self.admission, self.settings, self.code = membership, admission, settings, code
        self.run = secrets.token_hex(8)
        self.lock = threading.Lock()
        self.started = time.time()
        self.going_down = False
        self.arithmetic = Arithmetic()
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


def build_app(hub: Hub) -> FastAPI:
    """The HTTP front of `hub`."""
    app = FastAPI(title="lantrain hub", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        address = request.client.host if request.client else ""
        admission = hub.admission
        if not admission.address_allowed(address):
            return JSONResponse({"detail": f"{address} is not in the networks that may join"}, 403)
        if not admission.within_rate(address):
            return JSONResponse({"detail": "too many requests"}, 429)
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MAX_BODY or "transfer-encoding" in request.headers:
            return JSONResponse({"detail": f"a body has a length of at most {MAX_BODY} bytes"}, 413)
        if request.url.path != "/hello" and not admission.token_matches(unquote(request.headers.get("x-token", ""))):
            return JSONResponse({"detail": "the token is missing or wrong"}, 401)
        return await go_on(request)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        # FastAPI's own answer repeats the input, and fails where that is not UTF-8.
        first = error.errors()[0]
        return JSONResponse({"detail": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 422)

    def address_of(request: Request) -> str:
        return request.client.host if request.client else ""

    @app.get("/hello")
    def hello() -> dict[str, Any]:
        return {
            "lantrain": lantrain.__version__, "token": not hub.admission.token_matches(""), "away": hub.going_down,
        }  # fmt: skip

    @app.post("/join")
    def join(body: JoinRequest, request: Request) -> dict[str, Any]:
        return hub.join(body, address_of(request))

    @app.post("/beat")
    def beat(body: BeatRequest, request: Request) -> dict[str, Any]:
        return hub.beat(body, request.headers.get("x-secret", ""))

    @app.post("/leave")
    def leave(body: LeaveRequest, request: Request) -> dict[str, Any]:
        return hub.leave(body, request.headers.get("x-secret", ""))

    @app.get("/status")
    def status(request: Request) -> dict[str, Any]:
        answer = hub.status()
        if answer["over"] and address_of(request) in LOOPBACK:
            hub.end_answered.set()
        return answer

    @app.post("/end")
    def end(body: EndRequest, request: Request) -> dict[str, Any]:
        if address_of(request) not in LOOPBACK:
            raise HTTPException(403, "only the master itself may end the run")
        hub.ask_to_end(body.why)
        return {}

    app.include_router(probe_routes(hub))
    app.include_router(peer_routes(hub))
    return app


class HubServer:
    """The hub's uvicorn in a thread of the launcher."""

    def __init__(self, hub: Hub, hosts: list[str], port: int) -> None:
        """Start serving on `port` of the addresses in `hosts`. Raises UserError when the port is taken."""
        import socket

        sockets = []
        for host in hosts:
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
            except OSError as error:
                raise UserError(
                    f"the hub cannot listen on {host}:{port}: {error.strerror}",
                    f"see who holds it: ss -ltnp 'sport = :{port}'; or choose another: HUB_PORT={port + 10}",
                ) from None
            sockets.append(listener)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        config = uvicorn.Config(
            build_app(hub), log_level="warning", access_log=False, timeout_keep_alive=30, lifespan="off",
            limit_concurrency=512, h11_max_incomplete_event_size=16 * 1024,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=(sockets,), name="hub", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop serving."""
        self.server.should_exit = True
        self.thread.join(timeout=5)
