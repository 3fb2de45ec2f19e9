"""Cleaning the address that a person typed, and choosing the one that others should type."""

from __future__ import annotations

import ipaddress
import re
import socket
import unicodedata
from dataclasses import dataclass

import psutil

from lantrain.errors import LOST_PEER_EXIT, USER_ERROR_EXIT, UserError

VIRTUAL = re.compile(r"^(docker|br-|veth|virbr|vmnet|vboxnet|cni|flannel|cali|podman|lxc|lxdbr)")
VPN = re.compile(r"^(tailscale|wg|tun|tap|zt|ppp|utun|nebula|ts\d)")


def clean_host(text: str | None) -> str:
    """The host in `text` without what sticks to it when copied: blanks, quotes, CR, brackets, a scheme, a port.

    Raises UserError when nothing is left or it cannot be a name or an address: an empty HOST must never become this
    machine itself.
    """
    host = "".join(c for c in (text or "") if unicodedata.category(c) not in ("Cc", "Cf")).strip(" \t'\"`“”‘’<>")
    host = re.sub(r"^[a-z]+://([^/]*).*$", r"\1", host, flags=re.IGNORECASE).rstrip("/").strip()
    if host.startswith("[") and "]" in host:
        host = host[1 : host.index("]")]
    elif re.fullmatch(r"[^:]+:\d+", host):
        host = host.split(":")[0]
    if not host:
        raise UserError("HOST is empty", "give the master's address: make up-worker HOST=192.168.1.36")
    try:
        address = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        label = r"(?!-)[A-Za-z0-9_-]{1,63}"
        if not re.fullmatch(rf"{label}(\.{label})*\.?", host) or len(host) > 253 or re.fullmatch(r"[\d.]+", host):
            raise UserError(
                f"HOST={host!r} is neither a name nor an address", "make up-worker HOST=192.168.1.36"
            ) from None
        return host
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise UserError(f"HOST={host} is no machine's address", "make up-worker HOST=192.168.1.36")
    return host


def resolve(host: str) -> str:
    """The IPv4 address of `host`. Raises UserError when it has none, with exit code 1 where the name service did not
    answer: a machine that is starting up may have none yet.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"HOST={host} does not resolve: {reason}",
            "use the address that the master printed: make up-worker HOST=...",
            LOST_PEER_EXIT if getattr(error, "errno", None) == socket.EAI_AGAIN else USER_ERROR_EXIT,
        ) from None
    addresses = [str(entry[4][0]) for entry in found if entry[0] == socket.AF_INET]
    if not addresses:
        raise UserError(
            f"HOST={host} has only an IPv6 address ({found[0][4][0]}), and the machines of a run meet over IPv4",
            "give the IPv4 address that the master printed: make up-worker HOST=192.168.1.36",
        )
    return addresses[0]


@dataclass(frozen=True)
class Interface:
    """An address of this machine with the interface it is on."""

    name: str
    address: str
    network: ipaddress.IPv4Network

    @property
    def kind(self) -> str:
        """lan, vpn, virtual or loopback, by name and address."""
        if ipaddress.ip_address(self.address).is_loopback:
            return "loopback"
        if VPN.match(self.name):
            return "vpn"
        return "virtual" if VIRTUAL.match(self.name) else "lan"


def interfaces() -> list[Interface]:
    """The IPv4 addresses of this machine's interfaces that are up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return [
        Interface(name, entry.address, ipaddress.IPv4Network(f"{entry.address}/{entry.netmask}", strict=False))
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family == socket.AF_INET and entry.netmask
    ]


def default_route_interface(table: str | None = None) -> str | None:
    """Interface of the IPv4 default route with the lowest metric, from the kernel's table; None without one."""
    if table is None:
        try:
            with open("/proc/net/route") as file:
                table = file.read()
        except OSError:
            return None
    routes = [line.split() for line in table.splitlines()[1:]]
    default = [(int(r[6]), r[0]) for r in routes if len(r) > 7 and r[1] == "00000000" and r[7] == "00000000"]
    return min(default)[1] if default else None


def own_address(wanted: str = "") -> Interface:
    """The address under which other machines reach this one: `wanted`, or the LAN address of the default route, or the
    only LAN address. Raises UserError when there is none, or several and no way to choose.
    """
    candidates = interfaces()
    if wanted:
        for interface in candidates:
            if wanted in (interface.address, interface.name):
                return interface
        have = ", ".join(f"{i.address} ({i.name})" for i in candidates)
        raise UserError(f"ADDRESS={wanted} is not this machine's", f"it has {have}")
    lan = [interface for interface in candidates if interface.kind == "lan"]
    if not lan:
        have = ", ".join(f"{i.address} ({i.name})" for i in candidates)
        mend = "connect a network, or choose one with ADDRESS=..."
        raise UserError(f"no LAN address found, only {have}", mend, LOST_PEER_EXIT)  # the lease may be still to come
    route = default_route_interface()
    for interface in lan:
        if interface.name == route:
            return interface
    private = [interface for interface in lan if ipaddress.ip_address(interface.address).is_private]
    return (private or lan)[0]
