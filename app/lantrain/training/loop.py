"""The training loop: every rank runs it in step, the leader reads, prints, samples and saves."""

from __future__ import annotations

import gc
import math
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import lantrain
from lantrain import paths
from lantrain.cluster import beacon
from lantrain.cluster.balance import AloneWatch, Spent
from lantrain.cluster.group import Ranks, broadcast_json
from lantrain.cluster.replicas import check_replicas
from lantrain.cluster.shares import micro_batches
from lantrain.cluster.waiting import Waiting
from lantrain.data.feed import Batch, Feed, FeedError, FixedRows, PackedAhead
from lantrain.data.packing import RowStream
from lantrain.errors import LOST_PEER_EXIT, WRONG_NUMBERS_EXIT, UserError
from lantrain.model.embedding import EmbeddingRows
from lantrain.training.checkpoint import CheckpointError
from lantrain.training.config import Config
from lantrain.training.evaluate import EvaluationStopped, evaluate_bpb
from lantrain.training.plan import first_balance
from lantrain.training.sample import complete
from lantrain.training.saving import Saver
from lantrain.training.start import Setup, leader_does
from lantrain.training.track import Metrics, OutlierWatch, Progress, heartbeat, step_line

T = TypeVar("T")

REPLICA_CHECK_EVERY = 50
"""Steps between comparisons of the ranks' parameters; the hash takes some 20 ms at depth 4."""

PROMPTS = (
    "The capital of France is",
    "The chemical symbol of gold is",
    "If yesterday was Friday, then tomorrow will be",
    "The opposite of hot is",
    "The planets of the solar system are:",
    "My favorite color is",
    "If 5*x + 3 = 13, then x is",
)
SAMPLE_TOKENS = 16
LONG_EVALUATION_SECONDS = 120
"""An evaluation that is expected to take longer is not begun before a checkpoint."""
OUTLIER_SIGMAS = 6


