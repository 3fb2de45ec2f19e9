import os
import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from lantrain.model.memory import keep_freed_memory
kept = keep_freed_memory()
for _ in range(3):
    torch.ones(2**24)
counts = []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MiB, 16384 pages
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, min(counts))
"""


def faults(**environment: str) -> tuple[str, int]:
    env = os.environ | {"PYTHONPATH": "app"} | environment
    output = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True).stdout
    kept, count = output.split()
    return kept, int(count)


def test_freed_memory_is_used_again() -> None:
    kept, count = faults()
    if kept == "False":
        pytest.skip("not glibc's malloc")
    assert count < 1000


def test_the_environment_has_the_last_word() -> None:
    kept, count = faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"
    assert count > 100  # huge pages make it fewer than 16384
