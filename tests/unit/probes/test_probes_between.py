"""Two workers and a hub on loopback: each tries the other, by way of the hub."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Iterator

import httpx2
import pytest

import lantrain
from lantrain.cluster.addresses import Interface
from lantrain.nodes.admission import Admission
from lantrain.nodes.client import HubClient
from lantrain.nodes.hub import Hub, RunSettings
from lantrain.nodes.hub_server import HubServer
from lantrain.nodes.members import Report
from lantrain.nodes.membership import Membership
from lantrain.nodes.messages import NodeInfo
from lantrain.probes.between import Answering, peer_probes
from tests.distributed.ranks import free_port

JOINS, THERE = "127.0.0.1", "127.0.0.2"
USED = Interface("lo", JOINS, ipaddress.IPv4Network("127.0.0.0/8"))


class Deaf(Answering):
    """Says that it listens, on a port where nothing does: as behind a firewall that rejects."""

    def _meet(self, task: str, address: str, ports: list[int]) -> None:
        self._client.answer_peer(task, [free_port()], [])
        self._client.answer_peer(task, [], [{"port": port, "state": "filtered"} for port in ports])


class Worker:
    """One that is there: beats, and does what the hub hands to it."""

    def __init__(self, hub: Hub, port: int, kind: type[Answering]) -> None:
        self.said: list[str] = []
        self.client = HubClient("127.0.0.1", port)
        self.client.join("i5", NodeInfo(version=lantrain.__version__, code="abc", torch="2"))
        hub.membership.nodes[self.client.node].address = THERE
        self.answering = kind(self.client, THERE, self.said.append)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.beat)
        self.thread.start()

    def beat(self) -> None:
        while not self.over.wait(0.1):
            self.answering.take(self.client.beat(Report("idle")).pop("peers", []))

    def close(self) -> None:
        self.over.set()
        self.thread.join()


@pytest.fixture
def hub() -> Iterator[tuple[Hub, int]]:
    port = free_port()
    made = Hub(
        Membership(time.monotonic, 3, lambda line: None), Admission([]), RunSettings("127.0.0.9", 29500, []), "abc"
    )
    server = HubServer(made, ["127.0.0.1"], port)
    yield made, port
    server.close()


@pytest.fixture
def joins(hub: tuple[Hub, int]) -> HubClient:
    client = HubClient("127.0.0.1", hub[1])
    assert client.wait(30, lambda line: None, lambda seconds: bool(time.sleep(seconds / 20)))
    return client


def test_nobody_there_is_nothing_to_try(joins: HubClient) -> None:
    assert peer_probes(joins, USED) == []


def test_open_both_ways(hub: tuple[Hub, int], joins: HubClient) -> None:
    worker = Worker(*hub, Answering)
    try:
        (result,) = peer_probes(joins, USED)
    finally:
        worker.close()
    assert (result.name, result.status, result.seen) == ("ports-to-workers", "ok", "i5: both ways open")
    (ask,) = hub[0].peers.asks.values()
    assert ask.ports
    assert len(ask.ports) == 3
    assert {port.state for port in ask.tried or []} == {"open"}, "the worker connected, too"
    assert worker.said == []


def test_blocked_ways_are_told_on_the_machine_where_they_are_mended(hub: tuple[Hub, int], joins: HubClient) -> None:
    worker = Worker(*hub, Deaf)
    try:
        there, here = peer_probes(joins, USED)
        until = time.monotonic() + 20
        while not worker.said:
            assert time.monotonic() < until
            time.sleep(0.05)
        peer_probes(joins, USED)
    finally:
        worker.close()
    assert [(result.name, result.status) for result in (there, here)] == [
        ("ports-to-workers", "fail"),
        ("ports-from-workers", "fail"),
    ]
    assert there.where == f"the worker i5 ({THERE})"
    assert "refused at once" in there.seen
    assert here.where.startswith("this machine (")
    assert "no answer within" in here.seen
    (said,) = worker.said  # once a minute, not at each try
    assert "TYPE ON this machine" in said
    assert f"-s {JOINS}" in said


def test_a_worker_that_does_not_answer_blocks_nobody(hub: tuple[Hub, int], joins: HubClient) -> None:
    """It may be stopping just now; Gloo's own limit is still there."""
    HubClient("127.0.0.1", hub[1]).join("i5", NodeInfo(version=lantrain.__version__, code="abc", torch="2"))
    (node,) = hub[0].membership.nodes.values()
    node.address = THERE
    (result,) = peer_probes(joins, USED)
    assert (result.status, result.seen) == ("ok", "i5: not tried, as it did not answer")


def test_the_hub_hands_nothing_to_strangers(hub: tuple[Hub, int], joins: HubClient) -> None:
    worker = HubClient("127.0.0.1", hub[1])
    worker.join("i5", NodeInfo(version=lantrain.__version__, code="abc", torch="2"))
    hub[0].membership.nodes[worker.node].address = THERE
    with httpx2.Client(base_url=f"http://127.0.0.1:{hub[1]}", timeout=20, trust_env=False) as http:
        for body in (
            {"peer": "nobody", "ports": [2000]}, {"peer": worker.node, "ports": [80]}, {"peer": worker.node},
            {"peer": worker.node, "ports": [2000] * 4}, {"peer": worker.node, "ports": [2000], "address": "8.8.8.8"},
        ):  # fmt: skip
            assert http.post("/probes/peer", json=body).status_code in (404, 422), body
        assert worker.beat(Report("idle")) == {"order": "wait", "generation": 0, "why": ""}
        task = hub[0].peers.ask("192.168.1.7", worker.node, [2000])
        assert http.get(f"/probes/peer/{task}").status_code == 404, "another caller's question"
        answer = {"node": worker.node, "task": task, "ports": [4000]}
        assert http.post("/probes/peer-answer", json=answer, headers={"x-secret": "guess"}).status_code == 403
        assert hub[0].peers.asks[task].ports is None


@pytest.mark.parametrize(
    "order",
    [
        {}, {"task": "x"}, {"task": "x", "address": "i5", "ports": [2000]}, "x", {"blocked": "::g", "tried": []},
        {"task": "x", "address": "127.0.0.1", "ports": [22]}, {"blocked": "127.0.0.1", "tried": [{"port": 1}]},
    ],
)  # fmt: skip
def test_orders_that_make_no_sense_are_left(order: object) -> None:
    said: list[str] = []
    Answering(HubClient("127.0.0.1", free_port()), THERE, said.append)._do(order)  # type: ignore[arg-type]
    assert said == []
