"""The largest and the smallest entry, on each platform, which are NaN if any entry is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.devices import on_single_device
from clipjax._core.dtypes import wide
from clipjax._core.platforms import Arrays, Axes, alike, all_axes
from clipjax._core.xla_cpu import Reduction, is_large, paired, reduce_in_slices


def larger(x: Any, y: Any) -> jax.Array:
    """Return the larger of two numbers, or NaN if one is NaN: `jnp.maximum`, with a derivative that works.

    The derivative of `jnp.maximum` contains constants, which JAX 0.12 creates in the mode of the code that
    differentiates, in which float64 may be disabled.
    """
    return jnp.where((x >= y) | (x != x), x, y)


def smaller(x: Any, y: Any) -> jax.Array:
    """Return the smaller of two numbers, or NaN if one is NaN, as :func:`larger`."""
    return jnp.where((x <= y) | (x != x), x, y)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def largest(
    xs: Arrays,
    axes: tuple[Axes, ...],
    of: Callable[[jax.Array], jax.Array] = jnp.abs,
    at_least: float = 0.0,
) -> list[jax.Array]:
    """Return the largest of(x) along axes, in float64, with axes kept with size 1; NaN if any entry is NaN.

    Args:
      xs: real or complex arrays.
      axes: the reduced axes of each array.
      of: the elementwise function whose values are compared.
      at_least: the smallest possible result.
    """

    def along(x: jax.Array, axes: Axes) -> jax.Array:
        return jnp.max(x, axis=axes, keepdims=True, initial=at_least)

    def along_on_cpu(x: jax.Array, axes: Axes) -> jax.Array:
        # XLA (jaxlib 0.10.2) loses NaN in a maximum of 4,096 entries or more, but not in a sum. The sum is
        # computed in another width, as XLA would store an intermediate that sum and maximum share.
        other = np.float32 if x.dtype == np.float64 else np.float64
        sizes = jnp.abs(lax.convert_element_type(x, other))  # without signs: inf - inf is NaN
        total = jnp.sum(sizes, axis=axes, keepdims=True)
        return jnp.where(jnp.isnan(total), jnp.nan, along(x, axes))

    def on_cpu(xs: Arrays) -> list[jax.Array]:
        others = [i for i, x in enumerate(xs) if x.dtype.itemsize >= 4]
        how = Reduction(of, jnp.maximum, along_on_cpu)
        reduced = iter(reduce_in_slices(how, [(xs[i],) for i in others], [axes[i] for i in others]))
        each = zip(xs, axes, strict=True)
        return [wide(along_narrow(x, a) if x.dtype.itemsize < 4 else next(reduced)) for x, a in each]

    def along_narrow(x: jax.Array, axes: Axes) -> jax.Array:
        # The barrier keeps XLA from storing converted 16-bit entries, which two operations would share.
        apart = jnp.abs(lax.convert_element_type(lax.optimization_barrier(x), np.float32))
        total = jnp.sum(apart, axis=axes, keepdims=True)
        return jnp.where(jnp.isnan(total), jnp.nan, along(of(wide(x)), axes))

    def default(xs: Arrays) -> list[jax.Array]:
        return [wide(along(of(x), each)) for x, each in zip(xs, axes, strict=True)]

    return lax.platform_dependent(tuple(xs), cpu=on_cpu, default=default)


@functools.partial(jax.jit, static_argnums=(1, 2))
def largest_of_all(
    xs: Arrays, of: Callable[[jax.Array], jax.Array] = jnp.abs, at_least: float = 0.0
) -> jax.Array:
    """Return the largest of(x) in several arrays, as a float64 scalar; NaN if any entry is NaN."""

    def together(xs: Arrays, of: Callable[[jax.Array], jax.Array]) -> jax.Array:
        found = [value.reshape(()) for value in largest(xs, tuple(all_axes(x) for x in xs), of, at_least)]
        return max_of(jnp.stack(found), at_least)

    def grouped(xs: Arrays) -> jax.Array:
        large, small = [x for x in xs if is_large(x)], [x for x in xs if not is_large(x)]
        groups = [paired([of(x) for x in group], jnp.maximum) for group in alike(small)]
        parts = [together(part, each) for part, each in ((large, of), (groups, jnp.positive)) if part]
        return together(parts, jnp.positive)

    if len(xs) == 1:
        return together(xs, of)
    return lax.cond(on_single_device(), grouped, lambda xs: together(xs, of), tuple(xs))


def max_of(x: jax.Array, at_least: float = 0.0) -> jax.Array:
    """Return the largest entry, in float64, or `at_least` if that is larger; NaN if any entry is NaN."""
    return largest([x], (all_axes(x),), jnp.positive, at_least)[0].reshape(())


def min_of(x: jax.Array, at_most: float = jnp.inf) -> jax.Array:
    """Return the smallest entry, in float64, or `at_most` if that is smaller; NaN if any entry is NaN."""
    return -max_of(-x, at_least=-at_most)


def largest_of_rows(xs: Arrays, names: Sequence[Sequence[str]]) -> jax.Array:
    """Return the largest number of each row of arrays without NaN, over the mesh axes of each, in float64."""

    def over_all(xs: Arrays) -> jax.Array:
        found = [jnp.max(x, axis=range(1, x.ndim), initial=-jnp.inf) for x in xs]
        over_devices = [lax.pmax(x, tuple(over)) if over else x for x, over in zip(found, names, strict=True)]
        return jnp.max(jnp.stack([wide(x) for x in over_devices]), axis=0)

    def in_float32(xs: Arrays) -> jax.Array:  # TPUs do not support this reduction in float64
        return wide(over_all([lax.convert_element_type(x, np.float32) for x in xs]))

    return lax.platform_dependent(tuple(xs), tpu=in_float32, default=over_all)
