"""What the benchmarks make of measured figures. That they run is seen by running them: `make bench`."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench import HERE, comparison, markdown, summary
from benchmarks.nodes import Measured, _measured
from benchmarks.scaling import PAYLOAD, VOCABULARY, Figures, compare, flags, grow, simulate
from benchmarks.two_nodes import _choice
from lantrain.nodes.predict import work_of

STEP = {
    "program": "lantrain, v3", "depth": 4, "dtype": "fp32", "tokens": 2048, "threads": 2, "tokens_per_s": 1500.0,
    "model_gflops": 150.0, "share": 0.75, "ready_s": 1.2, "first_step_s": 2.5,
}  # fmt: skip
PEER = {**STEP, "program": "nanochat, eager", "tokens_per_s": 1000.0, "model_gflops": 100.0}
SLOWER = {**PEER, "program": "nanochat, compiled", "tokens_per_s": 900.0, "model_gflops": 90.0}
LLAMA = {**STEP, "program": "llama, compiled", "tokens_per_s": 1100.0, "model_gflops": 120.0}
OTHER = {**PEER, "dtype": "bf16", "tokens_per_s": 9000.0, "model_gflops": 900.0}


def test_each_part_has_its_ratio_in_the_table() -> None:
    figures = {
        "step": [STEP, PEER, SLOWER, LLAMA, OTHER],
        "busy": [
            {"way": "ours", "depth": 4, "busy_tokens_per_s": 900.0, "quiet_tokens_per_s": 1500.0, "fall": 0.4},
        ],
        "rows": {"tokens_per_second": 1.5e6, "seq_len": 512},
        "wire": [{"world": 2, "parts": {"gradients": 40_000_000, "weights": 35_000_000}, "native": 300_000_000}],
        "equal": [
            {"what": "one node, before", "tokens_per_s": 900.0, "against_one": 0.9, "of_apart": 0.4, "sync": "step"},
            {"what": "one node, after", "tokens_per_s": 1100.0, "against_one": 1.1, "of_apart": 0.5, "sync": "step"},
            {
                "what": "two equal nodes, 1000 Mbit/s", "tokens_per_s": 1900.0, "against_one": 1.9, "of_apart": 0.98,
                "sync": "step",
            },
        ],
        "unequal": [
            {"tokens_per_s": 1000.0}, {"tokens_per_s": 400.0},
            {"tokens_per_s": 1330.0, "of_sum": 0.95, "of_apart": 0.97, "rows": [23, 9]},
        ],
    }  # fmt: skip
    table = markdown(summary(figures))
    peers = "1000 tok/s, 100 GFLOP/s (eager) | 1100 tok/s, 120 GFLOP/s (compiled)"
    ratios = "75% of the limit, 1.50x nanochat, 1.25x transformers"
    assert f"| 1500 tok/s | 2000 tok/s | {peers} | {ratios} |" in table
    assert "| first step done, depth 4, fp32 | 2.5 s |  |  |  | begun after 1.2 s |" in table
    assert "| 900 tok/s | 1500 tok/s quiet |  |  | falls by 40% |" in table
    assert "| 1,500,000 tok/s | 1500 tok/s are needed |  |  | 1000x |" in table
    assert "| 75 MB | 60 MB (goal) |  |  | 25.0% of 300 MB |" in table
    assert (
        "| two equal nodes, 1000 Mbit/s | 1900 tok/s | 2000 tok/s |  |  | 1.90x one node, 98.0% of both apart at once |"
        in table
    )
    assert "| 1330 tok/s | 1400 tok/s |  |  | 95.0% of the sum, 97.0% of both apart at once |" in table
    assert len(table.splitlines()) == 2 + 7


def test_columns_of_programs_that_were_not_measured_are_left_out() -> None:
    assert markdown(summary({"step": [STEP]})).splitlines()[0] == "| what | ours | limit | ratio | how |"


def test_a_second_run_is_compared_line_by_line() -> None:
    before = summary({"step": [STEP, LLAMA]})
    within = comparison(before, summary({"step": [STEP | {"tokens_per_s": 1600.0, "first_step_s": 2.4}]}))
    assert [(line["change"], line["noise"]) for line in within] == [("+6.7%", "within"), ("-4.0%", "within")]
    slow_clock = comparison(before, summary({"step": [STEP | {"tokens_per_s": 1000.0, "share": 0.73}]}))
    assert slow_clock[0]["noise"] == "within", "the ratio within the run says that the machine was slower"
    worse = comparison(before, summary({"step": [STEP | {"tokens_per_s": 1000.0, "share": 0.6, "first_step_s": 3.0}]}))
    assert [line["beyond"] for line in worse] == [True, True]
    assert worse[0]["ratio"] == "0.750 -> 0.600"
    assert comparison([], before) == []


def _record(step: int, dt: float) -> dict[str, Any]:
    spent = {"rows": [4, 2], "rank_compute_s": [dt / 2, dt / 4], "rank_update_s": [0.1, 0.2]}
    return {"step": step, "loss": 9.0, "dt": dt, "tok_per_sec": 600 / dt, **spent}


def test_local_steps_count_with_the_round_and_other_steps_by_their_median() -> None:
    steps = [_record(step, 4.0 if step in (6, 9) else 1.0) for step in range(1, 10)]
    plain = _measured(steps, 3, 8, "log")
    assert (plain.seconds, plain.rate, plain.steps) == (1.0, 600.0, [1.0, 1.0, 1.0, 4.0, 1.0, 1.0])
    assert (plain.compute, plain.update, plain.rows, plain.rounds) == ([0.5, 0.25], [0.1, 0.2], [4, 2], [])
    steps[7]["rows"] = [6, 0]
    assert _measured(steps, 8, 8, "log").per_row == [pytest.approx(0.5 / 6), math.inf]
    assert _measured(steps, 3, 8, "log").per_row == [0.125, 0.125]
    rounds = [{"step": 6, "outer_s": 3.0}, {"step": 9, "outer_s": 3.0}]
    local = _measured(steps + rounds, 3, 8, "log")
    assert (local.seconds, local.rate, local.rounds) == (1.5, 400.0, [3.0])


def test_the_choice_of_sync_auto_is_read_from_the_log() -> None:
    assert _choice("rank 0\n--sync auto: local, rounds of 30 steps: the link carries") == "local"
    assert _choice("--sync auto: step: the link carries") == "step"
    assert _choice("") == ""


def test_parts_that_were_not_measured_are_not_in_the_table() -> None:
    assert summary({}) == []
    assert [row["what"] for row in summary({"step": [STEP]})] == [
        "one step, depth 4, fp32",
        "first step done, depth 4, fp32",
    ]


def figures(mbit: float = 1000.0) -> Figures:
    return Figures(
        row=0.5, update=0.2, link=mbit * PAYLOAD, usual_link=mbit * PAYLOAD, trip=0.0, cpu=1e-9, beat=0.003, quota=0.5,
        mbit=mbit, batch=4096,
    )  # fmt: skip


def test_one_node_is_simulated_as_it_was_measured() -> None:
    one = simulate(figures().work, figures(), 1, 1e12)
    assert one.compute == pytest.approx(8 * 0.5)
    assert one.update == pytest.approx(0.2)
    assert one.wire == 0


def test_simulated_nodes_share_rows_and_pay_for_the_wire() -> None:
    fast, slow = (simulate(figures().work, figures(), 4, link) for link in (1e12, 1e7))
    assert fast.rows == [2, 2, 2, 2]
    assert fast.compute == slow.compute == pytest.approx(2 * 0.5)
    assert 0.05 <= fast.update < 0.2
    assert slow.wire > 1 > fast.wire


def test_errors_are_of_a_forecast_for_another_batch() -> None:
    work = work_of([*flags(8192), "--num-iterations=1"], VOCABULARY)
    two = simulate(work, figures(), 2, figures().link)
    assert two.rows == [8, 8]
    runs = {
        1: Measured(8192, 8.2, [8.0], [16], [8.2], ""),
        2: Measured(8192, two.seconds / 1.1, [4.0, 4.0], [8, 8], [], ""),
    }
    rows = compare(figures(), 8192, runs)
    assert [row["error"] for row in rows] == pytest.approx([0.0, 0.1])
    assert {row["batch"] for row in rows} == {8192}


def test_costs_grow_as_they_should() -> None:
    rows = grow("x", figures().work, figures(), 1000.0)
    assert rows[0]["speedup"] == 1
    assert [row["feed_mb"] for row in rows] == sorted(row["feed_mb"] for row in rows)
    assert rows[-1]["hub_cores"] == pytest.approx(0.003 * 2 * 63)
    assert rows[-1]["wire_s"] > rows[1]["wire_s"] > 0
    assert rows[-1]["speedup"] < 8, "there are 8 rows in a step"


@pytest.mark.parametrize("script", ["bench.py", "busy.py", "two_nodes.py", "scaling.py"])
def test_scripts_explain_themselves(script: str) -> None:
    result = subprocess.run(
        [sys.executable, str(Path(HERE) / script), "--help"], capture_output=True, text=True, timeout=120, check=True
    )
    assert "--steps" in result.stdout
