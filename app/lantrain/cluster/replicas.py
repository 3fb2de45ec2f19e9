"""All ranks hold the same parameters (invariant 3): a cheap hash to see it, a broadcast to make it so."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lantrain.cluster.group import Ranks, gather_json
from lantrain.errors import WRONG_NUMBERS_EXIT, UserError


def parameter_hash(params: Mapping[str, Tensor]) -> int:
    """A 64-bit sum over the bits of all fp32 parameters, each with its own odd factor; equal bits give equal sums."""
    total = 0
    for index, name in enumerate(sorted(params)):
        bits = params[name].detach().contiguous().view(torch.int32)
        total += int(bits.sum(dtype=torch.int64)) * (2 * index + 1)
    return total & (2**64 - 1)


def check_replicas(params: Mapping[str, Tensor], ranks: Ranks, step: int) -> None:
    """Raise UserError on every rank, naming those that differ from the leader. Collective."""
    if ranks.world == 1:
        return
    hashes = gather_json(parameter_hash(params), ranks)
    wrong = [str(rank) for rank, value in enumerate(hashes) if value != hashes[0]]
    if wrong:
        raise UserError(
            f"after step {step} the parameters of rank {', '.join(wrong)} differ from the leader's: the run is stopped",
            "resume from the last checkpoint; if it happens again on the same machine, test its memory",
            WRONG_NUMBERS_EXIT,
        )


def copy_from_leader(params: Mapping[str, Tensor], ranks: Ranks) -> bool:
    """Make every rank's parameters the leader's; sends them only when a hash differs. Returns whether it sent.

    The same seed gives the same start on equal machines, but not on every CPU, and after a resume only the leader
    has the weights. Collective.
    """
    if ranks.world == 1 or len(set(gather_json(parameter_hash(params), ranks))) == 1:
        return False
    for name in sorted(params):
        dist.broadcast(params[name].data, 0)
    return True
