from __future__ import annotations

import pytest

from lantrain.cluster.addresses import Interface, clean_host, default_route_interface, own_address, resolve
from lantrain.errors import UserError


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("192.168.1.36", "192.168.1.36"),
        ("  192.168.1.36 \t", "192.168.1.36"),
        ("192.168.1.36\r\n", "192.168.1.36"),
        ("'192.168.1.36'", "192.168.1.36"),
        ('"192.168.1.36"', "192.168.1.36"),
        ("“192.168.1.36”", "192.168.1.36"),
        ("<192.168.1.36>", "192.168.1.36"),
        ("\ufeff192.168.1.36\u200b", "192.168.1.36"),
        ("192.168.1.36:29501", "192.168.1.36"),
        ("http://192.168.1.36:29501/", "192.168.1.36"),
        ("HTTP://i9.local/", "i9.local"),
        ("http://192.168.1.36:29501/status", "192.168.1.36"),
        ("[192.168.1.36]", "192.168.1.36"),
        ("i9", "i9"),
        ("i9.fritz.box.", "i9.fritz.box."),
        ("my_box", "my_box"),
        ("fd00::36", "fd00::36"),
        ("[fd00::36]", "fd00::36"),
        ("[fd00::36]:29501", "fd00::36"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_what_sticks_to_an_address_is_taken_off(typed: str, meant: str) -> None:
    assert clean_host(typed) == meant


@pytest.mark.parametrize("typed", [None, "", " ", "\r\n", "''", '" "', "http://", "[]", "\u200b"])
def test_nothing_is_an_error_and_never_this_machine(typed: str | None) -> None:
    with pytest.raises(UserError, match="HOST is empty"):
        clean_host(typed)


@pytest.mark.parametrize(
    "typed",
    [
        "192.168.1", "192.168.1.300", "192.168.1.36.7", "1234", "192,168,1,36", "two words", "a;reboot", "$(reboot)",
        "-v", "i9..local", ".local", "i9/x y", "user@host", "::g", "[fd00::36", "192.168.1.36:port", "a" * 64,
        "a." * 130,
    ],
)  # fmt: skip
def test_what_cannot_be_a_host_is_refused(typed: str) -> None:
    with pytest.raises(UserError, match="HOST="):
        clean_host(typed)


@pytest.mark.parametrize("typed", ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255"])
def test_addresses_of_no_machine_are_refused(typed: str) -> None:
    with pytest.raises(UserError, match="no machine's address"):
        clean_host(typed)


def test_a_name_without_an_address_is_an_error() -> None:
    with pytest.raises(UserError, match=r"no-such-host\.invalid does not resolve"):
        resolve("no-such-host.invalid")


def test_addresses_resolve_to_themselves() -> None:
    assert resolve("192.168.1.36") == "192.168.1.36"
    with pytest.raises(UserError, match=r"fd00::36 has only an IPv6 address .*HOST=192") as error:
        resolve("fd00::36")
    assert error.value.exit_code == 2, "starting again would not help"


ROUTES = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
wlan0	00000000	0101A8C0	0003	0	0	600	00000000	0	0	0
eth0	00000000	0101A8C0	0003	0	0	100	00000000	0	0	0
eth0	0001A8C0	00000000	0001	0	0	0	00FFFFFF	0	0	0
"""


def test_the_default_route_with_the_lowest_metric_counts() -> None:
    assert default_route_interface(ROUTES) == "eth0"
    assert default_route_interface(ROUTES.splitlines()[0]) is None


def card(name: str, address: str) -> Interface:
    import ipaddress

    return Interface(name, address, ipaddress.IPv4Network(f"{address}/24", strict=False))


@pytest.mark.parametrize(
    ("name", "address", "kind"),
    [
        ("eth0", "192.168.1.36", "lan"), ("wlp3s0", "192.168.1.37", "lan"), ("lo", "127.0.0.1", "loopback"),
        ("docker0", "172.17.0.1", "virtual"), ("br-12ab", "172.18.0.1", "virtual"),
        ("virbr0", "192.168.122.1", "virtual"),
        ("tailscale0", "100.64.0.7", "vpn"), ("wg0", "10.8.0.2", "vpn"), ("tun0", "10.9.0.2", "vpn"),
    ],
)  # fmt: skip
def test_cards_are_told_apart(name: str, address: str, kind: str) -> None:
    assert card(name, address).kind == kind


def test_the_masters_address_is_not_a_vpns_or_dockers(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantrain.cluster import addresses

    cards = [card("docker0", "172.17.0.1"), card("wg0", "10.8.0.2"), card("wlan0", "192.168.1.40"),
             card("eth0", "192.168.1.36"), card("lo", "127.0.0.1")]  # fmt: skip
    monkeypatch.setattr(addresses, "interfaces", lambda: cards)
    monkeypatch.setattr(addresses, "default_route_interface", lambda: "eth0")
    assert own_address().address == "192.168.1.36"
    # A default route through a VPN does not make the VPN the LAN.
    monkeypatch.setattr(addresses, "default_route_interface", lambda: "wg0")
    assert own_address().address == "192.168.1.40"
    assert own_address("wg0").address == own_address("10.8.0.2").address == "10.8.0.2"
    with pytest.raises(UserError, match=r"ADDRESS=1\.2\.3\.4 is not this machine's"):
        own_address("1.2.3.4")
    monkeypatch.setattr(addresses, "interfaces", lambda: cards[:2])
    with pytest.raises(UserError, match="no LAN address") as raised:
        own_address()
    assert raised.value.exit_code == 1, "a machine that is starting up may get one yet"
