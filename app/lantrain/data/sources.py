"""The data sets that the stack knows, read from `data/sources.toml`."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lantrain.errors import UserError

_APP = Path(__file__).resolve().parents[2]
# In a checkout, and in the image (whose /data is the volume, hence a copy beside the code).
_PLACES = (_APP / "sources.toml", _APP.parent / "data" / "sources.toml")
_REQUIRED: dict[str, dict[str, type]] = {
    "huggingface": {"repo": str, "file": str, "validation_index": int, "default_shards": int},
    "stdlib": {"shards": int, "row_group_rows": int},
}


@dataclass(frozen=True)
class Source:
    """One data set: `kind` says how it is obtained, `options` are that kind's settings."""

    name: str
    kind: str
    about: str
    options: dict[str, Any] = field(default_factory=dict)


def load_sources(path: Path | None = None) -> dict[str, Source]:
    """All sources by name, from `path`, LANTRAIN_SOURCES, or the file that came with the code. Raises UserError."""
    path = path or _find()
    try:
        entries: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the list of data sources {path}: {error}", "restore data/sources.toml") from error
    return {name: _source(path, name, entry) for name, entry in entries.items()}


def _find() -> Path:
    override = os.environ.get("LANTRAIN_SOURCES")
    if override:
        return Path(override)
    return next((place for place in _PLACES if place.is_file()), _PLACES[-1])


def _source(path: Path, name: str, entry: Any) -> Source:
    if not isinstance(entry, dict) or entry.get("kind") not in _REQUIRED:
        raise UserError(f"{path}, [{name}]: kind must be one of {', '.join(_REQUIRED)}", "mend the entry")
    for option, kind in _REQUIRED[entry["kind"]].items():
        if not isinstance(entry.get(option), kind):
            raise UserError(f"{path}, [{name}]: {option} ({kind.__name__}) is missing or of another type", "add it")
    options = {key: value for key, value in entry.items() if key not in ("kind", "about")}
    return Source(name, entry["kind"], str(entry.get("about", "")), options)
