"""Measure kernels on this machine's CPU: `python benchmarks/cpu.py SUITE… [--threads 1 2] [--quick] [--record]`.

Each case is checked against float64, then its variants are timed in turn in one process (`cpu_cases.py` has the cases). A
process of its own serves each number of threads, with BLAS and OpenMP limited to as many. One thread is timed by the
process's CPU time, which other processes do not disturb; more by wall clock, resting after each sample, whoever's it was,
until the slowest library's threads stop spinning. A sample is as many calls for all variants, 20 ms or more of them.
`--quick` is a look at a few cases; `--record` writes benchmarks/results/cpu-SUITE.json: raw samples in ms, medians, GFLOP/s
or GB/s, and the conditions. torch is compared with where it is installed.

`floors` measures what the machine can do at all, `compile` what a new process waits for, `threads` what handing out costs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LIMITED = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Settings that some machines make and that slow NumPy down."""
SPINNING_S = {"numpy": 0.15, "torch": 0.012}
"""How long the threads of OpenBLAS (numpy's) and libgomp (torch's) go on spinning after a call, measured."""
BUDGET_S, QUICK_S = 4.0, 1.0
"""Time to measure one case for, warming apart."""
ROUNDS, QUICK_ROUNDS = (5, 15), (3, 7)


def suites() -> list[str]:
    from cpu_cases import SUITES

    return [*SUITES, "floors", "compile", "threads"]


