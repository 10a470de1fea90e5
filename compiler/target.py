"""Target facts as data: what a schedule may use, what a cost model divides by, and which instructions exist.

Rates are peaks of one device, dense (no sparsity); None where the name covers devices that differ too much to state one.

Sources. CUDA C++ Programming Guide 13.0, "Compute Capabilities" (threads, blocks, registers and shared memory per SM and
per block) and its table of arithmetic throughput; "NVIDIA A100 Tensor Core GPU Architecture" (2020, table 1), "NVIDIA H100
Tensor Core GPU Architecture" (2022, table 2) and the H200 data sheet (2024) for rates; the T4 (sm_75), A10 (sm_86) and L40S
(sm_89) data sheets; the RTX 5090 (sm_120) and B200 (sm_100) product pages. The f32, copy and bf16 rates of sm_90a are
measured on an H200 (design/CUDA.md), the rest stated by the vendor.
"""

from __future__ import annotations

from ..dsl.diagnostics import refuse
from ..dsl.records import dataclass

KIB = 1024


@dataclass(frozen=True)
class Target:
    """`name` is how a user writes it: `cpu`, `cuda:sm_90a`. Capacities are those that one kernel may use."""

    name: str

    @property
    def is_cuda(self) -> bool:
        return isinstance(self, CudaTarget)


@dataclass(frozen=True)
class CudaTarget(Target):
    """A compute capability. `architecture_specific`: the `a` of sm_90a, code that runs on that generation only.

    `shared_per_block_bytes` counts what a launch can opt in to; `static_shared_bytes` what it gets without.
    """

    capability: tuple[int, int]
    architecture_specific: bool
    threads_per_sm: int
    blocks_per_sm: int
    shared_per_sm_bytes: int
    shared_per_block_bytes: int
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    threads_per_block: int = 1024
    static_shared_bytes: int = 48 * KIB
    warp: int = 32
    sms: int | None = None
    f32_tflops: float | None = None
    bf16_tflops: float | None = None
    dram_gbytes_per_s: float | None = None

    @property
    def sm(self) -> str:
        """`sm_90a`, as the assembler writes it."""
        return self.name.removeprefix("cuda:")

    @property
    def has_nan_max(self) -> bool:
        """max.NaN.f32 (PTX ISA 9.7.3, "max": sm_80 or later)."""
        return self.capability >= (8, 0)

    @property
    def has_bf16_convert(self) -> bool:
        """cvt.rn.bf16.f32 (PTX ISA 9.7.9, "cvt": sm_80 or later)."""
        return self.capability >= (8, 0)

    @property
    def has_wgmma(self) -> bool:
        """wgmma.mma_async (PTX ISA 9.7.15: sm_90a alone)."""
        return self.capability == (9, 0) and self.architecture_specific

    @property
    def has_dependent_launch(self) -> bool:
        """griddepcontrol (PTX ISA 9.7.13, "griddepcontrol": sm_90 or later)."""
        return self.capability >= (9, 0)

    @property
    def has_bf16_add(self) -> bool:
        """red.global.add.noftz.bf16 (PTX ISA 9.7.13, "red": sm_90 or later)."""
        return self.capability >= (9, 0)


@dataclass(frozen=True)
class CpuTarget(Target):
    """A CPU; `narrow_products` are its instruction sets for products of 16-bit and 8-bit operands, as Linux names them."""

    narrow_products: tuple[str, ...] = ()

    @property
    def bf16_products(self) -> str | None:
        """What multiplies bf16 into f32, the fastest that there is (Intel 64 and IA-32 Architectures Software Developer's
        Manual, volume 2: TDPBF16PS, VDPBF16PS)."""
        return next((x for x in ("amx_bf16", "avx512_bf16") if x in self.narrow_products), None)

    @property
    def i8_products(self) -> str | None:
        """What multiplies i8 into i32 (the same, TDPBSSD)."""
        return "amx_int8" if "amx_int8" in self.narrow_products else None


CPU = CpuTarget("cpu")
SM_75 = CudaTarget(
    "cuda:sm_75", (7, 5), False, 1024, 16, 64 * KIB, 64 * KIB, sms=40, f32_tflops=8.1, dram_gbytes_per_s=320
)
SM_80 = CudaTarget(
    "cuda:sm_80", (8, 0), False, 2048, 32, 164 * KIB, 163 * KIB,
    sms=108, f32_tflops=19.5, bf16_tflops=312, dram_gbytes_per_s=2039,
)  # fmt: skip
SM_86 = CudaTarget(
    "cuda:sm_86", (8, 6), False, 1536, 16, 100 * KIB, 99 * KIB,
    sms=72, f32_tflops=31.2, bf16_tflops=125, dram_gbytes_per_s=600,
)  # fmt: skip
SM_89 = CudaTarget(
    "cuda:sm_89", (8, 9), False, 1536, 24, 100 * KIB, 99 * KIB,
    sms=142, f32_tflops=91.6, bf16_tflops=362, dram_gbytes_per_s=864,
)  # fmt: skip
SM_90A = CudaTarget(
    "cuda:sm_90a", (9, 0), True, 2048, 32, 228 * KIB, 227 * KIB,
    sms=132, f32_tflops=51, bf16_tflops=790, dram_gbytes_per_s=4280,
)  # fmt: skip
SM_100A = CudaTarget(
    "cuda:sm_100a", (10, 0), True, 2048, 32, 228 * KIB, 227 * KIB,
    sms=148, f32_tflops=75, bf16_tflops=2250, dram_gbytes_per_s=8000,
)  # fmt: skip
SM_120 = CudaTarget(
    "cuda:sm_120", (12, 0), False, 1536, 24, 100 * KIB, 99 * KIB,
    sms=170, f32_tflops=104.8, bf16_tflops=209.5, dram_gbytes_per_s=1792,
)  # fmt: skip
TARGETS: dict[str, Target] = {t.name: t for t in (CPU, SM_75, SM_80, SM_86, SM_89, SM_90A, SM_100A, SM_120)}


def target(name: str) -> Target:
    """The target a user names; raises `TileError` for another name."""
    if name not in TARGETS:
        raise refuse("E0901", f"no target is called `{name}`", None, help="one of " + ", ".join(TARGETS))
    return TARGETS[name]


def cuda_target(name: str) -> CudaTarget:
    """The CUDA target a user names; raises `TileError` for another."""
    found = target(name)
    if not isinstance(found, CudaTarget):
        names = ", ".join(t.name for t in TARGETS.values() if t.is_cuda)
        raise refuse("E0901", f"`{name}` is not a CUDA target", None, help=f"one of {names}")
    return found
