"""The controller of the shares, on machines whose speed the test sets."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from lantrain.cluster.balance import ALONE_STEPS, MAX_TRIAL_STEPS, TRIAL_STEPS, AloneWatch, Balance, Spent, longest

Speed = Callable[[int, int], float]


def drive(
    balance: Balance, steps: int, seconds_per_row: Speed, update: Sequence[float] = (0, 0, 0, 0)
) -> tuple[list[list[int]], list[int]]:
    """Run `steps` steps as the trainer does: the shares decided after a step hold for the second step after it.

    `update` has each rank's seconds of the update, told a step later and 0 at first. Returns each step's shares, and
    the steps after which a lasting change was decided.
    """
    used, changed = [], []
    now = on_its_way = list(balance.shares)
    for step in range(steps):
        now, on_its_way = on_its_way, list(balance.shares)
        used.append(now)
        spent = [
            Spent(rows, rows * seconds_per_row(rank, step), update[rank] if step else 0.0)
            for rank, rows in enumerate(now)
        ]
        change = balance.observe(spent)
        if change is not None:
            changed.append(step)
            assert sum(change.shares) == balance.rows
            assert change.seconds_after < change.seconds_before
    return used, changed


def fixed(*seconds: float) -> Speed:
    return lambda rank, step: seconds[rank]


def test_equal_ranks_are_left_alone() -> None:
    used, changed = drive(Balance(32, [1, 1, 1]), 200, fixed(0.1, 0.1, 0.1))
    assert changed == []
    assert used[-1] == [11, 11, 10]


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_rank_that_slows_down_gets_fewer_rows_within_20_steps_and_gets_them_back(slow: int) -> None:
    def seconds(rank: int, step: int) -> float:
        return 0.4 if rank == slow and 100 <= step < 200 else 0.1

    used, changed = drive(Balance(36, [1, 1, 1]), 300, seconds)
    assert used[99] == [12, 12, 12]
    assert used[120] == [4 if rank == slow else 16 for rank in range(3)]
    assert used[220] == [12, 12, 12]
    assert len(changed) == 2


def test_a_change_right_after_another_is_followed_within_20_steps_too() -> None:
    def seconds(rank: int, step: int) -> float:
        return (0.1, 0.2, 0.1, 0.4)[step // 20] if rank else 0.1

    used, changed = drive(Balance(60, [1, 1]), 80, seconds)
    assert [used[step] for step in (19, 40, 60, 79)] == [[30, 30], [40, 20], [30, 30], [48, 12]]
    assert len(changed) == 3


def test_wrong_speeds_at_the_start_are_mended() -> None:
    used, _ = drive(Balance(40, [1, 3]), 20, fixed(0.1, 0.1))
    assert used[0] == [10, 30]
    assert used[-1] == [20, 20]


def test_noise_and_single_bad_steps_change_nothing() -> None:
    draw = random.Random(1)

    def noisy(rank: int, step: int) -> float:
        hiccup = 10 if step % 9 == 3 * rank else 1
        return 0.1 * draw.uniform(0.98, 1.02) * hiccup

    _, changed = drive(Balance(64, [1, 1]), 1000, noisy)
    assert changed == []


def test_speeds_that_swing_faster_than_can_be_followed_do_not_make_it_flap() -> None:
    def swinging(rank: int, step: int) -> float:
        return 0.2 if rank and step % 2 else 0.1

    _, changed = drive(Balance(64, [1, 1]), 400, swinging)
    assert len(changed) <= 1


def test_a_rank_too_slow_for_one_row_has_none_and_is_tried_again_when_it_is_fast() -> None:
    def seconds(rank: int, step: int) -> float:
        return 5.0 if rank == 1 and step < 100 else 0.1

    used, changed = drive(Balance(8, [1, 1]), 300, seconds)
    idle = used[20:100]
    assert used[19] == [8, 0]
    assert idle.count([7, 1]) in (1, 2, 3), "a trial row from time to time"
    assert idle.count([8, 0]) == len(idle) - idle.count([7, 1])
    assert used[-1] == [4, 4]
    assert len(changed) == 2


def test_the_update_counts_with_the_rows() -> None:
    """A rank that is busy with its update for long gets fewer rows, so that both are done at the same time."""
    used, changed = drive(Balance(40, [1, 1]), 40, fixed(0.1, 0.1), update=[0.2, 1.2])
    assert used[-1] == [25, 15]
    assert len(changed) == 1


def test_a_rank_whose_update_alone_takes_too_long_has_no_rows() -> None:
    used, _ = drive(Balance(8, [1, 1]), 40, fixed(0.1, 0.1), update=[0.1, 2.0])
    assert used[19] == used[-1] == [8, 0]


def test_trials_become_rarer() -> None:
    used, _ = drive(Balance(8, [1, 1]), 3000, fixed(0.1, 5.0))
    trials = [step for step, shares in enumerate(used) if shares == [7, 1]]
    gaps = [after - before for before, after in pairwise(trials)]
    assert TRIAL_STEPS < gaps[0] < 3 * TRIAL_STEPS
    assert gaps == sorted(gaps)
    assert MAX_TRIAL_STEPS <= gaps[-1] < MAX_TRIAL_STEPS + 5


def test_more_ranks_than_rows_each_get_a_trial() -> None:
    used, changed = drive(Balance(2, [1, 1, 1, 1]), 200, fixed(0.1, 0.1, 0.1, 0.02))
    assert [any(shares[rank] for shares in used) for rank in range(4)] == [True] * 4
    assert used[-1] == [0, 0, 0, 2], "both rows on the one that is five times as fast"
    assert len(changed) == 1


def test_fixed_shares_stay_and_are_in_proportion() -> None:
    balance = Balance(8, [5, 0, 3], follow=False)
    used, changed = drive(balance, 50, fixed(0.1, 0.1, 9.0))
    assert used == [[5, 0, 3]] * 50
    assert changed == []
    assert balance.split(16) == [10, 0, 6]


def test_alone_there_is_nothing_to_share() -> None:
    balance = Balance(4, [1.0])
    assert drive(balance, 10, fixed(0.1)) == ([[4]] * 10, [])


def test_evaluation_is_split_by_what_is_known() -> None:
    balance = Balance(10, [1, 1])
    assert balance.split(10) == [5, 5]
    drive(balance, 20, fixed(0.1, 0.4))
    assert balance.split(100) == [80, 20]


def test_same_numbers_give_the_same_shares_on_every_rank() -> None:
    draw = random.Random(2)
    ranks = [Balance(23, [3.7, 1.1, 2.0]) for _ in range(3)]
    for _ in range(300):
        measured = [Spent(rows, rows * draw.uniform(0.05, 0.3), draw.uniform(0.1, 0.5)) for rows in ranks[0].shares]
        lines = {change.line(1) if change else "" for change in (balance.observe(measured) for balance in ranks)}
        assert len(lines) == 1
        assert ranks[0].shares == ranks[1].shares == ranks[2].shares


def test_the_line_has_the_numbers() -> None:
    balance = Balance(10, [1, 1])
    changes = [balance.observe([Spent(5, 0.5, 0.2), Spent(5, 2.0, 0.1)]) for _ in range(20)]
    (change,) = (change for change in changes if change)
    assert change.line(17) == (
        "rows of each rank from step 17 on: 8, 2 (before: 5, 5); a row takes 0.1, 0.4 s, the update 0.2, 0.1 s, "
        "so a step 1 s instead of 2.1"
    )
    assert longest([8, 2], [0.1, 0.4]) == 0.8
    assert longest([8, 2], [0.1, 0.4], [0.1, 0.5]) == pytest.approx(1.3)
    assert longest([8, 0], [0.1, 0.4], [0.1, 5.0]) == pytest.approx(0.9), "without rows there is nothing to wait for"


def test_a_network_that_costs_more_than_it_brings_is_told_once() -> None:
    watch = AloneWatch(16)
    measured = [Spent(8, 2.4), Spent(8, 2.3)]
    lines = [watch.add(5.5 if step != 3 else 90.0, measured) for step in range(100)]
    assert [step for step, line in enumerate(lines) if line] == [ALONE_STEPS - 1]
    assert "5.5 s with 2 ranks, the fastest of them alone would compute it in 4.6 s" in lines[ALONE_STEPS - 1]


def test_ranks_that_help_are_no_reason_for_a_warning() -> None:
    watch = AloneWatch(16)
    lines = [watch.add(2.6 if step % 5 else 30.0, [Spent(8, 2.4), Spent(8, 2.3)]) for step in range(100)]
    lines += [watch.add(5.0, [Spent(16, 4.6)]) for _ in range(100)]
    lines += [watch.add(5.0, []) for _ in range(100)]
    assert set(lines) == {""}
