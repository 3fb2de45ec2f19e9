"""The model written out from the recipe with composed operations only, in any dtype: the twin of `GPT.loss`."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from lantrain.model.attention import masked_attention_reference
from lantrain.model.gpt import GPT, GPTConfig


def small_config(**changes) -> GPTConfig:
    """Four layers, three with a window (128) shorter than the sequence; the vocabulary needs padding."""
    base = GPTConfig(sequence_len=200, vocab_size=301, n_layer=4, n_head=2, n_kv_head=2, n_embd=64)
    return replace(base, **changes)


def trained_looking(config: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """A model whose zero-initialised parameters are not zero, so that every path carries values and gradients."""
    model = GPT(config, dtype)
    model.init_weights()
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "c_proj" in name or name == "smear_lambda":
                parameter.normal_(std=0.3 if name == "smear_lambda" else 0.1, generator=random)
            if name == "lm_head.weight":
                parameter.normal_(std=0.1, generator=random)
    return model


def batch(config: GPTConfig, rows: int = 2, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (rows, length), some targets ignored."""
    random = torch.Generator().manual_seed(11)
    length = length or config.sequence_len
    tokens = torch.randint(0, config.vocab_size, (rows, length + 1), generator=random)
    targets = tokens[:, 1:].clone()
    targets[:, 3:7] = -1
    return tokens[:, :-1].contiguous(), targets


def norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=torch.finfo(torch.float32).eps)


def rotate(x, positions):
    half = x.size(-1) // 2
    frequency = 100000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (positions[:, None].double() * frequency)[None, :, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([x[..., :half] * cos + x[..., half:] * sin, x[..., half:] * cos - x[..., :half] * sin], -1)


def reference_logits(weights: dict, config: GPTConfig, idx):
    """Softcapped logits (B, T, vocab) of idx (B, T) in the dtype of the weights."""
    w, (batch_size, length) = weights, idx.shape
    x = norm(w["transformer.wte.weight"][idx])
    gate = w["smear_lambda"] * torch.sigmoid(x[:, 1:, :24] @ w["smear_gate.weight"].T)
    x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)
    x0 = x
    short = -(-config.sequence_len // 4 // 128) * 128
    for i in range(config.n_layer):
        h = f"transformer.h.{i}."
        x = w["resid_lambdas"][i] * x + w["x0_lambdas"][i] * x0
        y = norm(x)

        def heads(name, y=y, h=h):
            return (y @ w[h + f"attn.{name}.weight"].T).view(batch_size, length, -1, config.head_dim)

        q, k, v = heads("c_q"), heads("c_k"), heads("c_v")
        if i % 2 == (config.n_layer - 1) % 2:
            gate = 3 * torch.sigmoid(y[..., :12] @ w[h + "attn.ve_gate.weight"].T)
            v = v + gate[..., None] * w[f"value_embeds.{i}.weight"][idx].view(v.shape)
        positions = torch.arange(length)
        q, k = (1.2 * norm(rotate(z, positions)) for z in (q, k))
        last = i == config.n_layer - 1
        window = short if not last and config.window_pattern[i % len(config.window_pattern)] == "S" else length
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = masked_attention_reference(q, k, v, window).transpose(1, 2).reshape(batch_size, length, -1)
        x = x + y @ w[h + "attn.c_proj.weight"].T
        hidden = (norm(x) @ w[h + "mlp.c_fc.weight"].T).relu() ** 2
        x = x + hidden @ w[h + "mlp.c_proj.weight"].T
        if i == config.n_layer // 2:
            middle = x
    x = norm(x - w["backout_lambda"] * middle)
    logits = (x @ w["lm_head.weight"].T)[..., : config.vocab_size]
    return 15 * torch.tanh(logits / 15)


def reference_loss(weights: dict, config: GPTConfig, idx, targets):
    """Sum of the cross-entropies of the targets that are not -1."""
    logits = reference_logits(weights, config, idx)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


def double_weights(model: GPT) -> dict:
    """The model's parameters as float64 leaves."""
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
