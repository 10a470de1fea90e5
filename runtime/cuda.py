"""The one module that knows numba-cuda and cuda-python: types for generated source, assembly, launching.

Assembly needs no GPU: numba-cuda lowers a kernel to PTX for any compute capability, nvJitLink makes the cubin and reports
registers and spills, nvdisasm shows it. Contraction of a·b + c into one rounding is off (libNVVM option `-fma=0`), for
exp(s·c - r) near the largest floats needs both roundings; products use explicit fused multiply-adds.

Launching loads that cubin with the driver API and passes the parameters that `compiler/codegen/simt.py` documents: for
each tensor its address and its strides in elements, then scalars, then extents, 8 bytes each but for 4-byte scalars, then
tensor maps (`tensor_maps.py`) where the kernel has some.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import json
import linecache
import math
import operator
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..compiler.interpreter.elements import NUMPY
from ..compiler.interpreter.tile import bind_extents, integer
from ..compiler.target import TARGETS, CudaTarget
from ..compiler.tile_ir import Param, TileModule, TileProgram
from .cache import digest, digest_of_files, store
from .collecting import collecting_paused
from .native_call import DLPACK_CUDA, Driver
from .tensor_maps import MapSlot, can_be_mapped, encoder_address

if TYPE_CHECKING:
    from .device_kernel import Launch

INSTALL = "pip install '.[cuda]' in the folder of tileloom"
if importlib.util.find_spec("numba_cuda") is None:
    raise ImportError(
        f"CUDA kernels need numba-cuda and the CUDA toolkit, which are not installed: {INSTALL}"
    )
if not hasattr(np, "row_stack"):  # numba-cuda 0.30 uses the name that NumPy 2.5 dropped
    vars(np)["row_stack"] = np.vstack

from llvmlite import ir  # noqa: E402
from numba import cuda, types  # noqa: E402
from numba.cuda import compiler, extending  # noqa: E402
from numba.cuda.core.compiler_machinery import PassManager  # noqa: E402
from numba.cuda.cudadrv import nvvm  # noqa: E402
from numba.cuda.descriptor import cuda_target as numba_cuda_target  # noqa: E402
from numba.cuda.extending import intrinsic  # noqa: E402

numba_compiler: Any = compiler  # not in their stubs: kernel_fixup, set_launch_bounds
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
CTYPES = {
    "f64": ctypes.c_double,
    "f32": ctypes.c_float,
    "i64": ctypes.c_int64,
    "i32": ctypes.c_int32,
    "boolean": ctypes.c_bool,
}

# ---------------------------------------------------------------- assembly


@dataclass(frozen=True)
class Assembled:
    """One kernel as machine code. `spill_bytes` sums spill stores and loads of a thread; `shared_bytes` is static.

    `tasks(*extents)` gives how many blocks have work; `parameters` are the annotations of the source; `seconds` is the
    processor time that making it took.
    """

    name: str
    target: CudaTarget
    cubin: bytes = field(repr=False)
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    dynamic_shared_bytes: int
    threads: int
    tasks: Callable[..., int] = field(repr=False)
    parameters: tuple[str, ...] = field(repr=False)
    log: str = field(repr=False)
    seconds: float
    program: str
    multiples: Mapping[str, int]
    at_most: Mapping[str, int]
    wide: Sequence[str] = ()
    maps: Sequence[tuple[str, Sequence[int]]] = ()
    blocks_per_sm: int = 0

    @property
    def sass(self) -> str:
        return disassemble(self.cubin)


@dataclass(frozen=True)
class Variant:
    """One kernel of a generated source, as its `LAUNCHES` state it.

    It may be launched where each extent of `multiples` is a multiple of that number, each of `at_most` no more than it,
    and each tensor of `wide` starts at a multiple of 16 bytes, has stride 1 along its last axis and multiples of 16 bytes
    along the others.
    """

    name: str
    threads: int
    shared_bytes: int
    tasks: Callable[..., int] = field(repr=False)
    multiples: Mapping[str, int]
    wide: tuple[str, ...]
    at_most: Mapping[str, int]
    maps: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Tensor maps, its last parameters: tensor and box, the outermost dimension first."""
    blocks_per_sm: int = 0
    """Blocks that a multiprocessor holds, each of which takes tasks in turn; 0: a block for each task."""
    secondary: bool = False
    """May it start while the launch before it still runs? It waits for that itself."""

    def blocks(self, sizes: Sequence[int], multiprocessors: int) -> int:
        """How many blocks a launch has."""
        return min(self.tasks(*sizes), self.blocks_per_sm * multiprocessors or MOST_BLOCKS)


