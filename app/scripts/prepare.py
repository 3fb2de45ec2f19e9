"""Shards, then the tokenizer, in one container: python -m scripts.prepare [flags of scripts.prepare_data].

Both skip what is done, so it runs before every start of the stack.
"""

from __future__ import annotations

import sys

from lantrain.errors import run_main
from scripts import prepare_data, tok_train


def main() -> None:
    """The flags go to prepare_data; the tokenizer is trained with its defaults."""
    prepare_data.main()
    del sys.argv[1:]
    tok_train.main()


if __name__ == "__main__":
    run_main(main)
