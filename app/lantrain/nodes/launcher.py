"""What the launchers of master and worker share: their voice, this machine's description, and stop requests."""

from __future__ import annotations

import hashlib
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

import lantrain
from lantrain.cluster.cores import usable_cores
from lantrain.nodes.messages import NodeInfo

STOP_GRACE_SECONDS = 90.0
"""For a step, and the checkpoint after it, when this node is told to stop; compose's grace period is longer."""


def say(line: str) -> None:
    """A line of the launcher, told apart from the trainer's."""
    print(f"[lantrain] {line}", flush=True)


def code_fingerprint() -> str:
    """A short hash of this package's sources: two machines with different code do not train together."""
    digest = hashlib.sha256()
    root = Path(lantrain.__file__).parent
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def describe_node(interface: str) -> NodeInfo:
    """This machine, as the node table shows it."""
    import torch

    from lantrain.cluster.cores import choose_threads
    from lantrain.cluster.gemm import choose_dtype, gemm_rate
    from lantrain.nodes.arithmetic import cpu_class, update_digest

    threads, _ = choose_threads()
    torch.set_num_threads(threads)
    dtype, _ = choose_dtype()
    return NodeInfo(
        version=lantrain.__version__, code=code_fingerprint(), torch=str(torch.__version__),
        python=platform.python_version(), interface=interface, cores=usable_cores(), threads=threads,
        memory_mib=int(psutil.virtual_memory().available / 2**20), gemm_gflops=round(gemm_rate(dtype) / 1e9, 1),
        dtype=str(dtype).removeprefix("torch."), cpu=cpu_class(), update=update_digest(),
    )  # fmt: skip


class StopRequest:
    """SIGTERM and SIGINT, remembered; `wait` returns early when one comes."""

    def __init__(self) -> None:
        self.number = 0
        self._interrupt = False
        self._event = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._event.set()
        if self._interrupt:
            raise SystemExit(128 + number)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal ends the process where it is: nothing needs a step boundary yet."""
        self._interrupt = True
        try:
            yield
        finally:
            self._interrupt = False

    def wait(self, seconds: float) -> bool:
        """Sleep, but not through a signal. Whether one has come."""
        return self._event.wait(seconds)
