"""What local steps send, from the plan alone: the lines of `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lantrain.data.feed import HEADER_BYTES
from lantrain.model.gpt import GPTConfig
from lantrain.optim.quantise import BLOCK, packed_bytes
from lantrain.training.wire_plan import MEGABYTE, native_bytes


def local_bytes(
    config: GPTConfig, counts: Mapping[str, int], rows: int, *, local_steps: int, bits: int, world: int
) -> dict[str, float]:
    """Bytes that a rank sends in a step of `rows` rows, by part, averaged over a round.

    "tables" is at most so much: of the rows that a round of fresh tokens would touch, text repeats most. "feed" is for
    the leader, with equal shares.
    """
    tables = counts["wte"] + counts["value_embeds"]
    touched = min(1.0, rows * config.sequence_len * local_steps / config.padded_vocab_size)
    share = 2 * (world - 1) / world / local_steps
    token = 4 if config.vocab_size > 2**16 else 2

    def packed(values: float) -> float:
        return share * packed_bytes(-(-int(values) // BLOCK) * BLOCK, bits)

    text = rows * (config.sequence_len + 1) * token * (world - 1) / world
    return {
        "dense": packed(counts["total"] - tables),
        "tables": packed(tables * touched),
        "feed": HEADER_BYTES * (world - 1) + text,
    }


def local_lines(
    config: GPTConfig, counts: Mapping[str, int], rows: int, *, local_steps: int, bits: int, world: int
) -> Iterator[str]:
    """The bytes in words, against Gloo's own collectives."""
    if world == 1:
        return
    parts = local_bytes(config, counts, rows, local_steps=local_steps, bits=bits, world=world)
    total, native = sum(parts.values()), native_bytes(counts["total"], world)
    dense, tables, feed = (f"{parts[part] / MEGABYTE:.3f}" for part in ("dense", "tables", "feed"))
    yield (
        f"Sent in a local step by the leader, averaged over a round, in MB: {dense} dense, {tables} table rows (at "
        f"most), {feed} text: {100 * total / native:.2f}% of fp32 reduce_scatter + all_gather ({native / MEGABYTE:.0f})"
    )
