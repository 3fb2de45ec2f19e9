"""Which rows of a step each rank computes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def split_rows(rows: int, weights: Sequence[float]) -> list[int]:
    """Split `rows` whole rows over the ranks in proportion to `weights` (largest remainder, first rank on a tie).

    Returns one count a rank; the counts add up to `rows`, and a count may be zero. Raises ValueError when no weight
    is positive or one is negative.
    """
    total = float(sum(weights))
    if total <= 0 or any(weight < 0 for weight in weights):
        raise ValueError(f"shares must be non-negative and not all zero: {list(weights)}")
    exact = [rows * weight / total for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_remainder[: rows - sum(counts)]:
        counts[rank] += 1
    return counts


def soonest_rows(
    rows: int, seconds_per_row: Sequence[float | None], fixed_seconds: Sequence[float] | None = None
) -> list[int]:
    """Split `rows` whole rows so that the last rank is done as early as whole rows allow.

    `seconds_per_row` is what a row takes on each rank; None for a rank that is to have none. `fixed_seconds` is what a
    rank needs besides, whatever its rows (default 0). Each row goes to the rank that would be done with it soonest, the
    first on a tie, which is optimal for equal pieces of work on machines of unequal speed. Returns one count a rank;
    the counts add up to `rows`. Raises ValueError when no rank may have rows or a time is not positive.
    """
    fixed = list(fixed_seconds or [0.0] * len(seconds_per_row))
    times = [(seconds, rank) for rank, seconds in enumerate(seconds_per_row) if seconds is not None]
    if not times or min(times)[0] <= 0 or min(fixed) < 0:
        raise ValueError(f"there must be a rank with rows, and its time above 0: {list(seconds_per_row)}, {fixed}")
    level = _common_end(rows, times, fixed)
    counts = [0] * len(fixed)
    for seconds, rank in times:
        # With parts of rows all would be done at `level`. No rank ends up with fewer whole rows than it has done by
        # then, so only the rest is handed out row by row. A hair less, for rounding.
        counts[rank] = max(0, int((level - fixed[rank]) / seconds * (1 - 1e-12)))
    heap = [(fixed[rank] + (counts[rank] + 1) * seconds, rank, seconds) for seconds, rank in times]
    heapq.heapify(heap)
    for _ in range(rows - sum(counts)):
        _, rank, seconds = heap[0]
        counts[rank] += 1
        heapq.heapreplace(heap, (fixed[rank] + (counts[rank] + 1) * seconds, rank, seconds))
    return counts


def _common_end(rows: int, times: Sequence[tuple[float, int]], fixed: Sequence[float]) -> float:
    """Seconds after which all ranks would be done if rows could be divided; ranks that are busy longer get none."""
    while True:
        level = (rows + sum(fixed[rank] / seconds for seconds, rank in times)) / sum(1 / s for s, _ in times)
        earlier = [(seconds, rank) for seconds, rank in times if fixed[rank] <= level]
        if len(earlier) == len(times):
            return level
        times = earlier


def micro_batches(rows: int, device_batch_size: int) -> list[int]:
    """Sizes of the micro-batches in which a rank runs its `rows`: as few as at most `device_batch_size` rows allow.

    Of about equal size: a last one of a single row has short matrix products, and a backward pass in which no gradient
    can be sent before it is over.
    """
    count = -(-rows // device_batch_size)
    return [rows * (index + 1) // count - rows * index // count for index in range(count)]
