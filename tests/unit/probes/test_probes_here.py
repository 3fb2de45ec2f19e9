"""This machine's network, as it is and as it might be."""

from __future__ import annotations

import ipaddress
import threading

import pytest

from lantrain.cluster.addresses import Interface
from lantrain.errors import UserError
from lantrain.probes import here as probes_here


def card(name: str, address: str, prefix: int = 24) -> Interface:
    return Interface(name, address, ipaddress.IPv4Network(f"{address}/{prefix}", strict=False))


CABLE, WIFI = card("eth0", "192.168.1.40"), card("wlan0", "192.168.1.77")
LO, DOCKER = card("lo", "127.0.0.1", 8), card("docker0", "172.17.0.1", 16)
TAILSCALE = card("tailscale0", "100.101.102.103", 10)
MASTER = "192.168.1.36"


def test_route_to_this_machine_itself_is_named() -> None:
    result = probes_here.route("127.0.0.1")
    assert result.status == "ok"
    assert "this machine itself" in result.seen


def test_loopback_is_refused_for_a_master_that_is_not_this_machine() -> None:
    result = probes_here.route("127.0.1.1")
    assert result.status == "fail"
    assert "loopback" in result.seen


def test_name_of_the_master_that_leads_here_is_refused_unless_a_hub_is_up() -> None:
    with pytest.raises(UserError, match=r"HOST=laptop leads to 127\.0\.1\.1, this machine itself"):
        probes_here.refuse_loopback("laptop", "127.0.1.1", lambda: False)
    probes_here.refuse_loopback("laptop", "127.0.1.1", lambda: True)
    probes_here.refuse_loopback("localhost", "127.0.0.1", lambda: False)
    probes_here.refuse_loopback("127.0.0.1", "127.0.0.1", lambda: False)
    probes_here.refuse_loopback("i9", MASTER, lambda: False)


@pytest.mark.parametrize(
    ("found", "seen"),
    [(["127.0.1.1"], "laptop is 127.0.1.1, loopback (not used)"), ([MASTER], f"laptop is {MASTER}"),
     ([], "laptop does not resolve (not needed)")],
)  # fmt: skip
def test_own_name_is_a_note(found: list[str], seen: str) -> None:
    result = probes_here.hostname("laptop", lambda name: found)
    assert (result.status, result.seen) == ("ok", seen)


def test_name_server_that_is_gone_does_not_hold_up_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_here, "NAME_SECONDS", 0.01)
    never = threading.Event()

    def hang(name: str) -> list[str]:
        never.wait()
        return []

    try:
        assert "no answer within" in probes_here.hostname("laptop", hang).seen
    finally:
        never.set()


@pytest.mark.parametrize("used", [CABLE, WIFI])
def test_second_card_on_a_subnet_is_named_and_the_spare_one_is_to_go(used: Interface) -> None:
    spare = WIFI if used is CABLE else CABLE
    result = probes_here.same_subnet(MASTER, [LO, CABLE, DOCKER, WIFI], used)
    assert result.status == "warn"
    assert "eth0 (192.168.1.40) and wlan0 (192.168.1.77)" in result.seen
    assert result.mend == {"": f"nmcli device disconnect {spare.name}"}


def test_subnets_of_their_own_and_bridges_are_fine() -> None:
    others = [LO, CABLE, DOCKER, card("br-1", "192.168.1.1"), card("eth1", "10.0.0.5"), TAILSCALE]
    assert probes_here.same_subnet(MASTER, others, CABLE).status == "ok"


def test_two_addresses_on_one_card_are_fine() -> None:
    assert probes_here.same_subnet(MASTER, [CABLE, card("eth0", "192.168.1.41")], CABLE).status == "ok"


def test_vpn_is_noted_only_when_the_route_uses_it() -> None:
    assert probes_here.vpn(MASTER, [CABLE], CABLE).seen == "none"
    assert probes_here.vpn(MASTER, [CABLE, TAILSCALE], CABLE).seen == "tailscale0 not used"
    used = probes_here.vpn("100.64.0.9", [CABLE, TAILSCALE], TAILSCALE)
    assert used.status == "warn"
    assert "tailscale0" in used.seen


IDENTITY = "0 0 4294967295"


@pytest.mark.parametrize(
    ("kernel", "have", "bridged", "status", "word"),
    [
        ("6.1.0-18-amd64", [CABLE], False, "ok", "the machine's own"),
        ("6.10.14-linuxkit", [card("eth0", "192.168.65.3")], False, "fail", "Docker Desktop"),
        ("5.15.153.1-microsoft-standard-WSL2", [CABLE], False, "warn", "WSL"),
        ("6.1.0-18-amd64", [card("tap0", "10.0.2.100")], False, "fail", "rootless"),
        ("6.1.0-18-amd64", [card("eth0", "172.18.0.2", 16)], True, "warn", "bridge"),
    ],
)
def test_host_network_that_is_not_the_hosts_is_told(
    kernel: str, have: list[Interface], bridged: bool, status: str, word: str
) -> None:
    result = probes_here.container_network(
        inside=True, kernel=kernel, uid_map=IDENTITY, have=[LO, *have], bridged=lambda name: bridged
    )
    assert result.status == status
    assert word in result.seen
    if status != "ok":
        assert len(result.mend) == 1
    outside = probes_here.container_network(inside=False, kernel=kernel, have=have, bridged=lambda name: bridged)
    assert outside.status == "ok"


def test_address_of_the_master() -> None:
    assert probes_here.address(CABLE).status == "ok"
    assert probes_here.address(TAILSCALE).status == "warn"
    assert "vpn" in probes_here.address(TAILSCALE).seen
