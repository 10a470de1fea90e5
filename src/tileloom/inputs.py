"""Made inputs: seeded, and sensible for what a kernel does with them."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .arguments import Array, Scalar
from .compiler.evaluate import evaluate
from .compiler.interpreter.elements import NUMPY
from .compiler.tensor_ir import Graph, Node, Read, Tensor, walk

MOSTLY = 0.9
"""Share of True in boolean tensors, which are masks more often than not."""
LARGEST_BYTES = 2**63 - 1
SMALL = 8
"""Integers that index nothing lie below this."""


def made(
    graph: Graph, extents: Mapping[str, int], scalars: Mapping[str, Scalar], seed: int = 0
) -> dict[str, Array]:
    """A tensor for each parameter: floats normal, booleans mostly true, integers within what they index."""
    random = np.random.default_rng(seed)
    return {name: _tensor(graph, t, extents, scalars, random) for name, t in graph.tensors.items()}


def shape_of(
    shape: tuple[Node, ...], extents: Mapping[str, int], scalars: Mapping[str, Scalar]
) -> tuple[int, ...]:
    return tuple(int(evaluate(n, extents, scalars)) for n in shape)


def _tensor(
    graph: Graph,
    t: Tensor,
    extents: Mapping[str, int],
    scalars: Mapping[str, Scalar],
    random: np.random.Generator,
) -> Array:
    shape, dtype = shape_of(t.shape, extents, scalars), NUMPY[t.dtype]
    if math.prod(n or 1 for n in shape) * max(4, dtype.itemsize) > LARGEST_BYTES:
        raise MemoryError
    if t.dtype.is_float:
        single = random.standard_normal(shape, np.float32)
        return single.astype(dtype)
    if t.dtype.is_integer:
        below = min((shape_of((n,), extents, scalars)[0] for n in _indexed(graph, t.name)), default=SMALL)
        return random.integers(0, max(1, min(below, 127)), shape).astype(dtype)
    return random.random(shape) < MOSTLY


def _indexed(graph: Graph, tensor: str) -> list[Node]:
    """The extents of the dimensions that elements of an integer tensor index."""
    values = [n for d in graph.definitions for n in (d.value, *(d.target or ()))]
    found = [
        graph.shape_of(n.tensor)[k]
        for n in walk(values)
        if isinstance(n, Read)
        for k, i in enumerate(n.indices)
        if isinstance(i, Read) and i.tensor == tensor
    ]
    for d in graph.definitions:
        for k, i in enumerate(d.target or ()):
            if isinstance(i, Read) and i.tensor == tensor:
                found.append(graph.shape_of(d.name)[k])
    return found


def read(path: str | Path) -> dict[str, Array]:
    """The arrays of an .npz file by name. Raises ValueError in words."""
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ValueError("one array, as numpy.save writes it")
        with file:
            return {name: np.asarray(file[name]) for name in file.files}
    except OSError as reason:
        raise ValueError(f"cannot read {path}: {reason.strerror or reason}") from None
    except (ValueError, EOFError, AttributeError, zipfile.BadZipFile):
        raise ValueError(f"{path} is no .npz file of plain arrays, as numpy.savez writes them") from None
