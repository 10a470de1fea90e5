"""The tensor memory accelerator: tiles between global and shared memory, sm_90 or later.

A tensor map (CUtensorMap, 128 bytes, a parameter of the kernel) describes a tensor and the box that is moved; coordinates
are elements, the innermost dimension first. Elements outside the tensor come as zeros and are not written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ..cuda import i32, i64, tensor_map
from .assembly import instruction, with_arguments


def _map_address() -> Any:
    """`map_address(map)`: the generic address of a map that is a parameter."""

    def implement(kind: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            return builder.ptrtoint(values[0], ir.IntType(64))

        return i64(tensor_map), generate

    return with_arguments("kind", implement)


def _load(rank: int) -> Any:
    """`load_box(to, map, barrier, …)`: announce nothing, bring a box to shared memory; its bytes count at the barrier
    [9.7.9.27.1.2 cp.async.bulk.tensor]."""
    at = ", ".join(f"${3 + i}" for i in range(rank))
    text = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {{{at}}}], [$2];"
    return instruction(None, (i32, i64, i32, *[i32] * rank), text)


def _store(rank: int) -> Any:
    """`store_box(map, from, …)`: a box from shared memory to the tensor [9.7.9.27.1.2 cp.async.bulk.tensor]."""
    at = ", ".join(f"${2 + i}" for i in range(rank))
    text = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [$0, {{{at}}}], [$1];"
    return instruction(None, (i64, i32, *[i32] * rank), text)


map_address = _map_address()
prefetch_map = instruction(None, (i64,), "prefetch.tensormap [$0];")  # [9.7.9.17 prefetch]
load_box_1d, load_box_2d, load_box_3d, load_box_4d, load_box_5d = (_load(n) for n in range(1, 6))
store_box_1d, store_box_2d, store_box_3d, store_box_4d, store_box_5d = (_store(n) for n in range(1, 6))
commit_boxes = instruction(None, (), "cp.async.bulk.commit_group;")  # [9.7.9.25.4.1]
# [9.7.9.25.4.2]: the shared memory of all but the last n groups has been read
boxes_read_0, boxes_read_1, boxes_read_2, boxes_read_3 = (
    instruction(None, (), f"cp.async.bulk.wait_group.read {n};") for n in range(4)
)
