"""Generated CUDA source of every example run under CPython, without a GPU: `python benchmarks/emulate.py examples|mutants`.

`examples`: each kernel of `examples/` in each tier (`simt` in f32; `mma` and `wgmma` in bf16), at tiny ragged sizes, against
the interpreter in float64; `runtime/emulate.py` says what else it reports (races, barriers that not all threads reach, reads
of memory that nothing wrote). `mutants`: of kernels of tier `wgmma` with one wait, arrival or barrier left out, how many
give wrong numbers or a fault. `--record` writes `results/emulated.json` or `results/mutants.json`; `--only TEXT` takes some.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tileloom as tl
from tileloom.accuracy import Comparison, compare, longest_sum
from tileloom.cli.problems import Problem, settled
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_80, SM_90A, CudaTarget
from tileloom.compiler.tile_kernel import TilesKernel
from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.syntax import ProgramKernel
from tileloom.dsl.types import DType
from tileloom.execution import interpret, interpret_tiles
from tileloom.runtime import emulate
from tileloom.runtime.bench import circumstances

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
TIERS: dict[str, tuple[CudaTarget, DType]] = {
    "simt": (SM_80, DType.F32), "mma": (SM_80, DType.BF16), "wgmma": (SM_90A, DType.BF16),
}  # fmt: skip
MOST = {"M": 40, "N": 40, "D": 16, "E": 16, "B": 2, "H": 2, "G": 1, "R": 6, "L": 2}
"""Extents of a case are those of the example, but no larger than these; others up to 24."""
OTHERS = 24


@dataclass(frozen=True)
class Row:
    """One kernel in one tier. `tiers` are those of its programs, `kernels` the variants that ran; `refused` says why the
    tier does not take it; `fault` is the emulation's report; `error` and `allowed`, absolute, are of the worst output."""

    example: str
    kernel: str
    tier: str
    target: str
    dtype: str
    sizes: dict[str, int]
    tiers: list[str]
    kernels: tuple[str, ...] = ()
    error: float = 0.0
    allowed: float = 0.0
    ok: bool = True
    fault: str = ""
    refused: str = ""
    seconds: float = 0.0


def kernels() -> Iterator[tuple[str, str]]:
    """The file of each kernel of the examples, and its name."""
    for path in sorted([*EXAMPLES.glob("*.tile"), *EXAMPLES.glob("tiles/*.tile")]):
        program = tl.load(path)
        for name in (*program.kernels, *program.tiles):
            yield str(path.relative_to(EXAMPLES)), name


def tiny(kernel: ProgramKernel, dtype: DType) -> Problem:
    """A kernel's example with small extents."""
    own = settled(kernel, {}, {})
    types = {n: dtype for n, t in own.dtypes.items() if t.is_float}
    sizes = {n: min(x, MOST.get(n, OTHERS)) for n, x in own.extents.items()}
    try:
        return settled(kernel, {**sizes, **types}, {})
    except tl.cli.failures.CommandError:  # a requirement among extents
        return settled(kernel, types, {})


def compiled(found: Problem, tier: str, target: CudaTarget) -> Compilation:
    """In a tier; raises `TileError` where that does not take it."""
    name = found.kernel.kernel.name.name
    asked = None
    if tier != "simt" and not isinstance(found.kernel, TilesKernel):
        asked = parse_schedule(f"schedule {tier} for {name} on {target.name} {{ tier {tier} }}")
    return compile_kernel(found.kernel, target, found.extents, dtypes=found.dtypes, schedule=asked)


def emulated(found: Problem, made: Compilation, ran: list[str]) -> list[Comparison]:
    """Every output against float64; the kernels that ran go to `ran`. Raises `KernelFault`."""
    tensors = found.tensors()
    if isinstance(found.kernel, TilesKernel):
        oracle, longest = (
            interpret_tiles(made, tensors, found.numbers),
            max(found.extents.values(), default=1),
        )
    else:
        oracle = interpret(found.graph, tensors, found.numbers, precision="float64", check_indices=False)
        longest = longest_sum(found.graph, found.extents, found.scalars)
    numbers = {**found.numbers, **found.extents}
    got = emulate.run_module(made.module, made.source, tensors, numbers, ran=ran)
    return [compare(n, got[n], oracle[n], longest) for n in oracle]