ON_THE_HOST = {
    "__builtins__": {}, "abs": abs, "max": max, "min": min, "floordiv_i64": operator.floordiv, "mod_i64": operator.mod
}  # fmt: skip
"""What an extent's expression may call in `LAUNCHES`, which runs on the host."""


def variants(source: str) -> dict[str, list[Variant]]:
    """The kernels of a generated source by the program they run, the preferred first. Runs nothing but `LAUNCHES`."""
    launches: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAUNCHES":
            launches = eval(compile(ast.Expression(node.value), "<launches>", "eval"), dict(ON_THE_HOST))
    found: dict[str, list[Variant]] = {}
    for name, x in launches.items():
        variant = Variant(
            name, x["threads"], x["shared_bytes"], x["tasks"], x.get("multiples", {}), tuple(x.get("wide", ())),
            x.get("at_most", {}), tuple(x.get("maps", ())), x.get("blocks_per_sm", 0), x.get("secondary", False),
        )  # fmt: skip
        found.setdefault(x.get("program", name), []).append(variant)
    return found


@cache
def machine_code(source: str, name: str, target: CudaTarget) -> Assembled:
    """One kernel of a generated source, from this process, from the cache folder, or assembled now."""
    folder, group = store(), f"cubin-{digest(source, target.name, *_facts())}"
    with folder.making(group):
        kept = folder.get(group, name[:100])
        if kept is not None:
            head, _, cubin = kept.partition(b"\n")
            facts = json.loads(head)
            tasks = next(v.tasks for several in variants(source).values() for v in several if v.name == name)
            return Assembled(
                target=target, cubin=cubin, tasks=tasks, parameters=tuple(facts.pop("parameters")), **facts
            )
        made = _assemble_kernel(load(source), name, target)
        fields = (
            "name", "registers", "stack_bytes", "spill_bytes", "shared_bytes", "dynamic_shared_bytes", "threads",
            "parameters", "log", "seconds", "program", "multiples", "at_most", "wide", "maps", "blocks_per_sm",
        )  # fmt: skip
        head = json.dumps({f: getattr(made, f) for f in fields}).encode()
        folder.put(group, head + b"\n" + made.cubin, name[:100])
    return made


@cache
def _facts() -> tuple[str, ...]:
    """What machine code depends on besides its source: the toolchain, and the text of the intrinsics."""
    versions = (metadata.version(p) for p in ("numba-cuda", "numba", "llvmlite", "cuda-core"))
    return (
        *versions,
        str(numba_nvvm.NVVM().get_version()),
        digest_of_files("runtime/intrinsics/*.py", "runtime/cuda.py"),
    )


def assemble(source: str, target: CudaTarget) -> dict[str, Assembled]:
    """Every kernel of a generated source, assembled for a target, by name; needs no GPU.

    Raises RuntimeError with the assembler's words where it refuses the code.
    """
    namespace = load(source)
    return {name: _assemble_kernel(namespace, name, target) for name in namespace["LAUNCHES"]}


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
        tasks=launch["tasks"], parameters=parameters, log=log, seconds=time.process_time() - start,
        program=launch.get("program", name), multiples=launch.get("multiples", {}),
        at_most=launch.get("at_most", {}), wide=launch.get("wide", ()), maps=launch.get("maps", ()),
        blocks_per_sm=launch.get("blocks_per_sm", 0),
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


