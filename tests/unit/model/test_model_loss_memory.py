"""The logits of one micro-batch are the only large buffer of the loss, and all micro-batches use the same one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

APP = Path(__file__).parents[3] / "app"
TOKENS, VOCAB = 512, 32768
LOGITS_MIB = TOKENS * VOCAB * 4 / 2**20

# VmHWM and not ru_maxrss, which begins with the memory of the process that started this one.
CODE = f"""
import re, sys, torch
from lantrain.model.loss import softcap_cross_entropy

weight, total = torch.randn({VOCAB}, 32).requires_grad_(), torch.zeros(())
gradient = torch.zeros_like(weight)
sink = (lambda left, right: gradient.addmm_(left.t(), right)) if sys.argv[1] == "sink" else None

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

def micro_batches(count, tokens):
    global loss
    for _ in range(count):
        hidden = torch.randn(tokens, 32, requires_grad=True)
        targets = torch.randint({VOCAB}, (tokens,))
        loss = softcap_cross_entropy(hidden, weight, targets, vocab_size={VOCAB}, scale=1e-3, gradient_sink=sink)
        loss.backward()
        total.add_(loss.detach())
    return peak()

print(micro_batches(2, 8), micro_batches(1, {TOKENS}), micro_batches(3, {TOKENS}))
"""


@pytest.mark.on_ci
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.parametrize("operations", ["", "off"])
@pytest.mark.parametrize("way", ["sink", "autograd"])
def test_peak_memory_is_one_micro_batch_s_logits(operations: str, way: str) -> None:
    env = os.environ | {"PYTHONPATH": str(APP), "LANTRAIN_KERNELS": operations}
    done = subprocess.run([sys.executable, "-c", CODE, way], env=env, capture_output=True, text=True, check=True)
    before, one, four = map(float, done.stdout.split())
    assert 0.9 < (one - before) / LOGITS_MIB < 1.25, done.stdout
    assert (four - one) / LOGITS_MIB < 0.25, done.stdout
