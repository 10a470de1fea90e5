"""Score the fusion ledger: does it predict whether fusing wins, and the time of what it chooses?

    python benchmarks/ledger.py [--seed S] [--json FILE] [--rates FILE]

For each pair the kernel is run with everything computed in place (`fuse all`), with every statement stored (`fuse none`)
and as the compiler chooses (`fuse auto`), all checked against float64. The sign is scored on pairs whose measured ratio
lies outside 0.9 to 1.1; the score of always fusing stands beside it. Rates are measured first, or read from a file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from ledger_pairs import PAIRS, Pair, drawn

from tileloom.compiler.cost import Rates
from tileloom.compiler.interpreter import tensor as interpreter
from tileloom.compiler.options import Options
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.target import CPU
from tileloom.dsl.load import parse
from tileloom.dsl.types import DType
from tileloom.runtime import rates as machine
from tileloom.runtime.bench import Variant, compare, document
from tileloom.runtime.kernels import build
from tileloom.runtime.launch import Kernel

RESULTS = Path(__file__).parent / "results"


def inputs(compilation: Compilation, sizes: dict[str, int]) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    out: dict[str, np.ndarray[Any, Any]] = {}
    for name, t in compilation.graph.tensors.items():
        shape = tuple(sizes[e.name] for e in t.shape)  # type: ignore[attr-defined]
        if t.dtype is DType.F32:
            out[name] = (rng.standard_normal(shape) * 0.5).astype(np.float32)
        else:
            out[name] = rng.integers(0, min(sizes.values()), shape).astype(np.int32)
    return out


def score(pair: Pair, rates: Rates) -> dict[str, Any]:
    """Measured and predicted times of the three versions, in milliseconds."""
    sizes = dict(pair.sizes)
    program = parse(pair.text)
    kernel = program[next(iter(program.kernels))]
    made = {
        mode: compile_kernel(kernel, CPU, sizes, options=Options(fuse=mode), machine=rates)  # type: ignore[arg-type]
        for mode in ("all", "none", "auto")
    }
    tensors = inputs(made["all"], sizes)
    reference = list(interpreter.run(made["all"].written, tensors, {}, precision="float64").values())
    same = [mode for mode in ("all", "none") if made[mode].module.programs == made["auto"].module.programs]
    timed = {mode: c for mode, c in made.items() if mode != "auto" or not same}
    rows = compare(
        pair.name,
        [Variant(mode, caller(c, tensors), 1e-3) for mode, c in timed.items()],
        reference,
        rounds=9,
    )
    median = {r.variant: r.median_ms for r in rows}
    median.setdefault("auto", median[same[0]] if same else float("nan"))
    return {
        "pair": pair.name,
        "measured_ms": median,
        "predicted_ms": {mode: c.prediction.seconds * 1e3 for mode, c in made.items()},
        "binds": {mode: c.prediction.binds for mode, c in made.items()},
        "parts_ms": {mode: {k: v * 1e3 for k, v in c.prediction.parts.items()} for mode, c in made.items()},
        "kept": [e.name for e in made["auto"].ledger.entries if not e.fused],
        "samples_ms": {r.variant: r.samples_ms for r in rows},
    }


def caller(c: Compilation, tensors: dict[str, np.ndarray[Any, Any]]) -> Callable[[], Any]:
    kernel = Kernel(c.graph, c.module, build(c.source))
    arguments = [tensors[name] for name in c.graph.order]
    return lambda: kernel(*arguments)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Signs right among clear pairs, always-fuse's score, and predictions of the chosen kernel within a factor of 2."""
    clear = [r for r in rows if not 0.9 <= r["measured_ms"]["all"] / r["measured_ms"]["none"] <= 1.1]
    fused_wins = [r["measured_ms"]["all"] < r["measured_ms"]["none"] for r in clear]
    said = [r["predicted_ms"]["all"] < r["predicted_ms"]["none"] for r in clear]
    near = [0.5 <= r["predicted_ms"]["auto"] / r["measured_ms"]["auto"] <= 2 for r in rows]
    best = [min(r["measured_ms"].values()) / r["measured_ms"]["auto"] for r in rows]
    return {
        "pairs": len(rows),
        "clear": len(clear),
        "faster_unfused": sum(not w for w in fused_wins),
        "sign_right": sum(a == b for a, b in zip(said, fused_wins, strict=True)) / max(1, len(clear)),
        "always_fuse_right": sum(fused_wins) / max(1, len(clear)),
        "within_2x": sum(near) / max(1, len(rows)),
        "chosen_of_best": float(np.exp(np.mean(np.log(best)))) if best else 1.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, help="score 20 pairs drawn by this seed instead of the committed ones"
    )
    parser.add_argument(
        "--rates", type=Path, help="rates measured earlier; measured anew and written there if missing"
    )
    parser.add_argument("--json", type=Path, help="where to record the result")
    parser.add_argument("--only", help="families, comma-separated")
    args = parser.parse_args()
    rates = measured_rates(args.rates)
    print(rates)
    pairs = PAIRS if args.seed is None else drawn(args.seed)
    if args.only:
        pairs = tuple(p for p in pairs if p.family in args.only.split(","))
    rows = []
    for pair in pairs:
        row = score(pair, rates)
        rows.append(row)
        m, p = row["measured_ms"], row["predicted_ms"]
        print(
            f"{pair.name:48s} all {m['all']:9.3f} ({p['all']:9.3f})  none {m['none']:9.3f} ({p['none']:9.3f})  "
            f"auto {m['auto']:9.3f} ({p['auto']:9.3f}) stores {','.join(row['kept']) or '-'}",
            flush=True,
        )
    result = summary(rows)
    print(json.dumps(result, indent=2))
    if args.json:
        recorded = {**document([]), "rates": asdict(rates), "summary": result, "rows": rows}
        args.json.write_text(json.dumps(recorded, indent=1) + "\n")
    return 0


def measured_rates(path: Path | None) -> Rates:
    if path is not None and path.exists():
        return machine.load(path)
    rates = machine.measure()
    if path is not None:
        machine.save(rates, path)
    return rates


if __name__ == "__main__":
    sys.exit(main())
