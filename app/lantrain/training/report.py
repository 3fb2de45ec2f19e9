"""A run in a table and a picture, from its metrics.jsonl."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lantrain.errors import UserError


@dataclass(frozen=True)
class RunFigures:
    """The steps of one run: loss and tokens a second by finished step, and bits per byte where it was evaluated."""

    name: str
    losses: dict[int, float]
    speeds: dict[int, float]
    bpb: dict[int, float]

    def median_speed(self, skip: int = 2) -> float:
        """Median tokens a second, the first `skip` steps (page faults, thread start) left out where there are more."""
        speeds = [speed for _, speed in sorted(self.speeds.items())]
        return statistics.median(speeds[skip:] or speeds)


def read_run(name: str, path: Path) -> RunFigures:
    """Read a metrics.jsonl. Raises UserError when it is missing, empty or no such file."""
    losses: dict[int, float] = {}
    speeds: dict[int, float] = {}
    bpb: dict[int, float] = {}
    try:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "loss" in record:
                losses[record["step"]], speeds[record["step"]] = record["loss"], record["tok_per_sec"]
            if "val_bpb" in record:
                bpb[record["step"]] = record["val_bpb"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read the metrics of {name} in {path}: {error}", "train first: make demo") from None
    if not losses:
        raise UserError(f"{path} has no steps yet", "train first: make demo")
    return RunFigures(name, losses, speeds, bpb)


def comparison_table(runs: Sequence[RunFigures], every: int = 5) -> str:
    """Step, loss and tok/s of each run side by side: the first step, each `every`-th, and the last common one."""
    common = sorted(set.intersection(*(set(run.losses) for run in runs)))
    if not common:
        raise UserError("the runs have no step in common", "train them with the same --num-iterations")
    shown = [step for step in common if step == common[0] or step % every == 0 or step == common[-1]]
    head = ["step", *(f"{run.name}: loss" for run in runs), *(f"{run.name}: tok/s" for run in runs)]
    rows = [
        [f"{step:05d}", *(f"{run.losses[step]:.6f}" for run in runs), *(f"{run.speeds[step]:,.0f}" for run in runs)]
        for step in shown
    ]
    rows.append(["median", *("" for _ in runs), *(f"{run.median_speed():,.0f}" for run in runs)])
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    rule = "-+-".join("-" * width for width in widths)
    lines = [lines[0], rule, *lines[1:-1], rule, lines[-1]]
    if len(runs) > 1:
        difference = max(abs(run.losses[step] - runs[0].losses[step]) for run in runs[1:] for step in common)
        speedup = runs[-1].median_speed() / runs[0].median_speed()
        lines.append(
            f"largest difference of the losses over {len(common)} common steps: {difference:.1e}; "
            f"{runs[-1].name} at {speedup:.2f} times the speed of {runs[0].name}"
        )
    return "\n".join(lines)


def plot_losses(runs: Sequence[RunFigures], path: Path) -> None:
    """Draw the loss of each run by step, and the validation bits per byte of the last one, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display on a server or in a container
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for index, run in enumerate(runs):
        steps = sorted(run.losses)
        # The runs should lie on each other, so the first is drawn wide and pale beneath.
        wide = index == 0 and len(runs) > 1
        losses = [run.losses[step] for step in steps]
        axes.plot(steps, losses, label=f"{run.name}: loss", linewidth=4 if wide else 1.5, alpha=0.35 if wide else 1)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per token)")
    axes.grid(alpha=0.3)
    bpb = runs[-1].bpb
    if bpb:
        right = axes.twinx()
        right.plot(sorted(bpb), [bpb[step] for step in sorted(bpb)], "k.--", label=f"{runs[-1].name}: validation bpb")
        right.set_ylabel("validation bits per byte")
        right.legend(loc="upper right", bbox_to_anchor=(1, 0.8))
    axes.legend(loc="upper right")
    axes.set_title("Loss of the same model, alone and together")
    figure.tight_layout()
    temporary = path.with_name(f".{path.stem}.tmp.png")
    figure.savefig(temporary)
    temporary.replace(path)
    plt.close(figure)
