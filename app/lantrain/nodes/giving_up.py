"""Not starting again for ever: Docker's `on-failure` cannot tell a killed node from one that a mistake has ended.

The node that ends by a mistake leaves a note on the volume, under its container's id. Docker starts it once more; that
start takes the note away, repeats what it says and ends with 0, which Docker takes for the end. A start by hand after
that, or in a new container, finds no note and is a start like any other.

A volume that is full, read-only or another user's takes no note, and a container has no other place that outlives it:
its root is read-only, /tmp and /dev/shm are made anew at each start. Then the mistaken start itself has to end with 0.
"""

from __future__ import annotations

import re
from pathlib import Path

from lantrain import paths

MOUNTS = Path("/proc/self/mountinfo")


def container_id(mounts: Path = MOUNTS) -> str:
    """Id of the Docker container that this is, from the files that Docker mounts into each; empty outside of one."""
    try:
        found = re.search(r"/containers/([0-9a-f]{64})/(?:hostname|hosts|resolv\.conf)", mounts.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _note(mounts: Path) -> Path | None:
    identity = container_id(mounts)
    return paths.base_dir() / f".ended-{identity[:12]}" if identity else None


def leave_note(why: str, mounts: Path = MOUNTS) -> bool:
    """Keep the next start of this container from trying again. False where that takes an end with code 0 instead."""
    note = _note(mounts)
    if note is None:
        return True
    try:
        note.write_text(why)
    except OSError as error:
        note_missing = f"cannot write {note.parent} ({error.strerror})"
        print(f"[lantrain] {note_missing}: ending with code 0, so that Docker does not start this again", flush=True)
        return False
    return True


def take_note(mounts: Path = MOUNTS) -> str:
    """What this container's last start left, once; empty when it left nothing."""
    note = _note(mounts)
    if note is None:
        return ""
    try:
        why = note.read_text()
        note.unlink()
    except OSError:
        return ""
    return why or "see above"
