"""Norms and roundings in NumPy, in float64 or wider: what the library's results are judged by."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.trees import flat

INF = math.inf


def exact_norm(x: Any, axis: Any = None, p: float = 2) -> np.ndarray:
    """The p-norm along `axis` in extended precision, scaled so that nothing overflows."""
    array = np.asarray(x)
    size = np.abs(array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)).astype(np.longdouble)
    if p == INF:
        return np.max(size, axis=axis, initial=0)
    unit = np.max(size, axis=axis, initial=0, keepdims=True)
    unit = np.where(unit > 0, unit, np.longdouble(1))
    total = np.sum((size / unit) ** p, axis=axis, keepdims=True)
    root = np.sqrt(total) if p == 2 else total ** (1 / np.longdouble(p))
    norm = unit * root
    return norm.squeeze(axis) if axis is not None else norm.reshape(())


def exact_tree_norm(tree: Any, p: float = 2) -> np.ndarray:
    return exact_norm(flat(tree), None, p)


def ulp(x: Any, dtype: Any) -> np.ndarray:
    """The distance from |x| to the next larger number of `dtype`, in float64."""
    info = ml_dtypes.finfo(dtype)
    size = np.maximum(np.abs(np.asarray(x, np.float64)), float(info.smallest_normal))
    exponent = np.floor(np.log2(size))
    exponent = np.where(2.0**exponent > size, exponent - 1, exponent)
    return np.maximum(2.0 ** (exponent - info.nmant), float(info.smallest_subnormal))


@functools.cache
def exact_slack() -> float:
    """The relative error of the oracles themselves: some roundings of extended precision.

    Where `longdouble` is a plain float64, the oracles are no better than the float64 they judge.
    """
    return 64 * float(np.finfo(np.longdouble).eps)
