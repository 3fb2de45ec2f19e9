import pytest
import torch

from lantrain.model.kernels import kernels
from lantrain.optim.muon import POLAR_EXPRESS, muon_update, polar_express, second_moment_shape

SHAPES = [(64, 64), (48, 64), (64, 48), (32, 128), (128, 32), (4, 12), (1, 12), (12, 1), (65, 33), (256, 96)]
SHAPES += [(512, 512), (530, 512), (513, 1040)]  # symmetric products in stripes


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference_update(param, grad, average, variance, *, lr, momentum, beta2, weight_decay):
    """One matrix, in double precision, by the published formulas; returns the new param, average and variance."""
    rows, columns = param.shape
    average = momentum * average + (1 - momentum) * grad
    x = (1 - momentum) * grad + momentum * average  # Nesterov
    x = x * (x.norm() / rows**0.5) / x.norm(dim=1, keepdim=True).clamp_min(1e-6)
    x = x / (1.01 * x.norm() + 1e-6)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)  # the odd polynomials act on the singular values alone
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    x = u @ torch.diag(s) @ vh
    x = x * min(rows, columns) ** 0.5 / x.norm().clamp_min(1e-6)
    axis = 1 if rows >= columns else 0
    mean_square = (x**2).mean(axis, keepdim=True)
    variance = beta2 * variance + (1 - beta2) * mean_square
    scaled = x / variance.clamp_min(1e-10).sqrt()
    scaled = scaled * x.norm() / scaled.norm().clamp_min(1e-10)
    decay = weight_decay * param * (scaled * param >= 0)
    param = param - lr * max(1, rows / columns) ** 0.5 * (scaled + decay)
    return param, average, variance