class StopSignal:
    """Remembers a SIGTERM, SIGINT or SIGUSR1 until the step boundary, where the ranks agree to stop together.

    SIGUSR1 is the launcher's, before it starts the next generation. Ctrl-C reaches a trainer twice, from the terminal
    and from torchrun; the third time ends it at once.
    """

    def __init__(self) -> None:
        self.number = 0
        self._count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        if number == signal.SIGUSR1:
            return
        self._count += 1
        if self._count >= 3:
            raise KeyboardInterrupt

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Loop:
    """One run from `setup.start_step` to its end. `run` is collective and returns the exit code."""

    def __init__(self, config: Config, setup: Setup, ranks: Ranks) -> None:
        self.config, self.setup, self.ranks = config, setup, ranks
        self.args, self.plan, self.model = config.args, setup.plan, setup.model
        self.folder: Path = paths.checkpoint_dir(config.tag)
        self.balance = first_balance(self.plan, config, ranks.world)
        self.measured: list[Spent] = []
        self.update_seconds = 0.0
        self.alone = AloneWatch(self.plan.rows)
        self.progress = Progress()
        self.wide = self.plan.model.vocab_size > 2**16
        self.stream: RowStream | None = None
        self.metrics: Metrics | None = None
        self.validation: Any = None
        self.last: Batch | None = None
        self.saver = Saver(
            self.folder, every_steps=self.args.save_every, every_seconds=60 * self.args.save_minutes,
            keep_last=self.args.keep_last, saved_step=setup.start_step if setup.start_step else -1,
        )  # fmt: skip
        self.step_seconds = 0.0
        self.save_asked = False
        self.waiting = Waiting(torch.get_num_threads())
        leader_does(ranks, self._open_leader_side)
        self.evaluated_step = broadcast_json(self.progress.val_step, ranks)
        self.outliers = OutlierWatch.from_list(broadcast_json(self.progress.outliers, ranks))

    def _open_leader_side(self) -> None:
        assert self.setup.shards is not None
        assert self.setup.tokenizer is not None
        threads = max(1, torch.get_num_threads() // 2)
        self.stream = RowStream(self.setup.shards.train, self.setup.tokenizer, self.args.max_seq_len, threads=threads)
        resumed = self.setup.resumed
        if resumed:
            self.stream.restore(resumed.state["rows"])
            self.progress = Progress.from_dict(resumed.meta["loop_state"], resumed.meta["val_bpb"])
        if self.args.eval_every > 0:
            # Now, so that a damaged validation shard ends every rank with the same line, and no step is lost by it.
            self.validation = self._validation_rows(math.prod(self._evaluation_batches()))
        self.metrics = Metrics(self.folder / "metrics.jsonl", self.setup.start_step)

    def _say(self, line: str) -> None:
        if self.ranks.leader:
            print(line, flush=True)

    def run(self) -> int:
        """Train to the end, or to a stop signal. Returns 0, or 128 + the signal's number."""
        step = self.setup.start_step
        source = PackedAhead(self.stream, self.plan.rows) if self.stream else None
        feed = Feed(source, self.ranks, self.args.max_seq_len, self.wide, step)
        end = self._last_step()
        try:
            with StopSignal() as stop:
                self.stop = stop
                if step < end:
                    feed.start(self.balance.shares)
                code = self._steps(step, end, feed, stop)
            feed.close()
            return code
        except BaseException:
            feed.close(wait=False)
            raise
        finally:
            self.saver.wait()
            self.waiting.close()
            if self.metrics:
                self.metrics.close()

    def _last_step(self) -> int:
        stop_after = self.args.stop_after
        return min(self.plan.num_iterations, stop_after) if stop_after > 0 else int(self.plan.num_iterations)

    def _steps(self, step: int, end: int, feed: Feed, stop: StopSignal) -> int:
        while True:
            beacon.tell("evaluate", step)
            try:
                self._evaluate_and_sample(step)
            except EvaluationStopped as stopped:
                return self._stop_after(step, stopped.number)
            if step >= end or self.saver.due_by_step(step) or self.save_asked:
                self._save(step, final=step >= end)
            self.save_asked = False
            if step >= end:
                break
            beacon.tell("step", step + 1)
            try:
                batch = feed.next(more=step + 1 < end)
            except FeedError:
                self._save(step, final=True)
                raise
            signal_number = self._train_step(batch, step, stop)
            step += 1
            self._rebalance(feed, step)
            if changed := self.waiting.observe():
                print(f"rank {self.ranks.rank}: {changed}", flush=True)
            if step == self.setup.start_step + 1:
                # The objects of the start-up live for ever; collecting them again and again cost 0.5 s a time.
                gc.collect()
                gc.freeze()
            self._check_replicas(step)
            if signal_number and step < end:
                return self._stop_after(step, signal_number)
        self._say_end(step)
        beacon.tell("ended", step, "done")
        return 0

    def _stop_after(self, step: int, signal_number: int) -> int:
        try:
            self._save(step, final=True)
        except CheckpointError as error:
            if signal_number == signal.SIGUSR1:  # the launcher's: the next generation goes on from the last checkpoint
                error.exit_code = LOST_PEER_EXIT
            raise
        self._say(f"stopped by {signal.Signals(signal_number).name} after step {step}; --resume auto goes on")
        beacon.tell("ended", step, "stopped")
        return 128 + signal_number

    def _asked_to_stop(self, step: int) -> int:
        """The number of a stop signal, for an evaluation, which asks at each of its steps: a sign of life, too."""
        heartbeat(step)
        return self.stop.number

    def _check_replicas(self, step: int) -> None:
        if step % REPLICA_CHECK_EVERY == 0:
            self.setup.optimizer.finish()
            check_replicas(dict(self.model.named_parameters()), self.ranks, step)

    def _train_step(self, batch: Batch, step: int, stop: StopSignal) -> int:
        """One optimizer step on every rank; returns the number of a stop signal that any rank has received."""
        started, waited = time.perf_counter(), self.setup.optimizer.waited
        loss, rows = self._forward_backward(batch)
        computed = time.perf_counter() - started - (self.setup.optimizer.waited - waited)
        # The update of the step before: that of this one is still to come, and the next shares need a figure now.
        mine = Spent(len(batch.rows), computed, self.update_seconds)
        loss, signal_number, self.save_asked = self._exchange_loss(loss, stop.number, step, mine)
        multiplier = self.plan.schedule.lr_multiplier(step)
        if self._takes_step(loss, step + 1):
            self._update(rows, step)
        seconds = time.perf_counter() - started
        self.step_seconds = seconds
        self._report_step(step + 1, batch, loss, multiplier, seconds, computed)
        return signal_number

    def _update(self, rows: EmbeddingRows | None, step: int) -> None:
        """The optimizer's step, with the time that this rank was busy with it."""
        optimizer, schedule = self.setup.optimizer, self.plan.schedule
        began, waited = time.perf_counter(), optimizer.waited
        optimizer.step(
            rows,
            lr_multiplier=schedule.lr_multiplier(step),
            muon_momentum=schedule.muon_momentum(step),
            muon_weight_decay=schedule.muon_weight_decay(step),
        )
        self.update_seconds = time.perf_counter() - began - (optimizer.waited - waited)

    def _forward_backward(self, batch: Batch) -> tuple[float, EmbeddingRows | None]:
        """Gradients of this rank's rows, as a share of the whole batch's mean loss; returns that share of the loss."""
        optimizer = self.setup.optimizer
        if not len(batch.rows):
            optimizer.send_gradients()
            return 0.0, None
        inputs, targets = batch.rows[:, :-1].contiguous(), batch.rows[:, 1:].contiguous()
        rows = optimizer.gather_rows(inputs)
        total, start = 0.0, 0
        for size in micro_batches(len(inputs), self.args.device_batch_size):
            micro = slice(start, start + size)
            start += size
            if start == len(inputs):
                optimizer.gradients_become_final()
            # Sums over tokens, divided by the tokens of the whole step: the split over ranks does not show.
            loss = self.model.loss(inputs[micro], targets[micro], scale=1 / self._mean_over(inputs), rows=rows)
            loss.backward()
            total += float(loss.detach())
        optimizer.send_gradients()
        return total, rows

    def _mean_over(self, inputs: Tensor) -> int:
        """Tokens of which the loss is the mean, for a rank with the rows `inputs` (n, T): all of the step."""
        return self.plan.total_batch

    def _takes_step(self, loss: float, step: int) -> bool:
        """Whether the update is made; an outlier's is not with --skip-outliers. The same on every rank."""
        sigmas = self.outliers.sigmas_above(loss)
        self.outliers.add(loss)
        if sigmas < OUTLIER_SIGMAS:
            return True
        skipped = bool(self.args.skip_outliers)
        self._say(
            f"warning: the loss of step {step}, {loss:.4f}, is {sigmas:.0f} standard deviations above the last ones"
            + ("; the step is not taken" if skipped else "")
        )
        if skipped:
            self.setup.optimizer.skip_step()
        return not skipped

    def _rebalance(self, feed: Feed, step: int) -> None:
        """After `step` steps, share out the rows by what each rank showed; the next step's are on their way already."""
        if not self.measured:
            return
        change = self.balance.observe(self.measured)
        feed.reshare(self.balance.shares)
        if change is not None:
            self._say(change.line(step + 2))
        slower = self.alone.add(self.step_seconds, self.measured)
        if slower:
            self._say(slower)

    def _exchange_loss(self, loss: float, signal_number: int, step: int, spent: Spent) -> tuple[float, int, bool]:
        """Sum of the ranks' losses in rank order, any stop signal, and whether the leader's clock asks for a
        checkpoint. Bad numbers end the run before the update.

        `spent` is this rank's; `self.measured` gets every rank's.
        """
        mine = self._to_exchange(loss, signal_number, spent)
        everyone = [torch.zeros_like(mine) for _ in range(self.ranks.world)]
        if self.ranks.world > 1:
            dist.all_gather(everyone, mine)
        else:
            everyone = [mine]
        return self._read_exchange(everyone, step)

    def _to_exchange(self, loss: float, signal_number: int, spent: Spent) -> Tensor:
        save = self.ranks.leader and self.saver.due_by_time()
        return torch.tensor([loss, float(signal_number), float(save), *spent], dtype=torch.float64)

    def _read_exchange(self, everyone: list[Tensor], step: int) -> tuple[float, int, bool]:
        losses = [float(values[0]) for values in everyone]
        self.measured = [Spent(int(values[3]), float(values[4]), float(values[5])) for values in everyone]
        bad = [str(rank) for rank, value in enumerate(losses) if not math.isfinite(value)]
        if bad:
            raise UserError(
                f"the loss of rank {', '.join(bad)} is not a number in step {step + 1}; checkpoints are as they were",
                "resume from the last checkpoint with lower learning rates",
                WRONG_NUMBERS_EXIT,
            )
        return sum(losses), max(int(values[1]) for values in everyone), bool(everyone[0][2])

    def _report_step(
        self, step: int, batch: Batch, loss: float, multiplier: float, seconds: float, computed: float
    ) -> None:
        if not self.ranks.leader:
            heartbeat(step)
            return
        tokens, total = self.plan.total_batch, self.plan.num_iterations
        smooth = self.progress.add_step(step, loss, seconds)
        mfu = self.plan.flops_per_token * tokens / seconds / self.setup.machine_flops
        eta = self.progress.eta_seconds(step, total, seconds)
        line = step_line(
            step, total, loss=smooth, lr_multiplier=multiplier, seconds=seconds, tokens=tokens, mfu=mfu,
            epoch=batch.epoch, total_seconds=self.progress.total_seconds, eta_seconds=eta,
        )  # fmt: skip
        self._say(line)
        assert self.metrics is not None
        self.metrics.add(
            step=step, loss=loss, smooth_loss=smooth, lr_multiplier=multiplier, dt=seconds, compute_s=computed,
            tok_per_sec=tokens / seconds, mfu=mfu, epoch=batch.epoch, ranks=self.ranks.world, time=time.time(),
            rows=[spent.rows for spent in self.measured],
            rank_compute_s=[spent.computing for spent in self.measured],
            rank_update_s=[spent.updating for spent in self.measured],
        )  # fmt: skip
        self.last = batch
        heartbeat(step)

    def _evaluate_and_sample(self, step: int) -> None:
        args, last = self.args, step >= self.plan.num_iterations
        if args.eval_every > 0 and (last or step % args.eval_every == 0) and step != self.evaluated_step:
            self._save_before_long_evaluation(step)
            bpb = self._evaluate(step)
            self.evaluated_step = self.progress.val_step = step
            self._say(f"Step {step:05d} | Validation bpb: {bpb:.6f}")
            self.progress.val_bpb = bpb
            self.progress.min_val_bpb = min(self.progress.min_val_bpb, bpb)
            if self.metrics:
                self.metrics.add(step=step, val_bpb=bpb, time=time.time())
        if self.ranks.leader and args.sample_every > 0 and step > 0 and (last or step % args.sample_every == 0):
            assert self.setup.tokenizer is not None
            self.setup.optimizer.finish()
            for prompt in PROMPTS:
                if self.stop.number:
                    break
                self._say(complete(self.model, self.setup.tokenizer, prompt, max_tokens=SAMPLE_TOKENS, temperature=0.0))

    def _save_before_long_evaluation(self, step: int) -> None:
        """An evaluation takes about a third of the time of training on as many rows: no update, no backward pass."""
        seconds = self.step_seconds * self.plan.eval_rows / self.plan.rows / 3
        if broadcast_json(seconds > LONG_EVALUATION_SECONDS, self.ranks) and self.args.save_minutes > 0:
            self._save(step, final=False)

    def _evaluate(self, step: int) -> float:
        self.setup.optimizer.finish()
        per_step, steps = self._evaluation_batches()
        source = FixedRows(self.validation, per_step) if self.ranks.leader else None
        feed = Feed(source, self.ranks, self.args.max_seq_len, self.wide, 0, tag=1)
        feed.start(self.balance.split(per_step))
        try:
            bpb = evaluate_bpb(
                self.model, feed, steps, self.setup.token_bytes, self.args.device_batch_size, self.ranks,
                lambda: self._asked_to_stop(step),
            )  # fmt: skip
        except EvaluationStopped:
            feed.close()
            raise
        feed.close()
        return bpb

    def _evaluation_batches(self) -> tuple[int, int]:
        """Rows of one batch of an evaluation over all ranks, and the number of batches."""
        per_step = min(self.plan.rows, self.plan.eval_rows)
        return per_step, self.plan.eval_rows // per_step

    def _validation_rows(self, count: int) -> Any:
        """The first `count` rows of the validation shard; packed once, they are the same at every evaluation."""
        assert self.setup.shards is not None
        assert self.setup.tokenizer is not None
        threads = max(1, torch.get_num_threads() // 2)
        stream = RowStream(self.setup.shards.val, self.setup.tokenizer, self.args.max_seq_len, threads=threads)
        return stream.next_rows(count)

    def _save(self, step: int, final: bool) -> None:
        """A complete checkpoint of `step`, unless there is one. Only a failure of the `final` one ends the run."""
        if step == 0 or step == self.setup.start_step:
            return
        beacon.tell("save", step)
        began = time.monotonic()
        self.setup.optimizer.finish()
        check_replicas(dict(self.model.named_parameters()), self.ranks, step)
        optimizer_state, weights = self.setup.optimizer.full_state(), self.setup.optimizer.full_weights()
        if not self.ranks.leader:
            return
        assert optimizer_state is not None
        assert self.last is not None
        assert self.last.state is not None
        self.progress.outliers = self.outliers.to_list()
        self.saver.save(
            step, self.model.state_dict() | weights, optimizer_state, self.last.state.to_dict(),
            self._meta(step, self.last.position), began=began, final=final,
        )  # fmt: skip

    def _meta(self, step: int, position: dict[str, int]) -> dict[str, Any]:
        plan = self.plan.describe()
        return {
            "step": step,
            "val_bpb": self.progress.val_bpb,
            "model_config": plan["model"],
            "user_config": self.config.user,
            "device_batch_size": self.args.device_batch_size,
            "max_seq_len": self.args.max_seq_len,
            "total_batch_size": self.plan.total_batch,
            "dataloader_state_dict": position,
            "loop_state": self.progress.to_dict(),
            "num_iterations": self.plan.num_iterations,
            "lantrain": {"version": lantrain.__version__, "torch": str(torch.__version__), "ranks": self.ranks.world},
        }

    def _say_end(self, step: int) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._say(f"Peak memory usage: {peak:.2f}MiB")
        self._say(f"Total training time: {self.progress.total_seconds / 60:.2f}m")
        if self.last is not None and (left_out := self.last.state.left_out()):
            self._say(f"Documents left out: {left_out}")
        if self.progress.val_bpb is not None:
            self._say(f"Minimum validation bpb: {self.progress.min_val_bpb:.6f}")
        share, hours = self.progress.effective_share(time.time())
        self._say(f"ETTR: {100 * share:.1f}% of {hours:.2f} h since the run began were spent on steps that count")


def lost_contact(error: RuntimeError, ranks: Ranks) -> UserError | None:
    """A UserError for a failed exchange with another rank, or None when `error` is something else.

    Gloo and torch report a dead or silent peer as RuntimeError with a C++ source line in front.
    """
    text = str(error)
    signs = ("gloo", "Connection closed by peer", "Connection reset", "Timed out waiting", "Connection refused")
    if not isinstance(error, dist.DistError) and not any(sign in text for sign in signs):
        return None
    # "[.../pair.cc:547] Connection closed by peer [10.0.0.2]:4711. <advice of torch's>": without place and advice.
    reason = text.strip().splitlines()[0]
    reason = (reason.rpartition(".cc:")[2].partition("] ")[2] or reason).partition(". ")[0]
    return UserError(
        f"rank {ranks.rank} lost contact with another rank: {reason}",
        "see that rank's log; --resume auto continues from the last checkpoint",
        LOST_PEER_EXIT,
    )


def guarded(run: Callable[[], T], ranks: Ranks) -> T:
    """Run `run`, turning a lost peer into one clear line."""
    try:
        return run()
    except RuntimeError as error:
        clear = lost_contact(error, ranks)
        if clear is None or os.environ.get("LANTRAIN_DEBUG"):
            raise
        raise clear from None
