"""Blocks of rows that also read weights: how many a multiprocessor is to have room for.

A norm's weights are asked for when its sums are known. Their registers come on top of the row's own, while nothing of the
row is under way, and leave room for fewer blocks: those of 4096 bf16 had five of 256 threads (rms norm, 48 registers) or
four (layer norm, 56). Bounded to 40 they spill nothing and have six; on an H200 that took rms norm from 0.97 to 0.99 of a
Triton kernel (h200-norm.json). A softmax, which reads nothing else, has 40 of its own accord; more values of a thread, or
f32, would spill.
"""

from __future__ import annotations

from ..tile_ir import Load, expressions, statements, subexpressions
from .resources import live_arrays
from .simt import SIXTEEN, Kernel

BARRIER = "cuda.syncthreads()"

THREADS = 1536
"""Of a multiprocessor: with 65,536 registers, 40 a thread."""
ROW_REGISTERS = 16
"""What a thread may hold of rows at a barrier; as much again and the bound would spill."""


def with_room(kernel: Kernel) -> Kernel:
    """Bound a thread's registers where that gives more blocks and nothing is spilled."""
    if type(kernel) is not Kernel or kernel.deal.row_bits:
        return kernel
    every = (x for s in statements(kernel.program.body) for e in expressions(s) for x in subexpressions(e))
    loads = {x.tensor for x in every if isinstance(x, Load)} & set(kernel.wide_tensors)
    narrow = all(kernel.program.param(t).dtype in SIXTEEN for t in loads)
    if len(loads) > 1 and narrow and _held_at_barriers(kernel.text.out) == ROW_REGISTERS:
        kernel.resident = min(THREADS, kernel.target.threads_per_sm) // kernel.deal.threads
    return kernel


def _held_at_barriers(lines: list[str]) -> int:
    """The most registers that tiles take at a barrier."""
    arrays = list(live_arrays(lines))
    barriers = [i for i, line in enumerate(lines) if line.strip() == BARRIER]
    return max((sum(a.registers for a in arrays if a.first < i < a.last) for i in barriers), default=0)
