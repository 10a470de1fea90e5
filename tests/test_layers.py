"""The layers dsl <- compiler <- runtime <- facade, and what each may use, read from the sources' imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "tileloom"
LAYERS = ("dsl", "compiler", "runtime")

# What a module may import besides the standard library: the first row whose pattern fits decides.
ALLOWED: tuple[tuple[str, frozenset[str]], ...] = (
    ("dsl/parse*", frozenset({"tileloom.dsl", "lark"})),
    ("dsl/*", frozenset({"tileloom.dsl"})),
    ("compiler/interpreter*", frozenset({"tileloom.dsl", "tileloom.compiler", "numpy", "ml_dtypes"})),
    ("compiler/passes/repairs*", frozenset({"tileloom.dsl", "tileloom.compiler", "numpy", "sympy"})),
    ("compiler/*", frozenset({"tileloom.dsl", "tileloom.compiler", "sympy", "mpmath"})),
    (
        "runtime/*",
        frozenset({"tileloom.dsl", "tileloom.compiler", "tileloom.runtime"})
        | {"numpy", "ml_dtypes", "numba", "llvmlite", "cuda", "torch", "cupy"},
    ),
)
FAMILIES = ("attention", "softmax", "gelu", "layernorm")


def modules(*layers: str) -> list[str]:
    """Paths of the Python modules of these layers, relative to the package, such as `dsl/types.py`."""
    return sorted(
        p.relative_to(PACKAGE).as_posix() for layer in layers for p in (PACKAGE / layer).rglob("*.py")
    )


def imported(tree: ast.AST, module: str) -> Iterator[tuple[str, int]]:
    """Absolute dotted names that `module` imports, each with its line; `from . import x` counts as the name of x."""
    package = ("tileloom", *module.split("/")[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, *([node.module] if node.module else [])))
            if node.module and prefix != "tileloom":
                yield prefix, node.lineno
            else:
                yield from ((f"{prefix}.{alias.name}", node.lineno) for alias in node.names)


def forbidden(tree: ast.AST, module: str) -> list[str]:
    """The imports of `module` that its row of `ALLOWED` does not have, as `line: name`."""
    allowed = next(names for pattern, names in ALLOWED if fnmatch(module, pattern))
    return [
        f"{line}: {name}"
        for name, line in imported(tree, module)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == a or name.startswith(a + ".") for a in allowed)
    ]


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """String constants that are statements of their own: docstrings of modules, classes, functions and attributes."""
    statements = (n.value for n in ast.walk(tree) if isinstance(n, ast.Expr))
    return {v for v in statements if isinstance(v, ast.Constant) and isinstance(v.value, str)}


def words(node: ast.AST) -> Iterator[str]:
    """Every name and string that stands in this node itself: identifiers, imported modules, constants."""
    for _, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                yield item
            elif isinstance(item, bytes):
                yield item.decode("latin-1")


def named_families(tree: ast.AST) -> list[str]:
    """Names of kernel families in the code (not in docstrings or comments), as `line: text`."""
    prose = docstrings(tree)
    return [
        f"{getattr(node, 'lineno', '?')}: {word}"
        for node in ast.walk(tree)
        if node not in prose
        for word in words(node)
        if any(family in word.lower() for family in FAMILIES)
    ]


def parse(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(encoding="utf-8"), filename=module)


@pytest.mark.parametrize("module", modules(*LAYERS))
def test_imports_only_what_its_layer_may(module: str) -> None:
    assert forbidden(parse(module), module) == []


@pytest.mark.parametrize("module", modules(*LAYERS))
def test_knows_no_kernel_family(module: str) -> None:
    assert [family for family in FAMILIES if family in module] == []
    assert named_families(parse(module)) == []


@pytest.mark.parametrize(
    ("module", "text", "name"),
    [
        ("dsl/check.py", "from ..compiler import tensor_ir", "tileloom.compiler"),
        ("dsl/check.py", "from .. import runtime", "tileloom.runtime"),
        ("dsl/check.py", "import lark", "lark"),
        (
            "compiler/passes/lower.py",
            "def f():\n    from ...runtime.launch import call",
            "tileloom.runtime.launch",
        ),
        ("compiler/cost.py", "import numpy as np", "numpy"),
        ("compiler/interpreter.py", "from numba import njit", "numba"),
        ("compiler/codegen/cuda.py", "import cuda.core", "cuda.core"),
        ("runtime/launch.py", "from .. import load", "tileloom.load"),
        ("runtime/launch.py", "from ..__main__ import main", "tileloom.__main__"),
    ],
)
def test_contract_catches(module: str, text: str, name: str) -> None:
    (found,) = forbidden(ast.parse(text), module)
    assert found.endswith(f": {name}")


@pytest.mark.parametrize(
    "text",
    [
        "def online_softmax(): ...",
        "x.Attention",
        "f(gelu=1)",
        "f'{x} layernorm'",
        "import flash_attention",
        "x = b'gelu'",
    ],
)
def test_family_names_are_seen_in_code(text: str) -> None:
    assert named_families(ast.parse(text))


def test_family_names_are_allowed_in_prose() -> None:
    assert not named_families(
        ast.parse('"""softmax"""\nclass C:\n    x: int = 1\n    """gelu"""  # attention\n')
    )


def test_import_leaves_numba_alone() -> None:
    code = (
        "import sys, tileloom; print([m for m in ('numba', 'llvmlite', 'torch', 'cupy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_needs_no_repair_is_compiled_without_sympy() -> None:
    """Importing it takes longer than such a kernel's passes."""
    code = """
import sys, tileloom
text = 'kernel k(a: f32[M, K], b: f32[K, N]) -> c: f32[M, N] { c[m, n] = sum[k](a[m, k] * b[k, n]) }'
made = tileloom.compile(tileloom.parse(text)['k']).compilation(M=64, N=64, K=64)
print([m for m in ('sympy', 'mpmath') if m in sys.modules], 'def k_tasks' in made.source)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True"
