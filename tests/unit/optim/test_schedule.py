"""The recipe's arithmetic against the reference numbers of nanochat."""

from __future__ import annotations

import math

import pytest

from lantrain.optim.schedule import Schedule, auto_batch, lr_scale, scaled_weight_decay

DEPTH_8 = 12 * (25_166_016 + 16_777_216)
DEPTH_12 = 12 * (84_935_088 + 25_165_824)
"""Target tokens at ratio 12: transformer matrices and head, vocabulary 32768."""


def test_reference_scales_of_depth_8_at_4096_tokens() -> None:
    assert f"{lr_scale(4096):.4f}" == "0.0884"
    assert f"{scaled_weight_decay(0.28, 4096, DEPTH_8, DEPTH_12):.6f}" == "0.064965"


def test_auto_batch_is_the_reference_at_depth_12_and_a_power_of_two_elsewhere() -> None:
    assert auto_batch(DEPTH_12, DEPTH_12) == 524288
    assert auto_batch(DEPTH_8, DEPTH_12) == 2 ** round(math.log2(524288 * (DEPTH_8 / DEPTH_12) ** 0.383))
    assert auto_batch(100 * DEPTH_12, DEPTH_12) == 4 * 524288 * 2**1


def test_learning_rate_warms_up_stays_and_warms_down() -> None:
    schedule = Schedule(1000, warmup_steps=40, warmdown_ratio=0.65, final_lr_frac=0.05)
    assert schedule.lr_multiplier(0) == 1 / 40
    assert schedule.lr_multiplier(39) == 1.0
    assert schedule.lr_multiplier(350) == 1.0
    assert schedule.lr_multiplier(675) == pytest.approx(0.5 + 0.5 * 0.05)
    assert schedule.lr_multiplier(1000) == pytest.approx(0.05)


def test_muon_momentum_rises_over_400_steps_and_falls_in_the_warmdown() -> None:
    schedule = Schedule(2000, warmdown_ratio=0.5)
    assert schedule.muon_momentum(0) == pytest.approx(0.85)
    assert schedule.muon_momentum(200) == pytest.approx(0.91)
    assert schedule.muon_momentum(999) == pytest.approx(0.97)
    assert schedule.muon_momentum(2000) == pytest.approx(0.90)


def test_weight_decay_is_a_cosine_to_zero() -> None:
    schedule = Schedule(100, weight_decay=0.2)
    assert schedule.muon_weight_decay(0) == pytest.approx(0.2)
    assert schedule.muon_weight_decay(50) == pytest.approx(0.1)
    assert schedule.muon_weight_decay(100) == pytest.approx(0.0)


def test_no_warmdown_divides_by_nothing() -> None:
    schedule = Schedule(10, warmup_steps=0, warmdown_ratio=0.0)
    assert [schedule.lr_multiplier(step) for step in range(11)] == [1.0] * 11
    assert schedule.muon_momentum(9) < 0.97
