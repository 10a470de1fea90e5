"""Find the pass that makes a kernel's result wrong: compare with the definition in float64 after each."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from ..accuracy import Comparison, compare, longest_sum
from ..api import CompiledKernel
from ..arguments import Array
from ..compiler.tile_kernel import TilesKernel
from ..execution import interpret
from ..render import comparison_table, say
from ..stages import Results, stages
from .failures import refusals, usage
from .problems import Problem, add_compilation, add_inputs, add_kernel, compiled, problem
from .run import outputs_of


def configure(parser: ArgumentParser) -> None:
    add_kernel(parser)
    add_compilation(parser)
    add_inputs(parser)


def run(arguments: Namespace) -> int:
    found = problem(arguments)
    if isinstance(found.kernel, TilesKernel):
        raise usage(
            "a hand-written tile program goes through no pass; `tileloom run` compares it with the interpreter"
        )
    kernel = compiled(arguments, found.kernel)
    tensors = found.tensors(arguments.seed)
    say(f"{found.name} on {kernel.target}: {found.words()}")
    rows = list(by_pass(kernel, found, tensors))
    say(comparison_table(rows))
    wrong = [name for name, row in rows if not row.ok]
    say(
        f"the result is wrong after `{wrong[0]}`, and right before it"
        if wrong
        else "every pass preserves the result"
    )
    return 1 if wrong else 0


def by_pass(
    kernel: CompiledKernel, found: Problem, tensors: Mapping[str, Array]
) -> list[tuple[str, Comparison]]:
    """Each pass with its results compared, up to the first that is wrong."""
    rows: list[tuple[str, Comparison]] = []
    with refusals():
        oracle = interpret(found.graph, tensors, found.numbers, precision="float64")
        longest = longest_sum(found.graph, found.extents, found.scalars)
        made = kernel.compilation(**tensors, **found.numbers)
        for name, results in (
            *stages(made, tensors, found.numbers),
            ("codegen", lambda: outputs_of(kernel, found, tensors)),
        ):
            new = _compared(name, results(), oracle, longest)
            rows += new
            if not all(row.ok for _, row in new):
                break
    return rows


def _compared(
    stage: str, results: Results, oracle: Mapping[str, Array], longest: int
) -> list[tuple[str, Comparison]]:
    return [(stage, compare(name, results[name], oracle[name], longest)) for name in oracle]
