"""The command that runs the probes: what it prints, and with which code it leaves."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from lantrain.errors import UserError
from scripts import doctor


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Free ports, the only address that every machine has, and a folder of the test's own."""
    for name in ("HUB_PORT", "MASTER_PORT"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            monkeypatch.setenv(name, str(listener.getsockname()[1]))
    monkeypatch.setenv("ADDRESS", "127.0.0.1")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("TRAIN_ARGS", "--depth 2 --max-seq-len 64 --total-batch-size 512 --device-batch-size 1")
    monkeypatch.delenv("HOST", raising=False)


def ask(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments])
    return doctor.main()


def test_master_with_nothing_in_the_way(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "nothing in the way" in printed
    for name in ("address", "port-held", "memory", "disk", "gemm"):
        assert f"  {name} " in printed


def test_failure_prints_its_block_and_leaves_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        assert ask(monkeypatch) == 1
    printed = capsys.readouterr().out
    assert "check failed: port-held" in printed
    assert "TYPE ON this machine" in printed
    assert "1 of" in printed


def test_json_has_every_field_of_every_probe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(monkeypatch, "127.0.0.1", "--json") == 1  # no master is up
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    probes = {probe["name"]: probe for probe in said["probes"]}
    assert probes["hub-port"]["status"] == "fail"
    assert "refused at once" in probes["hub-port"]["seen"]
    assert all({"name", "status", "tried", "seen", "means", "mend", "where"} <= set(probe) for probe in probes.values())


def test_host_that_is_none_is_an_error_and_not_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="HOST is empty") as raised:
        ask(monkeypatch, " ")
    assert raised.value.exit_code == 1
    assert ask(monkeypatch, "no such name", "--json") == 1
    assert "neither a name nor an address" in json.loads(capsys.readouterr().out)["error"]


def test_port_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_PORT", "many")
    with pytest.raises(UserError, match="HUB_PORT=many"):
        ask(monkeypatch)
