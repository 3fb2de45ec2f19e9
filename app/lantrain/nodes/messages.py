"""What travels between the hub and the nodes, with limits: whoever can reach the port can send anything."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _printable(text: str) -> str:
    """What nodes say is shown on terminals: no escape sequences, no line breaks."""
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


Name = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_printable)]
Word = Annotated[str, Field(max_length=64), AfterValidator(_printable)]
Text = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NodeInfo(_Strict):
    """What a node says of itself when it joins."""

    version: Name
    code: Word = ""
    torch: Name
    python: Word = ""
    interface: Word = ""
    cores: Annotated[int, Field(ge=1, le=4096)] = 1
    threads: Annotated[int, Field(ge=1, le=4096)] = 1
    memory_mib: Annotated[int, Field(ge=0)] = 0
    gemm_gflops: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    dtype: Word = "float32"
    cpu: Word = ""
    update: Word = ""
    link_mbs: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    round_trip_ms: Annotated[float, Field(ge=0, le=1e6)] = 0.0


class JoinRequest(_Strict):
    """A node asks to take part."""

    name: Name
    info: NodeInfo


class BeatRequest(_Strict):
    """A node's report, twice a second."""

    node: Annotated[str, Field(min_length=1, max_length=64)]
    state: Literal["idle", "running", "stopped", "leaving"]
    generation: Annotated[int, Field(ge=0, le=2**31)] = 0
    step: Annotated[int, Field(ge=0, le=2**40)] = 0
    phase: Word = ""
    outcome: Word = ""
    message: Text = ""


class LeaveRequest(_Strict):
    """A node says goodbye."""

    node: Annotated[str, Field(min_length=1, max_length=64)]


class EndRequest(_Strict):
    """The master's `make down`: every node ends."""

    why: Text = "the master was told to end"


class Facts(_Strict):
    """What a worker compares itself with, and where it connects to. The worker checks it by this model, too."""

    lantrain: str
    code: str
    torch: str
    time: float
    host: str
    address: str
    train_port: Annotated[int, Field(ge=1, le=65535)]
    first_ephemeral: Annotated[int, Field(ge=1, le=65535)]
    firewall: str
    running: bool
    need: dict[str, int]
    sends_mib: int
    cpu: str = ""
    update: str = ""
