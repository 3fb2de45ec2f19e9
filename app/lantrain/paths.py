"""Where things are kept. The names are nanochat's, so that either program finds the other's files."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def base_dir() -> Path:
    """Root of everything that lasts: NANOCHAT_BASE_DIR, or ~/.cache/nanochat as nanochat has it."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat").expanduser()


def data_dir() -> Path:
    """Folder of the parquet shards: NANOCHAT_DATA_DIR, or base_data_climbmix under the base directory."""
    override = os.environ.get("NANOCHAT_DATA_DIR")
    return Path(override).expanduser() if override else base_dir() / "base_data_climbmix"


def tokenizer_dir() -> Path:
    """Folder of tokenizer.json, tokenizer.pkl and token_bytes.pt."""
    return base_dir() / "tokenizer"


def checkpoint_dir(tag: str) -> Path:
    """Folder of the checkpoints and metrics of the model called `tag` (d4, d8, or --model-tag)."""
    return base_dir() / "base_checkpoints" / tag


def how_to_write(error: OSError, folder: Path) -> str:
    """What to do about `error`, with which writing in `folder` failed."""
    if error.errno in (errno.EACCES, errno.EPERM):
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return f"give it to this user: sudo chown -R {os.getuid()}:{os.getgid()} {folder}; if mounted: what is mounted"
    if error.errno == errno.ENOSPC:
        return "free some space, or set NANOCHAT_BASE_DIR to a bigger disk"
    if error.errno == errno.EROFS:
        return f"mount it for writing (see mount, dmesg): {folder}"
    return "set NANOCHAT_BASE_DIR to a folder that can be written"
