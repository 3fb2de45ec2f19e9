"""Hosts of a home network: containers of the shipped image with a launcher in each, and what can happen to them.

Each has a fixed address on a bridge network of the test's own, a hostname that means 127.0.1.1 (as Debian and Ubuntu
have it), a volume, and the restart policy of compose.multinode.yaml. A crash is a SIGKILL to the container's first
process from outside: `docker kill` would count as a wish, after which Docker does not start it again.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import docker
from docker.models.containers import Container
from docker.types import IPAMConfig, IPAMPool

from tests.containers import engine
from tests.distributed.ranks import TINY

LIMIT_S = 240
"""No state is waited for any longer."""
TAG = "lan"
ENDLESS = 100_000
SCHEDULE = [
    *TINY, f"--model-tag={TAG}", f"--num-iterations={ENDLESS}", "--save-every=20", "--tracker=none",
    "--warmup-steps=200", "--matrix-lr=0.005", "--embedding-lr=0.05", "--unembedding-lr=0.002", "--scalar-lr=0.05",
]  # fmt: skip
"""The learning rates follow the same schedule whatever --stop-after says, so that runs of any length can be compared;
low ones, so that differences of rounding are not enlarged from step to step."""


def flags(steps: int = ENDLESS) -> list[str]:
    """The trainer's flags for a run of `steps` steps."""
    return [*SCHEDULE, f"--stop-after={steps}"]


def archive(folder: Path) -> bytes:
    """`folder`'s files as a tar archive of the image's user, without the checkpoints of other tests' runs."""
    buffer = io.BytesIO()

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 1000
        return entry

    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            if path.name != "base_checkpoints":
                tar.add(path, path.name, filter=owned)
    return buffer.getvalue()


