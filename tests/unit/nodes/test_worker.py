"""The launchers' waits."""

from __future__ import annotations

import time

import pytest

from lantrain.errors import USER_ERROR_EXIT, UserError
from lantrain.nodes import worker
from lantrain.nodes.client import HubClient
from tests.distributed.ranks import free_port


class Stop:
    """A stop request that comes after so many waits; time passes twenty times faster."""

    def __init__(self, after: int = 1 << 30) -> None:
        self.number, self.after = 15, after

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds / 20)
        self.after -= 1
        return self.after < 0


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(worker, "say", lines.append)
    return lines


def test_a_master_that_does_not_return_is_waited_for_so_long(said: list[str]) -> None:
    client = HubClient("127.0.0.1", free_port())
    began = time.monotonic()
    with pytest.raises(UserError, match=r"127\.0\.0\.1 has not returned within 2 s .*PATIENCE") as error:
        worker._wait_for_return(client, Stop(), 0.5, 2.0)  # type: ignore[arg-type]
    assert time.monotonic() - began >= 2
    assert error.value.exit_code == USER_ERROR_EXIT, "Docker does not start again what ends by a mistake"
    assert any(line.endswith("still waiting") for line in said), said


def test_who_waits_for_the_master_can_be_stopped(said: list[str]) -> None:
    client = HubClient("127.0.0.1", free_port())
    assert not worker._wait_for_return(client, Stop(3), 600, 600)  # type: ignore[arg-type]
