"""The `base_train` command, from arguments to exit code."""

from __future__ import annotations

import json

import torch

from lantrain import paths
from lantrain.cluster import beacon
from lantrain.cluster.cores import settle_threads
from lantrain.cluster.gemm import gemm_rate
from lantrain.cluster.group import Ranks, agree_on_versions, form_groups, leave_groups
from lantrain.errors import LOST_PEER_EXIT, UserError
from lantrain.optim.local_steps import LocalSteps
from lantrain.training.config import Config, parse
from lantrain.training.local_loop import LocalLoop
from lantrain.training.loop import Loop, guarded
from lantrain.training.plan import make_plan, plan_lines
from lantrain.training.start import prepare

DEFAULT_VOCABULARY = 32768


def train(argv: list[str]) -> int:
    """Train as `argv` says. Returns the exit code: 0 when done, 128 + signal when stopped. Raises UserError."""
    beacon.tell("start")
    try:
        # Within: a launcher whose trainer refuses a flag without a word would start it again and again.
        config = parse(argv)
        if config.args.dry_run:
            return dry_run(config)
        return _train(config)
    except UserError as error:
        beacon.tell("ended", 0, "failed" if error.exit_code == LOST_PEER_EXIT else "fatal", str(error))
        raise
    except BaseException as error:
        beacon.tell("ended", 0, "failed", f"{type(error).__name__}: {error}")
        raise


def _train(config: Config) -> int:
    threads, reason = settle_threads(lambda: gemm_rate(torch.float32, seconds=0.1))
    beacon.tell("connect")
    ranks = form_groups()
    beacon.tell("load")
    everyone = guarded(lambda: agree_on_versions(ranks), ranks)
    if ranks.leader:
        print(f"{threads} threads ({reason})", flush=True)
        for rank, other in enumerate(everyone):
            print(f"rank {rank}: host {other['host']}, {other['threads']} threads, torch {other['torch']}", flush=True)
    code = guarded(lambda: _run(config, ranks, [other["host"] for other in everyone]), ranks)
    leave_groups(ranks)
    return code


def _run(config: Config, ranks: Ranks, hosts: list[str]) -> int:
    setup = prepare(config, ranks, hosts)
    if ranks.leader:
        for line in plan_lines(setup.plan, config, ranks.world):
            print(line, flush=True)
    loop = LocalLoop if isinstance(setup.optimizer, LocalSteps) else Loop
    return loop(config, setup, ranks).run()


def dry_run(config: Config) -> int:
    """Print the plan for --world-size ranks, with the vocabulary of the tokenizer that is there, or 32768."""
    vocabulary = DEFAULT_VOCABULARY
    description = paths.tokenizer_dir() / "tokenizer.json"
    if description.exists():
        from lantrain.data.tokenizer import Tokenizer

        vocabulary = Tokenizer.load(paths.tokenizer_dir()).vocab_size
    world = config.args.world_size or 1
    print(f"Plan for {world} ranks, vocabulary {vocabulary}:")
    print(f"Configuration: {json.dumps(config.user)}")
    for line in plan_lines(make_plan(config, vocabulary), config, world):
        print(line)
    return 0
