"""AdamW (arXiv 1711.05101) for everything that is not a block's matrix, with the same bits on every kind of CPU.

One pass over memory in C++ (kernels/adamw.cpp), or its twin in PyTorch, which gives the same bits: both do the same
correctly rounded operations in the same order. Ranks may so update copies of a table without exchanging them, whatever
their CPUs are.

Rows that a step does not touch still move, by their momentum and their decay. `advance_rows` makes up for several such
steps at once: a table is then read and written when its rows are needed, and not once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lantrain.model.kernels import is_bf16, kernels

DUST = 2.0**-100
"""Moments below it become zero: see kernels/adamw.cpp."""

BLOCK = 2**17
"""Elements that the twin takes at a time: its nine passes then read from the cache."""


@dataclass(frozen=True)
class Constants:
    """What all steps of a parameter share."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def packed(self) -> Tensor:
        """As the C++ operation reads them: beta1, 1 - beta1, beta2, 1 - beta2, eps."""
        b1, b2 = self.betas
        return torch.tensor([b1, 1 - b1, b2, 1 - b2, self.eps])

    def step(self, number: int, lr: float) -> tuple[float, float, float]:
        """What step `number` (from 1) adds: the weights' decay, the size of the change, and 1 / sqrt(1 - b2^t)."""
        b1, b2 = self.betas
        return 1 - lr * self.weight_decay, lr / (1 - b1**number), (1 - b2**number) ** -0.5


def moments_like(param: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The moments of a parameter before its first step."""
    return torch.zeros_like(param, dtype=dtype), torch.zeros_like(param, dtype=dtype)


@torch.no_grad()
def adamw_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step in place on contiguous float32 tensors of one shape; `step` counts from 1.

    The moments may be bfloat16: this step uses the unrounded ones, and rounds them for the next.
    param <- (1 - lr * weight_decay) * param - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)
    """
    constants = Constants(betas, eps, weight_decay)
    added = constants.step(step, lr)
    found = kernels()
    if found is None:
        flat = [tensor.view(-1).split(BLOCK) for tensor in (param, grad, exp_avg, exp_avg_sq)]
        for p, g, m, v in zip(*flat, strict=True):
            _twin(p, g, m, v, constants, added)
        return
    shared, values, grad = constants.packed(), torch.tensor(added), grad.contiguous()
    found.library.lantrain_adamw(
        param.data_ptr(), grad.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), is_bf16(exp_avg),
        param.numel(), shared.data_ptr(), values.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


def _twin(p: Tensor, g: Tensor | None, m: Tensor, v: Tensor, constants: Constants, added: tuple[float, ...]) -> None:
    """The step in PyTorch, on blocks of one shape; without a gradient it is zero."""
    b1, rest1, b2, rest2, eps = (float(value) for value in constants.packed())  # rounded to float32
    decay, size, correction = (float(value) for value in torch.tensor(added))
    first, second = m.float() * b1, v.float() * b2
    if g is not None:
        first.add_(g * rest1)
        second.add_((g * g).mul_(rest2))
    for moment, whole in ((m, first), (v, second)):
        whole.masked_fill_(whole.abs() < DUST, 0.0)
        moment.copy_(whole)
    root = torch.from_numpy(np.sqrt(second.numpy()))  # torch's own, of MKL, is not always the nearest
    p.mul_(decay).sub_(first.mul_(size).div_(root.mul_(correction).add_(eps)))


@torch.no_grad()
def advance_rows(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rows: Tensor | slice,
    grads: Tensor | None,
    behind: Tensor,
    steps: list[tuple[float, float, float]],
    constants: Constants,
) -> None:
    """Take the steps that rows of a table lack: bit for bit what `adamw_update` on the whole table does in each.

    param, exp_avg, exp_avg_sq: (V, C) contiguous, as for `adamw_update`. rows: distinct ids (U,) int64, or a range of
    rows. grads: (U, C), the gradients of the last step, or None for none; in the other steps they are zero. behind:
    (V,) int32, how many of the last `steps` each row lacks; the caller sets it to zero. steps: of `Constants.step`, in
    their order.
    """
    found = kernels()
    if found is None:
        lacking = behind[rows]
        for missing in range(int(lacking.max()) if lacking.numel() else 0, 0, -1):
            _twin_of_rows(param, exp_avg, exp_avg_sq, rows, grads if missing == 1 else None, behind, missing,
                          steps[-missing], constants)  # fmt: skip
        return
    start = (rows.start or 0) if isinstance(rows, slice) else 0
    count = rows.stop - start if isinstance(rows, slice) else rows.numel()
    tables = [tensor[start:].data_ptr() for tensor in (param, exp_avg, exp_avg_sq)]
    shared, values = constants.packed(), torch.tensor(steps)
    found.library.lantrain_adamw_rows(
        *tables, is_bf16(exp_avg), None if grads is None else grads.data_ptr(),
        None if isinstance(rows, slice) else rows.data_ptr(), count, param.shape[1], behind[start:].data_ptr(),
        shared.data_ptr(), values.data_ptr(), len(steps), torch.get_num_threads(),
    )  # fmt: skip


def _twin_of_rows(
    param: Tensor, m: Tensor, v: Tensor, rows: Tensor | slice, grads: Tensor | None, behind: Tensor, missing: int,
    added: tuple[float, float, float], constants: Constants,
) -> None:  # fmt: skip
    """One step on those of `rows` that lack it."""
    ids = torch.arange(param.shape[0])[rows] if isinstance(rows, slice) else rows
    lack = behind[ids] >= missing
    ids = ids[lack]
    count = max(1, BLOCK // param.shape[1])
    blocks = ids.split(count)
    gradients = [None] * len(blocks) if grads is None else grads[lack].split(count)
    for some, g in zip(blocks, gradients, strict=True):
        part = [tensor[some] for tensor in (param, m, v)]
        _twin(part[0], g, part[1], part[2], constants, added)
        for tensor, new in zip((param, m, v), part, strict=True):
            tensor[some] = new
