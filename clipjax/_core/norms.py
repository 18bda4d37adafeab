"""Measuring: norms exact enough to decide by.

Norms are float64 values inside this package, whatever `jax_enable_x64` says. A float32 sum of a
million squares is off by more than the four ulp that a bounded unit may lose, and overflows at
1e19; the same sum in float64 is exact to 1e-13 and holds every float32, bfloat16 and float16 number.
It costs little: the pass is bound by memory, which it reads once either way.

The price is that every function that touches such a norm runs under :func:`in_float64`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import convert_element_type_p

from clipjax._core.axes import Reduced, is_measured
from clipjax._core.mesh import Names, pmax
from clipjax._core.reductions import Arrays, Reduction, is_narrow, max_of, reduce_all
from clipjax._core.turns import Turn

_P = ParamSpec("_P")
_R = TypeVar("_R")

# |x|**p fits a float64 for every float32 x, subnormals included, up to this power.
_LARGEST_PLAIN_POWER = 6


def in_float64(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Trace `function` with 64-bit types allowed, so that norms can be float64 anywhere."""

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return wrapped


def wide(x: Any) -> jax.Array:
    """Convert to float64 (complex128), under :func:`in_float64`."""
    x = jnp.asarray(x)
    return lax.convert_element_type(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)


def norm_dtype(leaves: Sequence[Any]) -> np.dtype:
    """The dtype in which users see norms: float32, or float64 if a leaf is as wide."""
    return np.dtype(np.float64 if any(x.dtype in (np.float64, np.complex128) for x in leaves) else np.float32)


def as_arrays(tree: Any) -> Any:
    """Make arrays of Python numbers, whose dtype could not be told any more under :func:`in_float64`."""
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), tree)


def strong(x: Any) -> jax.Array:
    """Take away a weak type: under :func:`in_float64` a weak float32 plus 1.0 is a float64."""
    return jnp.asarray(x, x.dtype)


def weakly_typed_as(like: Any, x: jax.Array) -> jax.Array:
    """Give x the weak type of `like`, which arithmetic with a strong bound takes away."""
    if not getattr(like, "weak_type", False) or x.weak_type:
        return x
    return convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def check_ord(ord: Any) -> Any:  # noqa: A002 - the name that NumPy, JAX and SciPy use
    """Return `ord` as a Python float, or as it is while it is traced."""
    if isinstance(ord, jax.core.Tracer):
        return ord
    if isinstance(ord, bool) or not (
        isinstance(ord, int | float) or (np.ndim(ord) == 0 and hasattr(ord, "dtype"))
    ):
        raise TypeError(f"ord must be a number, got {ord!r}")
    if not np.isreal(ord):
        raise TypeError(f"ord must be real, got {ord!r}")
    if not float(ord) >= 1:
        raise ValueError(f"ord must be at least 1, got {ord!r}")
    return float(ord)


@in_float64
def norm_of(
    x: Any,
    axes: Reduced,
    ord: Any,  # noqa: A002
    names: Names = (),
    turn: Turn = None,
    terms: Arrays = (),
) -> jax.Array:
    """Measure the p-norm along `axes`, in float64, with the reduced axes kept as 1.

    Args:
      x: a real or complex array.
      axes: the reduced axes; `None` reduces all and gives a scalar.
      ord: p >= 1 or inf; may be traced, which costs a power per entry.
      names: mesh axes over which a norm's entries are spread, too.
      turn: when it is the turn of x.
      terms: arrays whose sum is x, where it is better not to store that.
    """
    x = strong(x)
    norm = _norm_for(ord)((x,), tuple(terms), turn, axes, ord)
    return _over_devices(norm, ord, names, _needs_scaling(x.dtype, ord)) if names else norm


