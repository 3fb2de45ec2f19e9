"""Is this node making steps? `python -m scripts.health`: exit 0 when the trainer made a step lately, else 1.

The trainer touches the file that LANTRAIN_HEARTBEAT names at every step. LANTRAIN_HEALTH_SECONDS (600) is how old it
may be: longer than the slowest step expected, and than a checkpoint.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from lantrain.errors import run_main
from lantrain.settings import positive_number


def verdict(heartbeat: Path, limit: float, now: float) -> tuple[bool, str]:
    """Whether the last step is at most `limit` seconds before `now` (seconds since the epoch), and the words for it."""
    try:
        age = now - heartbeat.stat().st_mtime
    except OSError:
        return False, f"no step yet ({heartbeat} is not there)"
    return age <= limit, f"last step {age:.0f} s ago (limit {limit:.0f} s)"


def main() -> int:
    """Print the verdict; `docker inspect` shows the last few."""
    heartbeat = Path(os.environ.get("LANTRAIN_HEARTBEAT") or "/tmp/lantrain-heartbeat")
    limit = positive_number("LANTRAIN_HEALTH_SECONDS", 600, "seconds")
    healthy, words = verdict(heartbeat, limit, time.time())
    print(words)
    return 0 if healthy else 1


if __name__ == "__main__":
    run_main(main)
