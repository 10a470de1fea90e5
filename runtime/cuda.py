"""The one module that knows numba-cuda and cuda-python: types for generated source, and its assembly.

Assembly needs no GPU: numba-cuda lowers a kernel to PTX for any compute capability, nvJitLink makes the cubin and reports
registers and spills. Contraction of a·b + c into one rounding is off (libNVVM option `-fma=0`), for exp(s·c - r) near the
largest floats needs both roundings; products use explicit fused multiply-adds.

The import takes a second and a half: what is in the cache folder runs without it (`machine_code.py`, `driver.py`).
"""

from __future__ import annotations

import linecache
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..compiler.target import CudaTarget
from .machine_code import NOT_INSTALLED, Assembled, toolkit_installed

if not toolkit_installed():
    raise ImportError(NOT_INSTALLED)
if not hasattr(np, "row_stack"):  # numba-cuda 0.30 uses the name that NumPy 2.5 dropped
    vars(np)["row_stack"] = np.vstack

from llvmlite import ir
from numba import cuda, types
from numba.cuda import compiler, cuda_paths, extending
from numba.cuda.cudadrv import nvvm
from numba.cuda.descriptor import cuda_target as numba_cuda_target
from numba.cuda.extending import intrinsic

from .cuda_passes import Flags, Pipeline, asked_once

numba_compiler: Any = compiler  # not in their stubs: kernel_fixup, set_launch_bounds
numba_paths: Any = cuda_paths
numba_nvvm: Any = nvvm
numba_extending: Any = extending
numba_target: Any = numba_cuda_target
pointer_to: Any = types.CPointer

# What generated source imports.
f64, f32 = types.float64, types.float32
i64, i32, i16, i8 = types.int64, types.int32, types.int16, types.int8
u16, u8, boolean = types.uint16, types.uint8, types.boolean
inf, nan = math.inf, math.nan
ALL_LANES = 0xFFFFFFFF
__all__ = ["ALL_LANES", "boolean", "cuda", "f32", "f64", "i8", "i16", "i32", "i64", "inf", "nan", "u8", "u16"]
__all__ += ["intrinsic", "pointer_to", "tensor_map", "types"]  # what the modules of intrinsics import

MAP_BYTES = 128


class _TensorMap(types.Type):
    """A CUtensorMap, passed by value."""

    def __init__(self) -> None:
        super().__init__(name="CUtensorMap")


@numba_extending.register_model(_TensorMap)
class _TensorMapModel(numba_extending.models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.ArrayType(ir.IntType(8), MAP_BYTES).as_pointer())


tensor_map = _TensorMap()

TYPES = {
    "f64": f64,
    "f32": f32,
    "i64": i64,
    "i32": i32,
    "i16": i16,
    "i8": i8,
    "u16": u16,
    "u8": u8,
    "boolean": boolean,
    "map": tensor_map,
}

# ---------------------------------------------------------------- assembly


def assemble(source: str, target: CudaTarget) -> dict[str, Assembled]:
    """Every kernel of a generated source, assembled for a target, by name; needs no GPU.

    Raises RuntimeError with the assembler's words where it refuses the code.
    """
    namespace = load(source)
    return {name: _assemble_kernel(namespace, name, target) for name in namespace["LAUNCHES"]}


def assemble_one(source: str, name: str, target: CudaTarget) -> Assembled:
    """One kernel of a generated source. Raises RuntimeError as `assemble` does."""
    return _assemble_kernel(load(source), name, target)


def libnvvm_path() -> str:
    """Of the library that is used."""
    return str(numba_paths.get_cuda_paths()["nvvm"].info)


def load(source: str) -> dict[str, Any]:
    """Run generated source and give its names; its lines show up in tracebacks."""
    path = f"<tileloom {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    namespace: dict[str, Any] = {"__name__": "tileloom_generated"}
    exec(compile(source, path, "exec", dont_inherit=True), namespace)
    return namespace


def _assemble_kernel(namespace: Mapping[str, Any], name: str, target: CudaTarget) -> Assembled:
    start = time.process_time()
    launch = namespace["LAUNCHES"][name]
    parameters = tuple(namespace[name].py_func.__annotations__.values())
    library, entry = _lowered(namespace, name, target)
    if "maps" in launch:
        cubin, log = _link_whole(library, entry, name, target)
    else:
        cubin, log = _link(_ptx_of(library, entry, name, target), target)
    numbers = _numbers(log)
    return Assembled(
        name, target, cubin, **numbers, dynamic_shared_bytes=launch["shared_bytes"], threads=launch["threads"],
        parameters=parameters, log=log, seconds=time.process_time() - start,
    )  # fmt: skip


def ptx(source: str, name: str, target: CudaTarget) -> str:
    """One kernel of a generated source as PTX, to look at: lowered anew, for machine code is kept without it."""
    return _ptx_of(*_lowered(load(source), name, target), name, target)


def _ptx_of(library: Any, entry: str, name: str, target: CudaTarget) -> str:
    text: str = library.get_asm_str(cc=_cc(target))
    return text.replace(entry, name)


