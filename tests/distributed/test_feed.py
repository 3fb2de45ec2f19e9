"""Rows from the leader reach the ranks they belong to, and so do its errors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantrain.cluster.group import Ranks
from lantrain.data.feed import Batch, Feed, FeedError, FixedRows, PackedAhead
from lantrain.data.packing import RowStream
from lantrain.data.shards import open_shards
from lantrain.data.tokenizer import Tokenizer
from tests.distributed.ranks import together

SEQ_LEN, ROWS, STEPS = 32, 5, 6


def _stream(base: Path) -> RowStream:
    shards = open_shards(base / "base_data_climbmix")
    return RowStream(shards.train, Tokenizer.load(base / "tokenizer"), SEQ_LEN)


def _take(ranks: Ranks, base: Path, shares: list[int], wide: bool) -> list[np.ndarray]:
    source = PackedAhead(_stream(base), ROWS) if ranks.leader else None
    feed = Feed(source, ranks, SEQ_LEN, wide, 10)
    feed.start(shares)
    batches = [feed.next(more=step + 1 < STEPS) for step in range(STEPS)]
    feed.close()
    assert [batch.step for batch in batches] == list(range(10, 10 + STEPS))
    return [batch.rows.numpy() for batch in batches]


@pytest.mark.parametrize(("shares", "wide"), [([3, 2], False), ([2, 0, 3], False), ([1, 1, 1, 1, 1], True)])
def test_ranks_together_have_the_rows_of_the_stream(shares: list[int], wide: bool, corpus: Path) -> None:
    expected = _stream(corpus).next_rows(ROWS * STEPS).reshape(STEPS, ROWS, SEQ_LEN + 1)
    results = together(len(shares), partial(_take, base=corpus, shares=shares, wide=wide))
    for rank, share in enumerate(shares):
        assert all(rows.shape == (share, SEQ_LEN + 1) for rows in results[rank])
    for step in range(STEPS):
        together_again = np.concatenate([results[rank][step] for rank in range(len(shares))])
        assert np.array_equal(together_again, expected[step])


class _Failing(FixedRows):
    """Gives two steps and then fails as a damaged shard does."""

    def next(self) -> Any:
        try:
            return super().next()
        except StopIteration:
            from lantrain.errors import UserError

            raise UserError("shard_00007.parquet, row group 3, column text: damaged ü") from None


def _until_it_fails(ranks: Ranks) -> tuple[int, str]:
    source = _Failing(np.zeros((4, SEQ_LEN + 1), dtype=np.uint16), 2) if ranks.leader else None
    feed = Feed(source, ranks, SEQ_LEN, False, 0)
    feed.start([1, 1])
    done = 0
    try:
        while True:
            assert isinstance(feed.next(more=True), Batch)
            done += 1
    except FeedError as error:
        return done, str(error)


def test_error_of_the_leader_reaches_every_rank_at_the_same_step() -> None:
    results = together(2, _until_it_fails)
    assert [done for done, _ in results] == [2, 2]
    assert results[0][1] == "shard_00007.parquet, row group 3, column text: damaged ü"
    assert results[1][1] == f"the leader cannot read its data: {results[0][1]}"


def test_state_belongs_to_the_step_and_not_to_what_was_packed_ahead(corpus: Path) -> None:
    """The packer runs ahead; the state of a batch continues right after that batch."""
    feed = Feed(PackedAhead(_stream(corpus), ROWS), Ranks(0, 1), SEQ_LEN, False, 0)
    feed.start([ROWS])
    batches = [feed.next(more=True) for _ in range(4)]
    feed.close()
    again = _stream(corpus)
    again.restore(batches[1].state.to_dict())
    assert np.array_equal(again.next_rows(ROWS), batches[2].rows.numpy())
    assert np.array_equal(again.next_rows(ROWS), batches[3].rows.numpy())
