"""Real connections on loopback: what is tried, what is seen, and what the hub lets itself be used for."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Iterator

import httpx2
import pytest

import lantrain
from lantrain.errors import UserError
from lantrain.nodes import hub_probes
from lantrain.nodes.admission import Admission
from lantrain.nodes.client import HubClient
from lantrain.nodes.hub import Arithmetic, Hub, RunSettings
from lantrain.nodes.hub_server import HubServer
from lantrain.nodes.membership import Membership
from lantrain.nodes.messages import NodeInfo
from lantrain.probes import here as probes_here
from lantrain.probes import preflight
from lantrain.probes.ports import (
    high_ports,
    holder_of,
    hub_port,
    listening,
    port_held,
    state_of,
    try_connect,
    try_ports,
)
from lantrain.probes.result import Attempt

HOST = "127.0.0.1"
FLAGS = ["--depth=2", "--max-seq-len=64", "--total-batch-size=512", "--num-iterations=5", "--device-batch-size=2"]


@contextlib.contextmanager
def taken() -> Iterator[int]:
    with socket.create_server((HOST, 0)) as listener:
        yield int(listener.getsockname()[1])


def free_port() -> int:
    with taken() as port:
        return port


class Served:
    """A hub on loopback."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.membership = Membership(time.monotonic, 2, self.said.append)
        self.settings = RunSettings(HOST, free_port(), FLAGS)
        self.port = free_port()
        self.hub = Hub(self.membership, Admission([]), self.settings, "abc")
        self.server = HubServer(self.hub, [HOST], self.port)
        self.client = HubClient(HOST, self.port)
        self.http = httpx2.Client(base_url=f"http://{HOST}:{self.port}", timeout=20, trust_env=False)
        assert self.client.wait(30, self.said.append, lambda seconds: bool(time.sleep(seconds / 20)))

    def post(self, path: str, body: object) -> httpx2.Response:
        return self.http.post(f"/probes/{path}", json=body)

    def close(self) -> None:
        self.http.close()
        self.server.close()

    def sides(self) -> preflight.Sides:
        facts = preflight.ask_facts(self.client)
        return preflight.Sides(self.client, facts, probes_here.on_route(facts.address))


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def test_listeners_are_reached_at_their_high_ports_and_closed_afterwards() -> None:
    with listening(HOST) as ports:
        assert min(ports) >= 1024
        assert [attempt.state for attempt in try_ports(HOST, ports)] == ["open"] * 3
    assert {attempt.state for attempt in try_ports(HOST, ports)} == {"refused"}


