"""Whether two machines compute the same bits where they must: in the update of what every rank holds and updates.

AdamW (optim/adamw.py) is written in operations that IEEE 754 rounds correctly, in one order, so CPUs of every kind
agree, with the C++ operations or without. Where one does not, its compiler, its image or its hardware is at fault, and
the tables that every rank updates would drift apart: the replica check would find out some steps later, in a run. So a
digest of a few updates is compared when a machine joins. Everything else may differ: sums and products that only one
rank computes are sent to the others.
"""

from __future__ import annotations

import hashlib
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = ((7,), (32, 24), (513, 257))
"""Rests of vectors, whole vectors, and enough for several threads and for a second BLOCK of the twin."""
TABLE = (67, 136)
"""A table whose rows wait, of four vectors at once, single ones and a rest, whatever a vector's length."""
STEPS = 5
WAITING_STEPS = 64
"""Rows of the table lack between one and all of them; the weights that lack most come to rest, a loop of its own."""
BETAS, EPS, WEIGHT_DECAY, RATE = (0.8, 0.995), 1e-10, 0.013, 0.0173


def update_digest() -> str:
    """A short hash of the bits that this process's AdamW gives."""
    import numpy as np
    import torch

    from lantrain.optim.adamw import moments_like

    draw, digest = np.random.default_rng(1), hashlib.sha256()

    def tensor(shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(draw.standard_normal(shape).astype(np.float32))  # torch's generator varies with the CPU

    for dtype in (torch.float32, torch.bfloat16):  # of the moments
        for shape in SHAPES:
            state = [tensor(shape), *moments_like(torch.empty(shape), dtype)]
            _whole_updates(state, [tensor(shape) * 10.0**-step for step in range(1, STEPS + 1)])
            for result in state:
                digest.update(result.float().numpy().tobytes())
        moments = (tensor(TABLE) * 1e-6).to(dtype), (tensor(TABLE).square() * 1e-6).to(dtype)
        state = [tensor(TABLE), *moments]
        ids = torch.arange(0, TABLE[0], 2)
        _late_updates(state, ids, tensor((ids.numel(), TABLE[1])))
        for result in state:
            digest.update(result.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def _whole_updates(state: list[Tensor], grads: list[Tensor]) -> None:
    from lantrain.optim.adamw import adamw_update

    param, m, v = state
    for step, grad in enumerate(grads, 1):
        adamw_update(param, grad, m, v, step=step, lr=RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


def _late_updates(state: list[Tensor], ids: Tensor, grads: Tensor) -> None:
    """Rows that were left behind: `ids` get a gradient in the last step, and then the others catch up."""
    import torch

    from lantrain.optim.adamw import Constants, advance_rows

    constants, (param, m, v) = Constants(BETAS, EPS, WEIGHT_DECAY), state
    steps = [constants.step(number, RATE / number) for number in range(1, WAITING_STEPS + 1)]
    behind = torch.arange(len(param), dtype=torch.int32) % WAITING_STEPS + 1
    advance_rows(param, m, v, ids, grads, behind, steps, constants)
    behind[ids] = 0
    advance_rows(param, m, v, slice(0, len(param)), None, behind, steps, constants)


def cpu_class() -> str:
    """Architecture, and the instructions that torch uses here: x86_64 AVX2."""
    import torch

    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__":
    print(cpu_class(), update_digest())
