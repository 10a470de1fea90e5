"""One run of each kind of kernel under NVIDIA's compute-sanitizer: `python benchmarks/sanitize.py [--json FILE]`.

Tools: memcheck (accesses outside of allocations, misaligned ones), racecheck (accesses to shared memory that no barrier
orders), synccheck (barriers that not all threads reach). Each tool runs one process, which calls every kind through
`tileloom run` at small sizes and compares with float64 as that command does. The exit status is 1 where a tool reports an
error or a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
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
    from tileloom.execution import gpu_target

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


def checked(tool: str, kinds: list[str], program: str) -> dict[str, Any]:
    """One tool's verdict: its exit status (99 where it reports an error), counts, and what it printed about errors."""
    started = time.perf_counter()
    command = [
        program,
        "--tool",
        tool,
        "--error-exitcode",
        "99",
        sys.executable,
        __file__,
        "--inside",
        *kinds,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    said = [line for line in text.splitlines() if line.startswith("=========")]
    return {
        "tool": tool, "status": done.returncode, "seconds": round(time.perf_counter() - started, 1),
        "kinds": re.findall(r"^== (.*)$", text, re.M), "right": len(re.findall(r"^ok$", text, re.M)),
        "summary": said[-1:] , "said": said[:60] if done.returncode else [],
        "output": text[-3000:] if done.returncode not in (0, 99) else "",
    }  # fmt: skip


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
    rows = [checked(tool, arguments.kinds, program) for tool in arguments.tools.split(",")]
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    record = {"sanitizer": version.strip().splitlines()[-1:], "runs": rows}
    for r in rows:
        print(
            r["tool"],
            r["status"],
            f"{r['right']} of {len(r['kinds'])} right",
            f"{r['seconds']} s",
            *r["summary"],
        )
        print("\n".join(r["said"]), r["output"])
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(r["status"] or r["right"] < len(r["kinds"]) for r in rows))


if __name__ == "__main__":
    sys.exit(main())
