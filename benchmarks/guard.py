"""Fail when the training step has lost speed against this machine's own matrix products.

    python benchmarks/guard.py [--record]

Compares ratios only, each from one process (benchmarks/train_step.py): the share of a step's time that its matrix
products take alone may not be more than 15% below the recorded one for the same depth, dtype and C++ library. Absolute
times differ from machine to machine and from hour to hour. A share that is too low is measured up to twice more:
another program that runs during the step lowers it. (One that runs while the matrix products are timed raises it: the
guard may pass wrongly on a busy machine.) --record writes what was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "app")]

from benchmarks.train_step import in_fresh_process  # noqa: E402
from lantrain.cluster.gemm import native_bf16  # noqa: E402

RECORD = Path(__file__).with_name("shares.json")
ALLOWED_LOSS = 0.15
TRIES = 3
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def measure(dtype: str, environment: dict[str, str]) -> tuple[str, float]:
    """Name of the configuration, with the library that was used, and its share."""
    result: dict[str, Any] = in_fresh_process(["--depth", "4", "--dtype", dtype, "--one", "lantrain"], environment)
    return f"depth 4, {dtype}, {result['program']}", float(result["share"])


def main() -> int:
    """Measure what this machine can; returns 1 when a share is too low."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the shares to benchmarks/shares.json")
    args = parser.parse_args()
    recorded: dict[str, float] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    configurations: list[tuple[str, dict[str, str]]] = [("fp32", {}), ("fp32", AVX2)]
    if native_bf16():
        configurations.append(("bf16", {}))
    low = False
    for dtype, environment in configurations:
        for attempt in range(TRIES):
            name, share = measure(dtype, environment)
            if name not in recorded and not args.record:
                print(f"guard: {name}: share {share:.0%}, none recorded to compare it with", flush=True)
                break
            limit = (1 - ALLOWED_LOSS) * recorded.get(name, 0.0)
            print(f"guard: {name}: share {share:.0%}, at least {limit:.0%} (try {attempt + 1})", flush=True)
            if args.record or share >= limit:
                break
        else:
            low = True
        if args.record:
            recorded[name] = round(share, 3)
    if args.record:
        RECORD.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    return int(low)


if __name__ == "__main__":
    sys.exit(main())
