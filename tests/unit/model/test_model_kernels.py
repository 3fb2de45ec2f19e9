"""The C++ operations against their twins, one library after the other; which library is chosen, and without any."""

import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lantrain.model import kernels as kernels_module
from lantrain.model.attention import causal_attention, masked_attention_reference, normed_attention
from lantrain.model.functions import residual_mix, rms_norm, rotary_norm, squared_relu_mlp
from lantrain.model.gpt import GPT
from lantrain.model.kernels import FOLDER, NARROW, build, choose, describe, kernels, runnable
from lantrain.model.loss import softcap_cross_entropy, softcap_cross_entropy_reference, token_losses
from tests.unit.model.reference import batch, double_weights, reference_loss, small_config, trained_looking

BUILT = [name for name in runnable() if (FOLDER / f"lantrain-{name}.so").exists()]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3}  # relative L2 error against double
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=BUILT or [pytest.param("none", marks=pytest.mark.on_ci)])
def library(request, monkeypatch):
    if request.param == "none":
        pytest.skip("no C++ library is built: `make venv` builds it where g++ is")
    monkeypatch.setenv("LANTRAIN_KERNELS", request.param)
    assert kernels() is not None
    assert kernels().name == request.param
    return request.param


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def normed(seed, batch_size, length, heads, width, dtype):
    """(B, H, T, D) of RMS 1.2 in the layout of the model."""
    x = torch.randn(batch_size, length, heads, width, generator=torch.Generator().manual_seed(seed))
    return (1.2 * x / x.square().mean(-1, keepdim=True).sqrt()).to(dtype).transpose(1, 2).requires_grad_()


ATTENTION = [  # batch, heads, kv heads, length, width, window
    (2, 2, 2, 33, 64, 5),
    (1, 4, 2, 100, 128, 37),
    (2, 4, 1, 50, 64, 50),
    (1, 2, 1, 511, 128, 128),
    (1, 1, 1, 1100, 64, 5000),  # more keys than a chunk
    (1, 2, 2, 1025, 64, 300),
    (3, 3, 3, 48, 128, 47),
    (1, 1, 1, 2, 64, 1),
]


@dtypes
@pytest.mark.parametrize("shape", ATTENTION)
def test_attention_values_and_gradients(library, dtype, shape):
    batch_size, heads, kv_heads, length, width, window = shape
    ours = [normed(i, batch_size, length, h, width, dtype) for i, h in enumerate((heads, kv_heads, kv_heads))]
    exact = [z.detach().double().requires_grad_() for z in ours]
    y, expected = normed_attention(*ours, window), masked_attention_reference(*exact, window)
    assert "NormedAttention" in type(y.grad_fn).__name__
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    y.backward(grad)
    expected.backward(grad.double())
    assert error(y, expected) < TOLERANCE[dtype]
    for z, twin in zip(ours, exact, strict=True):
        assert z.grad.dtype == dtype
        # With few keys the gradients of the scores nearly cancel, and rounding is a larger part of what is left.
        assert error(z.grad, twin.grad) < TOLERANCE[dtype] * (2 if length > 2 else 8)


@dtypes
def test_attention_of_one_token_is_its_value(library, dtype):
    q, k, v = (normed(i, 2, 1, 3, 64, dtype) for i in range(3))
    y = normed_attention(q, k, v, 7)
    torch.testing.assert_close(y, v.detach())
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(v.grad, torch.ones_like(v))
    zero = 1e-5 if dtype == torch.float32 else 0.05  # the difference of two roundings of sums of 64
    assert q.grad.abs().max() < zero
    assert k.grad.abs().max() < zero


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_attention_with_other_numbers_of_threads(library, threads):
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            qkv = [normed(i, 1, 200, 1, 64, torch.float32) for i in range(3)]
            y = normed_attention(*qkv, 150)
            y.square().sum().backward()
            results.append([y, *(z.grad for z in qkv)])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*results, atol=2e-6, rtol=1e-5)


def test_attention_that_the_library_does_not_take_goes_to_torch(library):
    odd = [normed(i, 1, 9, 1, 24, torch.float32) for i in range(3)]
    torch.testing.assert_close(normed_attention(*odd, 4), causal_attention(*odd, 4))
    double = [normed(i, 1, 9, 1, 64, torch.float64) for i in range(3)]
    assert normed_attention(*double, 4).dtype == torch.float64


