"""Probes of room: memory that a rank of this run needs, and disk that its checkpoints need."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from lantrain.errors import UserError
from lantrain.probes.result import Result

MIB = 2**20
PROGRAM_MIB = 350
"""Python and PyTorch with a model of next to nothing: 317 MiB were measured."""
ACTIVATION_FLOATS = 32
"""Floats of width C for a token and a layer, kept for the backward pass or passing: a peak of 1133 MiB was measured at
depth 6, T 512 and 4 rows a micro-batch, where this gives 1109 in all."""


@dataclass(frozen=True)
class Need:
    """MiB that a rank needs, by what for; MiB of one checkpoint; MiB that a rank sends in a step."""

    parts: dict[str, int]
    checkpoint: int
    sends: int

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def estimate(arguments: list[str], vocab_size: int, world: int, *, leader: bool) -> Need:
    """What a rank of the run with these flags needs. Tables are replicated, other state has one owner (optim/sharded).

    Raises UserError for flags that cannot train.
    """
    from lantrain.training.config import parse
    from lantrain.training.plan import make_plan

    config = parse(arguments)
    plan = make_plan(config, vocab_size)
    counts, model = plan.counts, plan.model
    tables = counts["wte"] + counts["value_embeds"]
    dense = counts["total"] - tables
    moments = 4 if config.args.moments_dtype == "bfloat16" else 8  # bytes of both
    state = 4 * counts["transformer_matrices"] + moments * counts["lm_head"] + 8 * counts["scalars"]
    tokens = min(config.args.device_batch_size, plan.rows) * model.sequence_len
    saved = 4 * counts["total"] + moments * tables + state
    parts = {
        "program": PROGRAM_MIB * MIB,
        "weights": 4 * counts["total"],
        # With more than one rank: the gradients, once more as they are sent, and as they are received.
        "gradients": 4 * dense * (1 if world == 1 else 3),
        "optimizer": moments * tables + state // world,
        "logits": 4 * tokens * model.padded_vocab_size,
        "activations": 4 * tokens * model.n_layer * model.n_embd * ACTIVATION_FLOATS,
    }
    if leader:
        parts["checkpoint"] = saved  # the copy that is written in the background, gathered from the owners
    mib = {name: -(-size // MIB) for name, size in parts.items()}
    # Gradients to their owners and weights to all others: 4 bytes each, to and from world - 1 ranks.
    return Need(mib, saved // MIB + 1, 8 * dense * (world - 1) // world // MIB)


def free_memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """MiB that this process could still take, and what sets the limit: the machine or the container."""
    free = int(psutil.virtual_memory().available / MIB)
    for limit, used, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            most, now = int((root / limit).read_text()), int((root / used).read_text())
            lines = dict(line.split() for line in (root / stat).read_text().splitlines())
        except (OSError, ValueError):  # "max", or the other cgroup version
            continue
        left = int((most - now + int(lines.get(cache, 0))) / MIB)
        if left < free:
            return max(left, 0), "the container's limit"
    return free, "this machine"


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """MiB that this process's container may have, or else the machine has; and which of the two."""
    whole = int(psutil.virtual_memory().total / MIB)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            mib = int(int((root / name).read_text()) / MIB)
            if mib < whole:
                return mib, "this container"
    return whole, "this machine"


def out_of_memory_kills(root: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes of this container the kernel has killed for lack of memory; 0 where it does not say."""
    for name in ("memory.events", "memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in (root / name).read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def memory(parts: dict[str, int], free: int | None = None, owner: str = "") -> Result:
    """Whether what a rank needs, in MiB by part, is free."""
    if free is None:
        free, owner = free_memory()
    total = sum(parts.values())
    what = ", ".join(f"{name} {size:,}" for name, size in parts.items() if size)
    tried = f"added up what a rank needs, in MiB: {what}"
    seen = f"needs about {total:,} MiB, has {free:,} free ({owner or 'this machine'})"
    flags = "--device-batch-size 1 --moments-dtype bfloat16"
    smaller = {"": f"make up-master TRAIN_ARGS='... {flags}', or a smaller --depth"}
    # Activations are a rough figure; without room for the rest it cannot work.
    if free < total - parts.get("activations", 0):
        means = "the trainer would be killed for lack of memory: close programs here, or train something smaller"
        return Result("memory", "fail", tried, seen, means, smaller, "the master")
    if free < 1.1 * total:
        return Result(
            "memory", "warn", tried, seen, "close programs here before it starts swapping", smaller, "the master"
        )
    return Result("memory", "ok", tried, seen)


def disk(folder: Path, checkpoint: int, keep: int, free: int | None = None) -> Result:
    """Whether checkpoints of `checkpoint` MiB, `keep` of them and one being written, have room in `folder`."""
    while free is None and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = int(shutil.disk_usage(folder).free / MIB) if free is None else free
    need = checkpoint * (max(keep, 1) + 1)
    tried = f"compared what is free in {folder} with {max(keep, 1) + 1} checkpoints of {checkpoint:,} MiB"
    seen = f"needs {need:,} MiB for checkpoints, has {free:,} free"
    mend = {"": "df -h; docker system df; or make up-master TRAIN_ARGS='... --keep-last 1'"}
    if free < checkpoint:
        return Result("disk", "fail", tried, seen, "not one checkpoint can be written", mend, "the master")
    if free < need:
        return Result(
            "disk", "warn", tried, seen, "there is room for some checkpoints, not for all", mend, "the master"
        )
    return Result("disk", "ok", tried, seen)


def vocabulary() -> int:
    """Tokens of the master's tokenizer, or nanochat's 32768 while it has none."""
    from lantrain import paths
    from lantrain.data.tokenizer import Tokenizer

    try:
        return Tokenizer.load(paths.tokenizer_dir()).vocab_size
    except (UserError, OSError, ValueError):
        return 32768
