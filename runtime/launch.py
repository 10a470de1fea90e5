"""The call path of a kernel compiled for the CPU: bind arguments, check everything, allocate, run, hand back.

A call like an earlier one (the same shapes, element types, contiguity and numbers, in NumPy arrays) has nothing left to
check: `Ready` runs it in a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from ..compiler.codegen.cpu_names import function_names
from ..compiler.cost import CPU_RATES, estimate, predict
from ..compiler.evaluate import Number
from ..compiler.interpreter.elements import NUMPY
from ..compiler.tensor_ir import Graph
from ..compiler.tile_ir import TileModule, TileProgram
from ..dsl.types import DType
from .arrays import NARROW_FLOATS, Array, Received, deliver, overlaps, receive, to_kernel, writable
from .kernels import contiguous, launches, version
from .memory import Scratch, last_use
from .parameters import Parameters, Plan
from .ready import Ready, Step
from .threads import alone

WORTH_SHARING_S = 350e-6
"""A launch whose shared work is predicted to take less runs on the calling thread. In calls that follow one another sharing
pays from some 110 µs on, after a rest of 4 or 50 ms from some 500 or 600, in which the other processor has fallen asleep and
found its caches cold: softmax of 1024 rows of 256 columns took 353, 476 and 624 µs alone in these cases and 248, 473 and 623
shared, a product of 192³ 279, 400, 638 and 249, 532, 646 (two cores of an EPYC in a virtual machine, a trial)."""


class Kernel(Parameters):
    """A compiled kernel: call it with the parameters of `graph.order`, by position or by name.

    Extents declared as parameters go by name. Results come in declared order, one alone without a tuple, as the first
    array argument's kind; `out=` takes the array (or tuple of arrays) to write instead. Parameters declared `inout` are
    changed in place. Raises `TypeError` and `ValueError`, naming argument, value and what is accepted, before anything
    is written.
    """

    def __init__(
        self,
        graph: Graph,
        module: TileModule,
        functions: Mapping[str, Callable[..., object]],
        edited: bool = False,
    ) -> None:
        """`edited` functions may call what they compile in ways of their own, so Numba looks at the types of each call."""
        super().__init__(graph, module)
        self._edited = edited
        self._versions: dict[tuple[int, bool], Callable[..., object]] = {}
        names = function_names(module)
        self._steps = [(p, functions[names[p.name]]) for p in module.programs]
        self._last_use = {s.name: last_use(module, s.name) for s in module.scratch}

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        given = self._bind(args, kwargs)
        tensors = {
            n: receive(given[n], self._what(n), t.dtype, len(t.shape)) for n, t in self.graph.tensors.items()
        }
        targets = self._targets(out)
        results = self.run(
            {n: t.array for n, t in tensors.items()},
            self._scalars(given),
            {n: t.array for n, t in targets.items()},
        )
        like = next((t.given for t in tensors.values()), None)
        delivered = tuple(
            targets[n].given if n in targets else deliver(results[n], like) for n in self.graph.outputs
        )
        return None if not delivered else delivered[0] if len(delivered) == 1 else delivered

    def ready(
        self, positional: Sequence[Any], named: Mapping[str, Any], outs: Sequence[Any] = ()
    ) -> Ready | None:
        """What runs calls with the `call_key` of this one, which has succeeded; None where each needs its checks: where
        parameters are updated in place, tensors lie between launches or results are written to arrays with gaps."""
        updated = any(t.inout for t in self.graph.tensors.values())
        given = self._bind(tuple(positional), dict(named))
        tensors = {n: given[n] for n in self.graph.tensors}
        odd = any(type(x) is not np.ndarray or not x.flags.aligned for x in tensors.values())
        odd |= any(not x.flags.c_contiguous for x in outs)
        if self._edited or updated or odd or self.module.scratch or not tensors:
            return None
        order = [*self.graph.order[: len(positional)], *named]
        scalars = self._scalars(given)
        plan = self._plan({n: x.shape for n, x in tensors.items()}, scalars)
        dtypes = {n: t.dtype for n, t in (*self.graph.tensors.items(), *self.graph.outputs.items())}
        index = {n: i for i, n in enumerate(dtypes)}
        empty = {n: np.empty((0,) * len(s), NUMPY[dtypes[n]]) for n, s in plan.outputs.items()}
        steps: list[Step] = []
        for i, (program, _) in enumerate(self._steps):
            arguments = self._arguments(
                program, {**tensors, **empty}, {**plan.extents, **scalars}, plan, Scratch()
            )
            taken = tuple(index[p.name] for p in program.params)
            numbers = tuple(arguments[len(taken) :])
            function = self._function(i, arguments)
            runs = launches(function, arguments) if plan.alone[i] else [(function, ())]
            steps += [Step(f, before, taken, numbers) for f, before in runs]
        return Ready(
            places=tuple(order.index(n) for n in tensors),
            outputs=tuple((s, NUMPY[dtypes[n]]) for n, s in plan.outputs.items()),
            bits=tuple(index[n] for n, dtype in dtypes.items() if dtype in NARROW_FLOATS),
            steps=tuple(steps),
        )

    def run(
        self,
        tensors: Mapping[str, Array],
        scalars: Mapping[str, Number],
        targets: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Outputs by name from NumPy arrays and Python numbers by name (declared extents among the numbers). `targets`
        are arrays that outputs are written to. Checks everything but element types first."""
        plan = self._plan({n: x.shape for n, x in tensors.items()}, scalars)
        self._check_memory(tensors, targets or {}, plan)
        results = dict(targets or {})
        for name, shape in plan.outputs.items():
            if name not in results:
                results[name] = np.empty(shape, NUMPY[self.graph.outputs[name].dtype])
        self._execute({**tensors, **results}, scalars, plan)
        return results

    def _small(self, extents: Mapping[str, int]) -> tuple[bool, ...]:
        """For each launch, whether one thread does."""
        return tuple(_is_small(p, extents) for p in self.module.programs)

    # -- memory

    def _targets(self, out: Any) -> dict[str, Received]:
        """The arrays of `out=`, by output name."""
        names = tuple(self.graph.outputs)
        if out is None:
            return {}
        given = out if isinstance(out, tuple | list) else (out,)
        if len(given) != len(names):
            raise ValueError(
                f"{self.graph.name}: out holds {len(given)} arrays; it takes {len(names)}, for {', '.join(names)}"
            )
        return {
            n: receive(x, f"{self.graph.name}: out for `{n}`", t.dtype, len(t.shape))
            for (n, t), x in zip(self.graph.outputs.items(), given, strict=True)
        }

    def _check_memory(self, tensors: Mapping[str, Array], targets: Mapping[str, Array], plan: Plan) -> None:
        """What is written must have its shape, be writable and lie apart from everything else of the call."""
        for name, array in targets.items():
            if array.shape != plan.outputs[name]:
                raise ValueError(
                    f"{self.graph.name}: out for `{name}` has shape {array.shape}; the result has {plan.outputs[name]}"
                )
        written = {f"`{n}`": tensors[n] for n, t in self.graph.tensors.items() if t.inout}
        written |= {f"out for `{n}`": x for n, x in targets.items()}
        others = {f"`{n}`": x for n, x in tensors.items()}
        for what, array in written.items():
            writable(array, f"{self.graph.name}: {what}")
            for name, other in {**others, **written}.items():
                if name != what and overlaps(array, other):
                    raise ValueError(
                        f"{self.graph.name}: {what} shares memory with {name}; a separate array is what it takes"
                    )

    # -- running

    def _execute(self, arrays: dict[str, Array], scalars: Mapping[str, Number], plan: Plan) -> None:
        scratch = Scratch()
        numbers = {**plan.extents, **scalars}
        try:
            for i, (program, _) in enumerate(self._steps):
                arguments = self._arguments(program, arrays, numbers, plan, scratch)
                with alone if plan.alone[i] else nullcontext():
                    self._function(i, arguments)(*arguments)
                for name in [n for n, last in self._last_use.items() if last == i]:
                    del arrays[name]
                    scratch.release(name)
        finally:
            scratch.release_all()

    def _function(self, step: int, arguments: Sequence[Any]) -> Callable[..., object]:
        """The function of a launch, compiled for arguments like these."""
        function = self._steps[step][1]
        if self._edited:
            return function
        key = step, contiguous(arguments)
        found = self._versions.get(key)
        if found is None:
            found = self._versions[key] = version(function, arguments)
        return found

    def _arguments(
        self,
        program: TileProgram,
        arrays: dict[str, Array],
        numbers: Mapping[str, Number],
        plan: Plan,
        scratch: Scratch,
    ) -> list[Any]:
        """Tensors, scalars and run-time extents as the generated function takes them."""
        for p in program.params:
            if p.name not in arrays:
                arrays[p.name] = scratch.allocate(p.name, plan.scratch[p.name], NUMPY[p.dtype])
        statics = {n for n, _ in program.statics}
        return [
            *(to_kernel(arrays[p.name], p.dtype) for p in program.params),
            *(as_held(numbers[s.name], s.dtype) for s in program.scalars),
            *(numbers[e] for e in program.extents if e not in statics),
        ]


def _is_small(program: TileProgram, extents: Mapping[str, int]) -> bool:
    """Is one launch predicted to end before another thread would be awake?"""
    found = predict(estimate(program, extents), CPU_RATES)
    return found.seconds - found.parts["launch"] < WORTH_SHARING_S


def as_held(value: Number, dtype: DType) -> Any:
    """A scalar in the type in which generated code holds it: f16 and bf16 rounded, in f32; small integers in i32."""
    with np.errstate(over="ignore"):
        rounded = NUMPY[dtype].type(value)
        if dtype in (DType.F16, DType.BF16):
            return np.float32(rounded)
    return np.int32(value) if dtype in (DType.I8, DType.I16, DType.U8) else rounded
