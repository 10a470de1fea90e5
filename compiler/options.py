"""Options of a compilation: one frozen record, part of every cache key."""

from __future__ import annotations

from ..dsl.records import dataclass
from .schedule import Fuse

RUNNING_SCALE = "quantise_with_running_scale"
"""An inexact rule that `named` switches on."""


@dataclass(frozen=True)
class Options:
    """`fuse` auto, all or none; `keep` intermediates to store; `named` inexact rules switched on by name.

    `precise` keeps every product in its computing type, `deterministic` excludes sums in arrival order, `check_indices`
    raises on reads through tensors that are out of range instead of clamping them.
    """

    fuse: Fuse = "auto"
    keep: tuple[str, ...] = ()
    precise: bool = False
    deterministic: bool = False
    check_indices: bool = False
    named: tuple[str, ...] = ()
    verify_each: bool = False
