"""Join machines into one training run: `python -m scripts.node master`, `worker HOST`, `status`, `end`.

The settings come from the environment, so that compose hands them on: NODES, HOST, TRAIN_ARGS, ADDRESS, HUB_PORT,
MASTER_PORT, ALLOW, TOKEN, KEEP_SLOW, SILENCE, STALL, WAIT, PATIENCE, DATA_SOURCE.

Exit codes: 0 when training is finished or the master was told to end; 128 + the signal's number when stopped by one; 1
when starting again may help; others (most often 2) when something has to be mended first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lantrain.cluster.addresses import clean_host, resolve
from lantrain.errors import LOST_PEER_EXIT, UserError, run_main
from lantrain.nodes import giving_up
from lantrain.nodes.members import MAX_NODES, Limits
from lantrain.settings import port, positive_integer, positive_number

if TYPE_CHECKING:
    from lantrain.nodes.client import HubClient

END_SECONDS = 130.0
"""For `end`: the master takes up to 90 s for its step and checkpoint, and 30 s for its farewell."""
DEFAULT_TRAIN_ARGS = (
    "--depth 4 --max-seq-len 512 --device-batch-size 2 --total-batch-size 4096 --num-iterations 1000 --eval-every 100"
)


def _limits() -> Limits:
    return Limits(
        silence=positive_number("SILENCE", Limits.silence, "seconds"),
        stall=positive_number("STALL", Limits.stall, "seconds"),
        patience=positive_number("PATIENCE", Limits.patience, "seconds"),
    )


def _launch(run: Callable[[], int]) -> int:
    """Run a launcher, unless the start before this one ended by a mistake that is still there."""
    why = giving_up.take_note()
    if why:
        print(f"[lantrain] not starting again: {why}", flush=True)
        return 0
    try:
        code = run()
    except UserError as error:
        line = " ".join(str(error).split())
        if error.exit_code == LOST_PEER_EXIT or giving_up.leave_note(line):
            raise
        print(f"error: {line}", file=sys.stderr, flush=True)
        return 0
    if 0 < code < 128 and not giving_up.leave_note(
        "the run has ended by an error, see above; mend it, start it by hand"
    ):
        return 0
    return code


def _master() -> int:
    from lantrain import paths
    from lantrain.nodes.master import MasterOptions, run_master, split_arguments
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
        nodes=positive_integer("NODES", 2, MAX_NODES), address=os.environ.get("ADDRESS", "").strip(),
        hub_port=port("HUB_PORT", 29501), train_port=port("MASTER_PORT", 29500),
        arguments=arguments, allow=os.environ.get("ALLOW", ""), token=os.environ.get("TOKEN", ""),
        prepare=prepare_data, limits=_limits(), keep_slow=os.environ.get("KEEP_SLOW", "") not in ("", "0"),
    )  # fmt: skip
    return run_master(options)


def _worker(host: str) -> int:
    clean_host(host)  # before torch is loaded
    from lantrain.nodes.worker import WorkerOptions, run_worker

    options = WorkerOptions(
        host, port("HUB_PORT", 29501), os.environ.get("TOKEN", ""), positive_number("WAIT", 600, "seconds"),
        _limits(),
    )  # fmt: skip
    return run_worker(options)


def _await_the_end(client: HubClient) -> int:
    """Return when every node has heard of the end and left, or the hub is gone; a checkpoint is waited for.

    Whoever asked may stop the containers of this machine next: a worker among them has to know by then.
    """
    import httpx2

    until = time.monotonic() + END_SECONDS
    print("every node ends at the next step, with a checkpoint", flush=True)
    while time.monotonic() < until:
        try:
            if client.status()["over"]:
                break
        except (httpx2.HTTPError, OSError):
            break
        time.sleep(0.5)
    return 0


def _ask(command: str, host: str, as_json: bool) -> int:
    import httpx2

    from lantrain.nodes.client import HubClient, why_unreachable
    from lantrain.nodes.master import node_table

    hub_port = port("HUB_PORT", 29501)
    client = HubClient(host, hub_port, os.environ.get("TOKEN", ""))
    try:
        if command == "end":
            client.end("the master was told to end")
            return _await_the_end(client)
        status = client.status()
    except (httpx2.HTTPError, OSError):
        raise UserError(
            f"no run here: {why_unreachable(host, hub_port) or 'the hub does not answer'}", "make up-master", 1
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
    parser.add_argument("command", choices=["master", "worker", "status", "end", "check"])
    parser.add_argument("host", nargs="?", default=None, help="the master's address (default: HOST)")
    parser.add_argument("--json", action="store_true", help="for status: the whole answer")
    args = parser.parse_args()
    host = args.host if args.host is not None else os.environ.get("HOST", "")
    if args.command == "master":
        print("[lantrain] master starting", flush=True)
        return _launch(_master)
    if args.command == "worker":
        print("[lantrain] worker starting", flush=True)
        return _launch(lambda: _worker(host))
    if args.command == "check":
        print(f"the master's address is {resolve(clean_host(host))}", flush=True)
        return 0
    return _ask(args.command, host or "127.0.0.1", args.json)


if __name__ == "__main__":
    run_main(main)