def test_silence_is_told_from_refusal() -> None:
    """A listener whose queue is full drops what comes, as a firewall does."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind((HOST, 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        assert try_connect(HOST, listener.getsockname()[1], 0.3).state == "filtered"


@pytest.mark.parametrize(
    ("error", "state"),
    [(TimeoutError(), "filtered"), (OSError(110, "timed out"), "filtered"), (OSError(111, "refused"), "refused"),
     (OSError(113, "No route to host"), "unreachable"), (OSError(101, "Network is unreachable"), "unreachable")],
)  # fmt: skip
def test_states_follow_from_the_systems_errors(error: OSError, state: str) -> None:
    assert state_of(error)[0] == state


def test_blocked_high_ports_name_the_listening_machine_as_the_one_to_mend() -> None:
    attempts = [Attempt(40001, "open"), Attempt(40002, "filtered"), Attempt(40003, "refused")]
    result = high_ports("ports-to-worker", attempts, connects="i9", listens="laptop", mend={"ufw": "x"})
    assert (result.status, result.where) == ("fail", "laptop")
    assert result.seen == "no answer within 2.5 s: port 40002; refused at once: port 40003; connected: port 40001"
    assert "laptop" in result.means
    assert result.attempts == tuple(attempts)


@pytest.mark.parametrize("state", ["refused", "unreachable", "filtered"])
def test_hub_that_cannot_be_reached_has_a_cause_and_a_command(state: str) -> None:
    result = hub_port(Attempt(29501, state), master="192.168.1.36", mend={"ufw": "sudo ufw"})  # type: ignore[arg-type]
    assert result.status == "fail"
    assert result.means
    assert result.mend


def test_holder_of_a_port_is_named() -> None:
    with taken() as port:
        result = port_held({"HUB_PORT": free_port(), "MASTER_PORT": port})
        assert str(os.getpid()) in holder_of(port)
    assert result.status == "fail"
    assert f"port {port} is held by" in result.seen
    assert f"process {os.getpid()}" in result.seen
    assert result.mend["use another"] == f"make up-master MASTER_PORT={port + 100}"
    assert port_held({"MASTER_PORT": port}).status == "ok"


def test_port_probes_pass_on_an_open_network(served: Served) -> None:
    results = preflight.port_probes(served.sides())
    assert {result.name: result.status for result in results} == dict.fromkeys(preflight.PORT_PROBES, "ok")


def test_held_train_port_is_told_to_the_worker(served: Served) -> None:
    with socket.create_server((HOST, served.settings.master_port)):
        result = preflight.train_port(served.sides())
    assert result.status == "fail"
    assert f"process {os.getpid()}" in result.seen


def test_train_port_is_let_alone_while_a_generation_runs(served: Served) -> None:
    served.membership.phase = "running"
    result = preflight.train_port(served.sides())
    assert (result.status, "not tried" in result.seen) == ("ok", True)


def test_train_port_is_given_back_at_once_when_a_generation_starts(served: Served) -> None:
    assert served.client.probe("train-port")["listening"]
    assert try_connect(HOST, served.settings.master_port).state == "open"
    served.membership.phase = "running"
    until = time.monotonic() + hub_probes.DOOR_SECONDS / 2
    while try_connect(HOST, served.settings.master_port).state == "open":
        assert time.monotonic() < until
    with socket.create_server((HOST, served.settings.master_port)):
        pass


@pytest.mark.parametrize(
    "body",
    [{}, {"ports": []}, {"ports": [80]}, {"ports": [1023]}, {"ports": [65536]}, {"ports": [2000, 2001, 2002, 2003]},
     {"ports": ["x"]}, {"ports": [2000], "address": "192.168.1.1"}, {"ports": [2000], "host": "::1"}, [2000]],
)  # fmt: skip
def test_hub_connects_to_few_high_ports_of_the_caller_and_to_nothing_else(served: Served, body: object) -> None:
    assert served.post("connect", body).status_code == 422


def test_hub_connects_back_to_the_caller(served: Served) -> None:
    with taken() as port:
        closed = free_port()
        answer = served.client.probe("connect", {"ports": [port, closed]})
    assert answer == {"states": {str(port): "open", str(closed): "refused"}}


def test_callers_doors_are_bounded(served: Served) -> None:
    opened = [port for _ in range(6) for port in served.client.probe("listen")["ports"]]
    states = [attempt.state for attempt in try_ports(HOST, opened)]
    assert states.count("open") == hub_probes.GROUPS_OF_A_CALLER * hub_probes.HIGH_PORTS
    assert states[-1] == "open"


def test_doors_of_all_callers_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_probes, "MAX_DOORS", 2)
    assert served.post("listen", {}).status_code == 429


def test_link_is_measured_in_both_measures(served: Served) -> None:
    mbs, milliseconds = preflight.measure_link(served.client)
    assert mbs > 1
    assert 0 < milliseconds < 1000


def test_masters_log_tells_a_workers_trouble_once(served: Served) -> None:
    body = {"probe": "ports-to-master", "ports": [{"port": 40001, "state": "filtered"}]}
    for _ in range(3):
        assert served.post("blocked", body).status_code == 200
    told = [line for line in served.said if "check failed" in line]
    assert len(told) == 1
    assert "no answer within 2.5 s: port 40001" in told[0]
    assert "sudo ufw allow proto tcp from" in told[0]


@pytest.mark.parametrize(
    "body",
    [{"probe": "memory", "ports": [{"port": 40001, "state": "filtered"}]}, {"probe": "train-port", "ports": []},
     {"probe": "train-port", "ports": [{"port": 40001, "state": "\n[lantrain] type: rm"}]},
     {"probe": "train-port", "ports": [{"port": 40001, "state": "filtered", "note": "free text"}]}],
)  # fmt: skip
def test_worker_cannot_write_words_of_its_own_into_the_masters_log(served: Served, body: object) -> None:
    assert served.post("blocked", body).status_code == 422
    assert not any("rm" in line for line in served.said if "check" in line)


@pytest.mark.parametrize("seed", range(3))
def test_no_body_makes_the_probes_fail(served: Served, seed: int) -> None:
    draw = random.Random(seed)
    values: list[object] = [None, -1, 2**70, 1.5, "x", "\x00", [], {}, ["\ud800"], {"ports": {}}, float("nan")]
    for path in ("listen", "train-port", "connect", "blocked", "peer", "peer-answer", "peer-blocked", "peer/x") * 8:
        keys = draw.sample(["ports", "probe", "port", "state", "address", "peer", "task", "node", "tried"], 2)
        body = json.dumps({key: draw.choice(values) for key in keys}).encode()
        body = draw.choice([body, draw.randbytes(40), b"", body[:-3]])
        answer = served.http.post(f"/probes/{path}", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404, 405, 422), (path, body, answer.text)
    assert served.client.probe("facts", post=False)["train_port"] == served.settings.master_port


INFO = NodeInfo(version=lantrain.__version__, code="abc", torch="none", cores=1, threads=1)


def test_worker_with_other_versions_does_not_join(served: Served) -> None:
    said: list[str] = []
    with pytest.raises(UserError, match="not joined: versions") as raised:
        preflight.check_before_joining(served.client, INFO, said.append, lambda seconds: False, 60)
    assert raised.value.exit_code == 2
    assert any("torch is none here" in line for line in said)


def test_worker_with_other_bits_does_not_join(served: Served) -> None:
    said: list[str] = []
    served.hub.arithmetic = Arithmetic("x86_64 AVX512", "ab")
    here = {"torch": preflight.ask_facts(served.client).torch, "cpu": "x86_64 AVX2", "update": "cd"}
    with pytest.raises(UserError, match="not joined: arithmetic") as raised:
        preflight.check_before_joining(
            served.client, INFO.model_copy(update=here), said.append, lambda seconds: False, 60
        )
    assert raised.value.exit_code == 2
    assert any("TYPE ON this machine" in line and "make image" in line for line in said), said


def test_worker_of_another_kind_with_the_same_bits_passes(served: Served) -> None:
    served.hub.arithmetic = Arithmetic("x86_64 AVX512", "ab")
    here = {"torch": preflight.ask_facts(served.client).torch, "cpu": "aarch64 DEFAULT", "update": "ab"}
    results, info, _ = preflight.worker_probes(served.client, INFO.model_copy(update=here))
    assert (info.cpu, info.update) == ("aarch64 DEFAULT", "ab")
    assert [result.status for result in results if result.name == "arithmetic"] == ["ok"]


def test_worker_waits_for_a_mended_port_and_then_goes_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is held until the first pause: the retry finds it free."""
    torch_version = preflight.ask_facts(served.client).torch
    said: list[str] = []
    holder = socket.create_server((HOST, served.settings.master_port))

    def pause(seconds: float) -> bool:
        assert seconds == preflight.RETRY_SECONDS
        holder.close()
        return False

    info = INFO.model_copy(update={"torch": torch_version})
    checked = preflight.check_before_joining(served.client, info, said.append, pause, 60)
    assert checked is not None
    assert checked.link_mbs > 0
    assert checked.round_trip_ms > 0
    assert sum("check failed: train-port" in line for line in said) == 1
    assert sum("train-port blocked; next try in 10 s" in line for line in said) == 1


def test_worker_that_is_told_to_stop_does_not_go_on_waiting(served: Served) -> None:
    torch_version = preflight.ask_facts(served.client).torch
    info = INFO.model_copy(update={"torch": torch_version})
    with socket.create_server((HOST, served.settings.master_port)):
        assert preflight.check_before_joining(served.client, info, lambda line: None, lambda seconds: True, 60) is None


def test_worker_gives_up_on_a_blocked_port_after_its_limit(served: Served) -> None:
    torch_version = preflight.ask_facts(served.client).torch
    info = INFO.model_copy(update={"torch": torch_version})
    with (
        socket.create_server((HOST, served.settings.master_port)),
        pytest.raises(UserError, match="not joined: train-port"),
    ):
        preflight.check_before_joining(served.client, info, lambda line: None, lambda seconds: False, 0)
