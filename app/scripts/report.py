"""Compare runs: `python -m scripts.report "1 rank=d4-one" "2 ranks=d4"` prints the table and draws the losses.

Each argument is NAME=TAG, a folder under base_checkpoints, or NAME=path/to/metrics.jsonl.
"""

from __future__ import annotations

from pathlib import Path

from lantrain import paths
from lantrain.errors import UserError, run_main
from lantrain.flags import LARGEST, Parser, check_numbers
from lantrain.training.report import RunFigures, comparison_table, plot_losses, read_run


def _run(argument: str) -> RunFigures:
    name, separator, place = argument.partition("=")
    if not separator or not place:
        raise UserError(f"{argument!r} is not NAME=TAG", 'for example "2 ranks=d4"')
    path = Path(place) if place.endswith(".jsonl") else paths.checkpoint_dir(place) / "metrics.jsonl"
    return read_run(name, path)


def main() -> int:
    """Print the comparison and write the picture."""
    parser = Parser(prog="python -m scripts.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME=TAG")
    parser.add_argument("--every", type=int, default=5, help="steps between the table's rows")
    parser.add_argument("--png", type=Path, default=None, help="draw the losses into this file")
    args = parser.parse_args()
    check_numbers(args, {"every": (1, LARGEST)})
    runs = [_run(argument) for argument in args.runs]
    print(comparison_table(runs, args.every))
    if args.png:
        plot_losses(runs, args.png)
        print(f"loss curve: {args.png}")
    return 0


if __name__ == "__main__":
    run_main(main)