def one_file(name: str, content: bytes) -> bytes:
    """A tar archive of one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        entry.mode = 0o644
        tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def set_link(name: str, *, up: bool) -> None:
    """`ip link set NAME up` or `down`, where there may be no `ip`."""
    get_flags, set_flags, is_up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        answer = fcntl.ioctl(control, get_flags, struct.pack("16sH22x", name.encode(), 0))
        (flags_now,) = struct.unpack("16xH22x", answer)
        flags_then = flags_now | is_up if up else flags_now & ~is_up
        fcntl.ioctl(control, set_flags, struct.pack("16sH22x", name.encode(), flags_then))


def until(condition: Callable[[], Any], what: str, explain: Callable[[], str], limit: float = LIMIT_S) -> Any:
    """The first true value of `condition`; AssertionError with `explain()` after `limit` seconds."""
    end = time.monotonic() + limit
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"no {what} within {limit:.0f} s\n{explain()}"
        time.sleep(0.2)


class Check(Protocol):
    """Compares an ended run with the undisturbed one: each step there once, and its loss."""

    def __call__(self, steps: int | None, *, compared: int = ...) -> list[dict[str, Any]]: ...


class Host:
    """A machine: one container that can be killed, stopped, frozen, cut off and started again."""

    def __init__(self, container: Container, name: str, address: str) -> None:
        self.container, self.name, self.address = container, name, address

    def logs(self) -> str:
        return str(self.container.logs().decode(errors="replace"))

    def says(self, pattern: str) -> bool:
        return re.search(pattern, self.logs(), re.MULTILINE) is not None

    def state(self) -> dict[str, Any]:
        self.container.reload()
        return dict(self.container.attrs["State"])

    def start(self) -> Host:
        self.container.start()
        return self

    def crash(self) -> None:
        """SIGKILL the container's first process, and with it all others, as a power cut would."""
        os.kill(int(self.state()["Pid"]), signal.SIGKILL)

    def stop(self, seconds: int = 120) -> float:
        """`docker stop`: SIGTERM, and SIGKILL after the grace period. Returns how long it took."""
        started = time.monotonic()
        self.container.stop(timeout=seconds)
        return time.monotonic() - started

    def trainer(self) -> int:
        """Process id, on the test's machine, of the trainer."""
        for pid, line in self.container.top(ps_args="-eo pid,args")["Processes"]:
            if "scripts.base_train" in line and "torchrun" not in line:
                return int(pid)
        raise AssertionError(f"{self.name} has no trainer\n{self.logs()}")

    def link(self, state: str) -> None:
        """Set the host's side of the container's cable `up` or `down`; no packet says so to anybody."""
        index = self.exec("cat /sys/class/net/eth0/iflink").strip()
        (card,) = (card for card in Path("/sys/class/net").iterdir() if (card / "ifindex").read_text().strip() == index)
        set_link(card.name, up={"up": True, "down": False}[state])

    def in_its_network(self, *command: str) -> None:
        """Run a program of the test's machine in the container's network, with root's rights."""
        done = subprocess.run(
            ["nsenter", "--target", str(self.state()["Pid"]), "--net", *command], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    def exec(self, line: str) -> str:
        code, output = self.container.exec_run(["bash", "-c", line])
        assert code == 0, f"{line}: exit {code}\n{output.decode()}"
        return str(output.decode())

    def code(self, limit: float = LIMIT_S) -> int:
        """Exit code once Docker does not start the container again."""
        until(lambda: self.state()["Status"] == "exited", f"end of {self.name}", self.logs, limit)
        return int(self.state()["ExitCode"])


class Lan:
    """A network with hosts; number 0 is the master, with the data."""

    def __init__(self, client: docker.DockerClient, image: str, network: Any, prefix: str, data: bytes) -> None:
        self._client, self._image, self._network, self._prefix, self._data = client, image, network, prefix, data
        self.hosts: list[Host] = []
        self._volumes: list[Any] = []

    @property
    def master(self) -> Host:
        (host,) = (host for host in self.hosts if host.address == self.address(0))
        return host

    def explain(self) -> str:
        return "\n".join(f"===== {host.name} ({host.address})\n{host.logs()[-6000:]}" for host in self.hosts)

    def address(self, number: int) -> str:
        return f"{self._prefix}.{10 + number}"

    def add(
        self, number: int, command: list[str], *, writable: bool = False, folder: Path | None = None,
        options: dict[str, Any] | None = None, **env: str,
    ) -> Host:  # fmt: skip
        """Make host `number`, not started yet; `writable` if the test changes files of the image.

        A step of the tiny model is so short that no network would be worth it: every machine is taken all the same.
        """
        name = ("i9", "i5", "laptop", "attic")[number]
        where = str(folder) if folder else self._volume()
        endpoint = self._client.api.create_endpoint_config(ipv4_address=self.address(number))
        container = self._client.containers.create(
            self._image, command, hostname=name, extra_hosts={name: "127.0.1.1"}, labels=engine.labels(),
            network=self._network.name, networking_config={self._network.name: endpoint},
            volumes={where: {"bind": "/data", "mode": "rw"}}, tmpfs={"/tmp": "mode=1777"},
            restart_policy={"Name": "on-failure"}, environment={"OMP_NUM_THREADS": "1", "KEEP_SLOW": "1", **env},
            **{**engine.HARDENED, "read_only": not writable, **(options or {})},
        )  # fmt: skip
        host = Host(container, name, self.address(number))
        self.hosts.append(host)
        return host

    def _volume(self) -> str:
        volume = self._client.volumes.create(labels=engine.labels())
        self._volumes.append(volume)
        return str(volume.name)

    def fill(self, folder: Path) -> None:
        """Unpack the corpus and the tokenizer into `folder`, owned by the image's user."""
        with tarfile.open(fileobj=io.BytesIO(self._data)) as tar:
            tar.extractall(folder, filter="fully_trusted", numeric_owner=True)
        os.chown(folder, 1000, 1000)

    def up_master(
        self, steps: int = ENDLESS, *more: str, folder: Path | None = None, options: dict[str, Any] | None = None,
        **env: str,
    ) -> Host:  # fmt: skip
        """`make up-master` on a host whose volume has a corpus and a tokenizer, or with `folder` as it is."""
        arguments = " ".join([*flags(steps), *more])
        command = ["python", "-m", "scripts.node", "master"]
        host = self.add(0, command, folder=folder, options=options, TRAIN_ARGS=arguments, **env)
        if folder is None:
            host.container.put_archive("/data", self._data)
        return host.start()

    def end(self) -> None:
        """`make down` on the master, as far as the run is concerned."""
        self.master.exec("python -m scripts.node end")

    def up_worker(
        self, number: int = 1, *, host: str | None = None, code: bytes = b"", options: dict[str, Any] | None = None,
        **env: str,
    ) -> Host:  # fmt: skip
        """`make up-worker HOST=...` on another host, whose volume is empty; with `code` in a file of the package."""
        where = self.address(0) if host is None else host
        command = ["python", "-m", "scripts.node", "worker"]
        made = self.add(number, command, writable=bool(code), options=options, HOST=where, **env)
        if code:
            made.container.put_archive("/app/lantrain", one_file("other.py", code))
        return made.start()

    def until(self, condition: Callable[[], Any], what: str, limit: float = LIMIT_S) -> Any:
        return until(condition, what, self.explain, limit)

    def step(self) -> int:
        """The last step that the master's log shows."""
        steps = re.findall(r"^step (\d+)/", self.master.logs(), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step}")

    def until_ranks(self, ranks: int, since: float) -> None:
        """Until a step was made by `ranks` ranks after the time `since`."""
        self.until(
            lambda: any(r["time"] > since and r["ranks"] == ranks for r in self.records()), f"step of {ranks} ranks"
        )

    def generations(self) -> list[int]:
        """Ranks of every generation that was started, in order, also by a master before it was restarted."""
        return [
            int(ranks) for ranks in re.findall(r"^\[lantrain\] generation \d+: (\d+) ranks", self.master.logs(), re.M)
        ]

    def until_again(self, ranks: int, after: int) -> None:
        """Until one more than `after` generations were started, the last of them with `ranks`, and it makes steps."""
        self.until(
            lambda: len(found := self.generations()) > after and found[-1] == ranks, f"a generation of {ranks} ranks"
        )
        self.until_ranks(ranks, time.time())

    def records(self) -> list[dict[str, Any]]:
        """One object a step, from the master's metrics file; a line that is being written does not count."""
        try:
            chunks, _ = self.master.container.get_archive(f"/data/base_checkpoints/{TAG}/metrics.jsonl")
        except docker.errors.NotFound:
            return []
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            (member,) = tar.getmembers()
            file = tar.extractfile(member)
            assert file is not None
            lines = file.read().decode().splitlines(keepends=True)
        values = [json.loads(line) for line in lines if line.endswith("\n")]
        return [value for value in values if "loss" in value]

    def codes(self, *hosts: Host) -> dict[str, int]:
        return {host.name: host.code() for host in (hosts or self.hosts)}

    def seconds_to_next_step(self, event: float) -> float:
        """From `event` to the first step after the pause that it caused; 0 when it caused none."""
        last = event
        for record in sorted(self.records(), key=lambda record: record["time"]):
            if record["time"] > event:
                if record["time"] - last > 1.5:
                    return float(record["time"] - event)
                last = record["time"]
        return 0.0

    def close(self) -> None:
        for host in self.hosts:
            host.container.remove(force=True, v=True)
        for volume in self._volumes:
            volume.remove(force=True)


@contextmanager
def lan(client: docker.DockerClient, image: str, data: bytes) -> Iterator[Lan]:
    """A network nobody else uses, and whatever hosts the test puts on it."""
    last: Exception | None = None
    for number in range(20, 60):
        prefix = f"10.213.{number}"
        pool = IPAMConfig(pool_configs=[IPAMPool(subnet=f"{prefix}.0/24")])
        name = f"{engine.PROJECT}-lan{number}"
        try:
            network = client.networks.create(name, driver="bridge", ipam=pool, labels=engine.labels())
            break
        except docker.errors.APIError as error:  # somebody else's subnet
            last = error
    else:
        raise AssertionError(f"no free subnet: {last}")
    made = Lan(client, image, network, prefix, data)
    try:
        yield made
    finally:
        made.close()
        network.remove()
