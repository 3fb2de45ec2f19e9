import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from lantrain.model.functions import residual_mix, rms_norm, rotary_norm, smear, squared_relu_mlp
from tests.unit.model.reference import norm, rotate


def random(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def leaf(*shape):
    return random(*shape).requires_grad_()


def tables(length, half):
    angles = torch.arange(length)[None, :, None, None] * 100000.0 ** (-torch.arange(half).double() / half)
    return angles.cos(), angles.sin()


def test_gradients_by_finite_differences():
    assert gradcheck(rms_norm, (leaf(5, 8),))
    cos, sin = tables(4, 3)
    assert gradcheck(lambda x: rotary_norm(x, cos, sin), (leaf(2, 4, 3, 6),))
    assert gradcheck(squared_relu_mlp, (leaf(5, 4), leaf(16, 4), leaf(4, 16)))
    assert gradcheck(residual_mix, (leaf(5, 4), leaf(4, 5).t(), leaf(1)[0], leaf(1)[0]))
    assert gradcheck(smear, (leaf(2, 5, 3), leaf(2, 4, 1)))
    assert gradcheck(smear, (leaf(2, 1, 3), leaf(2, 0, 1)))


def test_values_in_double():
    x, x0 = random(7, 12), random(12, 7).t()
    torch.testing.assert_close(rms_norm(x), norm(x))
    w_in, w_out = random(48, 12), random(12, 48)
    torch.testing.assert_close(squared_relu_mlp(x, w_in, w_out), F.linear(F.linear(x, w_in).relu().square(), w_out))
    a, b = torch.tensor(1.1, dtype=torch.float64), torch.tensor(-0.3, dtype=torch.float64)
    torch.testing.assert_close(residual_mix(x, x0, a, b), 1.1 * x - 0.3 * x0)
    q = random(2, 9, 3, 8)
    torch.testing.assert_close(rotary_norm(q, *tables(9, 4)), 1.2 * norm(rotate(q, torch.arange(9))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_torchs_in_the_models_dtypes(dtype):
    x = (random(64, 128) * 3).to(dtype)
    torch.testing.assert_close(rms_norm(x), F.rms_norm(x, (128,)))
    tiny = (random(4, 128) * 1e-5).to(dtype)  # where epsilon decides
    torch.testing.assert_close(rms_norm(tiny), F.rms_norm(tiny, (128,)))
    assert (rms_norm(torch.zeros(2, 8, dtype=dtype)) == 0).all()


def test_bfloat16_gradients_are_near_those_in_double():
    x, w_in, w_out, grad = random(32, 16), random(64, 16) * 0.3, random(16, 64) * 0.3, random(16, 32).t()
    exact = [z.clone().requires_grad_() for z in (x, w_in, w_out)]
    squared_relu_mlp(rms_norm(exact[0]), *exact[1:]).backward(grad)
    rounded = [x.bfloat16().requires_grad_(), w_in.float().requires_grad_(), w_out.float().requires_grad_()]
    squared_relu_mlp(rms_norm(rounded[0]), *rounded[1:]).backward(grad.bfloat16())
    for z, expected in zip(rounded, exact, strict=True):
        assert z.grad.dtype == z.dtype
        assert (z.grad.double() - expected.grad).norm() / expected.grad.norm() < 0.02
