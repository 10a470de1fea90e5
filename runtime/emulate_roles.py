"""Runs generated source whose warpgroups have roles (tier `wgmma`) under CPython; `emulate.py` says what for.

Threads run until they have to wait. What is asynchronous happens as late as it may: copies land when nobody can go on
otherwise, first those that somebody waits for, products read their operands and give their sums when they are waited for,
boxes on their way out are read when that is waited for. Until then the places concerned hold NaN. So a missing wait shows
as NaN or as wrong numbers, a missing arrival or announcement as threads that wait for ever, a missing fence as such. Raised
as `KernelFault`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from ..dsl.records import dataclass
from .emulate import WARP, KernelFault, Local, State, Tensor
from .intrinsics.operands import ROW_BYTES, STEP, Operand, k_major, mn_major, places

START = 1024  # where shared memory starts: a multiple of the swizzle's period
WARPGROUP = 128
SLACK = 1 << 18  # addresses are told apart by 18 bits, as matrix descriptors hold them
EVENTS = {
    "await_parity": "await", "meet": "meet", "meet_warp": "warp", "store_matrices": "matrices", "any_lane": "vote",
    "load_matrices": "fragments",
}  # fmt: skip
FACTORIES = {"wgmma": "multiply", "settled": "settle"}
Array = np.ndarray[Any, Any]


def made_by(tree: ast.Module) -> dict[str, str]:
    """Functions that a source makes itself, with the event that a call of one is."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            kind = FACTORIES.get(ast.unparse(node.value.func))
            if kind:
                found[ast.unparse(node.targets[0])] = kind
    return found


def factories() -> dict[str, Callable[..., Any]]:
    """What a source makes its functions with."""
    return {
        "k_major": k_major, "mn_major": mn_major, "wgmma": Multiply, "settled": lambda left, *_: Settle(left),
        "more_registers": lambda n: lambda: None, "fewer_registers": lambda n: lambda: None,
    }  # fmt: skip


# ---------------------------------------------------------------- what a kernel's names stand for


@dataclass(frozen=True)
class Multiply:
    """`wgmma(…)`"""

    dtype: str
    columns: int
    a: Operand | None
    b: Operand
    row: int
    column: int
    fresh: bool = False


@dataclass(frozen=True)
class Settle:
    """`settled(…)`"""

    left: int


