"""Prints a digest of a few AdamW steps: run under several CPU capabilities and thread counts, and compared."""

import hashlib
import itertools
import sys

import numpy as np
import torch

from lantrain.model.kernels import describe
from lantrain.optim.adamw import adamw_update, moments_like

torch.set_num_threads(int(sys.argv[1]))
random = np.random.default_rng(1)


def tensor(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(random.standard_normal(shape).astype(np.float32))  # torch's generator varies with the CPU


digest = hashlib.sha256()
shapes = [(7,), (32, 24), (401, 256), (1003, 257)]
for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
    param = tensor(shape)
    m, v = moments_like(param, dtype)
    for step in range(1, 6):
        grad = tensor(shape) * 10.0**-step
        adamw_update(param, grad, m, v, step=step, lr=0.0173, betas=(0.8, 0.995), eps=1e-10, weight_decay=0.013)
    for z in (param, m, v):
        digest.update(z.float().numpy().tobytes())
print(f"{torch.backends.cpu.get_cpu_capability()}:{describe()}".replace(" ", "_"), digest.hexdigest())
