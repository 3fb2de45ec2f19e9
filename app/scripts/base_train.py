"""Train a base model: `python -m scripts.base_train FLAGS`, or the same under torchrun.

    torchrun --nnodes=2 --nproc_per_node=1 --node_rank=0 --master_addr=192.168.1.36 --master_port=29500 \
        -m scripts.base_train -- --depth 4 --max-seq-len 512 --total-batch-size 2048 --num-iterations 20
"""

from __future__ import annotations

import os
import sys

import lantrain
from lantrain.cluster import stacks
from lantrain.errors import run_main


def main() -> int:
    """Check the arguments, form the ranks, train."""
    rank = os.environ.get("RANK", "0")
    print(f"lantrain {lantrain.__version__}: rank {rank} starting (loading torch)", flush=True)
    stacks.offer()
    # torch takes seconds to import; the line above says that something is happening.
    from lantrain.training.command import train

    return train(sys.argv[1:])


if __name__ == "__main__":
    run_main(main, at_once=True)
