"""The call path: binding, refusals, array kinds, memory, threads; and measuring."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from ctypes import CFUNCTYPE, c_int64, c_void_p, pythonapi
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import njit
from numba.core.compiler_lock import global_compiler_lock

from tileloom.compiler.codegen import cpu
from tileloom.compiler.elaborate import elaborate
from tileloom.compiler.tile_text import parse_module
from tileloom.dsl.load import parse
from tileloom.runtime import bench, forks, kernels, memory, threads, waiting
from tileloom.runtime.cache import Store
from tileloom.runtime.intrinsics.queue import FIRST, LENGTH
from tileloom.runtime.intrinsics.tasks import take_first, take_next
from tileloom.runtime.launch import Kernel

BLEND = """
kernel blend(x: f32[M, N], w: f32[N], scale: f32, times: i32, on: bool) -> (y: f32[M, N], total: f32[M]) {
    require times > 0
    y[m, n] = where(on, scale * x[m, n] + w[n] * f32(times), 0.0)
    total[m] = sum[n](y[m, n])
}
"""
BLEND_TILES = """module blend {
    scratch z: f32[M, N]
    tile fill_z(x: f32[M, N], w: f32[N], z: out f32[M, N], scale: f32, times: i32) {
        extents M, N
        for m in M by 8, n in N by 64 parallel {
            store z[m, n] = scale * load x[m, n] + load w[n] * f32(times)
        }
    }
    tile finish(z: f32[M, N], y: out f32[M, N], total: out f32[M], on: bool) {
        extents M, N
        for m in M by 8 parallel {
            for n in N by 64 carry (a: f32[m] = fill(0.0)) {
                v: f32[m, n] = where(on, load z[m, n], 0.0)
                store y[m, n] = v
                yield a + sum[n](v)
            }
            store total[m] = a
        }
    }
}"""


def kernel(text: str, tiles: str) -> Kernel:
    program = parse(text)
    (name,) = (k for k in ("blend", "outer", "half", "bump") if f"kernel {k}" in text)
    module = parse_module(tiles)
    return Kernel(elaborate(program[name]), module, kernels.build(cpu.generate(module)))


@pytest.fixture(scope="module")
def blend() -> Kernel:
    return kernel(BLEND, BLEND_TILES)


RNG = np.random.default_rng(3)
X, W = RNG.standard_normal((21, 70)).astype(np.float32), RNG.standard_normal(70).astype(np.float32)


def wanted(x: np.ndarray, w: np.ndarray, scale: float, times: int) -> np.ndarray:
    return np.float32(scale) * x + w * np.float32(times)


def test_arguments_by_position_and_by_name(blend: Kernel) -> None:
    y, total = blend(X, W, 0.5, 3, True)
    np.testing.assert_allclose(y, wanted(X, W, 0.5, 3), rtol=1e-6)
    np.testing.assert_allclose(total, y.sum(1), rtol=1e-5, atol=1e-5)
    y2, total2 = blend(X, on=np.True_, times=np.int64(3), scale=np.float64(0.5), w=W)
    np.testing.assert_array_equal(y, y2)
    np.testing.assert_array_equal(total, total2)


def test_out_is_written_and_returned(blend: Kernel) -> None:
    y, total = np.empty_like(X), np.empty((42, 1), np.float32)[::2, 0]
    result = blend(X, W, 0.5, 3, True, out=(y, total))
    assert result[0] is y
    assert result[1] is total
    np.testing.assert_allclose(y, wanted(X, W, 0.5, 3), rtol=1e-6)


class Interface:
    def __init__(self, x: np.ndarray) -> None:
        self.__array_interface__ = x.__array_interface__
        self.x = x


class Capsule:
    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_any_kind_of_array_and_any_strides(blend: Kernel) -> None:
    y, _ = blend(X, W, 0.5, 3, True)
    frozen = X.copy()
    frozen.flags.writeable = False
    task = blend._steps[0][1].__globals__["fill_z_tasks"]
    versions = len(task.signatures)
    for x in (frozen, Interface(X), Capsule(X)):
        np.testing.assert_array_equal(blend(x, W, 0.5, 3, True)[0], y)
    assert len(task.signatures) == versions  # a read-only array needs no version of its own
    for x in (np.asfortranarray(X), np.repeat(X, 2, 1)[:, ::2], X[::-1].copy()[::-1]):
        np.testing.assert_array_equal(blend(x, W, 0.5, 3, True)[0], y)
    flat = np.broadcast_to(np.float32(2), (21, 70))
    np.testing.assert_array_equal(blend(flat, W, 0.5, 3, True)[0], blend(flat.copy(), W, 0.5, 3, True)[0])


def test_torch_in_torch_out(blend: Kernel) -> None:
    torch = pytest.importorskip("torch")
    y, _ = blend(torch.from_numpy(X), torch.from_numpy(W), 0.5, 3, True)
    assert isinstance(y, torch.Tensor)
    np.testing.assert_array_equal(y.numpy(), blend(X, W, 0.5, 3, True)[0])
    half = kernel(HALF, HALF_TILES)
    z = half(torch.from_numpy(X).bfloat16())
    assert z.dtype is torch.bfloat16
    assert torch.equal(z, 2 * torch.from_numpy(X).bfloat16())


@pytest.mark.parametrize("shape", [(0, 70), (21, 0), (0, 0)])
def test_zero_sized_axes(blend: Kernel, shape: tuple[int, int]) -> None:
    y, total = blend(np.empty(shape, np.float32), np.empty(shape[1], np.float32), 0.5, 3, True)
    assert y.shape == shape
    assert (total == 0).all()


def shared() -> np.ndarray:
    return np.zeros((22, 70), np.float32)


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": X[0]}, ValueError, r"`x` has 1 axes, shape \(70,\); it takes 2"),
    (
        {"x": X.astype(np.float64)},
        TypeError,
        r"`x` holds float64; float32 is what it takes.*astype\('float32'\)",
    ),
    ({"x": X.astype(">f4")}, TypeError, r"`x` holds >f4; float32 .* byte order"),
    ({"x": [[1.0]]}, TypeError, "`x` is a list; an array"),
    ({"w": W[:-1]}, ValueError, r"axis 1 of `w` \[N\] is 69.*axis 2 of `x` \[M, N\] is 70"),
    ({"scale": "0.5"}, TypeError, "`scale` is '0.5'; a number"),
    ({"scale": True}, TypeError, "`scale` is True; a number"),
    ({"times": 1.5}, TypeError, "`times` is 1.5; an integer"),
    ({"times": 2**31}, ValueError, "`times` is 2147483648; i32 holds"),
    ({"times": 0}, ValueError, "times > 0"),
    ({"on": 1}, TypeError, "`on` is 1; True or False"),
    ({"skale": 1.0}, TypeError, "no parameter `skale`; did you mean `scale`"),
    ({"out": shared()[:21]}, ValueError, "out holds 1 arrays; it takes 2, for y, total"),
    ({"out": (shared(), np.zeros(21, np.float32))}, ValueError, r"out for `y` has shape \(22, 70\)"),
    ({"out": (shared()[:21], np.zeros(21))}, TypeError, "out for `total` holds float64"),
    ({"out": (X, np.zeros(21, np.float32))}, ValueError, "out for `y` shares memory with `x`"),
    (
        {"out": (np.broadcast_to(np.float32(0), X.shape), np.zeros(21, np.float32))},
        ValueError,
        "out for `y` is read-only",
    ),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSALS)
def test_refusals_name_the_argument(
    blend: Kernel, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    before = X.copy()
    with pytest.raises(error, match=words):
        blend(**{"x": X, "w": W, "scale": 0.5, "times": 3, "on": True, **change})
    np.testing.assert_array_equal(X, before)


def test_refusals_write_nothing(blend: Kernel) -> None:
    y, total = np.full_like(X, 7), np.full(20, 7, np.float32)
    with pytest.raises(ValueError, match="out for `total`"):
        blend(X, W, 0.5, 3, True, out=(y, total))
    store = np.zeros((21, 71), np.float32)
    overlapping = np.lib.stride_tricks.as_strided(store, (21, 70), (4, 4))
    with pytest.raises(ValueError, match="elements that share memory"):
        blend(X, W, 0.5, 3, True, out=(overlapping, np.zeros(21, np.float32)))
    with pytest.raises(ValueError, match="shares memory with out for"):
        blend(X, W, 0.5, 3, True, out=(store[:, :70], store[:, 0]))
    with pytest.raises(TypeError, match="is missing arguments times, on"):
        blend(X, W, 0.5)
    with pytest.raises(TypeError, match="takes 5 arguments"):
        blend(X, W, 0.5, 3, True, 1)
    with pytest.raises(TypeError, match="given twice"):
        blend(X, W, 0.5, 3, True, x=X)
    assert (y == 7).all()
    assert (total == 7).all()
    assert (store == 0).all()


# ---------------------------------------------------------------- other interfaces

OUTER = """
kernel outer(a: f32[M], b: f32[N]) -> c: f32[M, N] { c[m, n] = a[m] * b[n] }
"""
OUTER_TILES = """module outer {
    tile outer(a: f32[M], b: f32[N], c: out f32[M, N]) {
        extents M, N
        static N = 6
        for m in M by 8, n in N by 8 parallel { store c[m, n] = load a[m] * load b[n] }
    }
}"""
HALF = "kernel half(x: bf16[M, N]) -> y: bf16[M, N] { y[m, n] = 2.0 * x[m, n] }"
HALF_TILES = """module half { tile half(x: bf16[M, N], y: out bf16[M, N]) { extents M, N
    for m in M by 8, n in N by 64 parallel { store y[m, n] = 2.0 * load x[m, n] } } }"""
BUMP = "kernel bump(x: inout f32[N], y: f32[N]) { x[n] += y[n] }"
BUMP_TILES = """module bump { tile bump(x: inout f32[N], y: f32[N]) { extents N
    for n in N by 64 parallel { store x[n] += load y[n] } } }"""


def test_sizes_that_cannot_exist_are_refused() -> None:
    wide = parse_module(OUTER_TILES.replace("static N = 6", ""))
    outer = Kernel(elaborate(parse(OUTER)["outer"]), wide, kernels.build(cpu.generate(wide)))
    huge = np.broadcast_to(np.float32(1), (2**40,))
    with pytest.raises(ValueError, match=r"`c` would have shape .* more than 2\^63 - 1 bytes"):
        outer(huge, huge)


def test_a_version_for_other_static_extents_is_refused() -> None:
    outer = kernel(OUTER, OUTER_TILES)
    assert outer(np.ones(3, np.float32), np.ones(6, np.float32)).shape == (3, 6)
    with pytest.raises(ValueError, match="N is 5; this version is compiled for N = 6"):
        outer(np.ones(3, np.float32), np.ones(5, np.float32))


def test_bfloat16_of_ml_dtypes() -> None:
    x = X.astype(ml_dtypes.bfloat16)
    y = kernel(HALF, HALF_TILES)(x)
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(y.view(np.uint16), (2 * x).view(np.uint16))


def test_inout_is_changed_in_place() -> None:
    bump = kernel(BUMP, BUMP_TILES)
    x, y = np.arange(5, dtype=np.float32), np.ones(5, np.float32)
    assert bump(x, y) is None
    np.testing.assert_array_equal(x, [1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="`x` shares memory with `y`"):
        bump(x, x[::-1])
    x.flags.writeable = False
    with pytest.raises(ValueError, match="`x` is read-only"):
        bump(x, y)


# ---------------------------------------------------------------- memory


def test_scratch_is_counted_and_freed(blend: Kernel) -> None:
    with memory.counting() as counter:
        blend(X, W, 0.5, 3, True)
    assert counter.peak_bytes == X.nbytes
    assert counter.now_bytes == 0


def test_workspace_from_the_text_of_a_module(blend: Kernel) -> None:
    extents = {"M": 21, "N": 70}
    tile = 8 * 64 * 4 + 2 * 8 * 4
    one, four = (memory.workspace_bytes(blend.module, extents, n) - X.nbytes for n in (1, 4))
    assert 8 * 64 * 4 <= one <= 2 * tile
    assert four == 4 * one


def test_growth_of_the_process_is_measured() -> None:
    class Cycle:  # garbage that only the collector frees
        def __init__(self) -> None:
            self.me, self.held = self, np.ones(256 << 20, np.uint8)

    def call() -> float:
        gc.collect()
        return float(np.ones(256 << 20, np.uint8)[:: 1 << 12].sum())

    for _ in range(2):
        Cycle()
        growth = memory.measure(call)
        if growth.resident_bytes is None:
            pytest.skip("this system tells no peak of the resident size")
        assert 240 << 20 <= growth.resident_bytes < 320 << 20


# ---------------------------------------------------------------- threads


def test_tasks_are_run_once_each() -> None:
    for tasks in (0, 1, 2, 7, 100, 1001):
        for n in (1, 2, 3, 8):
            runs = np.zeros(tasks, np.int64)

            with threads.thread_limit(n):
                threads.run_tasks(count_runs, tasks, runs)
            assert (runs == 1).all()


@njit(nogil=True)
def count_runs(first, last, queue, runs):  # type: ignore[no-untyped-def]
    first, last = take_first(queue, first, last)
    while first < last:
        for task in range(first, last):
            runs[task] += 1
        first, last = take_next(queue, first, last)


def test_callers_at_once_and_more_threads_than_processors() -> None:
    """Each of many calls runs its own tasks once, whoever helps; workers that come too late find nothing to do."""
    wrong: list[int] = []

    def caller(size: int) -> None:
        for tasks in range(size, size + 200):
            runs = np.zeros(tasks, np.int64)
            threads.run_tasks(count_runs, tasks, runs)
            if not (runs == 1).all():
                wrong.append(tasks)

    with threads.thread_limit(5):
        callers = [threading.Thread(target=caller, args=(1 + 100 * i,)) for i in range(4)]
        for c in callers:
            c.start()
        for c in callers:
            c.join(60)
            assert not c.is_alive()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no way to say where a thread runs")
def test_workers_keep_off_the_processor_of_their_caller() -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one processor alone")
    try:
        for here in sorted(allowed)[:2]:
            os.sched_setaffinity(0, {here})
            os.sched_setaffinity(0, allowed)  # the thread stays for now, and is asked where it is
            with threads.thread_limit(2):
                threads.run_tasks(count_runs, 64, np.zeros(64, np.int64))
            workers = [w for w in threads._crew.waiting if w.kept_off is not None]
            assert workers
            for w in workers:
                assert os.sched_getaffinity(w.native_id) == allowed - {w.kept_off[0]}
        os.sched_setaffinity(0, {here})  # where the caller may run nowhere else, neither may its helpers
        with threads.thread_limit(2):
            threads.run_tasks(count_runs, 64, np.zeros(64, np.int64))
        assert {here} in [os.sched_getaffinity(w.native_id) for w in threads._crew.waiting]
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_failing_task_is_reported() -> None:
    def work(first: int, last: int, queue: np.ndarray) -> None:
        raise MemoryError(first)

    with threads.thread_limit(3), pytest.raises(MemoryError):
        threads.run_tasks(work, 10)
    with pytest.raises(ValueError, match="at least 1"), threads.thread_limit(0):
        pass


@njit(nogil=True)
def fail_in_one(first, last, queue, runs, rows, sums, bad):  # type: ignore[no-untyped-def]
    first, last = take_first(queue, first, last)
    while first < last:
        for task in range(first, last):
            runs[task] = 1
            for row in rows[task : task + 2]:  # views count references to the array
                sums[task] += row.sum()
            if task == bad:
                raise KeyError("task", 7)
        first, last = take_next(queue, first, last)


def test_helpers_get_arguments_of_every_kind_and_report_failures() -> None:
    """Views of an array are counted in memory that the caller frees when it returns, while a helper may still work."""
    rows = np.random.default_rng(1).standard_normal((65, 500))
    for bad in [None] * 300 + [0, 31, 63] * 10:
        runs, sums = np.zeros(64, np.int8), np.zeros(64, np.float32)
        failure = pytest.raises(KeyError, match=r"'task', 7") if bad is not None else nullcontext()
        with threads.thread_limit(3), failure:
            threads.run_tasks(fail_in_one, 64, runs, rows, sums, -1 if bad is None else bad)
        if bad is None:
            assert (runs == 1).all()
            np.testing.assert_allclose(sums, rows[:-1].sum(1) + rows[1:].sum(1), rtol=1e-4, atol=1e-4)


def test_a_call_is_taken_back_from_whoever_does_not_come() -> None:
    """Two helpers without threads: one never begins; the other begins, and ends while the caller sleeps."""
    absent, late = waiting.Mailbox(), waiting.Mailbox()
    absent.stand_by(late.address, 0)
    late.stand_by(0, 0)
    queue = np.zeros(LENGTH, np.int64)
    queue[FIRST] = absent.address
    CFUNCTYPE(None, c_int64)(waiting.give())(int(queue.ctypes.data))
    for box in (absent, late):
        words = box._words[[waiting.STATE, waiting.QUEUE]].tolist()
        assert words == [waiting.GIVEN, int(queue.ctypes.data)]
    late._words[waiting.STATE] = waiting.WORKING
    back = threading.Thread(target=waiting.take_back(), args=(absent.address, 100))
    back.start()
    while late._words[waiting.STATE] != waiting.AWAITED:
        time.sleep(1e-3)
    assert absent._words[waiting.STATE] == waiting.LOOKING
    assert back.is_alive()
    late._words[waiting.STATE] = waiting.LOOKING
    pythonapi.PyThread_release_lock.argtypes = [c_void_p]
    pythonapi.PyThread_release_lock(int(late._words[waiting.CALLER_LOCK]))
    back.join()


class Stop(Exception):
    pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer that interrupts")
def test_an_interrupted_call_leaves_no_helper_behind() -> None:
    """Wherever in a call an exception comes from outside, the helpers stand in the crew afterwards, and none still works."""

    def stop(*_: object) -> None:
        raise Stop

    runs, random = np.zeros(64, np.int64), np.random.default_rng(2)
    before = signal.signal(signal.SIGALRM, stop)
    stops = 0
    try:
        with threads.thread_limit(3):
            threads.run_tasks(count_runs, 64, runs)
            crew = threads._crew
            while stops < 2000:
                try:
                    signal.setitimer(signal.ITIMER_REAL, float(random.uniform(2e-5, 3e-4)))
                    while True:
                        threads.run_tasks(count_runs, 64, runs)
                except Stop:
                    stops += 1
                    assert len(crew.waiting) == crew.count >= 2
                    states = {int(w.mailbox._words[waiting.STATE]) for w in crew.waiting}
                    assert states <= {waiting.LOOKING, waiting.ASLEEP}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_limits_that_overlap_leave_none_behind() -> None:
    first, second = threads.thread_limit(3), threads.thread_limit(2)
    before = threads.threads()
    first.__enter__()
    second.__enter__()
    assert threads.threads() == 2
    first.__exit__(None, None, None)
    assert threads.threads() == 2
    second.__exit__(None, None, None)
    assert threads.threads() == before


FLUSHING = """
import numpy as np, tileloom as tl
from ctypes import CFUNCTYPE, c_int32
from llvmlite import binding
from tileloom.runtime.native_code import linked, _machine
from tileloom.runtime.threads import thread_limit
machine = _machine()
TEXT = '''declare void @llvm.x86.sse.ldmxcsr(ptr)
define void @mode(i32 %v) {
  %p = alloca i32
  store i32 %v, ptr %p
  call void @llvm.x86.sse.ldmxcsr(ptr %p)
  ret void
}'''
engine = linked(machine.emit_object(binding.parse_assembly(TEXT)))
mode = CFUNCTYPE(None, c_int32)(engine.get_function_address("mode"))
PLAIN, FLUSH = 0x1F80, 0x9FC0
k = tl.compile(tl.parse("kernel k(x: f32[M, K], b: f32[K, N]) -> y: f32[M, N] { y[m, n] = sum[k](x[m, k] * b[k, n]) }")["k"])
x, b = np.full((400, 400), 1e-20, np.float32), np.full((400, 400), 1e-23, np.float32)
with thread_limit(1):
    want = k(x, b)