def row(file: str, name: str, tier: str) -> Row:
    """Run one kernel in one tier."""
    target, dtype = TIERS[tier]
    program = tl.load(EXAMPLES / file)
    kernel = tl.programs.kernel_named(program, name)
    found, start = tiny(kernel, dtype), time.process_time()
    head = (file, name, tier, target.name, dtype.value, dict(found.extents))
    if tier != "simt" and (dtype not in found.dtypes.values() or isinstance(kernel, TilesKernel)):
        return Row(*head, [], refused="its tensors have types of their own")
    try:
        made = compiled(found, tier, target)
    except TileError as reason:
        return Row(*head, [], refused=reason.diagnostics[0].message)
    tiers = [p.tier for p in made.module.programs]
    if tier != "simt" and tier not in tiers:
        return Row(*head, tiers, refused="it has no product")
    ran: list[str] = []
    try:
        outputs = emulated(found, made, ran)
    except emulate.KernelFault as fault:
        return Row(
            *head,
            tiers,
            tuple(ran),
            ok=False,
            fault=str(fault),
            seconds=round(time.process_time() - start, 2),
        )
    worst = max(outputs, key=lambda c: (not c.ok, c.error / max(c.tolerance, 1e-300)))
    right, seconds = all(c.ok for c in outputs), round(time.process_time() - start, 2)
    return Row(*head, tiers, tuple(ran), worst.error, worst.tolerance, right, seconds=seconds)


# ---------------------------------------------------------------- mutants

WAITS = (
    "await_parity(", "arrive(", "expect_bytes(", "meet(", "meet_warp(", "announce(", "publish_shared(", "boxes_read_",
    "_settle_",
)  # fmt: skip
"""Calls of a kernel of tier `wgmma` that order what runs at the same time."""
PRODUCT = """kernel product<T: bf16>(a: T[M, K], b: T[N, K]) -> o: T[M, N] {
  o[m, n] = sum[k](a[m, k] * b[n, k])
}
"""
ATTENTION = """kernel attention<T: bf16>(q: T[H, M, D], k: T[H, N, D], v: T[H, N, E]) -> o: T[H, M, E] {
  p[h, m, n] = softmax[n SET](sum[d](q[h, m, d] * k[h, n, d]) / sqrt(D))
  o[h, m, e] = sum[n](p[h, m, n] * v[h, n, e])
}
"""
BIASED = (
    ATTENTION.replace("SET", "")
    .replace("v: T[H, N, E]", "v: T[H, N, E], bias: T[M, N]")
    .replace("/ sqrt(D))", "/ sqrt(D) + f32(bias[m, n]))")
)
RINGS = "m by 64, n by 16\n stage q by 1, k, v by 2"
SEQUENCE = {"H": 1, "M": 320, "N": 75, "D": 16, "E": 16}
MUTATED: dict[str, tuple[str, str, dict[str, int]]] = {
    "product": (PRODUCT, "m by 64, n by 64, k by 64\n stage a, b by 2", {"M": 72, "N": 136, "K": 320}),
    "attention, full": (ATTENTION.replace("SET", ""), RINGS, SEQUENCE),
    "attention, causal": (ATTENTION.replace("SET", "| n <= m"), RINGS, SEQUENCE),
    "attention, bias": (BIASED, RINGS.replace("64", "128"), {**SEQUENCE, "M": 600, "N": 104}),
}
"""Text, lines of a schedule, and sizes: rings go round: each of two blocks has two tasks or three."""


@dataclass(frozen=True)
class Mutant:
    """A kernel without one line of its source: the line, its number, and what showed that; "" if nothing did. A line that
    no thread comes to at these sizes cannot be missed."""

    kernel: str
    number: int
    line: str
    caught: str
    reached: bool = True


def mutated(name: str) -> Compilation:
    text, tiles, sizes = MUTATED[name]
    program = tl.parse(text)
    (own,) = program.kernels
    schedule = parse_schedule(f"schedule s for {own} on cuda:sm_90a {{ tier wgmma\n tile {tiles} }}")
    return compile_kernel(program[own], SM_90A, sizes, dtypes={"T": DType.BF16}, schedule=schedule)


def waits(source: str, kernel: str) -> list[int]:
    """The lines of a kernel that wait, arrive or stop at a barrier."""
    lines = source.splitlines()
    first = next(i for i, x in enumerate(lines) if x.startswith(f"def {kernel}("))
    last = next((i for i in range(first + 1, len(lines)) if lines[i][:1] not in ("", " ", ")")), len(lines))
    return [i for i in range(first, last) if any(w in lines[i] for w in WAITS)]


