"""Numbers that people set by environment variables, as compose hands them on."""

from __future__ import annotations

import math
import os

from lantrain.errors import UserError


def positive_number(name: str, default: float, unit: str = "") -> float:
    """The number in the variable `name`; `default` where it is unset or blank.

    Raises UserError for anything that is no finite number above 0: "nan" would pass every comparison with a limit.
    """
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        what = f"a positive number of {unit}" if unit else "a positive number"
        raise UserError(f"{name}={text} is not {what}", f"unset it, or for example {name}={default:g}")
    return value


def positive_integer(name: str, default: int, most: int | None = None) -> int:
    """The whole number in the variable `name`, else `default`. Raises UserError unless it is in 1..`most`."""
    value = positive_number(name, default)
    if value != int(value):
        raise UserError(f"{name}={value:g} is not a whole number", f"unset it, or for example {name}={default}")
    if most is not None and value > most:
        raise UserError(f"{name}={value:.0f} is above {most}", f"unset it, or for example {name}={default}")
    return int(value)


def port(name: str, default: int) -> int:
    """The TCP port in the variable `name`. Raises UserError for what is none."""
    return positive_integer(name, default, 65535)
