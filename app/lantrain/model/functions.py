"""Autograd functions of the trunk that keep fewer tensors, and pass over them less often, than plain eager autograd.

They save what the neighbouring matmul or attention keeps alive anyway (the rotated query, one hidden tensor of the
MLP) instead of every intermediate. First derivatives only.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lantrain.model.kernels import Kernels, fits, integers, is_bf16, kernels

# F.rms_norm's default epsilon when the activation is float32 or bfloat16: both are computed in float32.
EPS = torch.finfo(torch.float32).eps
QK_SCALE = 1.2  # queries and keys are each multiplied by this after their norm (sharper attention)


def _upcast(x: Tensor) -> Tensor:
    """bfloat16 is computed in float32, as the operators of torch do; float32 and float64 stay as they are."""
    return x.float() if x.dtype == torch.bfloat16 else x


def _kernels_of_rows(x: Tensor) -> Kernels | None:
    """The C++ operations on rows, where they may be used: bfloat16 only, because float32 must round as torch does."""
    usable = x.dtype == torch.bfloat16 and x.is_contiguous() and x.size(-1) % 16 == 0 and x.numel() > 0
    return kernels() if usable else None


def _inverse_rms(x: Tensor) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, kept as size 1."""
    return x.square().mean(-1, keepdim=True).add_(EPS).rsqrt_()


class _RMSNorm(Function):
    """Rounds as torch's rms_norm does, forward and backward.

    In a fresh model the gradients of backout_lambda and x0_lambdas are zero but for rounding (the norm cancels the
    scale of its input), of the order of AdamW's epsilon, 1e-10, so that the rounding decides their first steps. A
    different but equally exact formula left nanochat's losses by 2e-2 within 20 steps; this one stays within 1e-3.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kernels = found = _kernels_of_rows(x)
        if found is not None:
            out, inverse = torch.empty_like(x), torch.empty(*x.shape[:-1], 1)
            found.library.lantrain_rms_norm(
                x.data_ptr(), inverse.numel(), x.size(-1), EPS, out.data_ptr(), inverse.data_ptr(),
                torch.get_num_threads(),
            )  # fmt: skip
            ctx.save_for_backward(x, inverse)
            return out
        wide = _upcast(x)
        inverse = _inverse_rms(wide)
        ctx.save_for_backward(x, inverse)
        return (wide * inverse).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, inverse = ctx.saved_tensors
        if ctx.kernels is not None:
            grad = grad.contiguous()
            grad_x = torch.empty_like(grad)
            ctx.kernels.library.lantrain_rms_norm_backward(
                grad.data_ptr(), x.data_ptr(), inverse.data_ptr(), inverse.numel(), x.size(-1), grad_x.data_ptr(),
                torch.get_num_threads(),
            )  # fmt: skip
            return grad_x
        wide_x, wide_grad = _upcast(x), _upcast(grad)
        along = (wide_grad * wide_x).sum(-1, keepdim=True)
        along.mul_(inverse.pow(3).mul_(-0.5)).div_(x.size(-1)).mul_(2)
        return (wide_grad * inverse).add_(wide_x * along).to(grad.dtype)


class _RotaryNorm(Function):
    """Rotate the halves of each head by its position, RMS-normalise, multiply by QK_SCALE.

    A rotation keeps the norm, so the norm is taken first and folded into one multiplication.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.kernels = found = kernels() if _rotary_fits(x, cos, sin) else None
        if found is not None:
            out, scale = torch.empty_like(x), torch.empty(*x.shape[:-1], 1)
            found.library.lantrain_rotary_norm(
                x.data_ptr(), cos.data_ptr(), sin.data_ptr(), _rotary_shape(x), is_bf16(x), EPS, QK_SCALE,
                out.data_ptr(), scale.data_ptr(), torch.get_num_threads(),
            )  # fmt: skip
            ctx.save_for_backward(out, scale, cos, sin)
            return out
        wide = _upcast(x)
        scale = _inverse_rms(wide).mul_(QK_SCALE)
        out = _rotate(wide * scale, cos, sin).to(x.dtype)
        ctx.save_for_backward(out, scale, cos, sin)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out, scale, cos, sin = ctx.saved_tensors
        if ctx.kernels is not None and fits(grad, out):
            grad = grad.contiguous()
            grad_x = torch.empty_like(grad)
            ctx.kernels.library.lantrain_rotary_norm_backward(
                grad.data_ptr(), out.data_ptr(), scale.data_ptr(), cos.data_ptr(), sin.data_ptr(), _rotary_shape(grad),
                is_bf16(grad), QK_SCALE, grad_x.data_ptr(), torch.get_num_threads(),
            )  # fmt: skip
            return grad_x, None, None
        wide_out, wide_grad = _upcast(out), _upcast(grad)
        projection = (wide_grad * wide_out).mean(-1, keepdim=True).div_(QK_SCALE**2)
        inner = torch.addcmul(wide_grad, wide_out, projection, value=-1).mul_(scale)
        return _rotate(inner, cos, -sin).to(grad.dtype), None, None


