"""Element types as NumPy dtypes: f16 is `numpy.float16`, bf16 is `ml_dtypes.bfloat16`.

ml_dtypes takes as long to import as a small kernel to load, so it is imported where bf16 is first met.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dsl.types import DType


class _Dtypes(dict[DType, "np.dtype[Any]"]):
    def __missing__(self, dtype: DType) -> np.dtype[Any]:
        if dtype is not DType.BF16:
            raise KeyError(dtype)
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        self[dtype] = found
        return found


NUMPY = _Dtypes(
    {
        DType.F64: np.dtype(np.float64),
        DType.F32: np.dtype(np.float32),
        DType.F16: np.dtype(np.float16),
        DType.I64: np.dtype(np.int64),
        DType.I32: np.dtype(np.int32),
        DType.I16: np.dtype(np.int16),
        DType.I8: np.dtype(np.int8),
        DType.U8: np.dtype(np.uint8),
        DType.BOOL: np.dtype(np.bool_),
    }
)
"""The dtype of each element type, by subscript: bf16 is there once it was asked for."""
_ELEMENT = {n: d for d, n in NUMPY.items()}


def element_of(dtype: np.dtype[Any] | DType | str) -> DType | None:
    """The element type that a dtype holds; None where the language has none, of which a text is the name."""
    if isinstance(dtype, DType | str):
        return dtype if isinstance(dtype, DType) else None
    found = _ELEMENT.get(dtype)
    if found is None and dtype.name == "bfloat16" and dtype == NUMPY[DType.BF16]:
        return DType.BF16
    return found
