"""What the processor of this machine has beyond the plain instructions, found without loading a compiler."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from pathlib import Path

from ..compiler.target import CpuTarget

NARROW_PRODUCTS = ("amx_bf16", "amx_int8", "avx512_bf16")
"""Instruction sets that generated code has a use for, as /proc/cpuinfo names them."""
TILES = "amx_"


@cache
def host() -> CpuTarget:
    """This machine as a target: where Numba's settings name another processor (`NUMBA_CPU_NAME`, `NUMBA_CPU_FEATURES`), that
    one."""
    found = [x for x in NARROW_PRODUCTS if x in _flags()]
    return CpuTarget("cpu", tuple(x for x in found if not x.startswith(TILES) or tiles_permitted()))


def _flags() -> frozenset[str]:
    named = os.environ.get("NUMBA_CPU_FEATURES")
    if named is not None:
        # LLVM writes avx512bf16 and amx-bf16
        spelled = (
            f[1:].replace("-", "_").replace("avx512b", "avx512_b") for f in named.split(",") if f[:1] == "+"
        )
        return frozenset(spelled)
    if os.environ.get("NUMBA_CPU_NAME") == "generic":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # another system than Linux
        return frozenset()
    return frozenset(next((x.split(":", 1)[1] for x in lines if x.startswith("flags")), "").split())


@cache
def tiles_permitted() -> bool:
    """May this process use AMX tiles? Linux keeps no room for their contents until a process asks (Linux kernel, "Using
    XSTATE features in user space applications": ARCH_REQ_XCOMP_PERM, XTILE_DATA); the answer holds for all its threads, and
    for processes forked from it."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    import ctypes

    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)
