"""Device arrays that a call must refuse in words, before anything is launched; the device is not there (`fake_cuda`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.target import SM_80

pytest.importorskip("numba_cuda")
torch: Any = pytest.importorskip("torch")

from fake_cuda import FakeCuda, install  # noqa: E402

from tileloom.runtime import native_call  # noqa: E402

if native_call._exchange(torch) is None:
    pytest.skip("torch has no C exchange API", allow_module_level=True)

ADD = """
kernel add(x: f32[N], y: f32[N]) -> z: f32[N] {
    example N = 100
    z[i] = x[i] + y[i]
}
"""
UPDATED = """
kernel updated(x: inout f32[N], y: f32[N]) {
    example N = 100
    x[i] = x[i] + y[i]
}
"""
NAMES = """
kernel names(self: f32[N], other: f32[N]) -> z: f32[N] {
    example N = 100
    z[i] = self[i] + other[i]
}
"""


class Plain:
    """An array of some other library, of which nothing but its interface is known."""

    def __init__(self, address: int, shape: tuple[int, ...] = (8,), **facts: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (address, facts.pop("readonly", False)),
            "version": 3,
            **facts,
        }


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch, SM_80)


def kernel(text: str) -> Any:
    program = tl.parse(text)
    (name,) = program.kernels
    return tl.compile(program[name], target="cuda")


def ones(*shape: int) -> Any:
    return torch.ones(*shape)


@pytest.mark.parametrize("out", [(), []])
def test_results_are_not_lost(fake: FakeCuda, out: Any) -> None:
    add = kernel(ADD)
    for _ in range(3):
        with pytest.raises(ValueError, match="add: out holds no array"):
            add(ones(100), ones(100), out=out)
        add(ones(100), ones(100))
    assert len(fake.launches) == 3
    kernel(UPDATED)(ones(100), ones(100), out=out)  # which has none


@pytest.mark.parametrize("how", ["out", "inout"])
def test_elements_that_share_memory_are_not_written(fake: FakeCuda, how: str) -> None:
    spread, y = ones(1).expand(100), ones(100)
    words = r"elements that share memory \(strides \(0,\)\)"
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            kernel(ADD)(y, y, out=spread) if how == "out" else kernel(UPDATED)(spread, y)
    assert fake.launches == []


@pytest.mark.parametrize(
    "facts",
    [{"address": 4098}, {"address": 4096, "strides": (6,)}],
    ids=["address", "stride"],
)
def test_elements_lie_at_multiples_of_their_size(fake: FakeCuda, facts: dict[str, Any]) -> None:
    """Offsets count elements."""
    with pytest.raises(ValueError, match=r"add: `x` is not aligned to its elements \(address"):
        kernel(ADD)(Plain(**facts), Plain(8192))
    with pytest.raises(ValueError, match=r"add: out for `z` is not aligned to its elements"):
        kernel(ADD)(Plain(8192), Plain(8192), out=Plain(**facts))
    assert fake.launches == []


@pytest.mark.parametrize(
    "facts",
    [
        {"typestr": "<q9"},
        {"strides": (4, 4)},
        {"typestr": None},
        {"shape": None},
        {"data": None},
        {"data": 4096},
    ],
    ids=["type", "strides", "no type", "no shape", "no data", "data"],
)
def test_an_interface_that_cannot_be_read(fake: FakeCuda, facts: dict[str, Any]) -> None:
    x = Plain(4096)
    x.__cuda_array_interface__ = {
        k: v for k, v in {**x.__cuda_array_interface__, **facts}.items() if v is not None
    }
    with pytest.raises(TypeError, match="add: `x` has a __cuda_array_interface__ that cannot be read: "):
        kernel(ADD)(x, Plain(8192))
    assert fake.launches == []


def test_steps_that_are_never_taken_may_be_anything(fake: FakeCuda) -> None:
    kernel(ADD)(Plain(4096, (1,), strides=(6,)), Plain(8192, (1,)), out=Plain(9216, (1,)))
    assert len(fake.launches) == 1


def test_a_read_only_array_after_a_writable_one(fake: FakeCuda) -> None:
    """They differ in nothing else, and the call before is remembered."""
    updated, y = kernel(UPDATED), Plain(8192)
    for _ in range(2):
        updated(Plain(4096), y)
    with pytest.raises(ValueError, match="updated: `x` is updated in place, but the array is read-only"):
        updated(Plain(4096, readonly=True), y)
    assert len(fake.launches) == 2


def test_masked_arrays(fake: FakeCuda) -> None:
    add, y = kernel(ADD), Plain(8192)
    for _ in range(2):
        add(Plain(4096), y, out=Plain(9216))
    with pytest.raises(TypeError, match="add: `x` is a masked array"):
        add(Plain(4096, mask=Plain(12288)), y, out=Plain(9216))


@pytest.mark.parametrize("sparse", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors(fake: FakeCuda, sparse: str) -> None:
    x = getattr(ones(10, 10), sparse)()
    with pytest.raises(TypeError, match="add: `x` is a sparse tensor"):
        kernel(ADD)(x, ones(100))
    with pytest.raises(TypeError, match="add: out for `z` is a sparse tensor"):
        kernel(ADD)(ones(100), ones(100), out=x)


def test_what_is_no_array(fake: FakeCuda) -> None:
    for out in ("z", 3):
        with pytest.raises(TypeError, match=r"add: out for `z` is a (str|int); an array on the CUDA device"):
            kernel(ADD)(ones(100), ones(100), out=out)
    with pytest.raises(TypeError, match="add: out for `z` is a NumPy array in the host's memory"):
        kernel(ADD)(ones(100), ones(100), out=np.ones(100, np.float32))


def test_a_parameter_of_any_name(fake: FakeCuda) -> None:
    kernel(NAMES)(self=ones(100), other=ones(100))
    assert len(fake.launches) == 1
