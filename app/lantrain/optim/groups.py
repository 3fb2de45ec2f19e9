"""Which optimizer and which constants each parameter gets: nanochat's groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lantrain.model.gpt import GPT

REFERENCE_WIDTH = 768  # AdamW's learning rates were tuned at this n_embd and go with 1 / sqrt(n_embd)


@dataclass
class ParamGroup:
    """Parameters that share an optimizer and its constants; `lr`, `momentum`, `weight_decay` follow schedules."""

    kind: Literal["adamw", "muon"]
    names: list[str]  # state-dict names; all of one shape for muon
    lr: float
    betas: tuple[float, float] = (0.8, 0.95)  # adamw
    eps: float = 1e-10  # adamw
    weight_decay: float = 0.0
    momentum: float = 0.95  # muon
    beta2: float = 0.9  # muon
    initial_lr: float = field(init=False)  # lr before any schedule

    def __post_init__(self) -> None:
        self.initial_lr = self.lr


def width_lr_scale(n_embd: int) -> float:
    """Factor on the AdamW learning rates of head and embeddings: (n_embd / 768) ** -0.5."""
    return (n_embd / REFERENCE_WIDTH) ** -0.5


def parameter_groups(
    model: GPT,
    *,
    unembedding_lr: float = 0.008,
    embedding_lr: float = 0.3,
    matrix_lr: float = 0.02,
    weight_decay: float = 0.28,
    scalar_lr: float = 0.5,
) -> list[ParamGroup]:
    """The groups of a model, every parameter in exactly one, in nanochat's order (AdamW first, Muon by shape).

    The learning rates and the weight decay (of Muon) come scaled for the batch; the scale for the width is applied
    here. Smear and backout have a learning rate of their own that no scale touches.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    scale = width_lr_scale(model.config.n_embd)

    def adamw(prefix: tuple[str, ...], lr: float, beta1: float, beta2: float, decay: float = 0.0) -> ParamGroup:
        names = [name for name in shapes if name.startswith(prefix)]
        return ParamGroup("adamw", names, lr, betas=(beta1, beta2), weight_decay=decay)

    groups = [
        adamw(("lm_head.",), unembedding_lr * scale, 0.8, 0.96, 0.01),
        adamw(("transformer.wte.",), embedding_lr * scale, 0.8, 0.995, 0.001),
        adamw(("value_embeds.",), embedding_lr * scale * 0.5, 0.8, 0.995, 0.01),
        adamw(("resid_lambdas",), scalar_lr * 0.01, 0.8, 0.95, 0.05),
        adamw(("x0_lambdas",), scalar_lr, 0.96, 0.95),
        adamw(("smear_gate.", "smear_lambda", "backout_lambda"), 0.2, 0.8, 0.95),
    ]
    matrices = {name: shape for name, shape in shapes.items() if name.startswith("transformer.h.")}
    for shape in sorted(set(matrices.values())):
        names = [name for name in matrices if matrices[name] == shape]
        groups.append(ParamGroup("muon", names, matrix_lr, weight_decay=weight_decay))
    return groups
