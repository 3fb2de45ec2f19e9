"""The design's promises about ranks: same rows, same losses, exact resume, whatever the number and the shares."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lantrain.training import checkpoint
from tests.distributed.ranks import APP, GUARD_SECONDS, TINY, Run, free_port, run_ranks, start_ranks

STEPS = 20
SCHEDULE = [f"--num-iterations={STEPS}", "--warmup-steps=2"]


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The reference: one process, no torchrun, no process group."""
    return run_ranks(1, corpus, [*TINY, *SCHEDULE], tag="alone", alone=True).ok()


def _furthest(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_one_process_learns(alone: Run) -> None:
    assert len(alone.losses) == STEPS
    assert abs(alone.losses[0] - math.log(512)) < 0.01
    assert alone.losses[-1] < alone.losses[0] - 0.2


@pytest.mark.parametrize(
    ("world", "extra"),
    [(2, []), (3, []), (5, []), (2, ["--shares=3,1"]), (3, ["--shares=5,0,3"]), (2, ["--device-batch-size=3"])],
    ids=["2", "3", "5", "shares 3:1", "a rank without rows", "uneven micro-batches"],
)
def test_losses_do_not_depend_on_ranks_or_shares(world: int, extra: list[str], corpus: Path, alone: Run) -> None:
    tag = f"w{world}{''.join(extra)}".replace("=", "").replace(",", "")
    together = run_ranks(world, corpus, [*TINY, *SCHEDULE, *extra], tag=tag).ok()
    assert _furthest(alone.losses, together.losses) < 1e-5
    assert [record["epoch"] for record in together.metrics] == [record["epoch"] for record in alone.metrics]


def test_more_ranks_than_rows(corpus: Path) -> None:
    """Four rows a step on five ranks: the fifth computes nothing and still keeps up."""
    flags = [*TINY, "--total-batch-size=256", "--num-iterations=6", "--warmup-steps=2"]
    one = run_ranks(1, corpus, flags, tag="few1").ok()
    five = run_ranks(5, corpus, flags, tag="few5").ok()
    assert _furthest(one.losses, five.losses) < 1e-5


def test_same_ranks_and_shares_repeat_bit_for_bit(corpus: Path) -> None:
    flags = [*TINY, "--num-iterations=8", "--shares=2,1"]
    first = run_ranks(2, corpus, flags, tag="twice1").ok()
    again = run_ranks(2, corpus, flags, tag="twice2").ok()
    assert first.losses == again.losses


def test_worker_needs_no_files(corpus: Path, tmp_path: Path, alone: Run) -> None:
    nothing = tmp_path / "worker"
    nothing.mkdir()
    run = run_ranks(
        2, corpus, [*TINY, *SCHEDULE], tag="feeds", worker_env={"NANOCHAT_BASE_DIR": str(nothing)}
    ).ok()  # fmt: skip
    assert _furthest(alone.losses, run.losses) < 1e-5
    assert list(nothing.iterdir()) == []


def test_cpus_of_other_kinds_keep_the_same_replicas(corpus: Path) -> None:
    """A worker without vector instructions and without C++ beside a leader with all that this CPU has.

    Replicas are compared at step 50 and with the checkpoint at the end; tables are updated on either for itself.
    """
    old = {"ATEN_CPU_CAPABILITY": "default", "LANTRAIN_KERNELS": "off"}
    flags = [*TINY, "--num-iterations=52", "--warmup-steps=2"]
    run = run_ranks(2, corpus, flags, tag="kinds", worker_env=old).ok()
    assert len(run.losses) == 52
    assert "PyTorch's operators" in run.ranks[1].output


def test_evaluation_does_not_depend_on_ranks(corpus: Path) -> None:
    flags = [*TINY, "--num-iterations=4", "--eval-every=2"]
    one = run_ranks(1, corpus, flags, tag="eval1").ok()
    three = run_ranks(3, corpus, flags, tag="eval3").ok()
    bpb = [[record["val_bpb"] for record in run.metrics if "val_bpb" in record] for run in (one, three)]
    assert len(bpb[0]) == 3
    assert _furthest(bpb[0], bpb[1]) < 1e-6
    assert "Step 00002 | Validation bpb: " in one.log


@pytest.mark.parametrize(("first", "second"), [(2, 2), (1, 3), (3, 1), (2, 5)])
def test_resume_goes_on_as_if_nothing_had_happened(
    first: int, second: int, corpus: Path, base: Path, alone: Run
) -> None:
    flags = [*TINY, *SCHEDULE]
    run_ranks(first, base, [*flags, "--stop-after=9"], tag="cut").ok()
    resumed = run_ranks(second, base, [*flags, "--resume=auto"], tag="cut").ok()
    assert "newest complete checkpoint is of step 9" in resumed.log
    assert [record["step"] for record in resumed.metrics] == list(range(1, STEPS + 1))
    assert _furthest(alone.losses, resumed.losses) < 1e-5


def test_resume_at_the_same_ranks_is_exact(base: Path) -> None:
    """At the same shares: those that follow the speed differ from run to run, and so does rounding."""
    flags = [*TINY, *SCHEDULE, "--no-rebalance"]
    whole = run_ranks(2, base, flags, tag="whole").ok()
    run_ranks(2, base, [*flags, "--stop-after=7"], tag="part").ok()
    part = run_ranks(2, base, [*flags, "--resume-from-step=7"], tag="part").ok()
    assert whole.losses == part.losses
    ends = [checkpoint.load(base / "base_checkpoints" / tag, STEPS) for tag in ("whole", "part")]
    assert all(bool((ends[0].model[name] == ends[1].model[name]).all()) for name in ends[0].model)


def test_a_run_that_was_started_anew_is_the_one_that_is_resumed(base: Path) -> None:
    """The one before it had come further, into the same folder."""
    flags = [*TINY, *SCHEDULE, "--keep-last=2"]
    run_ranks(1, base, [*flags, "--save-every=8"], tag="anew").ok()
    again = run_ranks(1, base, [*flags, "--save-every=2", "--stop-after=5"], tag="anew").ok()
    assert "checkpoints of later steps, from before: 16, 20." in again.log
    assert checkpoint.complete_steps(base / "base_checkpoints/anew") == [4, 5]
    resumed = run_ranks(1, base, [*flags, "--resume=auto"], tag="anew").ok()
    assert "newest complete checkpoint is of step 5" in resumed.log
    assert [record["step"] for record in resumed.metrics] == list(range(1, STEPS + 1))


def test_bf16_trains_like_fp32(corpus: Path, alone: Run) -> None:
    env = {"NANOCHAT_DTYPE": "bfloat16"}
    run = run_ranks(2, corpus, [*TINY, *SCHEDULE], tag="bf16", env=env).ok()
    assert 0 < _furthest(alone.losses, run.losses) < 0.05


def test_under_torchrun(corpus: Path, alone: Run) -> None:
    """The report's way of starting, with two ranks on one node and torchrun's own '--'."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=2", "--master_addr=127.0.0.1",
        f"--master_port={free_port()}", "-m", "scripts.base_train", "--", *TINY, *SCHEDULE, "--model-tag=torchrun",
    ]  # fmt: skip
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(corpus)}
    result = subprocess.run(
        command, cwd=APP, env=env, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (corpus / "base_checkpoints/torchrun/metrics.jsonl").read_text().splitlines()
    assert _furthest(alone.losses, [json.loads(line)["loss"] for line in lines]) < 1e-5
    assert f"step 00001/000{STEPS} (5.00%) | loss: 6.2" in result.stdout


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "worker"])
def test_sigterm_stops_all_ranks_at_one_step(who: int, base: Path) -> None:
    flags = [*TINY, "--num-iterations=100000", "--warmup-steps=2"]
    run = start_ranks(2, base, flags, tag="term")
    head = run.leader_says("step 00003/")
    run.ranks[who].process.send_signal(signal.SIGTERM)
    run.wait()
    assert run.codes == [128 + signal.SIGTERM] * 2, head + run.log
    folder = base / "base_checkpoints/term"
    assert checkpoint.complete_steps(folder) == [run.metrics[-1]["step"]]
    assert f"stopped by SIGTERM after step {run.metrics[-1]['step']}" in run.log


def test_killed_rank_is_one_clear_line_for_the_other(base: Path) -> None:
    run = start_ranks(2, base, [*TINY, "--num-iterations=100000"], tag="kill")
    leader = run.ranks[0].process
    assert leader.stdout is not None
    while "step 00003/" not in (line := leader.stdout.readline()):
        assert line
    run.ranks[1].process.kill()
    run.wait()
    assert run.codes[0] == 1
    assert "error: rank 0 lost contact with another rank" in run.ranks[0].output
    assert "Traceback" not in run.ranks[0].output


def test_checkpoints_by_time_do_not_change_the_training(base: Path) -> None:
    """Written by a thread while the steps go on; the run ends as one without them, and each that is kept loads."""
    flags = [*TINY, "--num-iterations=150", "--no-rebalance"]
    plain = run_ranks(2, base, [*flags, "--save-minutes=0"], tag="plain").ok()
    timed = run_ranks(2, base, [*flags, "--save-minutes=0.003", "--keep-last=0"], tag="timed").ok()
    assert plain.losses == timed.losses
    steps = checkpoint.complete_steps(base / "base_checkpoints/timed")
    assert len(steps) > 1
    assert steps[-1] == 150
    for step in steps:
        checkpoint.load(base / "base_checkpoints/timed", step)
    assert "ETTR: " in timed.log


def test_outlier_is_logged_and_left_out_on_request(base: Path) -> None:
    """After a shard of one repeated word comes another text: the loss jumps."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = base / "base_data_climbmix"
    pq.write_table(pa.table({"text": ["abc abc abc abc abc. " * 4] * 9000}), data / "shard_00000.parquet")
    flags = [*TINY, "--num-iterations=700", "--warmup-steps=5", "--embedding-lr=2"]
    logged = run_ranks(2, base, flags, tag="logged").ok()
    skipped = run_ranks(2, base, [*flags, "--skip-outliers"], tag="skipped").ok()
    assert "standard deviations above the last ones" in logged.log
    assert "the step is not taken" not in logged.log
    assert "the step is not taken" in skipped.log
