"""What the benchmarks make of measured figures. That they run is seen by running them: `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench import HERE, markdown, summary
from benchmarks.nodes import Measured
from benchmarks.scaling import PAYLOAD, Figures, compare, grow, simulate
from benchmarks.two_nodes import _choice, _with_rounds

STEP = {"program": "lantrain", "depth": 4, "dtype": "fp32", "threads": 2, "tokens_per_s": 1500.0, "share": 0.75}
PEER = {"program": "nanochat, eager", "depth": 4, "dtype": "fp32", "tokens_per_s": 1000.0}


def test_each_part_has_its_ratio_in_the_table() -> None:
    figures = {
        "step": [STEP, PEER],
        "rows": {"tokens_per_second": 1.5e6, "seq_len": 512},
        "wire": [{"world": 2, "parts": {"gradients": 40_000_000, "weights": 35_000_000}, "native": 300_000_000}],
        "equal": [
            {"what": "one node, before", "tokens_per_s": 900.0, "against_one": 0.9, "sync": "step"},
            {"what": "one node, after", "tokens_per_s": 1100.0, "against_one": 1.1, "sync": "step"},
            {"what": "two equal nodes, 1000 Mbit/s", "tokens_per_s": 1900.0, "against_one": 1.9, "sync": "step"},
        ],
        "unequal": [
            {"tokens_per_s": 1000.0}, {"tokens_per_s": 400.0},
            {"tokens_per_s": 1330.0, "of_sum": 0.95, "rows": [23, 9]},
        ],
    }  # fmt: skip
    table = markdown(summary(figures))
    assert "| 1500 tok/s | 2000 tok/s | 1000 tok/s | 75% of the limit, 1.50x |" in table
    assert "| 1,500,000 tok/s | 1500 tok/s are needed |  | 1000x |" in table
    assert "| 75 MB | 60 MB (goal) |  | 25.0% of 300 MB |" in table
    assert "| two equal nodes, 1000 Mbit/s | 1900 tok/s | 2000 tok/s |  | 1.90x one node |" in table
    assert "| 1330 tok/s | 1400 tok/s |  | 95.0% of the sum |" in table
    assert len(table.splitlines()) == 2 + 5


def test_local_steps_have_their_part_of_the_rounds_exchange() -> None:
    assert _choice("rank 0\n--sync auto: local, rounds of 30 steps: the link carries") == ("local", 30)
    assert _choice("--sync auto: step: the link carries") == ("step", 1)
    run = Measured(4096, 1.3, [1.0], [4], [1.3, 1.3, 4.3], "")
    assert _with_rounds(run, 30).seconds == pytest.approx(1.3 + 3.0 / 30)
    assert _with_rounds(run, 1) is run


def test_parts_that_were_not_measured_are_not_in_the_table() -> None:
    assert summary({}) == []
    assert [row["what"] for row in summary({"step": [STEP]})] == ["one step, depth 4, fp32"]


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


def test_errors_are_against_the_real_runs() -> None:
    run = Measured(4096, 4.2, [4.0], [8], [4.2, 4.2], "")
    two = Measured(
        4096, simulate(figures().work, figures(), 2, figures().link).seconds / 1.1, [2.0, 2.0], [4, 4], [], ""
    )
    rows = compare(figures(), {1: run, 2: two})
    assert [row["error"] for row in rows] == pytest.approx([0.0, 0.1])


def test_costs_grow_as_they_should() -> None:
    rows = grow("x", figures().work, figures(), 1000.0)
    assert rows[0]["speedup"] == 1
    assert [row["feed_mb"] for row in rows] == sorted(row["feed_mb"] for row in rows)
    assert rows[-1]["hub_cores"] == pytest.approx(0.003 * 2 * 63)
    assert rows[-1]["wire_s"] > rows[1]["wire_s"] > 0
    assert rows[-1]["speedup"] < 8, "there are 8 rows in a step"


@pytest.mark.parametrize("script", ["bench.py", "two_nodes.py", "scaling.py"])
def test_scripts_explain_themselves(script: str) -> None:
    result = subprocess.run(
        [sys.executable, str(Path(HERE) / script), "--help"], capture_output=True, text=True, timeout=120, check=True
    )
    assert "--steps" in result.stdout
