"""Output head, softcap and cross-entropy in one, with the gradients computed on the way forward.

The logits of one micro-batch are the largest tensor of the model (1024 x 32768 floats, 134 MB), and eager autograd
would keep half a dozen of them. Here there is one, kept from micro-batch to micro-batch (fresh memory costs a page
fault for every 4 KiB): the gradients overwrite the logits, while the matmuls stay whole (small ones were 10 to 40%
slower). The C++ operation passes over the buffer once; its twin in PyTorch works in chunks of rows that fit the cache.

On CPUs that multiply bfloat16 even the logits are never there: one C++ operation makes them tile by tile, in float32,
and keeps exp(softcapped z) times the slope of the softcap. What that lacks of the gradient is one factor a token, the
denominator of the softmax, which multiplies the rows of the hidden states instead. The loss of a token is then exact to
1e-6, where rounded logits make it wrong by up to 7e-3 (docs/log.md), and an evaluation needs no buffer.

The softcap 15 tanh(z / 15) is written with s = sigmoid(2 z / 15): tanh = 2 s - 1, so that
  softmax(15 tanh) = softmax(30 s)   (a constant shift cancels),
  d(15 tanh)/dz = 1 - tanh^2 = 4 s (1 - s),
because torch's sigmoid costs a fifth of its tanh. The softcap bounds the logits to +-15, so every probability is at
least e^-30 / V and -log(p) never needs a running maximum or a guard against zero.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lantrain.model.embedding import GradientSink
from lantrain.model.kernels import Kernels, fits, is_bf16, kernels

SOFTCAP = 15.0
IGNORE = -1
UNIT = 32  # whole tiles of the C++ operation that makes the logits
# Elements of a chunk: 2 MiB of float32, and as much again for the probabilities, over all cores' L2 caches.
CHUNK_ELEMENTS = 1 << 19


def softcap_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    softcap: float = SOFTCAP,
    scale: float = 1.0,
    weight_cast: Tensor | None = None,
    gradient_sink: GradientSink | None = None,
) -> Tensor:
    """Sum over tokens of the cross-entropy of softcapped logits, times `scale`.

    hidden (N, C) float32, bfloat16 or float64; weight (V_padded, C), cast to hidden's dtype for the matmuls unless
    `weight_cast` is that already; targets (N,) int64, -1 to ignore. Columns from `vocab_size` on are padding: they take
    no part. Returns a scalar in float32 (float64 for float64). Without gradients enabled no gradient work is done.

    With `gradient_sink` the backward pass gives the weight's gradient there, as a product, and none to autograd: the
    largest of all gradients then exists once. That product reads the logits, so the backward pass has to come before
    the next loss of any kind; otherwise it raises RuntimeError.
    """
    if not torch.is_grad_enabled():
        return token_losses(hidden, weight, targets, vocab_size=vocab_size, softcap=softcap).sum() * scale
    narrow = weight.detach().to(hidden.dtype) if weight_cast is None else weight_cast
    return cast(
        Tensor, _SoftcapCrossEntropy.apply(hidden, weight, narrow, targets, vocab_size, softcap, scale, gradient_sink)
    )


@torch.no_grad()
def token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, softcap: float = SOFTCAP
) -> Tensor:
    """Cross-entropy of each token (N,), zero where ignored, for evaluation: no graph. Shapes as above."""
    narrow = weight.to(hidden.dtype)
    if (found := _head_operation(hidden, narrow, vocab_size)) is not None:
        return _head_losses(found, hidden, narrow[:vocab_size], targets, softcap, None)[0]
    return _losses(_logits(hidden, narrow, vocab_size), targets, softcap, 1.0, want_grad=False)


def softcap_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    softcap: float = SOFTCAP,
    scale: float = 1.0,
) -> Tensor:
    """The same value by the textbook, all logits at once and gradients by autograd: the twin for tests."""
    logits = F.linear(hidden, weight.to(hidden.dtype))[:, :vocab_size]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum") * scale


def _logits(hidden: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """(N, V) in memory that the next call uses again."""
    out = _buffer(hidden.size(0) * vocab_size, hidden.dtype).view(hidden.size(0), vocab_size)
    return torch.mm(hidden, weight[:vocab_size].t(), out=out)


_memory: dict[torch.dtype, Tensor] = {}
_uses = 0


def _buffer(count: int, dtype: torch.dtype) -> Tensor:
    """`count` elements of one lasting buffer a dtype, uninitialised."""
    global _uses
    _uses += 1
    if dtype not in _memory or _memory[dtype].numel() < count:
        _memory.pop(dtype, None)
        _memory[dtype] = torch.empty(count, dtype=dtype)
    return _memory[dtype][:count]


def _losses(logits: Tensor, targets: Tensor, softcap: float, scale: float, *, want_grad: bool) -> Tensor:
    """Losses (N,) of logits (N, V), which are overwritten: with `want_grad` by scale * dloss/dlogits."""
    found = kernels()
    if found is None or not fits(logits):
        return _losses_twin(logits, targets, softcap, scale, want_grad=want_grad)
    tokens, vocab = logits.shape
    targets = _checked(targets, vocab)
    losses = torch.empty(tokens, dtype=torch.float32)
    found.library.lantrain_softcap_loss(
        logits.data_ptr(), is_bf16(logits), tokens, vocab, targets.data_ptr(),
        softcap, scale, want_grad, losses.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return losses


def _checked(targets: Tensor, vocab: int) -> Tensor:
    """Targets as the C++ operations read them, which do not look whether a token exists."""
    if targets.numel() and not (int(targets.min()) >= IGNORE and int(targets.max()) < vocab):
        raise IndexError(f"a target is not among the {vocab} tokens")
    return targets.contiguous()


def _head_operation(hidden: Tensor, narrow: Tensor, vocab_size: int) -> Kernels | None:
    """The library whose operation makes losses of hidden (N, C) and narrow (V, C) in one, if it takes these."""
    found = kernels()
    whole = all(size % UNIT == 0 for size in (*hidden.shape, vocab_size))
    usable = whole and hidden.dtype == narrow.dtype == torch.bfloat16 and hidden.numel() > 0
    if found is None or not found.narrow or not usable or not (hidden.is_contiguous() and narrow.is_contiguous()):
        return None
    return found


def _head_losses(
    found: Kernels, hidden: Tensor, narrow: Tensor, targets: Tensor, softcap: float, products: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Losses (N,) and factors (N, 1), both float32, of hidden (N, C) and narrow (V, C).

    With `products` (N, V) these are filled so that factors * products are dloss/dlogits.
    """
    tokens, vocab = len(hidden), len(narrow)
    targets = _checked(targets, vocab)
    losses, factors = torch.empty(tokens), torch.empty(tokens, 1)
    found.library.lantrain_head_loss(
        hidden.data_ptr(), narrow.data_ptr(), tokens, hidden.size(1), vocab, targets.data_ptr(), softcap,
        products.data_ptr() if products is not None else None, losses.data_ptr(), factors.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return losses, factors


def _losses_twin(logits: Tensor, targets: Tensor, softcap: float, scale: float, *, want_grad: bool) -> Tensor:
    """The same by PyTorch's operators. (p - onehot) * s * (1 - s) is a quarter of dloss/dz."""
    tokens, vocab = logits.shape
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    losses = torch.empty(tokens, dtype=wide)
    rows = max(1, min(tokens, CHUNK_ELEMENTS // vocab))
    probabilities = torch.empty(rows, vocab, dtype=wide)
    converted = None if logits.dtype == wide else torch.empty(rows, vocab, dtype=wide)
    for start in range(0, tokens, rows):
        chunk, target = logits[start : start + rows], targets[start : start + rows]
        s = chunk if converted is None else converted[: len(chunk)].copy_(chunk)
        p = probabilities[: len(chunk)]
        s.mul_(2 / softcap).sigmoid_()
        torch.mul(s, 2 * softcap, out=p)
        torch.softmax(p, -1, out=p)
        seen = target != IGNORE
        column = target.clamp_min(0)[:, None]
        losses[start : start + rows] = p.gather(1, column)[:, 0].log_().neg_() * seen
        if not want_grad:
            continue
        p.scatter_add_(1, column, torch.full_like(column, -1, dtype=wide))
        if not seen.all():
            p[~seen] = 0
        p.mul_(4 * scale)
        torch.addcmul(s, s, s, value=-1, out=s)
        torch.mul(s, p, out=chunk if converted is None else s)
        if converted is not None:
            chunk.copy_(s)
    return losses


class _SoftcapCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        narrow: Tensor,
        targets: Tensor,
        vocab_size: int,
        softcap: float,
        scale: float,
        gradient_sink: GradientSink | None,
    ) -> Tensor:
        narrow_head = narrow[:vocab_size]
        if (found := _head_operation(hidden, narrow, vocab_size)) is not None:
            buffer = _buffer(len(hidden) * vocab_size, hidden.dtype).view(-1, vocab_size)
            losses, factors = _head_losses(found, hidden, narrow_head, targets, softcap, buffer)
            factors *= scale
            grad_hidden = torch.mm(buffer, narrow_head).mul_(factors)
            hidden = (hidden * factors).to(hidden.dtype)
        else:
            buffer = _logits(hidden, narrow, vocab_size)
            losses = _losses(buffer, targets, softcap, scale, want_grad=True)
            grad_hidden = torch.mm(buffer, narrow_head)
        loss = losses.sum() * scale
        # The gradient of the weight is the product of the buffer and these, which may have their tokens' factors.
        ctx.sink = gradient_sink
        if gradient_sink is not None:
            ctx.save_for_backward(grad_hidden, hidden)
            ctx.logits, ctx.use = buffer, _uses
            return loss
        grad_weight = torch.empty_like(weight)
        grad_weight[vocab_size:] = 0
        if weight.dtype == hidden.dtype:
            torch.mm(buffer.t(), hidden, out=grad_weight[:vocab_size])
        else:
            grad_weight[:vocab_size] = torch.mm(buffer.t(), hidden)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad.item()
        if ctx.sink is not None:
            grad_hidden, hidden = ctx.saved_tensors
            if ctx.use != _uses:
                raise RuntimeError("another loss was computed before this one's backward pass, in the same memory")
            if factor != 1.0:
                grad_hidden, hidden = grad_hidden * factor, hidden * factor
            ctx.sink(ctx.logits, hidden)
            return grad_hidden, *[None] * 7
        grad_hidden, grad_weight = ctx.saved_tensors
        if factor != 1.0:  # backward() straight from the loss: no pass over the 67 MB of the head's gradient
            grad_hidden, grad_weight = grad_hidden * factor, grad_weight * factor
        return grad_hidden, grad_weight, *[None] * 6
