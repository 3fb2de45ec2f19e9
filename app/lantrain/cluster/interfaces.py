"""Choosing the network interface by the kernel's own route.

Gloo binds to the address that the host's name resolves to. On Debian and Ubuntu that is 127.0.1.1, and the peers
then wait for each other beyond their own time-outs; with two cards or a VPN it is whichever comes first. The route to
the master is what the packets will really take, so it decides.
"""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from lantrain.errors import LOST_PEER_EXIT, UserError


def local_address_towards(host: str, port: int = 29500) -> str:
    """This machine's address on the route to `host`: a connected UDP socket asks the kernel and sends nothing.

    Raises UserError when `host` does not resolve or no route leads there.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise UserError(
            f"the master's address {host!r} does not resolve: {error.strerror}",
            "give its IP address, for example --master_addr=192.168.1.36",
        ) from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise UserError(
                f"no network route to the master at {host} ({address[0]}): {error.strerror}",
                "check that this machine is connected: ip route get " + str(address[0]),
                LOST_PEER_EXIT,
            ) from None
        return str(probe.getsockname()[0])


def interface_with_address(address: str) -> str | None:
    """Name of the interface that holds `address`, or None."""
    wanted = ipaddress.ip_address(address.split("%")[0])
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if ipaddress.ip_address(entry.address.split("%")[0]) == wanted:
                return str(name)
    # Every address of 127.0.0.0/8 is this machine's, whether it is listed or not (127.0.1.1 never is).
    return "lo" if wanted.is_loopback and "lo" in psutil.net_if_addrs() else None


def choose_interface(master: str) -> tuple[str | None, str]:
    """Interface for Gloo and the reason. A GLOO_SOCKET_IFNAME that is already set is kept if it exists here.

    Returns (None, reason) when the route's address belongs to no interface; Gloo then uses its own choice.
    Raises UserError for an interface that this machine does not have.
    """
    given = os.environ.get("GLOO_SOCKET_IFNAME", "").strip()
    names = psutil.net_if_addrs()
    if given:
        missing = [name for name in given.split(",") if name not in names]
        if missing:
            raise UserError(
                f"GLOO_SOCKET_IFNAME={given}: this machine has no interface {missing[0]!r}, it has {', '.join(names)}",
                "unset GLOO_SOCKET_IFNAME to have it chosen by the route to the master",
            )
        return given, "GLOO_SOCKET_IFNAME"
    address = local_address_towards(master)
    name = interface_with_address(address)
    return name, f"route to {master} leaves from {address}"
