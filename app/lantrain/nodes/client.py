"""A worker's side of the hub: asking it, and saying why it cannot be reached."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx2

from lantrain.errors import UserError
from lantrain.nodes.members import Report
from lantrain.nodes.messages import BeatRequest, NodeInfo
from lantrain.probes.here import on_route
from lantrain.probes.mend import lan_towards, open_firewall, port_range
from lantrain.probes.ports import REACH_SECONDS

REQUEST_SECONDS = 2.0
"""A fresh connection after so long: after a link flap TCP's own retries come up to 13 s late."""
PROBE_SECONDS = 8.0
"""The hub itself connects for up to 2.5 s, and its machine may be busy."""


def why_unreachable(address: str, port: int, seconds: float = REACH_SECONDS) -> str:
    """Try a TCP connection and tell in words what happened: refused, unreachable, filtered, or nothing wrong ("")."""
    try:
        with socket.create_connection((address, port), timeout=seconds):
            return ""
    except TimeoutError:
        network = lan_towards(address, on_route(address))
        mend = open_firewall(network, port_range([port]))["ufw"]
        return (
            f"no answer from {address}:{port}: a firewall there drops it, or the machine is off; on the master: {mend} "
            "(for other firewalls: docs/troubleshooting.md)"
        )
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            return f"{address} refuses port {port}: the master is not up yet (on it: make up-master)"
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return f"{address} cannot be reached: wrong address, another network, or its firewall ({error.strerror})"
        return f"{address}:{port}: {error.strerror or error}"


class HubRefused(UserError):
    """The hub answered, and the answer is no; asking again would not help."""


class HubClient:
    """Speaks to the hub of one master."""

    def __init__(self, address: str, port: int, token: str = "") -> None:
        host = f"[{address}]" if ":" in address else address
        headers = {"x-token": quote(token)} if token else {}
        self.address, self.port = address, port
        self._http = httpx2.Client(
            base_url=f"http://{host}:{port}", headers=headers, timeout=REQUEST_SECONDS, trust_env=False
        )
        self.node, self.secret, self.run = "", "", ""

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """One request. Raises HubRefused for a no, and httpx2.HTTPError when there was no answer."""
        answer = self._http.request(method, path, **options)
        try:
            value = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            # uvicorn's own 503 when it is busy, a proxy, or another program.
            raise httpx2.RemoteProtocolError(f"{answer.status_code} without JSON: not lantrain's hub, or it is busy")
        if answer.status_code in (401, 403, 409, 412, 413, 422, 503):
            detail = value.get("detail", "")
            mend = {
                401: "give the master's token: TOKEN=...",
                403: "on the master: make up-master ALLOW=<this network>",
                412: "make image; if that does not help, test this machine's memory and CPU, or leave it out",
                409: "use the same version on both machines: git pull && make image",
            }.get(answer.status_code, "see the master's log: make logs")
            raise HubRefused(f"the master says no: {detail or answer.status_code}", mend)
        answer.raise_for_status()
        return value

    def wait(
        self, seconds: float, say: Callable[[str], None], pause: Callable[[float], bool], every: float = 15.0
    ) -> dict[str, Any] | None:
        """Wait until the hub answers, with a line every `every` seconds that says what is in the way.

        `pause` sleeps and returns True when this node must stop; then None is returned. Raises UserError after
        `seconds`.
        """
        start, next_line = time.monotonic(), 0.0
        while True:
            why = "it is going down and will return"
            try:
                hello = self._ask("GET", "/hello")
                if "lantrain" not in hello:
                    why = f"what answers at {self.address}:{self.port} is not lantrain's hub"
                elif not hello.get("away"):
                    return hello
            except httpx2.TransportError as error:
                why = why_unreachable(self.address, self.port) or f"it does not answer yet ({error})"
            except (httpx2.HTTPError, OSError) as error:
                why = f"what answers at {self.address}:{self.port} is not lantrain's hub ({error})"
            waited = time.monotonic() - start
            if waited > seconds:
                raise UserError(f"the master was not there within {seconds:.0f} s: {why}", "make doctor HOST=...", 1)
            if waited >= next_line:
                say(f"waiting for the master ({waited:.0f} s of {seconds:.0f}): {why}")
                next_line = waited + every
            if pause(1.0):
                return None

    def join(self, name: str, info: NodeInfo) -> None:
        """Ask for admission; keeps node id and secret."""
        answer = self._ask("POST", "/join", json={"name": name, "info": info.model_dump()})
        self.node, self.secret, self.run = answer["node"], answer["secret"], answer["run"]

    def beat(self, report: Report) -> dict[str, Any]:
        """Report; returns the order."""
        body = BeatRequest(
            node=self.node, state=report.state, generation=report.generation, step=report.step, phase=report.phase,
            outcome=report.outcome, message="".join(c if c.isprintable() else " " for c in report.message[:1000]),
        )  # fmt: skip
        return self._ask("POST", "/beat", json=body.model_dump(), headers={"x-secret": self.secret})

    def leave(self) -> None:
        """Say goodbye, if there is somebody to hear it."""
        try:
            self._ask("POST", "/leave", json={"node": self.node}, headers={"x-secret": self.secret})
        except (httpx2.HTTPError, UserError, OSError):
            return

    def hello(self) -> dict[str, Any]:
        """The hub's shortest answer."""
        return self._ask("GET", "/hello")

    def probe(
        self, name: str, body: dict[str, Any] | None = None, *, post: bool = True, seconds: float = PROBE_SECONDS
    ) -> dict[str, Any]:
        """One question of the probes (hub_probes.py)."""
        options: dict[str, Any] = {"timeout": seconds}
        if post:
            options["json"] = body or {}
        return self._ask("POST" if post else "GET", f"/probes/{name}", **options)

    def answer_peer(self, task: str, ports: list[int], tried: list[dict[str, Any]]) -> None:
        """What this worker has done of a probe that the hub asked for (hub_peers.py)."""
        body = {"node": self.node, "task": task, "ports": ports, "tried": tried}
        self._ask("POST", "/probes/peer-answer", json=body, headers={"x-secret": self.secret}, timeout=PROBE_SECONDS)

    @contextlib.contextmanager
    def stream(self) -> Iterator[Iterator[bytes]]:
        """The hub's stream of bytes for measuring the link. Raises httpx2.HTTPError."""
        with self._http.stream("GET", "/probes/stream", timeout=PROBE_SECONDS) as answer:
            answer.raise_for_status()
            yield answer.iter_raw()

    def status(self) -> dict[str, Any]:
        """The run as the hub sees it."""
        return self._ask("GET", "/status")

    def end(self, why: str) -> None:
        """Tell every node to end (from the master itself only)."""
        self._ask("POST", "/end", json={"why": why})
