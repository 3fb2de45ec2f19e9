"""Runs inside a process of its own with nanochat on its path; prints one JSON line. Not a test module."""

from __future__ import annotations

import json
import sys
from typing import Any


def rows(tokenizer_dir: str, seq_len: int, count: int, split: str) -> dict[str, Any]:
    """`count` rows of nanochat's loader, and its position after each."""
    from nanochat.dataloader import tokenizing_distributed_data_loader_with_state_bos_bestfit
    from nanochat.tokenizer import RustBPETokenizer

    loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(
        RustBPETokenizer.from_directory(tokenizer_dir),
        1,
        seq_len,
        split,
        device="cpu",
    )
    out, positions = [], []
    for _ in range(count):
        inputs, targets, position = next(loader)
        out.append([*inputs[0].tolist(), targets[0, -1].item()])
        positions.append(position)
    return {"rows": out, "positions": positions}


def encode(tokenizer_dir: str, texts: list[str]) -> dict[str, Any]:
    """Ids of the texts by the tokenizer in a folder, and what nanochat knows of it."""
    from nanochat.tokenizer import RustBPETokenizer, get_token_bytes

    tokenizer = RustBPETokenizer.from_directory(tokenizer_dir)
    return {
        "ids": [tokenizer.encode(text, prepend="<|bos|>") for text in texts],
        "vocab_size": tokenizer.get_vocab_size(),
        "bos": tokenizer.get_bos_token_id(),
        "specials": sorted(tokenizer.get_special_tokens()),
        "token_bytes": get_token_bytes().tolist(),
    }


def train(tokenizer_dir: str, texts: list[str], vocab_size: int) -> dict[str, Any]:
    """Train and save a tokenizer as nanochat does."""
    from nanochat.tokenizer import RustBPETokenizer

    tokenizer = RustBPETokenizer.train_from_iterator(iter(texts), vocab_size)
    tokenizer.save(tokenizer_dir)
    return {"ids": [tokenizer.encode(text, prepend="<|bos|>") for text in texts]}


if __name__ == "__main__":
    request = json.load(sys.stdin)
    answer = {"rows": rows, "encode": encode, "train": train}[request.pop("do")](**request)
    print("\n" + json.dumps(answer))