@in_float64
def tree_norm(tree: Any, ord: Any, names_of: Callable[[Any], Names]) -> jax.Array:  # noqa: A002
    """The norm of all leaves of `tree` together; `names_of(leaf)` are the mesh axes it is spread over.

    Leaves that are spread alike are put together first: one all-reduce of a scalar for each kind.
    """
    groups: dict[Names, list[jax.Array]] = {}
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_measured(leaf)]
    for leaf in leaves:
        groups.setdefault(names_of(leaf), []).append(strong(leaf))
    scaled = _needs_scaling(norm_dtype(leaves), ord)
    parts = []
    for names, group in groups.items():
        norm = _norm_for(ord)(tuple(group), (), None, None, ord)
        parts.append(_over_devices(norm, ord, names, scaled) if names else norm)
    if len(parts) == 1:
        return parts[0]
    return norm_of(jnp.stack(parts) if parts else jnp.zeros(0, np.float64), None, ord)


def _needs_scaling(dtype: Any, p: Any) -> bool:
    """Whether sums of |x|**p could leave the range of a float64."""
    return (
        dtype in (np.float64, np.complex128)
        or isinstance(p, jax.core.Tracer)
        or p > _LARGEST_PLAIN_POWER
        # TPUs emulate float64 by pairs of float32, with the range of a float32.
        or jax.default_backend() == "tpu"
    )


def _over_devices(norm: jax.Array, ord: Any, names: Names, scaled: bool) -> jax.Array:  # noqa: A002
    """The norm of what is spread over mesh axes, from each device's own norm."""
    if not isinstance(ord, jax.core.Tracer) and ord == math.inf:
        return pmax(norm, names)
    return _root_of_sum(norm, lax.convert_element_type(ord, np.float64), names, scaled)


@in_float64
def largest(
    xs: Arrays,
    axes: Reduced = None,
    turn: Turn = None,
    of: Callable[[jax.Array], jax.Array] = jnp.abs,
    at_least: float = 0.0,
) -> jax.Array:
    """The largest of(x), in float64, and at least so much; of all arrays together where axes are None."""
    narrow = [x for x in xs if is_narrow(x)]
    if not narrow:
        how = Reduction(of, jnp.maximum, functools.partial(max_of, initial=at_least))
        return wide(reduce_all(how, xs, (), axes, turn))
    if len(narrow) < len(xs):
        others = [x for x in xs if not is_narrow(x)]
        return jnp.maximum(*(largest(part, axes, turn, of, at_least) for part in (narrow, others)))
    # XLA's CPU compiler writes out what 16-bit entries are converted to where two operations share it. So the
    # maximum alone is of float64, and NaN, which `max_of` would find, is found in entries behind a barrier.
    how = Reduction(lambda x: of(wide(x)), jnp.maximum, functools.partial(jnp.max, initial=at_least))

    def on_cpu(found: jax.Array, *xs: jax.Array) -> jax.Array:
        apart = lax.optimization_barrier(xs)
        total = _sum(apart, axes, lambda x: jnp.abs(lax.convert_element_type(x, np.float32)))
        return jnp.where(jnp.isnan(total), jnp.nan, found)

    found = reduce_all(how, xs, (), axes, turn)
    return lax.platform_dependent(found, *xs, cpu=on_cpu, default=lambda found, *_: found)


