"""What the code of a tile program takes of a CUDA device, before anything is assembled.

Threads and shared memory are the generator's own. Registers are counted from the tiles it deals to threads: the values
that are alive together at the fullest point of the code, beside a fixed number for addresses, indices and counters.
`tests/test_resources.py` sets the estimate against what ptxas assigns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from ...dsl.records import dataclass
from ..occupancy import Resources
from ..target import CudaTarget
from ..tile_ir import TileProgram
from .simt import Kernel, kernels_of

SCALARS = 40
"""Registers for addresses, strides, indices, bounds and temporaries: what ptxas gives elementwise kernels of one value."""
FRAGMENT = re.compile(r"_part(?:_\d+)?$")
CONSTANT = re.compile(r"_of_nothing(?:_\d+)?$")
"""Sums of a task that saw nothing (`warpgroup_overlap.py`): what they start with, which takes no registers."""
AT_A_TIME = 4
"""Registers of a matrix operand's fragments that live together: each is read from shared memory just before its products."""
UNIFORM_SCALARS = 20
"""The same in tier `wgmma`, whose addresses, slots and bounds are the same for a warp and lie in registers of its own."""
NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")  # not the exponent of 3.2e+28
COPIED = re.compile(r"\s*(\w+)(\[\w+\]) = (\w+)\2$")
WRITTEN = re.compile(r"\s*(\w+)\[.+\] = ")
DECLARED = re.compile(r"\s*(\w+) = (?:registers_([fi])(\d+)|cuda\.local\.array)\((\d+)")


def resources(program: TileProgram, target: CudaTarget) -> Resources:
    """Of the preferred variant of a program. Raises `TileError` where a tile does not fit, and `mma.Unfit`."""
    return measured(kernels_of(program, target)[0])


def measured(kernel: Kernel) -> Resources:
    arrays = list(live_arrays(kernel.text.out))
    most = max((a.elements for a in arrays), default=1)
    scalars = UNIFORM_SCALARS if kernel.tier == "wgmma" else SCALARS
    return Resources(kernel.deal.occupied, scalars + fullest(arrays), kernel.shared_bytes(), most)


@dataclass(frozen=True)
class _Array:
    """Values of a thread, and the first and last line on which all of them are alive: the first is the end of the loop nest
    that fills them, for an elementwise step lets each new value take the register of an old one."""

    elements: int
    registers: int
    first: int
    last: int


def fullest(arrays: list[_Array]) -> int:
    """The most registers alive on one line."""
    points = sorted({a.first for a in arrays})
    return max(
        (sum(a.registers for a in arrays if a.first == p or a.first < p < a.last) for p in points), default=0
    )


def live_arrays(lines: list[str]) -> Iterator[_Array]:
    """The arrays of a thread with their lives. One that a loop reads and that is older than the loop lives to its end. Each
    declaration starts a life, for the same lines may stand in several places."""
    mentioned: dict[str, list[int]] = {}
    for i, line in enumerate(lines):
        for name in () if line.lstrip().startswith("#") else set(NAME.findall(line)):
            mentioned.setdefault(name, []).append(i)
    ends, copies = _loop_ends(lines), _copies(lines)
    declared: dict[str, list[int]] = {}
    for i, line in enumerate(lines):
        if (found := DECLARED.match(line)) is not None:
            declared.setdefault(found[1], []).append(i)
    for i, line in enumerate(lines):
        found = DECLARED.match(line)
        if found is None:
            continue
        name, _, bits, count = found.groups()
        again = next((j for j in declared[name] if j > i), len(lines))
        own = [j for j in mentioned[name] if i <= j < again]
        filled, last = own[min(1, len(own) - 1)], max(own)
        first = max((end for start, end in ends if i < start <= filled <= end), default=i)
        until = max((end for start, end in ends if i < start <= last <= end and end != first), default=last)
        registers = int(count) * (2 if bits == "64" else 1)
        if FRAGMENT.search(name):
            registers = min(registers, AT_A_TIME)
        if CONSTANT.search(name):
            registers = 0
        if name in copies and max(mentioned[copies[name]]) >= last:
            registers = 0
        yield _Array(int(count), registers, first, max(first, until))


def _copies(lines: list[str]) -> dict[str, str]:
    """Arrays that are written once, each element from the same one of another array, and that array: they are the same
    registers, for the generated code writes no array again while a copy of it is read."""
    written = Counter(m[1] for line in lines if (m := WRITTEN.match(line)))
    declared = {m[1]: m[0].partition(" = ")[2] for line in lines if (m := DECLARED.match(line))}
    return {
        m[1]: m[3]
        for line in lines
        if (m := COPIED.match(line)) and written[m[1]] == 1 and declared.get(m[1]) == declared.get(m[3])
    }


def _loop_ends(lines: list[str]) -> list[tuple[int, int]]:
    """First and last line of every loop."""
    indents = [len(line) - len(line.lstrip()) for line in lines]
    found = []
    for i, line in enumerate(lines):
        if line.lstrip().startswith(("for ", "while ")):
            inside = next(
                (j for j in range(i + 1, len(lines)) if lines[j].strip() and indents[j] <= indents[i]),
                len(lines),
            )
            found.append((i, inside - 1))
    return found
