"""The hub over HTTP: the master's one port for joining, reporting, probing and looking, with JSON.

Routes are thin; decisions are those of `membership` and `admission`. Inputs are validated by pydantic models with
limits, and bodies larger than MAX_BODY are refused before they are read.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

import lantrain
from lantrain.errors import UserError
from lantrain.nodes.hub import Hub
from lantrain.nodes.hub_peers import peer_routes
from lantrain.nodes.hub_probes import probe_routes
from lantrain.nodes.messages import BeatRequest, EndRequest, JoinRequest, LeaveRequest

MAX_BODY = 64 * 1024
LOOPBACK = ("127.0.0.1", "::1")


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
