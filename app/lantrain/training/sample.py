"""Text from a trained model."""

from __future__ import annotations

import re
from pathlib import Path

from lantrain import paths
from lantrain.data.tokenizer import Tokenizer
from lantrain.errors import UserError
from lantrain.model.gpt import GPT, GPTConfig
from lantrain.training.checkpoint import CheckpointError, complete_steps, load_model
from lantrain.training.generate import generate


def complete(
    model: GPT, tokenizer: Tokenizer, prompt: str, *, max_tokens: int, temperature: float, top_k: int | None = None,
    seed: int = 42,
) -> str:  # fmt: skip
    """`prompt` and what the model makes of it: up to `max_tokens` tokens, ending early at a new document."""
    tokens = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    made: list[int] = []
    for token in generate(model, tokens, max_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed):
        if token == tokenizer.bos_id:
            break
        made.append(token)
    return prompt + tokenizer.decode(made)


def newest_tag(root: Path) -> str:
    """Name of the deepest model `d<N>` under `root`, as nanochat chooses, else the one written last.

    Raises CheckpointError when there is none.
    """
    tags = [path for path in root.iterdir() if path.is_dir() and any(path.glob("model_*.pt"))] if root.is_dir() else []
    if not tags:
        raise CheckpointError(f"no checkpoints under {root}", "train first: make demo, or make up")
    depths = [(int(match[1]), path.name) for path in tags if (match := re.fullmatch(r"d(\d+)", path.name))]
    return max(depths)[1] if depths else max(tags, key=lambda path: path.stat().st_mtime).name


def load_for_sampling(tag: str | None, step: int | None) -> tuple[GPT, Tokenizer, str]:
    """Model, tokenizer and a line that says which model it is. Raises UserError when something is missing."""
    root = paths.base_dir() / "base_checkpoints"
    tag = tag or newest_tag(root)
    tokenizer = Tokenizer.load(paths.tokenizer_dir())
    found, weights, meta = load_model(root / tag, step)
    try:
        model = GPT(GPTConfig(**meta["model_config"]))
        model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"the model of {root / tag} does not fit: {str(error).splitlines()[0]}") from None
    if tokenizer.vocab_size != model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.config.vocab_size}",
            "put back the tokenizer that the model was trained with",
        )
    kind = "complete" if found in complete_steps(root / tag) else "without our marker"
    return model.eval(), tokenizer, f"{tag}, step {found} ({kind}), val bpb {meta.get('val_bpb')}"
