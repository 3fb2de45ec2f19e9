"""How a command leaves: the line, the code, and nothing in between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

APP = Path(__file__).resolve().parents[2] / "app"

PROGRAM = """
import threading
from lantrain.errors import UserError, run_main

def main():
    threading.Thread(target=threading.Event().wait).start()  # ends never: taking the interpreter down would wait for it
    print("one line", end="")
    {ending}

run_main(main, at_once=True)
"""


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("raise UserError('the loss is not a number', 'lower the rate', 3)", 3, "error: the loss is not a n"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("return 143", 143, ""),
        ("return None", 0, ""),
    ],
)
def test_leaving_at_once_waits_for_no_thread_and_loses_no_word(ending: str, code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(ending=ending)], cwd=APP, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert done.stdout == "one line"
    assert done.stderr.startswith(said)
