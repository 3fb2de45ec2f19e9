"""Parquet shards: finding them, checking every footer before step 0, and reading their documents.

A folder of `*.parquet` files with a string column `text`; the last file in name order is the validation split, as
nanochat has it. What is wrong with a file is said in one line that names file, row group and column.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lantrain.errors import UserError

COLUMN = "text"
PREPARE = "python -m scripts.prepare_data"
# Names under which other data sets keep their documents, likeliest first.
_OTHER_NAMES = ("content", "raw_content", "body", "document", "doc", "texts", "txt", "article", "passage", "sentence")
_MAGIC = b"PAR1"
_HASHED_ENDS = 1 << 16  # bytes
_READ_BUFFER = 1 << 20  # bytes; a column chunk is read in pieces of this size, never whole
_READ_ROWS = 1024  # documents decoded at a time at most
_READ_BYTES = 64 << 20  # and of these bytes at most, judged by the row group's mean


@dataclass(frozen=True)
class Shard:
    """One checked parquet file: its size, the rows of each row group, and a SHA-256 (hex) over its head and tail."""

    path: Path
    bytes: int
    row_groups: tuple[int, ...]
    digest: str

    @property
    def name(self) -> str:
        """File name without its folder."""
        return self.path.name

    @property
    def rows(self) -> int:
        """Documents in the file."""
        return sum(self.row_groups)


@dataclass(frozen=True)
class ShardSet:
    """The shards of a folder in name order. Files without rows stay in `train`, so that indices are nanochat's."""

    train: tuple[Shard, ...]
    val: tuple[Shard, ...]

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over all files, training and validation."""
        return fingerprint(self.train + self.val)

    @property
    def empty(self) -> tuple[str, ...]:
        """Names of the training files that have no rows and are passed over."""
        return tuple(shard.name for shard in self.train if not shard.rows)

    def summary(self) -> str:
        """One line for the log: files, rows, bytes, what is passed over."""
        shards = self.train + self.val
        line = (
            f"{len(shards)} shards ({len(self.train)} train, {len(self.val)} validation), "
            f"{sum(s.rows for s in shards):,} documents, {sum(s.bytes for s in shards) / 1e6:,.1f} MB"
        )
        return f"{line}; {len(self.empty)} without rows passed over: {', '.join(self.empty)}" if self.empty else line


def fingerprint(shards: Iterable[Shard]) -> str:
    """SHA-256 (hex) over names, sizes, heads and tails in order: the identity of the documents at no cost.

    The tail has the footer with the compressed size, offsets and extremes of every column chunk, so other documents
    give another fingerprint; hashing 18 GB would take a minute at every start.
    """
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{shard.name}:{shard.bytes}:{shard.digest}\n".encode())
    return digest.hexdigest()


def list_parquet(folder: Path) -> list[Path]:
    """`*.parquet` in name order; hidden files (`._x.parquet` of macOS, temporaries) are no shards.

    Raises UserError when the folder is missing, is a file, or cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        raise UserError(f"no folder {folder}", f"{PREPARE}, or set NANOCHAT_DATA_DIR") from None
    except OSError as error:
        raise UserError(f"cannot read the folder {folder}: {error.strerror}", "check its owner and mode") from error
    return [folder / name for name in sorted(names) if name.endswith(".parquet") and not name.startswith(".")]


def open_shards(data_dir: str | Path) -> ShardSet:
    """Check the footer and the column of every shard of a folder and split train from validation.

    Raises UserError, in one line that names file, row group and column, for the first thing that would fail later.
    """
    folder = Path(data_dir)
    paths = list_parquet(folder)
    if not paths:
        raise UserError(f"no parquet shard in {folder}", f"{PREPARE} --out {folder}")
    if len(paths) == 1:
        raise UserError(
            f"only one shard in {folder} ({paths[0].name}); training needs two, the last one is for validation",
            f"{PREPARE} --num-shards 2 --out {folder}, or add a second file",
        )
    shards = tuple(open_shard(path) for path in paths)
    train, val = shards[:-1], shards[-1:]
    if not val[0].rows:
        raise UserError(
            f"{where(val[0].path)}: the last file in name order is the validation split and has no rows",
            "remove it, or name a shard with rows so that it sorts last",
        )
    if not any(shard.rows for shard in train):
        raise UserError(f"none of the {len(train)} training shards in {folder} has rows", f"{PREPARE} --out {folder}")
    return ShardSet(train, val)


