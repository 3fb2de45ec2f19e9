"""Compile the C++ operations: one shared library for each kind of CPU of this architecture.

    python -m lantrain.model.kernels.build [FOLDER]

Needs g++ (CXX names another). The libraries use neither the headers of torch nor those of Python, so they fit any
version of both, and the machine that builds them need not be able to run them.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = ("loss.cpp", "attention.cpp", "elementwise.cpp", "muon.cpp", "adamw.cpp")
HERE = Path(__file__).resolve().parent
TARGETS = {
    "x86_64": {
        "v3": ["-march=x86-64-v3"],
        "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
        "v4bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"],
        "v4amx": ["-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mprefer-vector-width=512"],
    },
    "aarch64": {"neon": ["-march=armv8-a"]},
}
"""Name of a library and its flags, by architecture; the names are those of `kernels.CAPABILITIES`."""

# -fopenmp for the compiler alone: the OpenMP of the link is torch's, already loaded, so there is one pool of threads.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]


def compiler() -> str | None:
    """Path of the C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX") or "g++")


def takes(cxx: str, flags: list[str]) -> bool:
    """Whether the compiler knows these flags."""
    command = [cxx, *flags, "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def build(folder: Path, machine: str | None = None) -> list[Path]:
    """Compile every library of an architecture (default: this one) into `folder`; returns their paths.

    Those for instructions that the compiler does not know are left out, with a line. Raises FileNotFoundError without a
    compiler, subprocess.CalledProcessError when it fails.
    """
    cxx = compiler()
    if cxx is None:
        raise FileNotFoundError("no g++")
    folder.mkdir(parents=True, exist_ok=True)
    built = []
    for name, flags in TARGETS.get(machine or platform.machine(), {}).items():
        if not takes(cxx, flags):
            print(f"kernels: {name} left out: {cxx} does not take {' '.join(flags)} (a newer g++ does)")
            continue
        path = folder / f"lantrain-{name}.so"
        fresh = path.with_suffix(f".{os.getpid()}.tmp")  # a running trainer keeps the library that it has mapped
        objects = []
        for source in SOURCES:
            objects.append(folder / f"{source}.{os.getpid()}.o")
            subprocess.run([cxx, *FLAGS, *flags, "-c", str(HERE / source), "-o", str(objects[-1])], check=True)
        subprocess.run([cxx, "-shared", "-s", "-o", str(fresh), *map(str, objects)], check=True)
        for item in objects:
            item.unlink()
        fresh.replace(path)
        built.append(path)
    return built


def main() -> int:
    """Build into the package, or the folder that the first argument names. Returns an exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "lib"
    if compiler() is None:
        print("kernels: no g++ here; the trainer will use PyTorch's operators, which are slower")
        return 0
    built = build(folder)
    print(f"kernels: {', '.join(path.name for path in built) or 'none for this architecture'} in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
