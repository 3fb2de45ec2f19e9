"""The training loop for `--sync local`: ranks step by themselves and become equal at the ends of rounds.

A rank waits for the others only where it must. Loss, stop signal and speed of a step are told while the next one is
computed and read after it, so no step waits for a round trip. A round ends every --local-steps steps, and early where
the replicas are needed equal: before an evaluation, a sample, a checkpoint by step, a stop and the end. A checkpoint
that is due by time waits for the end of the round.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lantrain.cluster.balance import Spent
from lantrain.cluster.group import Ranks
from lantrain.cluster.replicas import check_replicas
from lantrain.data.feed import Batch
from lantrain.optim.local_steps import LocalSteps
from lantrain.training.config import Config
from lantrain.training.loop import Loop, StopSignal
from lantrain.training.start import Setup


@dataclass
class _Told:
    """The figures of a step on their way to all ranks."""

    step: int
    everyone: list[Tensor]
    work: dist.Work | None


@dataclass
class _Step:
    """A finished step whose common loss is not known yet."""

    number: int
    batch: Batch
    multiplier: float
    seconds: float
    computed: float


class LocalLoop(Loop):
    """`Loop` with local steps; the optimizer of its setup is a LocalSteps."""

    def __init__(self, config: Config, setup: Setup, ranks: Ranks) -> None:
        super().__init__(config, setup, ranks)
        assert isinstance(setup.optimizer, LocalSteps)
        self.local: LocalSteps = setup.optimizer
        self._told: deque[_Told] = deque()
        self._heard: dict[int, tuple[float, list[Spent]]] = {}
        self._unreported: deque[_Step] = deque()
        self._round_is_open = False
        self._save_wanted = False
        self._round_record: dict[str, Any] = {}

    def _mean_over(self, inputs: Tensor) -> int:
        return inputs.numel()

    def _train_step(self, batch: Batch, step: int, stop: StopSignal) -> int:
        """One step of this rank; returns a stop signal that some rank had received by the step before, or by this one
        where a round ends."""
        started = time.perf_counter()
        loss, rows = self._forward_backward(batch)
        computed = time.perf_counter() - started
        multiplier = self.plan.schedule.lr_multiplier(step)
        # Each rank judges an outlier by its own losses; nobody waits to compare.
        if rows is None or self._takes_step(loss, step + 1):
            self._update(rows, step)
        count = len(batch.rows)
        spent = Spent(count, computed, self.update_seconds if rows is not None else 0.0)
        self.local.count_tokens(count * self.args.max_seq_len)
        self._round_is_open, self.save_asked, self.measured = True, False, []
        self._tell(step, self._to_exchange(loss * count / self.plan.rows, stop.number, spent))
        signal_number = self._hear(still_on_its_way=1)
        if signal_number or self._round_ends(step + 1):
            signal_number = max(signal_number, self._hear(still_on_its_way=0))
            self._end_round(step + 1)
        self.step_seconds = time.perf_counter() - started
        self._unreported.append(_Step(step + 1, batch, multiplier, self.step_seconds, computed))
        self._report_heard()
        return signal_number

    def _round_ends(self, step: int) -> bool:
        """Whether the replicas must be equal after `step`; the same on every rank."""
        args = self.args
        return (
            step % self.local.every == 0
            or step >= self._last_step()
            or self.saver.due_by_step(step)
            or (args.eval_every > 0 and step % args.eval_every == 0)
            or (args.sample_every > 0 and step % args.sample_every == 0)
        )

    def _tell(self, step: int, mine: Tensor) -> None:
        if self.ranks.world == 1:
            self._told.append(_Told(step, [mine], None))
            return
        everyone = [torch.zeros_like(mine) for _ in range(self.ranks.world)]
        self._told.append(_Told(step, everyone, dist.all_gather(everyone, mine, async_op=True)))

    def _hear(self, *, still_on_its_way: int) -> int:
        """Read what was told, but for the latest; returns the highest signal number that was in it."""
        signal_number = 0
        while len(self._told) > still_on_its_way:
            told = self._told.popleft()
            if told.work is not None:
                told.work.wait()
            loss, signalled, save = self._read_exchange(told.everyone, told.step)
            signal_number = max(signal_number, signalled)
            self._save_wanted |= save
            self._heard[told.step + 1] = (loss, self.measured)
        return signal_number

    def _end_round(self, step: int) -> None:
        began, sent = time.perf_counter(), self.local.sent_bytes
        self.local.outer_step()
        check_replicas(dict(self.model.named_parameters()), self.ranks, step)
        self._round_is_open = False
        self.save_asked, self._save_wanted = self._save_wanted, False
        if self.ranks.world > 1:
            seconds, sent = time.perf_counter() - began, self.local.sent_bytes - sent
            self._say(f"round ended after step {step}: the leader sent {sent / 1e6:.2f} MB, {seconds:.2f} s")
            self._round_record = {"step": step, "outer_s": seconds, "outer_bytes": sent, "time": time.time()}

    def _report_heard(self) -> None:
        measured = self.measured
        while self._unreported and self._unreported[0].number in self._heard:
            done = self._unreported.popleft()
            loss, self.measured = self._heard.pop(done.number)
            self._report_step(done.number, done.batch, loss, done.multiplier, done.seconds, done.computed)
        self.measured = measured
        # After the record of the round's last step: metrics.jsonl is in the order of the steps.
        if self._round_record and self.metrics:
            self.metrics.add(**self._round_record)
        self._round_record = {}

    def _check_replicas(self, step: int) -> None:
        """Nothing: they are compared at the end of each round."""

    def _save(self, step: int, final: bool) -> None:
        """A checkpoint of equal replicas: where the leader's data failed in mid-round, the round ends first."""
        if self._round_is_open:
            self._hear(still_on_its_way=0)
            self._end_round(step)
            self._report_heard()
        super()._save(step, final)