def open_shard(path: Path) -> Shard:
    """Check one file's frame, footer, column and row group offsets. Raises UserError."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HASHED_ENDS)
            file.seek(max(0, size - 8))
            footer = _footer_length(path, head, file.read(8), size)
            file.seek(max(0, size - max(_HASHED_ENDS, footer + 8)))
            digest = hashlib.sha256(head + file.read()).hexdigest()
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except (OSError, pa.ArrowException, ValueError) as error:
        raise UserError(f"{where(path)}: cannot be read: {_first_line(error)}", _replace(path)) from error
    _check_column(path, schema)
    _check_offsets(path, metadata, size)
    groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    return Shard(path, size, groups, digest)


def where(path: Path, row_group: int | None = None) -> str:
    """The place of a fault: file, row group (all when the whole file is meant), column."""
    group = "all row groups" if row_group is None else f"row group {row_group}"
    return f"{path}, {group}, column '{COLUMN}'"


def _replace(path: Path) -> str:
    return f"delete {path.name} and fetch it again, or {PREPARE} --out {path.parent}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _footer_length(path: Path, head: bytes, tail: bytes, size: int) -> int:
    """Length of the footer in bytes, from the file's frame `PAR1 ... footer, length, PAR1`. Raises UserError."""
    if size == 0:
        raise UserError(f"{where(path)}: the file is empty (0 bytes)", _replace(path))
    if not head.startswith(_MAGIC):
        hint = ", it is a Git LFS pointer" if head.startswith(b"version https://") else ""
        raise UserError(f"{where(path)}: not a parquet file (begins with {head[:8]!r}{hint})", _replace(path))
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or length + 12 > size:
        raise UserError(f"{where(path)}: truncated at {size:,} bytes, the parquet footer is missing", _replace(path))
    return length


def _check_column(path: Path, schema: pa.Schema) -> None:
    names = list(schema.names)
    count = names.count(COLUMN)
    if count > 1:
        raise UserError(f"{where(path)}: there are {count} columns of that name", "keep one of them")
    if count == 0:
        likely = _likely_column(schema)
        listing = ", ".join(names) or "none"
        mend = (
            f"rename column '{likely}' to '{COLUMN}'" if likely else f"documents belong in a string column '{COLUMN}'"
        )
        raise UserError(f"{where(path)}: no such column; the file has: {listing}", mend)
    kind = schema.field(COLUMN).type
    if not _is_text(kind):
        raise UserError(f"{where(path)}: the type is {kind}, not string", "store the documents as UTF-8 strings")


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _likely_column(schema: pa.Schema) -> str | None:
    """The column that most probably holds the documents: text in other letters, a usual name, the only strings."""
    by_key = {name.strip().lower(): name for name in reversed(schema.names)}
    for key in (COLUMN, *_OTHER_NAMES):
        if key in by_key:
            return by_key[key]
    strings = [field.name for field in schema if _is_text(field.type)]
    return strings[0] if len(strings) == 1 else None


def _check_offsets(path: Path, metadata: pq.FileMetaData, size: int) -> None:
    """A footer may outlive its data (files stitched or cut in the middle): column chunks must lie inside the file."""
    column = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(COLUMN)
    for group in range(metadata.num_row_groups):
        if not metadata.row_group(group).num_rows:
            continue
        chunk = metadata.row_group(group).column(column)
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
            start = min(start, chunk.dictionary_page_offset)
        if start < len(_MAGIC) or start + chunk.total_compressed_size > size:
            raise UserError(f"{where(path, group)}: its data lies outside the file ({size:,} bytes)", _replace(path))


def read_batches(shard: Shard, row_group: int, batch_size: int, skip: int, max_chars: int) -> Iterator[pa.Array]:
    """The text column of a row group from row `skip` on, in arrays of exactly `batch_size` rows, the last shorter.

    Documents are cut to `max_chars` characters before they become Python strings. Memory stays at some
    thousand documents whatever the row group's size. Raises UserError for damaged data.
    """
    held: list[pa.Array] = []
    count = 0
    for piece in _pieces(shard, row_group, max_chars):
        if skip >= len(piece):
            skip -= len(piece)
            continue
        piece = piece.slice(skip)
        skip = 0
        held.append(piece)
        count += len(piece)
        if count >= batch_size:
            whole = pa.concat_arrays(held)
            full = count // batch_size * batch_size
            yield from (whole.slice(i, batch_size) for i in range(0, full, batch_size))
            held, count = [whole.slice(full)], count - full
    if count:
        yield pa.concat_arrays(held)


def _pieces(shard: Shard, row_group: int, max_chars: int) -> Iterator[pa.Array]:
    try:
        with pq.ParquetFile(shard.path, buffer_size=_READ_BUFFER, pre_buffer=False) as file:
            group = file.metadata.row_group(row_group)
            rows = max(1, min(_READ_ROWS, _READ_BYTES * group.num_rows // max(1, group.total_byte_size)))
            for batch in file.iter_batches(rows, row_groups=[row_group], columns=[COLUMN], use_threads=False):
                texts = batch.column(0).cast(pa.large_string())
                longest = pc.max(pc.binary_length(texts)).as_py()
                yield pc.utf8_slice_codeunits(texts, 0, max_chars) if (longest or 0) > max_chars else texts
    except (OSError, pa.ArrowException, ValueError) as error:
        raise UserError(
            f"{where(shard.path, row_group)}: the data is damaged: {_first_line(error)}", _replace(shard.path)
        ) from error