@dataclass
class BoxMap:
    """A tensor map: a tensor, whose elements are seen as 16-bit words, and the box that moves."""

    tensor: Tensor
    box: tuple[int, ...]
    writers: Array = field(init=False, repr=False)
    """The block that wrote each element, -1 for none."""

    def __post_init__(self) -> None:
        self.writers = np.full(self.tensor.values.shape, -1, np.int32)

    def words(self) -> Array:
        found: Array = self.tensor.values.view(np.uint16)
        return found

    def inside(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a box that lies in the tensor: there, and in the box."""
        there, here = [], []
        for start, size, extent in zip(at, self.box, self.tensor.values.shape, strict=True):
            low, high = max(start, 0), min(start + size, extent)
            there.append(slice(low, max(high, low)))
            here.append(slice(low - start, max(high, low) - start))
        return tuple(there), tuple(here)

    @property
    def rows(self) -> int:
        return int(np.prod(self.box[:-1]))


@dataclass
class Barrier:
    """An mbarrier: how many arrive, how many are missing, the parity of its phase, bytes still to come."""

    count: int
    missing: int
    parity: int = 0
    bytes: int = 0

    def settle(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.parity = self.count, self.parity ^ 1


@dataclass
class Product:
    """A group of a warpgroup that runs. `before`: what its sums start from, None where another group is to leave that."""

    how: Multiply
    sums: list[Local]
    a: Any
    b: int
    before: Array | None


# ---------------------------------------------------------------- a block


@dataclass
class Block:
    """The memory of a block and everything under way in it."""

    state: State
    shared_bytes: int
    memory: Array = field(init=False)
    barriers: dict[int, Barrier] = field(default_factory=dict)
    landing: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    named: dict[int, int] = field(default_factory=dict)
    products: dict[int, list[Product]] = field(default_factory=dict)
    leaving: dict[int, list[list[Callable[[], None]]]] = field(default_factory=dict)
    unpublished: dict[int, set[int]] = field(default_factory=dict)
    unfenced: dict[int, Array] = field(default_factory=dict)
    """Addresses that a thread has read as matrices since its last fence."""

    def __post_init__(self) -> None:
        self.memory = np.full(START + self.shared_bytes, 0xFF, np.uint8)

    def fault(self, what: str) -> KernelFault:
        return self.state.fault(what)

    # ------------------------------------------------------------ functions that do not wait

    def functions(self) -> dict[str, Callable[..., Any]]:
        made: dict[str, Callable[..., Any]] = {
            "start_barrier": self.start_barrier, "publish_barriers": lambda: None, "arrive": self.arrive,
            "expect_bytes": self.expect_bytes, "map_address": lambda x: x, "prefetch_map": lambda x: None,
            "commit_boxes": self.commit_boxes, "shared_start": lambda: START, "announce": self.announce,
            "publish_shared": self.publish_shared, "clear_16_bytes": self.clear_16_bytes, "uniform": int, "opaque": int,
            "matrix_address": lambda a: (int(a) & SLACK - 1) >> 4,
        }  # fmt: skip
        made |= {f"load_box_{n}d": self.load_box for n in range(1, 6)}
        made |= {f"store_box_{n}d": self.store_box for n in range(1, 6)}
        made |= {f"boxes_read_{n}": (lambda most=n: self.boxes_read(most)) for n in range(4)}
        return made

    def publish_shared(self) -> None:
        """Order what a thread wrote and read before asynchronous copies."""
        self.unpublished.pop(self.state.thread, None)
        self.unfenced.pop(self.state.thread, None)

    def clear_16_bytes(self, address: int) -> None:
        if address % 16:
            raise self.fault(f"16 bytes are cleared at {address - START}, no multiple of 16")
        places = address + np.arange(8) * 2
        self.write_words(places, np.zeros(8, np.uint16))
        self.unpublished.setdefault(self.state.thread, set()).update(map(int, places))

    def start_barrier(self, address: int, count: int) -> None:
        if address in self.barriers:
            raise self.fault(f"the barrier at {address - START} is started twice")
        self.barriers[address] = Barrier(count, count)

    def barrier(self, address: int) -> Barrier:
        if address not in self.barriers:
            raise self.fault(f"there is no barrier at {address - START}")
        return self.barriers[address]

    def arrive(self, address: int) -> None:
        b = self.barrier(address)
        b.missing -= 1
        if b.missing < 0:
            raise self.fault(f"one arrival too many at the barrier at {address - START}")
        b.settle()

    def expect_bytes(self, address: int, count: int) -> None:
        self.barrier(address).bytes += count
        self.arrive(address)

    def announce(self, number: int, threads: int) -> None:
        """One thread's arrival at a named barrier."""
        self.named[number] = self.named.get(number, 0) + 1

    # ------------------------------------------------------------ copies

    def swizzled(self, address: int, rows: int) -> Array:
        """The addresses of the words of so many rows of 128 bytes: bits 4 to 6 are turned by bits 7 to 9."""
        plain = address + np.arange(rows * ROW_BYTES // 2).reshape(rows, ROW_BYTES // 2) * 2
        return plain ^ (plain >> 7 & 7) << 4

    def read_words(self, addresses: Array) -> Array:
        if addresses.min() < START or addresses.max() + 2 > len(self.memory):
            raise self.fault("shared memory is read outside what the block has")
        low, high = self.memory[addresses].astype(np.uint16), self.memory[addresses + 1].astype(np.uint16)
        found: Array = low | high << 8
        return found

    def write_words(self, addresses: Array, words: Array) -> None:
        if addresses.min() < START or addresses.max() + 2 > len(self.memory):
            raise self.fault("shared memory is written outside what the block has")
        self.memory[addresses] = (words & 0xFF).astype(np.uint8)
        self.memory[addresses + 1] = (words >> 8).astype(np.uint8)

    def load_box(self, to: int, source: BoxMap, barrier: int, *at: int) -> None:
        if to % 1024:
            raise self.fault(f"a box goes to {to - START}, no multiple of 1024")
        self.state.touch(source.tensor.told)
        addresses = self.swizzled(to, source.rows)[:, : source.box[-1]]
        self.write_words(addresses, np.full(addresses.shape, 0xFFFF, np.uint16))
        for thread, read in self.unfenced.items():
            if ((read >= to) & (read < to + addresses.size * 2)).any():
                raise self.fault(f"a box comes to where thread {thread} has read without a fence since")
        there, here = source.inside(at[::-1])

        def land() -> None:
            words = np.zeros(source.box, np.uint16)
            words[here] = source.words()[there]
            self.write_words(addresses, words.reshape(source.rows, -1))
            b = self.barrier(barrier)
            b.bytes -= addresses.size * 2
            b.settle()

        self.landing.append((barrier, land))

    def store_box(self, target: BoxMap, source: int, *at: int) -> None:
        addresses = self.swizzled(source, target.rows)
        there, here = target.inside(at[::-1])
        read = {int(a) for a in addresses.ravel()}

        def check() -> None:
            for thread, written in self.unpublished.items():
                if written & read:
                    raise self.fault(f"a box leaves with what thread {thread} wrote and did not publish")

        def leave() -> None:
            check()
            words = self.read_words(addresses).reshape(target.box)
            other, me = target.writers[there], self.state.block
            if ((other >= 0) & (other != me)).any():
                raise self.fault(f"a box reaches into what block {other.max()} wrote of {target.tensor.told}")
            other[...] = me
            target.words()[there] = words[here]

        check()
        self.leaving.setdefault(self.state.thread, [[]])[-1].append(leave)

    def commit_boxes(self) -> None:
        self.leaving.setdefault(self.state.thread, [[]]).append([])

    def boxes_read(self, most: int) -> None:
        groups = self.leaving.setdefault(self.state.thread, [[]])
        while len(groups) - 1 > most:
            for leave in groups.pop(0):
                leave()

    def end_thread(self, thread: int) -> None:
        if any(self.leaving.get(thread, [[]])[0:1][0]) or len(self.leaving.get(thread, [[]])) > 1:
            raise self.fault("a thread ends while boxes are still read from shared memory")

    # ------------------------------------------------------------ what a warp or a warpgroup does together

    def store_matrices(self, lanes: Mapping[int, tuple[int, ...]]) -> None:
        """stmatrix.x4: lane n gives the address of row n % 8 of matrix n / 8; its words are elements 2 (n % 4) and the next
        of row n / 4 of each."""
        order = sorted(lanes)
        for n, thread in enumerate(order):
            address, matrix = lanes[thread][0], n // 8
            words = [lanes[order[4 * (n % 8) + i]][1 + matrix] for i in range(4)]
            halves = np.array([w >> 16 * h & 0xFFFF for w in map(int, words) for h in (0, 1)], np.uint16)
            addresses = address + np.arange(8) * 2
            self.write_words(addresses, halves)
            for i, owner in enumerate(order[4 * (n % 8) : 4 * (n % 8) + 4]):
                self.unpublished.setdefault(owner, set()).update(int(a) for a in addresses[2 * i : 2 * i + 2])

    def load_matrices(self, lanes: Mapping[int, tuple[Any, ...]]) -> None:
        """ldmatrix.x4: lane n gives the address of row n % 8 of matrix n / 8; it gets elements 2 (n % 4) and the next of row
        n / 4 of each."""
        order = sorted(lanes)
        for n, thread in enumerate(order):
            _, words, at = lanes[thread]
            for matrix in range(4):
                address = int(lanes[order[8 * matrix + n // 4]][0]) + 4 * (n % 4)
                low, high = self.read_words(np.array([address, address + 2])).astype(np.uint32)
                words[at + matrix] = (low | high << np.uint32(16)).view(np.int32)
            own = np.array([int(lanes[order[8 * matrix + n // 4]][0]) + 4 * (n % 4) for matrix in range(4)])
            self.unfenced[thread] = np.concatenate([self.unfenced.get(thread, own[:0]), own])

    def multiply(self, group: int, calls: Sequence[tuple[Multiply, Local, Any, int]]) -> None:
        """Start a product of a warpgroup; its sums are NaN until they are waited for."""
        how, _, a, b = calls[0]
        if any(c[0] is not how or c[3] != b or (how.a and c[2] != a) for c in calls):
            raise self.fault("the threads of a warpgroup start different products")
        sums = [c[1] for c in calls]
        queue = self.products.setdefault(group, [])
        ours = any(p.sums[0] is sums[0] for p in queue)
        before = None if ours else _gathered(sums, how)
        before = np.zeros((64, how.columns), np.float32) if how.fresh else before
        _scattered(sums, how, np.full((64, how.columns), np.nan, np.float32))
        queue.append(Product(how, sums, a if how.a else [c[2] for c in calls], b, before))

    def settle(self, group: int, left: int) -> None:
        """Finish the first products of a warpgroup until so many are left."""
        queue = self.products.setdefault(group, [])
        while len(queue) > left:
            p = queue.pop(0)
            start = p.before if p.before is not None else _gathered(p.sums, p.how)
            depth = STEP * len(p.how.b.offsets)
            right = self.operand(p.how.b, p.b, p.how.columns, p.how.dtype)
            left_side = (
                self.operand(p.how.a, p.a, 64, p.how.dtype) if p.how.a else _unpacked(p.a, depth, p.how.dtype)
            )
            total = (start + left_side @ right.T).astype(np.float32)
            later = next((q for q in queue if q.sums[0] is p.sums[0]), None)
            if later is None:
                _scattered(p.sums, p.how, total)
            else:
                later.before = total

    def operand(self, form: Operand, address: int, width: int, dtype: str) -> Array:
        """An operand from shared memory, `width` by the contracted axis."""
        parts = []
        inside, depth = np.arange(width), np.arange(STEP)
        for offset in form.offsets:
            start = (address << 4) + offset
            if form.transposed:
                along = inside // 64 * form.leading_bytes + inside % 64 * 2
                spots = start + along[:, None] + depth[None, :] * ROW_BYTES
            else:
                spots = start + inside[:, None] * ROW_BYTES + depth[None, :] * 2
            places = spots ^ (spots >> 7 & 7) << 4
            for thread, written in self.unpublished.items():
                if not written.isdisjoint(places.ravel().tolist()):
                    raise self.fault(f"a product reads what thread {thread} wrote and did not publish")
            parts.append(self.read_words(places))
        return _floats(np.concatenate(parts, 1), dtype)


def _floats(words: Array, dtype: str) -> Array:
    from ..compiler.interpreter.elements import NUMPY
    from ..dsl.types import DType

    found: Array = np.ascontiguousarray(words, np.uint16).view(NUMPY[DType(dtype)]).astype(np.float32)
    return found


def _spots(how: Multiply) -> Iterable[tuple[int, int, int, int]]:
    """Thread, its place in the array, row and column of every sum [PTX ISA 9.0, 9.7.15.5.1.1.3]."""
    for thread in range(WARPGROUP):
        for register, place in enumerate(places(how.columns, how.row, how.column)):
            i, h, c = register // 4, register // 2 % 2, register % 2
            row = 16 * (thread // WARP) + thread % WARP // 4 + 8 * h
            yield thread, place, row, 8 * i + 2 * (thread % 4) + c


def _gathered(sums: Sequence[Local], how: Multiply) -> Array:
    found = np.zeros((64, how.columns), np.float32)
    for thread, place, row, column in _spots(how):
        found[row, column] = sums[thread].values[place]
    return found


def _scattered(sums: Sequence[Local], how: Multiply, values: Array) -> None:
    for thread, place, row, column in _spots(how):
        sums[thread].values[place] = values[row, column]


def _unpacked(packed: Sequence[Local], depth: int, dtype: str) -> Array:
    """The first operand from registers: 4i + 2d + h holds row 8h, columns 16i + 8d and the next of a thread's."""
    words = np.zeros((64, depth), np.uint16)
    for thread, array in enumerate(packed):
        for register in range(depth // 4):
            i, half, deep = register // 4, register % 2, register // 2 % 2
            row = 16 * (thread // WARP) + thread % WARP // 4 + 8 * half
            column = 16 * i + 8 * deep + 2 * (thread % 4)
            word = int(array.values[register])
            words[row, column], words[row, column + 1] = word & 0xFFFF, word >> 16 & 0xFFFF
    return _floats(words, dtype)


# ---------------------------------------------------------------- threads


@dataclass
class Threads:
    """Threads of one block; those that wait are at an event: (kind, line, value, more)."""

    block: Block
    running: list[Any]
    at: dict[int, tuple[str, int, Any, Any]] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Until all have ended. Raises `KernelFault` where they wait for ever."""
        ready = set(range(len(self.running)))
        last = self.block.state.backwards
        while ready or self.at:
            if not ready:
                ready = set(self.released())
            while not ready and self.block.landing:
                self.land()
                ready = set(self.released())
            if not ready:
                raise self.stuck()
            warp = (max(ready) if last else min(ready)) // WARP  # one warp goes as far as it can
            mine = sorted((t for t in ready if t // WARP == warp), reverse=last)
            for thread in mine:
                self.advance(thread)
            ready -= set(mine)
            ready |= set(self.released(warp))
        if self.block.landing or any(self.block.products.values()):
            raise self.block.fault("a block ends while copies or products are under way")

    def land(self) -> None:
        """A copy whose barrier a thread waits at, if there is one: copies land in any order."""
        awaited = {value[0] for kind, _, value, _ in self.at.values() if kind == "await"}
        wanted = [i for i, (barrier, _) in enumerate(self.block.landing) if barrier in awaited]
        some = wanted or range(len(self.block.landing))
        _, land = self.block.landing.pop(some[-1 if self.block.state.backwards else 0])
        land()

    def advance(self, thread: int) -> None:
        self.block.state.thread = thread
        try:
            self.at[thread] = self.running[thread].send(self.answers.pop(thread, None))
        except StopIteration:
            self.block.end_thread(thread)

    def released(self, warp: int | None = None) -> list[int]:
        """Threads (of a warp) that can go on, what they do together done."""
        found: list[int] = []
        groups: dict[tuple[Any, ...], list[int]] = {}
        for thread, (kind, line, value, _) in self.at.items():
            if warp is not None and (
                thread // WARP != warp or kind in ("barrier", "meet", "multiply", "settle")
            ):
                continue
            self.block.state.thread = thread
            if kind == "await":
                address, parity = value
                if self.block.barrier(address).parity != parity & 1:
                    found.append(thread)
            else:
                groups.setdefault((kind, *self.place(kind, thread, line, value)), []).append(thread)
        for (kind, *place), threads in groups.items():
            found += self.together(kind, place, threads)
        for thread in found:
            del self.at[thread]
        return found

    def place(self, kind: str, thread: int, line: int, value: Any) -> tuple[Any, ...]:
        """What threads share that meet in an event."""
        if kind == "barrier":
            return (line,)
        if kind == "meet":
            return (int(value[0]), int(value[1]))
        return (thread // (WARPGROUP if kind in ("multiply", "settle") else WARP), line)

    def together(self, kind: str, place: list[Any], threads: list[int]) -> list[int]:
        """Do what a group does together if it is complete."""
        self.block.state.thread = threads[0]
        values = {t: self.at[t][2] for t in threads}
        if kind == "meet":
            number, wanted = place
            here = len(threads) + self.block.named.get(number, 0)
            if here < wanted:
                return []
            if here > wanted:
                raise self.block.fault(f"more threads than {wanted} at named barrier {number}")
            self.block.named[number] = 0
            return threads
        wanted = {"barrier": len(self.running), "multiply": WARPGROUP, "settle": WARPGROUP}.get(kind, WARP)
        if len(threads) < wanted:
            return []
        if kind == "multiply":
            self.block.multiply(place[0], [values[t] for t in sorted(threads)])
        elif kind == "settle":
            self.block.settle(place[0], values[threads[0]][0].left)
        elif kind == "matrices":
            self.block.store_matrices(values)
        elif kind == "fragments":
            self.block.load_matrices(values)
        elif kind == "vote":
            self.answers |= dict.fromkeys(threads, int(any(values[t][0] for t in threads)))
        elif kind == "shuffle":
            self.answers |= {t: values[t ^ int(self.at[t][3])] for t in threads}
        return threads

    def stuck(self) -> KernelFault:
        lines: dict[tuple[str, int], list[int]] = {}
        for thread, (kind, line, _, _) in self.at.items():
            lines.setdefault((kind, line), []).append(thread)
        told = "; ".join(
            f"thread {t[0]}{' …' if len(t) > 1 else ''} at line {n} ({k})" for (k, n), t in lines.items()
        )
        return KernelFault(
            f"{self.block.state.kernel}, block {self.block.state.block}: threads wait for ever: {told}"
        )


def run(
    generator: Callable[..., Any],
    state: State,
    names: dict[str, Any],
    arguments: Sequence[Any],
    threads: int,
    shared_bytes: int,
) -> None:
    """Run one block of a kernel; `names` is what its text sees."""
    block = Block(state, shared_bytes)
    names.update(block.functions())
    Threads(block, [generator(*arguments) for _ in range(threads)]).run()
