"""An evaluation, which may take hours, is left at its next step when any rank is told to stop."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from lantrain.cluster import beacon
from lantrain.training import checkpoint
from tests.distributed.ranks import GUARD_SECONDS, TINY, run_ranks, start_ranks

FLAGS = [*TINY, "--num-iterations=6", "--warmup-steps=2", "--no-rebalance", "--resume=auto", "--eval-every=3"]
SHORT, LONG = "--eval-tokens=512", "--eval-tokens=2000000"


def evaluates_at(path: Path, step: int) -> bool:
    said = beacon.read(path, 0)
    return said is not None and (said.phase, said.step) == ("evaluate", step)


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "worker"])
def test_a_stop_ends_an_evaluation_with_a_checkpoint(
    who: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 4000 steps of it were left; the run then goes on where it was, and evaluates what it had left."""
    whole = run_ranks(2, base, [*FLAGS, SHORT], tag="whole").ok()
    run_ranks(2, base, [*FLAGS, SHORT, "--stop-after=2"], tag="cut").ok()
    told = tmp_path / "beacon.json"
    run = start_ranks(2, base, [*FLAGS, LONG], tag="cut", env={"LANTRAIN_BEACON": str(told)})
    try:
        until = time.monotonic() + GUARD_SECONDS
        while not evaluates_at(told, 3):
            assert time.monotonic() < until
            assert run.ranks[0].process.poll() is None, run.wait().log
            time.sleep(0.01)
        run.ranks[who].process.send_signal(signal.SIGTERM)
        run.wait()
    finally:
        run.kill()
    assert run.codes == [128 + signal.SIGTERM] * 2, run.log
    assert "stopped by SIGTERM after step 3;" in run.log
    assert "Validation bpb" not in run.log
    assert checkpoint.complete_steps(base / "base_checkpoints/cut")[-1] == 3
    again = run_ranks(2, base, [*FLAGS, SHORT], tag="cut").ok()
    assert "Step 00003 | Validation bpb" in again.log
    assert again.losses == pytest.approx(whole.losses, abs=1e-6)
