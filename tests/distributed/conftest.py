"""A base directory for each test that changes it, and one thread for what a test computes itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def base(corpus: Path, tmp_path: Path) -> Path:
    """A base directory of the test's own."""
    shutil.copytree(corpus, tmp_path / "base", ignore=shutil.ignore_patterns("base_checkpoints"))
    return tmp_path / "base"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the ranks have: on some CPUs a matrix product of two threads rounds otherwise than that of one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
