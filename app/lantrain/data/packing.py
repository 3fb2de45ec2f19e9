"""Rows of T+1 tokens, packed best-fit with a BOS in front of each document: one global, resumable stream.

The order is that of nanochat's BOS-aligned best-fit loader on one rank, whatever the number of ranks here: from a
buffer of at least 1000 documents take the largest that fits the rest of the row (the oldest of equals); when none
fits, cut the shortest (again the oldest) to fill the row exactly. No padding; every row begins with BOS.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lantrain.data.documents import MAX_CHARS, SKIP_REASONS, Cursor, DocumentReader
from lantrain.data.shards import Shard, fingerprint
from lantrain.data.tokenizer import Tokenizer
from lantrain.errors import UserError

STATE_VERSION = 1
# A buffered document's key sorts by length, and among equals the oldest last: (length, -sequence number) as one
# integer, which bisect compares several times faster than a tuple.
_SEQ_BITS = 44
_SEQ_MASK = (1 << _SEQ_BITS) - 1
_CURSOR_FIELDS = ("pq_idx", "rg_idx", "offset", "epoch", "epoch_documents")


def _key(length: int, sequence: int) -> int:
    return length << _SEQ_BITS | (_SEQ_MASK - sequence)


@dataclass(frozen=True)
class StreamState:
    """A snapshot of a RowStream. Taking it copies a thousand references (20 us), no tokens."""

    scalars: dict[str, int | str]
    keys: list[int]
    documents: dict[int, np.ndarray]

    def left_out(self) -> str:
        """What was read so far and not trained on, in words; empty when that is nothing."""
        words = {"null": "null", "empty": "empty", "not_utf8": "not UTF-8", "cut": f"cut to {MAX_CHARS:,} characters"}
        counts = {reason: int(self.scalars[f"skipped_{reason}"]) for reason in SKIP_REASONS}
        return ", ".join(f"{count:,} {words[reason]}" for reason, count in counts.items() if count)

    def to_dict(self) -> dict[str, Any]:
        """Ints, strings and tensors, for torch.save and `torch.load(weights_only=True)`.

        pq_idx, rg_idx and epoch are nanochat's. Tensors: `lengths`, `sequences` int64 (D,) and `tokens` int32, the
        documents one after the other, each min(length, T+1) long.
        """
        kept = [self.documents[key] for key in self.keys]
        tokens = np.concatenate(kept) if kept else np.empty(0)
        return {
            **self.scalars,
            "lengths": torch.tensor([key >> _SEQ_BITS for key in self.keys], dtype=torch.int64),
            "sequences": torch.tensor([_SEQ_MASK - (key & _SEQ_MASK) for key in self.keys], dtype=torch.int64),
            "tokens": torch.from_numpy(tokens.astype(np.int32)),
        }


class RowStream:
    """Endless rows from `shards`; which rows depends on shards, tokenizer, `seq_len` and the two sizes alone."""

    def __init__(
        self,
        shards: Sequence[Shard],
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        buffer_size: int = 1000,
        tokenizer_batch_size: int = 128,
        threads: int = 1,
    ) -> None:
        """`seq_len` is T; rows have T+1 tokens. Raises UserError when the shards hold no rows."""
        self._shards, self._tokenizer, self._threads = tuple(shards), tokenizer, threads
        self._capacity = seq_len + 1
        self._buffer_size, self._batch_size = buffer_size, tokenizer_batch_size
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
        self._reader = DocumentReader(shards, tokenizer_batch_size)
        self._keys: list[int] = []  # sorted
        self._documents: dict[int, np.ndarray] = {}
        self._sequence = 0
        self._place = {"pq_idx": 0, "rg_idx": 0, "epoch": 1}
        self._identity: dict[str, int | str] = {
            "version": STATE_VERSION,
            "seq_len": seq_len,
            "buffer_size": buffer_size,
            "tokenizer_batch_size": tokenizer_batch_size,
            "tokenizer": tokenizer.fingerprint(),
            "shards": fingerprint(shards),
        }

    @property
    def position(self) -> dict[str, int]:
        """pq_idx, rg_idx and epoch of the newest batch read, as in nanochat's dataloader_state_dict."""
        return dict(self._place)

    @property
    def skipped(self) -> dict[str, int]:
        """Documents left out since the start of the run (null, empty, not_utf8), and those cut because gigantic."""
        return dict(self._reader.skipped)

    def next_rows(self, n: int) -> np.ndarray:
        """The next `n` rows, (n, seq_len + 1), uint16 when the vocabulary allows it, else int32.

        How the calls are split changes nothing. Raises UserError for damaged data or an epoch without documents.
        """
        rows = np.empty((n, self._capacity), dtype=self.dtype)
        for row in rows:
            self._fill(row)
        return rows

    def _fill(self, row: np.ndarray) -> None:
        position = 0
        while position < self._capacity:
            while len(self._keys) < self._buffer_size:
                self._refill()
            room = self._capacity - position
            index = bisect_right(self._keys, _key(room, 0)) - 1
            if index < 0:  # none fits: the shortest, the oldest of equals
                index = bisect_right(self._keys, _key(self._keys[0] >> _SEQ_BITS, 0)) - 1
            document = self._documents.pop(self._keys.pop(index))[:room]
            row[position : position + len(document)] = document
            position += len(document)

    def _refill(self) -> None:
        texts, self._place = self._reader.next_batch()
        for ids in self._tokenizer.encode_batch(texts, self._threads):
            key = _key(len(ids), self._sequence)
            self._sequence += 1
            self._keys.append(key)
            # The true length stays in the key: which document is shortest depends on it.
            self._documents[key] = np.array(ids[: self._capacity], dtype=self.dtype)
        self._keys.sort()  # two sorted runs nearly: 10 us for a thousand

    def state(self) -> StreamState:
        """Everything needed to continue at the next row; cheap enough for every step."""
        cursor = self._reader.cursor
        scalars: dict[str, int | str] = {
            **self._identity,
            **self._place,
            **{f"next_{name}": getattr(cursor, name) for name in _CURSOR_FIELDS},
            **{f"skipped_{reason}": count for reason, count in self._reader.skipped.items()},
            "sequence": self._sequence,
        }
        return StreamState(scalars, list(self._keys), dict(self._documents))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` (from `StreamState.to_dict`) was taken.

        Raises UserError, naming the item and both values, when it belongs to other shards, another tokenizer or
        another row length, and when it is no such state. The stream is unchanged then.
        """
        self._check_identity(state)
        try:
            cursor = Cursor(**{name: int(state[f"next_{name}"]) for name in _CURSOR_FIELDS})
            place = {name: int(state[name]) for name in ("pq_idx", "rg_idx", "epoch")}
            skipped = {reason: int(state[f"skipped_{reason}"]) for reason in SKIP_REASONS}
            sequence = int(state["sequence"])
            keys, documents = self._unpack(state)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"the saved data position is damaged: {error!r}", "resume from an older step") from error
        self._reader = DocumentReader(self._shards, self._batch_size, cursor)
        self._reader.skipped.update(skipped)
        self._place, self._sequence, self._keys, self._documents = place, sequence, keys, documents

    def _check_identity(self, state: Mapping[str, Any]) -> None:
        mends = {
            "seq_len": "resume with the same --max-seq-len",
            "tokenizer": "put the tokenizer of that run back",
            "shards": "put the shards of that run back (same files, same names)",
        }
        for item, here in self._identity.items():
            saved = state.get(item, "nothing")
            if saved != here:
                raise UserError(
                    f"cannot continue the data: {item} is {_short(saved)} in the checkpoint, {_short(here)} here",
                    mends.get(item, "resume with the version that wrote the checkpoint"),
                )

    def _unpack(self, state: Mapping[str, Any]) -> tuple[list[int], dict[int, np.ndarray]]:
        tokens = state["tokens"].numpy().astype(self.dtype)
        keys = [_key(n, s) for n, s in zip(state["lengths"].tolist(), state["sequences"].tolist(), strict=True)]
        sizes = [min(key >> _SEQ_BITS, self._capacity) for key in keys]
        if sum(sizes) != len(tokens) or keys != sorted(keys):
            raise ValueError(f"{len(tokens)} tokens for {len(keys)} documents of {sum(sizes)} tokens")
        ends = np.cumsum(sizes)
        return keys, {key: tokens[end - size : end] for key, size, end in zip(keys, sizes, ends, strict=True)}


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text
