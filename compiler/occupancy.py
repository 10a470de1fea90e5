"""What a launch takes of a multiprocessor, and how many of its warps fit there at once.

Sources. CUDA C++ Programming Guide 13.0, "Compute Capabilities": capacities (`target.py`). The granularities are those of
NVIDIA's occupancy calculator (`cuda_occupancy.h` of the CUDA toolkit): registers are handed out in units of 256 a warp,
shared memory in units of 128 bytes, and from compute capability 8.0 on the driver keeps 1 KiB of each block's.
"""

from __future__ import annotations

from ..dsl.records import dataclass
from .target import CudaTarget

REGISTER_UNIT = 256
SHARED_UNIT = 128
DRIVER_SHARED = 1024


@dataclass(frozen=True)
class Resources:
    """What one block takes. `registers` a thread, estimated from the tiles alive at once, and not capped at what the target
    has; `independent` is the most values of one tile a thread holds, work that need not wait for each other."""

    threads: int
    registers: int
    shared_bytes: int
    independent: int = 1


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that a multiprocessor holds at once, the share of its warps that is, and what limits them."""

    blocks: int
    warps: int
    share: float
    limit: str


def occupancy(r: Resources, target: CudaTarget) -> Occupancy:
    """Blocks of `r` on one multiprocessor of `target`; registers beyond what a thread can have are spilled, not held."""
    warps = -(-r.threads // target.warp)
    held = min(r.registers, most_registers(r.threads, target))
    of_warp = _rounded(held * target.warp, REGISTER_UNIT)
    reserved = DRIVER_SHARED if target.capability >= (8, 0) else 0
    shared = _rounded(r.shared_bytes, SHARED_UNIT) + reserved
    limits = {
        "threads": target.threads_per_sm // (warps * target.warp),
        "blocks": target.blocks_per_sm,
        "registers": target.registers_per_sm // of_warp // warps,
        "shared memory": target.shared_per_sm_bytes // shared if shared else target.blocks_per_sm,
    }
    limit = min(limits, key=lambda k: limits[k])
    blocks = limits[limit]
    return Occupancy(blocks, blocks * warps, blocks * warps * target.warp / target.threads_per_sm, limit)


def spilled(r: Resources, target: CudaTarget) -> int:
    """Registers a thread that have no room: each lives in local memory instead."""
    return max(0, r.registers - most_registers(r.threads, target))


def most_registers(threads: int, target: CudaTarget) -> int:
    """What each thread of a block can have: the assembler keeps to it, for a block must fit a multiprocessor."""
    return min(target.registers_per_thread, target.registers_per_sm // threads)


def _rounded(n: int, unit: int) -> int:
    return -(-n // unit) * unit


ISSUE_LATENCY = 4
"""Cycles until a dependent f32 instruction can issue (Jia et al. 2018, arXiv 1804.06826, table 4.1: 4 from Volta on)."""
SCHEDULERS = 4
"""Warp schedulers of a multiprocessor, each issuing one instruction a cycle (CUDA C++ Programming Guide, as above)."""
DRAM_LATENCY_S = 0.3e-6
"""Seconds a read from memory takes on an idle H100 (Luo et al. 2024, arXiv 2402.13499: 479 cycles at 1.755 GHz)."""


@dataclass(frozen=True)
class Hidden:
    """The shares of the arithmetic and of the memory rate that the warps resident at once can keep up."""

    arithmetic: float = 1.0
    memory: float = 1.0


ALL_HIDDEN = Hidden()


def hidden(r: Resources, target: CudaTarget) -> Hidden:
    """Little's law: what is in flight on a multiprocessor, over its latency times its rate."""
    resident = occupancy(r, target)
    if not resident.blocks:
        return Hidden(1 / (ISSUE_LATENCY * SCHEDULERS), 1 / (ISSUE_LATENCY * SCHEDULERS))
    instructions = resident.warps * r.independent
    arithmetic = min(1.0, instructions / (ISSUE_LATENCY * SCHEDULERS))
    if target.dram_gbytes_per_s is None or target.sms is None:
        return Hidden(arithmetic)
    needed = DRAM_LATENCY_S * target.dram_gbytes_per_s * 1e9 / target.sms
    return Hidden(arithmetic, min(1.0, 4 * instructions * target.warp / needed))
