"""Shards from the Hugging Face hub: resumed at the byte, retried, checked against the hub's SHA-256.

Uses huggingface_hub's client, so HF_ENDPOINT (a mirror), HF_TOKEN, HF_HUB_OFFLINE and proxies work as its users know
them. `hf_hub_download` (2.4) throws a partial file away when it is interrupted; here it stays under `.partial/` and
the next run continues it, which is what a 92 MB shard on a home line needs.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfFileMetadata, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

from lantrain.data.files import publish, sha256_of
from lantrain.data.manifest import FileRecord, Log, Manifest, read_manifest, refuse_to_mix, writing_to
from lantrain.data.sources import Source
from lantrain.errors import UserError

ATTEMPTS = 4
ASK_SECONDS = 10.0  # for the hub to answer; an unreachable one is known within ATTEMPTS of these and the pauses
_PAUSES = (1.0, 2.0, 4.0)
_SPARE_BYTES = 500_000_000  # left free beside the shards, for the tokenizer and the first checkpoint
_ASK_THREADS = 8
_PROGRESS_SECONDS = 5.0
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG)
T = TypeVar("T")
# The client writes pieces of 10 MB and loses a begun one with the connection: a minute's work on a slow line.
constants.DOWNLOAD_CHUNK_SIZE = 1 << 20


@dataclass(frozen=True)
class Remote:
    """A file on the hub: where, how large, its SHA-256 when the hub tells it (it does for LFS files)."""

    name: str
    url: str
    size: int
    etag: str
    commit: str

    @property
    def sha256(self) -> str | None:
        """The hub's hash of an LFS file; other files have a git hash for etag."""
        return self.etag if len(self.etag) == 64 else None


def download(out: Path, source: Source, num_shards: int | None = None, log: Log = print) -> Manifest:
    """Fetch training shards 0 .. num_shards - 1 and the validation shard into `out`; skip what is there intact.

    Raises UserError when `num_shards` is out of range, `out` holds other data or is full, or the hub cannot be
    reached, has no such file, or gives wrong contents again and again.
    """
    names = shard_names(source, num_shards)
    refuse_to_mix(out, source.name, lambda name: _is_shard_of(source, name))
    manifest = read_manifest(out) or Manifest(source.name, about={"repo": source.options["repo"]})
    missing = [name for name in names if not _is_there(manifest, out, name)]
    if not missing:
        log(f"all {len(names)} shards are there and intact in {out}")
        return manifest
    with writing_to(out):
        try:
            remotes = _ask_hub(source, missing, log)
        except UserError as error:
            if not all((out / name).is_file() for name in missing):
                raise
            for name in missing:
                manifest.add(out / name)
            log(f"taking the {len(missing)} files that are there unverified: {error.message}")
            remotes = []
        todo = [remote for remote in remotes if not _adopt(manifest, out, remote, log)]
        _check_space(out, todo)
        _fetch_all(out, todo, manifest, log)
        manifest.write(out)
        shutil.rmtree(out / ".partial", ignore_errors=True)
    return manifest


def shard_names(source: Source, num_shards: int | None) -> list[str]:
    """Names of the files to have: the first `num_shards` and the validation shard. Raises UserError."""
    last = int(source.options["validation_index"])
    count = int(source.options["default_shards"]) if num_shards is None else num_shards
    if not 1 <= count <= last:
        raise UserError(f"num-shards {count} is out of range", f"1 to {last}; one more is fetched for validation")
    return [str(source.options["file"]).format(index=index) for index in (*range(count), last)]


def _is_shard_of(source: Source, name: str) -> bool:
    prefix, _, rest = str(source.options["file"]).partition("{")
    return name.startswith(prefix) and name.endswith(rest.partition("}")[2])


def _is_there(manifest: Manifest, out: Path, name: str) -> bool:
    record = manifest.files.get(name)
    return record is not None and record.intact(out)


def _ask_hub(source: Source, names: list[str], log: Log) -> list[Remote]:
    """Size and hash of every file, several at a time."""

    def ask(name: str) -> Remote:
        url = hf_hub_url(
            source.options["repo"], name, repo_type="dataset", revision=source.options.get("revision", "main")
        )
        found = _attempt(name, lambda: get_hf_file_metadata(url, timeout=ASK_SECONDS), log)
        return _remote(name, url, found)

    first = ask(names[0])  # alone: when the hub is unreachable, one wait is enough
    with ThreadPoolExecutor(_ASK_THREADS) as pool:
        return [first, *pool.map(ask, names[1:])]


def _remote(name: str, url: str, found: HfFileMetadata) -> Remote:
    if found.size is None or not found.etag:
        raise UserError(f"{url} does not answer like a hub (no size or no ETag)", "check HF_ENDPOINT")
    return Remote(name, url, found.size, found.etag, found.commit_hash or "")


def _adopt(manifest: Manifest, out: Path, remote: Remote, log: Log) -> bool:
    """Take over a file that nanochat or a person put there, if it is what the hub has."""
    path = out / remote.name
    if not path.is_file() or path.stat().st_size != remote.size:
        return False
    digest = sha256_of(path)
    if remote.sha256 and digest != remote.sha256:
        log(f"{remote.name}: the file that is there is damaged (SHA-256 {digest[:12]}), fetching it again")
        return False
    manifest.add(path, digest)
    log(f"{remote.name}: is there and intact")
    return True


