"""Two commands on two machines, in any order; and what is refused, in words."""

from __future__ import annotations

import re
import time

import pytest

from tests.faults.hosts import Check, Lan, one_file


@pytest.mark.long
def test_a_worker_a_whole_minute_before_its_master(lan: Lan, check: Check) -> None:
    worker = lan.up_worker()
    began = time.monotonic()
    lan.until(lambda: time.monotonic() - began > 60, "60 s")
    assert len(re.findall(r"waiting for the master \(\d+ s of 600\): .* refuses|cannot be reached", worker.logs())) > 2
    lan.up_master(40)
    assert lan.codes() == {"i9": 0, "i5": 0}, lan.explain()
    assert {record["ranks"] for record in check(40)} == {2}


def test_worker_first_then_master_to_the_end(lan: Lan, check: Check) -> None:
    worker = lan.up_worker()
    lan.until(lambda: worker.says("waiting for the master"), "line that says what is missing")
    master = lan.up_master()
    lan.until_step(5)
    table = master.exec("python -m scripts.node status")
    assert re.search(r"^running, generation 1, step \d+", table), table
    assert re.search(rf"^0 +i9 +{re.escape(lan.address(0))}", table, re.M), table
    assert re.search(rf"^1 +i5 +{re.escape(lan.address(1))}", table, re.M), table
    assert "running, generation 1" in worker.exec("python -m scripts.node status")
    files = worker.exec("find /data -type f")
    lan.end()
    assert lan.codes() == {"i9": 0, "i5": 0}, lan.explain()
    records = check(None)
    assert {record["ranks"] for record in records} == {2}
    assert f"make up-worker HOST={lan.address(0)}" in master.logs()
    assert "Traceback" not in master.logs() + worker.logs()
    assert "socket" not in worker.logs(), "no warnings about looking up hostnames"
    assert files == "", "a worker keeps nothing"


def test_rootless_docker_is_told_by_its_interface(lan: Lan) -> None:
    """Its own network namespace has a tap0 on 10.0.2.0/24; the container's is given one here."""
    host = lan.up_worker()
    host.in_its_network("ip", "link", "add", "tap0", "type", "veth", "peer", "name", "tap0-x")
    host.in_its_network("ip", "address", "add", "10.0.2.100/24", "dev", "tap0")
    for end in ("tap0", "tap0-x"):
        host.in_its_network("ip", "link", "set", end, "up")
    code, output = host.container.exec_run(["python", "-m", "scripts.doctor"])
    assert code == 1, output.decode()
    assert "check failed: container-network\n" in output.decode()
    assert "rootless Docker" in output.decode()
    assert "run without Docker" in output.decode()


@pytest.mark.long
def test_three_nodes(lan: Lan, check: Check) -> None:
    lan.up_master(60, NODES="3")
    lan.up_worker(1)
    lan.up_worker(2)
    assert lan.codes() == {"i9": 0, "i5": 0, "laptop": 0}, lan.explain()
    assert {record["ranks"] for record in check(60)} == {3}


@pytest.mark.long
def test_a_worker_that_lets_in_only_the_master_is_told_and_mended_by_the_printed_rule(lan: Lan, check: Check) -> None:
    """Two machines train well, and with the third none would: the way between the workers is tried before it joins."""
    lan.up_master(60, NODES="3")
    closed = lan.up_worker(1)
    lan.until(lambda: closed.says("joined as i5"), "first worker")
    closed.in_its_network("iptables", "-A", "INPUT", "-s", lan.address(2), "-p", "tcp", "--syn", "-j", "DROP")
    joins = lan.up_worker(2)
    lan.until(lambda: joins.says(r"TYPE ON the worker i5 \("), "what to type, on the one that joins")
    lan.until(lambda: closed.says(rf"{re.escape(lan.address(2))} cannot join yet"), "what to type, where to type it")
    typed = re.search(r"iptables: +sudo (iptables .*)$", closed.logs(), re.M)
    assert typed, closed.logs()
    closed.in_its_network(*typed[1].split())
    assert lan.codes() == {"i9": 0, "i5": 0, "laptop": 0}, lan.explain()
    assert joins.says("the way is open now")
    assert {record["ranks"] for record in check(60)} == {3}


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("", "HOST is empty"),
        (" '' ", "HOST is empty"),
        ("no_such.name.invalid", "does not resolve"),
        ("192.168.1", "neither a name nor an address"),
        ("0.0.0.0", "no machine's address"),
    ],
)
def test_a_wrong_host_is_one_line_and_no_second_try(lan: Lan, host: str, words: str) -> None:
    worker = lan.up_worker(host=host)
    lan.until(lambda: worker.says("not starting again"), "second start", 60)
    worker.code()
    log = worker.logs()
    assert re.search(rf"^error: .*{words}", log, re.M), log
    assert "Traceback" not in log
    assert log.count("worker starting") == 2


