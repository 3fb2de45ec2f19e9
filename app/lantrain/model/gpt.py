"""The GPT of the nanochat recipe: same parameters, same names, same mathematics, for CPUs.

Rotary positions, RMSNorm without gain on queries, keys and everywhere else, squared ReLU, untied head, value
embeddings on every other layer (ResFormer), a learned mix of each layer's input with the first residual, the previous
token smeared into each embedding, and the middle residual taken out again before the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantrain.model.attention import cached_attention, normed_attention
from lantrain.model.embedding import Embedding, EmbeddingRows, WeightCasts
from lantrain.model.functions import linear, residual_mix, rms_norm, rotary_norm, smear, squared_relu_mlp
from lantrain.model.kv_cache import KVCache
from lantrain.model.loss import SOFTCAP, softcap_cross_entropy, token_losses

VOCAB_MULTIPLE = 64
ROTARY_BASE = 100000
SMEAR_CHANNELS = 24
VALUE_GATE_CHANNELS = 12
WINDOW_TILE = 128


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a model; the fields are those of nanochat's model_config."""

    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = "SSSL"

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head or self.n_head % self.n_kv_head:
            raise ValueError("n_embd must be a multiple of n_head, and n_head of n_kv_head")
        if not self.window_pattern or set(self.window_pattern.upper()) - set("SL"):
            raise ValueError(f"window_pattern {self.window_pattern!r}: only the letters S and L")

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding tables and the head."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def windows(self) -> list[int]:
        """Tokens that a query sees to its left, by layer: sequence_len for L, a quarter (in tiles of 128) for S."""
        short = -(-self.sequence_len // 4 // WINDOW_TILE) * WINDOW_TILE
        letters = [self.window_pattern.upper()[i % len(self.window_pattern)] for i in range(self.n_layer)]
        letters[-1] = "L"
        return [self.sequence_len if letter == "L" else short for letter in letters]

    def has_value_embedding(self, layer: int) -> bool:
        """Every other layer, the last always among them."""
        return layer % 2 == (self.n_layer - 1) % 2


def config_for_depth(
    depth: int,
    *,
    aspect_ratio: int = 64,
    head_dim: int = 128,
    sequence_len: int,
    vocab_size: int,
    window_pattern: str = "SSSL",
) -> GPTConfig:
    """The one dial: width is depth * aspect_ratio rounded up to whole heads of head_dim channels."""
    heads = -(-depth * aspect_ratio // head_dim)
    return GPTConfig(sequence_len, vocab_size, depth, heads, heads, heads * head_dim, window_pattern)


class Linear(nn.Module):
    """x W^T without bias; the float32 weight is cast to the dtype of the activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor, casts: WeightCasts | None = None) -> Tensor:
        """(..., inputs) -> (..., outputs); with `casts` x is (N, inputs) and the weight's cast is taken from there."""
        if casts is None or self.weight.dtype == x.dtype:
            return F.linear(x, self.weight.to(x.dtype))
        return linear(x, self.weight, casts.of(self.weight, x.dtype))


@dataclass
class _Place:
    """Where the tokens of a forward pass stand."""

    batch: int
    length: int
    cos: Tensor  # (1, T, 1, D/2)
    sin: Tensor
    cache: KVCache | None
    casts: WeightCasts


class Attention(nn.Module):
    """Self-attention of one layer with rotary positions, query-key norm and an optional value embedding."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.window, self.head_dim = layer, config.windows()[layer], config.head_dim
        kv_width = config.n_kv_head * config.head_dim
        self.c_q = Linear(config.n_embd, config.n_embd)
        self.c_k = Linear(config.n_embd, kv_width)
        self.c_v = Linear(config.n_embd, kv_width)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        gated = config.has_value_embedding(layer)
        self.ve_gate = Linear(VALUE_GATE_CHANNELS, config.n_kv_head) if gated else None

    def forward(self, x: Tensor, value_embedding: Tensor | None, place: _Place) -> Tensor:
        """x (N, C) normed, N = B * T; value_embedding (N, kv_width) or None. Returns (N, C)."""
        heads, casts = (place.batch, place.length, -1, self.head_dim), place.casts
        q = rotary_norm(self.c_q(x, casts).view(heads), place.cos, place.sin).transpose(1, 2)
        k = rotary_norm(self.c_k(x, casts).view(heads), place.cos, place.sin).transpose(1, 2)
        v = self.c_v(x, casts).view(heads)
        if self.ve_gate is not None and value_embedding is not None:
            gate = 3 * torch.sigmoid(self.ve_gate(x[:, :VALUE_GATE_CHANNELS]))
            v = torch.addcmul(v, gate.view(*v.shape[:3], 1), value_embedding.view(v.shape))
        v = v.transpose(1, 2)
        if place.cache is None:
            y = normed_attention(q, k, v, self.window)
        else:
            y = cached_attention(q, *place.cache.append(self.layer, k, v), self.window)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape), casts)


class MLP(nn.Module):
    """Squared-ReLU feed-forward layer of four times the width."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor, casts: WeightCasts) -> Tensor:
        """(N, C) -> (N, C)."""
        weights = self.c_fc.weight, self.c_proj.weight
        return squared_relu_mlp(x, *weights, (casts.of(weights[0], x.dtype), casts.of(weights[1], x.dtype)))


class Block(nn.Module):
    """Attention and feed-forward, each on the normed residual."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, value_embedding: Tensor | None, place: _Place) -> Tensor:
        """(N, C) -> (N, C)."""
        x = x + self.attn(rms_norm(x), value_embedding, place)
        return x + self.mlp(rms_norm(x), place.casts)


class GPT(nn.Module):
    """The model. Parameters are float32 and uninitialised until `init_weights` or `load_state_dict`."""

    resid_lambdas: nn.Parameter
    x0_lambdas: nn.Parameter

    def __init__(self, config: GPTConfig, compute_dtype: torch.dtype = torch.float32) -> None:
        """compute_dtype: float32 or bfloat16, of activations and matmuls; weights stay float32."""
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        rows, kv_width = config.padded_vocab_size, config.n_kv_head * config.head_dim
        blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.transformer = nn.ModuleDict({"wte": Embedding(rows, config.n_embd), "h": blocks})
        self.lm_head = Linear(config.n_embd, rows)
        self.resid_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.smear_gate = Linear(SMEAR_CHANNELS, 1)
        self.smear_lambda = nn.Parameter(torch.empty(1))
        self.backout_lambda = nn.Parameter(torch.empty(1))
        gated = (layer for layer in range(config.n_layer) if config.has_value_embedding(layer))
        self.value_embeds = nn.ModuleDict({str(layer): Embedding(rows, kv_width) for layer in gated})
        self._rotary: tuple[Tensor, Tensor] | None = None  # not in the state dict; grows on demand

    @torch.no_grad()
    def init_weights(self, seed: int = 42) -> None:
        """Fill every parameter, drawing in nanochat's order: from one seed both programs get the same bits.

        A generator of its own leaves torch's global one alone.
        """
        random = torch.Generator().manual_seed(seed)
        layers, bound = self.config.n_layer, 3**0.5 * self.config.n_embd**-0.5  # uniform of std n_embd ** -0.5
        blocks, tables = self._blocks(), self.embedding_tables()
        nn.init.normal_(tables.pop("transformer.wte.weight"), std=0.8, generator=random)
        nn.init.normal_(self.lm_head.weight, std=0.001, generator=random)
        for block in blocks:
            for projection in (block.attn.c_q, block.attn.c_k, block.attn.c_v):
                nn.init.uniform_(projection.weight, -bound, bound, generator=random)
            nn.init.zeros_(block.attn.c_proj.weight)
            nn.init.uniform_(block.mlp.c_fc.weight, -bound * 0.4, bound * 0.4, generator=random)
            nn.init.zeros_(block.mlp.c_proj.weight)
        for i in range(layers):
            self.resid_lambdas[i] = 1.15 - 0.10 * i / max(layers - 1, 1)
            self.x0_lambdas[i] = 0.20 - 0.15 * i / max(layers - 1, 1)
        nn.init.zeros_(self.smear_lambda)
        nn.init.constant_(self.backout_lambda, 0.2)
        nn.init.uniform_(self.smear_gate.weight, 0.0, 0.02, generator=random)
        for table in tables.values():
            nn.init.uniform_(table, -bound, bound, generator=random)
        for block in blocks:
            if block.attn.ve_gate is not None:
                nn.init.uniform_(block.attn.ve_gate.weight, 0.0, 0.02, generator=random)

    def parameter_counts(self) -> dict[str, int]:
        """Numbers of parameters under nanochat's headings, and their total."""
        counts = dict.fromkeys(("wte", "value_embeds", "lm_head", "transformer_matrices", "scalars"), 0)
        headings = {"transformer.wte": "wte", "value_embeds": "value_embeds", "lm_head": "lm_head"}
        headings["transformer.h"] = "transformer_matrices"
        for name, parameter in self.named_parameters():
            heading = next((h for prefix, h in headings.items() if name.startswith(prefix)), "scalars")
            counts[heading] += parameter.numel()
        return counts | {"total": sum(counts.values())}

    def flops_per_token(self) -> int:
        """Forward and backward FLOPs of a token: 6 a matmul weight, 12 a visible key and channel in attention."""
        weights = sum(module.weight.numel() for module in self.modules() if isinstance(module, Linear))
        keys = sum(min(window, self.config.sequence_len) for window in self.config.windows())
        return 6 * weights + 12 * self.config.n_embd * keys

    def embedding_tables(self) -> dict[str, nn.Parameter]:
        """Token and value embedding tables by state-dict name."""
        return {
            f"{name}.weight": module.weight for name, module in self.named_modules() if isinstance(module, Embedding)
        }

    def loss(
        self,
        idx: Tensor,
        targets: Tensor,
        *,
        scale: float = 1.0,
        reduction: Literal["sum", "none"] = "sum",
        rows: EmbeddingRows | None = None,
    ) -> Tensor:
        """Cross-entropy of predicting targets (B, T) from idx (B, T), both int64; target -1 is ignored.

        "sum": scalar float32, the sum over tokens times `scale` (one over the step's global token count makes gradients
        of a mean). "none": (B, T) float32 without a graph, for evaluation. With `rows` the embedding tables
        are read through them only.
        """
        casts = WeightCasts() if rows is None else rows.casts
        hidden = self._trunk(idx, rows, None, casts)
        head, flat, vocab = self.lm_head.weight, targets.reshape(-1), self.config.vocab_size
        if reduction == "none":
            return token_losses(hidden, head, flat, vocab_size=vocab).mul_(scale).view(idx.shape)
        narrow = casts.of(head, hidden.dtype)
        return softcap_cross_entropy(
            hidden,
            head,
            flat,
            vocab_size=vocab,
            scale=scale,
            weight_cast=narrow,
            gradient_sink=casts.gradient_sink(head),
        )

    def logits(self, idx: Tensor, kv_cache: KVCache | None = None, *, last_only: bool = False) -> Tensor:
        """Softcapped logits (B, T, vocab) float32 of idx (B, T); with last_only (B, 1, vocab) of the last position.

        With a cache, idx continues the tokens already in it, and the cache moves on.
        """
        hidden = self._trunk(idx, None, kv_cache, WeightCasts()).view(*idx.shape, -1)
        if last_only:
            hidden = hidden[:, -1:]
        logits = self.lm_head(hidden)[..., : self.config.vocab_size].float()
        return SOFTCAP * torch.tanh(logits / SOFTCAP)

    def _trunk(self, idx: Tensor, rows: EmbeddingRows | None, cache: KVCache | None, casts: WeightCasts) -> Tensor:
        """Final normed hidden state (B * T, C) in the compute dtype."""
        batch, length = idx.shape
        cos, sin = self._rotary_tables(0 if cache is None else cache.position, length)
        place = _Place(batch, length, cos, sin, cache, casts)
        flat = idx.reshape(-1) if rows is None else rows.positions(idx.reshape(-1))

        x = rms_norm(self._embed("transformer.wte.weight", flat, rows))
        x = self._smear(x.view(batch, length, -1), cache).reshape(batch * length, -1)
        x0, middle = x, x
        for layer, block in enumerate(self._blocks()):
            x = residual_mix(x, x0, self.resid_lambdas[layer], self.x0_lambdas[layer])
            gated = self.config.has_value_embedding(layer)
            x = block(x, self._embed(f"value_embeds.{layer}.weight", flat, rows) if gated else None, place)
            if layer == self.config.n_layer // 2:
                middle = x
        if cache is not None:
            cache.advance(length)
        return rms_norm(x - self.backout_lambda.to(x.dtype) * middle)

    def _blocks(self) -> list[Block]:
        return [block for block in self.transformer["h"].children() if isinstance(block, Block)]

    def _embed(self, table: str, flat: Tensor, rows: EmbeddingRows | None) -> Tensor:
        """(N, width) in the compute dtype: a table's rows by token, or the gathered rows by their place."""
        weight = self.get_parameter(table) if rows is None else rows.rows[table]
        return F.embedding(flat, weight).to(self.compute_dtype)

    def _smear(self, x: Tensor, cache: KVCache | None) -> Tensor:
        """Mix the previous token's embedding into each, (B, T, C); with a cache also across its end."""
        previous = None if cache is None else cache.previous_embedding
        if cache is not None:
            cache.previous_embedding = x[:, -1:]
        if previous is not None:
            x = torch.cat([previous, x], dim=1)
        gate = self.smear_lambda.to(x.dtype) * torch.sigmoid(self.smear_gate(x[:, 1:, :SMEAR_CHANNELS]))
        x = smear(x, gate)
        return x if previous is None else x[:, 1:]

    def _rotary_tables(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (1, T, 1, D/2) of positions start .. start + length, computed in float32."""
        end, half = start + length, self.config.head_dim // 2
        if self._rotary is None or self._rotary[0].size(1) < end:
            positions = torch.arange(max(end, self.config.sequence_len), dtype=torch.float32)
            channels = torch.arange(0, 2 * half, 2, dtype=torch.float32)
            angles = torch.outer(positions, 1.0 / (ROTARY_BASE ** (channels / self.config.head_dim)))
            angles = angles[None, :, None, :]
            self._rotary = angles.cos().to(self.compute_dtype), angles.sin().to(self.compute_dtype)
        cos, sin = self._rotary
        return cos[:, start:end], sin[:, start:end]