assert (want > 0).all()
with thread_limit(3):
    for now in (FLUSH, PLAIN, FLUSH):
        for _ in range(20):
            mode(now)
            found = k(x, b)
            mode(PLAIN)
            assert (found == (0 if now == FLUSH else want)).all(), now
print("right")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the test sets the mode of x86 processors")
def test_all_threads_of_a_call_flush_and_round_alike() -> None:
    """Helpers that were made while results below the normal range were flushed do so no longer than their callers."""
    done = subprocess.run([sys.executable, "-c", FLUSHING], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("right\n", 0), done.stderr


ENDS = """
import numpy as np, tileloom as tl
from tileloom.runtime.threads import thread_limit
k = tl.compile(tl.parse("kernel k(a: f32[M, K], b: f32[K, N]) -> c: f32[M, N] { c[m, n] = sum[k](a[m, k] * b[k, n]) }")["k"])
a = np.ones((512, 512), np.float32)
with thread_limit(3):
    print(all((k(a, a) == 512).all() for _ in range(20)))
"""


def test_a_process_ends_while_workers_look_for_calls() -> None:
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_first_use_from_many_threads_at_once() -> None:
    fresh = kernel(BLEND, BLEND_TILES)
    results: list[np.ndarray] = []
    workers = [
        threading.Thread(target=lambda: results.append(fresh(X, W, 0.5, 3, True)[0])) for _ in range(8)
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert len(results) == 8
    for r in results:
        np.testing.assert_array_equal(r, results[0])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_call(blend: Kernel) -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork on this system")
    with threads.thread_limit(2):
        y = blend(X, W, 0.5, 3, True)[0]
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=lambda: queue.put(float(blend(X, W, 0.5, 3, True)[0].sum())))
        child.start()
        child.join(60)
    assert child.exitcode == 0
    assert queue.get() == float(y.sum())


class _Slow:
    @forks.cached_property
    def found(self) -> int:
        time.sleep(0.2)
        return 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("what", ["an entry of the cache folder", "an attribute"])
def test_a_forked_child_makes_what_another_thread_was_making(what: str, tmp_path: Path) -> None:
    store, begun = Store(tmp_path), threading.Event()

    def make() -> None:
        if what == "an attribute":
            begun.set()
            assert _Slow().found == 1
            return
        with store.making("group"):
            begun.set()
            time.sleep(0.2)

    thread = threading.Thread(target=make)
    thread.start()
    begun.wait()
    child = multiprocessing.get_context("fork").Process(target=make)
    child.start()
    child.join(30)
    thread.join()
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_until_nothing_is_compiled() -> None:
    held, lock = threading.Event(), forks.ForkedLock()

    def compile_for_a_while() -> None:
        with global_compiler_lock, lock:
            held.set()
            time.sleep(0.2)

    def compile_in_child() -> None:
        with global_compiler_lock, lock:
            pass

    thread = threading.Thread(target=compile_for_a_while)
    thread.start()
    held.wait()
    child = multiprocessing.get_context("fork").Process(target=compile_in_child)
    child.start()
    child.join(60)
    thread.join()
    assert child.exitcode == 0


def test_where_no_thread_can_be_started_the_caller_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_crew", threads._Crew())
    with monkeypatch.context() as m, threads.thread_limit(3):
        m.setattr(threading.Thread, "start", refuse)
        runs = np.zeros(100, np.int64)
        with pytest.warns(RuntimeWarning, match="fewer threads: can't start"):
            threads.run_tasks(count_runs, 100, runs)
        assert (runs == 1).all()
    with threads.thread_limit(3):
        threads.run_tasks(count_runs, 100, runs)
    assert (runs == 2).all()
    assert threads._crew.count > 0


# ---------------------------------------------------------------- measuring


def test_variants_are_timed_in_turn_after_the_check() -> None:
    log: list[str] = []

    def variant(name: str) -> bench.Variant:
        def call() -> np.ndarray:
            log.append(name)
            end = bench.time.perf_counter() + 1.5 * bench.SHORTEST_SAMPLE_S  # one call a sample
            while bench.time.perf_counter() < end:
                pass
            return np.array([1.0, np.nan])

        return bench.Variant(name, call, 0.0)

    rows = bench.compare("case", [variant("a"), variant("b")], [np.array([1.0, np.nan])], rounds=4, flops=2e6)
    assert log[-8:] == ["a", "b"] * 4
    document = json.loads(json.dumps(bench.document(rows, ["bench"])))
    assert document["schema_version"] == bench.SCHEMA_VERSION
    assert document["command"] == ["bench"]
    assert document["versions"]["numba"]
    assert document["conditions"]["order"] == "interleaved"
    unmeasured = bench.circumstances(["check"])
    assert unmeasured["commit"] == document["commit"]
    assert unmeasured["versions"]["python"] == platform.python_version()
    assert {"date", "system"} <= unmeasured["conditions"].keys()
    assert "order" not in unmeasured["conditions"]
    (row, _) = document["rows"]
    assert row["variant"] == "a"
    assert len(row["samples_ms"]) == 4
    assert 1.5e3 * bench.SHORTEST_SAMPLE_S <= row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
    assert row["tflops"] == pytest.approx(2e6 / row["median_ms"] / 1e9)


def test_variants_are_repeated_and_rest_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow one is called less often, where its samples would take longer than 80 ms."""
    now, rests = [0.0], []
    monkeypatch.setattr(bench.time, "sleep", rests.append)
    calls = {"quick": 0, "slow": 0, "slowest": 0}

    def variant(name: str, seconds: float, rest: float) -> bench.Variant:
        def call() -> np.ndarray:
            calls[name] += 1
            now[0] += seconds
            return np.ones(1)

        return bench.Variant(name, call, 0.0, rest)

    variants = [variant("quick", 1.01e-3, 0.1), variant("slow", 3.99e-3, 0.2), variant("slowest", 9e-3, 0.0)]
    with pytest.raises(ValueError, match="case: two variants have one name, of quick, slow, slowest, slow"):
        bench.compare("case", [*variants, variants[1]], [np.ones(1)])
    rows = bench.compare("case", variants, [np.ones(1)], rounds=1, clock=lambda: now[0])
    assert calls == {"quick": 3 + 19, "slow": 3 + 19, "slowest": 3 + 8}
    assert rests == [0.2] * 6
    assert [r.median_ms for r in rows] == pytest.approx([1.01, 3.99, 9])


@pytest.mark.parametrize("wrong", [[1.0, 2.1], [1.0, np.inf], [1.0, np.nan], [1.0]])
def test_a_wrong_result_is_not_timed(wrong: list[float]) -> None:
    calls = []
    variant = bench.Variant("bad", lambda: calls.append(1) or np.array(wrong), 1e-3)
    with pytest.raises(bench.WrongResult, match="case: bad errs by"):
        bench.compare("case", [variant], [np.array([1.0, 2.0])])
    assert len(calls) == 1
