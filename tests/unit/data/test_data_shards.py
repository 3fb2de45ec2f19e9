from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lantrain.data.documents import MAX_CHARS, Cursor, DocumentReader, iterate_once
from lantrain.data.shards import open_shard, open_shards
from lantrain.errors import UserError
from tests.unit.data.conftest import make_documents, write_shards

Folder = Callable[..., Path]
GOOD = ["one", "two", "three"]


def complaint(folder: Path) -> str:
    """The one line that a user sees."""
    with pytest.raises(UserError) as caught:
        open_shards(folder)
    line = str(caught.value)
    assert "\n" not in line
    assert caught.value.mend
    return line


def test_last_file_in_name_order_is_validation(folder_of: Folder) -> None:
    folder = folder_of(GOOD, GOOD[:2], GOOD[:1], row_group_size=2)
    (folder / "shard_00009.parquet.tmp").write_bytes(b"half")
    (folder / "._shard_00009.parquet").write_bytes(b"what macOS leaves on a share")
    (folder / "notes.txt").write_text("x")
    shards = open_shards(folder)
    assert [s.name for s in shards.train] == ["shard_00000.parquet", "shard_00001.parquet"]
    assert [s.name for s in shards.val] == ["shard_00002.parquet"]
    assert shards.train[0].row_groups == (2, 1)
    assert "3 shards (2 train, 1 validation), 6 documents" in shards.summary()


def test_missing_empty_and_unreadable_folders(tmp_path: Path) -> None:
    assert f"no folder {tmp_path / 'none'}" in complaint(tmp_path / "none")
    assert "scripts.prepare_data" in complaint(tmp_path)
    (tmp_path / "file").write_text("x")
    assert "Not a directory" in complaint(tmp_path / "file")


