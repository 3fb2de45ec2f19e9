"""Documents of the shards in nanochat's order: file after file, row group after row group, 128 at a time, for ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from lantrain.data.shards import COLUMN, Shard, read_batches
from lantrain.errors import UserError

# A longer document is cut here before it is tokenized: a row uses a few thousand tokens of it at most, and a
# single gigabyte-long line would otherwise hold up every rank for minutes.
MAX_CHARS = 1_000_000
SKIP_REASONS = ("null", "empty", "not_utf8", "cut")


@dataclass(frozen=True)
class Cursor:
    """Where the next batch begins: file, row group, document within it; the epoch counts from 1."""

    pq_idx: int = 0
    rg_idx: int = 0
    offset: int = 0
    epoch: int = 1
    epoch_documents: int = 0  # usable ones met in this epoch so far: none by its end is an error


class DocumentReader:
    """Endless batches of texts with an exact position.

    A batch is up to `batch_size` documents of one row group. Null, empty and undecodable documents are left out
    and counted in `skipped`; "cut" counts documents used up to MAX_CHARS characters only.
    """

    def __init__(self, shards: Sequence[Shard], batch_size: int = 128, cursor: Cursor | None = None) -> None:
        """Start at `cursor` (default: the first document). Raises UserError when the shards hold no rows."""
        if not any(shard.rows for shard in shards):
            raise UserError(f"none of the {len(shards)} shards has rows", "python -m scripts.prepare_data")
        self._shards = tuple(shards)
        self._batch_size = batch_size
        self.cursor = cursor or Cursor()
        self.skipped = dict.fromkeys(SKIP_REASONS, 0)
        self._open: Iterator[pa.Array] | None = None

    def next_batch(self) -> tuple[list[str], dict[str, int]]:
        """The usable texts of the next batch (maybe none) and its place as nanochat's pq_idx, rg_idx and epoch.

        Raises UserError for damaged data, and after an epoch in which no document was usable.
        """
        array = self._next_array()
        texts = self._usable(array)
        at = self.cursor
        self.cursor = replace(at, offset=at.offset + len(array), epoch_documents=at.epoch_documents + len(texts))
        return texts, {"pq_idx": at.pq_idx, "rg_idx": at.rg_idx, "epoch": at.epoch}

    def _next_array(self) -> pa.Array:
        """The next non-empty slice of a row group; moves the cursor over ends of row groups, files and epochs."""
        while True:
            at = self.cursor
            if at.pq_idx >= len(self._shards):
                if not at.epoch_documents:
                    raise self._nothing_usable()
                self.cursor = Cursor(epoch=at.epoch + 1)
                continue
            shard = self._shards[at.pq_idx]
            if at.rg_idx >= len(shard.row_groups):
                self.cursor = replace(at, pq_idx=at.pq_idx + 1, rg_idx=0, offset=0)
                continue
            if self._open is None:
                self._open = read_batches(shard, at.rg_idx, self._batch_size, at.offset, MAX_CHARS + 1)
            array = next(self._open, None)
            if array is not None:
                return array
            self._open = None
            self.cursor = replace(at, rg_idx=at.rg_idx + 1, offset=0)

    def _usable(self, array: pa.Array) -> list[str]:
        try:
            candidates: list[str | bytes | None] = array.to_pylist()
        except UnicodeDecodeError:
            candidates = [_decoded(raw) for raw in array.cast(pa.large_binary()).to_pylist()]
        texts = []
        for text in candidates:
            if text is None:
                self.skipped["null"] += 1
            elif isinstance(text, bytes):
                self.skipped["not_utf8"] += 1
            elif not text:
                self.skipped["empty"] += 1
            else:
                self.skipped["cut"] += len(text) > MAX_CHARS
                texts.append(text[:MAX_CHARS])
        return texts

    def _nothing_usable(self) -> UserError:
        names = f"{self._shards[0].path} .. {self._shards[-1].name}"
        counts = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items() if count)
        return UserError(
            f"{names}, all row groups, column '{COLUMN}': a whole epoch gave no document ({counts or 'no rows'})",
            "python -m scripts.prepare_data into another folder",
        )


def _decoded(raw: bytes | None) -> str | bytes | None:
    """Bytes that are no UTF-8 stay bytes."""
    try:
        return None if raw is None else raw.decode()
    except UnicodeDecodeError:
        return raw


def iterate_once(shards: Sequence[Shard]) -> Iterator[list[str]]:
    """Batches of usable texts of one epoch."""
    reader = DocumentReader(shards)
    while True:
        texts, place = reader.next_batch()
        if place["epoch"] > 1:
            return
        yield texts
