"""A few operations in C++, each with a twin in PyTorch: which library fits this CPU, and the calls into it.

The libraries (`build.py` compiles them) are plain C interfaces over memory, loaded with ctypes. The CPU's
instructions, torch's own limit (ATEN_CPU_CAPABILITY) and LANTRAIN_KERNELS (off or a name; default: the
best that this CPU runs) decide which one runs. Without a library the twins do the same work.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent / "lib"
SETTING = "LANTRAIN_KERNELS"
V3 = ("avx2", "fma3")
V4 = (*V3, "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl")
V4BF16 = (*V4, "avx512_bf16")
CAPABILITIES = {
    "v4amx": (*V4BF16, "amx_tile", "amx_bf16"),
    "v4bf16": V4BF16,
    "v4": V4,
    "v3": V3,
    "neon": (),
}
"""What a library needs of the CPU, by torch's names; best first."""

P, I64, I32, F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, list[type[ctypes._SimpleCData]]] = {
    "lantrain_softcap_loss": [P, I32, I64, I64, P, F32, F32, I32, P, I32],
    "lantrain_attention_forward": [P] * 5 + [P, P, I32, F32, I32],
    "lantrain_attention_backward": [P] * 9 + [P, P, I32, F32, I32],
    "lantrain_rotary_norm": [P, P, P, P, I32, F32, F32, P, P, I32],
    "lantrain_rotary_norm_backward": [P, P, P, P, P, P, I32, F32, P, I32],
    "lantrain_rms_norm": [P, I64, I64, F32, P, P, I32],
    "lantrain_rms_norm_backward": [P, P, P, I64, I64, P, I32],
    "lantrain_residual_mix_backward": [P, P, P, I64, I64, F32, F32, P, P, P, I32],
    "lantrain_squared_relu": [P, P, I64, I32, I32],
    "lantrain_squared_relu_backward": [P, P, I64, I32, I32],
    "lantrain_adamw": [P, P, P, P, I32, I64, P, P, I32],
    "lantrain_adamw_rows": [P, P, P, I32, P, P, I64, I64, P, P, P, I64, I32],
}
NARROW_SIGNATURES: dict[str, list[type[ctypes._SimpleCData]]] = {
    "lantrain_polar_express": [P, I64, I64, P, I64, I32],
    "lantrain_muon_update": [P, P, P, P, I64, I64, P, P, I64, I32],
    "lantrain_head_loss": [P, P, I64, I64, I64, P, F32, P, P, P, I32],
}
"""In the libraries for CPUs that multiply bfloat16 alone."""
NARROW = ("v4amx", "v4bf16")


@dataclass(frozen=True)
class Kernels:
    """A loaded library and its name."""

    name: str
    library: ctypes.CDLL

    @property
    def narrow(self) -> bool:
        """Whether it has the operations of NARROW_SIGNATURES."""
        return self.name in NARROW


def runnable() -> list[str]:
    """Names of the libraries that this CPU can run and torch's own limit allows, best first."""
    if platform.machine() == "aarch64":
        return ["neon"]
    if platform.machine() != "x86_64":
        return []
    has = torch.cpu.get_capabilities()
    level = torch.backends.cpu.get_cpu_capability()  # what ATEN_CPU_CAPABILITY left: DEFAULT, AVX2, AVX512
    names = [name for name, needs in CAPABILITIES.items() if needs and all(has.get(need, False) for need in needs)]
    if "v4amx" in names and not tiles_permitted():
        names.remove("v4amx")
    if level != "AVX512":
        names = [name for name in names if not name.startswith("v4")]
    return names if level != "DEFAULT" else []


@lru_cache
def tiles_permitted() -> bool:
    """Whether the system lets this process use AMX's tile registers, which Linux gives on demand and for good.

    arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA), Linux 5.16 and later (Documentation/arch/x86/xstate.rst).
    """
    if platform.system() != "Linux":
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


def choose(setting: str, folder: Path = FOLDER) -> tuple[str | None, str]:
    """Name of the library to use or None, and the reason. `setting`: as LANTRAIN_KERNELS, empty for the best."""
    if setting == "off":
        return None, f"{SETTING}=off"
    names = runnable()
    if setting and setting not in names:
        return None, f"{SETTING}={setting} is not for this CPU, which runs {', '.join(names) or 'none of them'}"
    for name in [setting] if setting else names:
        if (folder / f"lantrain-{name}.so").exists():
            return name, f"{SETTING}={name}" if setting else "the best for this CPU"
    return None, "no C++ library was built for this CPU; python -m lantrain.model.kernels.build makes it where g++ is"


@lru_cache
def _chosen(setting: str) -> tuple[Kernels | None, str]:
    name, reason = choose(setting)
    if name is None:
        return None, reason
    try:
        return load(FOLDER / f"lantrain-{name}.so", name), reason
    except (OSError, AttributeError) as error:  # another system's, or of another version of the sources
        return None, f"{name} could not be loaded: {error}"


def kernels() -> Kernels | None:
    """The library that LANTRAIN_KERNELS and this CPU ask for; None where the PyTorch twins are to be used."""
    return _chosen(os.environ.get(SETTING, ""))[0]


def describe() -> str:
    """One line for the log: which operations this process uses, and why."""
    found, reason = _chosen(os.environ.get(SETTING, ""))
    return f"C++ operations {found.name} ({reason})" if found else f"PyTorch's operators ({reason})"


def load(path: Path, name: str) -> Kernels:
    """Load a library and declare its functions. OSError when it does not fit."""
    _share_openmp()
    library = ctypes.CDLL(str(path))
    for function, arguments in (SIGNATURES | (NARROW_SIGNATURES if name in NARROW else {})).items():
        getattr(library, function).argtypes = arguments
        getattr(library, function).restype = None
    return Kernels(name, library)


def _share_openmp() -> None:
    """Let libraries that are loaded from now on see the symbols of the OpenMP that torch has loaded.

    torch's wheels bring their own libgomp, on some architectures under another name. A second one would be a second
    pool of threads, fighting for the cores.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "libgomp" in path.rpartition("/")[2]:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
            return


def fits(*tensors: Tensor) -> bool:
    """Whether the operations take these: one dtype, float32 or bfloat16, neighbours in memory along the last axis."""
    dtype = tensors[0].dtype
    return dtype in (torch.float32, torch.bfloat16) and all(
        tensor.dtype == dtype and tensor.stride(-1) == 1 for tensor in tensors
    )


def is_bf16(tensor: Tensor) -> int:
    """The flag that tells the operations what they were given."""
    return int(tensor.dtype == torch.bfloat16)


def integers(values: list[int]) -> ctypes.Array[ctypes.c_int64]:
    """An int64 array for a call."""
    return (ctypes.c_int64 * len(values))(*values)
