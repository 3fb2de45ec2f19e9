"""The tokenizer: byte-level BPE trained by rustbpe, applied by tiktoken, in files that nanochat reads too.

`tokenizer.json` holds everything in the open (ranks, pattern, specials) and is what we read. `tokenizer.pkl` and
`token_bytes.pt` are written for nanochat. A folder that nanochat wrote has no JSON; its pickle is then read by an
unpickler that can build nothing but the four fields of a tiktoken Encoding, because a pickle may otherwise run code.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import rustbpe
import tiktoken

from lantrain.data.files import write_atomic
from lantrain.errors import UserError
from lantrain.paths import how_to_write

BOS = "<|bos|>"
# nanochat's nine, in its order: the ids follow the merges, so a base model can be fine-tuned there.
SPECIAL_TOKENS = (
    BOS,
    *(f"<|{role}_{end}|>" for role in ("user", "assistant", "python", "output") for end in ("start", "end")),
)
# GPT-4's split pattern with at most two digits a token, which suits small vocabularies (nanochat's choice).
SPLIT_PATTERN = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"\p{N}{1,2}",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s+",
    )
)
FORMAT = "lantrain-tokenizer-1"
JSON_FILE, PICKLE_FILE, BYTES_FILE = "tokenizer.json", "tokenizer.pkl", "token_bytes.pt"
_BYTE_TOKENS = 256
SMALLEST_VOCABULARY = _BYTE_TOKENS + len(SPECIAL_TOKENS)
_TRAIN_AGAIN = "python -m scripts.tok_train --force"
# tiktoken 0.14 panics ("StackOverflow" in its regex) at a run of 1,000,000 spaces; 100,000 went well.
_LONG_BLANK = re.compile(r"\s{20000}")


class Tokenizer:
    """Text to token ids and back. Ids: bytes and merges by rank, then the special tokens."""

    def __init__(
        self,
        ranks: dict[bytes, int],
        specials: dict[str, int],
        pattern: str = SPLIT_PATTERN,
        made: dict[str, Any] | None = None,
    ) -> None:
        """`made` records how it came about (shards, options), for `tok_train` to know whether to do it again.

        Raises UserError when the parts do not make a usable tokenizer (no BOS, missing bytes, clashing ids).
        """
        _check_parts(ranks, specials)
        self.ranks, self.specials, self.pattern, self.made = ranks, specials, pattern, made or {}
        try:
            self._encoding = tiktoken.Encoding(
                name="rustbpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"tiktoken refuses the tokenizer: {error}", _TRAIN_AGAIN) from error
        self.vocab_size: int = self._encoding.n_vocab
        self.bos_id: int = specials[BOS]

    @classmethod
    def train(cls, texts: Iterator[str], vocab_size: int = 32768, made: dict[str, Any] | None = None) -> Tokenizer:
        """Learn merges from `texts`; fewer than asked for when the texts have no more pairs to merge.

        Deterministic in the texts and their order. Raises UserError when `vocab_size` is below 256 + 9.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise UserError(f"vocab-size {vocab_size} is too small", f"the smallest is {SMALLEST_VOCABULARY}")
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(texts, vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
        ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
        specials = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        return cls(ranks, specials, made=made)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no BOS; text that looks like a special token is ordinary text."""
        ids: list[int] = []
        for part in _cut_long_blanks(text):
            ids.extend(self._encoding.encode_ordinary(part))
        return ids

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        """Token ids of each text with BOS in front; tiktoken leaves the GIL, so threads do run side by side."""
        if threads > 1 and len(texts) > 1:
            with ThreadPoolExecutor(threads) as pool:
                return list(pool.map(self._encode_document, texts))
        return [self._encode_document(text) for text in texts]

    def _encode_document(self, text: str) -> list[int]:
        return [self.bos_id, *self.encode(text)]

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; bytes that are no valid UTF-8 become U+FFFD. Raises KeyError for an unknown id."""
        return self._encoding.decode(ids)

    def token_bytes(self) -> np.ndarray:
        """Bytes that each token stands for, int32 (vocab_size,); 0 for specials, so bits per byte ignores them."""
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for token, rank in self.ranks.items():
            lengths[rank] = len(token)
        return lengths

    def fingerprint(self) -> str:
        """SHA-256 (hex) over ranks, pattern and specials: equal exactly when any text gets the same ids."""
        digest = hashlib.sha256(json.dumps([self.pattern, sorted(self.specials.items())]).encode())
        for token, rank in sorted(self.ranks.items(), key=lambda item: item[1]):
            digest.update(f"\n{rank}:{token.hex()}".encode())
        return digest.hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write the three files. The JSON is the marker: it goes first and comes back last, so no half is read.

        Raises UserError when the folder cannot be written.
        """
        import torch  # only here: reading a tokenizer must not cost torch's import

        folder = Path(folder)
        pickled = pickle.dumps(self._encoding, protocol=4)
        lengths = io.BytesIO()
        torch.save(torch.from_numpy(self.token_bytes()), lengths)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / JSON_FILE).unlink(missing_ok=True)
            write_atomic(folder / PICKLE_FILE, pickled)
            write_atomic(folder / BYTES_FILE, lengths.getvalue())
            write_atomic(folder / JSON_FILE, self._to_json(hashlib.sha256(pickled).hexdigest()))
        except OSError as error:
            raise UserError(
                f"cannot write the tokenizer to {folder}: {error.strerror}", how_to_write(error, folder)
            ) from error

    def _to_json(self, pickle_sha256: str) -> bytes:
        by_rank = sorted(self.ranks.items(), key=lambda item: item[1])
        record = {
            "format": FORMAT,
            "fingerprint": self.fingerprint(),
            "made": self.made,
            "pickle_sha256": pickle_sha256,
            "pattern": self.pattern,
            "specials": self.specials,
            "ranks_base64": {base64.b64encode(token).decode(): rank for token, rank in by_rank},
        }
        return (json.dumps(record, indent=0) + "\n").encode()

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read `tokenizer.json`, or where there is none (nanochat wrote the folder) `tokenizer.pkl`, safely.

        Raises UserError when there is no tokenizer, when a file is damaged, or when the two files disagree.
        """
        folder = Path(folder)
        try:
            if (folder / JSON_FILE).exists():
                return cls._from_json(folder)
            if (folder / PICKLE_FILE).exists():
                return cls._from_pickle(folder / PICKLE_FILE)
        except OSError as error:
            raise UserError(f"cannot read the tokenizer in {folder}: {error.strerror}", _TRAIN_AGAIN) from error
        raise UserError(f"no tokenizer in {folder}", "python -m scripts.tok_train")

    @classmethod
    def _from_json(cls, folder: Path) -> Tokenizer:
        path = folder / JSON_FILE
        try:
            record = json.loads(path.read_bytes())
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']!r}, expected {FORMAT!r}")
            ranks = {base64.b64decode(token, validate=True): int(r) for token, r in record["ranks_base64"].items()}
            tokenizer = cls(ranks, dict(record["specials"]), record["pattern"], record["made"])
            if tokenizer.fingerprint() != record["fingerprint"]:
                raise ValueError("the contents do not match the fingerprint")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged: {error!r}", _TRAIN_AGAIN) from error
        pickle_path = folder / PICKLE_FILE
        if pickle_path.exists() and hashlib.sha256(pickle_path.read_bytes()).hexdigest() != record["pickle_sha256"]:
            # nanochat's tok_train rewrites the pickle only. The same tokenizer in other pickle bytes is no harm.
            other = cls._from_pickle(pickle_path)
            if other.fingerprint() != tokenizer.fingerprint():
                raise UserError(
                    f"{path} ({tokenizer.fingerprint()[:12]}) and {pickle_path.name} ({other.fingerprint()[:12]}) "
                    "hold different tokenizers",
                    f"delete the one that you do not want, or {_TRAIN_AGAIN}",
                )
        return tokenizer

    @classmethod
    def _from_pickle(cls, path: Path) -> Tokenizer:
        try:
            fields = _EncodingUnpickler(io.BytesIO(path.read_bytes())).load().fields
            ranks, specials, pattern = fields["mergeable_ranks"], fields["special_tokens"], fields["pat_str"]
            tokenizer = cls(ranks, specials, pattern)
        except UserError:
            raise
        except Exception as error:  # a damaged pickle raises whatever its bytes happen to spell
            raise UserError(f"{path} is not a pickled tiktoken Encoding: {error!r}", _TRAIN_AGAIN) from error
        return tokenizer


def _check_parts(ranks: dict[bytes, int], specials: dict[str, int]) -> None:
    """Refuse what would only fail deep inside tiktoken or, worse, silently map two tokens to one id."""
    if not isinstance(ranks, dict) or not isinstance(specials, dict):
        raise UserError("the tokenizer's ranks or specials are not a table", _TRAIN_AGAIN)
    if not all(isinstance(t, bytes) and isinstance(r, int) for t, r in ranks.items()):
        raise UserError("the tokenizer's ranks are not bytes to integers", _TRAIN_AGAIN)
    if not all(isinstance(t, str) and isinstance(r, int) for t, r in specials.items()):
        raise UserError("the tokenizer's specials are not strings to integers", _TRAIN_AGAIN)
    if BOS not in specials:
        raise UserError(f"the tokenizer has no {BOS} token", _TRAIN_AGAIN)
    missing = sum(bytes([value]) not in ranks for value in range(_BYTE_TOKENS))
    if missing:
        raise UserError(f"the tokenizer lacks {missing} of the 256 bytes", _TRAIN_AGAIN)
    ids = [*ranks.values(), *specials.values()]
    if min(ids) < 0 or len(set(ids)) != len(ids):
        raise UserError("the tokenizer gives one id to two tokens", _TRAIN_AGAIN)


def _cut_long_blanks(text: str) -> Iterator[str]:
    """Cut gigantic runs of white space, where tiktoken's regex would overflow its stack; most texts pass whole."""
    start = 0
    if len(text) > 20000:
        for run in _LONG_BLANK.finditer(text):
            yield text[start : run.end()]
            start = run.end()
    yield text[start:] if start else text


class _EncodingFields:
    """What a pickled Encoding is turned into: its fields, nothing that acts.

    tiktoken's own `__setstate__` given a string would look up a public encoding and download it.
    """

    fields: dict[str, Any]

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"a reference to the public encoding {state!r}, not an encoding")
        self.fields = state


class _EncodingUnpickler(pickle.Unpickler):
    """Builds dicts, strings, bytes, ints and `tiktoken.core.Encoding`'s fields; any other class is refused."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) in (("tiktoken.core", "Encoding"), ("tiktoken", "Encoding")):
            return _EncodingFields
        raise pickle.UnpicklingError(f"it wants to load {module}.{name}, which a tokenizer never needs")
