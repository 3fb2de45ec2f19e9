import pytest
import torch

from lantrain.model.kv_cache import KVCache
from tests.unit.model.reference import batch, small_config, trained_looking


def cache_for(model, tokens, rows=2):
    c = model.config
    return KVCache(c.n_layer, rows, c.n_kv_head, c.head_dim, tokens, model.compute_dtype)


@pytest.mark.parametrize("changes", [{}, {"n_kv_head": 1}])
@pytest.mark.parametrize("pieces", [[1] * 12, [8, 1, 1, 1, 1], [1, 150, 1, 40, 1, 7], [200]])
def test_reading_in_pieces_equals_reading_at_once(changes, pieces):
    """Window, smear across the pieces, value embeddings and backout included."""
    model = trained_looking(small_config(**changes))
    idx, _ = batch(model.config, length=sum(pieces))
    with torch.no_grad():
        whole = model.logits(idx)
        cache, read = cache_for(model, sum(pieces)), 0
        for piece in pieces:
            logits = model.logits(idx[:, read : read + piece], cache)
            torch.testing.assert_close(logits, whole[:, read : read + piece], atol=2e-5, rtol=1e-4)
            read += piece
            assert cache.position == read


def test_last_only_is_the_last_position():
    model = trained_looking(small_config())
    idx, _ = batch(model.config)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(idx, last_only=True), model.logits(idx)[:, -1:])


def test_a_full_cache_says_so():
    model = trained_looking(small_config())
    with pytest.raises(ValueError, match="room for 4 tokens, 5 needed"), torch.no_grad():
        model.logits(torch.zeros(2, 5, dtype=torch.int64), cache_for(model, 4))