def _rotary_fits(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """The operation takes whole tensors one after the other, and heads of whole vectors on either half."""
    return fits(x, cos, sin) and x.size(-1) % 64 == 0 and all(z.is_contiguous() for z in (x, cos, sin))


def _rotary_shape(x: Tensor) -> Any:
    batch, length, heads, width = x.shape
    return integers([batch * length, heads, length, width])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, T, H, D) by (1, T, 1, D/2) tables: y1 = x1 cos + x2 sin, y2 = x2 cos - x1 sin."""
    half = x.size(-1) // 2
    x1, x2 = x[..., :half], x[..., half:]
    out = torch.empty_like(x)
    torch.mul(x1, cos, out=out[..., :half]).addcmul_(x2, sin)
    torch.mul(x2, cos, out=out[..., half:]).addcmul_(x1, sin, value=-1)
    return out


class _Linear(Function):
    """x W^T with a copy of W in x's dtype that is at hand; the gradient of W gets the dtype of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, narrow: Tensor) -> Tensor:
        ctx.save_for_backward(x, narrow)
        ctx.weight_dtype = weight.dtype
        return torch.mm(x, narrow.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, narrow = ctx.saved_tensors
        return torch.mm(grad, narrow), torch.mm(grad.t(), x).to(ctx.weight_dtype), None


class _SquaredReluMLP(Function):
    """relu(x W1^T)^2 W2^T that keeps one hidden tensor: the square is recomputed (one pass) for the gradient of W2."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_in: Tensor, weight_out: Tensor, narrow_in: Tensor, narrow_out: Tensor
    ) -> Tensor:
        hidden, squared = _squared_relu(torch.mm(x, narrow_in.t()))
        ctx.save_for_backward(x, hidden, narrow_in, narrow_out)
        ctx.weight_dtype = weight_in.dtype
        return torch.mm(squared, narrow_out.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, narrow_in, narrow_out = ctx.saved_tensors
        grad_out = torch.mm(grad.t(), hidden.square()).to(ctx.weight_dtype)
        inner = _squared_relu_backward(torch.mm(grad, narrow_out), hidden)
        grad_in = torch.mm(inner.t(), x).to(ctx.weight_dtype)
        return torch.mm(inner, narrow_in), grad_in, grad_out, None, None


def _squared_relu(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """relu(hidden), in place, and its square."""
    found = kernels()
    if found is None or not (fits(hidden) and hidden.is_contiguous()):
        return hidden.relu_(), hidden.square()
    squared = torch.empty_like(hidden)
    found.library.lantrain_squared_relu(
        hidden.data_ptr(), squared.data_ptr(), hidden.numel(), is_bf16(hidden), torch.get_num_threads()
    )
    return hidden, squared


def _squared_relu_backward(grad: Tensor, hidden: Tensor) -> Tensor:
    """2 * grad * hidden, in place of grad."""
    found = kernels()
    if found is None or not (fits(grad, hidden) and grad.is_contiguous() and hidden.is_contiguous()):
        return grad.mul_(2).mul_(hidden)
    found.library.lantrain_squared_relu_backward(
        grad.data_ptr(), hidden.data_ptr(), grad.numel(), is_bf16(grad), torch.get_num_threads()
    )
    return grad


class _ResidualMix(Function):
    """a * x + b * x0 with scalar parameters a and b; both products are rounded before they are added.

    One multiply-add less would be faster but round differently, see _RMSNorm.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, x0: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, x0, a, b)
        return torch.mul(x, a.item()).add_(x0 * b.item())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, x0, a, b = ctx.saved_tensors
        found = _kernels_of_rows(grad)
        if found is not None and fits(grad, x, x0) and x.is_contiguous() and x0.is_contiguous():
            grad_x, grad_x0, dots = torch.empty_like(grad), torch.empty_like(grad), torch.empty(2, len(grad))
            found.library.lantrain_residual_mix_backward(
                grad.data_ptr(), x.data_ptr(), x0.data_ptr(), len(grad), grad.numel() // len(grad), a.item(), b.item(),
                grad_x.data_ptr(), grad_x0.data_ptr(), dots.data_ptr(), torch.get_num_threads(),
            )  # fmt: skip
            sums = dots.sum(1)
            return grad_x, grad_x0, sums[0].to(a.dtype), sums[1].to(b.dtype)
        return grad * a.item(), grad * b.item(), _dot(grad, x).to(a.dtype), _dot(grad, x0).to(b.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a * b in float32 or wider."""
    return (_upcast(a) * _upcast(b)).sum()


class _Smear(Function):
    """x[:, t] + gate[:, t] * x[:, t - 1] for t >= 1; gate is (B, T - 1, 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        out = x.clone()
        out[:, 1:].addcmul_(gate, x[:, :-1])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        grad_x = grad.clone()
        grad_x[:, :-1].addcmul_(gate, grad[:, 1:])
        grad_gate = (_upcast(grad[:, 1:]) * _upcast(x[:, :-1])).sum(-1, keepdim=True)
        return grad_x, grad_gate.to(gate.dtype)


def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm over the last axis without a learned gain; any shape, float32 inside."""
    return cast(Tensor, _RMSNorm.apply(x))


def rotary_norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position, then RMSNorm, then times 1.2, of queries or keys (B, T, H, D); tables (1, T, 1, D/2)."""
    return cast(Tensor, _RotaryNorm.apply(x, cos, sin))


def linear(x: Tensor, weight: Tensor, narrow: Tensor) -> Tensor:
    """x W^T for x (N, C) and weight (K, C), read through `narrow`, which is `weight` in the dtype of x."""
    return cast(Tensor, _Linear.apply(x, weight, narrow))


def squared_relu_mlp(
    x: Tensor, weight_in: Tensor, weight_out: Tensor, narrow: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """relu(x W_in^T)^2 W_out^T for x (N, C), W_in (4C, C), W_out (C, 4C); narrow: both in x's dtype, if at hand."""
    copies = narrow or (weight_in.detach().to(x.dtype), weight_out.detach().to(x.dtype))
    return cast(Tensor, _SquaredReluMLP.apply(x, weight_in, weight_out, *copies))


def residual_mix(x: Tensor, x0: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a * x + b * x0 for tensors of one shape and 0-dim parameters a, b."""
    return cast(Tensor, _ResidualMix.apply(x, x0, a, b))


def smear(x: Tensor, gate: Tensor) -> Tensor:
    """Mix the previous position into each: x (B, T, C), gate (B, T - 1, 1) for positions 1 and later."""
    return cast(Tensor, _Smear.apply(x, gate))
