"""What the measurements of one training step share: rows, medians, the age and the memory of a process."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB = 32768
SHAPES = {4: (512, 2), 8: (1024, 1), 12: (1024, 1)}  # depth: (row length, rows in a micro-batch)
STEPS = 5
RATES = {"unembedding_lr": 5e-4, "embedding_lr": 2e-2, "matrix_lr": 1e-3, "scalar_lr": 3e-2}


def token_rows(depth: int, tokens: int) -> Any:
    """(micro-batches, B, T + 1) token ids with the frequencies of text: 1 / rank, over the whole vocabulary."""
    import torch

    length, batch = SHAPES[depth]
    weights = 1.0 / torch.arange(1, VOCAB + 1)
    count = tokens // length * (length + 1)
    ids = torch.multinomial(weights, count, replacement=True, generator=torch.Generator().manual_seed(0))
    return ids.view(-1, batch, length + 1)


def median_seconds(work: Callable[[], object], repeats: int = STEPS, *, warm: bool = False) -> float:
    """Median wall time of `work` after one untimed call, unless it is `warm` already."""
    if not warm:
        work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def process_age() -> float:
    """Seconds since this process was started, interpreter and imports included.

    By the kernel's clock since boot, in which it counts a process's start too. (The time of day at boot, from which
    psutil reckons, is known to a second only.)
    """
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), after the first two
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def peak_megabytes() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
