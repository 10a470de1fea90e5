"""Run a kernel on made or given inputs and compare it with the interpreter in float64."""

from __future__ import annotations

import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from ..accuracy import DERIVATION, Comparison, compare, largest_tensor, longest_sum
from ..api import CompiledKernel
from ..arguments import Array
from ..compiler.pipeline import Compilation
from ..compiler.tile_kernel import TilesKernel
from ..execution import interpret, interpret_tiles, on_cpu
from ..render import comparison_table, say
from ..stages import stages
from .failures import refusals, usage
from .problems import Problem, add_compilation, add_inputs, add_kernel, compiled, problem
from .texts import read_text

SMALL = 1 << 27
"""Elements of the largest tensor up to which the comparison is made unasked: 1 GiB in float64."""


def configure(parser: ArgumentParser) -> None:
    add_kernel(parser)
    add_compilation(parser)
    add_inputs(parser)
    parser.add_argument(
        "--check", action="store_true", help="compare even where the interpreter needs much memory"
    )
    parser.add_argument("--verify-each", action="store_true", help="compare every stage with the oracle")
    parser.add_argument(
        "--source", metavar="F", help="run this edited source (from show --emit source) instead"
    )


def run(arguments: Namespace) -> int:
    found = problem(arguments)
    kernel = compiled(arguments, found.kernel)
    if arguments.source and kernel.target != "cpu":
        raise usage(f"--source runs code for the CPU; it does not go with --target {kernel.target}")
    tensors = found.tensors(arguments.seed)
    say(f"{found.name} on {kernel.target}: {found.words()}")
    results = _compiled_results(arguments, kernel, found, tensors)
    if not arguments.check and largest_tensor(found.graph, found.extents, found.scalars) > SMALL:
        say("not compared: the interpreter would store each intermediate in float64; --check compares anyway")
        return 0
    stages = _stages(arguments, kernel, found, tensors) if arguments.verify_each else {}
    return _report(kernel, found, tensors, {**stages, kernel.target: results})


def _compiled_results(
    arguments: Namespace, kernel: CompiledKernel, found: Problem, tensors: Mapping[str, Array]
) -> dict[str, Array]:
    """The kernel's outputs, after a first call that compiles."""
    with refusals():
        call: Any = kernel
        if arguments.source:
            call = on_cpu(
                kernel.compilation(**tensors, **found.numbers), read_text(arguments.source), arguments.source
            )
        start = time.perf_counter()
        outputs = _outputs(call, found, _copies(found, tensors))
        compiling = time.perf_counter() - start
        start = time.perf_counter()
        outputs = _outputs(call, found, _copies(found, tensors))
        made = "" if kernel.target == "interp" else ", with compiling,"
        say(f"first call{made} {compiling:.2f} s; second call {1e3 * (time.perf_counter() - start):.2f} ms")
    return outputs


def outputs_of(kernel: CompiledKernel, found: Problem, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of one call, and the parameters it updates."""
    return _outputs(kernel, found, _copies(found, tensors))


def _copies(found: Problem, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs of one call: parameters that it updates are copies."""
    return {n: x.copy() if found.graph.tensors[n].inout else x for n, x in tensors.items()}


def _outputs(call: Any, found: Problem, tensors: Mapping[str, Array]) -> dict[str, Array]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*arrays lie in the host's memory"
        )  # as the command's always do
        returned = call(**tensors, **found.numbers)
    several = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    updated = {n: tensors[n] for n, t in found.graph.tensors.items() if t.inout}
    return {**dict(zip(found.graph.outputs, several, strict=True)), **updated}


def _stages(
    arguments: Namespace, kernel: CompiledKernel, found: Problem, tensors: Mapping[str, Array]
) -> dict[str, dict[str, Array]]:
    """Results of the stages before the generated code, by name."""
    if isinstance(found.kernel, TilesKernel):
        return {}
    made: Compilation = kernel.compilation(**tensors, **found.numbers)
    return {f"after {name}": results() for name, results in stages(made, tensors, found.numbers)}


def _oracle(
    kernel: CompiledKernel, found: Problem, tensors: Mapping[str, Array]
) -> tuple[dict[str, Array], int]:
    """The results to compare with, and the longest sum in them: a definition's in float64, a tile program's as written."""
    if isinstance(found.kernel, TilesKernel):
        made = kernel.compilation(**found.extents)
        return interpret_tiles(made, tensors, found.numbers), max(found.extents.values(), default=1)
    oracle = interpret(found.graph, tensors, found.numbers, precision="float64", check_indices=False)
    return oracle, longest_sum(found.graph, found.extents, found.scalars)


def _report(
    kernel: CompiledKernel,
    found: Problem,
    tensors: Mapping[str, Array],
    results: Mapping[str, Mapping[str, Array]],
) -> int:
    with refusals():
        oracle, longest = _oracle(kernel, found, tensors)
    rows: list[tuple[str, Comparison]] = [
        (stage, compare(name, outputs[name], oracle[name], longest))
        for stage, outputs in results.items()
        for name in oracle
    ]
    say(comparison_table(rows))
    say(f"allowed: {DERIVATION}, longest sum {longest}")
    wrong = [stage for stage, row in rows if not row.ok]
    say(f"wrong from `{wrong[0]}` on" if wrong else "ok")
    return 1 if wrong else 0