LOSS = [  # tokens, width, vocabulary, padded, ignored
    (37, 24, 301, 320, 5),
    (1, 3, 1, 64, 0),
    (64, 16, 128, 128, 0),
    (5, 7, 65, 128, 2),
    (3, 2, 2, 2, 3),
    (130, 8, 1021, 1024, 1),
    (64, 32, 128, 128, 3),  # from here on whole tiles: in bfloat16 the operation that makes the logits itself
    (96, 64, 352, 384, 1),
    (32, 64, 32, 64, 0),
    (160, 32, 1024, 1024, 160),
]


@dtypes
@pytest.mark.parametrize("shape", LOSS)
@pytest.mark.parametrize("size", [1e-4, 1.0, 30.0])
def test_loss_and_gradients(library, dtype, shape, size):
    tokens, width, vocab, padded, ignored = shape
    random = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=random).to(dtype).requires_grad_()
    weight = (torch.randn(padded, width, generator=random) * size).to(dtype).float().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=random)
    targets[:ignored] = -1
    exact = [z.detach().double().requires_grad_() for z in (hidden, weight)]
    expected = softcap_cross_entropy_reference(*exact, targets, vocab_size=vocab, scale=0.37)
    expected.backward()
    each = token_losses(hidden, weight, targets, vocab_size=vocab)
    loss = softcap_cross_entropy(hidden, weight, targets, vocab_size=vocab, scale=0.37)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE[dtype], abs=1e-5)
    assert each.sum().item() * 0.37 == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    assert (each[:ignored] == 0).all()
    for z, twin in zip((hidden, weight), exact, strict=True):
        # Saturated logits leave gradients of 1e-10 and less, where the tolerance is of the largest that there could be.
        assert (z.grad.double() - twin.grad).norm() <= 2 * TOLERANCE[dtype] * twin.grad.norm() + 1e-6 * size


# A skip for want of a library is a failure on CI; one for want of a CPU that multiplies bfloat16 is not.
WANTED = [pytest.mark.on_ci] if set(NARROW) & set(runnable()) else []


@pytest.fixture(params=[name for name in BUILT if name in NARROW] or [pytest.param("none", marks=WANTED)])
def narrow_library(request, monkeypatch):
    """A library that makes the logits within the loss."""
    if request.param == "none":
        pytest.skip("no C++ library that multiplies bfloat16 is built, or this CPU runs none")
    monkeypatch.setenv("LANTRAIN_KERNELS", request.param)
    assert kernels() is not None
    assert kernels().name == request.param


def head(tokens=192, width=96, vocab=416):
    """hidden (N, C), weight (V, C) in bfloat16 and targets (N,), the first ignored."""
    random = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(rows, width, generator=random).bfloat16() for rows in (tokens, vocab))
    targets = torch.randint(0, vocab, (tokens,), generator=random)
    targets[0] = -1
    return hidden, weight, targets


def test_losses_of_logits_that_are_not_rounded(narrow_library):
    hidden, weight, targets = head()
    each = token_losses(hidden, weight, targets, vocab_size=len(weight))
    logits = 15 * torch.tanh(hidden.double() @ weight.double().t() / 15)
    exact = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    assert (each - exact).abs().max() < 1e-5
    rounded = token_losses(hidden[:-1], weight, targets[:-1], vocab_size=len(weight))  # no whole tiles
    assert (rounded - exact[:-1]).abs().max() > 1e-3


