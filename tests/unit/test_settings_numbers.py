"""Numbers from the environment."""

from __future__ import annotations

import pytest

from lantrain.errors import UserError
from lantrain.settings import LONGEST, port, positive_integer, positive_number


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "0", "-1", "x", "1,5", "1e999", "1e9", "0x10", "- 1"])
def test_what_is_no_positive_number_is_one_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILENCE", text)
    with pytest.raises(UserError, match=r"SILENCE=.* is not a positive number of seconds .*SILENCE=15"):
        positive_number("SILENCE", 15, "seconds")


@pytest.mark.parametrize(("text", "value"), [("", 15), ("  ", 15), ("6", 6), (" 0.5 ", 0.5), ("1e8", LONGEST)])
def test_what_is_one_is_read(text: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SILENCE", text)
    assert positive_number("SILENCE", 15) == value
    monkeypatch.delenv("SILENCE")
    assert positive_number("SILENCE", 15) == 15


def test_whole_numbers_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODES", "2.5")
    with pytest.raises(UserError, match=r"NODES=2\.5 is not a whole number from 1 to 256"):
        positive_integer("NODES", 2, 256)
    monkeypatch.setenv("HUB_PORT", "65536")
    with pytest.raises(UserError, match="HUB_PORT=65536 is not a whole number from 1 to 65535"):
        port("HUB_PORT", 29501)
    monkeypatch.setenv("HUB_PORT", "65535")
    assert port("HUB_PORT", 29501) == 65535
