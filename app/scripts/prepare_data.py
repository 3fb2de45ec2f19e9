"""Put shards where training finds them: python -m scripts.prepare_data [--source climbmix|sample] [--num-shards N]."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lantrain.data.corpus import make_sample
from lantrain.data.shards import open_shards
from lantrain.data.sources import load_sources
from lantrain.errors import UserError, run_main
from lantrain.flags import Parser
from lantrain.paths import data_dir


def parse_arguments() -> argparse.Namespace:
    """The command line; the choice of sources comes from data/sources.toml."""
    sources = load_sources()
    listing = "; ".join(f"{source.name}: {source.about}" for source in sources.values())
    parser = Parser(prog="python -m scripts.prepare_data", description=__doc__)
    parser.add_argument("--source", choices=sorted(sources), default="climbmix", help=listing)
    parser.add_argument("--num-shards", type=int, default=None, help="training shards to download; one more validates")
    parser.add_argument("--out", type=Path, default=data_dir(), help="folder (NANOCHAT_DATA_DIR; %(default)s)")
    arguments = parser.parse_args()
    arguments.source = sources[arguments.source]
    return arguments


def main() -> None:
    """Prepare, then check what is there as training will."""
    arguments = parse_arguments()
    out: Path = arguments.out.expanduser()
    if arguments.source.kind == "stdlib":
        if arguments.num_shards is not None:
            raise UserError(f"--num-shards is for downloads, not for {arguments.source.name}", "leave it out")
        make_sample(out, arguments.source, say)
    else:
        # The hub's client writes progress bars for terminals, which read badly in `docker compose logs`.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from lantrain.data.download import download

        download(out, arguments.source, arguments.num_shards, say)
    say(f"ready: {open_shards(out).summary()} in {out}")


def say(line: str) -> None:
    """One line, at once: a container's log is followed while it is written."""
    print(line, flush=True)


if __name__ == "__main__":
    run_main(main)
