"""What a probe says: one result a probe, as a line, as a block that tells what to type and where, and as a table.

The probes themselves: `here` (this machine's network), `ports` (connections), `between` (those of two workers), `room`
(memory and disk), `compare` (with the master, or measured against it). docs/troubleshooting.md has a section
for each name in PROBES; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["ok", "warn", "fail"]
State = Literal["open", "refused", "unreachable", "filtered"]

PROBES = {
    "route": "the interface that the kernel's route to the master uses",
    "hostname": "whether this machine's own name resolves to loopback",
    "same-subnet": "a second interface on the same subnet",
    "vpn": "whether the route to the master goes through a VPN",
    "container-network": "whether the container's host network is the machine's",
    "address": "the address that the master tells the workers",
    "port-held": "whether a program holds one of the master's two ports",
    "hub-port": "a connection to the hub's port on the master",
    "train-port": "a connection to torchrun's port on the master",
    "ports-to-master": "connections from this machine to random high ports of the master",
    "ports-to-worker": "connections from the master to random high ports of this machine",
    "ports-to-workers": "connections from this machine to random high ports of the workers that are there",
    "ports-from-workers": "connections from those workers to random high ports of this machine",
    "clock": "the difference between the two clocks",
    "versions": "code, lantrain and torch, compared with the master's",
    "arithmetic": "the bits of the optimizer's update, compared with the master's",
    "memory": "free memory against what a rank of this run needs",
    "disk": "free disk on the master against what checkpoints need",
    "link": "bytes a second from the master, and the round trip",
    "gemm": "matrix products a second, and the dtype",
}
"""Every probe, with what it looks at."""

RETRYABLE = frozenset({"train-port", "ports-to-master", "ports-to-worker", "ports-to-workers", "ports-from-workers"})
"""Mended by a command while the worker waits: it tries these again by itself."""


HighPort = Annotated[int, Field(ge=1024, le=65535)]


class TriedPort(BaseModel):
    """A port that was tried, as it travels between machines."""

    model_config = ConfigDict(extra="forbid")

    port: HighPort
    state: State


@dataclass(frozen=True)
class Attempt:
    """One connection that was tried."""

    port: int
    state: State
    detail: str = ""


@dataclass(frozen=True)
class Result:
    """What one probe tried and saw. `mend` is what to type, by the tool that it is for, on the machine `where`."""

    name: str
    status: Status
    tried: str
    seen: str
    means: str = ""
    mend: dict[str, str] = field(default_factory=dict)
    where: str = ""
    attempts: tuple[Attempt, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in PROBES:
            raise ValueError(f"{self.name} is not in PROBES")

    def as_json(self) -> dict[str, Any]:
        """The fields, for `make doctor` with --json."""
        return asdict(self)

    def line(self) -> str:
        """In one line: what was seen and, unless all is well, what it means."""
        parts = [self.seen] if self.status == "ok" else [self.seen, self.means]
        text = f"{self.name}: " + "; ".join(part for part in parts if part)
        if self.status != "ok" and len(self.mend) == 1:
            text += f" (on {self.where or 'this machine'}: {next(iter(self.mend.values()))})"
        return text

    def block(self) -> str:
        """For a failure: tried, seen, means, and what to type on which machine."""
        lines = [f"check failed: {self.name}", f"  tried: {self.tried}", f"  seen:  {self.seen}"]
        if self.means:
            lines.append(f"  means: {self.means}")
        if self.mend:
            fits = ", the one that fits its firewall" if len(self.mend) > 1 else ""
            lines.append(f"  TYPE ON {self.where or 'this machine'}{fits}:")
            width = max(len(tool) for tool in self.mend)
            lines += [f"    {(tool + ':').ljust(width + 2) if tool else ''}{it}" for tool, it in self.mend.items()]
        return "\n".join(lines)


def table(results: Iterable[Result]) -> str:
    """One row a probe, for people."""
    rows = [(result.status.upper() if result.status != "ok" else "ok", result.name, result.seen) for result in results]
    width = max((len(name) for _, name, _ in rows), default=0)
    return "\n".join(f"{status.ljust(4)}  {name.ljust(width)}  {seen}" for status, name, seen in rows)


def failed(results: Iterable[Result]) -> list[Result]:
    """Those that keep a machine from training."""
    return [result for result in results if result.status == "fail"]
