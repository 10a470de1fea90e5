"""What most commands start from: a kernel, its element types, its sizes and scalars, and where each came from."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..api import CUDA_NAMES, CompiledKernel, compile
from ..arguments import Array, Scalar, alternatives, deduced
from ..compiler.calls import check_call, extents_of
from ..compiler.interpreter.elements import element_of
from ..compiler.schedule import Fuse, Schedule
from ..compiler.schedule_text import parse_item, parse_schedule
from ..compiler.tensor_ir import Graph
from ..dsl.suggest import did_you_mean
from ..dsl.syntax import Program, ProgramKernel
from ..dsl.types import DType
from ..inputs import made, read
from ..programs import graph_of
from .failures import USAGE, CommandError, refusals, usage
from .kernels import read_kernel
from .settings import HELP, Value, parse_settings, points, single
from .texts import read_text

FUSE = ("auto", "all", "none")
LARGEST_EXTENT = 2**63 - 1


@dataclass(frozen=True)
class Problem:
    """One kernel at one choice of sizes, scalars and element types; `given` are arrays from a file."""

    kernel: ProgramKernel
    graph: Graph
    dtypes: dict[str, DType]
    extents: dict[str, int]
    scalars: dict[str, Scalar]
    given: dict[str, Array]

    @property
    def name(self) -> str:
        return self.graph.name

    def tensors(self, seed: int = 0) -> dict[str, Array]:
        """Arrays for every tensor parameter: the given ones, made ones for the rest."""
        return {**made(self.graph, self.extents, self.numbers, seed), **self.given}

    @property
    def numbers(self) -> dict[str, Scalar]:
        """Scalars, and the extents that are parameters."""
        return {**self.scalars, **{e: self.extents[e] for e in self.graph.declared}}

    def words(self) -> str:
        """`B = 1, H = 8, scale = 0.125, T = f32`"""
        values: dict[str, object] = {**self.extents, **self.scalars, **self.dtypes}
        return ", ".join(f"{n} = {v}" for n, v in values.items())


def add_kernel(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE[:KERNEL]", help="a .tile file, or - for standard input")
    parser.add_argument("-D", action="append", default=[], dest="settings", metavar="NAME=VALUE", help=HELP)


def add_compilation(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        metavar="T",
        help=f"cpu (the default), interp, cuda for the GPU that is here, or {CUDA_NAMES}",
    )
    parser.add_argument("--schedule", metavar="S", help="a file with a schedule, or the name of one in FILE")
    parser.add_argument("--fuse", choices=FUSE, default="auto", help="fuse what pays, everything, or nothing")
    parser.add_argument("--precise", action="store_true", help="round no product operand to a stored type")
    parser.add_argument("--deterministic", action="store_true", help="no sums in order of arrival")
    parser.add_argument(
        "--check-indices", action="store_true", help="refuse indices out of range (target interp)"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME", help="switch on an inexact rule"
    )


def add_inputs(parser: ArgumentParser) -> None:
    parser.add_argument("--inputs", metavar="F.npz", help="arrays by parameter name; the rest is made")
    parser.add_argument("--seed", type=int, default=0, help="of made inputs (0)")


def problem(arguments: Namespace) -> Problem:
    """The one problem of a command line; says which sizes it took from the file's `example`."""
    kernel = read_kernel(arguments.file)
    settings = single(parse_settings(arguments.settings, alternatives(kernel.kernel)))
    found = settled(kernel, settings, given_arrays(arguments))
    announce(found, settings)
    return found


def problems(arguments: Namespace) -> Iterator[Problem]:
    """The problems of a sweep, in order."""
    kernel = read_kernel(arguments.file)
    given = given_arrays(arguments)
    for values in points(parse_settings(arguments.settings, alternatives(kernel.kernel))):
        yield settled(kernel, values, given)


def given_arrays(arguments: Namespace) -> dict[str, Array]:
    if not getattr(arguments, "inputs", None):
        return {}
    with refusals():
        return read(arguments.inputs)


def announce(found: Problem, settings: Mapping[str, Value]) -> None:
    """On standard error, what a command uses that nobody stated."""
    names = [*found.extents, *found.scalars]
    own = [n for n in names if n not in settings and n in found.graph.example and not found.given]
    if own:
        values = {**found.extents, **found.scalars}
        print("from the example: " + ", ".join(f"{n} = {values[n]}" for n in own), file=sys.stderr)


def settled(kernel: ProgramKernel, settings: Mapping[str, Value], given: Mapping[str, Array]) -> Problem:
    """Every size and scalar: from `-D`, from the given arrays, from the file's `example`; checked as a call would be."""
    dtypes = _dtypes(kernel, settings, given)
    graph = graph_of(kernel, dtypes)
    _known(graph, kernel, settings, given)
    numbers = {**graph.example, **{n: v for n, v in settings.items() if not isinstance(v, DType)}}
    extents = _extents(graph, numbers, settings, given)
    scalars = {n: _scalar(graph, n, numbers) for n in graph.scalars}
    with refusals():
        check_call(graph, extents, scalars)
    return Problem(kernel, graph, dtypes, extents, scalars, dict(given))


