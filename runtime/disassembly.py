"""SASS of machine code, through the toolkit's nvdisasm."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from .machine_code import INSTALL


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin. Raises RuntimeError with nvdisasm's words, or where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([_nvdisasm(), "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr.strip()}")
    return done.stdout


@cache
def _nvdisasm() -> str:
    """The disassembler of the wheels, else of an installed toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in (Path(root) / "cu13" / "bin" / name for name in ("nvdisasm", "nvdisasm.exe")):
            if path.exists():
                return str(path)
    if found := shutil.which("nvdisasm"):
        return found
    raise RuntimeError(f"nvdisasm is not installed: {INSTALL}")
