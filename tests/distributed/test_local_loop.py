"""Runs with --sync local: they learn, save equal replicas, stop together, go on at any number of ranks, send little."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lantrain.cluster.group import Ranks
from lantrain.training import checkpoint
from lantrain.training.sync import Estimate, measure_link
from tests.distributed.ranks import APP, GUARD_SECONDS, TINY, Run, damage_pages, run_ranks, start_ranks, together

STEPS = 24
LOCAL = [*TINY, f"--num-iterations={STEPS}", "--warmup-steps=2", "--sync=local", "--local-steps=5"]


def _rounds(run: Run) -> list[int]:
    return [record["step"] for record in run.metrics if "outer_bytes" in record]


@pytest.mark.parametrize(
    ("world", "extra"),
    [(1, []), (2, []), (3, ["--shares=5,0,3", "--delta-bits=4"]), (5, ["--total-batch-size=256"])],
    ids=["1", "2", "a rank without rows, 4 bits", "more ranks than rows"],
)
def test_run_learns_about_as_much_as_step_by_step(world: int, extra: list[str], corpus: Path) -> None:
    """The replicas are compared at the end of each round, and a difference would end the run with another code."""
    tag = f"local{world}"
    local = run_ranks(world, corpus, [*LOCAL, *extra], tag=tag).ok()
    assert len(local.losses) == STEPS
    assert abs(local.losses[0] - math.log(512)) < 0.01
    assert local.losses[-1] < local.losses[0] - 0.1
    assert _rounds(local) == ([5, 10, 15, 20, 24] if world > 1 else [])
    step = run_ranks(1, corpus, [*LOCAL, *extra[-1:], "--sync=step", "--shares=1"], tag=f"{tag}step").ok()
    assert sum(local.losses[-5:]) / sum(step.losses[-5:]) < 1.05
    checkpoint.load(corpus / "base_checkpoints" / tag, STEPS)


def test_evaluation_sample_and_checkpoint_end_a_round(base: Path) -> None:
    flags = [*LOCAL, "--eval-every=7", "--save-every=12", "--sample-every=9", "--save-minutes=0", "--keep-last=0"]
    run = run_ranks(2, base, flags, tag="ends").ok()
    assert _rounds(run) == [5, 7, 9, 10, 12, 14, 15, 18, 20, 21, 24]
    steps = [record["step"] for record in run.metrics]
    assert steps == sorted(steps), "a run that goes on keeps the beginning of metrics.jsonl"
    assert [record["step"] for record in run.metrics if "val_bpb" in record] == [0, 7, 14, 21, 24]
    assert checkpoint.complete_steps(base / "base_checkpoints/ends") == [12, 24]
    plain = run_ranks(2, base, [*flags, "--local-steps=100"], tag="later").ok()
    assert _rounds(plain) == [7, 9, 12, 14, 18, 21, 24]


def test_checkpoint_by_time_waits_for_the_end_of_the_round_and_changes_nothing(base: Path) -> None:
    # Shares that follow the clock would change the weights of the ranks in the average.
    flags = [*LOCAL, "--num-iterations=150", "--keep-last=0", "--no-rebalance"]
    plain = run_ranks(2, base, [*flags, "--save-minutes=0"], tag="plain").ok()
    timed = run_ranks(2, base, [*flags, "--save-minutes=0.002"], tag="timed").ok()
    assert plain.losses == timed.losses
    steps = checkpoint.complete_steps(base / "base_checkpoints/timed")
    assert len(steps) > 1
    assert steps[-1] == 150
    assert all(step % 5 == 0 for step in steps)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 3), (3, 2)])
def test_run_goes_on_at_another_number_of_ranks(first: int, second: int, corpus: Path, base: Path) -> None:
    """As after the loss or the return of a node. Stopped in the middle of a round, which ends there."""
    flags = [*LOCAL, "--num-iterations=40"]
    whole = run_ranks(first, corpus, flags, tag=f"whole{first}{second}").ok()
    run_ranks(first, base, [*flags, "--stop-after=18"], tag="cut").ok()
    resumed = run_ranks(second, base, [*flags, "--resume=auto"], tag="cut").ok()
    assert "newest complete checkpoint is of step 18" in resumed.log
    assert [record["step"] for record in resumed.metrics if "loss" in record] == list(range(1, 41))
    before, after = resumed.losses[16:18], resumed.losses[18:21]
    assert max(after) < max(before) + 0.15, "the loss jumped where the run went on"
    assert abs(sum(resumed.losses[-5:]) / sum(whole.losses[-5:]) - 1) < 0.05


@pytest.mark.parametrize(("first", "second"), [("step", "local"), ("local", "step")])
def test_either_way_of_training_goes_on_from_the_others_checkpoint(first: str, second: str, base: Path) -> None:
    flags = [*LOCAL, "--num-iterations=40"]
    run_ranks(2, base, [*flags, f"--sync={first}", "--stop-after=20"], tag="both").ok()
    resumed = run_ranks(2, base, [*flags, f"--sync={second}", "--resume=auto"], tag="both").ok()
    assert len(resumed.losses) == 40
    assert max(resumed.losses[20:23]) < max(resumed.losses[17:20]) + 0.15
    assert resumed.losses[-1] < resumed.losses[19]


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "worker"])
def test_sigterm_ends_the_round_and_stops_all_ranks_at_one_step(who: int, base: Path) -> None:
    flags = [*LOCAL, "--num-iterations=100000", "--local-steps=1000"]
    run = start_ranks(2, base, flags, tag="term")
    head = run.leader_says("step 00003/")
    run.ranks[who].process.send_signal(signal.SIGTERM)
    run.wait()
    assert run.codes == [128 + signal.SIGTERM] * 2, head + run.log
    last = max(record["step"] for record in run.metrics)
    assert checkpoint.complete_steps(base / "base_checkpoints/term") == [last]
    assert _rounds(run) == [last]
    assert last < 1000


def test_damaged_data_ends_the_round_and_keeps_what_was_learned(base: Path) -> None:
    damage_pages(base / "base_data_climbmix/shard_00001.parquet")
    run = run_ranks(2, base, [*LOCAL, "--num-iterations=100000", "--local-steps=100000"], tag="damage")
    assert 0 not in run.codes
    assert "shard_00001.parquet" in run.log
    assert "Traceback" not in run.log
    (step,) = checkpoint.complete_steps(base / "base_checkpoints/damage")
    assert step == max(record["step"] for record in run.metrics)
    assert _rounds(run) == [step]


def test_loss_that_is_not_a_number_ends_every_rank_and_keeps_the_last_checkpoint(base: Path) -> None:
    flags = [*LOCAL, "--warmup-steps=1", "--num-iterations=40"]
    run_ranks(2, base, [*flags, "--stop-after=4"], tag="nan").ok()
    wild = [*flags, "--matrix-lr=1e38", "--embedding-lr=1e38", "--unembedding-lr=1e38", "--resume=auto"]
    run = run_ranks(2, base, wild, tag="nan")
    assert run.codes == [3, 3]
    assert "is not a number in" in run.log
    assert checkpoint.complete_steps(base / "base_checkpoints/nan") == [4]


MEASURE = """
import json, os, sys, torch, torch.distributed as dist
from pathlib import Path
from tests.distributed.ranks import run_ranks, together
from tests.distributed.test_local_loop import WIRE, native_step, sent
from tests.faults.hosts import set_link
set_link("lo", up=True)
base = Path(sys.argv[1])
before = sent()
native = together(2, native_step)[0]
bytes_native, before = sent() - before, sent()
found = {"native": bytes_native, "parameters": native}
for name, extra in (("short", ["--stop-after=30"]), ("long", ["--stop-after=90"])):
    run_ranks(2, base, [*WIRE, *extra], tag="wire").ok()
    found[name], before = sent() - before, sent()
