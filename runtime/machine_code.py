"""Machine code of generated CUDA kernels: from this process, from the cache folder, or assembled now.

What a kernel found in the cache folder needs stands here, without numba-cuda, whose import takes a second and a half:
`cuda.py` is imported where there is something to assemble.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field
from functools import cache
from typing import Any

from ..compiler.target import CudaTarget
from ..dsl.records import dataclass
from .cache import Store, digest, digest_of_files, store
from .libnvvm import libnvvm
from .versions import version

INSTALL = "pip install '.[cuda]' in the folder of tileloom"
NOT_INSTALLED = f"CUDA kernels need numba-cuda and the CUDA toolkit, which are not installed: {INSTALL}"
MOST_BLOCKS = 2**31 - 1


def toolkit_installed() -> bool:
    """Can kernels be assembled here?"""
    return importlib.util.find_spec("numba_cuda") is not None


@dataclass(frozen=True)
class Assembled:
    """One kernel as machine code. `spill_bytes` sums spill stores and loads of a thread; `shared_bytes` is static.

    `parameters` are the annotations of the source; `seconds` is the processor time that making it took.
    """

    name: str
    target: CudaTarget
    cubin: bytes = field(repr=False)
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    dynamic_shared_bytes: int
    threads: int
    parameters: tuple[str, ...] = field(repr=False)
    log: str = field(repr=False)
    seconds: float

    @property
    def sass(self) -> str:
        from .disassembly import disassemble

        return disassemble(self.cubin)


@dataclass(frozen=True)
class Variant:
    """One kernel of a generated source, as its `LAUNCHES` state it.

    It may be launched where each extent of `multiples` is a multiple of that number, each of `at_most` no more than it,
    and each tensor of `wide` starts at a multiple of 16 bytes, has stride 1 along its last axis and multiples of 16 bytes
    along the others. `tasks(*extents)` gives how many blocks have work.
    """

    name: str
    threads: int
    shared_bytes: int
    tasks: Callable[..., int] = field(repr=False)
    multiples: Mapping[str, int]
    wide: tuple[str, ...]
    at_most: Mapping[str, int]
    maps: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Tensor maps, its last parameters: tensor and box, the outermost dimension first."""
    blocks_per_sm: int = 0
    """Blocks that a multiprocessor holds, each of which takes tasks in turn; 0: a block for each task."""
    secondary: bool = False
    """May it start while the launch before it still runs? It waits for that itself."""

    def blocks(self, sizes: Sequence[int], multiprocessors: int) -> int:
        """How many blocks a launch has."""
        return min(self.tasks(*sizes), self.blocks_per_sm * multiprocessors or MOST_BLOCKS)


ON_THE_HOST = {
    "__builtins__": {}, "abs": abs, "max": max, "min": min, "floordiv_i64": operator.floordiv, "mod_i64": operator.mod
}  # fmt: skip
"""What an extent's expression may call in `LAUNCHES`, which runs on the host."""


def variants(source: str) -> dict[str, list[Variant]]:
    """The kernels of a generated source by the program they run, the preferred first. Runs nothing but `LAUNCHES`."""
    found: dict[str, list[Variant]] = {}
    for name, x in _launches(source).items():
        variant = Variant(
            name, x["threads"], x["shared_bytes"], x["tasks"], x.get("multiples", {}), tuple(x.get("wide", ())),
            x.get("at_most", {}), tuple(x.get("maps", ())), x.get("blocks_per_sm", 0), x.get("secondary", False),
        )  # fmt: skip
        found.setdefault(x.get("program", name), []).append(variant)
    return found


def _launches(source: str) -> dict[str, Any]:
    """The value of `LAUNCHES`, the last assignment of a source: to parse all before it takes a fifth of a second."""
    start = max(source.rfind("\nLAUNCHES = ") + 1, 0)
    found: dict[str, Any] = {}
    for node in ast.parse(source[start:]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAUNCHES":
            found = eval(compile(ast.Expression(node.value), "<launches>", "eval"), dict(ON_THE_HOST))
    return found


# ---------------------------------------------------------------- kept code


@cache
def machine_code(source: str, name: str, target: CudaTarget) -> Assembled:
    """One kernel of a generated source. Raises ImportError where it has to be assembled and numba-cuda is not installed,
    RuntimeError with the assembler's words where it refuses the code."""
    folder, group = store(), f"cubin-{digest(source, target.name, *_facts())}"
    with folder.making(f"{group}-{name}"):
        found = _kept(folder, group, name, target)
        if found is None:
            from . import cuda

            found = cuda.assemble_one(source, name, target)
            _keep(folder, group, found)
    return found


def _kept(folder: Store, group: str, name: str, target: CudaTarget) -> Assembled | None:
    content = folder.get(group, name[:100])
    if content is None:
        return None
    head, _, cubin = content.partition(b"\n")
    facts = json.loads(head)
    return Assembled(target=target, cubin=cubin, parameters=tuple(facts.pop("parameters")), **facts)


def _keep(folder: Store, group: str, made: Assembled) -> None:
    head = {k: v for k, v in asdict(made).items() if k not in ("target", "cubin")}
    folder.put(group, json.dumps(head).encode() + b"\n" + made.cubin, made.name[:100])


TOOLCHAIN = ("numba-cuda", "numba", "llvmlite", "cuda-core", "cuda-bindings", "nvidia-nvjitlink")


@cache
def _facts() -> tuple[str, ...]:
    """What machine code depends on besides its source: the toolchain, and the text of the intrinsics."""
    versions = (version(p) for p in TOOLCHAIN)
    return (
        *versions,
        libnvvm(),
        digest_of_files("runtime/intrinsics/*.py", "runtime/cuda*.py", "runtime/generated.py"),
    )
