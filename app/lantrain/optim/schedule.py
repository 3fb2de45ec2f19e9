"""Batch, horizon and learning-rate arithmetic of the nanochat recipe (karpathy/nanochat, commit 92d63d4).

Everything here is plain numbers, so that `--dry-run` and the tests can check it without a model or data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

REFERENCE_BATCH = 2**19
"""Tokens a step at which nanochat's learning rates were tuned (depth 12)."""

REFERENCE_DEPTH = 12
BATCH_EXPONENT = 0.383
"""Best batch grows as tokens ** 0.383 (Power Lines, arXiv 2505.13738)."""

MUON_WARMUP_STEPS = 400


def auto_batch(target_tokens: float, reference_tokens: float) -> int:
    """Tokens a step for a horizon of `target_tokens`, rounded to a power of two.

    `reference_tokens` is the horizon of the depth-12 reference model.
    """
    return int(2 ** round(math.log2(REFERENCE_BATCH * (target_tokens / reference_tokens) ** BATCH_EXPONENT)))


def lr_scale(batch_tokens: int) -> float:
    """Factor on the learning rates for a batch of `batch_tokens`: square root of its ratio to the reference."""
    return (batch_tokens / REFERENCE_BATCH) ** 0.5


def scaled_weight_decay(weight_decay: float, batch_tokens: int, target_tokens: float, reference_tokens: float) -> float:
    """Muon's weight decay for this batch and horizon: keeps B / (lr * wd * D) constant (arXiv 2405.13698)."""
    return weight_decay * math.sqrt(batch_tokens / REFERENCE_BATCH) * (reference_tokens / target_tokens)


@dataclass(frozen=True)
class Schedule:
    """Learning-rate multiplier, Muon momentum and weight decay as functions of the step (0-based)."""

    num_iterations: int
    warmup_steps: int = 40
    warmdown_ratio: float = 0.65
    final_lr_frac: float = 0.05
    weight_decay: float = 0.0

    @property
    def warmdown_steps(self) -> int:
        """Length of the final linear decay, in steps."""
        return round(self.warmdown_ratio * self.num_iterations)

    def lr_multiplier(self, step: int) -> float:
        """Linear warmup, constant, linear warmdown to `final_lr_frac`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.warmdown_steps == 0 or step <= self.num_iterations - self.warmdown_steps:
            return 1.0
        progress = (self.num_iterations - step) / self.warmdown_steps
        return progress + (1 - progress) * self.final_lr_frac

    def muon_momentum(self, step: int) -> float:
        """0.85 to 0.97 over the first 400 steps; 0.97 to 0.90 during the warmdown."""
        start = self.num_iterations - self.warmdown_steps
        if step < MUON_WARMUP_STEPS:
            done = step / MUON_WARMUP_STEPS
            return 0.85 * (1 - done) + 0.97 * done
        if self.warmdown_steps and step >= start:
            done = (step - start) / self.warmdown_steps
            return 0.97 * (1 - done) + 0.90 * done
        return 0.97

    def muon_weight_decay(self, step: int) -> float:
        """Cosine from `weight_decay` to zero over the run."""
        return self.weight_decay * 0.5 * (1 + math.cos(math.pi * step / self.num_iterations))
