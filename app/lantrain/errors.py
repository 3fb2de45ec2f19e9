"""How a mistake reaches the person at the keyboard: one line, the mending command, a non-zero exit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

USER_ERROR_EXIT = 2
LOST_PEER_EXIT = 1
"""Another rank or the network failed; starting again from the last checkpoint helps."""
WRONG_NUMBERS_EXIT = 3
"""The loss is not a number, or replicas differ; starting again by itself would only hide it."""


class UserError(Exception):
    """Something that the person running the command can mend.

    The message says what happened and where (file, row group, column, flag); `mend` is what to do about it,
    most often a command to type. Both are printed as one line and never with a traceback.
    """

    def __init__(self, message: str, mend: str = "", exit_code: int = USER_ERROR_EXIT) -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message} ({self.mend})" if self.mend else self.message


def run_main(main: Callable[[], int | None], *, at_once: bool = False) -> NoReturn:
    """Run a command's `main` and leave with its exit code; a UserError becomes one line on stderr, Ctrl-C 130.

    With `at_once` the process ends there, after a flush, without taking the interpreter down. A trainer needs that:
    while Python is being taken down, Gloo's threads may meet the closing connection of a peer that leaves at the same
    moment, and abort the process (seen once, on a busy machine). Its launcher would then see SIGABRT instead of the
    code that says what happened.
    """
    try:
        code = main() or 0
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    if at_once:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
