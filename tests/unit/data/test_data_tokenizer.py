from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

from lantrain.data.tokenizer import BYTES_FILE, JSON_FILE, PICKLE_FILE, SPECIAL_TOKENS, Tokenizer
from lantrain.errors import UserError
from tests.unit.data.conftest import make_documents

TEXTS = ["", "a", "Hello <|bos|> world", "don't 12345\r\n\tx  ", "北京 🌍 naïve", *make_documents(50, seed=11)]


def test_round_trip(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_specials_follow_the_merges(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 400
    assert tokenizer.specials == {name: 391 + i for i, name in enumerate(SPECIAL_TOKENS)}
    assert tokenizer.bos_id == 391
    assert SPECIAL_TOKENS[:3] == ("<|bos|>", "<|user_start|>", "<|user_end|>")


def test_special_text_in_a_document_is_ordinary_text(tokenizer: Tokenizer) -> None:
    for name in SPECIAL_TOKENS:
        ids = tokenizer.encode(f"x {name} y")
        assert max(ids) < tokenizer.bos_id
        assert tokenizer.decode(ids) == f"x {name} y"


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_have_bos_in_front(tokenizer: Tokenizer, threads: int) -> None:
    assert tokenizer.encode_batch(TEXTS, threads) == [[tokenizer.bos_id, *tokenizer.encode(t)] for t in TEXTS]


def test_encodes_as_tiktoken_does(tokenizer: Tokenizer) -> None:
    reference = tiktoken.Encoding(
        "reference", pat_str=tokenizer.pattern, mergeable_ranks=tokenizer.ranks, special_tokens={}
    )
    for text in [*TEXTS, "x" * 50_000, " " * 15_000 + "y"]:
        assert tokenizer.encode(text) == reference.encode_ordinary(text)


@pytest.mark.parametrize("text", [" " * 1_000_000, "x" + "\n " * 500_000 + "y", "\t" * 999_999 + "z", "é" * 1_000_000])
def test_gigantic_runs_do_not_overflow_the_regex(tokenizer: Tokenizer, text: str) -> None:
    """tiktoken 0.14 panics on the first of these."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_token_bytes(tokenizer: Tokenizer) -> None:
    lengths = tokenizer.token_bytes()
    assert lengths.dtype == np.int32
    assert lengths.shape == (400,)
    assert (lengths[391:] == 0).all()
    for text in TEXTS:
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_training_is_deterministic_and_small_corpora_give_fewer_merges() -> None:
    texts = make_documents(60, seed=5)
    first, second = Tokenizer.train(iter(texts), 32768), Tokenizer.train(iter(texts), 32768)
    assert first.fingerprint() == second.fingerprint()
    assert 265 < first.vocab_size < 32768
    assert first.bos_id == first.vocab_size - 9
    assert Tokenizer.train(iter([]), 32768).vocab_size == 265


def test_vocabulary_too_small() -> None:
    with pytest.raises(UserError, match="the smallest is 265"):
        Tokenizer.train(iter(["x"]), 264)


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.made = {"vocab_size": 400}
    tokenizer.save(tmp_path / "tok")
    loaded = Tokenizer.load(tmp_path / "tok")
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert loaded.made == {"vocab_size": 400}
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert sorted(p.name for p in (tmp_path / "tok").iterdir()) == [BYTES_FILE, JSON_FILE, PICKLE_FILE]
    stored = torch.load(tmp_path / "tok" / BYTES_FILE, weights_only=True)
    assert stored.dtype == torch.int32
    assert stored.tolist() == tokenizer.token_bytes().tolist()


def test_loading_from_the_pickle_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / JSON_FILE).unlink()
    assert Tokenizer.load(tmp_path).fingerprint() == tokenizer.fingerprint()


def test_fingerprint_sees_every_part(tokenizer: Tokenizer) -> None:
    swapped = dict(tokenizer.ranks)
    a, b = list(swapped)[300:302]
    swapped[a], swapped[b] = swapped[b], swapped[a]
    others = [
        Tokenizer(swapped, tokenizer.specials),
        Tokenizer(tokenizer.ranks, {**tokenizer.specials, "<|more|>": 400}),
        Tokenizer(tokenizer.ranks, tokenizer.specials, pattern=r"\s+|\S+"),
    ]
    assert len({t.fingerprint() for t in [tokenizer, *others]}) == 4


class Malicious:
    """The classic: unpickling it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def test_a_malicious_pickle_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    trace = tmp_path / "it ran"
    bait = {"mergeable_ranks": tokenizer.ranks, "extra": Malicious(f"touch '{trace}'")}
    (tmp_path / PICKLE_FILE).write_bytes(pickle.dumps(bait))
    with pytest.raises(UserError, match=r"wants to load (posix|nt)\.system"):
        Tokenizer.load(tmp_path)
    assert not trace.exists()


def test_a_pickle_that_refers_to_a_public_encoding_downloads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reference:
        def __reduce__(self) -> tuple[object, ...]:
            return object.__new__, (tiktoken.Encoding,), "cl100k_base"

    def no_network(*args: object) -> None:
        raise AssertionError("asked for the network")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    # What tiktoken itself writes for a registered encoding: NEWOBJ and a name as state.
    raw = b"\x80\x04ctiktoken.core\nEncoding\n)\x81X\x0b\x00\x00\x00cl100k_baseb."
    (tmp_path / PICKLE_FILE).write_bytes(raw)
    with pytest.raises(UserError, match="public encoding 'cl100k_base'"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps([1, 2])])
def test_a_damaged_pickle(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / PICKLE_FILE).write_bytes(raw)
    with pytest.raises(UserError, match=r"tokenizer\.pkl is not a pickled tiktoken Encoding"):
        Tokenizer.load(tmp_path)


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python -m scripts\.tok_train"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw.replace(b"lantrain-tokenizer-1", b"lantrain-tokenizer-9"),
        lambda raw: raw.replace(b'"<|bos|>"', b'"<|BOS|>"'),
        lambda raw: json.dumps({**json.loads(raw), "pattern": "."}).encode(),
        lambda raw: json.dumps({**json.loads(raw), "ranks_base64": {"YQ==": 0}}).encode(),
        lambda raw: b"[]",
    ],
)
def test_a_damaged_json_is_not_used(tokenizer: Tokenizer, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / JSON_FILE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.mend == "python -m scripts.tok_train --force"


def test_a_newer_pickle_beside_our_json_is_noticed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """nanochat's tok_train rewrites tokenizer.pkl only: training on with the JSON would mix two vocabularies."""
    tokenizer.save(tmp_path)
    other = Tokenizer.train(iter(make_documents(30, seed=1)), 300)
    other.save(tmp_path / "other")
    (tmp_path / PICKLE_FILE).write_bytes((tmp_path / "other" / PICKLE_FILE).read_bytes())
    with pytest.raises(UserError, match="hold different tokenizers"):
        Tokenizer.load(tmp_path)


def test_the_same_tokenizer_in_other_pickle_bytes_is_no_harm(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    encoding = tiktoken.Encoding(
        "rustbpe", pat_str=tokenizer.pattern, mergeable_ranks=tokenizer.ranks, special_tokens=tokenizer.specials
    )
    (tmp_path / PICKLE_FILE).write_bytes(pickle.dumps(encoding, protocol=5))
    assert Tokenizer.load(tmp_path).fingerprint() == tokenizer.fingerprint()


def test_no_half_tokenizer_is_left_when_the_folder_is_full(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A name taken by a folder makes the second of the three writes fail, as a full disk would."""
    tokenizer.save(tmp_path)
    (tmp_path / BYTES_FILE).unlink()
    (tmp_path / BYTES_FILE).mkdir()
    (tmp_path / BYTES_FILE / "x").write_text("")
    with pytest.raises(UserError, match="cannot write the tokenizer"):
        tokenizer.save(tmp_path)
    assert not (tmp_path / JSON_FILE).exists()
    assert not list(tmp_path.glob(".*"))
    assert Tokenizer.load(tmp_path).fingerprint() == tokenizer.fingerprint()
