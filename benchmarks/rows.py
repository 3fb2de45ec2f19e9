"""How fast rows are packed: rows and tokens per second of RowStream on one thread, tokenization included.

    python benchmarks/rows.py [--data DIR] [--tokenizer DIR] [--seq-len 512] [--seconds 5] [--json]

The trainer must never wait for rows: the figure to hold against it is the trainer's own tokens per second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app"))

from lantrain.data.packing import RowStream
from lantrain.data.shards import open_shards
from lantrain.data.tokenizer import Tokenizer
from lantrain.errors import run_main
from lantrain.paths import data_dir, tokenizer_dir

_ROWS_A_CALL = 8


def measure(stream: RowStream, seq_len: int, seconds: float) -> dict[str, float]:
    """Steady rate over `seconds`, a state taken after every call as the trainer does, and the time to the first row."""
    started = time.perf_counter()
    stream.next_rows(1)  # fills the buffer of a thousand documents
    first = time.perf_counter() - started
    rows, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        stream.next_rows(_ROWS_A_CALL)
        stream.state()
        rows += _ROWS_A_CALL
    return {
        "rows_per_second": rows / elapsed,
        "tokens_per_second": rows * seq_len / elapsed,
        "first_row_seconds": first,
        "epoch": stream.position["epoch"],
    }


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=data_dir())
    parser.add_argument("--tokenizer", type=Path, default=tokenizer_dir())
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a sentence")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(arguments.tokenizer)
    stream = RowStream(open_shards(arguments.data).train, tokenizer, arguments.seq_len)
    result = {"seq_len": arguments.seq_len, "vocab_size": tokenizer.vocab_size}
    result |= measure(stream, arguments.seq_len, arguments.seconds)
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"T={arguments.seq_len}: {result['rows_per_second']:,.0f} rows/s, "
            f"{result['tokens_per_second']:,.0f} tokens/s, first row after {result['first_row_seconds']:.2f} s"
        )


if __name__ == "__main__":
    run_main(main)
