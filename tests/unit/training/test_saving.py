"""When checkpoints are made, and that one in the background is a consistent copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lantrain.training import checkpoint
from lantrain.training.saving import Saver
from lantrain.training.track import OutlierWatch, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def _saver(folder: Path, clock: Clock, **options: Any) -> Saver:
    settings = {"every_steps": -1, "every_seconds": 600.0, "keep_last": 3, "saved_step": -1} | options
    return Saver(folder, clock=clock, **settings)


def test_by_time_and_by_step(tmp_path: Path) -> None:
    clock = Clock()
    saver = _saver(tmp_path, clock, every_steps=5)
    assert [step for step in range(12) if saver.due_by_step(step)] == [5, 10]
    assert not saver.due_by_time()
    clock.now += 601
    assert saver.due_by_time()
    assert not _saver(tmp_path, clock, every_seconds=0.0).due_by_time()


def test_checkpoints_by_time_cost_at_most_2_percent(tmp_path: Path) -> None:
    clock = Clock()
    saver = _saver(tmp_path, clock)
    began = clock.now
    clock.now += 30  # gathering it took half a minute
    saver.save(3, {"w": torch.ones(3)}, {}, {}, {"step": 3}, began=began, final=False)
    saver.wait()
    clock.now += 1400
    assert not saver.due_by_time()
    clock.now += 101
    assert saver.due_by_time()


def test_background_checkpoint_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    weights, moment = torch.zeros(2_000_000), torch.zeros(2_000_000)
    saver = _saver(tmp_path, Clock())
    saver.save(1, {"w": weights}, {"w.exp_avg": moment}, {"epoch": 1}, {"step": 1}, began=50.0, final=False)
    weights.add_(1)  # training goes on while it is written
    moment.add_(1)
    saver.wait()
    loaded = checkpoint.load(tmp_path, 1)
    assert not loaded.model["w"].any()
    assert not loaded.state["optimizer"]["w.exp_avg"].any()


def test_failure_in_the_background_is_a_warning_and_a_final_one_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    saver = _saver(folder, Clock())
    saver.save(1, {"w": torch.ones(3)}, {}, {}, {}, began=50.0, final=False)
    saver.wait()
    assert "warning: cannot write checkpoints" in capfd.readouterr().err
    with pytest.raises(checkpoint.CheckpointError):
        saver.save(2, {"w": torch.ones(3)}, {}, {}, {}, began=50.0, final=True)


def test_effective_share_counts_each_step_once() -> None:
    progress = Progress(began=1000.0)
    for step in range(1, 11):
        progress.add_step(step, 5.0, 2.0)
    share, hours = progress.effective_share(1040.0)
    assert share == pytest.approx(0.5)
    assert hours == pytest.approx(40 / 3600)
    assert Progress.from_dict(progress.to_dict(), None).effective_share(1040.0)[0] == pytest.approx(0.5)


def test_outliers_are_seen_after_a_warm_up_only() -> None:
    watch = OutlierWatch()
    for step in range(200):
        loss = 5 + 0.1 * (step % 3)
        assert watch.sigmas_above(loss) < 3
        watch.add(loss)
    assert watch.sigmas_above(8.0) > 6
    assert OutlierWatch.from_list(watch.to_list()).sigmas_above(8.0) == watch.sigmas_above(8.0)
    assert OutlierWatch.from_list([]).sigmas_above(100.0) == 0.0