print(json.dumps(found))
"""
WIRE = [
    *TINY, "--aspect-ratio=64", "--head-dim=64", "--num-iterations=1000", "--sync=local", "--local-steps=30",
    "--no-rebalance", "--save-minutes=0",
]  # fmt: skip
NATIVE_STEPS = 10


def sent() -> int:
    """Bytes that all processes have put on the loopback of this network namespace, headers included."""
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[9])


def native_step(ranks: Ranks) -> int:
    """The wire of torch's plain way: reduce_scatter of all fp32 gradients and all_gather of all weights, each step."""
    from lantrain.model.gpt import GPT, config_for_depth

    config = config_for_depth(2, aspect_ratio=64, head_dim=64, sequence_len=64, vocab_size=512, window_pattern="SSSL")
    numel = sum(param.numel() for param in GPT(config).parameters())
    flat, shard = torch.zeros(numel + numel % 2), torch.zeros((numel + numel % 2) // 2)
    for _ in range(NATIVE_STEPS):
        torch.distributed.reduce_scatter_tensor(shard, flat)
        torch.distributed.all_gather_into_tensor(flat, shard)
    return numel


@pytest.mark.skipif(os.getuid() != 0, reason="a network namespace of its own needs root")
def test_bytes_on_the_wire_are_one_hundredth_of_the_native_ones(base: Path) -> None:
    """By the counters of a loopback on which nothing else travels: the rows, the losses and the rounds, TCP's headers
    and acknowledgements. The difference of two runs leaves the start and the checkpoint out."""
    command = ["unshare", "--net", sys.executable, "-c", MEASURE, str(base)]
    env = {**os.environ, "PYTHONPATH": f"{APP}{os.pathsep}{APP.parent}"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    per_step = (found["long"] - found["short"]) / 60
    native = found["native"] / NATIVE_STEPS
    assert native > 2 * 6 * found["parameters"], "two ranks, each 3 times half of the parameters in fp32"
    print(f"local {per_step:.0f} B a step, native {native:.0f}: {100 * per_step / native:.2f}%")
    assert per_step < 0.01 * native
    assert per_step > 2 * found["parameters"] / 30 * 0.9, "less than the rounds alone must send"


def test_auto_takes_the_way_that_is_faster_on_the_link_and_says_why() -> None:
    slow = Estimate(link=2e6, compute_seconds=2.0, step_bytes=80e6, local_bytes=4e6)
    assert slow.local
    assert "local, rounds of 30 steps: the link carries 2 MB/s" in slow.line(30)
    quick = Estimate(link=1e9, compute_seconds=2.0, step_bytes=80e6, local_bytes=4e6)
    assert not quick.local
    assert quick.line(30).startswith("--sync auto: step: ")


def test_link_is_measured_alike_on_every_rank() -> None:
    rates = together(3, measure_link)
    assert rates[0] == rates[1] == rates[2]
    assert rates[0] > 1e6


def test_auto_on_one_host_steps_together(base: Path) -> None:
    run = run_ranks(2, base, [*LOCAL, "--sync=auto"], tag="auto").ok()
    assert "--sync auto: " in run.log
    alone = run_ranks(1, base, [*LOCAL, "--sync=auto"], tag="alone").ok()
    assert "--sync auto: " not in alone.log
