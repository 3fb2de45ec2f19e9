"""Probes of this machine's own network: interface, hostname, second card, VPN, container, address."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from lantrain.cluster.addresses import Interface, interfaces
from lantrain.cluster.interfaces import interface_with_address, local_address_towards
from lantrain.errors import UserError
from lantrain.probes.mend import in_container
from lantrain.probes.result import Result

NAME_SECONDS = 3.0
"""A name server that is gone takes the resolver much longer."""


def is_loopback(address: str) -> bool:
    """Whether `address` is one of 127.0.0.0/8, or ::1."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def on_route(master: str, have: Sequence[Interface] | None = None) -> Interface | None:
    """The interface and address from which packets to `master` leave; None where no route leads there."""
    try:
        local = local_address_towards(master)
    except UserError:
        return None
    have = interfaces() if have is None else have
    return next((interface for interface in have if interface.address == local), None)


def route(master: str) -> Result:
    """Which interface the kernel uses for `master`; loopback is refused for a master that is not this machine."""
    tried = f"asked the kernel for its route to {master}"
    try:
        local = local_address_towards(master)
    except UserError as error:
        means = "this machine is not connected to the master's network"
        return Result("route", "fail", tried, error.message, means, {"": f"ip route get {master}"}, "this machine")
    card = interface_with_address(local)
    mine = {interface.address for interface in interfaces()}
    if is_loopback(local) and master not in mine:
        return Result(
            "route", "fail", tried, f"{master} leads to loopback ({local})",
            "that is this machine itself: other machines cannot be reached over it",
            {"": "make up-worker HOST=<the address that the master printed>"}, "this machine",
        )  # fmt: skip
    if card is None:
        return Result("route", "warn", tried, f"{local} belongs to no interface", "Gloo makes its own choice")
    self_note = ", which is this machine itself" if master in mine else ""
    return Result("route", "ok", tried, f"{card}, {local}, to {master}{self_note}")


def refuse_loopback(host: str, address: str, answers: Callable[[], bool]) -> None:
    """Raise UserError when the name `host` leads to this machine itself and no hub `answers` here.

    Whoever types 127.0.0.1 or localhost means it: a worker on the master's machine, which may start before it.
    """
    if is_loopback(address) and host not in (address, "localhost") and not answers():
        raise UserError(
            f"HOST={host} leads to {address}, this machine itself, and no master is up here",
            "give the address that the master printed: make up-worker HOST=192.168.1.36",
        )


def _resolve(name: str) -> list[str]:
    return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})


def _within(seconds: float, ask: Callable[[], list[str]]) -> list[str] | None:
    """The answer, or None when it takes longer (the thread is left behind: the resolver cannot be interrupted)."""
    answer: list[list[str]] = []

    def run() -> None:
        try:
            answer.append(ask())
        except OSError:
            answer.append([])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


def hostname(name: str = "", resolve: Callable[[str], list[str]] = _resolve) -> Result:
    """What this machine's own name resolves to: a note only, as the interface is chosen by the route."""
    name = name or platform.node()
    tried = f"resolved this machine's own name, {name}"
    found = _within(NAME_SECONDS, lambda: resolve(name))
    handled = "Gloo would have used it; here the interface is chosen by the route, so nothing has to be changed"
    if found is None:
        return Result("hostname", "ok", tried, f"{name}: no answer within {NAME_SECONDS:g} s (not needed)", handled)
    if not found:
        return Result("hostname", "ok", tried, f"{name} does not resolve (not needed)", handled)
    if all(is_loopback(address) for address in found):
        return Result("hostname", "ok", tried, f"{name} is {', '.join(found)}, loopback (not used)", handled)
    return Result("hostname", "ok", tried, f"{name} is {', '.join(found)}")


def same_subnet(master: str, have: Sequence[Interface] | None = None, used: Interface | None = None) -> Result:
    """Whether two interfaces have addresses of one subnet, the one that `master` is on before others."""
    have = [i for i in (interfaces() if have is None else have) if i.kind in ("lan", "vpn")]
    used = used or on_route(master, have)
    tried = "compared the networks of " + ", ".join(f"{i.name} {i.address}" for i in have)
    target = ipaddress.ip_address(master)
    twins = [
        (one, other)
        for index, one in enumerate(have)
        for other in have[index + 1 :]
        if one.name != other.name and one.network.overlaps(other.network)
    ]
    if not twins:
        return Result("same-subnet", "ok", tried, "every interface has a subnet of its own")
    one, other = min(twins, key=lambda twin: target not in twin[0].network)
    spare = one if used is not None and other.name == used.name else other
    kept = other if spare is one else one
    return Result(
        "same-subnet", "warn", tried,
        f"{one.name} ({one.address}) and {other.name} ({other.address}) are both on {kept.network}",
        f"packets may leave by {kept.name} and be answered on {spare.name} (an old Wi-Fi lease beside a cable); "
        "it works until one of them goes",
        {"": f"nmcli device disconnect {spare.name}"}, "this machine",
    )  # fmt: skip


