"""Shared material: documents of mixed length, shards with odd row groups, a small real tokenizer, a nanochat."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lantrain.data.shards import ShardSet, open_shards
from lantrain.data.tokenizer import Tokenizer

# No empty word: an empty document is a row's single BOS in nanochat, and skipped here.
WORDS = ["42", "12345", "x**2", "naïve", "café", "北京", "🌍", "don't\n\n", "  def", "f(x):\n\treturn", ";", "..."]
WORDS += [a + b + c for a in ("ren", "sha", "qui", "pa") for b in ("dez", "rd", "ck", "x") for c in ("vous", "s", "ly")]


def make_documents(count: int, seed: int, longest: int = 400) -> list[str]:
    """Texts of 1 to `longest` words, many of equal length so that ties are met."""
    rng = random.Random(seed)
    sizes = (1, 2, 3, 10, 10, 40, longest)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, rng.choice(sizes)))) for _ in range(count)]


def write_shards(folder: Path, shards: Sequence[Sequence[str | None]], row_group_size: int = 100) -> Path:
    """One parquet file per list of documents."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, documents in enumerate(shards):
        table = pa.table({"text": pa.array(documents, pa.string())})
        pq.write_table(table, folder / f"shard_{i:05d}.parquet", row_group_size=row_group_size)
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(iter(make_documents(300, seed=7)), 400)


@pytest.fixture(scope="session")
def mixed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three training shards and one for validation; row groups of 137, not a multiple of the batch of 128."""
    documents = [make_documents(n, seed=n) for n in (500, 411, 137, 300)]
    return write_shards(tmp_path_factory.mktemp("mixed"), documents, row_group_size=137)


@pytest.fixture(scope="session")
def mixed(mixed_folder: Path) -> ShardSet:
    return open_shards(mixed_folder)


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[..., Path]:
    def make(*shards: Sequence[str | None], row_group_size: int = 100) -> Path:
        return write_shards(tmp_path / "shards", shards, row_group_size)

    return make


@pytest.fixture(scope="session")
def nanochat() -> Path:
    """Root of a nanochat checkout, to compare with the real thing."""
    checkout = os.environ.get("NANOCHAT_CHECKOUT")
    if not checkout:
        pytest.skip("NANOCHAT_CHECKOUT does not point at a nanochat checkout")
    return Path(checkout)