def _check_space(out: Path, todo: list[Remote]) -> None:
    partial = sum(path.stat().st_size for path in (out / ".partial").glob("*"))
    needed = sum(remote.size for remote in todo) - partial + _SPARE_BYTES
    free = shutil.disk_usage(out).free
    if todo and free < needed:
        raise UserError(
            f"{out} has {free / 1e9:.1f} GB free and {len(todo)} shards need {needed / 1e9:.1f} GB",
            "free some space, take a smaller --num-shards or another --out",
        )


def _fetch_all(out: Path, todo: list[Remote], manifest: Manifest, log: Log) -> None:
    """One after the other (a home line is full with one), the manifest written after each."""
    total, done, started = sum(remote.size for remote in todo), 0, time.monotonic()
    for number, remote in enumerate(todo, 1):
        log(f"{remote.name}: fetching {remote.size / 1e6:,.1f} MB ({number} of {len(todo)})")
        record = _fetch(out, remote, manifest, log)
        manifest.about["commit"] = remote.commit
        manifest.write(out)
        done += remote.size
        speed = done / max(time.monotonic() - started, 1e-9)
        log(
            f"{record.file}: {record.rows:,} documents, {record.row_groups} row groups; "
            f"{100 * done / total:.0f}% of {total / 1e6:,.0f} MB at {speed / 1e6:.1f} MB/s, "
            f"eta {(total - done) / speed:.0f} s"
        )


def _fetch(out: Path, remote: Remote, manifest: Manifest, log: Log) -> FileRecord:
    """One file: into `.partial`, checked, then under its own name."""
    partial = out / ".partial" / f"{remote.name}.{remote.etag[:16]}"
    partial.parent.mkdir(exist_ok=True)
    digest = ""
    for attempt in range(1, ATTEMPTS + 1):
        _attempt(remote.name, lambda: _continue(partial, remote, log), log)
        digest = sha256_of(partial)
        if digest == (remote.sha256 or digest):
            break
        partial.unlink()  # nothing of it can be trusted
        log(f"{remote.name}: SHA-256 {digest[:12]} instead of {remote.etag[:12]} (attempt {attempt} of {ATTEMPTS})")
    else:
        raise UserError(
            f"{remote.url} gave wrong contents {ATTEMPTS} times: "
            f"SHA-256 {digest[:12]}, and the hub says {remote.etag[:12]}",
            "try later or through another HF_ENDPOINT",
        )
    publish(partial, out / remote.name)
    return manifest.add(out / remote.name, digest)


def _continue(partial: Path, remote: Remote, log: Log) -> None:
    """Fetch what is missing of a file. The client itself continues after a broken connection."""
    there = partial.stat().st_size if partial.exists() else 0
    if there > remote.size:
        partial.unlink()
        there = 0
    if there == remote.size:
        return
    if there:
        log(f"{remote.name}: continuing at {there / 1e6:,.1f} MB")
    with open(partial, "ab") as file, _progress(partial, remote, log):
        http_get(
            remote.url,
            file,
            resume_size=there,
            headers=build_hf_headers(),
            expected_size=remote.size,
            displayed_filename=remote.name,
        )


@contextmanager
def _progress(partial: Path, remote: Remote, log: Log) -> Iterator[None]:
    """A line now and then while the client writes: its own progress bar is for terminals only."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_PROGRESS_SECONDS):
            there = partial.stat().st_size
            log(f"{remote.name}: {there / 1e6:,.1f} of {remote.size / 1e6:,.1f} MB")

    watcher = threading.Thread(target=watch, name="download progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _attempt(name: str, action: Callable[[], T], log: Log) -> T:
    """Try until it works, ATTEMPTS times at most; what trying again cannot mend ends at once. Raises UserError."""
    for pause in (*_PAUSES, None):
        try:
            return action()
        except (EntryNotFoundError, RevisionNotFoundError, RepositoryNotFoundError) as error:
            raise UserError(
                f"the hub at {ENDPOINT} has no {name}: {_line(error)}",
                "check data/sources.toml, HF_ENDPOINT, HF_TOKEN",
            ) from error
        except Exception as error:  # the client's transport (requests, httpx, ...) changes between its versions
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                raise
            if pause is None or _is_final(error):
                raise _unreachable(name, error) from error
            log(f"{name}: {_line(error)}; trying again in {pause:.0f} s")
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _is_final(error: Exception) -> bool:
    """Told to stay offline, or an answer of the hub that repeating the question will not change."""
    if type(error).__name__ == "OfflineModeIsEnabled":
        return True
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else 500
    return 400 <= status < 500 and status not in (408, 429)


def _unreachable(name: str, error: Exception) -> UserError:
    return UserError(
        f"cannot fetch {name} from {ENDPOINT}: {_line(error)}",
        "without internet: python -m scripts.prepare_data --source sample; behind a mirror: set HF_ENDPOINT; "
        "or copy the shards into the --out folder",
    )


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
