"""What tileloom finds here: versions, processor, threads, GPU, and the folder in which compiled kernels are kept."""

from __future__ import annotations

import os
import platform
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib import metadata

from rich.table import Table

from .. import __version__
from ..render import bytes_text, say
from ..runtime.cache import VARIABLE, store
from ..runtime.host import host
from ..runtime.threads import threads

PACKAGES = ("numba", "llvmlite", "numpy", "ml_dtypes", "sympy", "lark", "numba-cuda", "torch")
OPTIONAL = {
    "numba-cuda": "for GPUs: pip install '.[cuda]' in the folder of tileloom",
    "torch": "only for calls with its tensors",
}


def configure(parser: ArgumentParser) -> None:
    """It takes nothing."""


def run(arguments: Namespace) -> int:
    """1 where a required package is missing or the cache folder cannot be used."""
    problem = store().problem()
    missing = [p for p in PACKAGES if p not in OPTIONAL and _version(p) is None]
    rows = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for label, value in (*_versions(), *_machine(), *_cache(problem)):
        rows.add_row(label, value)
    say(rows)
    for package in missing:
        say(f"wrong: {package} is not installed")
    if problem is not None:
        say(f"wrong: the cache folder is not used: {problem}")
    return 1 if missing or problem is not None else 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "tileloom", __version__
    yield "python", f"{platform.python_implementation()} {platform.python_version()}"
    for package in PACKAGES:
        without = f"not installed ({OPTIONAL.get(package, 'required')})"
        yield package, _version(package) or without


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> Iterator[tuple[str, str]]:
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    vectors = [f for f in ("sse4.2", "avx", "avx2", "fma", "avx512f", "neon", "sve") if features.get(f)]
    yield "system", f"{platform.system()} {platform.machine()}"
    yield "processor", f"{binding.get_host_cpu_name()} ({', '.join(vectors) or 'no vector units known'})"
    yield "narrow products", ", ".join(host().narrow_products) or "none; 16-bit operands are widened to f32"
    yield "threads", f"{threads()} of {os.cpu_count()}"
    yield "GPU", _gpu()


def _gpu() -> str:
    from ..execution import gpu_target

    found = gpu_target()
    return f"{found.name}" if found else "no CUDA device"


def _cache(problem: str | None) -> Iterator[tuple[str, str]]:
    folder = store()
    named = f"from {VARIABLE}" if os.environ.get(VARIABLE) else f"{VARIABLE} names another"
    yield "cache folder", f"{folder.folder} ({named})"
    if problem is None:
        used = folder.usage()
        size = f"{bytes_text(used.total_bytes)} of at most {bytes_text(folder.limit_bytes)}"
        yield "cache holds", f"{used.entries} entries, {size}"
