"""The hub as a real server on loopback, asked by the real client, and by others."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

import lantrain
from lantrain.errors import UserError
from lantrain.nodes.admission import Admission
from lantrain.nodes.client import HubClient, HubRefused, why_unreachable
from lantrain.nodes.hub import MAX_NODES, Arithmetic, Hub, RunSettings, shares_for
from lantrain.nodes.hub_server import MAX_BODY, HubServer
from lantrain.nodes.master import with_resume
from lantrain.nodes.members import Report
from lantrain.nodes.membership import Membership
from lantrain.nodes.messages import NodeInfo
from scripts.node import _await_the_end

CODE = "0123456789abcdef"
TOKEN = "correct-horse"


def info(**changed: Any) -> NodeInfo:
    return NodeInfo(**{"version": lantrain.__version__, "code": CODE, "torch": "2.13.0", **changed})


class Served:
    """A hub, where it listens, and what it said."""

    def __init__(self, token: str = "") -> None:
        self.said: list[str] = []
        membership = Membership(time.monotonic, 2, self.said.append)
        settings = RunSettings("192.168.1.36", 29500, ["--depth", "2"], {"NANOCHAT_DTYPE": "float32"})
        self.admission = Admission([], token)
        self.hub = Hub(membership, self.admission, settings, CODE)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.server = HubServer(self.hub, ["127.0.0.1"], self.port)
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=10, trust_env=False)
        assert self.client(token).wait(30, self.said.append, lambda seconds: bool(time.sleep(seconds / 20)))

    def client(self, token: str = "") -> HubClient:
        return HubClient("127.0.0.1", self.port, token)

    def close(self) -> None:
        self.http.close()
        self.server.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


@pytest.fixture
def guarded() -> Iterator[Served]:
    made = Served(TOKEN)
    yield made
    made.close()


def test_join_beat_leave(served: Served) -> None:
    with served.hub.lock:
        master = served.hub.membership.join("i9", "127.0.0.1", info().model_dump(), master=True)
    client = served.client()
    client.join("i5", info(cores=8))
    assert client.beat(Report("idle"))["order"] == "wait"
    with served.hub.lock:
        served.hub.membership.beat(master.id, Report("idle"))
        served.hub.membership.tick()
    order = client.beat(Report("idle"))
    assert order == {
        "order": "run", "generation": 1, "rank": 1, "world": 2, "master_address": "192.168.1.36", "master_port": 29500,
        "arguments": ["--depth", "2"], "environment": {"NANOCHAT_DTYPE": "float32"}, "run": served.hub.run,
    }  # fmt: skip
    status = client.status()
    assert [(node["name"], node["rank"]) for node in status["nodes"]] == [("i9", 0), ("i5", 1)]
    assert client.secret not in json.dumps(status)
    client.leave()
    assert [node["name"] for node in client.status()["nodes"]] == ["i9"]
    assert client.beat(Report("idle"))["order"] == "join"


def test_two_workers_never_have_one_rank(served: Served) -> None:
    with served.hub.lock:
        served.hub.membership.wanted = 4
        master = served.hub.membership.join("i9", "127.0.0.1", info().model_dump(), master=True)
    clients = [served.client() for _ in range(3)]
    for number, client in enumerate(clients):
        client.join(f"i{number}", info())
    with served.hub.lock:
        served.hub.membership.beat(master.id, Report("idle"))
        served.hub.membership.tick()
    assert sorted(client.beat(Report("idle"))["rank"] for client in clients) == [1, 2, 3]


@pytest.mark.parametrize(
    ("item", "theirs"), [("code", "fedcba9876543210"), ("code", ""), ("version", "0.0.0"), ("version", "x")]
)
def test_another_version_is_refused_with_both_values(served: Served, item: str, theirs: str) -> None:
    ours = {"code": CODE, "version": lantrain.__version__}[item]
    with pytest.raises(HubRefused, match=f"{item} differs: {theirs or 'unknown'} there, {ours} on the master") as no:
        served.client().join("i5", info(**{item: theirs}))
    assert "git pull" in no.value.mend
    assert served.client().status()["nodes"] == []


def test_a_node_that_computes_other_bits_is_refused_with_what_to_type(served: Served) -> None:
    served.hub.arithmetic = Arithmetic("x86_64 AVX512", "ab")
    with pytest.raises(HubRefused, match="bits differ: x86_64 AVX2 there, x86_64 AVX512 on the master") as no:
        served.client().join("i5", info(cpu="x86_64 AVX2", update="cd"))
    assert no.value.mend.startswith("make image;")
    assert "\n" not in str(no.value)
    assert served.client().status()["nodes"] == []


def test_another_kind_of_cpu_that_computes_the_same_bits_joins(served: Served) -> None:
    served.hub.arithmetic = Arithmetic("x86_64 AVX512", "ab")
    cpus = ["x86_64 AVX2", "x86_64 DEFAULT", "aarch64 DEFAULT"]
    for number, cpu in enumerate(cpus):
        served.client().join(f"i{number}", info(cpu=cpu, update="ab"))
    assert [node["cpu"] for node in served.client().status()["nodes"]] == cpus


def test_wrong_secret_changes_nothing(served: Served) -> None:
    client, stranger = served.client(), served.client()
    client.join("i5", info())
    stranger.node = client.node
    for stranger.secret in ("", "guess", client.secret[:-1], client.secret + "x"):
        with pytest.raises(HubRefused, match="wrong secret"):
            stranger.beat(Report("running", 7, 7))
        stranger.leave()
    (node,) = client.status()["nodes"]
    assert (node["name"], node["state"], node["step"]) == ("i5", "idle", 0)


def test_without_the_token_nothing_can_be_read_or_changed(guarded: Served) -> None:
    guarded.client(TOKEN).join("i5", info())
    for token in ("", "wrong", TOKEN[:-1]):
        client = guarded.client(token)
        client.node, client.secret = next(iter(guarded.hub.membership.nodes)), "x"
        for ask in (
            client.status,
            lambda client=client: client.end("now"),
            lambda client=client: client.join("x", info()),
            lambda client=client: client.beat(Report("idle")),
        ):
            with pytest.raises(HubRefused, match="the token is missing or wrong"):
                ask()
    assert len(guarded.hub.membership.nodes) == 1
    assert not guarded.hub.end_asked
    # What everybody may know before they have the token.
    assert guarded.http.get("/hello").json() == {"lantrain": lantrain.__version__, "token": True, "away": False}
    assert TOKEN not in guarded.http.get("/status", headers={"x-token": TOKEN}).text + str(guarded.said)


def test_tokens_that_are_not_ascii_are_compared_too() -> None:
    made = Served("schlüssel")
    try:
        made.client("schlüssel").status()
        with pytest.raises(HubRefused, match="token"):
            made.client("schlussel").status()
    finally:
        made.close()


def test_strangers_addresses_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.admission, "address_allowed", lambda address: False)
    for path in ("/hello", "/status", "/nothing"):
        answer = served.http.get(path)
        assert answer.status_code == 403
        assert "not in the networks that may join" in answer.json()["detail"]


def test_large_and_endless_bodies_are_refused_unread(served: Served) -> None:
    assert served.http.post("/join", content=b"x" * (MAX_BODY + 1)).status_code == 413
    assert served.http.post("/join", content=iter([b"{}"])).status_code == 413  # chunked: no length
    raw = b"POST /join HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(raw)
        assert b"413" in connection.recv(4096).splitlines()[0]


def test_too_many_requests_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.admission, "_clock", lambda: 1e9)  # all in one moment
    codes = {served.http.get("/hello").status_code for _ in range(210)}
    assert codes == {200, 429}


def test_there_is_room_for_so_many_nodes_and_no_more(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.admission, "within_rate", lambda address: True)
    for number in range(MAX_NODES):
        served.hub.membership.join(f"n{number}", "127.0.0.1", {})
    with pytest.raises(HubRefused, match=f"{MAX_NODES} nodes already"):
        served.client().join("one-more", info())


def test_the_end_is_asked_for_from_the_master_itself(served: Served) -> None:
    served.client().end("enough")
    assert served.hub.end_asked == "enough"
    assert served.hub.membership.phase == "gathering", "a checkpoint comes first"


def test_the_end_is_answered_when_every_worker_has_heard_and_left(served: Served) -> None:
    """`make down` stops this machine's containers next: a worker among them must know by then that it is over."""
    with served.hub.lock:
        master = served.hub.membership.join("i9", "127.0.0.1", info().model_dump(), master=True)
        served.hub.membership.beat(master.id, Report("idle"))
    worker, asker = served.client(), served.client()
    worker.join("i5", info())
    with served.hub.lock:
        served.hub.membership.end(0, "told")
    polls = threading.Semaphore(0)
    ask = asker.status
    asker.status = lambda: (ask(), polls.release())[0]  # type: ignore[method-assign]
    waiting = threading.Thread(target=_await_the_end, args=(asker,))
    waiting.start()
    for _ in range(2):
        assert polls.acquire(timeout=20)
    assert waiting.is_alive(), "the worker has not asked since"
    assert worker.beat(Report("idle"))["order"] == "end"
    assert polls.acquire(timeout=20)
    assert waiting.is_alive(), "told, and not gone yet"
    assert not served.hub.end_answered.is_set()
    worker.leave()
    waiting.join(timeout=20)
    assert not waiting.is_alive()
    assert served.hub.end_answered.is_set()


