"""prepare_data --source climbmix with the real huggingface_hub client against a server on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lantrain.data import download
from lantrain.data.manifest import Manifest
from lantrain.data.shards import open_shards
from tests.unit.data.conftest import make_documents, write_shards
from tests.unit.data.hub_server import COMMIT, Hub, serving

APP = Path(__file__).resolve().parents[3] / "app"
TRAIN = ["shard_00000.parquet", "shard_00001.parquet"]
VALIDATION = "shard_06542.parquet"
Prepare = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    documents = [make_documents(1500, seed=n, longest=300) for n in (1, 2, 3)]
    # Noise does not compress: the first shard has several of the pieces of 1 MiB that are resumed.
    documents[0] += [random.Random(n).randbytes(50_000).hex() for n in range(100)]
    folder = write_shards(tmp_path_factory.mktemp("hub"), documents)
    return {name: path.read_bytes() for name, path in zip([*TRAIN, VALIDATION], sorted(folder.iterdir()), strict=True)}


@pytest.fixture
def hub(contents: dict[str, bytes]) -> Iterator[Hub]:
    with serving(Hub(dict(contents))) as hub:
        yield hub


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def prepare(tmp_path: Path, out: Path, hub: Hub) -> Prepare:
    """Run the command; HF_ENDPOINT is read when the client is imported, hence a process of its own."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "scripts.prepare_data", "--out", str(out), *(arguments or ("--num-shards", "2"))],
            cwd=APP,
            env={**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), **environment},
            capture_output=True,
            text=True,
        )

    return call


