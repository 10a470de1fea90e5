"""Calls on a device through the native function, on a device that is not there: what it launches, gives and lets pass."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.target import SM_80

pytest.importorskip("numba_cuda")
torch: Any = pytest.importorskip("torch")

from fake_cuda import CONTEXT, FakeCuda, Launched, Loaded, install  # noqa: E402

from tileloom.runtime import driver, native_call, tensor_maps  # noqa: E402

if native_call._exchange(torch) is None:
    pytest.skip("torch has no C exchange API", allow_module_level=True)

ADD = """
kernel add<T: f32 | f64 | bf16>(x: T[N], y: T[N]) -> z: T[N] {
    example N = 100
    z[i] = x[i] + y[i]
}
"""
SCALED = """
kernel scaled(x: f32[M, N], by: f32, shift: i32) -> (y: f32[M, N], s: f32[M]) {
    example M = 4, N = 8, by = 2.0, shift = 1
    y[m, n] = x[m, n] * by + f32(shift)
    s[m] = sum[n](x[m, n])
}
"""
TOTAL = """
kernel total(x: f32[M, N]) -> t: f32 {
    example M = 4, N = 8
    t = sum[m, n](x[m, n])
}
"""
UPDATED = """
kernel updated(x: inout f32[N], y: f32[N]) {
    example N = 100
    x[i] = x[i] + y[i]
}
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch, SM_80)


def kernel(text: str, name: str) -> Any:
    return tl.compile(tl.parse(text)[name], target="cuda")


def native_of(compiled: Any, *given: Any, **named: Any) -> Any:
    """The native function that a second call like this one makes."""
    for _ in range(2):
        compiled(*given, **named)
    return compiled._native[0]


def adds(launched: Launched) -> None:
    """What `add` in f32 does, on the host's memory."""
    (count,) = np.frombuffer(launched.parameters[6], np.int64)
    x, y, z = (
        np.ctypeslib.as_array((ctypes.c_float * count).from_address(launched.address(i))) for i in (0, 2, 4)
    )
    z[:] = x + y


def pair(size: int = 100) -> tuple[Any, Any]:
    return torch.rand(size), torch.rand(size)


# ---------------------------------------------------------------- what is launched and given


def test_launches_are_those_of_a_checked_call(fake: FakeCuda) -> None:
    add, (x, y), z = kernel(ADD, "add"), pair(), torch.empty(100)
    call = native_of(add, x, y, out=z)
    assert call((x, y), {}, z) is z
    first, second, third = fake.launches
    assert first == second == third
    assert [third.address(i) for i in (0, 2, 4)] == [t.data_ptr() for t in (x, y, z)]


def test_each_call_has_its_own_addresses_and_results(fake: FakeCuda) -> None:
    add, fake.run = kernel(ADD, "add"), adds
    native_of(add, *pair())
    made = [(x, y, add(x, y)) for x, y in (pair() for _ in range(5))]
    assert len({z.data_ptr() for *_, z in made}) == 5
    for x, y, z in made:
        assert torch.equal(z, x + y)


def test_arguments_by_name_in_any_order(fake: FakeCuda) -> None:
    add, (x, y), fake.run = kernel(ADD, "add"), pair(), adds
    call = native_of(add, x, y=y)
    assert torch.equal(call((x,), {"y": y}, None), x + y)
    assert call((), {"y": y, "x": x}, None) is NotImplemented
    assert call((x,), {"z": y}, None) is NotImplemented
    both = native_of(add, y=x, x=y)
    assert torch.equal(both((), {"x": y, "y": x}, None), x + y)


def test_several_results_and_numbers(fake: FakeCuda) -> None:
    scaled, x = kernel(SCALED, "scaled"), torch.rand(4, 8)
    call = native_of(scaled, x, 2.0, 3)
    made = call((x, 2.0, 3), {}, None)
    assert [tuple(t.shape) for t in made] == [(4, 8), (4,)]
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in made)
    given = torch.empty(4, 8), torch.empty(4)
    into = native_of(scaled, x, 2.0, 3, out=given)
    assert into((x, 2.0, 3), {}, given) is given
    assert into((x, 2.0, 3), {}, [*given]) is NotImplemented
    assert into((x, 2.0, 3), {}, None) is NotImplemented
    assert into((x, 2.0, 3), {}, given[0]) is NotImplemented
    assert call((x, 2.0, 3), {}, given) is NotImplemented


