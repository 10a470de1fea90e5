"""Registers, shared memory and occupancy: the calculator's figures, the estimate from tiles, what a ledger makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import tileloom as tl
from tileloom.__main__ import main
from tileloom.compiler.codegen.resources import fullest
from tileloom.compiler.codegen.resources import live_arrays as arrays
from tileloom.compiler.cost import Cost, predict, rates
from tileloom.compiler.occupancy import Occupancy, Resources, hidden, occupancy, spilled
from tileloom.compiler.target import SM_75, SM_80, SM_90A, CudaTarget

# Each row worked out by hand from the programming guide's table: registers in units of 256 a warp, 1 KiB of each block's
# shared memory kept by the driver from sm_80 on.
FITS = [
    (SM_80, Resources(256, 32, 0), Occupancy(8, 64, 1.0, "threads")),
    (SM_80, Resources(128, 128, 0), Occupancy(4, 16, 0.25, "registers")),
    (SM_80, Resources(128, 40, 48 * 1024), Occupancy(3, 12, 0.1875, "shared memory")),
    (
        SM_90A,
        Resources(128, 41, 0),
        Occupancy(10, 40, 0.625, "registers"),
    ),  # 41 registers are 48: 1536 a warp
    (SM_90A, Resources(32, 16, 0), Occupancy(32, 32, 0.5, "blocks")),
    (SM_90A, Resources(384, 168, 200 * 1024), Occupancy(1, 12, 0.1875, "registers")),
    (SM_75, Resources(1024, 64, 0), Occupancy(1, 32, 1.0, "threads")),
    (SM_75, Resources(128, 32, 32 * 1024), Occupancy(2, 8, 0.25, "shared memory")),
]


@pytest.mark.parametrize(("target", "taken", "fits"), FITS)
def test_occupancy_is_the_calculators(target: CudaTarget, taken: Resources, fits: Occupancy) -> None:
    assert occupancy(taken, target) == fits


def test_registers_that_have_no_room_are_spilled() -> None:
    assert spilled(Resources(128, 255, 0), SM_80) == 0
    assert spilled(Resources(128, 300, 0), SM_80) == 45
    assert spilled(Resources(1024, 80, 0), SM_80) == 16  # 65,536 registers for 1,024 threads


def test_what_lives_together_is_counted_together() -> None:
    lines = """
a = registers_f32(8)
for i in range(8):
    a[i] = f32(0.0)
for step in range(n):
    b = registers_f32(16)
    for i in range(16):
        b[i] = x[i]
    c = registers_f64(4)
    for i in range(4):
        c[i] = b[i]
    for i in range(8):
        a[i] = a[i] + c[i]
