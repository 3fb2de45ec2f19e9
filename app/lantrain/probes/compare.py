"""Probes that compare this machine with the master, or measure what is between them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator

from lantrain.nodes.messages import NodeInfo
from lantrain.probes.result import Result

CLOCK_SECONDS = 5.0
"""A difference that people notice when they lay two logs side by side. Training does not look at the clock."""
SLOW_LINK_MBS = 5.0
"""Below a 100-Mbit/s cable by half: busy or distant Wi-Fi."""
LINK_SECONDS = 3.0
ROUND_TRIPS = 7


def clock(theirs: float, mine: float) -> Result:
    """Compare two readings of the wall clock, in seconds, taken at the same moment."""
    ahead = mine - theirs
    tried = "compared this machine's time with the master's"
    seen = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the master"
    if abs(ahead) <= CLOCK_SECONDS:
        return Result("clock", "ok", tried, seen)
    means = "training does not mind, but the times in the two logs do not match"
    return Result("clock", "warn", tried, seen, means, {"": "sudo timedatectl set-ntp true"}, "both machines")


def versions(info: NodeInfo, master: dict[str, str]) -> Result:
    """Compare lantrain, its code and torch with the master's."""
    mine = {"lantrain": info.version, "code": info.code, "torch": info.torch}
    tried = "compared lantrain, its code and torch with the master's"
    differing = [(item, mine[item], master.get(item, "unknown")) for item in mine if mine[item] != master.get(item)]
    if not differing:
        return Result("versions", "ok", tried, f"lantrain {info.version}, code {info.code}, torch {info.torch} on both")
    seen = "; ".join(f"{item} is {here} here, {there} on the master" for item, here, there in differing)
    means = "the ranks would compute different things: this image is older or newer than the master's"
    return Result("versions", "fail", tried, seen, means, {"": "git pull && make image"}, "both machines")


def arithmetic(info: NodeInfo, cpu: str, update: str) -> Result:
    """Compare the bits of this machine's optimizer, of class `info.cpu`, with those of the master, of class `cpu`."""
    tried = "made the same updates as the master"
    if not update or info.update == update:
        return Result("arithmetic", "ok", tried, f"{info.cpu}, the same bits as the master's {cpu}".strip())
    seen = f"{info.cpu} here gives other bits than the master's {cpu}"
    means = "CPUs of all kinds give the same bits: a wrong image, or faulty memory or a faulty CPU"
    mend = {"": "make image; if that does not help, test memory and CPU, or leave this machine out"}
    return Result("arithmetic", "fail", tried, seen, means, mend, "this machine")


def round_trip(ask: Callable[[], object]) -> float:
    """Milliseconds of one question and answer: the median of some, after one that opens the connection."""
    ask()
    times = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        ask()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1000, 2)


def link_rate(chunks: Iterator[bytes], seconds: float = LINK_SECONDS) -> float:
    """MB/s of a stream, for at most `seconds`, from its first byte on."""
    size, start = 0, 0.0
    for chunk in chunks:
        if not start:
            start = time.perf_counter()
            continue
        size += len(chunk)
        if time.perf_counter() - start > seconds:
            break
    took = time.perf_counter() - start
    return round(size / took / 1e6, 1) if size else 0.0


def link(mbs: float, round_trip_ms: float, sends_mib: int) -> Result:
    """Judge a measured link; `sends_mib` is what a rank sends in a step."""
    tried = "read from the hub for up to 3 s, and asked it some short questions"
    seconds = sends_mib * 1.048576 / mbs if mbs else 0.0
    seen = f"{mbs:g} MB/s, round trip {round_trip_ms:g} ms; a step sends {sends_mib} MiB: {seconds:.1f} s of this link"
    if mbs >= SLOW_LINK_MBS:
        return Result("link", "ok", tried, seen)
    means = "slow: Wi-Fi far from its router, a busy network or a bad cable; a cable would speed up every step"
    return Result("link", "warn", tried, seen, means, {"": "ethtool <interface> | grep Speed"}, "this machine")


def gemm(info: NodeInfo, native_bf16: bool) -> Result:
    """Judge the measured rate of matrix products and the dtype."""
    tried = f"multiplied matrices in {info.dtype} with {info.threads} threads"
    seen = f"{info.gemm_gflops:g} GFLOP/s in {info.dtype}, {info.threads} threads on {info.cores} cores"
    if info.dtype == "bfloat16" and not native_bf16:
        means = "this CPU has no bf16 matrix instructions and emulates them, up to 500 times slower"
        return Result("gemm", "warn", tried, seen, means, {"": "make up-master NANOCHAT_DTYPE=auto"}, "the master")
    if info.threads > info.cores:
        given = os.environ.get("OMP_NUM_THREADS", "")
        means = f"more threads than cores wait for each other (OMP_NUM_THREADS={given})"
        return Result("gemm", "warn", tried, seen, means, {"": "unset OMP_NUM_THREADS"}, "this machine")
    return Result("gemm", "ok", tried, seen)
