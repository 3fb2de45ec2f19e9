"""Results in words, the commands that open a firewall, and the page that explains each probe."""

from __future__ import annotations

import ipaddress
import re
import shlex
from pathlib import Path

import pytest

from lantrain.cluster.addresses import Interface
from lantrain.nodes.messages import NodeInfo
from lantrain.probes.compare import clock, gemm, link, link_rate, round_trip, versions
from lantrain.probes.mend import (
    firewall_seen,
    first_ephemeral_port,
    lan_of,
    lan_towards,
    open_firewall,
    port_range,
)
from lantrain.probes.result import PROBES, RETRYABLE, Result, failed, table

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
LAN = Interface("lan0", "192.168.1.36", ipaddress.IPv4Network("192.168.1.0/24"))


def test_every_probe_has_a_section_with_symptom_cause_and_command() -> None:
    sections = dict(re.findall(r"^### `([a-z-]+)`\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert list(sections) == list(PROBES)
    for name, text in sections.items():
        for word in ("**Symptom:**", "**Cause:**", "**Command:**"):
            assert word in text, name


def test_page_has_the_commands_that_the_probes_print() -> None:
    text = PAGE.read_text()
    for command in open_firewall("192.168.1.0/24", (29500, 65535)).values():
        assert command in text


def test_unknown_probe_cannot_be_reported() -> None:
    with pytest.raises(ValueError, match="not in PROBES"):
        Result("weather", "ok", "looked out", "rain")


def test_block_says_tried_seen_means_and_what_to_type_where() -> None:
    mend = open_firewall("192.168.1.0/24", (29500, 65535))
    block = Result(
        "ports-to-master", "fail", "a connection", "nothing", "a firewall", mend, "i9 (192.168.1.36)"
    ).block()
    assert re.search(r"tried: a connection\n +seen: +nothing\n +means: a firewall\n", block)
    assert "TYPE ON i9 (192.168.1.36), the one that fits its firewall:" in block
    for tool, command in mend.items():
        assert re.search(rf"^ +{tool}: +{re.escape(command)}$", block, re.MULTILINE)


def test_table_has_a_row_a_probe_and_failures_are_picked() -> None:
    results = [
        Result("clock", "ok", "", "0.1 s"),
        Result("disk", "fail", "", "full"),
        Result("link", "warn", "", "slow"),
    ]
    assert [line.split()[:2] for line in table(results).splitlines()] == [
        ["ok", "clock"], ["FAIL", "disk"], ["WARN", "link"],
    ]  # fmt: skip
    assert [result.name for result in failed(results)] == ["disk"]


def test_only_connections_are_tried_again() -> None:
    assert set(PROBES) >= RETRYABLE


@pytest.mark.parametrize("network", ["192.168.1.0/24", "fd00:1::/64"])
def test_commands_open_to_the_lan_and_to_nobody_else(network: str) -> None:
    for tool, command in open_firewall(network, (29500, 65535), "nftables").items():
        words = shlex.split(command.replace("&&", " "))
        assert words[0] == "sudo"
        assert network in command, tool
        assert re.search("29500[:-]65535", command)
    assert ("ip6tables" in open_firewall(network, (1, 2))["iptables"]) == (":" in network)


def test_firewall_that_is_seen_comes_first() -> None:
    assert list(open_firewall("10.0.0.0/8", (1, 2))) == ["ufw", "firewalld", "iptables"]
    assert next(iter(open_firewall("10.0.0.0/8", (1, 2), "firewalld"))) == "firewalld"
    assert next(iter(open_firewall("10.0.0.0/8", (1, 2), "nftables"))) == "nftables"


def test_ufw_is_seen_where_it_is_enabled_and_nothing_in_a_container(tmp_path: Path) -> None:
    (tmp_path / "etc/ufw").mkdir(parents=True)
    (tmp_path / "etc/ufw/ufw.conf").write_text("# comment\nENABLED=yes\nLOGLEVEL=low\n")
    assert firewall_seen(tmp_path) == "ufw"
    (tmp_path / ".dockerenv").touch()
    assert firewall_seen(tmp_path) == ""


def test_network_to_open_to_is_the_lan_or_one_machine() -> None:
    assert lan_of("192.168.1.77", LAN) == "192.168.1.0/24"
    assert lan_of("10.1.2.3", LAN) == "10.1.2.3/32"
    assert lan_of("10.1.2.3", None) == "10.1.2.3/32"
    assert lan_of("fe80::1%eth0", LAN) == "fe80::1/128"


def test_network_that_a_peer_lets_in_is_the_lan_of_both_or_this_machine() -> None:
    assert lan_towards("192.168.1.77", LAN) == "192.168.1.0/24"
    assert lan_towards("10.1.2.3", LAN) == "192.168.1.36/32"
    assert lan_towards("10.1.2.3", None) == "10.1.2.3/32"


def test_range_covers_the_fixed_ports_and_the_kernels(tmp_path: Path) -> None:
    file = tmp_path / "range"
    file.write_text("40000\t50000\n")
    assert first_ephemeral_port(file) == 40000
    assert first_ephemeral_port(tmp_path / "none") == 32768
    assert port_range([29500, 29501], 32768) == (29500, 65535)
    assert port_range([], 20000) == (20000, 65535)


INFO = NodeInfo(version="1", code="abc", torch="2.13.0+cpu", cores=8, threads=8, gemm_gflops=400, dtype="float32")


def test_versions_name_the_item_and_both_values() -> None:
    same = {"lantrain": "1", "code": "abc", "torch": "2.13.0+cpu"}
    assert versions(INFO, same).status == "ok"
    for item in same:
        result = versions(INFO, {**same, item: "other"})
        assert result.status == "fail"
        assert result.seen == f"{item} is {same[item]} here, other on the master"


@pytest.mark.parametrize(("difference", "status"), [(0.5, "ok"), (-4, "ok"), (60, "warn"), (-7200, "warn")])
def test_clock_difference_is_only_noted(difference: float, status: str) -> None:
    result = clock(1e9, 1e9 + difference)
    assert result.status == status
    assert f"{abs(difference):.1f} s {'ahead of' if difference > 0 else 'behind'}" in result.seen


def test_slow_link_and_emulated_bf16_are_noted() -> None:
    assert link(110.0, 0.3, 320).status == "ok"
    slow = link(2.0, 30.0, 320)
    assert slow.status == "warn"
    assert "167.8 s" in slow.seen
    emulated = INFO.model_copy(update={"dtype": "bfloat16"})
    assert gemm(INFO, False).status == gemm(emulated, True).status == "ok"
    assert gemm(emulated, False).status == "warn"
    assert gemm(INFO.model_copy(update={"threads": 32}), False).status == "warn"


def test_rate_counts_from_the_first_chunk_on_and_stops_in_time() -> None:
    def endless() -> list[bytes]:
        while True:
            yield bytes(1000)

    assert link_rate(endless(), 0.01) > 0
    assert link_rate(iter([]), 1) == 0.0
    assert link_rate(iter([b"first"]), 1) == 0.0


def test_round_trip_is_the_median_after_a_first_question() -> None:
    asked = []
    assert 0 <= round_trip(lambda: asked.append(1)) < 1000
    assert len(asked) == 8