@contextmanager
def an_ordinary_user() -> Iterator[None]:
    """Root may read any folder, and is who runs the tests on CI."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_folder_and_a_file_of_another_user() -> None:
    # pytest's own folders let nobody else in.
    with tempfile.TemporaryDirectory() as name:
        folder = write_shards(Path(name) / "shards", [GOOD, GOOD])
        folder.parent.chmod(0o755)
        shard = folder / "shard_00001.parquet"
        with an_ordinary_user():
            assert len(open_shards(folder).train) == 1
        shard.chmod(0)
        with an_ordinary_user():
            line = complaint(folder)
        assert f"{shard}, all row groups, column 'text': cannot be read: " in line
        assert "Permission denied" in line
        folder.chmod(0)
        with an_ordinary_user():
            assert f"cannot read the folder {folder}: Permission denied (check its owner and mode)" == complaint(folder)
        folder.chmod(0o755)


def test_one_shard_only(folder_of: Folder) -> None:
    line = complaint(folder_of(GOOD))
    assert "only one shard" in line
    assert "python -m scripts.prepare_data" in line


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda raw: raw[: len(raw) // 2], "truncated at"),
        (lambda raw: raw[:-3], "truncated at"),
        (lambda raw: b"", "the file is empty (0 bytes)"),
        (lambda raw: b"<!DOCTYPE html><title>404</title>", "not a parquet file"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (lambda raw: raw[:-8] + b"\xff\xff\xff\x7fPAR1", "truncated at"),
        (lambda raw: raw[:-60] + b"\xff" * 52 + raw[-8:], "cannot be read"),
        # The footer is whole, the data before it is gone.
        (lambda raw: b"PAR1" + raw[-8 - int.from_bytes(raw[-8:-4], "little") :], "outside the file"),
    ],
)
def test_damaged_files_are_found_before_step_0(
    folder_of: Folder, damage: Callable[[bytes], bytes], expected: str
) -> None:
    folder = folder_of(make_documents(300, seed=1), GOOD)
    path = folder / "shard_00000.parquet"
    path.write_bytes(damage(path.read_bytes()))
    line = complaint(folder)
    assert expected in line
    assert str(path) in line
    assert "row group" in line
    assert "column 'text'" in line


def test_a_folder_named_like_a_shard(folder_of: Folder) -> None:
    folder = folder_of(GOOD, GOOD)
    (folder / "shard_00009.parquet").mkdir()
    assert "shard_00009.parquet" in complaint(folder)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"Text": GOOD, "id": [1, 2, 3]}, "the file has: Text, id (rename column 'Text' to 'text')"),
        ({"id": GOOD, "content": GOOD}, "the file has: id, content (rename column 'content' to 'text')"),
        ({"id": [1, 2, 3], "story": GOOD}, "rename column 'story' to 'text'"),
        ({"id": [1, 2, 3]}, "the file has: id (documents belong in"),
        ({"text": [1, 2, 3]}, "the type is int64, not string"),
        ({"text": [b"x", b"y", b"z"]}, "the type is binary, not string"),
        ({"text": [["x"], ["y"], []]}, "the type is list<"),
        ({"text": [{"text": "x"}] * 3}, "the type is struct<"),
    ],
)
def test_column_by_another_name_or_type(folder_of: Folder, columns: dict[str, list[object]], expected: str) -> None:
    folder = folder_of(GOOD, GOOD)
    pq.write_table(pa.table(columns), folder / "shard_00000.parquet")
    line = complaint(folder)
    assert expected in line
    assert f"{folder / 'shard_00000.parquet'}, all row groups, column 'text'" in line


def test_two_columns_of_that_name(folder_of: Folder) -> None:
    folder = folder_of(GOOD, GOOD)
    pq.write_table(pa.Table.from_arrays([pa.array(GOOD)] * 2, names=["text", "text"]), folder / "shard_00000.parquet")
    assert "2 columns of that name" in complaint(folder)


def test_shards_without_rows(folder_of: Folder) -> None:
    shards = open_shards(folder_of([], GOOD, [], GOOD))
    assert shards.empty == ("shard_00000.parquet", "shard_00002.parquet")
    assert "2 without rows passed over: shard_00000.parquet, shard_00002.parquet" in shards.summary()
    reader = DocumentReader(shards.train)
    # The index of the file is nanochat's, which counts the empty one too.
    assert reader.next_batch() == (GOOD, {"pq_idx": 1, "rg_idx": 0, "epoch": 1})
    assert reader.next_batch() == (GOOD, {"pq_idx": 1, "rg_idx": 0, "epoch": 2})


def test_no_rows_where_some_are_needed(tmp_path: Path) -> None:
    assert "none of the 2 training shards" in complaint(write_shards(tmp_path / "a", [[], [], GOOD]))
    assert "validation split and has no rows" in complaint(write_shards(tmp_path / "b", [GOOD, []]))


def test_fingerprint_tells_contents_and_names_apart(tmp_path: Path) -> None:
    a = open_shards(write_shards(tmp_path / "a", [GOOD, GOOD]))
    same = open_shards(write_shards(tmp_path / "b", [GOOD, GOOD]))
    other = open_shards(write_shards(tmp_path / "c", [["one", "two", "thre!"], GOOD]))
    assert a.fingerprint == same.fingerprint
    assert a.fingerprint != other.fingerprint
    (tmp_path / "b" / "shard_00000.parquet").rename(tmp_path / "b" / "part_00000.parquet")
    assert a.fingerprint != open_shards(tmp_path / "b").fingerprint


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_other_string_types(folder_of: Folder, kind: pa.DataType) -> None:
    folder = folder_of(GOOD, GOOD)
    pq.write_table(pa.table({"text": pa.array(GOOD).cast(kind)}), folder / "shard_00000.parquet")
    assert next(iterate_once(open_shards(folder).train)) == GOOD


def test_batches_are_slices_of_128_of_one_row_group(folder_of: Folder) -> None:
    """Also where a row group is larger than what is decoded at a time."""
    documents = [f"document {i}" for i in range(3000)]
    shards = open_shards(folder_of(documents, GOOD, row_group_size=2500))
    sizes = [len(texts) for texts in iterate_once(shards.train)]
    assert sizes == [128] * 19 + [2500 - 19 * 128] + [128] * 3 + [500 - 3 * 128]
    assert [text for texts in iterate_once(shards.train) for text in texts] == documents


def test_continues_at_any_batch(folder_of: Folder) -> None:
    documents = [f"document {i}" for i in range(2600)]
    shards = open_shards(folder_of(documents, documents[:50], GOOD, row_group_size=2000)).train
    reader = DocumentReader(shards)
    cursors, batches = [], []
    for _ in range(50):
        cursors.append(reader.cursor)
        batches.append(reader.next_batch())
    for i in random.Random(0).sample(range(50), 12):
        again = DocumentReader(shards, cursor=cursors[i])
        assert [again.next_batch() for _ in range(i, 50)] == batches[i:]


def test_null_empty_and_undecodable_documents_are_counted(folder_of: Folder) -> None:
    folder = folder_of(GOOD, GOOD)
    raw = [b"one", None, b"", b"caf\xe9", b"", b"two", b"<|bos|>"]
    broken = pa.Array.from_buffers(pa.string(), len(raw), pa.array(raw, pa.binary()).buffers())
    pq.write_table(pa.table({"text": broken}), folder / "shard_00000.parquet")
    reader = DocumentReader(open_shards(folder).train)
    assert reader.next_batch()[0] == ["one", "two", "<|bos|>"]
    assert reader.skipped == {"null": 1, "empty": 2, "not_utf8": 1, "cut": 0}


def test_gigantic_documents_are_cut(folder_of: Folder) -> None:
    documents = ["a" * MAX_CHARS, "é" * (MAX_CHARS + 1), "x" * (3 * MAX_CHARS), "short"]
    reader = DocumentReader(open_shards(folder_of(documents, GOOD)).train)
    assert reader.next_batch()[0] == [document[:MAX_CHARS] for document in documents]
    assert reader.skipped["cut"] == 2


def test_an_epoch_without_documents_is_an_error_not_a_spin(folder_of: Folder) -> None:
    folder = folder_of([None, ""] * 200, [None], GOOD)
    reader = DocumentReader(open_shards(folder).train)
    batches = [reader.next_batch()[0] for _ in range(5)]  # row groups of 100, the last file's one
    assert batches == [[]] * 5
    with pytest.raises(UserError, match=r"a whole epoch gave no document \(201 null, 200 empty\)"):
        reader.next_batch()
    with pytest.raises(UserError, match="none of the 0 shards"):
        DocumentReader([])


def test_one_usable_document_is_enough(folder_of: Folder) -> None:
    reader = DocumentReader(open_shards(folder_of([None, "", "the one"], GOOD)).train)
    assert [reader.next_batch()[0] for _ in range(3)] == [["the one"]] * 3
    assert reader.cursor == Cursor(offset=3, epoch=3, epoch_documents=1)


def test_damage_met_while_reading_names_the_row_group(folder_of: Folder) -> None:
    folder = folder_of(make_documents(300, seed=1), GOOD)
    path = folder / "shard_00000.parquet"
    chunk = pq.read_metadata(path).row_group(1).column(0)
    raw = bytearray(path.read_bytes())
    start = min(o for o in (chunk.data_page_offset, chunk.dictionary_page_offset) if o)
    raw[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(raw)
    reader = DocumentReader([open_shard(path)])
    reader.next_batch()
    with pytest.raises(UserError) as caught:
        reader.next_batch()
    assert f"{path}, row group 1, column 'text': the data is damaged" in str(caught.value)


def test_memory_stays_small_in_one_huge_row_group(folder_of: Folder) -> None:
    """400 MB of text in one row group: Arrow never holds more than a fraction of it."""
    document = "lorem ipsum dolor sit amet " * 1500
    shard = open_shards(folder_of([document] * 10_000, GOOD, row_group_size=10_000)).train
    pa.default_memory_pool().release_unused()
    before = pa.total_allocated_bytes()
    most = 0
    for texts in iterate_once(shard):
        assert texts[0] == document
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 150e6