def test_results_without_axes(fake: FakeCuda) -> None:
    total, x = kernel(TOTAL, "total"), torch.rand(4, 8)
    assert total(x).shape == ()
    made = native_of(total, x)((x,), {}, None)
    assert made.shape == ()
    assert made.dtype == torch.float32
    assert made.data_ptr() in (fake.launches[-1].address(i) for i in range(len(fake.launches[-1].parameters)))


def test_parameters_updated_in_place(fake: FakeCuda) -> None:
    updated, (x, y) = kernel(UPDATED, "updated"), pair()
    call = native_of(updated, x, y)
    assert call((x, y), {}, None) is None
    assert fake.launches[-1].address(0) == x.data_ptr()
    assert call((x, x), {}, None) is NotImplemented
    with pytest.raises(ValueError, match="shares memory"):
        updated(x, x)


def test_parameters_of_modules(fake: FakeCuda) -> None:
    add, fake.run = kernel(ADD, "add"), adds
    x, y = torch.nn.Parameter(torch.rand(100)), torch.rand(100)
    call = native_of(add, x, y)
    made = call((x, y), {}, None)
    assert type(made) is torch.Tensor
    assert torch.equal(made, x.detach() + y)
    assert call((x.detach(), y), {}, None) is NotImplemented


# ---------------------------------------------------------------- what it lets pass


def odd_ones(x: Any) -> dict[str, Any]:
    class Own(torch.Tensor):  # type: ignore[misc]
        pass

    longer = torch.rand(300)
    return {
        "shape": longer[:99],
        "strides": longer[:200:2],
        "type": x.double(),
        "bits": x.to(torch.bfloat16),
        "rank": x[None],
        "alignment": longer[1:101],
        "to be negated": torch._neg_view(x),
        "subclass": x.as_subclass(Own),
        "array": x.numpy(),
        "number": 1.0,
        "nothing": None,
    }


@pytest.mark.parametrize("kind", odd_ones(torch.rand(100)))
@pytest.mark.parametrize("place", [0, 1, 2])
def test_other_arguments_are_let_pass(fake: FakeCuda, kind: str, place: int) -> None:
    add, given = kernel(ADD, "add"), [*pair(), torch.empty(100)]
    call = native_of(add, given[0], given[1], out=given[2])
    count = len(fake.launches)
    given[place] = odd_ones(given[place])[kind]
    x, y, z = given
    assert call((x, y), {}, z) is NotImplemented
    assert len(fake.launches) == count


@pytest.mark.parametrize(
    ("by", "shift"), [(2.5, 0), (0.0, 1), (-0.0, 0), (0, 0), (np.float32(0), 0), (0.0, False), (0.0, 0.0)]
)
def test_other_numbers_are_let_pass(fake: FakeCuda, by: Any, shift: Any) -> None:
    scaled, x = kernel(SCALED, "scaled"), torch.rand(4, 8)
    call = native_of(scaled, x, 0.0, 0)
    assert call((x, 0.0, 0), {}, None) is not NotImplemented
    assert call((x, by, shift), {}, None) is NotImplemented


def test_the_sign_of_zero_reaches_the_kernel(fake: FakeCuda) -> None:
    scaled, x = kernel(SCALED, "scaled"), torch.rand(4, 8)
    sent = []
    for by in (0.0, 0.0, 0.0, -0.0, -0.0, -0.0, 0.0):
        fake.launches.clear()
        scaled(x, by, 0)
        sent.append(next(p for launch in fake.launches for p in launch.parameters if len(p) == 4))
    plus, minus = bytes(4), b"\0\0\0\x80"
    assert sent == [plus] * 3 + [minus] * 3 + [plus]


def test_counts_of_arguments(fake: FakeCuda) -> None:
    add, (x, y) = kernel(ADD, "add"), pair()
    call = native_of(add, x, y)
    for given in [(), (x,), (x, y, x)]:
        assert call(given, {}, None) is NotImplemented
    with pytest.raises(TypeError, match="takes 2 arguments"):
        add(x, y, x)


