"""Where a trainer hangs: it writes the Python stacks of its threads when it is asked by SIGUSR2.

The handler is faulthandler's, in C: it answers inside a collective that never ends, and needs neither the interpreter's
lock nor any right that a container lacks (reading another process's stack from outside needs ptrace).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import IO

import psutil

ASK_SIGNAL = signal.SIGUSR2
ANSWER_SECONDS = 2.0
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_file: IO[str] | None = None


def offer() -> None:
    """In the trainer: answer ASK_SIGNAL in the file that LANTRAIN_STACKS names, or else in the log."""
    global _file
    path = os.environ.get("LANTRAIN_STACKS")
    if path:
        with contextlib.suppress(OSError):
            _file = open(path, "a")  # noqa: SIM115  (open for the life of the process)
    faulthandler.register(ASK_SIGNAL, file=_file or sys.stderr, all_threads=True, chain=False)


def ask(pid: int, path: Path, seconds: float = ANSWER_SECONDS) -> str:
    """In the launcher: the stacks of process `pid`, which answers in `path`; "" when it does not within `seconds`.

    A process that is stopped (SIGSTOP) is continued for its answer, which it gives before anything else.
    """
    before = path.stat().st_size if path.exists() else 0
    try:
        os.kill(pid, ASK_SIGNAL)
        os.kill(pid, signal.SIGCONT)
    except (ProcessLookupError, PermissionError):
        return ""
    until, answer = time.monotonic() + seconds, ""
    while time.monotonic() < until:
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            now = path.read_bytes()[before:].decode(errors="replace")
            if now and now == answer:
                break
            answer = now
    return answer


def where(stacks: str) -> str:
    """The place of the main thread in one phrase: the innermost function of ours, and what it has called."""
    threads = re.split(r"\n\n+(?=(?:Current thread|Thread) )", stacks)
    found = [FRAME.findall(thread) for thread in threads]
    frames = next((thread for thread in found if any(name == "<module>" for _, _, name in thread)), [])
    if not frames:
        return "its main thread is in no Python"
    own = next(((path, line, name) for path, line, name in frames if "/lantrain/" in path), frames[0])
    path, line, name = own
    called = "" if frames[0] == own else f", calling {frames[0][2]}"
    return f"{name} ({path.rpartition('/lantrain/')[2]}:{line}){called}"


def state(pid: int) -> str:
    """What the kernel says of a process that does not answer, in words."""
    try:
        status = str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"
    words = {
        psutil.STATUS_DISK_SLEEP: "waiting for a disk, or a network file system, that does not answer",
        psutil.STATUS_TRACING_STOP: "held by a debugger",
        psutil.STATUS_STOPPED: "stopped",
        psutil.STATUS_ZOMBIE: "dead",
    }
    return words.get(status, status)
