"""Muon for the matrices of the blocks: momentum, orthogonalisation by Polar Express, per-neuron variance reduction.

Sources, as nanochat combines them: Muon (kellerjordan.github.io/posts/muon), Polar Express (arXiv 2505.16932), row
equilibration (MuonEq, arXiv 2603.28254), renormalisation (Muon+, arXiv 2602.21545), NorMuon (arXiv 2510.05491) and
cautious weight decay.

Matrices are updated one by one. Batched matmuls were no faster on CPUs (measured, depth 4 and 8), hold every temporary
K times, and would let the bits of a matrix depend on which others its owner has.

With bfloat16 products, on a CPU that has them, a matrix's whole step is one C++ operation (model/kernels/muon.cpp): A
and its polynomial are symmetric, so that it computes a quarter less than torch's matmuls, and it passes twice over the
float32 tensors.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lantrain.model.kernels import kernels

# Polar Express, five steps, safety factor 2e-2, cushion 2: x <- a x + b x^3 + c x^5 on the singular values.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
UNIT = 32  # the C++ step takes matrices of whole tiles
GRAM_ASPECT = 2  # sides at least this far apart: iterate on the small Gram matrix
SYMMETRIC_ROWS = 512
"""From so many rows on a symmetric product is cut into stripes; smaller ones lose more by short matmuls."""
STRIPES = 4
"""5/8 of a whole product's work: 0.77 of its time with one thread for 512 rows, 0.85 with two; 8 were no faster."""


def second_moment_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of the factored second moment of an (m, n) matrix: one entry along its longer side."""
    rows, columns = shape
    return (rows, 1) if rows >= columns else (1, columns)


@torch.no_grad()
def muon_update(
    params: Tensor,
    grads: Tensor,
    momentum_buffer: Tensor,
    second_moment: Tensor,
    *,
    lr: float,
    momentum: float,
    beta2: float = 0.9,
    weight_decay: float,
    dtype: torch.dtype = torch.float32,
) -> None:
    """One step for K matrices of one shape, in place; `grads` is used as work space and holds garbage afterwards.

    params, grads, momentum_buffer (K, m, n) float32; second_moment (K, m, 1) or (K, 1, n), see `second_moment_shape`.
    lr is multiplied by sqrt(max(1, m / n)) here. dtype: of the orthogonalisation's matmuls (float32 or bfloat16).
    """
    rows, columns = params.shape[-2:]
    rate = lr * max(1.0, rows / columns) ** 0.5
    found = kernels()
    for param, grad, average, variance in zip(params, grads, momentum_buffer, second_moment, strict=True):
        if found is not None and found.narrow and _fits(dtype, param, grad, average, variance):
            settings = torch.tensor([momentum, beta2, rate, weight_decay])
            found.library.lantrain_muon_update(
                param.data_ptr(), grad.data_ptr(), average.data_ptr(), variance.data_ptr(), rows, columns,
                settings.data_ptr(), _coefficients().data_ptr(), len(POLAR_EXPRESS), torch.get_num_threads(),
            )  # fmt: skip
            continue
        average.lerp_(grad, 1 - momentum)
        update = polar_express(_equilibrate(grad.lerp_(average, momentum).to(dtype))).to(param.dtype)
        update.mul_(min(rows, columns) ** 0.5 / update.norm().clamp_min(1e-6))
        _reduce_variance(update, variance, beta2)
        agrees = (update * param).ge_(0)  # cautious: decay only where it does not work against the update
        param.sub_(update.addcmul_(param, agrees, value=weight_decay), alpha=rate)


def _fits(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether the C++ step takes these: bfloat16 products of a matrix of whole tiles, contiguous float32."""
    whole = all(size % UNIT == 0 for size in tensors[0].shape)
    return dtype == torch.bfloat16 and whole and all(z.dtype == torch.float32 and z.is_contiguous() for z in tensors)


@cache
def _coefficients() -> Tensor:
    return torch.tensor(POLAR_EXPRESS)