NEEDED_PASSES = frozenset(
    {
        "CUDATranslateBytecode", "FixupArgs", "IRProcessing", "NopythonTypeInference", "IRLegalization", "AnnotateTypes",
        "CreateLibrary", "CUDANativeLowering", "CUDABackend",
    }
)  # fmt: skip
"""Passes of numba-cuda that generated text has a use for. The others look for closures, `with`, `raise`, overloads to
inline, branches on literals and array expressions, of which it has none, and each goes through all of a kernel
several times; one gives each assignment of a name a name of its own, which LLVM does again, and takes time by names
times blocks."""


class _Pipeline(numba_compiler.CUDACompiler):  # type: ignore[misc]
    """numba-cuda's passes without those that find nothing to do: the same machine code in half the time."""

    def define_pipelines(self) -> list[Any]:
        (every,) = super().define_pipelines()
        needed: Any = PassManager("tileloom")
        needed.passes = [p for p in every.passes if getattr(p[0], "__name__", "") in NEEDED_PASSES]
        needed.finalize()
        return [needed]


@contextmanager
def _types_asked_once(context: Any) -> Iterator[None]:
    """numba-cuda's look for the type of a call, kept for calls of the same function with the same types: it goes through all
    that the function could be, raises and catches errors on the way, and a text has thousands of calls but few kinds."""
    known: dict[tuple[Any, ...], Any] = {}
    resolve = context.resolve_function_type

    def resolved(function: Any, args: Any, kws: Any) -> Any:
        if function in (
            "static_getitem",
            "static_setitem",
        ):  # their second argument is the index itself, a slice perhaps
            return resolve(function, args, kws)
        key = function, tuple(args), tuple(sorted(kws.items()))
        found = known.get(key)
        if found is None:
            found = resolve(function, args, kws)
            if found is not None:
                known[key] = found
        return found

    context.resolve_function_type = resolved
    try:
        yield
    finally:
        del context.resolve_function_type


