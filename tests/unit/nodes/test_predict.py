"""Which machines are worth having, from their figures."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from lantrain.nodes.predict import (
    EFFICIENCY,
    EXCHANGES,
    Speed,
    Work,
    step_seconds,
    why_left_out,
    work_of,
    worth_having,
)

GIGABIT, WIFI, SLOW = 117e6, 5e6, 0.5e6
WORK = Work(
    rows=32, row_flops=1e11, row_tokens=512, update_flops=1e10, dense=12_000_000, tables=25_000_000, width=768,
    vocabulary=32768,
)  # fmt: skip


def seconds(nodes: list[Speed], chosen: list[int]) -> float:
    return step_seconds(WORK, [nodes[i] for i in chosen]).seconds


def test_a_machine_alone_only_computes() -> None:
    prediction = step_seconds(WORK, [Speed(200e9)])
    assert prediction.compute == pytest.approx(32 * 1e11 / (EFFICIENCY * 200e9))
    assert (prediction.wire, prediction.bytes, prediction.rows) == (0.0, 0.0, [32])


def test_the_wire_of_two_equal_machines() -> None:
    """Half of the gradients out, half of the weights back, each way of a full-duplex link, and the touched rows."""
    nodes = [Speed(200e9), Speed(200e9, GIGABIT, 0.001)]
    prediction = step_seconds(WORK, nodes)
    touched = 2.2 * (16 * 512) ** 0.75
    assert prediction.rows == [16, 16]
    assert prediction.bytes == pytest.approx(2 * 6e6 * 4 + touched * (768 * 4 + 4))
    assert prediction.wire == pytest.approx(prediction.bytes / GIGABIT + EXCHANGES * 0.001)
    narrow = step_seconds(replace(WORK, wire_bytes=2), nodes)
    assert narrow.bytes == pytest.approx(prediction.bytes / 2, rel=0.01)


def test_owners_as_they_are_laid_out_count_and_backward_hides_a_part() -> None:
    """One of two owns three quarters: its link carries the others' gradients for them, and its weights."""
    nodes = [Speed(200e9), Speed(200e9, GIGABIT)]
    uneven = replace(WORK, owned=lambda weights: [9e6, 3e6])
    assert step_seconds(uneven, nodes).bytes == pytest.approx(step_seconds(WORK, nodes).bytes + 2 * 3e6 * 4)
    hidden = step_seconds(replace(WORK, micro_rows=4), nodes)
    assert step_seconds(WORK, nodes).wire - hidden.wire == pytest.approx(0.5 * 6e6 * 4 / GIGABIT)
    short = step_seconds(replace(WORK, micro_rows=4, row_flops=1e9), nodes)
    assert step_seconds(WORK, nodes).wire - short.wire == pytest.approx(0.5 * 4 * 1e9 / (EFFICIENCY * 200e9))


def test_whole_rows_limit_what_unequal_machines_reach() -> None:
    few = step_seconds(replace(WORK, rows=8), [Speed(100e9), Speed(40e9, GIGABIT)])
    assert few.rows == [6, 2]
    assert few.compute == pytest.approx(6 * 1e11 / (EFFICIENCY * 100e9))


def test_known_seconds_a_row_count_more_than_the_gemm_rate() -> None:
    nodes = [Speed(200e9), Speed(200e9, GIGABIT)]
    assert step_seconds(WORK, nodes, [0.1, 0.3]).rows == [24, 8]


def test_a_good_link_is_worth_it_and_a_bad_one_is_not() -> None:
    for link, kept in ((GIGABIT, [0, 1]), (SLOW, [0])):
        assert worth_having(WORK, [Speed(200e9), Speed(200e9, link)]) == kept


def test_one_bad_link_does_not_cost_the_others_their_place() -> None:
    nodes = [Speed(200e9), Speed(150e9, GIGABIT), Speed(300e9, SLOW), Speed(100e9, GIGABIT)]
    assert worth_having(WORK, nodes) == [0, 1, 3]
    why = why_left_out(WORK, nodes, [0, 1, 3], 2)
    assert why.startswith("a step is expected to take ")
    assert "(300 GFLOP/s, 0.5 MB/s, round trip 0 ms)" in why


def test_a_faster_machine_behind_a_bad_link_is_named_as_the_better_master() -> None:
    for flops, named in ((600e9, True), (200e9, False)):
        why = why_left_out(WORK, [Speed(200e9), Speed(flops, SLOW)], [0], 1)
        assert ("alone it would take" in why) == named
        assert why.endswith("make it the master") == named


def test_a_machine_too_slow_for_a_row_is_left_out_where_the_wire_costs() -> None:
    nodes = [Speed(400e9), Speed(4e9, WIFI)]
    assert worth_having(WORK, nodes) == [0]


def test_what_was_not_measured_is_taken() -> None:
    assert worth_having(WORK, [Speed(200e9), Speed(0.0, SLOW), Speed(200e9, 0.0), Speed(200e9, SLOW)]) == [0, 1, 2]
    assert worth_having(WORK, [Speed(0.0), Speed(200e9, SLOW)]) == [0, 1]
    with pytest.raises(ValueError, match="not measured"):
        step_seconds(WORK, [Speed(200e9), Speed(200e9)])


def test_choices_are_never_worse_than_alone_or_all_and_near_the_best_of_all_sets() -> None:
    draw = random.Random(0)
    worst = 1.0
    for _ in range(150):
        count = draw.randrange(1, 6)
        nodes = [Speed(draw.uniform(50e9, 400e9))]
        nodes += [Speed(draw.uniform(20e9, 400e9), 10 ** draw.uniform(5.5, 8.1)) for _ in range(count)]
        kept = worth_having(WORK, nodes)
        others = range(1, len(nodes))
        best = min(seconds(nodes, [0, *some]) for k in range(len(nodes)) for some in combinations(others, k))
        assert kept[0] == 0
        assert seconds(nodes, kept) <= min(seconds(nodes, [0]), seconds(nodes, list(range(len(nodes))))) + 1e-12
        worst = max(worst, seconds(nodes, kept) / best)
    assert worst < 1.05


def test_the_work_follows_from_the_flags() -> None:
    flags = ["--depth", "4", "--max-seq-len", "512", "--total-batch-size", "4096", "--num-iterations", "10"]
    work = work_of(flags, 32768)
    assert (work.rows, work.row_tokens, work.vocabulary) == (8, 512, 32768)
    assert work.tables == 3 * 32768 * 256
    assert work.width == 3 * 256
    assert 11e6 < work.dense < 12e6
    assert 3e10 < work.row_flops < 5e10
    assert work.owned is not None
    assert sum(work.owned([3.0, 1.0, 1.0])) == work.dense