def main() -> int:
    args = arguments()
    if args.child:
        json.dump(child(args.suites[0], args.threads[0], args), sys.stdout)
        return 0
    failed = 0
    for suite in args.suites:
        counts = args.threads[:1] if suite == "compile" else args.threads
        documents = [spawn(suite, n, args) for n in counts]
        recorded = {**documents[0], "command": ["benchmarks/cpu.py", *sys.argv[1:]], "rows": []}
        recorded["load_averages"] = [d["conditions"]["load_average"] for d in documents]
        recorded["conditions"] = {**recorded["conditions"], "threads": counts}
        for d in documents:
            recorded["rows"] += d["rows"]
        failed += sum("failed" in r for r in recorded["rows"])
        if args.record or args.json:
            path = args.json or RESULTS / f"cpu-{suite}.json"
            path.write_text(json.dumps(recorded, indent=1) + "\n")
    return min(failed, 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="+", choices=suites(), metavar="SUITE", help=", ".join(suites()))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="a few cases, few samples")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds to measure one case for")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--rounds", nargs=2, type=int, help="fewest and most samples of a case")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/cpu-SUITE.json")
    parser.add_argument("--json", type=Path, help="write the result of the one suite there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def spawn(suite: str, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run a suite in a process whose libraries use `threads` threads; print its table as it comes."""
    environment = {k: v for k, v in os.environ.items() if k not in UNSET} | dict.fromkeys(
        LIMITED, str(threads)
    )
    command = [sys.executable, __file__, suite, "--child", "--threads", str(threads), "--only", *args.only]
    command += ["--budget", str(args.budget)]
    command += ["--rounds", *map(str, args.rounds)] if args.rounds else []
    print(f"-- {suite}, {threads} thread{'s' if threads > 1 else ''}", flush=True)
    done = subprocess.run(
        command + ["--quick"] * args.quick, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def child(suite: str, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    """The suite's document."""
    quick = args.quick
    from cpu_cases import SUITES

    from tileloom.runtime.bench import document
    from tileloom.runtime.threads import thread_limit

    if find_spec("torch"):
        import torch

        torch.set_num_threads(threads)
    special: dict[str, Callable[[int, bool], Iterator[dict[str, Any]]]] = {
        "floors": floors,
        "compile": partial(compile_times, only=args.only),
        "threads": sharing,
    }
    with thread_limit(threads):
        recorded = document([])
        if suite in special:
            recorded["rows"] = [shown(r) for r in special[suite](threads, quick)]
        else:
            cases = (c for c in SUITES[suite](quick) if any(x in c.name for x in args.only))
            recorded["rows"] = [r for c in cases for r in measured(c, threads, args)]
    recorded["conditions"]["clock"] = "CPU time of the process" if threads == 1 else "wall clock"
    recorded["conditions"]["rest_s"] = SPINNING_S if threads > 1 else "2 ms"
    recorded["conditions"]["unset"] = list(UNSET)
    if not find_spec("torch"):
        recorded["conditions"]["torch"] = "not installed: no rows of it"
    return recorded


# ---------------------------------------------------------------- cases


def relative_error(got: Any, want: Any) -> float:
    """|got - want| / |want| in float64 (Frobenius norm); NaN where a NaN is."""
    if hasattr(got, "detach"):
        got = got.detach().float().numpy()
    exact = want[0]
    return float(np.linalg.norm(np.asarray(got, np.float64) - exact) / max(np.linalg.norm(exact), 1e-30))


def measured(case: Any, threads: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one case; a variant that cannot run or is wrong becomes a row that says so."""
    from tileloom.runtime.bench import Variant, WrongResult, compare

    reference = (np.asarray(case.reference(), np.float64),)
    usable, rows, seconds = [], [], 0.0
    for name, call in case.variants.items():
        try:
            call()
            start = time.perf_counter()
            error = relative_error(call(), reference)
            seconds += time.perf_counter() - start
            if not error <= case.bound:
                raise WrongResult(f"error {error:.2e} exceeds {case.bound:.0e}")
        except Exception as reason:  # one that cannot run is a result too
            failed = f"{type(reason).__name__}: {reason}"[:300]
            rows.append({"case": case.name, "variant": name, "threads": threads, "failed": failed})
            continue
        rest = SPINNING_S.get(name, 2e-3) if threads > 1 else 2e-3
        usable.append(Variant(name, call, case.bound, rest))
        seconds += rest
    fewest, most = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    budget = QUICK_S if args.quick else args.budget
    found = compare(
        case.name,
        usable,
        reference,
        rounds=max(fewest, min(most, int(budget / max(seconds, 1e-9)))),
        flops=case.flops,
        moved_bytes=case.moved_bytes,
        error=relative_error,
        clock=time.process_time if threads == 1 else time.perf_counter,
    )
    rows += [{**r.as_json(), "threads": threads, **case.notes} for r in found]
    mine = next((r.median_ms for r in found if r.variant == "tileloom"), math.nan)
    for row in rows:
        row |= {"times_tileloom": row["median_ms"] / mine} if "median_ms" in row else {}
        shown(row)
    return rows


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row; the last column is how many times as long as tileloom it takes."""
    text = row.get("failed") or f"{row['median_ms']:10.4f} ms"
    if "tflops" in row:
        text += f" {1e3 * row['tflops']:7.1f} GFLOP/s"
    if "gb_s" in row:
        text += f" {row['gb_s']:7.1f} GB/s"
    if "times_tileloom" in row:
        text += f"  x{row['times_tileloom']:.2f}"
    print(f"{row['case']:32s} {row['variant']:12s} {text}", file=sys.stderr, flush=True)
    return row


def sampled(case: str, variant: str, threads: int, samples_ms: list[float], **facts: Any) -> dict[str, Any]:
    return {
        "case": case,
        "variant": variant,
        "threads": threads,
        "samples_ms": samples_ms,
        "median_ms": float(np.median(samples_ms)),
        **facts,
    }


# ---------------------------------------------------------------- what the machine can do

FMAS, SUMS = 1 << 22, 12
"""Enough sums to keep two units busy for five clocks, few enough for 16 registers."""


def multiply_adds() -> Callable[[int, int, Any], None]:
    """A task function that runs FMAS steps of SUMS independent vector multiply-adds a task, all in registers."""
    from llvmlite import ir
    from numba import njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    from tileloom.runtime.intrinsics.tasks import take_first, take_next
    from tileloom.runtime.intrinsics.vectors import LANES

    vector, i64 = ir.VectorType(ir.FloatType(), LANES), ir.IntType(64)

    @intrinsic  # type: ignore[untyped-decorator]
    def steps(typing: Any, n: Any, x: Any) -> Any:
        def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
            fma = cgutils.get_or_insert_function(
                b.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32"
            )
            one = b.insert_element(ir.Constant(vector, ir.Undefined), args[1], ir.Constant(i64, 0))
            x = b.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))
            before, loop, after = b.basic_block, b.append_basic_block(), b.append_basic_block()
            b.branch(loop)
            b.position_at_end(loop)
            i, sums = b.phi(i64), [b.phi(vector) for _ in range(SUMS)]
            later = [b.call(fma, [s, x, x]) for s in sums]
            up = b.add(i, ir.Constant(i64, 1))
            for phi, first, then in zip(
                [i, *sums], [ir.Constant(i64, 0), *[x] * SUMS], [up, *later], strict=True
            ):
                phi.add_incoming(first, before)
                phi.add_incoming(then, loop)
            b.cbranch(b.icmp_signed("<", up, args[0]), loop, after)
            b.position_at_end(after)
            total = later[0]
            for s in later[1:]:
                total = b.fadd(total, s)
            return b.extract_element(total, ir.Constant(i64, 0))

        return types.float32(types.int64, types.float32), emit

    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def run(first: int, last: int, queue: Any, out: Any) -> None:
        first, last = take_first(queue, first, last)
        while first < last:
            for task in range(first, last):
                out[task] = steps(FMAS, np.float32(0.5))
            first, last = take_next(queue, first, last)

    return run  # type: ignore[no-any-return]


def floors(threads: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Peak of multiply-adds in registers, and of copying 256 MB, half of it written."""
    import tileloom as tl
    from tileloom.runtime.intrinsics.vectors import LANES
    from tileloom.runtime.threads import run_tasks

    clock = time.process_time if threads == 1 else time.perf_counter
    run, out = multiply_adds(), np.zeros(threads, np.float32)
    run_tasks(run, threads, out)
    x, y = np.ones(1 << 25, np.float32), np.zeros(1 << 25, np.float32)
    copied = tl.compile(tl.parse("kernel copied(x: f32[N]) -> y: f32[N] { y[n] = x[n] }")["copied"])
    work: dict[str, tuple[Callable[[], object], str, float]] = {
        "multiply-adds in registers": (
            lambda: run_tasks(run, threads, out),
            "flops",
            2.0 * SUMS * LANES * FMAS * threads,
        ),
        "copy 2^25 f32 to an array": (lambda: copied(x, out=y), "moved_bytes", 8.0 * x.size),
        "numpy copyto 2^25 f32": (lambda: np.copyto(y, x), "moved_bytes", 8.0 * x.size),
    }
    for name, (call, what, amount) in work.items():
        call()
        samples = []
        for _ in range(5 if quick else 15):
            start = clock()
            call()
            samples.append(1e3 * (clock() - start))
        rate = amount / float(np.median(samples)) / 1e6
        yield sampled(
            name,
            "floor",
            threads,
            samples,
            **({"tflops": rate / 1e3} if what == "flops" else {"gb_s": rate}),
        )


# ---------------------------------------------------------------- a new process

FIRST_CALL = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np, numba
import tileloom as tl
from cpu_cases import attention_kernel, compiled, PRODUCT, ROWS
tl.compile, tl.parse  # modules that are imported at their first use
arguments = [np.ones(s, np.float32) for s in json.loads(sys.argv[3])]
start = time.perf_counter()
if sys.argv[2] == "attention":
    kernel = attention_kernel("causal")
    arguments.append(0.125)
else:
    kernel = compiled(PRODUCT + ROWS, sys.argv[2])
kernel(*arguments)
first = time.perf_counter() - start
start = time.perf_counter()
kernel(*arguments)
print(1e3 * (first - (time.perf_counter() - start)))
"""
COLD = {"attention": [[1, 4, 512, 64]] * 3, "product": [[512, 512]] * 2, "soft": [[512, 512]]}


def compile_times(threads: int, quick: bool, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Wall clock from text to result in a new process, imports apart: with an empty cache folder, then a filled one."""
    for name, shapes in ((n, s) for n, s in COLD.items() if any(x in n for x in only)):
        taken: dict[str, list[float]] = {"cold": [], "from disk": []}
        for _ in range(1 if quick else 5):
            with tempfile.TemporaryDirectory() as folder:
                for which in taken:
                    environment = {**os.environ, "TILELOOM_CACHE_DIR": str(Path(folder) / "cache")}
                    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles our modules
                    done = subprocess.run(
                        [sys.executable, "-c", FIRST_CALL, str(HERE), name, json.dumps(shapes)],
                        env=environment,
                        stdout=subprocess.PIPE,
                        text=True,
                        check=True,
                    )
                    taken[which].append(float(done.stdout))
        for which, samples in taken.items():
            yield sampled(f"first call of {name}", which, threads, samples)


# ---------------------------------------------------------------- threads


def sharing(threads: int, quick: bool) -> Iterator[dict[str, Any]]:
    """What handing tasks out costs, and what calling from several Python threads or on too many threads does."""
    from concurrent.futures import ThreadPoolExecutor

    from cpu_cases import ROWS, compiled, f32
    from numba import njit

    from tileloom.runtime.intrinsics.tasks import take_first, take_next
    from tileloom.runtime.threads import run_tasks, thread_limit

    @njit("void(i8, i8, i8[::1])", nogil=True)  # type: ignore[untyped-decorator]
    def nothing(first: int, last: int, queue: Any) -> None:
        first, last = take_first(queue, first, last)
        while first < last:
            first, last = take_next(queue, first, last)

    kernel, x = compiled(ROWS, "soft"), f32(1024, 1024)

    def callers(n: int) -> None:
        with ThreadPoolExecutor(n) as pool:
            list(pool.map(lambda _: kernel(x), range(4 * n)))

    def limited(n: int) -> None:
        with thread_limit(n):
            kernel(x)

    calls: dict[str, tuple[Callable[[], None], int]] = {
        "hand out 64 empty tasks": (lambda: run_tasks(nothing, 64), 200),
        "hand out 1 empty task": (lambda: run_tasks(nothing, 1), 200),
        "softmax 1024x1024": (lambda: limited(threads), 10),
        "softmax 1024x1024 on 4 times the threads": (lambda: limited(4 * threads), 10),
        "16 softmax 1024x1024 from 4 Python threads": (lambda: callers(4), 1),
    }
    for name, (call, repeats) in calls.items():
        for _ in range(3):
            call()
        samples = []
        for _ in range(7 if quick else 25):
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            samples.append(1e3 * (time.perf_counter() - start) / repeats)
            time.sleep(2e-3)
        yield sampled(name, "tileloom", threads, samples)


if __name__ == "__main__":
    sys.exit(main())