def test_wrong_token_and_other_code_are_refused_and_the_right_worker_trains(lan: Lan, check: Check) -> None:
    secret = "correct-horse"
    master = lan.up_master(TOKEN=secret)
    wrong = lan.up_worker(1, TOKEN="battery-staple")
    other = lan.up_worker(2, code=b"VERSION = 'another'\n", TOKEN=secret)
    for worker, words in ((wrong, "the token is missing or wrong"), (other, "code")):
        lan.until(lambda worker=worker: worker.says("not starting again"), "refusal", 90)
        assert re.search(rf"{words}", worker.logs()), worker.logs()
        assert worker.code() == 0
    assert not master.says(r"laptop \(\S+\) joined")
    right = lan.up_worker(3, TOKEN=secret)
    lan.until_step(1)
    for host in (master, right):
        assert secret not in str(host.container.top(ps_args="-eo pid,args"))
    lan.end()
    assert lan.codes(master, right) == {"i9": 0, "attic": 0}, lan.explain()
    check(None)
    everything = lan.explain()
    assert secret not in everything
    assert "battery-staple" not in everything


@pytest.mark.long
def test_port_taken(lan: Lan) -> None:
    squat = "import socket; s = socket.create_server(('0.0.0.0', 29501)); print('here', flush=True); s.accept()"
    line = f'python -c "{squat}" & until python -m scripts.node master; do exit $?; done'
    master = lan.add(0, ["bash", "-c", line], TRAIN_ARGS="--depth 2").start()
    lan.until(lambda: master.says("not starting again"), "second start", 60)
    assert re.search(r"29501 .*HUB_PORT=\d+", master.logs(), re.S), master.logs()


def test_wrong_flags_end_the_master_once_and_for_all(lan: Lan) -> None:
    master = lan.up_master(40, "--total-batch-size=500")
    lan.until(lambda: master.says("not starting again"), "second start", 60)
    assert master.code() == 0
    assert re.search(r"^error: total-batch-size 500 is not a multiple", master.logs(), re.M), master.logs()
    assert master.logs().count("master starting") == 2


def test_a_trainer_that_cannot_go_on_ends_every_node_with_the_reason(lan: Lan) -> None:
    """A shard that is none: found by the trainer, when all have joined."""
    master = lan.up_master(40)
    master.container.put_archive("/data/base_data_climbmix", one_file("shard_00000.parquet", b"PAR1 no PAR1"))
    worker = lan.up_worker()
    for host in (master, worker):
        lan.until(lambda host=host: host.says("not starting again"), "end by a mistake", 120)
        assert "shard_00000.parquet" in host.logs()
        host.code()
    assert len(re.findall(r"^\[lantrain\] generation \d+: 2 ranks", master.logs(), re.M)) == 1


def test_who_waits_can_be_stopped(lan: Lan) -> None:
    """A worker without a master, then a master without a worker."""
    worker = lan.up_worker()
    lan.until(lambda: worker.says("waiting for the master"), "waiting worker")
    worker.stop()
    assert worker.code() == 128 + 15, "137 would be Docker's patience"
    master = lan.up_master()
    lan.until(lambda: master.says("waiting for 2 nodes, 1 here: i9"), "waiting master")
    master.stop()
    assert master.code() == 128 + 15, "137 would be Docker's patience"
