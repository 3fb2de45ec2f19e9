"""The sample corpus: the standard library of the running Python as documents, real text without a download.

Code and English prose (docstrings, and the language reference in `pydoc_data`): about 10 MB, enough for a vocabulary
of 32768. The same interpreter gives the same files, byte for byte.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import platform
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lantrain.data.files import publish
from lantrain.data.manifest import Log, Manifest, read_manifest, refuse_to_mix, writing_to
from lantrain.data.shards import COLUMN
from lantrain.data.sources import Source
from lantrain.errors import UserError

# Tests are fixtures and odd bytes, encodings are tables of numbers, the rest is not the library's own.
_LEFT_OUT = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "_bundled", "__pycache__"}
_LEFT_OUT_NAMES = ("_sysconfigdata", "sitecustomize", "usercustomize")  # this machine's paths and settings
_TOPICS = "pydoc_data/topics.py"  # one dict with the chapters of the language reference: prose
# A row of T=512 holds some 2000 characters of code; what a longer document has beyond them is never trained on.
_DOCUMENT_CHARS = 2000
_TABLE_CHARS = 10_000  # a longer literal is a table of data
_PROSE_CHARS = 200  # a shorter module docstring is a title
_FEWEST_DOCUMENTS = 500


def make_sample(out: Path, source: Source, log: Log = print) -> Manifest:
    """Write the corpus as parquet shards with a manifest into `out`; nothing is done when it is there and intact.

    Raises UserError when the interpreter has too little source text, `out` holds other data or cannot be written.
    """
    count = int(source.options["shards"])
    names = [f"shard_{index:05d}.parquet" for index in range(count)]
    refuse_to_mix(out, source.name, names.__contains__)
    found = read_manifest(out)
    if found and sorted(found.files) == names and all(record.intact(out) for record in found.files.values()):
        log(f"sample corpus is there: {len(found.files)} shards in {out}, made by Python {found.about.get('python')}")
        return found
    root = Path(sysconfig.get_path("stdlib"))
    log(f"reading the standard library in {root}")
    shards = split_by_module(read_modules(root), count)
    documents = sum(map(len, shards))
    if documents < _FEWEST_DOCUMENTS or not all(shards):
        raise UserError(
            f"only {documents} documents in the standard library at {root}; its sources were left out of this Python",
            "use another Python, or --source climbmix",
        )
    with writing_to(out):
        manifest = Manifest(source.name, about=interpreter(root))
        for name, texts in zip(names, shards, strict=True):
            temporary = out / f".{name}.tmp"
            write_parquet(temporary, texts, int(source.options["row_group_rows"]))
            publish(temporary, out / name)
            record = manifest.add(out / name)
            log(f"{name}: {record.rows:,} documents, {record.row_groups} row groups, {record.bytes / 1e6:.1f} MB")
        manifest.write(out)
    return manifest


def interpreter(root: Path) -> dict[str, str]:
    """What the corpus depends on; for the manifest."""
    return {"python": platform.python_version(), "implementation": sys.implementation.name, "stdlib": str(root)}


def write_parquet(path: Path, texts: Sequence[str], row_group_rows: int) -> None:
    """One file with the column `text`, zstd, row groups of `row_group_rows`."""
    table = pa.table({COLUMN: pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=row_group_rows, compression="zstd")


def read_modules(root: Path) -> dict[str, list[str]]:
    """Documents of every module under `root`, by relative path; repeated texts are kept once.

    A file that cannot be read or parsed is passed over: distributions ship partial libraries and templates.
    """
    modules: dict[str, list[str]] = {}
    seen: set[str] = set()
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        try:
            with tokenize.open(path) as file:
                text = file.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in string literals
                tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            continue
        if name == _TOPICS:
            for i, chapter in enumerate(chapters(tree)):
                modules[f"{name}#{i:03d}"] = [chapter]
            continue
        fresh = [document for document in documents_of(text, tree) if document not in seen]
        seen.update(fresh)
        if fresh:
            modules[name] = fresh
    return modules


def source_files(root: Path) -> Iterator[Path]:
    """`*.py` of the library proper, in name order."""
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if any(name in _LEFT_OUT or name.startswith("config-") for name in folders):
            continue
        if not path.name.startswith(_LEFT_OUT_NAMES) and path.resolve().is_relative_to(root.resolve()):
            yield path


def chapters(tree: ast.Module) -> list[str]:
    """The values of the dict of topics: "The 'assert' statement", "Operator precedence", ..."""
    return [
        node.value.strip() + "\n"
        for dictionary in ast.walk(tree)
        if isinstance(dictionary, ast.Dict)
        for node in dictionary.values
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip()
    ]


def documents_of(text: str, tree: ast.Module) -> list[str]:
    """A module's documents: its docstring as prose, and its source, whole when small, else by definitions."""
    documents = []
    docstring = ast.get_docstring(tree)
    if docstring and len(docstring) >= _PROSE_CHARS:
        documents.append(inspect.cleandoc(docstring).strip() + "\n")
    if len(text) <= _DOCUMENT_CHARS:
        documents.append(text)
    else:
        documents.extend(split_source(text.splitlines(keepends=True), tree))
    return [document for document in documents if document.strip()]


def split_source(lines: list[str], tree: ast.Module) -> Iterator[str]:
    """Consecutive definitions together as long as they are small; a large class by its members; no tables."""
    held = ""
    for piece in definitions(lines, tree.body, 0, len(lines)):
        if held and len(held) + len(piece) > _DOCUMENT_CHARS:
            yield held.lstrip("\n")
            held = ""
        held += piece
    yield held.lstrip("\n")


def definitions(lines: list[str], body: Sequence[ast.stmt], start: int, end: int) -> Iterator[str]:
    """Source of each statement with the comments and blank lines before it; lines `start` to `end`."""
    for i, node in enumerate(body):
        stop = end if i == len(body) - 1 else (node.end_lineno or start)
        piece = "".join(lines[start:stop])
        if len(piece) > _DOCUMENT_CHARS and isinstance(node, ast.ClassDef) and len(node.body) > 1:
            yield from definitions(lines, node.body, start, stop)
        elif len(piece) <= _TABLE_CHARS or not isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield piece
        start = stop


def split_by_module(modules: dict[str, list[str]], count: int) -> list[list[str]]:
    """`count` shards of about equal size. A module is never in two: validation would see what training saw.

    Order by hash, so that every row mixes packages, and the same for every run.
    """
    shards: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name in sorted(modules, key=digest):
        smallest = sizes.index(min(sizes))
        shards[smallest].extend(modules[name])
        sizes[smallest] += sum(map(len, modules[name]))
    return [sorted(shard, key=digest) for shard in shards]


def digest(text: str) -> bytes:
    """SHA-256: an order that has nothing to do with the contents, and is the same everywhere."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
