"""Row shares that follow the speed each rank shows while it trains.

Every rank runs the same controller on the same gathered numbers, so all come to the same shares without another
message. It uses only +, *, / and comparisons of doubles, which are the same on every CPU.

What can be reached is bounded by whole rows: 8 rows on two ranks of speeds 1 and 0.4 are 6 and 2 at best, 95% of the
two speeds' sum; 64 rows are 46 and 18, 99%.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lantrain.cluster.shares import soonest_rows, split_rows

WARMUP_STEPS = 2
"""First steps that do not count: memory is touched for the first time."""
WINDOW = 5
"""Steps of a rank whose median counts: two disturbed ones among them change nothing."""
MIN_GAIN = 0.03
"""Shares change only for a computation so much shorter: half of the variation between steps on a quiet machine."""
PATIENCE = 3
"""Steps in a row that must ask for a change."""
PAUSE_STEPS = 8
"""Steps between changes. With window, patience and the step that is on its way: 14 steps from event to effect."""
TRIAL_STEPS = 20
"""Steps without rows after which a rank gets one row for one step, to see how fast it has become."""
MAX_TRIAL_STEPS = 320
"""The pause between trials doubles up to this: a trial may make its step longer."""

ALONE_STEPS = 15
ALONE_MARGIN = 1.1
"""One rank alone also makes an update, which is not in its computation."""


class Spent(NamedTuple):
    """What a rank did in a step, in seconds without any waiting for others."""

    rows: int
    computing: float
    """Forward and backward passes of its rows."""
    updating: float = 0.0
    """The update, which does not depend on its rows: matrices it owns, tables, packing. 0: not known, or none made."""


@dataclass(frozen=True)
class Change:
    """New shares, and why: seconds of a row and of the update on each rank (None: not known), and of a step."""

    shares: list[int]
    before: list[int]
    seconds_per_row: list[float | None]
    update_seconds: list[float]
    seconds_before: float
    seconds_after: float

    def line(self, step: int) -> str:
        """The change in words; it counts from `step` on."""
        speeds = ", ".join("?" if seconds is None else f"{seconds:.3g}" for seconds in self.seconds_per_row)
        updates = ", ".join(f"{seconds:.3g}" for seconds in self.update_seconds)
        return (
            f"rows of each rank from step {step} on: {_listed(self.shares)} (before: {_listed(self.before)}); "
            f"a row takes {speeds} s, the update {updates} s, so a step {self.seconds_after:.3g} s instead of "
            f"{self.seconds_before:.3g}"
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def longest(
    shares: Sequence[int], seconds_per_row: Sequence[float | None], fixed_seconds: Sequence[float] | None = None
) -> float:
    """Seconds until the last rank has done its rows, and what it needs besides; ranks without rows do not count."""
    fixed = fixed_seconds or [0.0] * len(shares)
    return max(
        (n * seconds + more for n, seconds, more in zip(shares, seconds_per_row, fixed, strict=True) if n and seconds),
        default=0,
    )


class Balance:
    """Decides, step after step, how many rows each rank gets. Every rank feeds it the same numbers."""

    def __init__(self, rows: int, weights: Sequence[float], *, follow: bool = True) -> None:
        """Split `rows` a step by `weights` (relative speeds); with `follow`, go on by what is measured.

        Fixed shares are in proportion to the weights; those to start from are what would be done soonest.
        """
        self.rows, self.weights, self.follow = rows, list(weights), follow and len(weights) > 1
        world = len(self.weights)
        self._seen: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(world)]
        self._updates: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(world)]
        self.shares = self.split(rows)
        self._lasting = self.shares
        self._without_rows = [0] * world
        self._trial_after = [TRIAL_STEPS] * world
        self._in_trial = False
        self._asked = 0
        self._steps = 0
        self._changed_at = -PAUSE_STEPS

    def split(self, rows: int) -> list[int]:
        """`rows` rows by the speeds known now."""
        if not self.follow:
            return split_rows(rows, self.weights)
        known = self._seconds_per_row()
        if any(seconds is not None for seconds in known):
            return soonest_rows(rows, known)
        return soonest_rows(rows, [1 / weight if weight > 0 else None for weight in self.weights])

    def _seconds_per_row(self) -> list[float | None]:
        return [statistics.median(seen) if seen else None for seen in self._seen]

    def _update_seconds(self) -> list[float]:
        return [statistics.median(seen) if seen else 0.0 for seen in self._updates]

    def observe(self, measured: Sequence[Spent]) -> Change | None:
        """Take what each rank did in a step.

        Afterwards `shares` are those of the next step whose rows are not yet on their way. Returns the change when
        there is a lasting one; trials of a single row come and go without.
        """
        self._steps += 1
        if not self.follow or self._steps <= WARMUP_STEPS:
            return None
        if self._in_trial:
            self.shares, self._in_trial = self._lasting, False
        for rank, spent in enumerate(measured):
            self._add(rank, spent)
        change = self._wanted_change()
        if change is not None:
            self.shares, self._changed_at, self._asked = change.shares, self._steps, 0
            self._trial_after = [
                TRIAL_STEPS if rows else after for rows, after in zip(self.shares, self._trial_after, strict=True)
            ]
        else:
            self._try_one_without_rows()
        return change

    def _add(self, rank: int, spent: Spent) -> None:
        if spent.rows <= 0 or spent.computing <= 0:
            self._without_rows[rank] += 1
            return
        if self._without_rows[rank]:
            self._seen[rank].clear()  # what it was before
            self._updates[rank].clear()
        self._without_rows[rank] = 0
        self._seen[rank].append(spent.computing / spent.rows)
        if spent.updating > 0:
            self._updates[rank].append(spent.updating)

    def _wanted_change(self) -> Change | None:
        known = self._seconds_per_row()
        if all(seconds is None for seconds in known):
            return None
        updates = self._update_seconds()
        best = soonest_rows(self.rows, known, updates)
        before, after = longest(self.shares, known, updates), longest(best, known, updates)
        self._asked = self._asked + 1 if before > after * (1 + MIN_GAIN) else 0
        if self._asked < PATIENCE or self._steps - self._changed_at < PAUSE_STEPS:
            return None
        return Change(best, self.shares, known, updates, before, after)

    def _try_one_without_rows(self) -> None:
        """Give one row for one step to a rank that has had none for long, from the rank that is done last."""
        due = [rank for rank, idle in enumerate(self._without_rows) if idle >= self._trial_after[rank]]
        if not due:
            return
        rank, known = due[0], self._seconds_per_row()
        donor = max(range(len(self.shares)), key=lambda r: self.shares[r] * (known[r] or 0.0))
        if self.shares[donor] < 1 or donor == rank:
            return
        self._lasting, self._in_trial = self.shares, True
        self.shares = list(self.shares)
        self.shares[donor] -= 1
        self.shares[rank] += 1
        self._trial_after[rank] = min(2 * self._trial_after[rank], MAX_TRIAL_STEPS)
        self._without_rows[rank] = 0


class AloneWatch:
    """Notices when the fastest rank alone would be faster than all together: the network costs more than they bring."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._steps: deque[tuple[float, float]] = deque(maxlen=ALONE_STEPS)
        self._said = False

    def add(self, seconds: float, measured: Sequence[Spent]) -> str:
        """Take a step's seconds and what the ranks did in it; returns a line the first time that it is so, else ""."""
        per_row = [spent.computing / spent.rows for spent in measured if spent.rows > 0 and spent.computing > 0]
        if self._said or not per_row or len(measured) < 2:
            return ""
        self._steps.append((seconds, self.rows * min(per_row)))
        together, alone = (statistics.median(column) for column in zip(*self._steps, strict=True))
        if len(self._steps) < ALONE_STEPS or together < ALONE_MARGIN * alone:
            return ""
        self._said = True
        return (
            f"warning: a step takes {together:.3g} s with {len(measured)} ranks, the fastest of them alone would "
            f"compute it in {alone:.3g} s: the network costs more than the others bring. A cable instead of Wi-Fi, a "
            "larger --total-batch-size, or --sync local helps"
        )
