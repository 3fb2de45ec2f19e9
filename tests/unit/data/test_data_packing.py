from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lantrain.data.packing import RowStream
from lantrain.data.shards import Shard, ShardSet, open_shards
from lantrain.data.tokenizer import Tokenizer
from lantrain.errors import UserError
from tests.unit.data.conftest import make_documents, write_shards

Folder = Callable[..., Path]
T = 96


def saved(stream: RowStream) -> dict[str, Any]:
    """The state as it comes back from a checkpoint."""
    file = io.BytesIO()
    torch.save(stream.state().to_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def plain_best_fit(texts: Sequence[str], tokenizer: Tokenizer, batch: int, buffer: int, capacity: int, n: int) -> list:
    """The definition, by scanning, over one row group repeated for ever."""
    held: list[list[int]] = []
    position = 0
    rows: list[list[int]] = []
    for _ in range(n):
        row: list[int] = []
        while len(row) < capacity:
            while len(held) < buffer:
                held += tokenizer.encode_batch(list(texts[position : position + batch]))
                position = position + batch if position + batch < len(texts) else 0
            room = capacity - len(row)
            fitting = [i for i in range(len(held)) if len(held[i]) <= room]
            if fitting:
                chosen = max(fitting, key=lambda i: (len(held[i]), -i))
            else:
                chosen = min(range(len(held)), key=lambda i: (len(held[i]), i))
            row += held.pop(chosen)[:room]
        rows.append(row)
    return rows


@pytest.mark.parametrize(("buffer", "batch"), [(1, 1), (7, 3), (100, 16), (1000, 128)])
def test_rows_follow_the_definition(folder_of: Folder, tokenizer: Tokenizer, buffer: int, batch: int) -> None:
    texts = make_documents(150, seed=4)
    shards = open_shards(folder_of(texts, ["x"], row_group_size=1000))
    stream = RowStream(shards.train, tokenizer, T, buffer_size=buffer, tokenizer_batch_size=batch)
    expected = plain_best_fit(texts, tokenizer, batch, buffer, T + 1, 120)
    np.testing.assert_array_equal(stream.next_rows(120), expected)


def test_every_row_is_full_and_begins_with_bos(mixed: ShardSet, tokenizer: Tokenizer) -> None:
    rows = RowStream(mixed.train, tokenizer, T).next_rows(200)
    assert rows.shape == (200, T + 1)
    assert rows.dtype == np.uint16
    assert (rows[:, 0] == tokenizer.bos_id).all()
    assert rows.max() < tokenizer.vocab_size


def test_large_vocabularies_need_int32(mixed: ShardSet, tokenizer: Tokenizer) -> None:
    wide = Tokenizer(tokenizer.ranks, {**tokenizer.specials, "<|far|>": 70_000})
    assert RowStream(mixed.train, wide, T).next_rows(2).dtype == np.int32


@pytest.mark.parametrize("seed", range(5))
def test_how_the_calls_are_split_changes_nothing(mixed: ShardSet, tokenizer: Tokenizer, seed: int) -> None:
    whole = RowStream(mixed.train, tokenizer, T).next_rows(300)
    stream = RowStream(mixed.train, tokenizer, T, threads=1 + seed % 3)
    rng = random.Random(seed)
    parts: list[np.ndarray] = []
    while (done := sum(map(len, parts))) < 300:
        parts.append(stream.next_rows(min(rng.choice([0, 1, 2, 7, 40]), 300 - done)))
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_restores_at_any_row_over_epochs(mixed: ShardSet, tokenizer: Tokenizer) -> None:
    stream = RowStream(mixed.train, tokenizer, 48)
    rng = random.Random(1)
    states, rows, places = [], [], []
    for _ in range(1200):
        states.append(stream.state() if rng.random() < 0.02 else None)
        places.append(stream.position)
        rows.append(stream.next_rows(1)[0])
    assert stream.position["epoch"] >= 2
    taken = [i for i, state in enumerate(states) if state]
    assert len(taken) > 10
    for i in taken:
        other = RowStream(mixed.train, tokenizer, 48)
        other.next_rows(rng.randrange(3))  # whatever was read before must not matter
        state = states[i]
        assert state is not None
        other.restore(state.to_dict())
        assert other.position == places[i]
        np.testing.assert_array_equal(other.next_rows(40), np.stack((rows + list(stream_tail(stream)))[i : i + 40]))


def stream_tail(stream: RowStream) -> np.ndarray:
    """Forty rows more, without moving the stream."""
    before = stream.state().to_dict()
    tail = stream.next_rows(40)
    stream.restore(before)
    return tail


def test_the_state_survives_a_checkpoint(mixed: ShardSet, tokenizer: Tokenizer) -> None:
    stream = RowStream(mixed.train, tokenizer, T)
    stream.next_rows(17)
    state = saved(stream)
    assert all(isinstance(value, (int, str, torch.Tensor)) for value in state.values())
    assert {name: state[name] for name in ("pq_idx", "rg_idx", "epoch")} == stream.position
    other = RowStream(mixed.train, tokenizer, T)
    other.restore(state)
    np.testing.assert_array_equal(other.next_rows(100), stream.next_rows(100))
    assert other.skipped == stream.skipped


def test_a_state_is_a_snapshot(mixed: ShardSet, tokenizer: Tokenizer) -> None:
    """It may be serialised steps later, while the stream has moved on."""
    stream = RowStream(mixed.train, tokenizer, T)
    stream.next_rows(5)
    early, late = stream.state(), stream.state().to_dict()
    stream.next_rows(50)
    for name, value in early.to_dict().items():
        assert torch.equal(value, late[name]) if isinstance(value, torch.Tensor) else value == late[name]


def test_a_state_of_something_else_is_refused(tmp_path: Path, mixed: ShardSet, tokenizer: Tokenizer) -> None:
    state = saved(RowStream(mixed.train, tokenizer, T))
    with pytest.raises(UserError, match=r"seq_len is 96 in the checkpoint, 64 here .*--max-seq-len"):
        RowStream(mixed.train, tokenizer, 64).restore(state)
    other_tokenizer = Tokenizer.train(iter(["other"]), 300)
    names = f"tokenizer is {tokenizer.fingerprint()[:12]} in the checkpoint, {other_tokenizer.fingerprint()[:12]} here"
    with pytest.raises(UserError, match=names):
        RowStream(mixed.train, other_tokenizer, T).restore(state)
    with pytest.raises(UserError, match=r"shards is [0-9a-f]{12} in the checkpoint, [0-9a-f]{12} here"):
        RowStream(mixed.val, tokenizer, T).restore(state)
    with pytest.raises(UserError, match="buffer_size is 1000 in the checkpoint, 10 here"):
        RowStream(mixed.train, tokenizer, T, buffer_size=10).restore(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"tokens": torch.zeros(3, dtype=torch.int32)},
        {"lengths": torch.zeros(0, dtype=torch.int64)},
        {"next_offset": None},
        {"tokens": 5},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(
    mixed: ShardSet, tokenizer: Tokenizer, damage: dict[str, Any]
) -> None:
    stream, twin = RowStream(mixed.train, tokenizer, T), RowStream(mixed.train, tokenizer, T)
    stream.next_rows(3), twin.next_rows(3)
    with pytest.raises(UserError, match="data position is damaged"):
        stream.restore({**saved(stream), **damage})
    with pytest.raises(UserError, match="version is nothing in the checkpoint"):
        stream.restore({})
    np.testing.assert_array_equal(stream.next_rows(20), twin.next_rows(20))


def test_row_groups_change_only_where_batches_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Row groups of 128, 256 and 1024 documents give the same batches, hence the same rows."""
    documents = make_documents(1024, seed=9)
    rows = []
    for size in (128, 256, 1024):
        folder = write_shards(tmp_path / str(size), [documents, ["x"]], row_group_size=size)
        rows.append(RowStream(open_shards(folder).train, tokenizer, T).next_rows(150))
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(rows[0], rows[2])


def test_nulls_empties_and_giants_on_the_way(folder_of: Folder, tokenizer: Tokenizer) -> None:
    documents: list[str | None] = [None, "", "x " * 700_000, "<|bos|> in a text", *make_documents(20, seed=2)]
    stream = RowStream(open_shards(folder_of(documents, ["x"])).train, tokenizer, T, buffer_size=20)
    rows = stream.next_rows(30)
    assert (rows[:, 0] == tokenizer.bos_id).all()
    epochs = stream.position["epoch"]
    assert stream.skipped == {"null": epochs, "empty": epochs, "not_utf8": 0, "cut": epochs}
    state = saved(stream)
    assert state["tokens"].numel() <= (T + 1) * len(state["lengths"])  # the giant is kept as one row at most


def test_only_unusable_documents(folder_of: Folder, tokenizer: Tokenizer) -> None:
    stream = RowStream(open_shards(folder_of([None, ""] * 50, ["x"])).train, tokenizer, T)
    with pytest.raises(UserError, match="a whole epoch gave no document"):
        stream.next_rows(1)


def test_no_shards(tokenizer: Tokenizer) -> None:
    shards: tuple[Shard, ...] = ()
    with pytest.raises(UserError, match="none of the 0 shards has rows"):
        RowStream(shards, tokenizer, T)
