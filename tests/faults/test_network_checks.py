"""The probes on two real hosts: network namespaces joined by a cable, each with its own interfaces and firewall.

Nothing here needs Docker. A blocked port is mended by the command that was printed, typed as it stands.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import APP, TINY

LIMIT_S = 90
MASTER, WORKER = "10.77.1.1", "10.77.1.2"
LAN = "10.77.1.0/24"
FIXED = ("29500", "29501")

HUB = f"""
import signal, time
from lantrain.nodes.admission import Admission, parse_networks
from lantrain.nodes.hub import Hub, RunSettings
from lantrain.nodes.hub_server import HubServer
from lantrain.nodes.membership import Membership
from lantrain.nodes.launcher import code_fingerprint
membership = Membership(time.monotonic, 2, lambda line: print(line, flush=True))
settings = RunSettings("{MASTER}", 29500, {TINY!r})
hub = Hub(membership, Admission(parse_networks("{LAN}")), settings, code_fingerprint())
server = HubServer(hub, ["{MASTER}"], 29501)
print("up", flush=True)
signal.pause()
"""
"""The hub alone: no trainer, so that each check takes a second."""

PORT_PROBES = f"""
import json
from lantrain.probes import preflight, here as probes_here
from lantrain.nodes.client import HubClient
from lantrain.probes.result import failed
client = HubClient("{MASTER}", 29501)
facts = preflight.ask_facts(client)
sides = preflight.Sides(client, facts, probes_here.on_route(facts.address))
results = preflight.port_probes(sides)
preflight.tell_master(sides, failed(results))
print(json.dumps([result.as_json() | {{"block": result.block()}} for result in results]))
"""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


@dataclass
class Host:
    """A namespace: one machine of the LAN."""

    name: str
    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def _command(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def _variables(self, more: dict[str, str] | None = None) -> dict[str, str]:
        paths = f"{self.folder}:{os.environ['PATH']}"
        own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PATH": paths, "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **own, "NANOCHAT_BASE_DIR": str(self.folder / self.name), **(more or {})}

    def run(self, *command: str, more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(command), cwd=APP, env=self._variables(more), capture_output=True, text=True, timeout=LIMIT_S
        )

    def must(self, *command: str) -> None:
        done = self.run(*command)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"

    def type(self, line: str) -> None:
        """What a person would type, as it stands."""
        self.must("sh", "-c", line)

    def start(self, log: str, *command: str, more: dict[str, str] | None = None) -> subprocess.Popen[str]:
        with open(self.folder / log, "w") as file:
            process = subprocess.Popen(
                self._command(command), cwd=APP, env=self._variables(more), text=True, stdout=file, stderr=file
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()

    def wait_for(self, log: str, text: str, seconds: float = LIMIT_S) -> str:
        until = time.monotonic() + seconds
        while text not in self.log(log):
            assert time.monotonic() < until, f"no {text!r} in {log}:\n{self.log(log)}"
            assert any(process.poll() is None for process in self.processes), self.log(log)
            time.sleep(0.1)
        return self.log(log)

    def firewall(self, verdict: Sequence[str], ports: Sequence[str] = ()) -> None:
        """Let in only `ports` and answers to what this host began."""
        rules = [["-i", "lo", "-j", "ACCEPT"], ["-m", "conntrack", "--ctstate", "ESTABLISHED", "-j", "ACCEPT"]]
        rules += [["-p", "tcp", "--dport", port, "-j", "ACCEPT"] for port in ports]
        for rule in [*rules, ["-p", "tcp", "-j", *verdict]]:
            self.must("iptables", "-A", "INPUT", *rule)

    def doctor(self, *arguments: str, more: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        done = self.run(sys.executable, "-m", "scripts.doctor", *arguments, "--json", more=more)
        assert done.stdout, done.stderr
        return done.returncode, {probe["name"]: probe for probe in json.loads(done.stdout)["probes"]}

    def port_probes(self) -> dict[str, Any]:
        done = self.run(sys.executable, "-c", PORT_PROBES)
        assert done.returncode == 0, done.stderr
        return {probe["name"]: probe for probe in json.loads(done.stdout)}


@dataclass
class Cable:
    """Two hosts, and what is plugged into them beside the cable between them."""

    master: Host
    worker: Host

    @property
    def hosts(self) -> tuple[Host, Host]:
        return self.master, self.worker


def _missing() -> str:
    tools = [tool for tool in ("ip", "iptables", "tc") if shutil.which(tool) is None]
    if tools:
        return f"needs {' and '.join(tools)}"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    name = f"lt-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.strip()}"
    tried = subprocess.run(["ip", "netns", "exec", name, "iptables", "-S"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=False)
    return "" if tried.returncode == 0 else f"no iptables in a namespace: {tried.stderr.strip()}"


def _skip_without_namespaces() -> None:
    missing = _missing()
    if missing and os.environ.get("CI") == "true":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _cable(folder: Path) -> Iterator[Cable]:
    names = [f"lt{os.getpid()}-{folder.name[:20]}-{side}" for side in ("master", "worker")]
    sudo = folder / "sudo"  # the tests are root, and a container has no sudo
    sudo.write_text('#!/bin/sh\nexec "$@"\n')
    sudo.chmod(0o755)
    made = Cable(*(Host(name, folder) for name in names))
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        ends = ["lan0", "type", "veth", "peer", "name", "lan0", "netns", names[1]]
        _run("ip", "-n", names[0], "link", "add", *ends)
        for name, address in zip(names, (MASTER, WORKER), strict=True):
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "lan0")
            _run("ip", "-n", name, "link", "set", "lan0", "up")
        yield made
    finally:
        for host in made.hosts:
            for process in host.processes:
                if process.poll() is None:
                    _stop(process)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture(scope="module")
def cable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cable]:
    _skip_without_namespaces()
    with _cable(tmp_path_factory.mktemp("lan")) as made:
        yield made


@pytest.fixture(scope="module")
def with_hub(cable: Cable) -> Cable:
    cable.master.start("hub.log", sys.executable, "-c", HUB)
    cable.master.wait_for("hub.log", "up\n")
    return cable


@pytest.fixture
def lan(with_hub: Cable) -> Iterator[Cable]:
    """The hub is up; afterwards no rule is left."""
    try:
        yield with_hub
    finally:
        for host in with_hub.hosts:
            host.must("iptables", "-F", "INPUT")


@contextmanager
def _extra(host: Host, name: str, address: str, *more: str) -> Iterator[None]:
    """An interface beside the cable; its other end is plugged into nothing."""
    host.must("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}-x")
    try:
        host.must("ip", "address", "add", address, "dev", name)
        for end in (name, f"{name}-x"):
            host.must("ip", "link", "set", end, "up")
        for route in more:
            host.must("ip", "route", "add", route, "dev", name)
        yield
    finally:
        host.must("ip", "link", "del", name)


def test_open_network_passes_every_check_within_thirty_seconds(lan: Cable) -> None:
    start = time.monotonic()
    code, probes = lan.worker.doctor(MASTER)
    assert time.monotonic() - start < 30
    assert code == 0
    assert {probe["status"] for probe in probes.values()} <= {"ok", "warn"}, probes
    assert f"lan0, {WORKER}" in probes["route"]["seen"]
    assert float(probes["link"]["seen"].split(" MB/s")[0]) > 10
    assert {"train-port", "ports-to-master", "ports-to-worker", "versions", "clock", "memory", "gemm"} <= set(probes)


def test_slow_link_is_measured_in_a_bounded_time_and_noted(lan: Cable) -> None:
    """16 Mbit/s are 2 MB/s: 64 MiB would take half a minute, the measurement 3 s."""
    shape = ["tc", "qdisc", "add", "dev", "lan0", "root", "tbf", "rate", "16mbit", "burst", "32k", "latency", "100ms"]
    lan.master.must(*shape)
    try:
        start = time.monotonic()
        code, probes = lan.worker.doctor(MASTER)
        assert time.monotonic() - start < 30
    finally:
        lan.master.must("tc", "qdisc", "del", "dev", "lan0", "root")
    assert code == 0
    assert probes["link"]["status"] == "warn"
    assert 1 < float(probes["link"]["seen"].split(" MB/s")[0]) < 2.2


DROP, REJECT = ["DROP"], ["REJECT"]
PROHIBITED = ["REJECT", "--reject-with", "icmp-host-prohibited"]  # firewalld's


@pytest.mark.parametrize("verdict", [DROP, REJECT, PROHIBITED], ids=lambda verdict: verdict[-1])
@pytest.mark.parametrize("side", ["master", "worker"])
def test_printed_rule_mends_closed_high_ports(lan: Cable, side: str, verdict: list[str]) -> None:
    blocked = lan.master if side == "master" else lan.worker
    other = {"master": "worker", "worker": "master"}[side]
    blocked.firewall(verdict, FIXED if side == "master" else ())
    probes = lan.worker.port_probes()
    assert probes["train-port"]["status"] == "ok"
    assert probes[f"ports-to-{other}"]["status"] == "ok", probes
    bad = probes[f"ports-to-{side}"]
    assert bad["status"] == "fail"
    seen = {"DROP": "no answer within", "REJECT": "refused at once", "icmp-host-prohibited": "unreachable"}
    assert seen[verdict[-1]] in bad["seen"]
    address, role = (MASTER, "the master (") if side == "master" else (WORKER, "this machine (")
    assert address in bad["where"]
    assert role in bad["where"]
    assert f"-s {LAN} " in bad["mend"]["iptables"]
    assert all(LAN in command for command in bad["mend"].values())
    if side == "master":  # whoever sits at the master reads it there
        assert bad["mend"]["iptables"] in lan.master.wait_for("hub.log", bad["mend"]["iptables"], 5)
    blocked.type(bad["mend"]["iptables"])
    assert {probe["status"] for probe in lan.worker.port_probes().values()} == {"ok"}


def test_closed_train_port_is_told_apart_from_closed_high_ports(lan: Cable) -> None:
    lan.master.firewall(DROP, ["29501", "32768:60999"])
    probes = lan.worker.port_probes()
    assert [name for name, probe in probes.items() if probe["status"] == "fail"] == ["train-port"]
    assert "port 29500 of" in probes["train-port"]["tried"]
    lan.master.type(probes["train-port"]["mend"]["iptables"])
    assert {probe["status"] for probe in lan.worker.port_probes().values()} == {"ok"}


@pytest.mark.parametrize(("verdict", "seen"), [(DROP, "no answer within"), (REJECT, "refused at once")])
def test_hub_behind_a_firewall(lan: Cable, verdict: list[str], seen: str) -> None:
    lan.master.firewall(verdict)
    start = time.monotonic()
    code, probes = lan.worker.doctor(MASTER)
    assert time.monotonic() - start < 30
    assert code == 1
    assert seen in probes["hub-port"]["seen"]
    assert MASTER in probes["hub-port"]["where"]


def test_address_that_no_machine_has_is_told_from_a_firewall(lan: Cable) -> None:
    script = """
