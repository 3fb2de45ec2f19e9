"""A base directory for each test that changes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def base(corpus: Path, tmp_path: Path) -> Path:
    """A base directory of the test's own."""
    shutil.copytree(corpus, tmp_path / "base", ignore=shutil.ignore_patterns("base_checkpoints"))
    return tmp_path / "base"
