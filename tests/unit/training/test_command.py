"""What a trainer tells the launcher beside it when it cannot even begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from lantrain.cluster import beacon
from lantrain.errors import UserError
from lantrain.training.command import train


def test_a_refused_flag_reaches_the_launcher_as_something_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "beacon.json"
    monkeypatch.setenv("LANTRAIN_BEACON", str(path))
    monkeypatch.setenv("LANTRAIN_GENERATION", "3")
    with pytest.raises(UserError):
        train(["--depth", "0"])
    said = beacon.read(path, 3)
    assert said is not None
    assert (said.phase, said.outcome) == ("ended", "fatal")
    assert "--depth must be from 1 to 1,000" in said.message