from lantrain.probes.ports import REACH_SECONDS, hub_port, try_connect
print(hub_port(try_connect("10.77.1.50", 29501, REACH_SECONDS), master="10.77.1.50", mend={}).seen)
"""
    assert "unreachable (No route to host)" in lan.worker.run(sys.executable, "-c", script).stdout


def test_holder_of_the_train_port_is_named_on_both_machines(lan: Cable) -> None:
    listener = "import socket, signal; s = socket.create_server(('', 29500)); print('held', flush=True); signal.pause()"
    held = lan.master.start("held.log", sys.executable, "-c", listener)
    try:
        lan.master.wait_for("held.log", "held")
        code, here = lan.master.doctor(more={"HUB_PORT": "29601"})  # as if no master were up yet
        there = lan.worker.port_probes()["train-port"]
    finally:
        _stop(held)
    assert code == 1
    pid = f"process {held.pid}"
    assert here["port-held"]["status"] == "fail"
    assert "port 29500 is held by python" in here["port-held"]["seen"]
    assert pid in here["port-held"]["seen"]
    assert "sport = :29500" in here["port-held"]["mend"]["see who"]
    assert there["status"] == "fail"
    assert pid in there["seen"]
    assert "MASTER_PORT=" in there["mend"]["use another"]


def test_master_that_is_up_is_no_stranger_on_its_ports(lan: Cable) -> None:
    code, probes = lan.master.doctor()
    assert code == 0
    assert "a lantrain master is up here" in probes["port-held"]["seen"]


def test_master_with_lookalike_interfaces_announces_its_lan_address(lan: Cable) -> None:
    with (
        _extra(lan.master, "docker0", "172.17.0.1/16"),
        _extra(lan.master, "tailscale0", "100.101.102.103/10"),
        _extra(lan.master, "wg0", "10.8.0.1/24"),
    ):
        _, probes = lan.master.doctor()
        assert probes["address"]["status"] == "ok"
        assert f"{MASTER} on lan0" in probes["address"]["seen"]
        assert probes["vpn"]["status"] == "ok"
        assert probes["vpn"]["seen"] == "tailscale0, wg0 not used"


def test_route_through_a_vpn_is_noted(lan: Cable) -> None:
    """A lookalike that nothing answers behind."""
    with _extra(lan.worker, "tailscale0", "100.101.102.104/10", "10.99.0.1/32"):
        script = "from lantrain.probes import here; print(here.vpn('10.99.0.1').line())"
        said = lan.worker.run(sys.executable, "-c", script).stdout
    assert "the route to 10.99.0.1 goes through tailscale0" in said
    assert "make up-worker HOST=<the master's LAN address>" in said


def test_two_interfaces_on_one_subnet_are_both_named(lan: Cable) -> None:
    with _extra(lan.worker, "wlan0", "10.77.1.77/24"):
        _, probes = lan.worker.doctor(MASTER)
    twin = probes["same-subnet"]
    assert twin["status"] == "warn"
    assert f"lan0 ({WORKER})" in twin["seen"]
    assert "wlan0 (10.77.1.77)" in twin["seen"]
    assert twin["mend"] == {"": "nmcli device disconnect wlan0"}


def test_blocked_machines_train_once_the_printed_rules_are_typed(corpus: Path, tmp_path: Path) -> None:
    """Both firewalls are closed; nothing is started again, the launchers wait for the rules."""
    _skip_without_namespaces()
    with _cable(tmp_path) as lan:
        shutil.copytree(corpus, tmp_path / lan.master.name)
        lan.master.firewall(DROP, FIXED)
        lan.worker.firewall(DROP)
        flags = [*TINY, "--num-iterations=20", "--model-tag=probes"]
        more = {"TRAIN_ARGS": shlex.join(flags), "NODES": "2", "WAIT": "60"}
        master = lan.master.start("master.log", sys.executable, "-m", "scripts.node", "master", more=more)
        worker = lan.worker.start("worker.log", sys.executable, "-m", "scripts.node", "worker", MASTER, more=more)
        lan.worker.wait_for("worker.log", "next try in 10 s")
        told = lan.worker.log("worker.log")
        commands = [line.split("iptables:")[1].strip() for line in told.splitlines() if "iptables:" in line]
        assert len(commands) == 2, told
        ours, theirs = ((c for c in commands if side in c) for side in ("32768", "29500"))
        rule_there = next(theirs)
        assert rule_there in lan.master.wait_for("master.log", rule_there, 10)
        lan.master.type(rule_there)
        lan.worker.type(next(ours))
        lan.worker.wait_for("worker.log", "the way is open now")
        logs = f"{lan.master.log('master.log')}\n{lan.worker.log('worker.log')}"
        assert [process.wait(timeout=LIMIT_S) for process in (worker, master)] == [0, 0], logs
        rows = [line.split() for line in lan.master.log("master.log").splitlines() if WORKER in line]
        table = next(row for row in rows if row[0] == "1")
        assert float(table[-3]) > 1, table  # MB/s, ms, share of the rows
        assert float(table[-2]) > 0, table
        assert 0 < int(table[-1].rstrip("%")) < 100, table
        metrics = (tmp_path / lan.master.name / "base_checkpoints" / "probes" / "metrics.jsonl").read_text()
        steps = [json.loads(line)["step"] for line in metrics.splitlines() if "loss" in json.loads(line)]
        assert steps == list(range(1, 21))
