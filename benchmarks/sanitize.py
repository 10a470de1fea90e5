"""One run of each kind of kernel under NVIDIA's compute-sanitizer: `python benchmarks/sanitize.py [--json FILE]`.

Tools: memcheck (accesses outside of allocations, misaligned ones), racecheck (accesses to shared memory that no barrier
orders), synccheck (barriers that not all threads reach). Each kind has a process of its own under each tool, which calls it
through `tileloom run` at small sizes and compares with float64 as that command does. The exit status is 1 where a tool
reports an error or a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tileloom.execution import gpu_target
from tileloom.runtime.bench import circumstances

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
AT_ONCE = max(1, min(12, (os.cpu_count() or 1) - 2))
TOOLS = ("memcheck", "racecheck", "synccheck")
SANITIZER = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
ATTENTION = ["-D", "B=1", "-D", "H=2", "-D", "G=1", "-D", "M=150", "-D", "N=170"]
PRODUCT = ["-D", "M=150", "-D", "N=136", "-D", "K=200"]
KINDS: dict[str, list[str]] = {
    "elementwise": ["vector_add.tile", "-D", "N=5000"],
    "stencil": ["stencils.tile:valid_1d"],
    "transpose": ["transpose.tile"],
    "gather": ["quantised_keys.tile:quantised_attention"],
    "scattered addition": ["histogram.tile"],
    "rows": ["softmax.tile", "-D", "M=9", "-D", "N=700"],
    "rows, bf16": ["softmax.tile", "-D", "M=9", "-D", "N=2048", "-D", "T=bf16"],
    "long rows": ["softmax.tile", "-D", "M=2", "-D", "N=70000"],
    "norm": ["layernorm.tile"],
    "one sum": ["reductions.tile:total", "-D", "M=3", "-D", "N=100000"],
    "product f32": ["matmul_gelu.tile", *PRODUCT],
    "product bf16": ["matmul_gelu.tile", *PRODUCT, "-D", "T=bf16"],
    "product bf16, mma": ["matmul_gelu.tile", *PRODUCT, "-D", "T=bf16", "tier mma"],
    "attention f32": ["attention.tile", *ATTENTION, "-D", "D=64", "-D", "E=64"],
    "attention bf16": ["attention.tile", *ATTENTION, "-D", "D=64", "-D", "E=64", "-D", "T=bf16"],
    "attention f16, D 128": ["attention.tile", *ATTENTION, "-D", "D=128", "-D", "E=128", "-D", "T=f16"],
    "attention bf16, mma": [
        "attention.tile",
        *ATTENTION,
        "-D",
        "D=64",
        "-D",
        "E=64",
        "-D",
        "T=bf16",
        "tier mma",
    ],
}
"""Arguments of `tileloom run`; a last word `tier T` is a schedule's line."""


def call(kind: str, folder: Path) -> int:
    """One kind through `tileloom run`, here."""
    from tileloom.__main__ import main

    file, *rest = KINDS[kind]
    if rest and rest[-1].startswith("tier "):
        kernel, device = Path(file).stem, gpu_target()
        assert device is not None
        text = f"schedule s for {kernel} on {device.name} {{\n    {rest.pop()}\n}}\n"
        path = folder / f"{kernel}.schedule"
        path.write_text(text)
        rest += ["--schedule", str(path)]
    return main(["run", str(EXAMPLES / file), *rest, "--target", "cuda"])


def inside(kinds: list[str]) -> int:
    """What a tool's process runs."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            print(f"== {kind}", flush=True)
            failed |= call(kind, Path(folder))
    return failed


def run_under(tool: str, kind: str, program: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """A process of its own for one kind, and what it said."""
    command = [program, "--tool", tool, "--error-exitcode", "99", sys.executable, __file__, "--inside", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done, done.stdout + done.stderr


def checked(tool: str, kinds: list[str], program: str) -> dict[str, Any]:
    """One tool's verdict: exit statuses other than 0 (99: it reports an error), counts, what it printed of errors."""
    started = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        made = list(pool.map(lambda kind: run_under(tool, kind, program), kinds))
    said = {
        k: [x for x in text.splitlines() if x.startswith("=========")]
        for k, (_, text) in zip(kinds, made, strict=True)
    }
    failed = {
        k: (done.returncode, text) for k, (done, text) in zip(kinds, made, strict=True) if done.returncode
    }
    return {
        "tool": tool, "status": {k: code for k, (code, _) in failed.items()},
        "seconds": round(time.perf_counter() - started, 1),
        "kinds": kinds, "right": sum(bool(re.search(r"^ok$", text, re.M)) for _, text in made),
        "summary": dict(Counter(lines[-1] for lines in said.values() if lines)),
        "said": {k: said[k][:60] for k in failed},
        "output": {k: text[-3000:] for k, (code, text) in failed.items() if code != 99},
    }  # fmt: skip


def warmed(kinds: list[str]) -> None:
    """Machine code of every kind into the cache, without a tool, so that no tool's process has to make it."""

    def call_alone(kind: str) -> None:
        subprocess.run([sys.executable, __file__, "--inside", kind], capture_output=True, check=False)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(call_alone, kinds))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to record the verdicts")
    parser.add_argument("--tools", default=",".join(TOOLS), help="comma-separated")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help="; ".join(KINDS))
    parser.add_argument("--inside", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        return inside(arguments.inside)
    program = next((found for p in SANITIZER if (found := shutil.which(p))), None)
    if program is None:
        print("compute-sanitizer is not installed: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    warmed(arguments.kinds)
    rows = [checked(tool, arguments.kinds, program) for tool in arguments.tools.split(",")]
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = gpu_target()
    record = {
        **circumstances(),
        "device": {"kind": "cuda", "target": found and found.name},
        "sanitizer": version.strip().splitlines()[-1:],
        "runs": rows,
    }
    for r in rows:
        print(
            r["tool"],
            r["status"],
            f"{r['right']} of {len(r['kinds'])} right",
            f"{r['seconds']} s",
            r["summary"],
        )
        for kind in r["status"]:
            print(
                f"{kind}: status {r['status'][kind]}", *r["said"][kind], r["output"].get(kind, ""), sep="\n"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(r["status"] or r["right"] < len(r["kinds"]) for r in rows))


if __name__ == "__main__":
    sys.exit(main())
