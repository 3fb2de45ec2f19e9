"""The same step by other programs: nanochat's own model and optimizer, and a Llama of Hugging Face transformers.

Neither is a dependency: nanochat is a checkout on the path, transformers is installed by hand (INSTALL). Rows, their
length, the micro-batches, depth, width, heads and vocabulary are those of `train_step.py`; so are nanochat's windows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from benchmarks.measuring import RATES, SHAPES, VOCAB, median_seconds, peak_megabytes, process_age, token_rows

PEERS = ("nanochat-eager", "nanochat-compiled", "llama-eager", "llama-compiled")
INSTALL = "transformers is not installed, its Llama is left out; to measure it: pip install transformers"


def measure_peer(peer: str, depth: int, dtype_name: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Figures of one of PEERS, in this process."""
    import torch

    program, way = peer.split("-")
    make = {"nanochat": _nanochat, "llama": _llama}[program]
    began = process_age()
    step, flops = make(depth, dtype_name, tokens, way == "compiled")
    ready = process_age()
    step()
    first = process_age()
    seconds = median_seconds(step, repeats)
    return {
        "program": f"{program}, {way}",
        "depth": depth,
        "tokens": tokens,
        "dtype": dtype_name,
        "threads": torch.get_num_threads(),
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "model_gflops": flops * tokens / seconds / 1e9,
        "peak_mb": peak_megabytes(),
        "imported_s": began,
        "ready_s": ready,
        "first_step_s": first,
    }


def _nanochat(depth: int, dtype_name: str, tokens: int, compiled: bool) -> tuple[Callable[[], None], float]:
    """A step, and the model's FLOPs a token. NANOCHAT_DTYPE says the dtype, before nanochat is imported."""
    import torch

    if not compiled:
        torch.compile = lambda *_, **__: lambda function: function  # type: ignore[assignment]
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    from lantrain.model.gpt import config_for_depth

    config = config_for_depth(depth, sequence_len=SHAPES[depth][0], vocab_size=VOCAB)
    with torch.device("meta"):
        model = GPT(GPTConfig(**vars(config)))
    model.to_empty(device="cpu")
    model.init_weights()
    optimizer = model.setup_optimizer(**RATES, weight_decay=0.1)
    run = torch.compile(model, dynamic=False) if compiled else model
    data = token_rows(depth, tokens)

    def step() -> None:
        for rows in data:
            loss = run(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            (loss / len(data)).backward()
            loss.item()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return step, model.estimate_flops()


def _llama(depth: int, dtype_name: str, tokens: int, compiled: bool) -> tuple[Callable[[], None], float]:
    """A step of transformers' LlamaForCausalLM with fused AdamW, bf16 by autocast; and the model's FLOPs a token.

    Feed-forward layers of 8/3 of the width have the matmul weights that the recipe's two matrices have; FLOPs are
    counted as in `GPT.flops_per_token`, every layer seeing the whole row.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lantrain.model.gpt import config_for_depth

    shape = config_for_depth(depth, sequence_len=SHAPES[depth][0], vocab_size=VOCAB)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=shape.n_embd, num_hidden_layers=depth, num_attention_heads=shape.n_head,
            num_key_value_heads=shape.n_head, intermediate_size=-(-shape.n_embd * 8 // 3 // 64) * 64,
            max_position_embeddings=shape.sequence_len, use_cache=False,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    run = torch.compile(model, dynamic=False) if compiled else model
    data = token_rows(depth, tokens)

    def step() -> None:
        for rows in data:
            inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            with torch.autocast("cpu", torch.bfloat16) if dtype_name == "bf16" else contextlib.nullcontext():
                loss = run(input_ids=inputs, labels=targets, shift_labels=targets).loss
            (loss / len(data)).backward()
            loss.item()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    return step, 6 * weights + 12 * shape.n_embd * depth * shape.sequence_len
