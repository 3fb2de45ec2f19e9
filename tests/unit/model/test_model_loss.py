import pytest
import torch
from torch.autograd import gradcheck

from lantrain.model import loss as loss_module
from lantrain.model.loss import softcap_cross_entropy, softcap_cross_entropy_reference, token_losses


def problem(tokens=37, width=24, vocab=301, padded=320, dtype=torch.float32, size=1.0, ignored=5):
    random = torch.Generator().manual_seed(tokens + vocab)
    hidden = torch.randn(tokens, width, generator=random).to(dtype).requires_grad_()
    weight = (torch.randn(padded, width, generator=random) * size).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=random)
    targets[:ignored] = -1
    return hidden, weight, targets


def compare(hidden, weight, targets, vocab, *, scale, tolerance):
    """Value and gradients against the double-precision twin, as relative L2 errors."""
    exact = [z.detach().double().requires_grad_() for z in (hidden, weight)]
    expected = softcap_cross_entropy_reference(*exact, targets, vocab_size=vocab, scale=scale)
    expected.backward()
    loss = softcap_cross_entropy(hidden, weight, targets, vocab_size=vocab, scale=scale)
    loss.backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) <= tolerance * abs(expected.item())
    for z, twin in zip((hidden, weight), exact, strict=True):
        assert z.grad.dtype == z.dtype
        assert (z.grad.double() - twin.grad).norm() <= tolerance * twin.grad.norm()


@pytest.mark.parametrize(
    "shape", [(37, 24, 301, 320), (1, 3, 1, 64), (64, 16, 128, 128), (5, 7, 65, 128), (3, 2, 2, 2)]
)
@pytest.mark.parametrize("scale", [1.0, 1 / 4096])
def test_float32_equals_the_double_twin(shape, scale):
    compare(*problem(*shape, ignored=0), shape[2], scale=scale, tolerance=3e-6)


@pytest.mark.parametrize("size", [1e-4, 10.0])
def test_tiny_and_saturated_logits(size):
    """From a fresh head (all logits near zero) to logits far beyond the softcap."""
    compare(*problem(size=size), 301, scale=1.0, tolerance=2e-5)


def test_bfloat16():
    compare(*problem(tokens=200, dtype=torch.bfloat16), 301, scale=0.01, tolerance=0.01)


def test_rows_over_many_chunks(monkeypatch):
    hidden, weight, targets = problem(tokens=101)
    whole = softcap_cross_entropy(hidden, weight, targets, vocab_size=301)
    whole.backward()
    kept = [z.grad.clone() for z in (hidden, weight)]
    hidden.grad = weight.grad = None
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 7 * 301 + 1)
    chunked = softcap_cross_entropy(hidden, weight, targets, vocab_size=301)
    chunked.backward()
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close([hidden.grad, weight.grad], kept)


def test_gradients_by_finite_differences():
    hidden, weight, targets = problem(tokens=4, width=3, vocab=5, padded=8, ignored=1)
    double = [z.detach().double().requires_grad_() for z in (hidden, weight)]
    assert gradcheck(lambda h, w: softcap_cross_entropy(h, w, targets, vocab_size=5, scale=0.7), double)
    assert gradcheck(lambda h, w: softcap_cross_entropy(h, w, targets, vocab_size=5).square(), double)


def test_all_targets_ignored():
    hidden, weight, targets = problem(ignored=37)
    loss = softcap_cross_entropy(hidden, weight, targets, vocab_size=301)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_no_tokens():
    hidden, weight, targets = problem(tokens=0, ignored=0)
    loss = softcap_cross_entropy(hidden, weight, targets, vocab_size=301)
    loss.backward()
    assert loss.item() == 0
    assert weight.grad.abs().max() == 0


def test_padding_gets_no_probability_and_no_gradient():
    hidden, weight, targets = problem()
    with torch.no_grad():
        weight[301:] = 1e4
    compare(hidden, weight, targets, 301, scale=1.0, tolerance=3e-6)
    assert (weight.grad[301:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_gives_the_same_losses_without_a_graph(dtype):
    hidden, weight, targets = problem(dtype=dtype)
    each = token_losses(hidden, weight, targets, vocab_size=301)
    assert not each.requires_grad
    assert (each[:5] == 0).all()
    assert (each[5:] > 0).all()
    total = softcap_cross_entropy(hidden, weight, targets, vocab_size=301)
    torch.testing.assert_close(each.sum(), total.detach())
    with torch.no_grad():
        assert not softcap_cross_entropy(hidden, weight, targets, vocab_size=301).requires_grad
