"""The command tok_train: what it prints, writes and leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lantrain.data.tokenizer import Tokenizer
from lantrain.errors import run_main
from scripts.tok_train import main
from tests.unit.data.conftest import make_documents, write_shards


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


TrainCommand = Callable[..., Done]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> TrainCommand:
    shards = [[*make_documents(400, seed=1), "a" * 5000], make_documents(50, seed=2)]
    write_shards(tmp_path / "base_data_climbmix", shards)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.delenv("NANOCHAT_DATA_DIR", raising=False)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr("sys.argv", ["tok_train", *arguments])
        with pytest.raises(SystemExit) as left:
            run_main(main)
        return Done(int(left.value.code or 0), *capsys.readouterr())

    return call


def test_trains_once_and_says_so(train: TrainCommand, tmp_path: Path) -> None:
    done = train("--vocab-size", "380")
    assert done.returncode == 0, done.stderr
    assert "380 tokens" in done.stdout
    assert "no more pairs" not in done.stdout
    path = tmp_path / "tokenizer" / "tokenizer.json"
    first = path.read_bytes()
    stamp = path.stat().st_mtime_ns
    again = train("--vocab-size", "380")
    assert "is there" in again.stdout
    assert path.stat().st_mtime_ns == stamp
    train("--vocab-size", "380", "--force")
    assert path.stat().st_mtime_ns != stamp
    assert path.read_bytes() == first


def test_learns_from_the_training_shards_alone(train: TrainCommand, tmp_path: Path) -> None:
    assert train("--vocab-size", "380", "--doc-cap", "100").returncode == 0
    texts = [text[:100] for text in [*make_documents(400, seed=1), "a" * 5000]]
    assert Tokenizer.load(tmp_path / "tokenizer").fingerprint() == Tokenizer.train(iter(texts), 380).fingerprint()


def test_max_chars_stops_after_the_document_that_exceeds_it(train: TrainCommand, tmp_path: Path) -> None:
    texts = make_documents(400, seed=1)
    limit = len(texts[0]) + len(texts[1])
    done = train("--vocab-size", "300", "--max-chars", str(limit))
    assert "read 3 documents" in done.stdout
    assert Tokenizer.load(tmp_path / "tokenizer").fingerprint() == Tokenizer.train(iter(texts[:3]), 300).fingerprint()


def test_a_small_corpus_gives_a_smaller_vocabulary(train: TrainCommand, tmp_path: Path) -> None:
    done = train()
    assert done.returncode == 0, done.stderr
    tokens = Tokenizer.load(tmp_path / "tokenizer").vocab_size
    assert f"the vocabulary is {tokens:,} tokens instead of 32,768" in done.stdout


def test_another_tokenizer_is_kept_aside(train: TrainCommand, tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    done = train("--vocab-size", "300")
    assert done.returncode == 0, done.stderr
    aside = tmp_path / f"tokenizer-{tokenizer.fingerprint()[:12]}"
    assert f"is kept in {aside}" in done.stdout
    assert Tokenizer.load(aside).fingerprint() == tokenizer.fingerprint()
    assert Tokenizer.load(tmp_path / "tokenizer").vocab_size == 300


def test_a_damaged_tokenizer_is_made_anew(train: TrainCommand, tmp_path: Path) -> None:
    assert train("--vocab-size", "300").returncode == 0
    path = tmp_path / "tokenizer" / "tokenizer.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    assert train("--vocab-size", "300").returncode == 0
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(("--vocab-size", "100"), "--vocab-size must be from 265"), (("--max-chars", "0"), "--max-chars must be from 1")],
)
def test_mistakes_are_one_line(train: TrainCommand, arguments: tuple[str, ...], expected: str) -> None:
    done = train(*arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
