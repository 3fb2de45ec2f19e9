from __future__ import annotations

import socket

import psutil
import pytest

from lantrain.cluster.interfaces import choose_interface, interface_with_address, local_address_towards
from lantrain.errors import UserError


def _addresses() -> list[tuple[str, str]]:
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def test_every_address_of_this_machine_leads_to_its_own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master gives its own LAN address as MASTER_ADDR: the card that holds it is right, not the loopback."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert _addresses()
    for name, address in _addresses():
        assert choose_interface(address)[0] == name


def test_the_debian_hostname_address_is_loopback() -> None:
    assert interface_with_address("127.0.1.1") == "lo"
    assert local_address_towards("127.0.1.1").startswith("127.")


def test_unknown_address_has_no_interface() -> None:
    assert interface_with_address("192.0.2.77") is None


def test_name_that_does_not_resolve_is_one_clear_line() -> None:
    with pytest.raises(UserError, match=r"'no-such-host\.invalid' does not resolve"):
        local_address_towards("no-such-host.invalid")


def test_given_interface_is_kept_when_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert choose_interface("no-such-host.invalid") == ("lo", "GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wlan9")
    with pytest.raises(UserError, match="no interface 'wlan9'"):
        choose_interface("127.0.0.1")