def polar_express(x: Tensor) -> Tensor:
    """About the nearest semi-orthogonal matrix to x (m, n): all singular values are taken close to 1."""
    x = x / (x.norm() * 1.01 + 1e-6)
    wide = x if x.size(0) <= x.size(1) else x.t()
    if wide.size(1) >= GRAM_ASPECT * wide.size(0) and x.dtype != torch.bfloat16:
        wide = _iterate_gram(wide)
    else:
        wide = _iterate(wide)
    return wide if x.size(0) <= x.size(1) else wide.t()


def _iterate(x: Tensor) -> Tensor:
    """The iteration as published: three matmuls a step, two of them symmetric."""
    for a, b, c in POLAR_EXPRESS:
        gram = _symmetric_product(x, x.t())
        polynomial = _symmetric_product(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x


def _iterate_gram(x: Tensor) -> Tensor:
    """The same on the m x m Gram matrix, applied to x once at the end.

    Every factor is a polynomial in x x^T, so they commute, and their products are symmetric: with
    P = a I + b A + c A^2 the next Gram matrix is P A P. For (512, 2048) it takes 1.8 times less work, and in float32 it
    is no less exact (2.6e-6 against 2.8e-6 relative to float64). In bfloat16 it is not usable (errors of 0.2 and more).
    """
    gram = _symmetric_product(x, x.t())
    product: Tensor | None = None
    for step, (a, b, c) in enumerate(POLAR_EXPRESS):
        polynomial = _symmetric_product(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal().add_(a)
        product = polynomial if product is None else _symmetric_product(polynomial, product)
        if step < len(POLAR_EXPRESS) - 1:
            gram = _symmetric_product(_symmetric_product(polynomial, gram), polynomial)
    assert product is not None
    return product @ x


def _symmetric_product(
    left: Tensor, right: Tensor, plus: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """alpha left right + beta plus for left (m, k), right (k, m), plus (m, m), where the result is symmetric.

    Of large ones only stripes of the lower triangle are computed, and mirrored.
    """
    rows = left.size(0)
    if rows < SYMMETRIC_ROWS or left.dtype == torch.bfloat16:
        return left @ right if plus is None else torch.addmm(plus, left, right, beta=beta, alpha=alpha)
    out = left.new_empty(rows, rows)
    stripe = -(-rows // STRIPES)
    for start in range(0, rows, stripe):
        stop = min(start + stripe, rows)
        if plus is None:
            torch.mm(left[start:stop], right[:, :stop], out=out[start:stop, :stop])
        else:
            torch.addmm(
                plus[start:stop, :stop], left[start:stop], right[:, :stop], beta=beta, alpha=alpha,
                out=out[start:stop, :stop],
            )  # fmt: skip
        out[:start, start:stop].copy_(out[start:stop, :start].t())
    return out


def _equilibrate(x: Tensor) -> Tensor:
    """Scale every row to the mean row norm, which conditions the spectrum."""
    wide = x.float() if x.dtype == torch.bfloat16 else x
    target = wide.norm() / x.size(0) ** 0.5
    return x * (target / wide.norm(dim=1, keepdim=True).clamp_min(1e-6)).to(x.dtype)


def _reduce_variance(update: Tensor, second_moment: Tensor, beta2: float) -> None:
    """Divide rows (or columns) by their running RMS and keep the Frobenius norm; in place."""
    axis = 1 if second_moment.size(1) == 1 else 0
    count = update.size(axis)
    mean_square = torch.linalg.vector_norm(update, dim=axis, keepdim=True).square_().div_(count)
    second_moment.lerp_(mean_square, 1 - beta2)
    step = second_moment.clamp_min(1e-10).rsqrt_()
    norm = mean_square.sum().mul_(count).sqrt_()
    new_norm = (mean_square * step.square()).sum().mul_(count).sqrt_()
    update.mul_(step.mul_(norm / new_norm.clamp_min(1e-10)))
