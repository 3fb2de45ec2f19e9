"""One small corpus and tokenizer for all runs of a session, copied where a test changes it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lantrain.data.tokenizer import Tokenizer

VOCABULARY = 512


def _documents(seed: int, count: int) -> list[str]:
    """Sentences of a little grammar, of very unequal length, so that packing has something to decide."""
    words = random.Random(0)
    lexicon = ["".join(words.choices("abcdefghijklmnop", k=words.randint(2, 9))) for _ in range(400)]
    draw = random.Random(seed)
    return [" ".join(draw.choices(lexicon, k=draw.randint(1, 120))) + "." for _ in range(count)]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory with three shards and a tokenizer; read-only by agreement."""
    base = tmp_path_factory.mktemp("corpus")
    data = base / "base_data_climbmix"
    data.mkdir()
    for index in range(3):
        table = pa.table({"text": _documents(index, 900)})
        pq.write_table(table, data / f"shard_{index:05d}.parquet", row_group_size=200)
    texts = (text for index in range(2) for text in _documents(index, 900))
    Tokenizer.train(texts, VOCABULARY).save(base / "tokenizer")
    return base


@pytest.fixture
def base(corpus: Path, tmp_path: Path) -> Path:
    """A base directory of the test's own."""
    shutil.copytree(corpus, tmp_path / "base", ignore=shutil.ignore_patterns("base_checkpoints"))
    return tmp_path / "base"
