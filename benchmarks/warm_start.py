"""What a new process pays for its first call from a warm cache: `python benchmarks/warm_start.py [--json FILE]`.

Each sample is a process of its own on a cache folder that earlier ones filled, with the bytecode of all Python files kept
in a folder too, as an installation has it. Figures are milliseconds of CPU (user and system) of that process; `beyond` is
all after `import numpy, numba`, which is listed as a measure of the machine's speed at that time. Samples of the cases
take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tileloom.runtime.bench import document

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = 15
WARMING = 2
LIMIT_MS = 500.0
STEPS = ("numba", "import", "load", "compile", "call", "beyond")

# Arguments: the `.tile` file, the kernel, shapes of its arrays, its scalars. Prints ms of CPU of each step.
PROCESS = """
import json, sys, time
def now(): return 1e3 * time.process_time()
file, name, shapes, scalars = json.loads(sys.argv[1])
at = [now()]
import numpy as np, numba
at.append(now())
import tileloom as tl
tl.load
at.append(now())
program = tl.load(file)
at.append(now())
kernel = tl.compile(program[name])
at.append(now())
kernel(*[np.ones(s, np.float32) for s in shapes], **scalars)
at.append(now())
print(json.dumps([b - a for a, b in zip(at, at[1:])]))
"""


@dataclass(frozen=True)
class Case:
    """A kernel of `examples/`, the shapes of its f32 arrays and its scalars."""

    file: str
    kernel: str
    shapes: tuple[tuple[int, ...], ...]
    scalars: dict[str, float]


CASES = (
    Case("vector_add.tile", "vector_add", ((1000,), (1000,)), {}),
    Case("softmax.tile", "row_softmax", ((64, 512),), {}),
    Case("attention.tile", "attention", ((1, 2, 64, 32),) * 3, {"scale": 0.125}),
)


def sample(case: Case, environment: dict[str, str]) -> dict[str, float]:
    """Milliseconds of CPU by step, of one new process."""
    given = json.dumps([str(ROOT / "examples" / case.file), case.kernel, list(case.shapes), case.scalars])
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, given], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    taken = json.loads(done.stdout)
    return dict(zip(STEPS, [*taken, sum(taken[1:])], strict=True))


def measured(folder: Path) -> list[dict[str, Any]]:
    environment = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "TILELOOM_CACHE_DIR": str(folder / "cache"),
    }
    for case in CASES * WARMING:
        sample(case, environment)
    found = [(case, sample(case, environment)) for _ in range(SAMPLES) for case in CASES]
    return [row(case, [s for c, s in found if c is case]) for case in CASES]


def row(case: Case, samples: list[dict[str, float]]) -> dict[str, Any]:
    steps = {step: [round(s[step], 1) for s in samples] for step in STEPS}
    return {
        "case": f"{case.file}:{case.kernel}",
        "median_ms": {step: statistics.median(values) for step, values in steps.items()},
        "least_ms": {step: min(values) for step, values in steps.items()},
        "samples_ms": steps,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to record the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder))
    for r in rows:
        for which in ("least_ms", "median_ms"):
            print(f"{r['case']:32s} {which:9s} ", "  ".join(f"{k} {v:5.0f}" for k, v in r[which].items()))
    if args.json:
        recorded = {**document([]), "limit_ms": LIMIT_MS, "clock": "CPU time, user and system", "rows": rows}
        args.json.write_text(json.dumps(recorded, indent=1) + "\n")
    return int(any(r["median_ms"]["beyond"] > LIMIT_MS for r in rows))


if __name__ == "__main__":
    sys.exit(main())
