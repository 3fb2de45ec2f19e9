"""Probes that connect: to the fixed ports, to random high ports in both directions, and who holds a port.

Gloo listens on ports that the kernel picks, on every machine, and any two machines may connect either way; a firewall
that lets only the fixed ports through makes it hang without a word (measured: five times its time-out). So both sides
listen on such ports for a moment, and each tries the other's.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from lantrain.probes.result import Attempt, Result, State

CONNECT_SECONDS = 2.5
"""A LAN answers in milliseconds; the kernel repeats a lost SYN after 1 s, so one may be lost."""
REACH_SECONDS = 4.0
"""For the first connection: that no machine has an address shows only after 3 s of asking for it (ARP)."""
HIGH_PORTS = 3


def state_of(error: BaseException) -> tuple[State, str]:
    """What a failed connect means: refused, unreachable or filtered, and the system's words."""
    if isinstance(error, TimeoutError):
        return "filtered", ""
    number = getattr(error, "errno", None)
    words = getattr(error, "strerror", None) or str(error)
    if number in (errno.ECONNREFUSED, errno.ECONNRESET):
        return "refused", words
    if number in (errno.ETIMEDOUT, errno.EAGAIN):
        return "filtered", words
    return "unreachable", words


def try_connect(address: str, port: int, seconds: float = CONNECT_SECONDS, source: str = "") -> Attempt:
    """Connect once, from `source` where given, and close."""
    try:
        with socket.create_connection((address, port), seconds, (source, 0) if source else None):
            return Attempt(port, "open")
    except OSError as error:
        return Attempt(port, *state_of(error))


def try_ports(address: str, ports: Sequence[int], seconds: float = CONNECT_SECONDS, source: str = "") -> list[Attempt]:
    """Connect to all of `ports` at the same time."""
    if not ports:
        return []
    with ThreadPoolExecutor(len(ports)) as pool:
        return list(pool.map(lambda port: try_connect(address, port, seconds, source), ports))


@contextlib.contextmanager
def listening(address: str, count: int = HIGH_PORTS) -> Iterator[list[int]]:
    """Listen on `count` ports that the kernel picks, while the body runs. The kernel answers; nothing is accepted."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            listener.bind((address, 0))
            listener.listen(8)
            ports.append(int(listener.getsockname()[1]))
        yield ports


def _in_words(attempts: Sequence[Attempt], seconds: float = CONNECT_SECONDS) -> str:
    words = {
        "open": "connected",
        "refused": "refused at once",
        "unreachable": "unreachable",
        "filtered": f"no answer within {seconds:g} s",
    }
    parts = []
    for state in ("filtered", "refused", "unreachable", "open"):
        those = [attempt for attempt in attempts if attempt.state == state]
        if those:
            details = {attempt.detail for attempt in those if attempt.detail and state == "unreachable"}
            detail = f" ({', '.join(sorted(details))})" if details else ""
            parts.append(f"{words[state]}{detail}: port {', '.join(str(attempt.port) for attempt in those)}")
    return "; ".join(parts)


def _firewall(attempts: Sequence[Attempt], listener: str) -> str:
    states = {attempt.state for attempt in attempts} - {"open"}
    verb = "drops" if states == {"filtered"} else "rejects"
    return f"a firewall on {listener} {verb} what comes in on these ports, although a program was listening there"


def high_ports(name: str, attempts: Sequence[Attempt], *, connects: str, listens: str, mend: dict[str, str]) -> Result:
    """The result of connecting from machine `connects` to high ports on which machine `listens` was listening."""
    ports = ", ".join(str(attempt.port) for attempt in attempts)
    tried = f"{connects} connected to {listens}, which was listening on ports {ports}"
    if all(attempt.state == "open" for attempt in attempts):
        return Result(name, "ok", tried, f"{len(attempts)} random ports of {listens} answer")
    means = _firewall(attempts, listens) + "; Gloo uses such ports both ways, and training would hang"
    return Result(name, "fail", tried, _in_words(attempts), means, mend, listens, tuple(attempts))


def fixed_port(name: str, attempt: Attempt, *, connects: str, listens: str, what: str, mend: dict[str, str]) -> Result:
    """The result of connecting from `connects` to a port of `listens`, on which `what` was listening."""
    tried = f"{connects} connected to port {attempt.port} of {listens}, on which {what} was listening"
    if attempt.state == "open":
        return Result(name, "ok", tried, f"port {attempt.port} answers")
    means = _firewall([attempt], listens)
    return Result(name, "fail", tried, _in_words([attempt]), means, mend, listens, (attempt,))


def hub_port(attempt: Attempt, *, master: str, mend: dict[str, str]) -> Result:
    """The result of connecting to the hub, which may not be up, for REACH_SECONDS."""
    tried = f"a connection to port {attempt.port} of {master}"
    if attempt.state == "open":
        return Result("hub-port", "ok", tried, f"port {attempt.port} answers")
    means, commands, where = {
        "refused": (
            "the machine is there, but no hub: the master is not up, it printed another address, or a firewall rejects "
            "the port",
            {"": "make up-master"}, master,
        ),
        "unreachable": (
            "no way leads there: a wrong address, another network, or a firewall that rejects the port",
            {"": f"ip route get {master}"}, "this machine",
        ),
        "filtered": (
            "the machine is off, the address is wrong, or its firewall drops the port", mend, master,
        ),
    }[attempt.state]  # fmt: skip
    return Result("hub-port", "fail", tried, _in_words([attempt], REACH_SECONDS), means, commands, where)


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of all addresses now, as torchrun's store does."""
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            if error.errno == errno.EACCES:
                raise
    return True


def holder_of(port: int) -> str:
    """Who listens on `port`: process name, id, command line; "" where this cannot be seen (a container, no rights)."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                command = " ".join(process.cmdline())[:80]
                return f"{process.name()}, process {process.pid}: {command}"
    return ""


def port_held(ports: dict[str, int], *, where: str = "this machine", free: Callable[[int], bool] = is_free) -> Result:
    """Whether the ports of this master, by the name of their setting, can be listened on."""
    tried = "listening on " + ", ".join(f"{port} ({setting})" for setting, port in ports.items())
    for setting, port in ports.items():
        if free(port):
            continue
        holder = holder_of(port)
        seen = f"port {port} is held by " + (holder or "a program that cannot be seen from here")
        means = "two programs cannot listen on one port: an earlier run that was not ended, or another service"
        mend = {"see who": f"sudo ss -ltnp 'sport = :{port}'", "use another": f"make up-master {setting}={port + 100}"}
        return Result("port-held", "fail", tried, seen, means, mend, where)
    return Result("port-held", "ok", tried, ", ".join(str(port) for port in ports.values()) + " are free")
