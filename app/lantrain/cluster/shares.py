"""Which rows of a step each rank computes."""

from __future__ import annotations

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


def micro_batches(rows: int, device_batch_size: int) -> list[int]:
    """Sizes of the micro-batches in which a rank runs its `rows`: at most `device_batch_size` rows each."""
    return [min(device_batch_size, rows - start) for start in range(0, rows, device_batch_size)]
