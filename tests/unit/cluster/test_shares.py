from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from lantrain.cluster.shares import micro_batches, soonest_rows, split_rows


@pytest.mark.parametrize(
    ("rows", "weights", "counts"),
    [
        (8, [1, 1], [4, 4]),
        (8, [3, 1], [6, 2]),
        (4, [1, 1, 1], [2, 1, 1]),
        (4, [1] * 5, [1, 1, 1, 1, 0]),
        (8, [5, 0, 3], [5, 0, 3]),
        (1, [1, 3], [0, 1]),
        (0, [1, 1], [0, 0]),
    ],
)
def test_whole_rows_in_proportion(rows: int, weights: list[float], counts: list[int]) -> None:
    assert split_rows(rows, weights) == counts


def test_every_row_has_a_rank_for_any_speeds() -> None:
    for rows in range(60):
        for weights in ([1.7, 0.3], [1, 2, 4], [0.1] * 7, [1e-9, 1.0]):
            counts = split_rows(rows, weights)
            assert sum(counts) == rows
            assert all(abs(c - rows * w / sum(weights)) < 1 for c, w in zip(counts, weights, strict=True))


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], []])
def test_shares_of_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        split_rows(4, weights)


def test_rows_are_done_as_soon_as_whole_rows_allow() -> None:
    """Against all ways to split them."""
    draw = random.Random(0)
    for _ in range(200):
        rows, seconds = draw.randrange(1, 9), [draw.uniform(0.1, 2.0) for _ in range(draw.randrange(1, 5))]
        besides = [draw.choice([0.0, draw.uniform(0.0, 4.0)]) for _ in seconds]

        def end(way: Sequence[int], seconds: list[float] = seconds, besides: list[float] = besides) -> float:
            return max(n * one + more for n, one, more in zip(way, seconds, besides, strict=True))

        best = min(end(w) for w in itertools.product(range(rows + 1), repeat=len(seconds)) if sum(w) == rows)
        counts = soonest_rows(rows, [*seconds, None], [*besides, 0.0])
        assert (sum(counts), counts[-1]) == (rows, 0)
        assert end(counts[:-1]) == pytest.approx(best)


def test_many_rows_are_in_proportion_and_equal_ranks_equal() -> None:
    assert soonest_rows(64, [1.0, 2.5]) == [46, 18]
    assert soonest_rows(8, [1.0, 2.5]) == [6, 2]
    assert soonest_rows(9, [0.3] * 3) == [3, 3, 3]
    assert soonest_rows(10, [0.3] * 4) == [3, 3, 2, 2]
    assert soonest_rows(64, [1.0, 1.0], [0.0, 10.0]) == [37, 27]
    assert soonest_rows(4, [1.0, 1.0, 1.0], [0.0, 100.0, 0.0]) == [2, 0, 2]
    assert soonest_rows(1024, [1 / speed for speed in (3, 1, 4)]) == [384, 128, 512]


@pytest.mark.parametrize("seconds", [[], [None], [0.0, 1.0]])
def test_rows_need_a_rank_with_a_time(seconds: list[float | None]) -> None:
    with pytest.raises(ValueError, match="time above 0"):
        soonest_rows(4, seconds)


def test_micro_batches_cover_the_rows() -> None:
    assert micro_batches(7, 3) == [2, 2, 3]
    assert micro_batches(18, 16) == [9, 9]
    for rows in range(1, 40):
        for most in range(1, 9):
            sizes = micro_batches(rows, most)
            assert sum(sizes) == rows
            assert len(sizes) == -(-rows // most)
            assert most >= max(sizes) <= min(sizes) + 1
    assert micro_batches(2, 32) == [2]
    assert micro_batches(0, 4) == []
