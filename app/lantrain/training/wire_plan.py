"""What a step sends, by part, from the plan alone: the table of `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lantrain.cluster.group import Ranks
from lantrain.data.feed import HEADER_BYTES
from lantrain.model.gpt import GPT, GPTConfig
from lantrain.optim.groups import parameter_groups
from lantrain.optim.owners import assign_owners, pieces_of
from lantrain.optim.wire import Wire, make_buckets

MEGABYTE = 1e6


def sent_bytes(
    config: GPTConfig, shares: Sequence[int], weights: Sequence[float], wire_dtype: torch.dtype
) -> list[dict[str, int]]:
    """Bytes that each rank sends in a step, by part, with `shares` rows a rank and owners by `weights`.

    "gradients" and "weights" are exact. "tables" is what the touched rows of the embedding tables take at most: text
    repeats its tokens, and takes a third of it for 2048 tokens a rank, a fifth for 16384 (measured on the sample
    corpus). "feed" is the leader's rows of text for the others.
    """
    with torch.device("meta"):
        model = GPT(config)
    tables, world = model.embedding_tables(), len(shares)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    owned = assign_owners(pieces_of(shapes, parameter_groups(model), set(tables), world), weights)
    buckets = make_buckets(owned, list(reversed(list(shapes))))
    row = 4 + wire_dtype.itemsize * sum(table.shape[1] for table in tables.values())
    token = 4 if config.vocab_size > 2**16 else 2
    fed = sum(HEADER_BYTES + share * (config.sequence_len + 1) * token for share in shares[1:])
    result = []
    # One wire tells the bytes of every rank: one wire for each took half a minute with 256 ranks at depth 20.
    for rank, parts in enumerate(Wire(buckets, Ranks(0, world), wire_dtype).bytes_per_rank()):
        touched = min(shares[rank] * config.sequence_len, config.vocab_size)
        result.append(parts | {"tables": row * touched * (world - 1), "feed": fed if rank == 0 else 0})
    return result


def native_bytes(parameters: int, world: int) -> int:
    """What a rank sends by Gloo's own collectives: fp32 reduce_scatter (an all-reduce inside) and all_gather."""
    return 3 * 4 * parameters * (world - 1) // world


def wire_lines(
    config: GPTConfig, parameters: int, shares: Sequence[int], weights: Sequence[float], wire_dtype: torch.dtype
) -> Iterator[str]:
    """The table in words, in megabytes a step and rank."""
    if len(shares) == 1:
        return
    everyone = sent_bytes(config, shares, weights, wire_dtype)
    native = native_bytes(parameters, len(shares))
    yield f"Sent in a step, in MB, gradients and weights in {str(wire_dtype).removeprefix('torch.')}:"
    yield "  rank  gradients  weights  table rows (at most)  text      sum  of fp32 reduce_scatter + all_gather"
    for rank, parts in enumerate(everyone):
        gradients, back, rows, feed = (parts[part] / MEGABYTE for part in ("gradients", "weights", "tables", "feed"))
        total = gradients + back + rows + feed
        yield (
            f"  {rank:4d}  {gradients:9.2f}  {back:7.2f}  {rows:20.2f}  {feed:4.2f}  {total:7.2f}"
            f"  {100 * total * MEGABYTE / native:.1f}% of {native / MEGABYTE:.0f} MB"
        )
