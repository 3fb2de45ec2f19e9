import pytest
import torch
import torch.nn.functional as F

from lantrain.model.embedding import EmbeddingRows


def table(rows=50, width=8):
    return torch.nn.Parameter(torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)))


def test_rows_are_those_of_the_sorted_unique_ids():
    weight, ids = table(), torch.tensor([[7, 3, 7], [49, 0, 3]])
    rows = EmbeddingRows.gather({"w": weight}, ids, 50)
    assert rows.ids.tolist() == [0, 3, 7, 49]
    assert torch.equal(rows.rows["w"], weight[[0, 3, 7, 49]])
    assert rows.rows["w"].is_leaf
    assert rows.rows["w"].requires_grad
    assert rows.positions(ids).tolist() == [[2, 1, 2], [3, 0, 1]]


def test_gradients_equal_those_of_a_dense_embedding():
    weight, ids = table(), torch.randint(0, 50, (4, 30), generator=torch.Generator().manual_seed(1))
    grad = torch.randn(4, 30, 8, generator=torch.Generator().manual_seed(2))
    F.embedding(ids, weight).backward(grad)
    rows = EmbeddingRows.gather({"w": weight}, ids, 50)
    for part in range(4):  # collected over micro-batches
        F.embedding(rows.positions(ids[part]), rows.rows["w"]).backward(grad[part])
    dense = torch.zeros_like(weight).index_copy(0, rows.ids, rows.rows["w"].grad)
    torch.testing.assert_close(dense, weight.grad)


def test_later_changes_of_the_table_do_not_reach_the_rows():
    weight = table()
    rows = EmbeddingRows.gather({"w": weight}, torch.tensor([5]), 50)
    kept = rows.rows["w"].detach().clone()
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(rows.rows["w"], kept)


def test_a_rank_without_rows_gathers_nothing():
    rows = EmbeddingRows.gather({"w": table()}, torch.empty(0, 17, dtype=torch.int64), 50)
    assert rows.ids.numel() == 0
    assert rows.rows["w"].shape == (0, 8)
    assert rows.positions(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)


def test_a_token_that_was_not_gathered_is_refused():
    rows = EmbeddingRows.gather({"w": table()}, torch.tensor([5]), 50)
    with pytest.raises(ValueError, match="gather the ids"):
        rows.positions(torch.tensor([6]))
