"""Interoperation with a real nanochat: the same rows, the same ids, each other's files. Needs NANOCHAT_CHECKOUT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantrain.data.packing import RowStream
from lantrain.data.shards import open_shards
from lantrain.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from tests.unit.data.conftest import make_documents, write_shards

Ask = Callable[..., dict[str, Any]]
TEXTS = ["", "Hello world!", "don't <|bos|> 1234 北京 🌍\r\n  x", *make_documents(40, seed=3)]


@pytest.fixture
def ask(nanochat: Path, tmp_path: Path) -> Ask:
    """Ask nanochat, which keeps its shards and tokenizer under tmp_path / base."""
    base = tmp_path / "base"

    def call(**request: Any) -> dict[str, Any]:
        environment = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "PYTHONPATH": str(nanochat)}
        peer = Path(__file__).with_name("nanochat_peer.py")
        done = subprocess.run(
            [sys.executable, str(peer)], input=json.dumps(request), env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return call


@pytest.mark.parametrize(
    ("row_group_size", "seq_len", "split", "longest"),
    [(137, 96, "train", 400), (1000, 512, "train", 2000), (50, 64, "val", 400)],
)
def test_rows_are_nanochats(
    ask: Ask, tmp_path: Path, tokenizer: Tokenizer, row_group_size: int, seq_len: int, split: str, longest: int
) -> None:
    """Hundreds of rows over several files and, the data being small, several epochs."""
    documents = [make_documents(n, seed=n, longest=longest) for n in (500, 411, 60, 300)]
    folder = write_shards(tmp_path / "base" / "base_data_climbmix", documents, row_group_size)
    tokenizer.save(tmp_path / "tokenizer")
    theirs = ask(do="rows", tokenizer_dir=str(tmp_path / "tokenizer"), seq_len=seq_len, count=600, split=split)
    stream = RowStream(getattr(open_shards(folder), split), tokenizer, seq_len)
    positions = []
    ours = []
    for _ in range(600):
        ours.append(stream.next_rows(1)[0])
        positions.append(stream.position)
    np.testing.assert_array_equal(np.stack(ours), np.array(theirs["rows"]))
    assert positions == theirs["positions"]
    assert positions[-1]["epoch"] > 1


def test_nanochat_reads_our_tokenizer(ask: Ask, tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "base" / "tokenizer"
    tokenizer.save(folder)
    theirs = ask(do="encode", tokenizer_dir=str(folder), texts=TEXTS)
    assert theirs["ids"] == tokenizer.encode_batch(TEXTS)
    assert (theirs["vocab_size"], theirs["bos"]) == (tokenizer.vocab_size, tokenizer.bos_id)
    assert theirs["specials"] == sorted(SPECIAL_TOKENS)
    assert theirs["token_bytes"] == tokenizer.token_bytes().tolist()


def test_we_read_nanochats_tokenizer(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    theirs = ask(do="train", tokenizer_dir=str(folder), texts=TEXTS, vocab_size=400)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode_batch(TEXTS) == theirs["ids"]
    assert tokenizer.fingerprint() == Tokenizer.train(iter(TEXTS), 400).fingerprint()
