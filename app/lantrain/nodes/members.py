"""A member of a run as the hub knows it, what it reports, and how long the hub waits for what."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

NodeState = Literal["idle", "running", "stopped", "leaving"]
MAX_NODES = 256
"""The hub takes no more."""


@dataclass(frozen=True)
class Limits:
    """How long the hub waits for what, in seconds."""

    silence: float = 15.0
    """A node unheard of for so long is lost. Above the 10 s for which a link may flap."""
    stop_answer: float = 10.0
    """Nodes have so long to end their trainers when a generation was ended by a failure."""
    drain: float = 60.0
    """A planned stop at a step boundary may take so long, checkpoint included, before it is forced."""
    settle: float = 3.0
    """Machines that join within so long of each other join in one change."""
    first_step: float = 180.0
    """A generation has so long to make its first step; Gloo can hang there beyond its own limits."""
    stall: float = 120.0
    """No rank finished a step for so long (or 10 of its usual steps): whoever did not enter the step is named."""
    patience: float = 24 * 3600.0
    """A master waits so long for its nodes, and a worker for a master that went away: over night, or for a repair."""
    flap_window: float = 600.0
    flap_pause: float = 10.0
    """A node that failed twice within the window waits so long, doubled with each further failure, up to 10 minutes."""


@dataclass
class Node:
    """One machine as the hub knows it."""

    id: str
    name: str
    address: str
    info: dict[str, Any]
    last_seen: float
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    joined: float = 0.0
    state: NodeState = "idle"
    generation: int = 0
    step: int = 0
    phase: str = ""
    phase_since: float = 0.0
    message: str = ""
    message_since: float = 0.0
    failures: list[float] = field(default_factory=list)
    paused_until: float = 0.0

    @property
    def label(self) -> str:
        """Name and address, for people."""
        return f"{self.name} ({self.address})"


@dataclass(frozen=True)
class Report:
    """What a node says of itself in a beat."""

    state: NodeState
    generation: int = 0
    step: int = 0
    phase: str = ""
    outcome: str = ""
    """How its trainer ended: done, stopped (at a step boundary), failed (others are to blame or it is), fatal."""
    message: str = ""


def duration(seconds: float) -> str:
    """Seconds in the unit that a person would use."""
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:g} {name}"
    return f"{seconds:g} s"