def _dtypes(
    kernel: ProgramKernel, settings: Mapping[str, Value], given: Mapping[str, Array]
) -> dict[str, DType]:
    allowed = alternatives(kernel.kernel)
    with refusals():
        found = deduced(
            kernel.kernel, {n: e for n, x in given.items() if (e := element_of(x.dtype)) is not None}
        )
    for name, choices in allowed.items():
        wanted = settings.get(name)
        if wanted is None:
            continue
        if not isinstance(wanted, DType) or wanted not in choices:
            raise usage(f"-D {name}={wanted}: {name} can be {', '.join(map(str, choices))}")
        found[name] = wanted
    return found


def _known(
    graph: Graph, kernel: ProgramKernel, settings: Mapping[str, Value], given: Mapping[str, Array]
) -> None:
    names = [*graph.extents, *graph.scalars, *alternatives(kernel.kernel)]
    for name in settings:
        if name not in names:
            near = did_you_mean(name, names)
            raise usage(
                f"{graph.name} has no extent, scalar or dtype parameter `{name}`; it has {', '.join(names)}"
                + (f" ({near})" if near else "")
            )
    for name in given:
        if name not in graph.tensors:
            raise CommandError(f"{graph.name} has no tensor `{name}`; it has {', '.join(graph.tensors)}")


def _extents(
    graph: Graph, numbers: Mapping[str, Value], settings: Mapping[str, Value], given: Mapping[str, Array]
) -> dict[str, int]:
    if given and set(given) == set(graph.tensors):
        with refusals():
            scalars = {n: v for n, v in numbers.items() if not isinstance(v, DType)}
            found = extents_of(graph, {n: x.shape for n, x in given.items()}, scalars)
        _undisputed(found, settings)
        return found
    if given:
        missing = next(t for t in graph.tensors if t not in given)
        raise CommandError(f"the file of inputs has no `{missing}`; it must hold {', '.join(graph.tensors)}")
    return {e: _extent(graph, e, numbers) for e in graph.extents}


def _undisputed(found: Mapping[str, int], settings: Mapping[str, Value]) -> None:
    for name, n in found.items():
        if settings.get(name, n) != n:
            raise usage(f"-D {name}={settings[name]}, but the arrays of --inputs make {name} = {n}")


def _extent(graph: Graph, name: str, numbers: Mapping[str, Value]) -> int:
    if name not in numbers:
        raise usage(
            f"the size of `{name}` is not stated; add -D {name}=… (or an `example` line to {graph.name})"
        )
    value = numbers[name]
    if not isinstance(value, int) or not 0 <= value <= LARGEST_EXTENT:
        raise usage(f"-D {name}={value}: an extent is an integer from 0 to 2^63 - 1")
    return value


def _scalar(graph: Graph, name: str, numbers: Mapping[str, Value]) -> Scalar:
    if name not in numbers:
        raise usage(
            f"the value of `{name}` is not stated; add -D {name}=… (or an `example` line to {graph.name})"
        )
    value, dtype = numbers[name], graph.scalars[name].dtype
    if isinstance(value, DType) or (isinstance(value, float) and not dtype.is_float):
        raise usage(f"-D {name}={value}: `{name}` is {dtype}")
    return float(value) if dtype.is_float else bool(value) if dtype is DType.BOOL else value


# ---------------------------------------------------------------- compiling as the command line says


def compiled(arguments: Namespace, kernel: ProgramKernel, fuse: Fuse | None = None) -> CompiledKernel:
    """The kernel compiled as the options say; `fuse` overrides theirs, and then no schedule is taken."""
    with refusals(USAGE):
        return compile(
            kernel,
            target=arguments.target,
            schedule=schedule(arguments, kernel.program) if fuse is None else None,
            fuse=fuse or arguments.fuse,
            precise=arguments.precise,
            deterministic=arguments.deterministic,
            check_indices=arguments.check_indices,
            options=arguments.option,
        )


def schedule(arguments: Namespace, program: Program) -> Schedule | None:
    """The schedule of `--schedule`: an item of the program by name, else a file."""
    wanted = arguments.schedule
    if not wanted:
        return None
    item = program.schedules.get(wanted)
    if item is not None:
        return parse_item(item.span)
    try:
        text = read_text(wanted)
    except CommandError as reason:
        names = ", ".join(program.schedules) or "none"
        raise CommandError(
            f"--schedule {wanted}: the file has no schedule of that name (it has {names}), and as a file: {reason}"
        ) from None
    return parse_schedule(text, wanted)
