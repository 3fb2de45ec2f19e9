"""What goes wrong on one rank reaches all of them as one clear line and a non-zero exit: no traceback, no hang."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lantrain.training import checkpoint
from tests.distributed.ranks import TINY, Run, damage_pages, run_ranks

SHORT = [*TINY, "--num-iterations=6"]


def _is_clear(run: Run, *words: str) -> None:
    """Every rank ended non-zero with an error line, and one of them says all of `words`."""
    errors = [line for line in run.log.splitlines() if line.startswith("error: ")]
    assert 0 not in run.codes, run.log
    assert len(errors) == len(run.ranks), run.log
    assert any(all(word in line for word in words) for line in errors), errors
    assert "Traceback" not in run.log


def test_different_flags_are_named_with_both_values(base: Path) -> None:
    run = run_ranks(2, base, [*TINY], tag="differ", per_rank={0: ["--num-iterations=6"], 1: ["--num-iterations=7"]})
    _is_clear(run, "rank 1", "--num-iterations 7", "the leader with --num-iterations 6")


def test_no_data(base: Path) -> None:
    shutil.rmtree(base / "base_data_climbmix")
    _is_clear(run_ranks(2, base, SHORT, tag="empty"), "base_data_climbmix", "prepare_data")


def test_no_tokenizer(base: Path) -> None:
    shutil.rmtree(base / "tokenizer")
    _is_clear(run_ranks(2, base, SHORT, tag="empty"), "tokenizer", "tok_train")


def test_truncated_shard_is_found_before_step_0(base: Path) -> None:
    shard = base / "base_data_climbmix/shard_00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    run = run_ranks(3, base, SHORT, tag="cut")
    _is_clear(run, "shard_00001.parquet")
    assert run.metrics == []


def _one_shard(data: Path) -> None:
    for index in range(2):
        (data / f"shard_{index:05d}.parquet").unlink()


def _no_rows_to_train_on(data: Path) -> None:
    for index in range(2):
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), data / f"shard_{index:05d}.parquet")


def _a_file_for_the_folder(data: Path) -> None:
    shutil.rmtree(data)
    data.write_text("a file where the folder should be")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: (data / "shard_00001.parquet").write_text("<html>"), ["shard_00001.parquet", "not a parquet"]),
        (lambda data: (data / "shard_00001.parquet").write_bytes(b""), ["shard_00001.parquet", "0 bytes"]),
        (
            lambda data: pq.write_table(pa.table({"Text": ["a"]}), data / "shard_00001.parquet"),
            ["shard_00001.parquet, all row groups, column 'text': no such column", "rename column 'Text'"],
        ),
        (_one_shard, ["only one shard"]),
        (_no_rows_to_train_on, ["none of the 2 training shards"]),
        (_a_file_for_the_folder, ["cannot read the folder"]),
        # These two are met when the validation rows are packed, which is before step 0 as well.
        (lambda data: damage_pages(data / "shard_00002.parquet"), ["shard_00002.parquet, row group", "damaged"]),
        (
            lambda data: pq.write_table(pa.table({"text": ["", None]}), data / "shard_00002.parquet"),
            ["shard_00002.parquet", "a whole epoch gave no document"],
        ),
    ],
    ids=["no parquet", "0 bytes", "column", "one shard", "no rows", "no folder", "validation", "empty validation"],
)
def test_bad_shards_end_every_rank_before_step_0(base: Path, spoil: Callable[[Path], object], words: list[str]) -> None:
    """The kinds themselves are in tests/unit/data; here: the other rank has the reason too, and does not wait."""
    spoil(base / "base_data_climbmix")
    run = run_ranks(2, base, [*SHORT, "--eval-every=4"], tag="bad")
    _is_clear(run, *words)
    assert run.codes == [2, 2]
    assert "the leader cannot start: " in run.ranks[1].output
    assert run.metrics == []


def test_what_is_left_out_is_counted_and_said(base: Path) -> None:
    """A shard without rows first, then null, empty and gigantic documents between usable ones; read more than once."""
    data = base / "base_data_climbmix"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), data / "shard_00000.parquet")
    usable = pq.read_table(data / "shard_00001.parquet")["text"].to_pylist()
    strange = [None, "", None, "x " * 600_000]
    pq.write_table(pa.table({"text": strange + usable}), data / "shard_00001.parquet")
    run = run_ranks(1, base, SHORT, tag="odd").ok()
    assert "3 shards (2 train, 1 validation), 1,804 documents" in run.log
    assert "1 without rows passed over: shard_00000.parquet" in run.log
    epochs = run.metrics[-1]["epoch"]
    counts = f"{2 * epochs} null, {epochs} empty, {epochs} cut to 1,000,000 characters"
    assert f"Documents left out: {counts}" in run.log


def test_no_usable_document_ends_the_run(base: Path) -> None:
    for index in range(2):
        pq.write_table(pa.table({"text": ["", None, ""]}), base / f"base_data_climbmix/shard_{index:05d}.parquet")
    _is_clear(run_ranks(2, base, SHORT, tag="blank"), "document")


def test_damage_met_while_training_keeps_what_was_learned(base: Path) -> None:
    """The second shard's pages are damaged: the steps before it are saved, and every rank says why it stopped."""
    damage_pages(base / "base_data_climbmix/shard_00001.parquet")
    run = run_ranks(2, base, [*TINY, "--num-iterations=100000"], tag="damage")
    _is_clear(run, "shard_00001.parquet", "row group")
    steps = checkpoint.complete_steps(base / "base_checkpoints/damage")
    assert steps == [run.metrics[-1]["step"]]