@pytest.mark.parametrize("shift", [0, 1, 99, 100, -99, -100])
def test_memory_that_is_written_and_shared(fake: FakeCuda, shift: int) -> None:
    """Alike in alignment, so addresses alone decide."""
    add, pool, y = kernel(ADD, "add"), torch.rand(4000), torch.rand(100)
    x = pool[2000:2100]
    native_of(add, x, y, out=pool[:100])
    for factor in (4,):
        out = pool[2000 + factor * shift : 2100 + factor * shift]
        (native,) = add._native
        if abs(factor * shift) >= 100:
            assert native((x, y), {}, out) is out
        else:
            assert native((x, y), {}, out) is NotImplemented
            with pytest.raises(ValueError, match="out for `z` shares memory with `x`"):
                add(x, y, out=out)


def test_another_context_is_left_to_the_checks(fake: FakeCuda) -> None:
    add, (x, y) = kernel(ADD, "add"), pair()
    call = native_of(add, x, y)
    fake.context = CONTEXT + 1
    count = len(fake.launches)
    assert call((x, y), {}, None) is NotImplemented
    assert len(fake.launches) == count
    add(x, y)
    assert len(fake.launches) == count + 1


def test_several_shapes_each_have_their_own(fake: FakeCuda) -> None:
    add, fake.run = kernel(ADD, "add"), adds
    for _ in range(3):
        for size in range(100, 112):
            x, y = pair(size)
            assert torch.equal(add(x, y), x + y)
    assert len(add._native) == 8


