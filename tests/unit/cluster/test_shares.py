from __future__ import annotations

import pytest

from lantrain.cluster.shares import micro_batches, split_rows


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


def test_micro_batches_cover_the_rows() -> None:
    assert micro_batches(7, 3) == [3, 3, 1]
    assert micro_batches(2, 32) == [2]
    assert micro_batches(0, 4) == []
