"""Whether two machines compute the same bits where they must: in the update of what every rank holds and updates.

torch's fused AdamW gives the same bits with AVX2, with AVX-512 and with any number of threads, and others without AVX2
(and on another architecture). Tables that are updated on every rank would drift apart, and the replica check would stop
the run some steps later. So a digest of a few updates is compared when a machine joins. Everything else may differ:
sums and products that only one rank computes are sent to the others.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import lantrain

SHAPES = ((7,), (32, 24), (401, 256))
"""Rests of vectors, whole vectors, and enough for several threads."""
STEPS = 3


def update_digest() -> str:
    """A short hash of the bits that this process's AdamW gives."""
    import numpy as np
    import torch

    from lantrain.optim.adamw import adamw_update

    draw, digest = np.random.default_rng(1), hashlib.sha256()

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(draw.standard_normal(shape).astype(np.float32))  # torch's generator varies with the CPU

    for shape in SHAPES:
        param, m, v = tensor(shape), torch.zeros(shape), torch.zeros(shape)
        for step in range(1, STEPS + 1):
            grad = tensor(shape) * 10.0**-step
            adamw_update(param, grad, m, v, step=step, lr=0.0173, betas=(0.8, 0.995), eps=1e-10, weight_decay=0.013)
        for result in (param, m, v):
            digest.update(result.numpy().tobytes())
    return digest.hexdigest()[:16]


def cpu_class() -> str:
    """Architecture, and the instructions that torch uses here: x86_64 AVX2."""
    import torch

    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def under(capability: str) -> tuple[str, str]:
    """Class and digest with this ATEN_CPU_CAPABILITY: torch reads it once, so that takes a process of its own.

    Raises OSError or subprocess.SubprocessError when none can be run.
    """
    if os.environ.get("ATEN_CPU_CAPABILITY", "") == capability:
        return cpu_class(), update_digest()
    packages = os.pathsep.join([str(Path(lantrain.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": packages}
    variables.pop("TOKEN", None)
    command = [sys.executable, "-m", "lantrain.nodes.arithmetic"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=120)
    name, digest = done.stdout.strip().rsplit(" ", 1)
    return name, digest


if __name__ == "__main__":
    print(cpu_class(), update_digest())
