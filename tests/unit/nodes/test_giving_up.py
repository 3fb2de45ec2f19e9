from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lantrain.errors import LOST_PEER_EXIT, UserError
from lantrain.nodes import giving_up
from lantrain.nodes.giving_up import container_id, leave_note, take_note
from scripts.node import _launch

IDENTITY = "ab" * 32
MOUNT = f"100 90 8:1 /var/lib/docker/containers/{IDENTITY}/hostname /etc/hostname rw - ext4 /dev/sda1 rw\n"


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    (tmp_path / "mountinfo").write_text(MOUNT)
    return tmp_path / "mountinfo"


def test_a_note_holds_back_one_start_of_the_same_container(mounts: Path) -> None:
    assert container_id(mounts) == IDENTITY
    assert take_note(mounts) == ""
    leave_note("HOST is empty", mounts)
    assert take_note(mounts) == "HOST is empty"
    assert take_note(mounts) == "", "the next start is somebody's at the keyboard"


def test_another_container_on_the_same_volume_is_not_held_back(mounts: Path) -> None:
    leave_note("HOST is empty", mounts)
    mounts.write_text(MOUNT.replace(IDENTITY, "cd" * 32))
    assert take_note(mounts) == ""


def test_outside_of_docker_nothing_is_written(mounts: Path, tmp_path: Path) -> None:
    mounts.write_text("100 90 8:1 / / rw - ext4 /dev/sda1 rw\n")
    leave_note("HOST is empty", mounts)
    assert [path.name for path in tmp_path.iterdir()] == ["mountinfo"]
    assert container_id(tmp_path / "missing") == ""


def test_a_volume_that_cannot_be_written_is_only_a_warning(
    mounts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/proc/nowhere")
    assert not leave_note("HOST is empty", mounts)
    assert "cannot write /proc/nowhere (No such file or directory): ending with code 0" in capsys.readouterr().out
    assert take_note(mounts) == ""


def mistaken() -> int:
    raise UserError("HOST is empty", "give the master's address")


def lost() -> int:
    raise UserError("lost contact", "", LOST_PEER_EXIT)


@pytest.mark.parametrize(("run", "code"), [(mistaken, 0), (lambda: 3, 0), (lambda: 143, 143), (lambda: 0, 0)])
def test_where_no_note_can_be_left_a_mistake_ends_with_0(
    run: Callable[[], int], code: int, mounts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Docker starts again whatever ends with another code: for ever, with no note to stop the second start."""
    monkeypatch.setattr(giving_up, "container_id", lambda mounts: IDENTITY)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/proc/nowhere")
    assert _launch(run) == code
    assert ("error: HOST is empty (give" in capsys.readouterr().err) == (run is mistaken)


def test_with_a_note_or_a_lost_peer_the_code_says_what_happened(
    mounts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_up, "container_id", lambda mounts: IDENTITY)
    with pytest.raises(UserError, match="lost contact"):
        _launch(lost)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mountinfo"], "Docker has to start it again"
    with pytest.raises(UserError, match="HOST is empty"):
        _launch(mistaken)
    assert _launch(mistaken) == 0, "the second start only repeats it"