def test_what_torch_does_not_describe_is_called_by_python(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise BufferError("no DLPack")

    monkeypatch.setattr(native_call._Tables, "record", refuse)
    add, (x, y), fake.run = kernel(ADD, "add"), pair(), adds
    for _ in range(3):
        assert torch.equal(add(x, y), x + y)
    assert add._native == ()


def test_a_remark_says_why_calls_go_through_python(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled, x = kernel(SCALED, "scaled"), torch.rand(4, 8)

    def told() -> list[str]:
        facts = scaled.explain(M=4, N=8).facts
        return [r.message for r in facts.remarks if r.name == "native-call"]

    for _ in range(3):
        scaled(x, 2.0, 3)
    assert told() == []
    for shift in (1, 2):
        for _ in range(3):
            scaled(x, np.float32(2), shift)
    (message,) = told()
    assert message.startswith("scaled: calls go through Python, which takes 5 µs longer: numpy.float32 among")
    monkeypatch.setattr(native_call, "_exchange", lambda torch: None)
    for _ in range(3):
        scaled(x, 5.0, 3)
    assert any("has no C exchange API of DLPack" in message for message in told())


# ---------------------------------------------------------------- streams, threads, memory, errors


def test_the_current_stream_of_each_call(fake: FakeCuda) -> None:
    add, (x, y) = kernel(ADD, "add"), pair()
    call = native_of(add, x, y)
    for stream in (5, 9, 0, 9):
        fake.stream = stream
        call((x, y), {}, None)
        assert (fake.launches[-1].stream or 0) == stream


def test_threads_do_not_mix_their_calls(fake: FakeCuda) -> None:
    fake.native_launch, add, wrong = first_element_added(), kernel(ADD, "add"), []
    native_of(add, *pair())

    def work() -> None:
        for _ in range(300):
            x, y = pair()
            if add(x, y)[0] != x[0] + y[0]:
                wrong.append(1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    sys.setswitchinterval(interval)
    assert not wrong
    assert len(fake.launches) == 2  # those before the native function; all others came by it


@cache
def first_element_added() -> int:
    """A launch by native code, as the driver's: no other thread runs meanwhile. It adds the first elements."""
    from llvmlite import binding, ir

    word, real = ir.IntType(64), ir.FloatType()
    module = ir.Module("launch")
    function = ir.Function(module, ir.FunctionType(ir.IntType(32), [word] * 4), "launch")
    b = ir.IRBuilder(function.append_basic_block())

    def element(place: int) -> Any:
        slot = b.add(function.args[2], ir.Constant(word, 8 * place))
        address = b.load(b.inttoptr(b.load(b.inttoptr(slot, word.as_pointer())), word.as_pointer()))
        return b.inttoptr(address, real.as_pointer())

    b.store(b.fadd(b.load(element(0)), b.load(element(2))), element(4))
    b.ret(ir.Constant(ir.IntType(32), 0))
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    ENGINES.append(engine)
    return int(engine.get_function_address("launch"))


ENGINES: list[Any] = []


def test_nothing_is_allocated_for_given_results(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a call can be captured into a graph."""
    add, (x, y), z = kernel(ADD, "add"), pair(), torch.empty(100)
    call = native_of(add, x, y, out=z)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("allocated")

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, refuse)
    assert call((x, y), {}, z) is z


def test_no_argument_is_kept_and_no_result(fake: FakeCuda) -> None:
    add, (x, y) = kernel(ADD, "add"), pair()
    call = native_of(add, x, y)
    gc.collect()  # what earlier tests left
    counts = [sys.getrefcount(t) for t in (x, y, None, False, NotImplemented, torch.Tensor)]
    for _ in range(1000):
        gone = weakref.ref(call((x, y), {}, None))
        assert gone() is None
        call((x, 1), {}, None)
    fake.launches.clear()
    gc.collect()
    assert [sys.getrefcount(t) for t in (x, y)] == counts[:2]
    after = [sys.getrefcount(t) for t in (None, False, NotImplemented, torch.Tensor)]
    assert all(abs(a - b) < 100 for a, b in zip(after, counts[2:], strict=True))
    gone = weakref.ref(x)
    del x
    add._device_ready.clear()
    gc.collect()
    assert gone() is None


def test_the_function_goes_with_its_kernel(fake: FakeCuda) -> None:
    add = kernel(ADD, "add")
    tables = weakref.ref(native_of(add, *pair()).__self__[1])
    assert tables() is not None
    add._native = ()
    add._device_ready.clear()
    gc.collect()
    assert tables() is None


def test_the_driver_refuses(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    add, (x, y) = kernel(ADD, "add"), pair()
    call = native_of(add, x, y)
    fake.answer = 719
    with pytest.raises(RuntimeError, match=r"launch of `add` \(N = 100; 1 blocks.*: told by the driver"):
        call((x, y), {}, None)


def test_no_memory_for_the_result(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(like: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "empty_like", refuse)
    add, (x, y) = kernel(ADD, "add"), pair()
    call = native_of_without_results(add, x, y)
    with pytest.raises(MemoryError):
        call((x, y), {}, None)


def native_of_without_results(compiled: Any, *given: Any) -> Any:
    return compiled._device_kernel(given, {}).native(given, {}, None)


def test_threads_that_come_first_at_the_same_time(fake: FakeCuda) -> None:
    """Each may describe the native function to Python for itself; no description may go while a function has it."""
    kernels, x = [kernel(ADD, "add") for _ in range(8)], torch.ones(100)
    for add in kernels:
        add(x, x)
    native_call._method.cache_clear()
    begin, failed = threading.Barrier(len(kernels)), list[BaseException]()

    def calls(add: Any) -> None:
        try:
            begin.wait()
            for _ in range(200):
                add(x, x)
        except BaseException as reason:
            failed.append(reason)

    threads = [threading.Thread(target=calls, args=(add,)) for add in kernels]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failed == []
    for add in kernels:
        (native,) = add._native
        assert any(isinstance(held, native_call._Method) for held in native.__self__)


# ---------------------------------------------------------------- tensor maps


def test_maps_are_encoded_where_the_address_changes(fake: FakeCuda) -> None:
    slot, unused = tensor_maps.MapSlot((4, 64), (64, 1), (4, 64)), torch.rand(4, 64)
    pointers = (ctypes.c_void_p * 1)(slot.place)
    shape = driver.LaunchShape.of(1, 128, 0)
    launch: Any = SimpleNamespace(
        function=ctypes.c_void_p(1), shape=shape, pointers=pointers, slots=((slot, 0),), what="`mapped`"
    )
    fake.kernels.append(Loaded("mapped", ("map",), CONTEXT))
    settled = native_call.Settled(
        values=(unused,), names=(), outs=0, out_is_tuple=False, like=0, makers=(), results=0,
        launches=(launch,), numbering=(0,), spans={0: (0, 1024)}, written=frozenset(),
    )  # fmt: skip
    call = native_call.native_call(settled, driver.native_driver(0, ["`mapped`"]))
    x, y = torch.rand(4, 64), torch.rand(4, 64)
    for tensor, encoded in [(x, 1), (x, 1), (y, 2), (y, 2), (x, 3)]:
        assert call((tensor,), {}, None) is None
        (told,) = fake.launches[-1].parameters
        assert int.from_bytes(told[:8], "little") == tensor.data_ptr()
        assert int.from_bytes(told[8:], "little") == 2
        assert fake.encoded == encoded