def _sum(xs: Arrays, axes: Reduced, of: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Sum a function of the entries along `axes`, and over the arrays."""
    sums = [jnp.sum(of(x), axis=axes, keepdims=axes is not None) for x in xs]
    return jnp.sum(jnp.stack(sums), axis=0) if len(sums) > 1 else sums[0]


def _nonzero(x: jax.Array) -> jax.Array:
    """Replace by 1 what cannot divide: 0, NaN and infinity."""
    return jnp.where((x > 0) & (x < jnp.inf), x, 1.0)


def _norm_for(ord: Any) -> Callable[[Arrays, Arrays, Turn, Reduced, Any], jax.Array]:  # noqa: A002
    return _traced_norm if isinstance(ord, jax.core.Tracer) else _norm


# The norm of several arrays together, or of the units of one, which may be given as the sum of `terms`.
@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
@in_float64
def _norm(xs: Arrays, terms: Arrays, turn: Turn, axes: Reduced, p: float) -> jax.Array:
    if p == math.inf:
        return largest(xs, axes, turn)
    if not any(_needs_scaling(x.dtype, p) for x in xs):
        how = Reduction(lambda part: _powers(part, p), jnp.add, jnp.sum)
        return _root(reduce_all(how, xs, terms, axes, turn), p)
    unit = _nonzero(largest(xs, axes))
    return unit * _root(_sum(xs, axes, lambda x: _power(jnp.abs(wide(x)) / unit, p)), p)


@_norm.defjvp
@in_float64
def _norm_jvp(axes: Reduced, p: float, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (xs, terms, turn), (dxs, _, _) = primals, tangents
    norm = _norm(xs, terms, turn, axes, p)
    pairs = [_size_and_slope(x, dx) for x, dx in zip(xs, dxs, strict=True)]
    if p == math.inf:  # entries that tie for the largest share the derivative
        ties = jnp.maximum(_sum([size for size, _ in pairs], axes, lambda size: wide(size == norm)), 1.0)
        slopes = [wide(size == norm) / ties * slope for size, slope in pairs]
    else:
        slopes = [(size / _nonzero(norm)) ** (p - 1) * slope for size, slope in pairs]
    return norm, _sum(slopes, axes, wide)


def _size_and_slope(x: jax.Array, dx: jax.Array) -> tuple[jax.Array, jax.Array]:
    """|x| and its derivative along dx, 0 at 0."""
    if not jnp.iscomplexobj(x):
        return jnp.abs(wide(x)), jnp.sign(wide(x)) * wide(dx)
    # Widened after they are taken apart: JAX transposes taking apart in the width of its own mode.
    re, im, dre, dim = (wide(part) for part in (x.real, x.imag, dx.real, dx.imag))
    size = jnp.sqrt(jnp.where((re == 0) & (im == 0), 1.0, re * re + im * im))
    return jnp.where((re == 0) & (im == 0), 0.0, size), (re * dre + im * dim) / size


@in_float64
def _traced_norm(xs: Arrays, terms: Arrays, turn: Turn, axes: Reduced, p: jax.Array) -> jax.Array:
    """The norm for a p that only the running program knows: scaled, so that p = inf is right too."""
    p = lax.convert_element_type(p, np.float64)
    return lax.cond(
        p == 2, lambda: _norm(xs, terms, turn, axes, 2.0), lambda: _norm_to_any_power(xs, axes, p)
    )


def _norm_to_any_power(xs: Arrays, axes: Reduced, p: jax.Array) -> jax.Array:
    unit = lax.stop_gradient(_nonzero(largest(xs, axes)))

    def powers(x: jax.Array) -> jax.Array:
        ratio = jnp.abs(wide(x)) / unit
        return jnp.where(ratio == 0, 0.0, jnp.where(ratio == 0, 1.0, ratio) ** p)

    total = _sum(xs, axes, powers)
    return unit * jnp.where(total == 0, 0.0, jnp.where(total == 0, 1.0, total) ** (1 / p))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
@in_float64
def _root_of_sum(norm: jax.Array, p: jax.Array, names: Names, scaled: bool) -> jax.Array:
    unit = _nonzero(pmax(norm, names)) if scaled else jnp.ones(())
    return unit * lax.psum((norm / unit) ** p, names) ** (1 / p)


@_root_of_sum.defjvp
@in_float64
def _root_of_sum_jvp(names: Names, scaled: bool, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    norm, p = primals
    total = _root_of_sum(norm, p, names, scaled)
    return total, lax.psum((norm / _nonzero(total)) ** (p - 1) * tangents[0], names)


def _power(size: jax.Array, p: float) -> jax.Array:
    return size if p == 1 else size * size if p == 2 else size**p


def _root(total: jax.Array, p: float) -> jax.Array:
    return total if p == 1 else jnp.sqrt(total) if p == 2 else total ** (1 / p)


def _powers(x: jax.Array, p: float) -> jax.Array:
    """|x|**p in float64; two multiplications and no root for p = 2, complex or not."""
    if p == 2 and jnp.iscomplexobj(x):
        return wide(x.real) ** 2 + wide(x.imag) ** 2
    return wide(x) * wide(x) if p == 2 else _power(jnp.abs(wide(x)), p)
