"""Join machines into one training run: `python -m scripts.node master`, `worker HOST`, `status`, `end`.

The settings come from the environment, so that compose hands them on: NODES, HOST, TRAIN_ARGS, ADDRESS, HUB_PORT,
MASTER_PORT, ALLOW, TOKEN, SILENCE, WAIT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from lantrain.errors import UserError, run_main

DEFAULT_TRAIN_ARGS = (
    "--depth 4 --max-seq-len 512 --device-batch-size 2 --total-batch-size 4096 --num-iterations 1000 --eval-every 100"
)


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if value <= 0:
        raise UserError(f"{name}={text} is not a positive number", f"for example {name}={default:g}")
    return value


def _master() -> int:
    from lantrain import paths
    from lantrain.cluster.membership import Limits
    from lantrain.cluster.node import MasterOptions, run_master, split_arguments
    from lantrain.training.config import parse
    from scripts.prepare import main as prepare

    arguments = split_arguments(os.environ.get("TRAIN_ARGS") or DEFAULT_TRAIN_ARGS)
    parse(arguments)  # a mistake in the flags is told now, and not after everybody has joined

    def prepare_data() -> None:
        if any(paths.data_dir().glob("*.parquet")) and (paths.tokenizer_dir() / "tokenizer.json").exists():
            return
        sys.argv = ["prepare", "--source", os.environ.get("DATA_SOURCE") or "sample"]
        prepare()

    options = MasterOptions(
        nodes=int(_number("NODES", 2)), address=os.environ.get("ADDRESS", "").strip(),
        hub_port=int(_number("HUB_PORT", 29501)), train_port=int(_number("MASTER_PORT", 29500)),
        arguments=arguments, allow=os.environ.get("ALLOW", ""), token=os.environ.get("TOKEN", ""),
        prepare=prepare_data, limits=Limits(silence=_number("SILENCE", 15)),
    )  # fmt: skip
    return run_master(options)


def _worker(host: str) -> int:
    from lantrain.cluster.addresses import clean_host
    from lantrain.cluster.membership import Limits

    clean_host(host)  # before torch is loaded
    from lantrain.cluster.node import WorkerOptions, run_worker

    options = WorkerOptions(
        host, int(_number("HUB_PORT", 29501)), os.environ.get("TOKEN", ""), _number("WAIT", 600),
        Limits(silence=_number("SILENCE", 15)),
    )  # fmt: skip
    return run_worker(options)


def _ask(command: str, host: str, as_json: bool) -> int:
    import httpx2

    from lantrain.cluster.client import HubClient, why_unreachable
    from lantrain.cluster.node import node_table

    port = int(_number("HUB_PORT", 29501))
    client = HubClient(host, port, os.environ.get("TOKEN", ""))
    try:
        if command == "end":
            client.end("the master was told to end")
            return 0
        status = client.status()
    except (httpx2.HTTPError, OSError):
        raise UserError(
            f"no run here: {why_unreachable(host, port) or 'the hub does not answer'}", "make up-master", 1
        ) from None
    if as_json:
        print(json.dumps(status, indent=2))
    else:
        step = max((node["step"] for node in status["nodes"]), default=0)
        print(f"{status['phase']}, generation {status['generation']}, step {step}, up {status['up_s']} s")
        print(node_table(status["nodes"]))
    return 0


def main() -> int:
    """Dispatch to the launcher that was asked for."""
    parser = argparse.ArgumentParser(prog="scripts.node", description=__doc__)
    parser.add_argument("command", choices=["master", "worker", "status", "end"])
    parser.add_argument("host", nargs="?", default=None, help="the master's address (default: HOST)")
    parser.add_argument("--json", action="store_true", help="for status: the whole answer")
    args = parser.parse_args()
    host = args.host if args.host is not None else os.environ.get("HOST", "")
    if args.command == "master":
        print("[lantrain] master starting", flush=True)
        return _master()
    if args.command == "worker":
        print("[lantrain] worker starting", flush=True)
        return _worker(host)
    return _ask(args.command, host or "127.0.0.1", args.json)


if __name__ == "__main__":
    run_main(main)
