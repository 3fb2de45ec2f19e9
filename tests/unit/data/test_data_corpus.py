from __future__ import annotations

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tokenize
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lantrain.data import corpus
from lantrain.data.corpus import documents_of, make_sample, read_modules, source_files, split_by_module
from lantrain.data.manifest import read_manifest, writing_to
from lantrain.data.shards import Shard, open_shards
from lantrain.data.sources import load_sources
from lantrain.errors import UserError
from tests.unit.data.conftest import write_shards

SAMPLE = load_sources()["sample"]


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sample")
    make_sample(out, SAMPLE)
    return out


def documents(module: str) -> list[str]:
    return documents_of(module, ast.parse(module))


def test_shards_and_manifest(sample: Path) -> None:
    shards = everything(sample)
    assert len(shards) == 5
    assert all(set(shard.row_groups[:-1]) == {500} for shard in shards)
    sizes = [shard.bytes for shard in shards]
    assert max(sizes) < 1.3 * min(sizes)
    manifest = json.loads((sample / "manifest.json").read_text())
    assert manifest["source"] == "sample"
    assert manifest["about"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert [(e["file"], e["rows"], e["row_groups"], e["bytes"]) for e in manifest["files"]] == [
        (shard.name, shard.rows, len(shard.row_groups), shard.bytes) for shard in shards
    ]
    assert not list(sample.glob("*.tmp"))


def test_the_command_gives_the_same_bytes(sample: Path, tmp_path: Path) -> None:
    """In another process, with another seed for the hashes of strings."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.prepare_data", "--source", "sample", "--out", str(tmp_path)],
        cwd=Path(__file__).resolve().parents[3] / "app",
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"ready: 5 shards (4 train, 1 validation), {sum(s.rows for s in everything(sample)):,} documents" in done.stdout
    )
    first, again = read_manifest(sample), read_manifest(tmp_path)
    assert first is not None
    assert again == first


def everything(folder: Path) -> tuple[Shard, ...]:
    shards = open_shards(folder)
    return shards.train + shards.val


def test_a_second_run_does_nothing_unless_a_file_is_damaged(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path, dirs_exist_ok=True)
    first = read_manifest(tmp_path)
    assert first is not None
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.parquet")}
    lines: list[str] = []
    make_sample(tmp_path, SAMPLE, lines.append)
    assert len(lines) == 1
    assert "is there" in lines[0]
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.parquet")}
    damaged = next(iter(stamps))
    raw = bytearray(damaged.read_bytes())
    raw[50] ^= 1
    damaged.write_bytes(raw)
    assert make_sample(tmp_path, SAMPLE).files == first.files
    assert damaged.read_bytes() != bytes(raw)


def test_training_and_validation_share_no_document(sample: Path) -> None:
    texts = [pq.read_table(path)["text"].to_pylist() for path in sorted(sample.glob("*.parquet"))]
    assert not set(texts[-1]) & {text for shard in texts[:-1] for text in shard}
    assert all(text.strip() for shard in texts for text in shard)


def test_library_sources_only() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix() for path in source_files(root)}
    assert {"argparse.py", "asyncio/base_events.py", "json/decoder.py"} <= names
    assert not any(part in name.split("/") for name in names for part in ("site-packages", "test", "encodings"))


def test_small_modules_stay_whole_and_docstrings_are_prose() -> None:
    prose = "What this module is for. " * 10
    module = f'"""{prose}"""\n\nx = 1\n'
    assert documents(module) == [prose.strip() + "\n", module]
    assert documents('"""A title."""\nx = 1\n') == ['"""A title."""\nx = 1\n']
    assert documents("\n\n") == []


def test_large_modules_are_split_at_definitions_and_nothing_but_tables_is_lost() -> None:
    function = "# about f\n@decorated\ndef f():\n" + "    x = 1\n" * 120 + "\n"
    method = "    # about m\n    def m(self):\n" + "        y = 2\n" * 120
    table = "TABLE = {\n" + "    1: 2,\n" * 2000 + "}\n"
    module = "import os\n" + table + function * 3 + "class C:\n" + method * 3 + "# the end\n"
    parts = documents(module)
    assert "".join(parts).replace("\n", "") == module.replace(table, "").replace("\n", "")
    assert function.rstrip() in [part.rstrip() for part in parts]
    assert all(part.startswith(("import os", "# about f", "class C:", "    # about m")) for part in parts)
    assert max(map(len, parts)) < 2 * len(method)


def test_every_split_module_of_json_is_made_of_its_lines() -> None:
    path = Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py"
    with tokenize.open(path) as file:
        text = file.read()
    lines = set(io.StringIO(text))
    assert len(documents(text)) > 3
    assert set(io.StringIO("".join(documents(text)[-3:]))) <= lines


def test_a_partial_library_is_coped_with(tmp_path: Path) -> None:
    """Templates, odd encodings, dangling links, compiled-only packages: what distributions leave."""
    (tmp_path / "good.py").write_text("x = 1  # a line\n")
    (tmp_path / "copy.py").write_text("x = 1  # a line\n")
    (tmp_path / "broken.py").write_text("def @template@:\n")
    (tmp_path / "latin.py").write_bytes(b"name = 'caf\xe9'\n")
    (tmp_path / "nul.py").write_bytes(b"x = 1\0\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "sitecustomize.py").write_text("y = 1\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "foreign.py").write_text("z = 1\n")
    assert read_modules(tmp_path) == {"copy.py": ["x = 1  # a line\n"]}


def test_the_language_reference_is_taken_by_chapters(tmp_path: Path) -> None:
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'assert': 'The assert statement\\n', 'x': 'Other'}\n")
    assert list(read_modules(tmp_path).values()) == [["The assert statement\n"], ["Other\n"]]


def test_no_sources_is_an_error_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match=r"only 1 documents .* --source climbmix"):
        make_sample(tmp_path / "out", SAMPLE)
    assert not (tmp_path / "out").exists()


def test_a_module_is_in_one_shard_and_shards_are_of_equal_size() -> None:
    modules = {f"m{i}.py": [f"{i}:{j} " * 50 for j in range(4)] for i in range(40)}
    shards = split_by_module(modules, 5)
    assert sorted(text for shard in shards for text in shard) == sorted(t for m in modules.values() for t in m)
    assert {len(shard) for shard in shards} == {32}
    for texts in modules.values():
        assert sum(any(text in shard for text in texts) for shard in shards) == 1


def test_other_data_in_the_folder_is_not_touched(tmp_path: Path) -> None:
    write_shards(tmp_path, [["mine"], ["mine"]])
    with pytest.raises(UserError, match="choose another --out"):
        make_sample(tmp_path, SAMPLE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard_00000.parquet", "shard_00001.parquet"]


def test_two_preparations_at_once(tmp_path: Path) -> None:
    with writing_to(tmp_path), pytest.raises(UserError, match="another prepare_data"), writing_to(tmp_path):
        pass


def test_sources_file(tmp_path: Path) -> None:
    assert set(load_sources()) == {"climbmix", "sample"}
    path = tmp_path / "sources.toml"
    for text, expected in (
        ("[x]\nkind = 'ftp'\n", r"\[x\]: kind must be one of huggingface, stdlib"),
        ("[x]\nkind = 'stdlib'\nshards = '5'\n", r"\[x\]: shards \(int\) is missing or of another type"),
        ("[x", "cannot read the list"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=expected):
            load_sources(path)
    with pytest.raises(UserError, match="cannot read the list"):
        load_sources(tmp_path / "none.toml")