def without(source: str, number: int, instead: str = "pass") -> str:
    lines = source.splitlines()
    lines[number] = lines[number][: len(lines[number]) - len(lines[number].lstrip())] + instead
    return "\n".join([*lines, ""])


def inputs(name: str, made: Compilation) -> dict[str, Any]:
    """Small whole numbers, whose sums are exact."""
    sizes, rng = MUTATED[name][2], np.random.default_rng(5)
    return {
        p.name: rng.integers(-3, 4, [sizes[x.name] for x in p.shape]).astype(emulate.NUMPY[p.dtype])
        for q in made.module.programs for p in q.params if p.mode == "in"
    }  # fmt: skip


def sites(name: str) -> list[int]:
    """The lines of the variant that runs which wait, arrive or stop at a barrier."""
    made, ran = mutated(name), list[str]()
    emulate.run_module(made.module, made.source, inputs(name, made), {}, blocks=1, ran=ran)
    return waits(made.source, ran[0])


def mutant(name: str, number: int) -> Mutant:
    """Run a kernel without one line, first and last threads first."""
    made = mutated(name)
    tensors = inputs(name, made)
    line = made.source.splitlines()[number].strip()
    want = emulate.run_module(made.module, made.source, tensors, {}, blocks=2)["o"]
    for backwards in (True, False):
        try:
            got = emulate.run_module(
                made.module, without(made.source, number), tensors, {}, blocks=2, backwards=backwards
            )
        except emulate.KernelFault as fault:
            return Mutant(name, number, line, str(fault))
        if not np.array_equal(got["o"], want):
            return Mutant(name, number, line, "wrong numbers")
    stopping = without(made.source, number, "reached(here)")  # names that do not exist
    try:
        emulate.run_module(made.module, stopping, tensors, {}, blocks=2)
    except (emulate.KernelFault, NameError):
        return Mutant(name, number, line, "")
    return Mutant(name, number, line, "", reached=False)


# ---------------------------------------------------------------- commands


def run_examples(arguments: argparse.Namespace) -> dict[str, Any]:
    every = [(f, k, t) for f, k in kernels() for t in arguments.tiers if arguments.only in f"{f}:{k}:{t}"]
    rows = []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for r in pool.map(row, *zip(*every, strict=True)):
            rows.append(r)
            told = r.refused or r.fault or f"error {r.error:.2e} of {r.allowed:.2e}"
            print(
                f"{'ok   ' if r.ok else 'WRONG'} {r.tier:6} {r.kernel:20} {r.seconds:6.1f} s  {told}",
                flush=True,
            )
    ran = [r for r in rows if not r.refused]
    print(f"{len(ran)} ran, {sum(r.ok for r in ran)} right; {len(rows) - len(ran)} not taken by their tier")
    return {"rows": [asdict(r) for r in rows]}


def run_mutants(arguments: argparse.Namespace) -> dict[str, Any]:
    every = []
    for name in (n for n in MUTATED if arguments.only in n):
        every += [(name, i) for i in sites(name)[:: arguments.every]]
    found, start = [], time.monotonic()
    with ProcessPoolExecutor(arguments.processes) as pool:
        for m in pool.map(mutant, *zip(*every, strict=True)):
            found.append(m)
            verdict = "caught" if m.caught else "MISSED" if m.reached else "not reached"
            print(f"{verdict} {m.kernel}, line {m.number}: {m.line}", flush=True)
    reached = [m for m in found if m.reached]
    counts = {
        n: [sum(bool(m.caught) for m in reached if m.kernel == n), sum(m.kernel == n for m in reached)]
        for n in MUTATED
    }
    print(", ".join(f"{n}: {a} of {b} caught" for n, (a, b) in counts.items()))
    print(f"{len(found) - len(reached)} lines are not reached at these sizes")
    seconds = round(time.monotonic() - start, 1)
    return {"caught": counts, "seconds": seconds, "mutants": [asdict(m) for m in found]}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=("examples", "mutants"))
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--tiers", nargs="+", default=list(TIERS), choices=TIERS)
    parser.add_argument("--every", type=int, default=1, help="each so many mutants")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args(words)
    made = (run_examples if arguments.suite == "examples" else run_mutants)(arguments)
    if arguments.record:
        name = {"examples": "emulated", "mutants": "mutants"}[arguments.suite]
        (HERE / "results" / f"{name}.json").write_text(
            json.dumps({**circumstances(), **made}, indent=1) + "\n"
        )
    return int(arguments.suite == "examples" and not all(r["ok"] for r in made["rows"]))


if __name__ == "__main__":
    sys.exit(main())
