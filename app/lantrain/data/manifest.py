"""manifest.json beside the shards: which files there are, how many rows, and their SHA-256."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lantrain.data.files import sha256_of, write_atomic
from lantrain.data.shards import open_shard
from lantrain.errors import UserError
from lantrain.paths import how_to_write

NAME = "manifest.json"
Log = Callable[[str], None]


@dataclass(frozen=True)
class FileRecord:
    """One shard: name, documents, row groups, size in bytes, SHA-256 (hex)."""

    file: str
    rows: int
    row_groups: int
    bytes: int
    sha256: str

    def intact(self, folder: Path) -> bool:
        """Whether the file is there with this size and these contents."""
        path = folder / self.file
        return path.is_file() and path.stat().st_size == self.bytes and sha256_of(path) == self.sha256


@dataclass
class Manifest:
    """What is in a folder of shards and where it came from."""

    source: str
    files: dict[str, FileRecord] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def add(self, path: Path, sha256: str | None = None) -> FileRecord:
        """Check a parquet file and note it. Raises UserError when it is no usable shard."""
        shard = open_shard(path)
        record = FileRecord(path.name, shard.rows, len(shard.row_groups), shard.bytes, sha256 or sha256_of(path))
        self.files[path.name] = record
        return record

    def write(self, folder: Path) -> None:
        """Write it, atomically, files in name order."""
        files = [asdict(self.files[name]) for name in sorted(self.files)]
        text = json.dumps({"source": self.source, "about": self.about, "files": files}, indent=1)
        write_atomic(folder / NAME, (text + "\n").encode())


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None when there is none, or none that can be used (then it is made anew)."""
    try:
        record = json.loads((folder / NAME).read_bytes())
        files = [FileRecord(**entry) for entry in record["files"]]
        return Manifest(str(record["source"]), {entry.file: entry for entry in files}, dict(record["about"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Make the folder and hold it, so that two preparations never write into it at once.

    Raises UserError when it cannot be written or another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".prepare.lock", timeout=1):
            yield
    except Timeout:
        raise UserError(f"another prepare_data is writing to {folder}", "wait, or choose another --out") from None
    except OSError as error:
        raise UserError(
            f"cannot write to {error.filename or folder}: {error.strerror}", how_to_write(error, folder)
        ) from error


def refuse_to_mix(folder: Path, source: str, own_names: Callable[[str], bool]) -> None:
    """Two data sets in one folder would train on both and take validation from whichever sorts last.

    Raises UserError when the folder holds shards of another source, or files that this source never makes.
    """
    manifest = read_manifest(folder)
    others = sorted(p.name for p in folder.glob("*.parquet") if not own_names(p.name))
    if manifest and manifest.source != source and any((folder / name).exists() for name in manifest.files):
        raise UserError(f"{folder} holds shards of {manifest.source}", f"choose another --out for {source}")
    if others or (manifest is None and source == "sample" and any(folder.glob("*.parquet"))):
        name = others[0] if others else "shards without a manifest"
        raise UserError(f"{folder} holds {name}, not of {source}", f"choose another --out for {source}")
