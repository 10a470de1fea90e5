"""Kernels on arrays of the device: torch tensors in place, variants by size and alignment, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tileloom as tl

pytestmark = pytest.mark.gpu
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def kernel(file: str, name: str, **options: Any) -> Any:
    return tl.compile(tl.load(str(EXAMPLES / file))[name], target="cuda", **options)


def island(
    torch: Any, shape: tuple[int, ...], dtype: Any, offset: int = 0, order: tuple[int, ...] | None = None
) -> Any:
    """Random values whose memory lies between NaNs, `offset` elements from alignment, axes in memory in `order`."""
    order = order or tuple(range(len(shape)))
    packed = [shape[i] for i in order]
    size = 1
    for n in packed:
        size *= n
    pool = torch.full((size + 128 + offset,), float("nan"), device="cuda", dtype=dtype)
    inner = pool[64 + offset : 64 + offset + size].view(packed)
    inner.copy_(torch.randn(packed, device="cuda"))
    return inner.permute([order.index(i) for i in range(len(shape))])


def off(got: Any, want: Any) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


SIZES = [
    (128, 128, 64),
    (256, 384, 512),
    (200, 136, 72),
    (129, 257, 65),
    (1, 8, 8),
    (77, 64, 1000),
    (640, 128, 2048),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", ["packed", "shifted", "transposed"])
def test_products(torch: Any, size: tuple[int, int, int], kind: str, layout: str) -> None:
    m, n, k = size
    dtype, offset, order = (
        getattr(torch, kind),
        int(layout == "shifted"),
        (1, 0) if layout == "transposed" else (0, 1),
    )
    a, b = island(torch, (m, k), dtype, offset, order), island(torch, (k, n), dtype, offset, order)
    bias = island(torch, (n,), dtype, offset)
    got = kernel("matmul_gelu.tile", "matmul_gelu")(a, b, bias)
    y = a.double() @ b.double() + bias.double()
    assert got.dtype == dtype
    assert off(got, torch.nn.functional.gelu(y, approximate="tanh")) < (2e-2 if kind != "float32" else 2e-5)


ATTENTIONS = [
    (1, 2, 2, 64, 64, 64), (2, 4, 2, 130, 130, 64), (1, 2, 1, 256, 256, 128), (1, 1, 1, 1, 77, 64), (1, 2, 2, 100, 300, 32),
    (1, 1, 1, 300, 100, 64), (1, 2, 2, 192, 192, 96), (1, 1, 1, 128, 128, 256),
]  # fmt: skip


@pytest.mark.parametrize("size", ATTENTIONS, ids=str)
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("offset", [0, 1])
def test_causal_attention(torch: Any, size: tuple[int, ...], kind: str, offset: int) -> None:
    b, h, g, m, n, d = size
    dtype = getattr(torch, kind)
    q = island(torch, (b, h, m, d), dtype, offset)
    k, v = (island(torch, (b, g, n, d), dtype, offset) for _ in range(2))
    o, lse = kernel("attention.tile", "attention")(q, k, v, scale=d**-0.5)
    wide = [x.double().repeat_interleave(h // g, 1) for x in (k, v)]
    s = q.double() @ wide[0].transpose(-1, -2) * d**-0.5
    hidden = torch.arange(n, device="cuda")[None] > torch.arange(m, device="cuda")[:, None] + n - m
    s = s.masked_fill(hidden, float("-inf"))
    p = torch.softmax(s, -1).nan_to_num(0.0)
    assert off(o, p @ wide[1]) < 2e-2
    want = torch.logsumexp(s, -1)
    assert bool((torch.isinf(lse) == torch.isinf(want)).all())
    seen = ~torch.isinf(want)
    assert float((lse.double() - want)[seen].abs().max()) < 1e-4


@pytest.mark.parametrize("n", [1, 7, 8, 256, 1000, 1024, 5000])
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("offset", [0, 1])
def test_rows(torch: Any, n: int, kind: str, offset: int) -> None:
    x = island(torch, (37, n), getattr(torch, kind), offset)
    tolerance = 1e-2 if kind == "bfloat16" else 1e-5
    assert off(kernel("softmax.tile", "row_softmax")(x), torch.softmax(x.double(), -1)) < tolerance
    y = island(torch, (37, n), getattr(torch, kind), offset)
    total = kernel("vector_add.tile", "vector_add")(x.reshape(-1), y.reshape(-1))
    assert off(total, x.reshape(-1).double() + y.reshape(-1).double()) < tolerance


def test_calls_again_with_other_memory_give_new_results(torch: Any) -> None:
    add = kernel("vector_add.tile", "vector_add")
    for _ in range(3):
        x, y = (torch.randn(1000, device="cuda") for _ in range(2))
        assert torch.equal(add(x, y), x + y)
        assert torch.equal(add(x=x, y=y), x + y)


def test_results_without_axes(torch: Any) -> None:
    total = kernel("reductions.tile", "total")
    for scale in (1.0, 2.0, 3.0):
        x = scale * torch.ones(300, 400, device="cuda")
        got = total(x)
        assert got.shape == ()
        assert float(got) == 120000 * scale


def test_calls_follow_the_current_stream(torch: Any) -> None:
    add = kernel("vector_add.tile", "vector_add")
    x = torch.ones(1 << 20, device="cuda")
    add(x, x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        big = torch.randn(4096, 4096, device="cuda")
        for _ in range(10):
            big = big @ big * 1e-2
        x.fill_(3.0)
        z = add(x, x)
    stream.synchronize()
    assert bool((z == 6.0).all())


def test_a_cuda_graph_replays_a_call(torch: Any) -> None:
    add = kernel("vector_add.tile", "vector_add")
    x, y = (torch.randn(1000, device="cuda") for _ in range(2))
    add(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = add(x, y)
    x.copy_(torch.randn(1000, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(z, x + y)


def test_out_is_written_in_place_and_checked(torch: Any) -> None:
    add = kernel("vector_add.tile", "vector_add")
    x, z = torch.randn(64, device="cuda"), torch.zeros(64, device="cuda")
    assert add(x, x, out=z) is z
    assert torch.equal(z, x + x)
    with pytest.raises(ValueError, match="shares memory"):
        add(x, x, out=x)
    with pytest.raises(ValueError, match="out for `z`"):
        add(x, x, out=torch.zeros(65, device="cuda"))
    with pytest.raises(TypeError, match="an array on the CUDA device"):
        add(x, x.cpu().numpy())


def test_other_libraries_arrays(torch: Any) -> None:
    cupy = pytest.importorskip("cupy")
    add = kernel("vector_add.tile", "vector_add")
    x = cupy.arange(100, dtype=cupy.float32)
    got = add(x, x)
    assert type(got) is cupy.ndarray
    assert bool((got == 2 * x).all())
    from numba import cuda

    y = cuda.to_device(x.get())
    assert (add(y, y).copy_to_host() == 2 * x.get()).all()


def test_more_than_two_to_the_31_elements(torch: Any) -> None:
    n = (1 << 31) + 100
    x = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    x[-1] = 3.0
    z = kernel("vector_add.tile", "vector_add")(x, x)
    assert float(z[-1]) == 6.0
    assert float(z[:-1].abs().max()) == 0.0
