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


def soonest_rows(rows: int, seconds_per_row: Sequence[float | None]) -> list[int]:
    """Split `rows` whole rows so that the last rank is done as early as whole rows allow.

    `seconds_per_row` is what a row takes on each rank; None for a rank that is to have none. Each row goes to the rank
    that would be done with it soonest, the first on a tie, which is optimal for equal pieces of work on machines of
    unequal speed. Returns one count a rank; the counts add up to `rows`. Raises ValueError when no rank may have rows
    or a time is not positive.
    """
    times = [(seconds, rank) for rank, seconds in enumerate(seconds_per_row) if seconds is not None]
    if not times or min(times)[0] <= 0:
        raise ValueError(f"there must be a rank with rows, and its time above 0: {list(seconds_per_row)}")
    total = sum(1 / seconds for seconds, _ in times)
    counts = [0] * len(seconds_per_row)
    for seconds, rank in times:
        # No rank ends up below its exact share rounded down, so only the rest is handed out row by row. A hair less,
        # for rounding.
        counts[rank] = int(rows / seconds / total * (1 - 1e-12))
    heap = [((counts[rank] + 1) * seconds, rank, seconds) for seconds, rank in times]
    heapq.heapify(heap)
    for _ in range(rows - sum(counts)):
        _, rank, seconds = heap[0]
        counts[rank] += 1
        heapq.heapreplace(heap, ((counts[rank] + 1) * seconds, rank, seconds))
    return counts


def micro_batches(rows: int, device_batch_size: int) -> list[int]:
    """Sizes of the micro-batches in which a rank runs its `rows`: at most `device_batch_size` rows each."""
    return [min(device_batch_size, rows - start) for start in range(0, rows, device_batch_size)]
