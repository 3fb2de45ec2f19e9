"""Check this machine and, with HOST, the way to the master there: `python -m scripts.doctor [HOST] [--json]`.

Without HOST it looks at what a master needs. Exits 0 when nothing failed, 1 otherwise. Settings come from the
environment, as for the launchers: HOST, HUB_PORT, MASTER_PORT, TOKEN, ADDRESS, NODES, TRAIN_ARGS.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from lantrain import settings
from lantrain.errors import UserError, run_main

if TYPE_CHECKING:
    from lantrain.probes.result import Result


def _own_ports(address: str, hub_port: int) -> Result | None:
    """The result when it is this machine's own master that holds the ports; None when none is up."""
    import httpx2

    from lantrain.nodes.client import HubClient
    from lantrain.probes.result import Result

    try:
        hello = HubClient(address, hub_port).hello()
    except (httpx2.HTTPError, OSError):
        return None
    if "lantrain" not in hello:
        return None
    return Result(
        "port-held", "ok", f"asked port {hub_port} who is there", "a lantrain master is up here and uses them"
    )


def check_master() -> list[Result]:
    """What a master needs on this machine."""
    from lantrain import paths
    from lantrain.cluster.addresses import own_address
    from lantrain.cluster.gemm import native_bf16
    from lantrain.nodes.launcher import describe_node
    from lantrain.nodes.master import split_arguments
    from lantrain.nodes.members import MAX_NODES
    from lantrain.probes import compare as probes_peer
    from lantrain.probes import here as probes_here
    from lantrain.probes import preflight
    from scripts.node import DEFAULT_TRAIN_ARGS

    here = own_address(os.environ.get("ADDRESS", "").strip())
    arguments = split_arguments(os.environ.get("TRAIN_ARGS") or DEFAULT_TRAIN_ARGS)
    info = describe_node(here.name)
    hub, train = settings.port("HUB_PORT", 29501), settings.port("MASTER_PORT", 29500)
    return [
        probes_here.address(here),
        *preflight.local_probes(here.address),
        _own_ports(here.address, hub) or preflight.master_ports(hub, train),
        *preflight.master_room(arguments, settings.positive_integer("NODES", 2, MAX_NODES), paths.base_dir()),
        probes_peer.gemm(info, native_bf16()),
    ]


def check_worker(host: str) -> list[Result]:
    """What a worker of the master at `host` needs. Raises UserError for an address that cannot be one."""
    import httpx2

    from lantrain.cluster.addresses import clean_host, resolve
    from lantrain.cluster.gemm import native_bf16
    from lantrain.nodes.client import HubClient
    from lantrain.nodes.launcher import describe_node
    from lantrain.probes import compare as probes_peer
    from lantrain.probes import here as probes_here
    from lantrain.probes import ports as probes_ports
    from lantrain.probes import preflight
    from lantrain.probes.mend import lan_towards, open_firewall, port_range

    address, port = resolve(clean_host(host)), settings.port("HUB_PORT", 29501)
    used = probes_here.on_route(address)
    mend = open_firewall(lan_towards(address, used), port_range([port, 29500]))
    attempt = probes_ports.try_connect(address, port, probes_ports.REACH_SECONDS)
    reached = probes_ports.hub_port(attempt, master=address, mend=mend)
    info = describe_node(used.name if used else "")
    if reached.status == "fail":
        return [*preflight.local_probes(address), reached, probes_peer.gemm(info, native_bf16())]
    client = HubClient(address, port, os.environ.get("TOKEN", ""))
    try:
        results, _, _ = preflight.worker_probes(client, info)
    except (httpx2.HTTPError, OSError) as error:
        raise UserError(
            f"the master at {address}:{port} did not answer the probes: {error}", "make logs there"
        ) from None
    return [reached, *results]


def show(results: list[Result]) -> None:
    """The table; below it a line for each warning and a block for each failure."""
    from lantrain.probes.result import table

    print(table(results))
    for result in results:
        if result.status == "warn":
            print(f"\nnote: {result.line()}")
    for result in results:
        if result.status == "fail":
            print(f"\n{result.block()}")
    bad = sum(result.status == "fail" for result in results)
    print(f"\n{bad} of {len(results)} checks failed" if bad else f"\nnothing in the way ({len(results)} checks)")


def main() -> int:
    """Run the checks for the role that HOST says."""
    parser = argparse.ArgumentParser(prog="scripts.doctor", description=__doc__)
    parser.add_argument("host", nargs="?", default=None, help="the master's address (default: HOST)")
    parser.add_argument("--json", action="store_true", help="for scripts")
    args = parser.parse_args()
    host = args.host if args.host is not None else os.environ.get("HOST", "")
    try:
        results = check_worker(host) if args.host is not None or host.strip() else check_master()
    except UserError as error:
        if not args.json:
            raise UserError(error.message, error.mend, 1) from None
        print(json.dumps({"ok": False, "error": str(error), "probes": []}, indent=2))
        return 1
    ok = all(result.status != "fail" for result in results)
    if args.json:
        print(json.dumps({"ok": ok, "probes": [result.as_json() for result in results]}, indent=2))
    else:
        show(results)
        sys.stdout.flush()
    return 0 if ok else 1


if __name__ == "__main__":
    run_main(main)
