"""The transformations under contract, and one compiled update for each, which all the tests read.

Compiling is most of the suite's time, so every test that can calls `update` on trees of one shape: with
other numbers in them, nothing is compiled again. Of what has to be compiled for each combination, such as
each dtype or wrapper with each transformation, `covering` keeps a selection for every day.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

import clipjax
from tests.support.trees import random_tree
from tests.support.walk import (
    STEPPING,
    Case,
    bound_parameters,
    build,
    cases,
    is_projection,
    parameters,
    required,
    variants,
)

FLOATS = [np.float32, ml_dtypes.bfloat16, np.float16]
DEFAULTS = cases()
VARIANTS = variants()

every_case = pytest.mark.parametrize("case", DEFAULTS, ids=str)
every_variant = pytest.mark.parametrize("case", VARIANTS, ids=str)

# Each transformation with each of its bounds; and with those it cannot do without.
BOUNDED = [(case, parameter) for case in DEFAULTS for parameter in bound_parameters(case.name)]
MAIN_BOUNDS = [(case, parameter) for case, parameter in BOUNDED if parameter in required(case.name)]


def every_bound(pairs: list[tuple[Case, str]]) -> Any:
    ids = [f"{case}-{parameter}" for case, parameter in pairs]
    return pytest.mark.parametrize(("case", "parameter"), pairs, ids=ids)


def marked(pairs: Sequence[tuple[tuple[Any, ...], bool]], names: str) -> Any:
    """Parametrize over all, of which those that are not kept are marked `full`."""

    def label(value: Any) -> str:
        return np.dtype(value).name if isinstance(value, type) else str(value)

    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*values, id="-".join(map(label, values)), marks=[] if kept else [pytest.mark.full])
            for values, kept in pairs
        ],
    )


def covering(
    names: str,
    of_cases: Sequence[Case],
    others: Sequence[Any],
    keeps: Callable[[Case], bool] = lambda _: True,
) -> Any:
    """Parametrize over all pairs, of which each case that `keeps` one of the others has it in turn."""
    turn = itertools.count()
    kept = [next(turn) % len(others) if keeps(case) else None for case in of_cases]
    return marked(
        [
            ((case, other), j == k)
            for case, k in zip(of_cases, kept, strict=True)
            for j, other in enumerate(others)
        ],
        names,
    )


def sampled(of_cases: Sequence[Case], *, one_in: int, first: int = 0) -> Any:
    """Parametrize over all cases, of which one in so many is kept."""
    return marked([((case,), i % one_in == first) for i, case in enumerate(of_cases)], "case")


# Every variant in float32, and in bfloat16 those that are as they are by default.
every_variant_and_dtype = marked(
    [((case, dtype), dtype is np.float32 or not case.options) for dtype in FLOATS[:2] for case in VARIANTS],
    "case, dtype",
)


# --------------------------------------------------------------------------------------------------
# The transformations, each built once: JAX compiles anew for another object.


def labelled(label: str) -> Case:
    """The case of that name, which can be hashed as a case cannot."""
    return next(case for case in VARIANTS if str(case) == label)


@functools.cache
def _built(label: str, bare: bool) -> Any:
    case = labelled(label)
    if bare and "optimizer" not in parameters(case.name):
        return _built(label, bare=False)
    return build(case, **({"optimizer": optax.identity()} if bare else {}))


def default(case: Case) -> Any:
    """The transformation of a case."""
    return _built(str(case), bare=False)


def with_identity(case: Case, **options: Any) -> Any:
    """The same, but a wrapper is put around an optimizer that returns its gradients."""
    if not options:
        return _built(str(case), bare=True)
    extra = {"optimizer": optax.identity()} if "optimizer" in parameters(case.name) else {}
    return build(case, **extra, **options)


# --------------------------------------------------------------------------------------------------
# Problems.


@functools.cache
def _problem(dtype: Any, seed: int) -> tuple[Any, Any]:
    trees = random_tree(seed, dtype, 4.0), random_tree(seed + 100, dtype, 2.0)
    return jax.tree.map(np.asarray, trees)


def problem(dtype: Any = np.float32, *, seed: int = 0) -> tuple[Any, Any]:
    """Gradients and parameters, in NumPy, of which each norm is beyond the bounds in ARGUMENTS."""
    return copy.deepcopy(_problem(dtype, seed))


def with_entry(tree: Any, value: float) -> Any:
    """The tree with another value in one entry of its kernel."""
    tree = copy.deepcopy(tree)
    tree["dense"]["kernel"][1, 2] = value
    return tree


def like(tree: Any, value: float) -> Any:
    """A tree of the same leaves, each filled with one value."""
    return jax.tree.map(lambda x: np.full_like(x, value), tree)


def stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


# --------------------------------------------------------------------------------------------------
# Running.

update = jax.jit(lambda tx, grads, state, params: tx.update(grads, state, params), static_argnums=0)
project = jax.jit(lambda tx, params: tx(params), static_argnums=0)


def run(tx: Any, grads: Any, params: Any) -> tuple[Any, Any]:
    """The first step, compiled."""
    return update(tx, grads, tx.init(params), params)


def step(tx: Any, grads: Any, params: Any) -> tuple[Any, Any]:
    """The first step as it is written: to be traced, or run operation by operation."""
    return tx.update(grads, tx.init(params), params)


def metric(state: Any, *endings: str) -> float:
    return sum(float(v) for k, v in clipjax.metrics(state).items() if k.endswith(endings))


def own_metrics(tx: Any, params: Any) -> dict[str, Any]:
    return clipjax.metrics(tx.init(params))


def bounds_the_weights(case: Case) -> bool:
    """Whether what counts is the parameters after the update."""
    return is_projection(default(case)) or "project" in case.options or case.name in STEPPING
