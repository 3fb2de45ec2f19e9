"""Who takes part, and in which generation: the hub's memory and its decisions, with no I/O and no clock of its own.

A generation is a fixed list of members, the master always rank 0, and one run of torchrun on each. Every change of the
membership ends one generation and starts the next from the newest complete checkpoint. Nodes report twice a second
(`beat`) and get an order back; `tick` looks for silence and moves the run on. Times are seconds of a monotonic clock,
so clocks that differ between machines do not matter.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Literal

from lantrain.errors import USER_ERROR_EXIT
from lantrain.nodes.members import Limits, Node, Report, duration

ENDED_BY_HUB = "ended by the hub"
LAST_WORD_SECONDS = 4.0
"""A node that was told of the run's end says goodbye within so long, or never: a request takes up to 2 s."""
ECHOES = ("lost contact", ENDED_BY_HUB)
"""What trainers say of a generation that others have ended; anything else may be the cause, heard late."""
Order = dict[str, Any]


Choose = Callable[[list[Node]], tuple[list[Node], dict[str, str]]]
"""From the nodes that could take part, the master first: those that shall, and by id why each other shall not."""


class Membership:
    """The members of a run and its generations. The master is a node like the others, and always rank 0."""

    def __init__(
        self, clock: Callable[[], float], wanted: int, say: Callable[[str], None], limits: Limits | None = None
    ) -> None:
        """`wanted` nodes are waited for at the start; `say` gets a line for each thing that people should know."""
        self.clock, self.wanted, self.say = clock, wanted, say
        self.limits = limits or Limits()
        self.nodes: dict[str, Node] = {}
        self.master: Node | None = None
        self.phase: Literal["gathering", "running", "draining", "killing", "ended"] = "gathering"
        self.generation = 0
        self.members: list[str] = []
        self.rates: list[float] = []
        self.choose: Choose = lambda nodes: (nodes, {})
        self.left_out: dict[str, str] = {}
        self.since = clock()
        self.why = ""
        self.end_code = 0
        self.first_step_made = False
        self.step_seconds = 0.0
        self._last_step = (0, clock())
        self._ended: set[str] = set()
        self._fruitless = 0
        self._hung = False
        self._told: set[str] = set()
        self._remembered: dict[str, tuple[list[float], float]] = {}
        self.history: list[dict[str, Any]] = []

    # --- what nodes do

    def join(self, name: str, address: str, info: dict[str, Any], *, master: bool = False) -> Node:
        """Admit a node; one that comes back from the same place replaces what it was."""
        now = self.clock()
        place = f"{name}@{address}"
        for old in [node for node in self.nodes.values() if f"{node.name}@{node.address}" == place]:
            if (old is self.master) == master:  # a worker on the master's own machine is another node
                self._forget(old, f"{old.label} came back" if old.id in self.members else "")
        node = Node(secrets.token_hex(8), name, address, info, now, joined=now)
        node.failures, node.paused_until = self._remembered.pop(place, ([], 0.0))
        self.nodes[node.id] = node
        if master:
            self.master = node
        self.say(f"{node.label} joined: {len(self.nodes)} of {max(self.wanted, len(self.nodes))} nodes are here")
        return node

    def leave(self, node_id: str) -> None:
        """A node says goodbye, its trainer is down."""
        node = self.nodes.get(node_id)
        if node is not None and self.phase == "draining":
            # As planned: the others' trainers, too, stop at the boundary; the master's may still write the checkpoint.
            self.nodes.pop(node_id)
            self.say(f"{node.label} left")
        elif node is not None:
            self._forget(node, f"{node.label} left")

    def beat(self, node_id: str, report: Report) -> Order:
        """Take a node's report and give its order."""
        node = self.nodes.get(node_id)
        if node is None:
            return {"order": "join"}
        now = self.clock()
        node.last_seen = now
        node.state = report.state
        if (report.phase, report.step) != (node.phase, node.step):
            node.phase_since = now
        if report.message != node.message:
            node.message_since = now
        node.generation, node.step, node.phase, node.message = (
            report.generation, report.step, report.phase, report.message,
        )  # fmt: skip
        if node is self.master and report.state == "running" and report.generation == self.generation:
            self._count_step(report.step, now)
        if report.generation == self.generation and node_id in self.members:
            if report.state == "stopped" and node_id not in self._ended:
                self._ended.add(node_id)
                self._trainer_ended(node, report)
            elif report.state == "leaving" and self.phase == "running":
                self._change("draining", f"{node.label} is leaving")
        return self._order_for(node)

    def _count_step(self, step: int, now: float) -> None:
        last, at = self._last_step
        if step > last:
            if self.first_step_made:
                seconds = (now - at) / (step - last)
                self.step_seconds = seconds if not self.step_seconds else 0.8 * self.step_seconds + 0.2 * seconds
            self.first_step_made = True
            self._last_step = (step, now)

    def _trainer_ended(self, node: Node, report: Report) -> None:
        if report.outcome == "done":
            if node is self.master:
                self.end(0, "training is finished")
        elif report.outcome == "fatal":
            self.end(1, report.message or f"the trainer of {node.label} cannot go on")
        elif report.outcome == "stopped":
            if self.phase == "running":
                self._change("draining", f"{node.label} stopped at a step boundary")
        elif self.phase in ("running", "draining"):
            # The survivor of a crash is often heard first; Gloo's message then has the address of the one that is gone.
            lost = [n for n in self.nodes.values() if n is not node and f"[{n.address}]" in report.message]
            (lost[0] if lost else node).failures.append(self.clock())
            what = f"lost contact with {lost[0].label}" if lost else "ended"
            self._change("killing", f"the trainer of {node.label} {what}: {report.message or 'no message'}")
        elif report.message and not any(words in report.message for words in ECHOES):
            self.say(f"{node.label}: {report.message}")

    def _order_for(self, node: Node) -> Order:
        if self.phase == "ended":
            self._told.add(node.id)
            return {"order": "end", "code": self.end_code, "why": self.why}
        member = node.id in self.members
        if self.phase == "running" and member:
            return {"order": "run", **self.specification(node.id)}
        if self.phase == "draining" and member:
            # Only the master's trainer is told; the ranks agree among themselves on the step.
            return {"order": "drain" if node is self.master else "run", **self.specification(node.id)}
        if self.phase == "killing" and member:
            return {"order": "kill", "generation": self.generation, "why": self.why, "stacks": self._hung}
        return {"order": "wait", "generation": self.generation, "why": self.left_out.get(node.id, "")}

    def specification(self, node_id: str) -> dict[str, Any]:
        """Generation, rank and world size of a member, and the speed of every rank as measured when it joined."""
        return {
            "generation": self.generation, "rank": self.members.index(node_id), "world": len(self.members),
            "rates": self.rates,
        }  # fmt: skip

    def share_of(self, node_id: str) -> str:
        """Share of the rows that a member gets at first, by its rate, in percent; empty where that is not known."""
        if node_id in self.left_out:
            return "left out"
        if node_id not in self.members or min(self.rates, default=0) <= 0:
            return ""
        return f"{100 * self.rates[self.members.index(node_id)] / sum(self.rates):.0f}%"

    # --- what time does

    def tick(self) -> None:
        """Look for silence, stalls and answers that are due. Called a few times a second."""
        now = self.clock()
        for node in list(self.nodes.values()):
            if node is not self.master and now - node.last_seen > self.limits.silence:
                self._forget(node, f"{node.label} has been silent for {now - node.last_seen:.0f} s", failed=True)
        if self.phase == "gathering" and len(self.ready()) >= self.wanted:
            self._start("all nodes are here")
        elif self.phase == "gathering" and now - self.since > self.limits.patience:
            here = ", ".join(node.label for node in self.nodes.values())
            wait = duration(self.limits.patience)
            self.end(USER_ERROR_EXIT, f"{self.wanted} nodes were not here within {wait}, only {here or 'none'}")
        elif self.phase == "running":
            self._watch_running(now)
        elif self.phase == "draining":
            self._watch_stopping(now, self.limits.drain)
        elif self.phase == "killing":
            self._watch_stopping(now, self.limits.stop_answer)

    def ready(self) -> list[Node]:
        """Nodes that could be in the next generation, the master first, then by name."""
        now = self.clock()
        free = [node for node in self.nodes.values() if node.state != "leaving" and node.paused_until <= now]
        if self.master is None or self.master not in free:
            return []
        others = sorted((n for n in free if n is not self.master), key=lambda n: (n.name, n.address))
        return [self.master, *others]

    def _chosen(self, ready: list[Node]) -> list[Node]:
        """Those of `ready` that shall take part; says once of each other why not."""
        chosen, left_out = self.choose(ready)
        for node_id, why in left_out.items():
            if self.left_out.get(node_id) != why:
                self.say(f"{self.nodes[node_id].label} is left out: {why}")
        self.left_out = left_out
        return chosen

    def _watch_running(self, now: float) -> None:
        late = self.limits.stall if self.step_seconds == 0 else max(self.limits.stall, 10 * self.step_seconds)
        if not self.first_step_made and now - self.since > self.limits.first_step:
            self._blame_stalled(f"no first step within {self.limits.first_step:.0f} s", now)
        elif self.first_step_made and now - self._last_step[1] > late and self._all_in("step"):
            self._blame_stalled(f"no step for {now - self._last_step[1]:.0f} s", now)
        elif self._frozen(now - late):  # in an evaluation, too, or before the first step
            self._blame_stalled(f"nothing for {late:.0f} s", now)
        else:
            ready = self.ready()
            new = [node for node in ready if node.id not in self.members and node.id not in self.left_out]
            if new and self.first_step_made and now - max(node.joined for node in new) >= self.limits.settle:
                chosen = self._chosen(ready)
                joined = ", ".join(node.label for node in new if node in chosen)
                if joined:
                    self._change("draining", f"{joined} joined")

    def _all_in(self, phase: str) -> bool:
        """Whether no member is evaluating, saving or sampling, which may take long."""
        return all(self.nodes[member].phase == phase for member in self.members if member in self.nodes)

    def _frozen(self, since: float) -> bool:
        """Whether a member has said since then that its trainer is stopped."""
        members = [self.nodes[member] for member in self.members if member in self.nodes]
        return any(node.state == "running" and node.message and node.message_since < since for node in members)

    def _blame_stalled(self, what: str, now: float) -> None:
        steps = {member: self.nodes[member].step for member in self.members if member in self.nodes}
        newest = max(steps.values(), default=0)
        behind = [member for member, step in steps.items() if step < newest]
        # A node says so when its trainer is stopped (SIGSTOP). With every rank in the same step, the one that entered
        # it last is the likeliest.
        frozen = [member for member in steps if self.nodes[member].message]
        silent = frozen or behind or [max(steps, key=lambda member: self.nodes[member].phase_since)]
        for member in silent:
            self.nodes[member].failures.append(now)
        names = ", ".join(self.nodes[member].label for member in silent)
        said = f" ({self.nodes[silent[0]].message})" if frozen else ""
        self._hung = True
        self._change("killing", f"{what}; {names} did not finish step {newest}{said}")

    def _watch_stopping(self, now: float, limit: float) -> None:
        running = [m for m in self.members if m in self.nodes and self.nodes[m].state in ("running", "leaving")]
        running = [m for m in running if self.nodes[m].generation == self.generation]
        leaving = [m for m in running if self.nodes[m].state == "leaving"]
        if not running or (self.phase == "draining" and running == leaving and self._drained()):
            if now - self.since >= self._pause():
                self._start(self.why)
        elif now - self.since > limit:
            if self.phase == "draining":
                self._hung = True
                self._change("killing", f"{self.why}; the planned stop took more than {limit:.0f} s")
                return
            for member in running:
                node = self.nodes[member]
                if node is self.master:
                    continue
                self._forget(node, f"{node.label} did not stop within {limit:.0f} s", failed=True)

    def _pause(self) -> float:
        """Seconds before the next generation: none at first, more after several that made no step (a port taken)."""
        return min(60.0, 2.0 ** (self._fruitless - 1)) if self._fruitless > 2 else 0.0

    def _drained(self) -> bool:
        """Whether the master's trainer is down: then the ranks have stopped together, a leaving node's too."""
        return self.master is not None and self.master.state != "running"

    # --- changes

    def _start(self, why: str) -> None:
        ready = self.ready()
        if not ready:
            return
        ready = self._chosen(ready)
        now = self.clock()
        self.generation += 1
        self.members, self._ended = [node.id for node in ready], set()
        self.rates = [float(node.info.get("gemm_gflops", 0.0)) for node in ready]
        for node in ready:
            node.step, node.phase, node.phase_since = 0, "", now
        self.first_step_made, self.step_seconds, self._hung = False, 0.0, False
        self._last_step = (0, now)
        self._change("running", why)
        names = ", ".join(f"{rank} {node.label}" for rank, node in enumerate(ready))
        self.say(f"generation {self.generation}: {len(ready)} ranks: {names}")

    def _change(self, phase: Literal["running", "draining", "killing", "ended"], why: str) -> None:
        self.phase, self.why, self.since = phase, why, self.clock()
        if phase == "killing":
            self._fruitless = 0 if self.first_step_made else self._fruitless + 1
        self.history.append({"time": self.since, "phase": phase, "generation": self.generation, "why": why})
        if phase != "running":
            verb = {"draining": "stopping at the next step", "killing": "ending", "ended": "the run ends"}[phase]
            pause = f"; the next one after {self._pause():.0f} s" if phase == "killing" and self._pause() else ""
            self.say(f"generation {self.generation}: {verb}: {why}{pause}")

    def _forget(self, node: Node, why: str, *, failed: bool = False) -> None:
        now = self.clock()
        if failed:
            node.failures.append(now)
        recent = [at for at in node.failures if now - at < self.limits.flap_window]
        pause = min(600.0, self.limits.flap_pause * 2 ** (len(recent) - 2)) if len(recent) >= 2 else 0.0
        self._remembered[f"{node.name}@{node.address}"] = (recent, now + pause)
        if pause:
            self.say(f"{node.label} failed {len(recent)} times lately: it is taken back after {pause:.0f} s")
        self.nodes.pop(node.id, None)
        if node.id in self.members and self.phase in ("running", "draining") and why:
            self._change("killing", why)
        elif why:
            self.say(why)

    def end(self, code: int, why: str) -> None:
        """The run is over, for every node."""
        if self.phase != "ended":
            self.end_code = code
            self._change("ended", why)

    def still_to_leave(self) -> list[str]:
        """Workers of an ended run that have not said goodbye: not told yet, unless lost; or told just now."""
        now = self.clock()
        return [
            node.label
            for node in self.nodes.values()
            if node is not self.master
            and now - node.last_seen <= (LAST_WORD_SECONDS if node.id in self._told else self.limits.silence)
        ]
