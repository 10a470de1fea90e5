"""What the first compilation of each example for a GPU costs: `python benchmarks/cuda_compile.py [--json FILE] [NAME...]`.

Every kernel of `examples/*.tile` at its `example` sizes, or those whose `file:kernel` contains a NAME, for each target, in a
process of its own that has imported what all need and has an empty cache folder: `decide` is the text to generated source
(derivations, groupings, tiles by predicted time), `assemble` the machine code of the kernels that a call at these sizes
runs, one of each launch. `import` is numba-cuda, sympy and the compiler, once. Seconds of CPU, user and system, of all
threads; no GPU is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tileloom.dsl.diagnostics import TileError
from tileloom.runtime.machine_code import INSTALL

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TARGETS = ("cuda:sm_80", "cuda:sm_90a")
LIMIT_S = 6.0


@dataclass(frozen=True)
class Case:
    """A kernel of an example, for a target."""

    file: str
    kernel: str
    target: str

    def __str__(self) -> str:
        return f"{self.file}:{self.kernel} for {self.target}"


def cases(names: list[str]) -> Iterator[Case]:
    from tileloom.programs import load

    for path in sorted(EXAMPLES.glob("*.tile")):
        for kernel in load(path).kernels:
            if not names or any(n in f"{path.name}:{kernel}" for n in names):
                yield from (Case(path.name, kernel, t) for t in TARGETS)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time of a piece of work, and what it gives."""
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def compiled(case: Case) -> dict[str, Any]:
    """The seconds of each step."""
    import tileloom as tl
    from tileloom.compiler.target import cuda_target
    from tileloom.runtime import machine_code

    def decide() -> tuple[str, Mapping[str, int]]:
        kernel = tl.compile(tl.load(EXAMPLES / case.file)[case.kernel], target=case.target)
        made = kernel.compilation()
        return made.source, made.sizes

    def assemble() -> int:
        of_launches = machine_code.variants(source).values()
        for several in of_launches:
            machine_code.machine_code(source, preferred(several, sizes).name, cuda_target(case.target))
        return len(of_launches)

    decide_s, (source, sizes) = seconds(decide)
    assemble_s, launches = seconds(assemble)
    return {"decide_s": decide_s, "assemble_s": assemble_s, "launches": launches}


def preferred(several: Any, sizes: Mapping[str, int]) -> Any:
    """The kernel that a call with packed, aligned arrays runs."""
    return next(
        v
        for v in several
        if all(sizes[e] % n == 0 for e, n in v.multiples.items())
        and all(sizes[e] <= n for e, n in v.at_most.items())
    )


def imports() -> float:
    def import_all() -> None:
        import sympy  # noqa: F401

        import tileloom.api
        import tileloom.compiler.pipeline
        import tileloom.runtime.cuda  # noqa: F401

    return seconds(import_all)[0]


def in_a_fork(case: Case) -> dict[str, Any]:
    """As in a new process that has imported everything."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TILELOOM_CACHE_DIR"] = folder
            try:
                sending.send(compiled(case))
            except TileError as refused:  # an example whose extents state no sizes, for one
                sending.send({"refused": str(refused)})

    process = context.Process(target=work)
    process.start()
    sending.close()  # so that a process that dies is the end of the pipe
    found: dict[str, Any] = receiving.recv()
    process.join()
    return found


def record(file: Path, rows: list[dict[str, Any]], samples: int, import_s: float) -> None:
    """Write the rows, after those of other cases that the file has of the same commit: runs can be short ones."""
    from tileloom.runtime.bench import document

    made = document([])
    for row in rows:
        row["load_average"] = made["conditions"]["load_average"]
    before = json.loads(file.read_text()) if file.exists() else {}
    new = {(r["case"], r["target"]) for r in rows}
    kept = before.get("rows", []) if before.get("commit") == made["commit"] else []
    whole = [*(r for r in kept if (r["case"], r["target"]) not in new), *rows]
    recorded = {
        **made, "limit_s": LIMIT_S, "clock": "CPU time, user and system, of all threads", "samples": samples,
        "import_s": round(import_s, 3), "rows": sorted(whole, key=lambda r: (r["case"], r["target"])),
    }  # fmt: skip
    file.write_text(json.dumps(recorded, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path, help="where to record the result")
    parser.add_argument("--samples", type=int, default=1)
    args = parser.parse_args()
    if importlib.util.find_spec("numba_cuda") is None:
        sys.exit(f"the extra `cuda` is not installed: {INSTALL}")
    import_s = imports()
    print(f"import {import_s:.2f} s")
    rows = []
    for case in cases(args.names):
        samples = [in_a_fork(case) for _ in range(args.samples)]
        row = {
            "case": f"{case.file}:{case.kernel}",
            "target": case.target,
            **{k: samples[0][k] for k in samples[0] if not k.endswith("_s")},
            **{k: round(statistics.median(s[k] for s in samples), 3) for k in samples[0] if k.endswith("_s")},
        }
        row["total_s"] = round(row.get("decide_s", 0) + row.get("assemble_s", 0), 3)
        rows.append(row)
        print(
            f"{case!s:60s}", *(f"{k} {v}" for k, v in row.items() if k not in ("case", "target")), flush=True
        )
    if args.json:
        record(args.json, rows, args.samples, import_s)
    return int(any(r["total_s"] > LIMIT_S for r in rows))


if __name__ == "__main__":
    sys.exit(main())