def test_download(prepare: Prepare, hub: Hub, out: Path, contents: dict[str, bytes]) -> None:
    done = prepare()
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in out.glob("*.parquet")} == contents
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["source"] == "climbmix"
    assert manifest["about"] == {"repo": "karpathy/climbmix-400b-shuffle", "commit": COMMIT}
    assert [entry["file"] for entry in manifest["files"]] == [*TRAIN, VALIDATION]
    for entry in manifest["files"]:
        assert entry["sha256"] == hashlib.sha256(contents[entry["file"]]).hexdigest()
        assert (entry["rows"], entry["row_groups"]) == ({TRAIN[0]: 1600}.get(entry["file"], 1500), entry["rows"] // 100)
    assert "100% of" in done.stdout
    assert "ready: 3 shards (2 train, 1 validation)" in done.stdout
    assert sorted(p.name for p in out.iterdir()) == [".prepare.lock", "manifest.json", *TRAIN, VALIDATION]
    hub.gets.clear()
    assert "all 3 shards are there and intact" in prepare().stdout
    assert hub.gets == []


def test_an_interrupted_connection_continues_where_it_broke(
    prepare: Prepare, hub: Hub, out: Path, contents: dict[str, bytes]
) -> None:
    hub.cut_after[TRAIN[0]] = [1_500_000, 2_200_000]
    done = prepare()
    assert done.returncode == 0, done.stderr
    ranges = [asked for name, asked in hub.gets if name == TRAIN[0]]
    assert ranges == ["", f"bytes={1 << 20}-", f"bytes={3 << 20}-"]
    assert (out / TRAIN[0]).read_bytes() == contents[TRAIN[0]]


def test_an_interrupted_run_continues_at_the_byte(
    prepare: Prepare, hub: Hub, out: Path, contents: dict[str, bytes]
) -> None:
    """What a killed run leaves: one shard complete, half of another under .partial."""
    digest = hashlib.sha256(contents[TRAIN[1]]).hexdigest()
    assert prepare("--num-shards", "1").returncode == 0
    (out / ".partial").mkdir()
    (out / ".partial" / f"{TRAIN[1]}.{digest[:16]}").write_bytes(contents[TRAIN[1]][:20_000])
    hub.gets.clear()
    done = prepare()
    assert done.returncode == 0, done.stderr
    assert hub.gets == [(TRAIN[1], "bytes=20000-")]
    assert "continuing at" in done.stdout
    assert (out / TRAIN[1]).read_bytes() == contents[TRAIN[1]]
    assert not (out / ".partial").exists()


def test_progress_is_told_while_a_shard_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line every few seconds with what is there, in a log that nobody's terminal redraws."""
    monkeypatch.setattr(download, "_PROGRESS_SECONDS", 0.01)
    remote = download.Remote("shard_00000.parquet", "http://hub/x", 4_000_000, "e" * 64, COMMIT)
    partial = tmp_path / "partial"
    told = threading.Event()
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        told.set()

    partial.write_bytes(b"x" * 1_000_000)
    with download._progress(partial, remote, log):
        assert told.wait(30)
        partial.write_bytes(b"x" * 3_000_000)
        told.clear()
        while not lines[-1].endswith("3.0 of 4.0 MB"):
            assert told.wait(30)
            told.clear()
    assert lines[0] == "shard_00000.parquet: 1.0 of 4.0 MB"
    assert "download progress" not in [thread.name for thread in threading.enumerate()]


def test_wrong_contents_are_fetched_again(prepare: Prepare, hub: Hub, out: Path, contents: dict[str, bytes]) -> None:
    hub.wrong[TRAIN[1]] = 1
    done = prepare()
    assert done.returncode == 0, done.stderr
    assert f"{TRAIN[1]}: SHA-256" in done.stdout
    assert (out / TRAIN[1]).read_bytes() == contents[TRAIN[1]]


def test_wrong_contents_again_and_again(prepare: Prepare, hub: Hub, out: Path) -> None:
    hub.wrong[TRAIN[1]] = 99
    done = prepare()
    assert done.returncode == 2
    assert "gave wrong contents 4 times" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (out / TRAIN[1]).exists()
    assert (out / TRAIN[0]).exists()  # and is not fetched again next time
    hub.wrong.clear()
    hub.gets.clear()
    assert prepare().returncode == 0
    assert [name for name, _ in hub.gets] == [TRAIN[1], VALIDATION]


def test_a_damaged_file_is_replaced(prepare: Prepare, hub: Hub, out: Path, contents: dict[str, bytes]) -> None:
    assert prepare().returncode == 0
    raw = bytearray(contents[TRAIN[0]])
    raw[100] ^= 1
    (out / TRAIN[0]).write_bytes(raw)
    done = prepare()
    assert done.returncode == 0, done.stderr
    assert "damaged" in done.stdout
    assert (out / TRAIN[0]).read_bytes() == contents[TRAIN[0]]


def test_files_that_nanochat_fetched_are_taken_over(
    prepare: Prepare, hub: Hub, out: Path, contents: dict[str, bytes]
) -> None:
    out.mkdir()
    (out / TRAIN[0]).write_bytes(contents[TRAIN[0]])
    done = prepare()
    assert done.returncode == 0, done.stderr
    assert [name for name, _ in hub.gets] == [TRAIN[1], VALIDATION]
    assert len(json.loads((out / "manifest.json").read_text())["files"]) == 3


def test_a_busy_hub_is_asked_again(prepare: Prepare, hub: Hub) -> None:
    hub.status[TRAIN[0]] = [503, 429]
    done = prepare()
    assert done.returncode == 0, done.stderr


def test_no_such_file(prepare: Prepare, hub: Hub) -> None:
    del hub.files[TRAIN[1]]
    done = prepare()
    assert done.returncode == 2
    assert f"has no {TRAIN[1]}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_room_is_known_before_the_first_byte(prepare: Prepare, hub: Hub, out: Path) -> None:
    hub.claimed_size[VALIDATION] = 10**18
    done = prepare()
    assert done.returncode == 2
    assert "GB free and 3 shards need 1000000000." in done.stderr
    assert hub.gets == []


@pytest.mark.parametrize("number", ["0", "6543", "-1"])
def test_number_out_of_range(prepare: Prepare, number: str) -> None:
    done = prepare("--num-shards", number)
    assert done.returncode == 2
    assert f"error: num-shards {number} is out of range (1 to 6542" in done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_offline(prepare: Prepare, out: Path) -> None:
    """One line with the ways out, whether the network is missing or switched off."""
    nobody = f"http://127.0.0.1:{free_port()}"
    for environment in ({"HF_ENDPOINT": nobody}, {"HF_HUB_OFFLINE": "1"}):
        done = prepare(**environment)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert "cannot fetch shard_00000.parquet" in done.stderr
        assert "--source sample" in done.stderr
        assert "HF_ENDPOINT" in done.stderr
        assert not list(out.glob("*.parquet"))


def test_offline_with_files_that_were_copied(prepare: Prepare, out: Path, contents: dict[str, bytes]) -> None:
    out.mkdir()
    for name, data in contents.items():
        (out / name).write_bytes(data)
    done = prepare(HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert "taking the 3 files that are there unverified" in done.stdout
    assert open_shards(out).val[0].name == VALIDATION
    assert "all 3 shards are there and intact" in prepare(HF_HUB_OFFLINE="1").stdout


def test_data_sets_are_not_mixed(prepare: Prepare, out: Path) -> None:
    write_shards(out, [["a"], ["b"]])
    manifest = Manifest("sample")
    manifest.add(out / TRAIN[0])
    manifest.write(out)
    done = prepare()
    assert done.returncode == 2
    assert "holds shards of sample" in done.stderr


def test_not_writable(prepare: Prepare, out: Path) -> None:
    out.write_text("a file where the folder should be")
    done = prepare()
    assert done.returncode == 2
    assert "cannot write to" in done.stderr
    assert len(done.stderr.splitlines()) == 1
