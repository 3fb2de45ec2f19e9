"""Numbers that people set by environment variables, as compose hands them on. Those of flags: flags.py."""

from __future__ import annotations

import math
import os

from lantrain.errors import UserError

LONGEST = 10**8
"""Seconds, three years: as good as for ever, and far from 2^63 ns, where Python's waits end with a traceback."""


def _number(name: str, default: float) -> tuple[str, float]:
    """What the variable `name` has, as text without blanks and as a number, not a number where it is none."""
    text = os.environ.get(name, "").strip()
    try:
        return text, float(text) if text else default
    except ValueError:
        return text, math.nan


def positive_number(name: str, default: float, unit: str = "", most: float = LONGEST) -> float:
    """The number in the variable `name`; `default` where it is unset or blank.

    Raises UserError unless it is above 0 and at most `most`: "nan" would pass every comparison with a limit.
    """
    text, value = _number(name, default)
    if not 0 < value <= most:
        what = f"a positive number of {unit}" if unit else "a positive number"
        raise UserError(f"{name}={text} is not {what} up to {most:,}", f"unset it, or for example {name}={default:g}")
    return value


def positive_integer(name: str, default: int, most: int) -> int:
    """The whole number in the variable `name`, else `default`. Raises UserError unless it is in 1..`most`."""
    text, value = _number(name, default)
    if not (1 <= value <= most and value == int(value)):
        raise UserError(
            f"{name}={text} is not a whole number from 1 to {most}", f"unset it, or for example {name}={default}"
        )
    return int(value)


def port(name: str, default: int) -> int:
    """The TCP port in the variable `name`. Raises UserError for what is none."""
    return positive_integer(name, default, 65535)
