"""Barriers in shared memory that count arrivals and bytes [PTX ISA 9.0, 9.7.13.15 mbarrier], sm_90 or later.

A barrier of n arrivals completes its phase when n threads arrived and all bytes announced for it have landed. Phases
alternate between parity 0 and 1; to wait for a parity is to wait until the phase of that parity is complete.
"""

from __future__ import annotations

from ..cuda import i32
from .assembly import instruction

start_barrier = instruction(None, (i32, i32), "mbarrier.init.shared::cta.b64 [$0], $1;")  # [9.7.13.15.9]
publish_barriers = instruction(None, (), "fence.mbarrier_init.release.cluster;")  # [9.7.13.4 fence]
arrive = instruction(None, (i32,), "mbarrier.arrive.shared::cta.b64 _, [$0];")  # [9.7.13.15.13]
# [9.7.13.15.13]: arrive once, and announce bytes that asynchronous copies will bring
expect_bytes = instruction(None, (i32, i32), "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;")
await_parity = instruction(  # [9.7.13.15.16 mbarrier.try_wait]
    None,
    (i32, i32),
    "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
    "@done bra READY;\nbra AGAIN;\nREADY:\n}",
)