def _type(annotation: str) -> Any:
    pointee = annotation.removeprefix("*")
    return TYPES[pointee] if pointee == annotation else pointer_to(TYPES[pointee])


def _cc(target: CudaTarget) -> tuple[Any, ...]:
    return (*target.capability, "a") if target.architecture_specific else target.capability


def _lowered(namespace: Mapping[str, Any], name: str, target: CudaTarget) -> tuple[Any, str]:
    """A kernel in LLVM's form, and its name there; `LAUNCHES` has the threads of a block and how many blocks must fit. As
    numba-cuda's `cuda.compile(device=False)`, which has no way to turn contraction off or to leave passes out."""
    launch, function = namespace["LAUNCHES"][name], namespace[name].py_func
    signature = tuple(_type(p) for p in function.__annotations__.values())
    flags = Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model, flags.inline = "numpy", "never"
    flags.nvvm_options, flags.compute_capability = {"opt": 3, "fma": False}, _cc(target)
    contexts = numba_target.typing_context, numba_target.target_context
    with numba_compiler.utils.numba_target_override(), asked_once(contexts[0]):
        compiled = numba_compiler.compile_extra(
            *contexts, function, signature, types.void, flags, {}, pipeline_class=Pipeline,
            call_conv=numba_compiler.CUDACallConv(contexts[1]), abi_info={},
        )  # fmt: skip
    compiled.library.finalize()
    library = compiled.library
    entry = compiled.fndesc.llvm_func_name
    kernel = library.get_function(entry)
    library._entry_name = entry
    numba_compiler.kernel_fixup(kernel, False)
    _pass_maps_by_value(kernel)
    numba_nvvm.set_launch_bounds(kernel, (launch["threads"], launch.get("resident", 1)))
    return library, entry


def _pass_maps_by_value(kernel: Any) -> None:
    """Tensor maps are `__grid_constant__` parameters: the copy engine reads them where the launch puts them."""
    pointee = ir.ArrayType(ir.IntType(8), MAP_BYTES)
    places = []
    for number, argument in enumerate(kernel.args, 1):
        if argument.type == pointee.as_pointer():
            argument.add_attribute("byval")
            argument.attributes.align = 64
            places.append(number)
    if places:
        module = kernel.module
        constants = module.add_metadata([ir.Constant(ir.IntType(32), n) for n in places])
        entry = module.add_metadata((kernel, ir.MetaDataString(module, "grid_constant"), constants))
        module.add_named_metadata("nvvm.annotations", entry)


def _with_plain_byval(replace: Callable[[str], str]) -> Callable[[str], str]:
    """libNVVM's dialect takes `byval` without the type that llvmlite writes."""
    return lambda text: replace(text).replace(f"byval([{MAP_BYTES} x i8])", "byval")


numba_nvvm.llvm_replace = _with_plain_byval(numba_nvvm.llvm_replace)


def _link(ptx: str, target: CudaTarget) -> tuple[bytes, str]:
    from cuda.core import Linker, LinkerOptions, ObjectCode

    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=LinkerOptions(arch=target.sm, verbose=True))
    try:
        cubin = linker.link("cubin").code
    except Exception as refused:  # its class depends on which linker is present
        raise RuntimeError(
            f"the assembler refuses the code for {target.sm}: {linker.get_error_log() or refused}"
        ) from refused
    return cubin, linker.get_info_log()


def _link_whole(library: Any, entry: str, name: str, target: CudaTarget) -> tuple[bytes, str]:
    """As one whole program: only then may warpgroups pass registers to each other (`setmaxnreg`, warning C7504). The linker
    makes the machine code itself then, from what libNVVM leaves for it."""
    from cuda.bindings import nvjitlink

    options = {**library._nvvm_options, "arch": target.sm.replace("sm", "compute"), "gen-lto": None}
    texts = [text.replace(entry, name) for text in library.llvm_strs]
    middle = numba_nvvm.compile_ir(texts, **options)
    given = ["-lto", f"-arch={target.sm}", "-fma=0", "-verbose"]
    handle = nvjitlink.create(len(given), given)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, middle, len(middle), name)
        nvjitlink.complete(handle)
    except nvjitlink.nvJitLinkError as refused:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise RuntimeError(
            f"the assembler refuses the code for {target.sm}: {log.decode() or refused}"
        ) from refused
    cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
    nvjitlink.get_linked_cubin(handle, cubin)
    told = bytearray(nvjitlink.get_info_log_size(handle))
    nvjitlink.get_info_log(handle, told)
    nvjitlink.destroy(handle)
    return bytes(cubin), told.decode().rstrip("\0")


def _numbers(log: str) -> dict[str, int]:
    def found(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return {
        "registers": int((re.findall(r"[Uu]sed (\d+) registers", log) or ["0"])[0]),
        "stack_bytes": found(r"(\d+) bytes stack frame"),
        "spill_bytes": found(r"(\d+) bytes spill"),
        "shared_bytes": int((re.findall(r"(\d+) bytes smem", log) or ["0"])[-1]),
    }