def vpn(master: str, have: Sequence[Interface] | None = None, used: Interface | None = None) -> Result:
    """Whether the route to `master` goes through a VPN interface."""
    have = interfaces() if have is None else have
    used = used or on_route(master, have)
    tunnels = sorted({interface.name for interface in have if interface.kind == "vpn"})
    tried = f"looked for VPN interfaces, and at the route to {master}"
    if used is not None and used.kind == "vpn":
        return Result(
            "vpn", "warn", tried, f"the route to {master} goes through {used.name}",
            "gradients would be encrypted and may take the way over the internet: many times slower",
            {"": "make up-worker HOST=<the master's LAN address>"}, "this machine",
        )  # fmt: skip
    return Result("vpn", "ok", tried, f"{', '.join(tunnels)} not used" if tunnels else "none")


def _uid_map(file: Path = Path("/proc/self/uid_map")) -> str:
    try:
        return " ".join(file.read_text().split())
    except OSError:
        return ""


def _is_bridged(name: str, root: Path = Path("/sys/class/net")) -> bool:
    """Whether `name` is one end of a pair whose other end is in another network namespace."""
    try:
        return (root / name / "iflink").read_text() != (root / name / "ifindex").read_text()
    except OSError:
        return False


def container_network(
    *, inside: bool | None = None, kernel: str = "", uid_map: str | None = None,
    have: Sequence[Interface] | None = None, bridged: Callable[[str], bool] = _is_bridged,
) -> Result:  # fmt: skip
    """Whether this container's host network is the machine's own; Docker Desktop and rootless Docker have another."""
    inside = in_container() if inside is None else inside
    kernel = (kernel or os.uname().release).lower()
    have = interfaces() if have is None else have
    tried = "looked at the kernel's name, the user namespace and the interfaces"
    instead = {"": "use Docker Engine on Linux, not in a virtual machine, or run without Docker (README, By hand)"}
    if not inside:
        return Result("container-network", "ok", tried, "not in a container")
    if "linuxkit" in kernel:
        return Result(
            "container-network", "fail", tried, f"Docker Desktop (kernel {kernel})",
            "the host network is that of Docker Desktop's virtual machine: other machines cannot connect to it",
            instead, "this machine",
        )  # fmt: skip
    if any(i.name == "tap0" and i.address.startswith("10.0.2.") for i in have):
        return Result(
            "container-network", "fail", tried, "rootless Docker (tap0 on 10.0.2.0/24)",
            "the host network is that of rootless Docker's own namespace: other machines cannot connect to it",
            instead, "this machine",
        )  # fmt: skip
    if "microsoft" in kernel:
        return Result(
            "container-network", "warn", tried, f"WSL (kernel {kernel})",
            "only with mirrored networking can other machines connect here",
            {"": "add networkingMode=mirrored to [wsl2] in .wslconfig, then: wsl --shutdown"}, "this machine (Windows)",
        )  # fmt: skip
    own = (_uid_map() if uid_map is None else uid_map) == "0 0 4294967295"
    pairs = [i.name for i in have if i.kind == "lan" and bridged(i.name)]
    lan = [i.name for i in have if i.kind == "lan"]
    if lan and len(pairs) == len(lan):
        return Result(
            "container-network", "warn", tried, f"{', '.join(pairs)} is a bridge's, not the machine's",
            "machines outside cannot connect here unless the bridge is theirs",
            {"": "start with compose.multinode.yaml (network_mode: host)"}, "this machine",
        )  # fmt: skip
    return Result("container-network", "ok", tried, "the machine's own" + ("" if own else ", in a user namespace"))


def address(here: Interface) -> Result:
    """The address that the master would tell the workers, `here`."""
    tried = "chose the LAN address of the default route"
    others = [i for i in interfaces() if i.kind == "lan" and i.address != here.address]
    note = ", not " + ", ".join(f"{i.address} ({i.name})" for i in others) if others else ""
    if here.kind != "lan":
        return Result(
            "address", "warn", tried, f"{here.address} is on {here.name}, a {here.kind} interface",
            "machines of the LAN may not reach it", {"": "make up-master ADDRESS=<a LAN address>"}, "this machine",
        )  # fmt: skip
    return Result("address", "ok", tried, f"{here.address} on {here.name}{note}")
