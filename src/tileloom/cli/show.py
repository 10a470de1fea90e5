"""Print a stage of a kernel's compilation: syntax, both IRs, the schedule, the generated source, machine code."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from ..api import CompiledKernel
from ..compiler.codegen.variants_told import told
from ..compiler.spelling import spell
from ..compiler.target import CudaTarget
from ..compiler.tensor_text import print_graph
from ..programs import graph_of
from ..render import resource_table, say
from ..tree import syntax_tree
from ..variants import refuse_spilled
from .failures import CommandError, refusals, usage
from .kernels import read_kernel
from .problems import Problem, add_compilation, add_kernel, compiled, problem

MACHINE = ("ptx", "sass", "resources")
EMIT = ("syntax", "tensor", "tile", "schedule", "source", *MACHINE)
DEFAULT_GPU = "cuda:sm_90a"


def configure(parser: ArgumentParser) -> None:
    add_kernel(parser)
    add_compilation(parser)
    parser.add_argument(
        "--emit",
        choices=EMIT,
        help=f"what to print (tile); {', '.join(MACHINE)} are for {DEFAULT_GPU} where no --target is given",
    )
    parser.add_argument("--after", metavar="PASS", help="the text after a pass, or all of them")


def run(arguments: Namespace) -> int:
    if arguments.emit and arguments.after:
        raise usage("--emit and --after both say what to print; give one")
    emit = arguments.emit or "tile"
    if not arguments.after and emit in ("syntax", "tensor"):
        kernel = read_kernel(arguments.file)
        print(syntax_tree(kernel.kernel) if emit == "syntax" else print_graph(graph_of(kernel)), end="")
        return 0
    if emit in MACHINE and arguments.target is None:
        arguments.target = DEFAULT_GPU
        print(f"no --target is given: for {DEFAULT_GPU}", file=sys.stderr)
    found = problem(arguments)
    kernel_ = compiled(arguments, found.kernel)
    if arguments.after:
        _after(arguments.after, _stages(kernel_, found))
    elif emit in MACHINE:
        _machine(emit, kernel_, found)
    else:
        text = _stages(kernel_, found).get(emit)
        if text is None:
            raise usage(f"--emit {emit}: a tile program is written by hand and has no such stage")
        print(with_sizes(text, found) if emit == "tile" else text, end="")
    return 0


def _stages(kernel: CompiledKernel, found: Problem) -> dict[str, str]:
    with refusals():
        made = kernel.compilation(**found.extents, **found.dtypes)
    return dict(made.snapshots)


def with_sizes(text: str, found: Problem) -> str:
    """A tile module as it can be run again: it states the sizes it was made for, and what the kernel requires."""
    head, _, rest = text.partition("\n")
    settings = [
        f"{n} = {v}" for n, v in {**found.extents, **found.scalars}.items() if not isinstance(v, bool)
    ]
    conditions = [spell(c.condition) for c in found.graph.checks if c.kind == "require"]
    lines = [f"    example {', '.join(settings)}"] if settings else []
    lines += [f"    require {', '.join(conditions)}"] if conditions else []
    return "\n".join([head, *lines, rest])


def _after(wanted: str, stages: dict[str, str]) -> None:
    if wanted != "all" and wanted not in stages:
        raise usage(f"--after {wanted}: there is no such pass; it is one of {', '.join(stages)}, all")
    for name, text in stages.items() if wanted == "all" else [(wanted, stages[wanted])]:
        if wanted == "all":
            print(f"# after {name}\n")
        print(text, end="\n" if wanted == "all" else "")


def _machine(emit: str, kernel: CompiledKernel, found: Problem) -> None:
    target = kernel.machine
    if not isinstance(target, CudaTarget):
        raise usage(f"--emit {emit} needs a CUDA target, such as --target {DEFAULT_GPU}, not {target.name}")
    try:
        from ..runtime import cuda
        from ..runtime.machine_code import variants
    except ImportError as reason:
        raise CommandError(str(reason)) from None
    source = _stages(kernel, found)["source"]
    if emit == "ptx":
        names = [v.name for several in variants(source).values() for v in several]
        sys.stdout.writelines(cuda.ptx(source, name, target) for name in names)
        return
    made = cuda.assemble(source, target)
    if emit == "resources":
        say(resource_table(made.values()))
        launched = variants(source)
        programs = list(launched)
        if len(programs) > 1:
            say(f"a call launches {', then '.join(programs)}")
        for sentence in told(source):
            say(sentence)
        with refusals():
            for code in (made[several[0].name] for several in launched.values()):
                if code.spill_bytes:
                    refuse_spilled(code, kernel.stated_schedule)
        return
    for assembled in made.values():
        sys.stdout.write(assembled.sass)
