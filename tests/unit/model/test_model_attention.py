import pytest
import torch

from lantrain.model.attention import cached_attention, causal_attention, masked_attention_reference

CASES = [  # (length, window)
    (1, 128),
    (5, 128),
    (127, 128),
    (128, 128),
    (129, 128),
    (130, 128),
    (192, 128),
    (300, 128),
    (512, 128),
    (512, 256),
    (400, 192),
    (33, 7),
    (20, 1),
    (64, 64),
    (40, 10_000),
]


def qkv(length, *, heads=2, kv_heads=2, batch=2, dtype=torch.float32):
    """In the layout of the model: (B, T, H, D) in memory, seen as (B, H, T, D)."""
    random = torch.Generator().manual_seed(length)
    return [
        torch.randn(batch, length, h, 16, generator=random).to(dtype).transpose(1, 2).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize(("length", "window"), CASES)
@pytest.mark.parametrize("batch", [1, 3])
def test_values_and_gradients_equal_the_masked_twin(length, window, batch):
    ours = qkv(length, batch=batch)
    twin = [z.detach().double().requires_grad_() for z in ours]
    y, expected = causal_attention(*ours, window), masked_attention_reference(*twin, window)
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=1e-5)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    y.backward(grad)
    expected.backward(grad.double())
    for z, z_twin in zip(ours, twin, strict=True):
        torch.testing.assert_close(z.grad.double(), z_twin.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("length", "window"), [(5, 128), (300, 128)])
def test_grouped_heads_and_bfloat16(length, window):
    ours = qkv(length, heads=4, kv_heads=2)
    twin = [z.detach().double() for z in ours]
    expected = masked_attention_reference(*twin, window)
    torch.testing.assert_close(causal_attention(*ours, window).double(), expected, atol=2e-6, rtol=1e-5)
    rounded = causal_attention(*(z.detach().bfloat16() for z in ours), window)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.double() - expected).norm() / expected.norm() < 0.01


def test_a_query_sees_itself_and_window_tokens_to_its_left():
    q, k, v = (z.detach() for z in qkv(300))
    before = causal_attention(q, k, v, 128)
    v[:, :, 100] += 10
    changed = (causal_attention(q, k, v, 128) != before).any(-1).any(1).any(0).nonzero().flatten().tolist()
    assert changed == list(range(100, 100 + 128 + 1))


@pytest.mark.parametrize("window", [1, 3, 128, 1000])
@pytest.mark.parametrize("queries", [1, 2, 40, 150])
def test_cached_attention_equals_the_end_of_the_whole(queries, window):
    q, k, v = (z.detach() for z in qkv(150, heads=4, kv_heads=2))
    expected = masked_attention_reference(q.double(), k.double(), v.double(), window)[:, :, -queries:]
    y = cached_attention(q[:, :, -queries:], k, v, window)
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=1e-5)
