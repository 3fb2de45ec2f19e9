"""Exchanges between ranks, in real process groups."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from lantrain.cluster.group import Ranks, broadcast_json, form_groups, gather_json, launched_by_torchrun
from lantrain.cluster.replicas import check_replicas, copy_from_leader, parameter_hash
from lantrain.errors import UserError
from tests.distributed.ranks import APP, free_port, together


def _exchange(ranks: Ranks) -> Any:
    told = broadcast_json({"from": ranks.rank, "text": "ü" * (10 + ranks.rank)}, ranks)
    return told, gather_json([ranks.rank] * ranks.rank, ranks), ranks.interface


def test_json_reaches_every_rank() -> None:
    for told, gathered, interface in together(3, _exchange):
        assert told == {"from": 0, "text": "ü" * 10}
        assert gathered == [[], [1], [2, 2]]
        assert interface == "lo"


def _replicas(ranks: Ranks) -> Any:
    torch.manual_seed(ranks.rank if ranks.rank == 1 else 0)
    params = {"a": torch.randn(100, 7), "b": torch.randn(3)}
    complaints = []
    for _ in range(2):
        try:
            check_replicas(params, ranks, 5)
        except UserError as error:
            complaints.append(str(error))
        sent = copy_from_leader(params, ranks)
    return complaints, sent, parameter_hash(params)


def test_a_rank_that_differs_is_named_and_can_be_mended() -> None:
    results = together(3, _replicas)
    assert len({value for _, _, value in results}) == 1
    for complaints, sent, _ in results:
        assert len(complaints) == 1
        assert "rank 1 differ from the leader's" in complaints[0]
        assert not sent  # the second time there was nothing to send


def test_hash_sees_one_flipped_bit_and_two_swapped_tensors() -> None:
    a, b = torch.randn(10), torch.randn(10)
    flipped = a.clone()
    flipped.view(torch.int32)[3] ^= 1
    assert parameter_hash({"a": a}) != parameter_hash({"a": flipped})
    assert parameter_hash({"a": a, "b": b}) != parameter_hash({"a": b, "b": a})
    assert parameter_hash({"a": a, "b": b}) == parameter_hash({"b": b.clone(), "a": a.clone()})


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert not launched_by_torchrun()
    assert form_groups() == Ranks(0, 1)


@pytest.mark.parametrize("value", ["soon", "-3", "0"])
def test_time_limit_that_is_no_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LANTRAIN_TIMEOUT": value}
    for name, text in values.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match="LANTRAIN_TIMEOUT"):
        form_groups()


def test_missing_rank_ends_the_wait_with_a_line() -> None:
    """One of two ranks never comes: the clock of our own ends the process, whatever Gloo does."""
    code = "from lantrain.errors import run_main; from lantrain.cluster.group import form_groups; run_main(form_groups)"
    env = {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "LANTRAIN_CONNECT_TIMEOUT": "3", "PYTHONPATH": str(APP), "PATH": "",
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1
    assert "error: rank 0: connecting 2 ranks over lo took more than 3 s" in result.stderr
    assert "Traceback" not in result.stderr