def state(shape, count=3):
    params, average = random(count, *shape), torch.zeros(count, *shape)
    return params, average, torch.zeros(count, *second_moment_shape(shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_equal_the_reference_in_double(shape):
    params, average, variance = state(shape)
    twin = [z.double() for z in (params, average, variance)]
    for step in range(4):
        settings = {"lr": 0.02, "momentum": 0.85 + 0.02 * step, "beta2": 0.9, "weight_decay": 0.1 * step}
        grads = random(*params.shape, seed=step + 1) * 10.0**-step
        exact = [reference_update(*z, **settings) for z in zip(twin[0], grads.double(), *twin[1:], strict=True)]
        twin = [torch.stack(z) for z in zip(*exact, strict=True)]
        muon_update(params, grads, average, variance, **settings)
        for ours, expected in zip((params, average, variance), twin, strict=True):
            assert (ours.double() - expected).norm() / expected.norm() < 3e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_polar_express_gives_singular_values_near_one(shape):
    u, s, vh = torch.linalg.svd(random(*shape), full_matrices=False)
    spread = torch.logspace(-2, 0, len(s))
    singular = torch.linalg.svdvals(polar_express(u @ torch.diag(spread) @ vh))
    assert singular.min() > 0.7
    assert singular.max() < 1.3


@pytest.fixture(params=["off", "C++"])
def operations(request, monkeypatch):
    """The bfloat16 step by torch's operators, and by the C++ operation where this CPU has it."""
    if request.param == "off":
        monkeypatch.setenv("LANTRAIN_KERNELS", "off")
    elif not ((found := kernels()) and found.narrow):
        pytest.skip("the C++ step is built for CPUs that multiply bfloat16; this one does not, or nothing is built")
    return request.param


BF16_SHAPES = [(64, 64), (32, 128), (128, 32), (96, 160), (256, 256), (512, 128), (1, 12)]


def relative(x, exact):
    return ((x.double() - exact).norm() / exact.norm()).item()


def bfloat16_errors(shape):
    """Errors against double of three bfloat16 steps: of every update, and of momentum and variance after it."""
    params, average, variance = state(shape)
    errors = []
    for step in range(3):
        before = params.clone()
        settings = {"lr": 0.02, "momentum": 0.85 + 0.02 * step, "beta2": 0.9, "weight_decay": 0.1 * step}
        grads = random(*params.shape, seed=step + 1) * 10.0**-step
        tensors = [z.double() for z in (params, grads, average, variance)]
        exact = [reference_update(*z, **settings) for z in zip(*tensors, strict=True)]
        muon_update(params, grads, average, variance, **settings, dtype=torch.bfloat16)
        assert params.dtype == torch.float32
        expected = [torch.stack(z) for z in zip(*exact, strict=True)]
        errors.append(relative(params - before, expected[0] - before.double()))
        errors += [relative(average, expected[1]), relative(variance, expected[2])]
    return errors


@pytest.mark.parametrize("shape", BF16_SHAPES)
def test_bfloat16_is_near_double(shape, monkeypatch):
    found = kernels()
    ours = bfloat16_errors(shape)
    monkeypatch.setenv("LANTRAIN_KERNELS", "off")
    twin = bfloat16_errors(shape)
    # Where an update is next to zero its rounding decides whether the decay counts: a step with decay errs more.
    assert max(twin[0::3]) < 0.1
    assert max(twin[1::3]) < 1e-6
    assert max(twin[2::3]) < 0.01
    for error, other in zip(ours, twin, strict=True):
        assert error <= 1.3 * other + 1e-6, f"{found}: {ours} against {twin}"


def test_bfloat16_does_not_depend_on_the_number_of_threads(operations):
    results, threads = [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        tensors = state((160, 96))
        muon_update(
            tensors[0], random(3, 160, 96, seed=1), *tensors[1:], lr=0.02, momentum=0.9, weight_decay=0.1,
            dtype=torch.bfloat16,
        )  # fmt: skip
        results.append(tensors)
    torch.set_num_threads(threads)
    if operations == "C++":
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 512)])
def test_polar_express_in_cpp_is_as_exact_as_torch(shape):
    found = kernels()
    if found is None or not found.narrow:
        pytest.skip("no bfloat16 products on this CPU, or nothing is built")
    x = random(*shape)
    x = (x / x.norm() / 1.01).to(torch.bfloat16)
    ours, coefficients, exact, twin = x.clone(), torch.tensor(POLAR_EXPRESS), x.double(), x
    found.library.lantrain_polar_express(ours.data_ptr(), *shape, coefficients.data_ptr(), len(POLAR_EXPRESS), 2)
    for a, b, c in POLAR_EXPRESS:
        gram = exact @ exact.t()
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
        gram = twin @ twin.t()
        twin = torch.addmm(twin, torch.addmm(gram, gram, gram, beta=b, alpha=c), twin, beta=a)
    assert relative(twin, exact) < 0.02
    assert relative(ours, exact) < 1.1 * relative(twin, exact)


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32)])
@pytest.mark.parametrize("rank", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_low_rank_stay_finite(shape, rank, dtype):
    """Projections start at zero: the first gradients of what feeds them are zero. Few tokens mean a low rank."""
    params, average, variance = state(shape, count=1)
    for step in range(3):
        grads = random(1, shape[0], rank, seed=step) @ random(1, rank, shape[1], seed=step + 9)
        muon_update(params, grads, average, variance, lr=0.02, momentum=0.9, weight_decay=0.1, dtype=dtype)
    assert params.isfinite().all()
    assert average.isfinite().all()
    if rank == 0:
        # no update: only the cautious decay, lr * 0.1 three times
        rate = 0.02 * max(1, shape[0] / shape[1]) ** 0.5
        torch.testing.assert_close(params, state(shape, count=1)[0] * (1 - rate * 0.1) ** 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_does_not_depend_on_its_neighbours(dtype):
    """Ranks own different subsets of a shape's matrices; every subset must give the same bits."""
    whole = state((32, 128), count=4)
    grads = random(4, 32, 128, seed=1)
    alone = [[z[i : i + 1].clone() for z in (whole[0], grads, *whole[1:])] for i in range(4)]
    muon_update(whole[0], grads, *whole[1:], lr=0.02, momentum=0.9, weight_decay=0.1, dtype=dtype)
    for i, parts in enumerate(alone):
        muon_update(*parts, lr=0.02, momentum=0.9, weight_decay=0.1, dtype=dtype)
        assert torch.equal(parts[0][0], whole[0][i])


def test_second_moment_lies_along_the_longer_side():
    assert second_moment_shape((64, 16)) == (64, 1)
    assert second_moment_shape((16, 64)) == (1, 64)
    assert second_moment_shape((16, 16)) == (16, 1)
