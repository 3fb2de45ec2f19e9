from __future__ import annotations

import pytest

from lantrain.errors import UserError
from lantrain.nodes.admission import BURST_SECONDS, REQUESTS_PER_SECOND, Admission, parse_networks


def test_networks_are_read_as_people_write_them() -> None:
    networks = parse_networks("192.168.1.0/24, 10.8.0.7  fd00::/8,192.168.2.9/24")
    assert [str(network) for network in networks] == ["192.168.1.0/24", "10.8.0.7/32", "fd00::/8", "192.168.2.0/24"]
    assert parse_networks("") == parse_networks(" , ") == []


@pytest.mark.parametrize("text", ["home", "192.168.1.0/33", "192.168.1", "192.168.1.0-9", "192.168.1.0/24;x"])
def test_what_is_no_network_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match="is not a network"):
        parse_networks(text)


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("192.168.1.7", True), ("192.168.2.7", False), ("127.0.0.1", True), ("::1", True), ("8.8.8.8", False),
        ("::ffff:192.168.1.7", True), ("::ffff:8.8.8.8", False), ("fd00::7", False), ("fe80::1%eth0", False),
        ("", False), ("testclient", False), ("192.168.1.7.evil", False),
    ],
)  # fmt: skip
def test_only_the_masters_network_and_itself_may_ask(address: str, allowed: bool) -> None:
    assert Admission(parse_networks("192.168.1.0/24")).address_allowed(address) is allowed


def test_token() -> None:
    admission = Admission([], "geheim-ß")
    assert admission.token_matches("geheim-ß")
    for wrong in ("", "geheim", "geheim-ß ", "GEHEIM-ß", "\x00"):
        assert not admission.token_matches(wrong)
    assert Admission([]).token_matches("")
    assert Admission([]).token_matches("whatever")
    assert "geheim" not in repr(vars(Admission([]))) + repr(admission)


def test_rate_is_by_address_and_recovers() -> None:
    now = [0.0]
    admission = Admission([], clock=lambda: now[0])
    limit = REQUESTS_PER_SECOND * BURST_SECONDS
    assert all(admission.within_rate("192.168.1.7") for _ in range(limit))
    assert not admission.within_rate("192.168.1.7")
    assert admission.within_rate("192.168.1.8")
    now[0] += BURST_SECONDS + 0.1
    assert admission.within_rate("192.168.1.7")


def test_many_addresses_do_not_pile_up() -> None:
    now = [0.0]
    admission = Admission([], clock=lambda: now[0])
    for number in range(20_000):
        now[0] += 0.01
        admission.within_rate(f"10.0.{number // 256}.{number % 256}")
    assert len(admission._requests) <= 4097 + 1
