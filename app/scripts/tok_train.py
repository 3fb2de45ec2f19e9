"""Train the tokenizer on the training shards: python -m scripts.tok_train [--vocab-size 32768] [--force]."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from lantrain.data.documents import iterate_once
from lantrain.data.shards import Shard, fingerprint, open_shards
from lantrain.data.tokenizer import SMALLEST_VOCABULARY, Tokenizer
from lantrain.errors import UserError, run_main
from lantrain.flags import LARGEST, Parser, check_numbers
from lantrain.paths import data_dir, tokenizer_dir

_PROGRESS_SECONDS = 5.0
# Four times the largest vocabulary that is in use; the embedding tables alone would be gigabytes.
_LARGEST_VOCABULARY = 2**20
_RANGES = {
    "max_chars": (1, 10**12), "doc_cap": (1, LARGEST), "vocab_size": (SMALLEST_VOCABULARY, _LARGEST_VOCABULARY),
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    """nanochat's flags and defaults, and --force."""
    parser = Parser(prog="python -m scripts.tok_train", description=__doc__)
    parser.add_argument("--max-chars", type=int, default=2_000_000_000, help="characters to train on (%(default)s)")
    parser.add_argument("--doc-cap", type=int, default=10_000, help="characters of a document at most (%(default)s)")
    parser.add_argument("--vocab-size", type=int, default=32768, help="tokens, nine special included (%(default)s)")
    parser.add_argument("--force", action="store_true", help="train again although the same tokenizer is there")
    arguments = parser.parse_args()
    check_numbers(arguments, _RANGES)
    return arguments


def training_texts(shards: Sequence[Shard], max_chars: int, doc_cap: int) -> Iterator[str]:
    """Documents cut to `doc_cap`, until more than `max_chars` characters have passed (nanochat's rule)."""
    total = sum(shard.rows for shard in shards)
    chars = documents = 0
    started = said = time.monotonic()
    for texts in iterate_once(shards):
        for text in texts:
            cut = text[:doc_cap]
            chars += len(cut)
            documents += 1
            yield cut
            if chars > max_chars:
                say(f"read {documents:,} documents, {chars:,} characters (--max-chars reached)")
                return
        now = time.monotonic()
        if now - said >= _PROGRESS_SECONDS:
            said = now
            share = max(chars / max_chars, documents / total)
            eta = (now - started) * (1 - share) / share
            say(f"read {documents:,} of {total:,} documents, {chars:,} characters, eta {eta:.0f} s")
    say(f"read {documents:,} documents, {chars:,} characters")


def existing() -> Tokenizer | None:
    """The tokenizer that is there, if it is whole."""
    try:
        return Tokenizer.load(tokenizer_dir())
    except UserError:
        return None


def keep_aside(old: Tokenizer) -> None:
    """Move another tokenizer out of the way: the checkpoints trained with it are worthless without it."""
    aside = tokenizer_dir().with_name(f"tokenizer-{old.fingerprint()[:12]}")
    if not aside.exists():
        os.rename(tokenizer_dir(), aside)
        say(f"the tokenizer that was there is kept in {aside}")


def main() -> None:
    """Train and save, unless it has been done."""
    arguments = parse_arguments()
    shards = open_shards(data_dir())
    say(f"shards in {data_dir()}: {shards.summary()}")
    made = {
        "shards": fingerprint(shards.train),
        "max_chars": arguments.max_chars,
        "doc_cap": arguments.doc_cap,
        "vocab_size": arguments.vocab_size,
        "rustbpe": version("rustbpe"),
    }
    old = existing()
    if old and old.made == made and not arguments.force:
        say(f"the tokenizer for these shards and options is there: {tokenizer_dir()} (--force trains it again)")
        return
    started = time.monotonic()
    texts = training_texts(shards.train, arguments.max_chars, arguments.doc_cap)
    tokenizer = Tokenizer.train(texts, arguments.vocab_size, made)
    say(f"trained in {time.monotonic() - started:.1f} s: {len(tokenizer.ranks) - 256:,} merges")
    if tokenizer.vocab_size < arguments.vocab_size:
        say(
            f"the shards have no more pairs to merge: the vocabulary is {tokenizer.vocab_size:,} tokens "
            f"instead of {arguments.vocab_size:,}"
        )
    if old and old.fingerprint() != tokenizer.fingerprint():
        keep_aside(old)
    tokenizer.save(tokenizer_dir())
    say(f"saved to {tokenizer_dir()}, {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint()[:12]}")


def say(line: str) -> None:
    """One line, at once: a container's log is followed while it is written."""
    print(line, flush=True)


if __name__ == "__main__":
    run_main(main)
