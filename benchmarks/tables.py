"""Seconds a step of the embedding tables' update: rows that wait for a token, against all rows in every step.

    python benchmarks/tables.py --base BASE [--depth 8] [--tokens 2048] [--steps 300]

BASE is a folder that scripts.prepare has filled; the steps touch the rows that its text touches, with random gradients.
"All rows" is torch's fused AdamW on dense gradients. Waiting rows are counted with what they leave for later, and with
bringing the next step's rows up to date. Means over the steps after the first WINDOW: in those rows wait less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "app")]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from lantrain.cluster.group import Ranks  # noqa: E402
from lantrain.data.packing import RowStream  # noqa: E402
from lantrain.data.shards import open_shards  # noqa: E402
from lantrain.data.tokenizer import Tokenizer  # noqa: E402
from lantrain.model.gpt import GPT, config_for_depth  # noqa: E402
from lantrain.optim.groups import ParamGroup, parameter_groups  # noqa: E402
from lantrain.optim.tables import WINDOW, Tables  # noqa: E402

SEQ_LEN = 512


def step_ids(base: Path, tokens: int, steps: int) -> list[Tensor]:
    """Sorted distinct token ids of each step of the text in `base`."""
    shards = open_shards(base / "base_data_climbmix")
    stream = RowStream(shards.train, Tokenizer.load(base / "tokenizer"), SEQ_LEN)
    return [
        torch.from_numpy(stream.next_rows(tokens // SEQ_LEN).astype("int64"))[:, :-1].unique() for _ in range(steps)
    ]


def dense_steps(
    params: dict[str, nn.Parameter], groups: dict[str, ParamGroup]
) -> Callable[[Tensor, list[Tensor], int], None]:
    """A step of torch's fused AdamW on all rows."""
    state = {name: (torch.zeros_like(param), torch.zeros_like(param)) for name, param in params.items()}
    gradient = torch.zeros_like(next(iter(params.values())))

    def step(ids: Tensor, grads: list[Tensor], number: int) -> None:
        for (name, param), grad in zip(params.items(), grads, strict=True):
            group = groups[name]
            gradient.index_copy_(0, ids, grad)
            torch._fused_adamw_(
                [param.data], [gradient], [state[name][0]], [state[name][1]], [], [torch.tensor(float(number))],
                lr=group.lr, beta1=group.betas[0], beta2=group.betas[1], weight_decay=group.weight_decay,
                eps=group.eps, amsgrad=False, maximize=False,
            )  # fmt: skip
        gradient[ids] = 0.0

    return step


def main() -> None:
    """Time both and print seconds a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    with torch.device("meta"):
        model = GPT(config_for_depth(args.depth, sequence_len=SEQ_LEN, vocab_size=32768))
    params = {name: nn.Parameter(torch.randn(table.shape) * 0.1) for name, table in model.embedding_tables().items()}
    groups = {name: group for group in parameter_groups(model) for name in group.names if name in params}
    ids = step_ids(args.base, args.tokens, args.steps)
    grads = [[torch.randn(some.numel(), param.shape[1]) * 1e-3 for param in params.values()] for some in ids[:8]]

    def gradients(number: int) -> list[Tensor]:
        """Of as many rows as the step has, from a few draws."""
        count, drawn = ids[number].numel(), grads[number % len(grads)]
        return [grad[torch.arange(count) % grad.shape[0]] for grad in drawn]

    dense, began = dense_steps(params, groups), 0.0
    for number in range(args.steps // 10):
        if number == 2:
            began = time.perf_counter()
        dense(ids[number], gradients(number), number + 1)
    every = (time.perf_counter() - began) / (args.steps // 10 - 2)
    tables, made = Tables(params, groups, Ranks(0, 1), torch.float32), time.perf_counter()
    for number in range(args.steps):
        if number == WINDOW:
            tables.settle()
            made = time.perf_counter()
        tables.settle_rows(ids[number])
        tables.update([(ids[number], gradients(number))], step=number + 1, lr_multiplier=1.0)
    tables.settle()
    waiting = (time.perf_counter() - made) / (args.steps - WINDOW)
    touched = sum(some.numel() for some in ids) / len(ids)
    print(f"{sum(param.numel() for param in params.values()) / 1e6:.0f}M parameters, {touched:.0f} rows touched a step")
    print(f"all rows: {1000 * every:.1f} ms a step; waiting rows: {1000 * waiting:.1f} ms, {every / waiting:.1f}x less")


if __name__ == "__main__":
    main()
