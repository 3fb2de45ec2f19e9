import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lantrain.optim.adamw import adamw_update

APP = Path(__file__).parents[3] / "app"


@pytest.mark.parametrize("shape", [(1,), (7,), (33, 65), (1, 24), (0, 8)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_steps_equal_the_formula_in_double(shape, weight_decay):
    random = torch.Generator().manual_seed(5)
    param, m, v = torch.randn(shape, generator=random), torch.zeros(shape), torch.zeros(shape)
    p64, m64, v64 = (z.double() for z in (param, m, v))
    lr, (b1, b2), eps = 0.03, (0.8, 0.995), 1e-10
    for step in range(1, 8):
        grad = torch.randn(shape, generator=random) * 10.0 ** (-2 * step)  # late ones near epsilon
        g64 = grad.double()
        p64 = p64 * (1 - lr * weight_decay)
        m64, v64 = b1 * m64 + (1 - b1) * g64, b2 * v64 + (1 - b2) * g64**2
        p64 = p64 - lr / (1 - b1**step) * m64 / ((v64 / (1 - b2**step)).sqrt() + eps)
        adamw_update(param, grad, m, v, step=step, lr=lr, betas=(b1, b2), eps=eps, weight_decay=weight_decay)
        torch.testing.assert_close(param.double(), p64, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(m.double(), m64, atol=1e-9, rtol=1e-5)
        torch.testing.assert_close(v.double(), v64, atol=1e-15, rtol=1e-5)


def test_epsilon_is_added_after_the_bias_correction():
    """With a gradient of the size of epsilon the two places differ by far more than rounding."""
    param, m, v = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    adamw_update(param, torch.tensor([1e-10]), m, v, step=1, lr=1.0, betas=(0.8, 0.995), eps=1e-10, weight_decay=0.0)
    assert param.item() == pytest.approx(-0.5, rel=1e-4)


def test_rows_that_no_token_touched_decay_as_if_their_gradient_were_zero():
    param, m, v = torch.ones(2, 4), torch.full((2, 4), 0.5), torch.ones(2, 4)
    grad = torch.zeros(2, 4)
    adamw_update(param, grad, m, v, step=3, lr=0.1, betas=(0.8, 0.995), eps=1e-10, weight_decay=0.01)
    assert (m == 0.4).all()
    torch.testing.assert_close(v, torch.full((2, 4), 0.995))


def test_same_bits_on_avx2_and_avx512_and_any_number_of_threads():
    """Embedding state is replicated on machines that differ in both, without being exchanged."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU has no AVX2: its vector code cannot be compared with that of others")
    script, lines = Path(__file__).with_name("adamw_bits.py"), set()
    for capability in ("avx2", "avx512"):  # avx512 falls back to what the CPU has
        for threads in (1, 2, 3):
            env = os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(APP)}
            command = [sys.executable, str(script), str(threads)]
            lines.add(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
    digests = {line.split()[1] for line in lines}
    assert len(digests) == 1, lines
