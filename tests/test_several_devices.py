"""Several CUDA devices and several threads in one process: what each device loads and launches, and when."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import tileloom as tl
from tileloom.compiler.target import SM_80, SM_90A
from tileloom.execution import CannotRun

torch: Any = pytest.importorskip("torch")

from fake_cuda import CONTEXT, FakeCuda, Launched, install  # noqa: E402

from tileloom.runtime import driver, native_call  # noqa: E402

if native_call._exchange(torch) is None:
    pytest.skip("torch has no C exchange API", allow_module_level=True)

ADD = """
kernel add(x: f32[N], y: f32[N]) -> z: f32[N] {
    example N = 100
    z[i] = x[i] + y[i]
}
"""
PRODUCT = """
kernel product(a: bf16[M, K], b: bf16[K, N]) -> c: bf16[M, N] {
    example M = 256, K = 128, N = 256
    c[m, n] = sum[k](a[m, k] * b[k, n])
}
"""


def kernel(text: str, name: str, target: str = "cuda") -> Any:
    return tl.compile(tl.parse(text)[name], target=target)


def tensors(fake: FakeCuda, number: int, *shapes: tuple[int, ...], dtype: Any = None) -> list[Any]:
    return [fake.place(torch.ones(s, dtype=dtype or torch.float32), number) for s in shapes]


def contexts(launches: list[Launched]) -> list[int]:
    return [x.context - CONTEXT for x in launches]


def test_each_device_has_its_module_its_context_and_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, add = install(monkeypatch, SM_80, SM_80), kernel(ADD, "add")
    fake.stream = 5
    given = [tensors(fake, number, (100,), (100,)) for number in (0, 1)]
    order = [0, 1, 1, 0, 0, 1, 0, 1, 1]
    for number in order:
        add(*given[number])
    assert contexts(fake.launches) == order
    assert [x.stream for x in fake.launches] == [5 + 1000 * n for n in order]
    assert [x.address(0) for x in fake.launches] == [given[n][0].data_ptr() for n in order]
    assert [c - CONTEXT for _, c in fake.modules] == [0, 1]
    assert fake.stack == [CONTEXT]
    assert len(add._native) == 2


def test_a_native_function_is_for_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, add = install(monkeypatch, SM_80, SM_80), kernel(ADD, "add")
    first, second = (tensors(fake, number, (100,), (100,)) for number in (0, 1))
    for _ in range(2):
        add(*first)
    (native,) = add._native
    assert native(tuple(first), {}, None) is not NotImplemented
    assert native(tuple(second), {}, None) is NotImplemented
    fake.context = CONTEXT + 1  # as torch.cuda.set_device(1) does
    assert native(tuple(first), {}, None) is NotImplemented
    add(*first)
    assert contexts(fake.launches[-1:]) == [0]
    assert fake.stack == [CONTEXT + 1]


def test_arrays_of_two_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, add = install(monkeypatch, SM_80, SM_80), kernel(ADD, "add")
    ((x,), (y,)) = (tensors(fake, number, (100,)) for number in (0, 1))
    with pytest.raises(ValueError, match="`x` on device 0, `y` on device 1"):
        add(x, y)
    with pytest.raises(ValueError, match="`z` on device 1"):
        add(x, x.clone(), out=y)
    assert fake.launches == []


def test_grids_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Persistent blocks: as many as the device that runs them holds; the second has one multiprocessor less."""
    fake, product = install(monkeypatch, SM_90A, SM_90A), kernel(PRODUCT, "product")
    for number in (0, 1):
        product(*tensors(fake, number, (8192, 64), (64, 8192), dtype=torch.bfloat16))
    first, second = fake.launches
    assert contexts([first, second]) == [0, 1]
    assert first.kernel == second.kernel
    assert (first.blocks % 132, second.blocks % 131) == (0, 0)
    assert first.blocks // 132 == second.blocks // 131


def test_each_architecture_has_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, product = install(monkeypatch, SM_90A, SM_80), kernel(PRODUCT, "product")
    for number in (0, 1, 0, 1, 1):
        product(*tensors(fake, number, (256, 128), (128, 256), dtype=torch.bfloat16))
    assert contexts(fake.launches) == [0, 1, 0, 1, 1]
    wgmma, mma = ("wgmma" in source for source, _ in fake.modules)
    assert (wgmma, mma) == (True, False)
    assert fake.encoded > 0
    assert {len(x.parameters) for x in fake.launches if x.context > CONTEXT} == {2 * 3 + 3 * 1 + 3}


def test_code_of_one_architecture_is_refused_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, SM_90A, SM_80)
    product = kernel(PRODUCT, "product", "cuda:sm_90a")
    product(*tensors(fake, 0, (256, 128), (128, 256), dtype=torch.bfloat16))
    with pytest.raises(CannotRun, match=r"device 1 is cuda:sm_80, so code for cuda:sm_90a can be"):
        product(*tensors(fake, 1, (256, 128), (128, 256), dtype=torch.bfloat16))
    product(*tensors(fake, 0, (256, 128), (128, 256), dtype=torch.bfloat16))
    assert contexts(fake.launches) == [0, 0]
    older = kernel(PRODUCT, "product", "cuda:sm_80")
    for number in (0, 1):
        older(*tensors(fake, number, (256, 128), (128, 256), dtype=torch.bfloat16))
    assert contexts(fake.launches) == [0, 0, 0, 1]


def test_a_schedule_is_for_its_target_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, SM_90A, SM_80)
    add = tl.compile(
        tl.parse(ADD)["add"], target="cuda", schedule="schedule s for add on cuda:sm_90a {\n  tile i by 64\n}"
    )
    add(*tensors(fake, 0, (100,), (100,)))
    with pytest.raises(ValueError, match="`s` is for cuda:sm_90a, the target is cuda:sm_80"):
        add(*tensors(fake, 1, (100,), (100,)))


def test_threads_that_call_at_once_load_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """First calls too: each thread on its device, in its own current context."""
    fake, add = install(monkeypatch, SM_80, SM_80), kernel(ADD, "add")
    given = [tensors(fake, n % 2, (101 + 2 * n,), (101 + 2 * n,)) for n in range(6)]
    start, wrong = threading.Barrier(len(given)), list[Any]()

    def work(number: int) -> None:
        start.wait()
        for _ in range(20):
            try:
                add(*given[number])
            except Exception as fault:
                wrong.append(fault)
        if fake.stack != [CONTEXT]:
            wrong.append(fake.stack)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(given))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    device_of = {t.data_ptr(): n % 2 for n, several in enumerate(given) for t in several}
    assert all(contexts([x]) == [device_of[x.address(0)]] for x in fake.launches)
    assert len(fake.launches) == 20 * len(given)
    assert sorted(c - CONTEXT for _, c in fake.modules) == [0, 1]


def test_a_device_that_the_driver_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SM_80, SM_90A)
    assert [driver.present(n) for n in range(3)] == [SM_80, SM_90A, None]
