from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lantrain.errors import UserError
from lantrain.training.report import comparison_table, plot_losses, read_run
from lantrain.training.track import Metrics, Progress, duration, step_line
from tests.distributed.ranks import APP


def _run(path: Path, name: str, speed: float, steps: int, offset: float = 0.0) -> Path:
    records = [{"step": 0, "val_bpb": 3.2}]
    records += [{"step": s, "loss": 10.4 - 0.01 * s + offset, "tok_per_sec": speed} for s in range(1, steps + 1)]
    (path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path / name


def test_table_compares_common_steps(tmp_path: Path) -> None:
    one = read_run("1 rank", _run(tmp_path, "one.jsonl", 45, 10))
    two = read_run("2 ranks", _run(tmp_path, "two.jsonl", 89, 20, offset=1e-6))
    table = comparison_table([one, two]).splitlines()
    assert [cell.strip() for cell in table[2].split("|")] == ["00001", "10.390000", "10.390001", "45", "89"]
    assert [line[:6].strip() for line in table[2:5]] == ["00001", "00005", "00010"]
    assert "over 10 common steps: 1.0e-06; 2 ranks at 1.98 times the speed of 1 rank" in table[-1]


def test_missing_and_empty_metrics_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make demo"):
        read_run("1 rank", tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="no steps yet"):
        read_run("1 rank", tmp_path / "empty.jsonl")


def test_picture_is_a_png(tmp_path: Path) -> None:
    plot_losses([read_run("1 rank", _run(tmp_path, "one.jsonl", 45, 10))], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not list(tmp_path.glob(".*"))


def test_report_command(tmp_path: Path) -> None:
    one, two = _run(tmp_path, "one.jsonl", 45, 4), _run(tmp_path, "two.jsonl", 90, 4)
    command = [sys.executable, "-m", "scripts.report", f"1 rank={one}", f"2 ranks={two}", "--every=2"]
    result = subprocess.run(command, cwd=APP, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "2.00 times" in result.stdout
    result = subprocess.run([*command[:3], "nothing"], cwd=APP, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: 'nothing' is not NAME=TAG (for example \"2 ranks=d4\")\n"


def test_step_line_has_the_form_of_the_report() -> None:
    line = step_line(
        1, 20, loss=10.3978, lr_multiplier=0.025, seconds=1.0, tokens=2048, mfu=0.5, epoch=1, total_seconds=0.0,
        eta_seconds=19.0,
    )  # fmt: skip
    assert line == (
        "step 00001/00020 (5.00%) | loss: 10.397800 | lrm: 0.03 | dt: 1000.00ms | tok/sec: 2,048 | mfu: 50.00 | "
        "epoch: 1 | total time: 0.00m | eta: 19s"
    )


@pytest.mark.parametrize(("seconds", "text"), [(5, "5s"), (120, "2.0m"), (7200, "2.0h"), (400000, "4.6d")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_moving_average_is_debiased_and_survives_a_resume() -> None:
    progress = Progress()
    assert progress.add_step(1, 10.0, 1.0) == pytest.approx(10.0)
    again = Progress.from_dict(progress.to_dict(), None)
    assert again.add_step(2, 8.0, 1.0) == pytest.approx(progress.add_step(2, 8.0, 1.0))
    assert again.eta_seconds(2, 12, 3.0) == 30.0


def test_metrics_of_a_resumed_run_have_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    metrics = Metrics(path, 2)
    metrics.add(step=3, loss=1.0)
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    Metrics(path, 0).close()
    assert path.read_text() == ""


def test_metrics_wait_in_memory_while_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The disk takes a part of a line before it is full, as disks do."""
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, 0)
    disk = metrics._file
    room = [30]

    class Full:
        def write(self, data: bytes) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            room[0] -= (taken := disk.write(data[: room[0]]))
            return taken

        def close(self) -> None:
            disk.close()

    metrics._file = Full()  # type: ignore[assignment]
    for step in range(1, 6):
        metrics.add(step=step)
    assert capsys.readouterr().out.count("No space left on device; its records wait in memory") == 1
    assert len(path.read_bytes()) == 30
    room[0] = 1000
    metrics.add(step=6)
    metrics.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_metrics_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: Is a directory"):
        Metrics(tmp_path / "metrics.jsonl", 0)