def _lowered(namespace: Mapping[str, Any], name: str, target: CudaTarget) -> tuple[Any, str]:
    """A kernel in LLVM's form, and its name there; `LAUNCHES` has the threads of a block and how many blocks must fit. As
    numba-cuda's `cuda.compile(device=False)`, which has no way to turn contraction off or to leave passes out."""
    launch, function = namespace["LAUNCHES"][name], namespace[name].py_func
    signature = tuple(_type(p) for p in function.__annotations__.values())
    flags = numba_compiler.CUDAFlags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model, flags.inline = "numpy", "never"
    flags.nvvm_options, flags.compute_capability = {"opt": 3, "fma": False}, _cc(target)
    contexts = numba_target.typing_context, numba_target.target_context
    with numba_compiler.utils.numba_target_override(), _types_asked_once(contexts[0]), collecting_paused():
        compiled = numba_compiler.compile_extra(
            *contexts, function, signature, types.void, flags, {}, pipeline_class=_Pipeline,
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


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin, through the toolkit's nvdisasm."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([_nvdisasm(), "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr.strip()}")
    return done.stdout


@cache
def _nvdisasm() -> str:
    """The disassembler of the wheels, else of an installed toolkit."""
    import shutil

    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in (Path(root) / "cu13" / "bin" / name for name in ("nvdisasm", "nvdisasm.exe")):
            if path.exists():
                return str(path)
    if found := shutil.which("nvdisasm"):
        return found
    raise RuntimeError(f"nvdisasm is not installed: {INSTALL}")


# ---------------------------------------------------------------- the device


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises RuntimeError with the driver's words."""
    error, *values = result
    driver = _driver()
    if error != driver.CUresult.CUDA_SUCCESS:
        text = driver.cuGetErrorString(error)[1]
        raise RuntimeError(f"CUDA driver: {text.decode() if text else error}")
    return values[0] if len(values) == 1 else values


def present(number: int = 0) -> CudaTarget | None:
    """The best target that a device of this machine runs; None where there is no driver or no such device."""
    try:
        driver = _driver()
        _checked(driver.cuInit(0))
        handle = _checked(driver.cuDeviceGet(number))
    except (ImportError, RuntimeError):  # cuda-python raises RuntimeError where no driver library is found
        return None
    wanted = driver.CUdevice_attribute
    capability = (
        _checked(driver.cuDeviceGetAttribute(wanted.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)),
        _checked(driver.cuDeviceGetAttribute(wanted.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)),
    )
    cuda_targets = (t for t in TARGETS.values() if isinstance(t, CudaTarget))
    runs = [t for t in cuda_targets if runs_on(t, capability)]
    return max(runs, key=lambda t: t.capability, default=None)


def runs_on(target: CudaTarget, capability: tuple[int, int]) -> bool:
    """Code for a target runs on devices of its capability or a later one, of its own only where it is specific."""
    return target.capability == capability or (
        target.capability < capability and not target.architecture_specific
    )


@cache
def _context(device: int = 0) -> Any:
    """The primary context, which torch and CuPy use too."""
    driver = _driver()
    _checked(driver.cuInit(0))
    handle = _checked(driver.cuDeviceGet(device))
    context = _checked(driver.cuDevicePrimaryCtxRetain(handle))
    return context


@contextmanager
def device(number: int = 0) -> Iterator[None]:
    """Make a device's primary context current."""
    driver = _driver()
    _checked(driver.cuCtxPushCurrent(_context(number)))
    try:
        yield
    finally:
        _checked(driver.cuCtxPopCurrent())


@dataclass(frozen=True)
class DeviceTensor:
    """An array in device memory: the address of its first element, its strides in elements and its sizes."""

    address: int
    strides: tuple[int, ...]
    shape: tuple[int, ...] = ()


def device_tensor(array: Any) -> DeviceTensor:
    """From anything with `__cuda_array_interface__`."""
    facts = array.__cuda_array_interface__
    size = np.dtype(facts["typestr"]).itemsize
    strides = facts.get("strides")
    if strides is None:
        return DeviceTensor(facts["data"][0], packed_strides(facts["shape"]), tuple(facts["shape"]))
    return DeviceTensor(facts["data"][0], tuple(s // size for s in strides), tuple(facts["shape"]))


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a packed row-major array."""
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


@cache
def function(cubin: bytes, name: str, dynamic_shared_bytes: int, number: int = 0) -> int:
    """The handle of a kernel, loaded into the current context, which is that of device `number`."""
    driver = _driver()
    module = _checked(driver.cuModuleLoadData(cubin))
    found = _checked(driver.cuModuleGetFunction(module, name.encode()))
    if dynamic_shared_bytes:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(found, limit, dynamic_shared_bytes))
    return int(found)


LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


@cache
def _library() -> Any:
    """The driver's own library: a launch through it costs a third of one through cuda-python."""
    library = ctypes.PyDLL(LIBRARY)
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return library


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` of the driver API, for values that are a number."""

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


PROGRAMMATIC_STREAM_SERIALIZATION = 6
STARTS_EARLY = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
"""Of a launch that may start while the one before it on its stream still runs."""


class LaunchShape(ctypes.Structure):
    """`CUlaunchConfig` of the driver API: a launch by it has four arguments, not eleven, each of which costs."""

    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )
    stream: int | None
    attributes: int | None
    attribute_count: int

    @classmethod
    def stream_bytes(cls) -> int:
        """Where it has its stream."""
        field: Any = vars(cls)["stream"]
        return int(field.offset)

    @classmethod
    def of(cls, blocks: int, threads: int, shared_bytes: int, secondary: bool = False) -> LaunchShape:
        """`secondary`: it may start while the launch before it on the stream still runs."""
        plain = cls(blocks, 1, 1, threads, 1, 1, shared_bytes)
        if secondary:
            plain.attributes, plain.attribute_count = ctypes.addressof(STARTS_EARLY), 1
        return plain


def start(launch: Launch, stream: int) -> None:
    """Put a prepared launch on a stream of the current context. Raises RuntimeError naming kernel, sizes and reason."""
    launch.shape.stream = stream
    failed = _launch_by_shape()(launch.reference, launch.function, launch.pointers, None)
    if failed:
        raise _refused(failed, launch.what)


@cache
def _launch_by_shape() -> Any:
    """The driver's function, whose arguments are passed as they are prepared."""
    return ctypes.PyDLL(LIBRARY).cuLaunchKernelEx


def _refused(failed: int, what: str) -> RuntimeError:
    driver = _driver()
    text = driver.cuGetErrorString(driver.CUresult(failed))[1]
    return RuntimeError(f"CUDA driver, at the launch of {what}: {text.decode() if text else failed}")


def native_driver(number: int, launches: Sequence[str]) -> Driver:
    """The driver as native code calls it, for launches on a device that are told by these words."""

    def refused(packed: int) -> None:
        launch, failed = packed >> 32, packed & 0xFFFFFFFF
        raise _refused(
            failed, launches[launch] if launch >= 0 else "a kernel, whose tensor map it does not make"
        )

    library = ctypes.PyDLL(LIBRARY)
    launch, current = (
        ctypes.cast(f, ctypes.c_void_p).value or 0
        for f in (library.cuLaunchKernelEx, library.cuCtxGetCurrent)
    )
    encode = encoder_address() if hasattr(library, "cuTensorMapEncodeTiled") else 0
    return Driver(launch, current, encode, _context_handle(number), (DLPACK_CUDA, number), refused)


def _started(
    handle: int, blocks: int, threads: int, shared_bytes: int, stream: int, pointers: Any, what: str
) -> None:
    failed = _library().cuLaunchKernel(
        handle, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, None
    )
    if failed:
        raise _refused(failed, what)


@cache
def _context_handle(number: int) -> int:
    return int(_context(number))


def is_current(number: int) -> bool:
    """Is a device's primary context the current one?"""
    now = ctypes.c_void_p()
    _library().cuCtxGetCurrent(ctypes.byref(now))
    return now.value == _context_handle(number)


class Context:
    """A device's primary context, to be asked often whether it is the current one. One thread at a time."""

    def __init__(self, number: int) -> None:
        self.handle, self.now = _context_handle(number), ctypes.c_void_p()
        self.ask, self.place = ctypes.PyDLL(LIBRARY).cuCtxGetCurrent, ctypes.byref(self.now)

    def is_current(self) -> bool:
        self.ask(self.place)
        return self.now.value == self.handle


@contextmanager
def current(number: int) -> Iterator[None]:
    """See that a device's primary context is current; what was current before is so again after."""
    if is_current(number):
        yield
        return
    with device(number):
        yield


MOST_BLOCKS = 2**31 - 1


@cache
def multiprocessors(number: int = 0) -> int:
    """How many a device has."""
    driver = _driver()
    count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return int(_checked(driver.cuDeviceGetAttribute(count, _checked(driver.cuDeviceGet(number)))))


def launch(
    kernel: Assembled,
    tensors: Mapping[str, DeviceTensor],
    scalars: Sequence[int | float | bool],
    extents: Sequence[int],
    stream: int = 0,
) -> None:
    """Start a kernel on the current context; tensors and the other arguments in the order of the program's parameters."""
    blocks = min(kernel.tasks(*extents), kernel.blocks_per_sm * multiprocessors() or MOST_BLOCKS)
    if blocks <= 0:
        return
    given = [x for t in tensors.values() for x in (t.address, *t.strides)] + [*scalars, *extents]
    values = [_passed(p)(x) for p, x in zip(kernel.parameters, given, strict=False)]
    maps = [MapSlot(tensors[t].shape, tensors[t].strides, tuple(box)) for t, box in kernel.maps]
    for slot, (t, _) in zip(maps, kernel.maps, strict=True):
        slot.value = tensors[t].address
    places = [*(ctypes.addressof(v) for v in values), *(m.place for m in maps)]
    handle = function(kernel.cubin, kernel.name, kernel.dynamic_shared_bytes)
    _started(
        handle, blocks, kernel.threads, kernel.dynamic_shared_bytes, stream,
        (ctypes.c_void_p * len(places))(*places), f"`{kernel.name}`",
    )  # fmt: skip


def _passed(annotation: str) -> Any:
    """The C type of a parameter."""
    return ctypes.c_void_p if annotation.startswith("*") else CTYPES[annotation]


def synchronize() -> None:
    _checked(_driver().cuCtxSynchronize())


# ---------------------------------------------------------------- a module on NumPy arrays


def run_module(
    module: TileModule,
    kernels: Mapping[str, Assembled],
    tensors: Mapping[str, np.ndarray[Any, Any]],
    scalars: Mapping[str, int | float | bool],
) -> dict[str, np.ndarray[Any, Any]]:
    """Run every program of a module on the device on copies of NumPy arrays; outputs and inouts by name.

    `kernels` by name, as `assemble` gives them. Copies are packed and aligned, so sizes alone choose the variant.
    """
    extents = bind_extents(module, tensors, scalars)
    names = {**scalars, **extents}
    with device(), _Copies() as copies:
        for program in module.programs:
            given = {
                p.name: copies.tensor(p, tensors, tuple(integer(x, names) for x in p.shape))
                for p in program.params
            }
            kernel = _chosen(kernels, program, extents, given)
            launch(
                kernel,
                given,
                [scalars[s.name] for s in program.scalars],
                [extents[e] for e in program.extents],
            )
        synchronize()
        scratch = {p.name for p in module.scratch}
        written = {p.name for q in module.programs for p in q.params if p.mode != "in"} - scratch
        return {name: copies.back(name) for name in written}


def _chosen(
    kernels: Mapping[str, Assembled],
    program: TileProgram,
    extents: Mapping[str, int],
    tensors: Mapping[str, DeviceTensor],
) -> Assembled:
    """The first kernel of a program that sizes and strides allow."""
    dtypes = {p.name: p.dtype for p in program.params}

    def wide(name: str) -> bool:
        *outer, last = tensors[name].strides
        return last == 1 and all(s * dtypes[name].bytes % 16 == 0 for s in outer)

    able = (k for k in kernels.values() if k.program == program.name)
    return next(
        k
        for k in able
        if all(extents[e] % n == 0 for e, n in k.multiples.items())
        and all(extents[e] <= n for e, n in k.at_most.items())
        and all(wide(t) for t in k.wide)
        and all(can_be_mapped(tensors[t].shape, tensors[t].strides) for t, _ in k.maps)
    )


class _Copies:
    """Device copies of host arrays, freed at the end."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[int, np.ndarray[Any, Any]]] = {}

    def __enter__(self) -> _Copies:
        return self

    def __exit__(self, *_: object) -> None:
        for address, _host in self.held.values():
            _checked(_driver().cuMemFree(address))

    def tensor(
        self, p: Param, tensors: Mapping[str, np.ndarray[Any, Any]], shape: tuple[int, ...]
    ) -> DeviceTensor:
        if p.name not in self.held:
            host = np.array(tensors[p.name]) if p.name in tensors else np.zeros(shape, NUMPY[p.dtype])
            host = np.ascontiguousarray(host).reshape(shape)
            address = int(_checked(_driver().cuMemAlloc(max(host.nbytes, 1))))
            if host.nbytes:
                _checked(_driver().cuMemcpyHtoD(address, host.ctypes.data, host.nbytes))
            self.held[p.name] = (address, host)
        return DeviceTensor(self.held[p.name][0], packed_strides(shape), shape)

    def back(self, name: str) -> np.ndarray[Any, Any]:
        address, host = self.held[name]
        if host.nbytes:
            _checked(_driver().cuMemcpyDtoH(host.ctypes.data, address, host.nbytes))
        return host