def test_shares_for_another_number_of_ranks(base: Path) -> None:
    _is_clear(run_ranks(2, base, [*SHORT, "--shares=1,2,3"], tag="shares"), "--shares 1,2,3", "2 non-negative numbers")


def test_checkpoint_folder_that_cannot_be_written(base: Path) -> None:
    (base / "base_checkpoints").write_text("a file where the folder should be")
    _is_clear(run_ranks(2, base, SHORT, tag="file"), "cannot write checkpoints")


def test_missing_step_lists_the_complete_ones(base: Path) -> None:
    run_ranks(2, base, [*SHORT, "--save-every=2"], tag="list").ok()
    run = run_ranks(2, base, [*SHORT, "--resume-from-step=3"], tag="list")
    _is_clear(run, "no complete checkpoint of step 3", "2, 4, 6", "--resume-from-step 6")


def test_forgotten_depth_at_resume_names_the_tags(base: Path) -> None:
    run_ranks(1, base, SHORT, tag="d2").ok()
    run = run_ranks(1, base, [*SHORT, "--depth=3", "--resume-from-step=6"], tag="d3")
    _is_clear(run, "there are checkpoints of: d2")


def test_checkpoint_of_another_model(base: Path) -> None:
    run_ranks(1, base, SHORT, tag="other").ok()
    run = run_ranks(2, base, [*SHORT, "--aspect-ratio=64", "--resume-from-step=6"], tag="other")
    _is_clear(run, "n_head 2", "this run n_head 4")


def test_damaged_checkpoint_is_refused(base: Path) -> None:
    run_ranks(1, base, [*SHORT, "--save-every=3"], tag="bits").ok()
    model = base / "base_checkpoints/bits/model_000006.pt"
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    _is_clear(run_ranks(2, base, [*SHORT, "--resume-from-step=6"], tag="bits"), "model_000006.pt is damaged", "3")
    resumed = run_ranks(2, base, [*SHORT, "--resume=auto"], tag="bits").ok()
    assert "step 3" in resumed.log


def test_interface_that_is_not_there(base: Path) -> None:
    run = run_ranks(1, base, SHORT, tag="nic", env={"GLOO_SOCKET_IFNAME": "wlan9"})
    assert run.codes == [0]
    run = run_ranks(2, base, SHORT, tag="nic", env={"GLOO_SOCKET_IFNAME": "wlan9"})
    _is_clear(run, "no interface 'wlan9'", "unset GLOO_SOCKET_IFNAME")


def test_loss_that_is_not_a_number_ends_every_rank_and_keeps_the_last_checkpoint(base: Path) -> None:
    flags = [*TINY, "--warmup-steps=1", "--num-iterations=40"]
    run_ranks(2, base, [*flags, "--stop-after=4"], tag="nan").ok()
    wild = [*flags, "--matrix-lr=1e38", "--embedding-lr=1e38", "--unembedding-lr=1e38", "--resume=auto"]
    run = run_ranks(2, base, wild, tag="nan")
    _is_clear(run, "is not a number in step")
    assert run.codes == [3, 3]
    checkpoint.load(base / "base_checkpoints/nan", 4)
    assert checkpoint.complete_steps(base / "base_checkpoints/nan") == [4]
