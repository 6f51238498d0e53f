"""`ArrayOps` in NumPy, for arrays that depend only on sizes, computed during tracing."""

from typing import Any

import numpy as np


class NumpyOps:
    """The part of `nsa_core.array_ops.ArrayOps` that bounds and work items of intervals need."""

    xp: Any = np

    def derive(self, function, *arrays, **static):
        return function(self, *arrays, **static)

    def arange(self, like, count):
        return np.arange(count, dtype=np.int32)[None]

    def to_int32(self, x):
        return np.asarray(x, np.int32)

    def searchsorted(self, rows, values, side):
        pairs = zip(rows, values, strict=True)
        return np.stack([np.searchsorted(*pair, side) for pair in pairs]).astype(np.int32)


NUMPY_OPS: Any = NumpyOps()