def test_a_hub_that_goes_down_sends_its_workers_away(served: Served) -> None:
    client = served.client()
    client.join("i5", info())
    served.hub.going_down = True
    assert client.beat(Report("idle")) == {"order": "away"}
    lines: list[str] = []
    with pytest.raises(UserError, match=r"was not there within .*going down and will return"):
        served.client().wait(0.0, lines.append, lambda seconds: False)


def test_port_taken_is_one_line(served: Served) -> None:
    with pytest.raises(UserError, match=rf"cannot listen on 127\.0\.0\.1:{served.port}: Address already in use"):
        HubServer(served.hub, ["127.0.0.1"], served.port)


def random_value(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON value, often of the wrong type, too long, negative, huge or strange."""
    leaves: list[Any] = [
        None, True, -1, 0, 2**31, 2**63, 10**400, 1.5, -0.0, "", "x", "x" * 2000, "\x00", "\ud800", "ä\u202e", "idle",
        "running", "1e999", "../../etc/passwd", "<script>", "%s%n", "Infinity",
    ]  # fmt: skip
    if depth > 3 or draw.random() < 0.6:
        return draw.choice(leaves)
    if draw.random() < 0.5:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    keys = ["node", "name", "info", "state", "generation", "step", "phase", "outcome", "message", "version", "why", "x"]
    return {draw.choice(keys): random_value(draw, depth + 1) for _ in range(draw.randrange(8))}


@pytest.mark.parametrize("seed", range(3))
def test_no_body_makes_the_hub_fail_or_change(served: Served, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.admission, "within_rate", lambda address: True)
    client, draw = served.client(), random.Random(seed)
    client.join("i5", info())
    valid = {
        "/join": {"name": "i7", "info": info(code="other").model_dump()},
        "/beat": {"node": client.node, "state": "running", "generation": 1, "step": 1},
        "/leave": {"node": client.node},
    }
    for _ in range(150):
        path = draw.choice(["/join", "/beat", "/leave", "/status", "/hello", "/nothing"])
        kind = draw.randrange(3)
        if kind == 0:
            body = draw.randbytes(draw.randrange(200))
        elif kind == 1:
            body = json.dumps(random_value(draw)).encode()
        else:
            changed = dict(valid.get(path, {}))
            changed[draw.choice([*changed, "x"])] = random_value(draw)
            body = json.dumps(changed).encode()
        headers = {"content-type": draw.choice(["application/json", "text/plain", ""]), "x-secret": draw.choice("abc")}
        answer = served.http.request(draw.choice(["GET", "POST", "PUT"]), path, content=body, headers=headers)
        assert answer.status_code < 500, (path, body, answer.text)
    (node,) = served.client().status()["nodes"]
    assert (node["name"], node["state"]) == ("i5", "idle")


@pytest.mark.parametrize("seed", range(2))
def test_no_bytes_on_the_port_make_the_hub_fail(served: Served, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.admission, "within_rate", lambda address: True)
    draw = random.Random(seed)
    starts = [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"POST /join HTTP/1.1\r\ncontent-length: -1\r\n",
        b"\x16\x03\x01",
        b"PRI * HTTP/2",
    ]
    for _ in range(25):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
            connection.sendall(draw.choice(starts) + draw.randbytes(draw.randrange(3000)) + b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            while answer := connection.recv(4096):
                assert b"500" not in answer[:15]
    assert served.client().status()["nodes"] == []


def test_what_is_in_the_way_is_told_apart() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        assert "refuses port" in why_unreachable("127.0.0.1", port)
    assert "neither" not in why_unreachable("127.0.0.1", port)


def test_another_program_on_the_port_is_told(served: Served) -> None:
    """A web server that is not the hub: the worker says so and goes on waiting, with no traceback."""
    import http.server
    import threading

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *arguments: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        lines: list[str] = []
        client = HubClient("127.0.0.1", other.server_port)
        with pytest.raises(UserError, match="the master was not there within 0 s"):
            client.wait(0.0, lines.append, lambda seconds: False)
        assert client.wait(60, lines.append, lambda seconds: True) is None, "a stop signal ends the waiting"
        assert "not lantrain's hub" in lines[0]
        other.shutdown()


@pytest.mark.parametrize("given", [["--shares", "3,1"], ["--shares=3,1"]])
def test_shares_are_for_the_ranks_they_name(given: list[str]) -> None:
    assert shares_for(["--depth", "2", *given, "--run=x"], 2, [50.0, 20.5]) == [
        "--depth",
        "2",
        "--shares=3,1",
        "--run=x",
    ]
    assert shares_for(["--depth", "2", *given, "--run=x"], 1, [50.0]) == ["--depth", "2", "--run=x"]


@pytest.mark.parametrize("flag", ["--resume-from-step", "--dry-run", "--world-size"])
def test_flags_that_no_generation_can_go_on_with_are_refused(flag: str) -> None:
    with pytest.raises(UserError, match=f"TRAIN_ARGS: {flag}"):
        with_resume(["--depth=2", f"{flag}=3"])


def test_every_generation_resumes() -> None:
    assert with_resume(["--depth=2"]) == ["--depth=2", "--resume", "auto"]
    assert with_resume(["--resume=auto"]) == ["--resume=auto"]


def test_shares_follow_the_rates_measured_at_joining() -> None:
    assert shares_for(["--run=x"], 2, [50.0, 20.5]) == ["--run=x", "--rates=50,20.5"]
    assert shares_for(["--run=x"], 2, [50.0, 0.0]) == ["--run=x"]  # one was not measured: equal
    assert shares_for(["--run=x"], 1, [50.0]) == ["--run=x"]