""".strip().split("\n")
    found = list(arrays(lines))
    assert [a.registers for a in found] == [8, 16, 8]
    assert (
        fullest(found) == 8 + 16
    )  # b has ended where c is complete; a lives to the end of the loop over steps
    longer = [*lines, "    for i in range(16):", "        d[i] = b[i]"]
    assert fullest(list(arrays(longer))) == 8 + 16 + 8


def test_few_warps_hide_little() -> None:
    few, many = Resources(32, 255, 200 * 1024), Resources(256, 32, 0)
    assert hidden(many, SM_90A).arithmetic == 1.0
    assert hidden(few, SM_90A).arithmetic == 1 / 16  # one warp, one instruction in flight of 4 x 4
    assert hidden(Resources(32, 255, 200 * 1024, independent=8), SM_90A).arithmetic == 0.5
    slow = predict(Cost(vector_ops=1e9, tasks=132.0), rates(SM_90A), hidden(few, SM_90A))
    fast = predict(Cost(vector_ops=1e9, tasks=132.0), rates(SM_90A), hidden(many, SM_90A))
    assert slow.parts["vector"] == pytest.approx(16 * fast.parts["vector"])


GATED = """
kernel gated(x: f32[M, K], u: f32[K, N], v: f32[K, N]) -> y: f32[M, N] {
    a[m, n] = sum[k](x[m, k] * u[k, n])
    b[m, n] = sum[k](x[m, k] * v[k, n])
    y[m, n] = a[m, n] * b[m, n]
}
"""
SIZES = {"M": 1024, "N": 1024, "K": 1024}


def test_a_grouping_that_spills_is_not_chosen() -> None:
    """Two accumulators of 256 x 128 for 256 threads are 256 registers; each alone fits."""
    kernel = tl.parse(GATED + "schedule wide for gated on cuda:sm_80 { tile m by 256, n by 128, k by 16 }")
    made = tl.compile(kernel["gated"], target="cuda:sm_80", schedule=kernel.schedules["wide"])
    facts = made.explain(**SIZES).facts.fusion
    stored = [c for c in facts.candidates if c.decision == "stored"]
    assert stored
    assert "would spill" in stored[0].reason
    chosen = [r for r in facts.room if r.without is None]
    other = [r for r in facts.room if r.without == stored[0].name]
    assert all(r.spilled == 0 for r in chosen)
    assert 128 < max(r.registers for r in chosen) <= 255
    assert max(r.registers for r in other) > 255 + 32
    assert max(r.spilled for r in other) > 0


def test_a_ledger_of_a_gpu_states_what_blocks_take() -> None:
    facts = tl.compile(tl.parse(GATED)["gated"], target="cuda:sm_90a").explain(**SIZES).facts.fusion
    assert facts.room
    assert all(
        r.shared_bytes > 0 and r.warps % (r.threads // 32) == 0 and 0 < r.share <= 1 for r in facts.room
    )
    assert not tl.compile(tl.parse(GATED)["gated"], target="cpu").explain(**SIZES).facts.fusion.room


def test_a_schedule_whose_tiles_spill_is_refused_and_names_them() -> None:
    """With `fuse all` there is no other grouping to go to."""
    lines = "fuse all\n tile m by 256, n by 128, k by 16"
    text = GATED + f"schedule wide for gated on cuda:sm_80 {{\n {lines}\n}}\n"
    program = tl.parse(text)
    made = tl.compile(program["gated"], schedule=program.schedules["wide"])
    with pytest.raises(tl.TileError) as refused:
        made.compilation(**SIZES)
    (found,) = refused.value.diagnostics
    assert found.code == "E0912"
    assert "registers a thread" in found.message
    assert found.span is not None
    assert found.span.line == text[: text.index("tile m by")].count("\n") + 1
    assert found.help == "choose a smaller tile: tile m by 128"
    smaller = text.replace("m by 256", "m by 128")
    fits = tl.compile(tl.parse(smaller)["gated"], schedule=tl.parse(smaller).schedules["wide"])
    assert all(r.spilled == 0 for r in fits.explain(**SIZES).facts.fusion.room)


WIDE = """
kernel attention(q: bf16[H, M, D], k: bf16[H, N, D], v: bf16[H, N, D], scale: f32) -> o: bf16[H, M, D] {
    example H = 3, M = 500, N = 501, D = 72, scale = 0.125
    s[h, m, n] = scale * sum[d](q[h, m, d] * k[h, n, d])
    p[h, m, n] = softmax[n | n <= m](s[h, m, n])
    o[h, m, d] = sum[n](p[h, m, n] * v[h, n, d])
}
schedule wide for attention on cuda:sm_80 { tier mma tile m by 192, n by 32 }
"""


def test_tiles_of_a_schedule_whose_machine_code_spills_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The estimate, 238 registers of 255, lets them pass; the first call finds out, before anything is launched."""
    pytest.importorskip("numba_cuda")
    program, file = tl.parse(WIDE), tmp_path / "wide.tile"
    sizes = {"H": 3, "M": 500, "N": 501, "D": 72}
    stated = tl.compile(program["attention"], schedule=program.schedules["wide"])
    variant = stated._variants.find({}, sizes)
    source = variant._device_kernel.source
    preferred, *others = next(iter(source.variants.values()))
    with pytest.raises(tl.TileError, match="bytes written and read, with the tiles of `wide`") as refused:
        source.machine_code(preferred)
    (found,) = refused.value.diagnostics
    assert found.code == "E0912"
    assert found.span is not None
    assert found.span.line == WIDE[: WIDE.index("tile m by")].count("\n") + 1
    assert found.help == "choose a smaller tile: tile m by 96"
    with pytest.warns(UserWarning, match="keeps values of a thread in memory"):
        source.machine_code(others[0])
    file.write_text(WIDE, encoding="utf-8")
    assert (
        main(["show", str(file), "--schedule", "wide", "--target", "cuda:sm_80", "--emit", "resources"]) == 1
    )
    shown = capsys.readouterr()
    assert "spilled bytes" in shown.out
    assert "error[E0912]: `attention" in shown.err


def test_a_row_that_one_tile_holds_is_counted_once() -> None:
    """A softmax's second pass takes the exponentials of the first; of a row in several tiles they are computed twice."""
    text = "kernel rows(x: f32[M, N]) -> y: f32[M, N] { y[m, n] = softmax[n](x[m, n]) }"
    counts = {}
    for tile, columns in ((1024, 1000), (256, 1000)):
        lines = f"schedule s for rows on cpu {{\n tile n by {tile}\n}}\n"
        made = tl.compile(tl.parse(text)["rows"], schedule=lines).compilation(M=64, N=columns)
        counts[tile] = made.cost.special_ops / (64 * columns)
    assert 1.0 <= counts[1024] < 1.1
    assert 2.0 <= counts[256] < 2.2


def test_lines_that_stand_twice_are_two_lives() -> None:
    """Of results made in two places, what they need lives in each, not from the first to the last. A comment needs none."""
    made = ["a = registers_f32(8)", "a[0] = b[0]", "o[0] = a[0]"]
    lines = [
        "b = registers_f32(4)",
        "b[0] = x",
        *made,
        "c = registers_f32(16)",
        "c[0] = b[0]",
        "o[1] = c[0]",
        *made,
    ]
    assert fullest(list(arrays(lines))) == 4 + 16
    assert fullest(list(arrays([*lines[:8], "# the task's a and c", *made]))) == 4 + 16
