"""torchrun without its own report of a trainer that failed: the trainer has said why in one line, torchrun takes 30."""

from __future__ import annotations

import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(argv: list[str]) -> int:
    """Run torchrun with `argv`. Returns 1 when its trainer failed, as torchrun does."""
    try:
        torchrun.run(torchrun.parse_args(argv))
    except ChildFailedError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
