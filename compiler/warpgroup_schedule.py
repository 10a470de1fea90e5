"""Lines of a schedule about warpgroups, copies and blocks: what they come to, and what is impossible, with its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..dsl.diagnostics import refuse
from .codegen import wgmma
from .passes.fuse import Fused
from .passes.split import splittable
from .schedule import Schedule
from .target import CudaTarget, Target
from .tile_ir import TileModule


def role_line(s: Schedule) -> str:
    """The first line of a schedule that is for tier `wgmma`, as its span is called; "" if it has none."""
    lines = {"warpgroups": s.warpgroups, "skew": s.skew, "order": s.order}
    found = [*(f"stage {t}" for t, _ in s.stages), *(k for k, given in lines.items() if given)]
    return found[0] if found else ""


def roles_of(module: TileModule, target: Target) -> dict[str, wgmma.Choices]:
    """How each program of tier `wgmma` runs."""
    if not isinstance(target, CudaTarget):
        return {}
    return {p.name: wgmma.choices(p, target) for p in module.programs if p.tier == "wgmma"}


def check_roles(asked: Schedule, running: Mapping[str, wgmma.Choices], target: Target) -> None:
    """Lines of a schedule that are for tier `wgmma` must have met a program of it. Raises `TileError`."""
    line = role_line(asked)
    if line and not running:
        raise refuse(
            "E0915",
            f"`{line.partition(' ')[0]}` is for tier `wgmma`, which `{asked.kernel}` does not run in on {target.name}",
            asked.spans.get(line), help="leave the line out; `tileloom explain` says why a tier does not take a kernel",
        )  # fmt: skip
    loaded = {t for c in running.values() for t, _ in c.stages()}
    for tensor, _ in (x for x in asked.stages if x[0] not in loaded):
        raise refuse(
            "E0915", f"`{tensor}` does not come through a ring", asked.spans.get(f"stage {tensor}"),
            help=f"tensors whose tiles products read: {', '.join(sorted(loaded)) or 'none'}",
        )  # fmt: skip
    for name, found in running.items():
        if asked.warpgroups not in (None, found.warpgroups):
            raise refuse(
                "E0915", f"the tiles of `{name}` have rows for {found.warpgroups} warpgroups, 64 each",
                asked.spans.get("warpgroups"),
                help=f"tile the rows by {64 * (asked.warpgroups or 1)}, or leave one line out",
            )  # fmt: skip
    if asked.skew and not any(c.cascades for c in running.values()):
        raise refuse(
            "E0915", f"no loop of `{asked.kernel}` computes between two products", asked.spans.get("skew"),
            help="leave the line out",
        )  # fmt: skip
    if asked.skew == "all" and not any(c.overlapped for c in running.values()):
        raise refuse(
            "E0915", f"no task of `{asked.kernel}` can start while the one before ends", asked.spans.get("skew"),
            help="`skew steps`; tasks overlap where one block takes several in an order known early, and their results "
            "need no tile from before the loop and do not leave through its slots",
        )  # fmt: skip


def check_splits(asked: Schedule, fused: Fused) -> None:
    """Raises `TileError` for an axis whose loop cannot be divided over blocks."""
    able = set[str]()
    for p, c in fused.launched():
        able |= splittable(p, c)
    for axis, _ in asked.splits:
        if axis not in able:
            raise refuse(
                "E0915", f"the loop over `{axis}` cannot be divided over blocks", asked.spans.get(f"split {axis}"),
                help=f"axes whose loops can: {', '.join(sorted(able)) or 'none'}",
            )  # fmt: skip


def lines_of(running: Mapping[str, wgmma.Choices]) -> dict[str, object]:
    """The lines for tier `wgmma`, where all its programs run alike."""
    every = list(running.values())
    if not every or any(replace(c, rings=every[0].rings) != every[0] for c in every):
        return {}
    slots: dict[str, set[int]] = {}
    for tensor, count in (x for c in every for x in c.stages()):
        slots.setdefault(tensor, set()).add(count)
    stages = tuple((tensor, *counts) for tensor, counts in slots.items() if len(counts) == 1)
    return {
        "warpgroups": every[0].warpgroups, "stages": stages,
        "skew": every[0].skew if every[0].cascades else None,
        "order": every[0].order,
    }  # fmt: skip
