"""What all commands do with their flags: one clear line and exit 2 for a mistake, numbers looked at before anything
slow. Numbers from the environment: settings.py.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Mapping
from typing import NoReturn

from lantrain.errors import UserError

LARGEST = 2**31 - 1
"""No whole number of the command line or of the plan is larger: far from any run, and safe in every tensor."""


class Parser(argparse.ArgumentParser):
    """argparse with one clear line for a mistake, instead of the whole usage. `prog` is what a person types."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError, with the flag that was meant where one is near."""
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, n=1) if unknown else []
        guess = f"did you mean {near[0]}? " if near else ""
        raise UserError(message, f"{guess}{self.prog} --help lists the flags")


def check_numbers(args: argparse.Namespace, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise UserError unless each number of `args` is finite and within its least and most in `ranges`.

    `ranges` is by name with underscores. A whole number that is not there is at most LARGEST: Python's own have no
    limit, and a tensor or a list of such a size is a traceback, or a plan that is never done.
    """
    for name, value in vars(args).items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        flag = f"--{name.replace('_', '-')}"
        # "nan" passes every comparison, and infinity most of them.
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{flag} {value} is not a number to compute with", "leave it out for the default")
        least, most = ranges.get(name, (-math.inf, LARGEST if isinstance(value, int) else math.inf))
        if not least <= value <= most:
            raise UserError(f"{flag} must be {_in_words(least, most)}, not {value}", "leave it out for the default")


def _in_words(least: float, most: float) -> str:
    if math.isinf(least):
        return f"at most {most:,}"
    return f"at least {least:,}" if math.isinf(most) else f"from {least:,} to {most:,}"