def test_a_tokens_loss_depends_neither_on_threads_nor_on_other_tokens(narrow_library):
    hidden, weight, targets = head()
    results, threads = [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        leaf = hidden.clone().requires_grad_()
        softcap_cross_entropy(leaf, weight.float(), targets, vocab_size=len(weight)).backward()
        some = [token_losses(part, weight, t, vocab_size=len(weight)) for part, t in
                zip(hidden.split(64), targets.split(64), strict=True)]  # fmt: skip
        whole = token_losses(hidden, weight, targets, vocab_size=len(weight))
        assert torch.equal(torch.cat(some), whole)
        results.append((whole, leaf.grad))
    torch.set_num_threads(threads)
    for whole, gradient in results[1:]:
        assert torch.equal(whole, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


def test_a_wrong_activation_shows_in_its_own_loss_and_a_wrong_target_is_refused(narrow_library):
    hidden, weight, targets = head()
    hidden[70, 3] = float("nan")
    each = token_losses(hidden, weight, targets, vocab_size=len(weight))
    assert each.isnan().nonzero().view(-1).tolist() == [70]
    with pytest.raises(IndexError, match="416 tokens"):
        token_losses(hidden, weight, targets.clamp_min(0) + len(weight), vocab_size=len(weight))


def test_loss_of_numbers_that_are_none_is_none(library):
    hidden = torch.full((3, 4), float("nan"), requires_grad=True)
    loss = softcap_cross_entropy(hidden, torch.zeros(70, 4), torch.tensor([1, 2, 69]), vocab_size=70)
    assert loss.isnan()


def test_a_target_outside_of_the_vocabulary_is_refused(library):
    hidden, weight = torch.zeros(2, 4, requires_grad=True), torch.zeros(64, 4)
    for target in (60, -2):
        with pytest.raises(IndexError, match="60 tokens"):
            softcap_cross_entropy(hidden, weight, torch.tensor([0, target]), vocab_size=60)


@dtypes
@pytest.mark.parametrize("length", [1, 7, 130])
def test_rotary_norm(library, dtype, length):
    angles = torch.arange(length)[None, :, None, None] * 100000.0 ** (-torch.arange(32) / 32)
    tables = [angles.cos().to(dtype), angles.sin().to(dtype)]
    x = torch.randn(3, length, 5, 64, generator=torch.Generator().manual_seed(length)).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = rotary_norm(x, *tables), rotary_norm(exact, *(table.double() for table in tables))
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    y.backward(grad.transpose(1, 2).contiguous().transpose(1, 2))  # attention returns other layouts
    expected.backward(grad.double())
    assert error(y, expected) < TOLERANCE[dtype]
    assert error(x.grad, exact.grad) < TOLERANCE[dtype] * 2


@dtypes
@pytest.mark.parametrize("width", [3, 40])
def test_squared_relu(library, dtype, width):
    random = torch.Generator().manual_seed(width)
    x = torch.randn(13, width, generator=random).to(dtype).requires_grad_()
    weights = [torch.randn(shape, generator=random).requires_grad_() for shape in ((5 * width, width), (7, 5 * width))]
    exact = [z.detach().double().requires_grad_() for z in (x, *weights)]
    y, expected = squared_relu_mlp(x, *weights), squared_relu_mlp(*exact)
    grad = torch.randn(13, 7, generator=random).to(dtype)
    y.backward(grad)
    expected.backward(grad.double())
    assert error(y, expected) < TOLERANCE[dtype] * 2
    for z, twin in zip((x, *weights), exact, strict=True):
        assert error(z.grad, twin.grad) < TOLERANCE[dtype] * 3


def test_norm_and_residual_in_bfloat16(library):
    random = torch.Generator().manual_seed(3)
    for rows, width in ((1, 16), (37, 256)):
        x, x0, grad = (torch.randn(rows, width, generator=random).bfloat16() for _ in range(3))
        a, b = torch.tensor(1.1), torch.tensor(-0.3)
        ours = [z.clone().requires_grad_() for z in (x, x0, a, b)]
        exact = [z.double().requires_grad_() for z in (x, x0, a, b)]
        for leaves, g in ((ours, grad), (exact, grad.double())):
            residual_mix(*leaves).backward(g)
        for z, twin in zip(ours, exact, strict=True):
            assert z.grad.dtype == z.dtype
            assert error(z.grad, twin.grad) < TOLERANCE[torch.bfloat16]
        ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        y, expected = rms_norm(ours), rms_norm(exact)
        y.backward(grad)
        expected.backward(grad.double())
        assert error(y, expected) < TOLERANCE[torch.bfloat16]
        assert error(ours.grad, exact.grad) < TOLERANCE[torch.bfloat16]


def model_loss(dtype, config):
    """Mean loss and gradients of a model that has been scaled as a trained one."""
    model = trained_looking(config, dtype)
    idx, targets = batch(config)
    loss = model.loss(idx, targets, scale=1 / int((targets != -1).sum()))
    loss.backward()
    return model, loss.item(), idx, targets


CONFIG = small_config(n_embd=256, n_head=4, n_kv_head=2)  # head_dim 64, grouped


def test_whole_model_in_float32(library):
    model, loss, idx, targets = model_loss(torch.float32, CONFIG)
    weights = double_weights(model)
    expected = reference_loss(weights, CONFIG, idx, targets) / int((targets != -1).sum())
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        assert error(parameter.grad, weights[name].grad) < 1e-4, name


def test_whole_model_in_bfloat16(library, monkeypatch):
    """At most the error of PyTorch's own operators in bfloat16, and a tenth on top."""
    model, _, idx, targets = model_loss(torch.bfloat16, CONFIG)
    weights = double_weights(model)
    expected = reference_loss(weights, CONFIG, idx, targets) / int((targets != -1).sum())
    expected.backward()
    monkeypatch.setenv("LANTRAIN_KERNELS", "off")
    twin, _, _, _ = model_loss(torch.bfloat16, CONFIG)
    ours, theirs = (
        sorted(error(p.grad, weights[name].grad) for name, p in m.named_parameters()) for m in (model, twin)
    )
    assert ours[len(ours) // 2] <= 1.1 * theirs[len(theirs) // 2]
    assert ours[-1] <= 1.5 * theirs[-1]


def test_the_loss_in_bfloat16_has_no_bias(library):
    """Within 2e-4 of double, or within what rounding leaves of the mean over 64 rows.

    One row is off by up to 2e-3, with PyTorch's own operators as well.
    """
    model = trained_looking(CONFIG, torch.bfloat16)
    weights = double_weights(model)
    idx, targets = batch(CONFIG, rows=64)
    errors = []
    with torch.no_grad():
        for i in range(len(idx)):
            row, target = idx[i : i + 1], targets[i : i + 1]
            scale = 1 / int((target != -1).sum())
            loss = model.loss(row, target, scale=scale).item()
            errors.append(loss - scale * reference_loss(weights, CONFIG, row, target).item())
    mean, spread = statistics.mean(errors), statistics.stdev(errors)
    assert abs(mean) < max(2e-4, 3 * spread / len(errors) ** 0.5), spread
    assert spread < 2e-3


def test_the_twins_agree_with_the_libraries_switched_off(monkeypatch):
    monkeypatch.setenv("LANTRAIN_KERNELS", "off")
    assert kernels() is None
    assert describe() == "PyTorch's operators (LANTRAIN_KERNELS=off)"
    model, loss, idx, targets = model_loss(torch.float32, CONFIG)
    expected = reference_loss(double_weights(model), CONFIG, idx, targets) / int((targets != -1).sum())
    assert loss == pytest.approx(expected.item(), abs=1e-5)


AMX = ("avx2", "fma3", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16", "amx_tile", "amx_bf16")
CHOICES = [  # torch's capability, what the CPU has, setting, what is chosen
    ("AVX512", AMX, "", "v4amx"),
    ("AVX512", AMX, "v4bf16", "v4bf16"),
    ("AVX2", AMX, "", "v3"),
    ("AVX512", ("avx2", "fma3", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16"), "", "v4bf16"),
    ("AVX512", ("avx2", "fma3", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"), "", "v4"),
    ("AVX512", ("avx2", "fma3", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"), "v4bf16", None),
    ("AVX2", ("avx2", "fma3", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16"), "", "v3"),
    ("AVX2", ("avx2", "fma3"), "v4", None),
    ("AVX2", ("avx2",), "", None),
    ("DEFAULT", ("avx2", "fma3"), "", None),
    ("AVX512", ("avx2", "fma3", "avx512_f"), "off", None),
]


@pytest.mark.parametrize(("capability", "has", "setting", "expected"), CHOICES)
def test_choice_by_the_cpu(monkeypatch, tmp_path, capability, has, setting, expected):
    for name in ("v3", "v4", "v4bf16", "v4amx"):
        (tmp_path / f"lantrain-{name}.so").touch()
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has, True))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(kernels_module, "tiles_permitted", lambda: True)
    name, reason = choose(setting, tmp_path)
    assert name == expected, reason
    monkeypatch.setattr(kernels_module, "tiles_permitted", lambda: False)
    assert choose(setting, tmp_path)[0] == ("v4bf16" if expected == "v4amx" else expected)


def test_choice_where_nothing_was_built(monkeypatch, tmp_path):
    name, reason = choose("", tmp_path)
    assert name is None
    assert "kernels.build" in reason
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert choose("", FOLDER)[0] is None


def test_a_file_that_is_no_library_leaves_the_twins(monkeypatch, tmp_path):
    (tmp_path / "lantrain-v3.so").write_text("not a library")
    monkeypatch.setattr(kernels_module, "FOLDER", tmp_path)
    monkeypatch.setattr(kernels_module, "choose", lambda setting: ("v3", "a test"))
    kernels_module._chosen.cache_clear()
    try:
        assert kernels() is None
        assert "could not be loaded" in describe()
    finally:
        kernels_module._chosen.cache_clear()


def test_torchs_limit_is_kept(library):
    code = "from lantrain.model.kernels import describe; print(describe())"
    env = os.environ | {"ATEN_CPU_CAPABILITY": "default", "LANTRAIN_KERNELS": "", "PYTHONPATH": "app"}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert output.startswith("PyTorch's operators")


def test_one_openmp(library):
    loaded = {
        line.split(maxsplit=5)[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line or "libomp" in line or "libiomp" in line
    }
    assert len(loaded) == 1, loaded


EMULATED = [  # architecture, library, compiler, what runs the result
    ("x86_64", "v3", "g++", ["qemu-x86_64", "-cpu", "Haswell-v4"]),  # a CPU with AVX2 and nothing newer
    ("aarch64", "neon", "aarch64-linux-gnu-g++", ["qemu-aarch64"]),
]


@pytest.mark.on_ci
@pytest.mark.parametrize(("machine", "name", "compiler", "runner"), EMULATED)
def test_on_an_emulated_cpu(tmp_path, machine, name, compiler, runner):
    """No illegal instruction, and the values of plain loops, on CPUs that this machine is not."""
    if not (shutil.which(compiler) and shutil.which(runner[0])):
        pytest.skip(f"needs {compiler} and {runner[0]} (apt: g++-aarch64-linux-gnu qemu-user)")
    sources = [str(Path(build.__file__).with_name(source)) for source in build.SOURCES]
    check, program = str(tmp_path / "check.o"), str(tmp_path / "check")
    # -O1: GCC 12 for aarch64 fails inside on these plain loops at -O3.
    subprocess.run([compiler, "-O1", "-c", str(Path(__file__).with_name("plain_loops.cpp")), "-o", check], check=True)
    flags = [*build.FLAGS, *build.TARGETS[machine][name]]
    subprocess.run([compiler, *flags, "-static", check, *sources, "-o", program], check=True, stderr=subprocess.DEVNULL)
    done = subprocess.run([*runner, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.on_ci
def test_build_makes_every_library_of_this_architecture(tmp_path):
    if build.compiler() is None:
        pytest.skip("no g++ here")
    built = build.build(tmp_path)
    assert [path.name for path in built] == [f"lantrain-{name}.so" for name in build.TARGETS[platform.machine()]]
    assert sorted(tmp_path.iterdir()) == sorted(built)
    for path in built:
        if path.stem.removeprefix("lantrain-") in runnable():
            kernels_module.load(path, "test")


@pytest.mark.on_ci
def test_build_leaves_out_what_the_compiler_does_not_know(tmp_path, monkeypatch, capsys):
    """GCC 10 knows no AMX, for one."""
    if build.compiler() is None:
        pytest.skip("no g++ here")
    targets = {"v3": build.TARGETS["x86_64"]["v3"], "v9": ["-march=x86-64-v9"]}
    monkeypatch.setattr(build, "TARGETS", {"x86_64": targets})
    if platform.machine() != "x86_64":
        targets.pop("v3")
    assert [path.name for path in build.build(tmp_path, "x86_64")] == [
        f"lantrain-{name}.so" for name in targets if name != "v9"
    ]
    assert "v9" in capsys.readouterr().out


def test_build_without_a_compiler(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setattr(sys, "argv", ["build", str(tmp_path / "lib")])
    assert build.main() == 0
    assert "no g++" in capsys.readouterr().out
    assert not (tmp_path / "lib").exists()
    with pytest.raises(FileNotFoundError):
        build.build(tmp_path / "lib")


def test_a_model_evaluates_and_generates(library):
    model = trained_looking(CONFIG)
    idx, targets = batch(CONFIG)
    assert isinstance(model, GPT)
    with torch.no_grad():
        each = model.loss(idx, targets, reduction="none")
        whole = model.logits(idx)
    expected = torch.nn.functional.cross_entropy(
        whole.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none"
    )
    torch.testing.assert_close(each.flatten(), expected, atol=2e-5, rtol=1e-5)
