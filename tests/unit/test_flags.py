"""Numbers of the command lines, and those that the launcher gets by the environment: out of range is one line."""

from __future__ import annotations

import argparse
from types import ModuleType

import pytest

from lantrain.errors import UserError, run_main
from lantrain.flags import LARGEST, Parser, check_numbers
from lantrain.nodes.members import MAX_NODES
from scripts import doctor, health, node, prepare, prepare_data, report, sample, tok_train


def leave(script: ModuleType, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command."""
    monkeypatch.setattr("sys.argv", [script.__name__, *arguments])
    with pytest.raises(SystemExit) as left:
        run_main(script.main)
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("script", "flag", "least", "most"),
    [
        (tok_train, "--max-chars", 1, 10**12),
        (tok_train, "--doc-cap", 1, LARGEST),
        (tok_train, "--vocab-size", 265, 2**20),
        (sample, "--num-samples", 1, 10_000),
        (sample, "--max-tokens", 1, 2**16),
        (sample, "--top-k", 1, LARGEST),
        (sample, "--seed", 0, LARGEST),
        (sample, "--step", 0, LARGEST),
        (report, "--every", 1, LARGEST),
    ],
)
@pytest.mark.parametrize("above", [None, 1, 10**20, 10**400], ids=["below", "above", "1e20", "1e400"])
def test_flags_of_the_commands_have_a_range(
    script: ModuleType, flag: str, least: int, most: int, above: int | None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    value = least - 1 if above is None else most + above
    places = ["run=d4"] if script is report else []
    assert leave(script, [*places, f"{flag}={value}"], monkeypatch) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line == f"error: {flag} must be from {least:,} to {most:,}, not {value} (leave it out for the default)"
    assert said.out == ""


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        (tok_train, ["--vocab-size=1e4"], "argument --vocab-size: invalid int value: '1e4' (python -m scripts.tok_"),
        (sample, ["--temperature=nan"], "--temperature nan is not a number to compute with"),
        (sample, ["--temperature=-1"], "--temperature must be from 0 to 100, not -1.0"),
        (sample, ["--temperature=1e20"], "--temperature must be from 0 to 100, not 1e+20"),
        (sample, ["--temperature=1e-50"], "--temperature 1e-50 is below 0.001 (use 0 for the likeliest token)"),
        (sample, ["--top_k=3"], "unrecognized arguments: --top_k=3 (did you mean --top-k? python -m scripts.sample"),
        (report, ["run=d4", "--every=x"], "argument --every: invalid int value: 'x' (python -m scripts.report --help"),
        (prepare_data, ["--num-shards=x"], "argument --num-shards: invalid int value: 'x' (python -m"),
        (prepare, [f"--num-shards={10**20}"], f"num-shards {10**20} is out of range (1 to 6542; "),
        (prepare, ["--num-shards=0"], "num-shards 0 is out of range (1 to 6542; "),
    ],
)
def test_other_mistakes_are_one_line_as_well(
    script: ModuleType, arguments: list[str], words: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert leave(script, arguments, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {words}")


NODES = f"is not a whole number from 1 to {MAX_NODES} (unset it, or for example NODES=2)"
SECONDS = "is not a positive number of seconds up to 100,000,000 (unset it, or for example"


@pytest.mark.parametrize(
    ("script", "arguments", "name", "values", "words"),
    [
        (node, ["master"], "NODES", ["0", "-1", "257", "2.5", "1e20", "1e999", "nan", "two"], NODES),
        (doctor, [], "NODES", ["0", "257"], NODES),
        (node, ["master"], "MASTER_PORT", ["0", "65536"], "is not a whole number from 1 to 65535"),
        (node, ["worker", "127.0.0.1"], "HUB_PORT", ["0", "65536"], "is not a whole number from 1 to 65535"),
        (node, ["status"], "HUB_PORT", ["-1", "1e9"], "is not a whole number from 1 to 65535"),
        (node, ["worker", "127.0.0.1"], "WAIT", ["0", "1e9", "soon"], SECONDS),
        (node, ["worker", "127.0.0.1"], "PATIENCE", ["0", "1e300"], SECONDS),
        (node, ["master"], "SILENCE", ["-1", "1e9"], SECONDS),
        (node, ["master"], "STALL", ["inf"], SECONDS),
        (health, [], "LANTRAIN_HEALTH_SECONDS", ["0", "1e9"], SECONDS),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isupper() else "",
)
def test_numbers_from_the_environment_have_a_range(
    script: ModuleType, arguments: list[str], name: str, values: list[str], words: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(node.giving_up, "container_id", lambda *_: "")
    for value in values:
        monkeypatch.setenv(name, value)
        assert leave(script, arguments, monkeypatch) == (2 if script is not doctor else 1)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {name}={value} {words}")


def test_values_at_the_ends_are_let_through() -> None:
    parser = Parser(prog="x")
    for flag, kind in (("--some", int), ("--share", float), ("--other", int)):
        parser.add_argument(flag, type=kind)
    parser.add_argument("--switch", action="store_true")
    ranges = {"some": (1, 5), "share": (0, 1), "switch": (5, 6)}
    for line in ("--some=1 --share=0", "--some=5 --share=1 --switch", f"--other={LARGEST}", "--other=-9"):
        check_numbers(parser.parse_args(line.split()), ranges)
    with pytest.raises(UserError, match=r"^--other must be at most 2,147,483,647, not 2147483648 "):
        check_numbers(argparse.Namespace(other=LARGEST + 1), ranges)
