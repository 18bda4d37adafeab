"""Layers that change the gradient in the backward pass, at a place within a model.

`axes` are literal here, as in NumPy: an int or a tuple applies to leaves of every rank.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from clipjax import _checks, functional
from clipjax._core import bounds, clipping, norms, trees, units
from clipjax._core.messages import short_repr
from clipjax.monitoring import taps

T = TypeVar("T")


def clip_gradient_by_value(
    x: T, low: ArrayLike, high: ArrayLike, *, tap: jax.Array | None = None
) -> T:
    """Return `x`, and clip each entry of its gradient to `[low, high]`.

    Args:
      x: a pytree of arrays.
      low: the lower limit, a number or an array that broadcasts to every leaf.
      high: the upper limit, likewise.
      tap: a :func:`tap`; the norm of a leaf is its largest absolute entry.

    Raises:
      TypeError, ValueError: a limit is NaN or not a number; `low` is above `high`; a
        leaf is complex. JAX raises a TypeError in forward mode, since a clipped
        gradient is not linear.

    Example:
      >>> import clipjax, jax
      >>> def loss(x):
      ...     return 5.0 * clipjax.clip_gradient_by_value(x, -1.0, 1.0)
      >>> float(jax.grad(loss)(2.0))
      1.0
    """
    low = bounds.as_constant("low", low, -np.inf)
    high = bounds.as_constant("high", high, -np.inf)
    _checks.check_order(low, high)

    def seen(gradient: Any, low: Any, high: Any) -> list[taps.Seen]:
        def one(leaf: trees.Leaf) -> taps.Seen:
            g = leaf.value.astype(norms.sum_dtype(leaf.value.dtype))
            below = g < _fitted("low", low, g, leaf)
            above = g > _fitted("high", high, g, leaf)
            outside = jnp.any(below | above).astype(np.uint8)
            is_above = norms.over_devices(lax.pmax, outside) > 0
            return norms.norm(g, None, jnp.inf), is_above

        leaves = trees.leaves_of(gradient)[0]
        return [one(x) for x in leaves if trees.is_float(x.value) and x.value.size]

    return _with_gradient(functional.clip_by_value, seen, tap, x, low, high)


def clip_gradient_by_norm(
    x: T,
    max_norm: ArrayLike,
    axes: units.Axes = None,
    *,
    tap: jax.Array | None = None,
) -> T:
    """Return `x`, and clip the norm of its gradient, of each leaf or unit.

    In a recurrent network it clips at every step. Under `vmap` each example is clipped
    alone.

    Args:
      x: a pytree of arrays.
      max_norm: the bound, a number or an array that broadcasts to the norms. Its own
        gradient is 0.
      axes: the axes that are reduced; None for the whole leaf.
      tap: a :func:`tap`.

    Raises:
      TypeError, ValueError: `max_norm` is negative, NaN or not a number, or does not
        fit the norms; `axes` do not fit a leaf, or apply to none. JAX raises a
        TypeError in forward mode.

    Equals a `tf.custom_gradient` that applies `tf.clip_by_norm` to the gradient.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(x):
      ...     x = clipjax.clip_gradient_by_norm(x, 1.0)
      ...     return jnp.sum(jnp.array([3.0, 4.0]) * x)
      >>> print(jax.grad(loss)(jnp.ones(2)).round(3))
      [0.6 0.8]
    """
    bound = bounds.as_constant("max_norm", max_norm)

    clip = functools.partial(functional.clip_by_norm, axes=axes)

    def seen(gradient: Any, bound: Any) -> list[taps.Seen]:
        found = units.of_tree(gradient, functional.literal(axes))
        return [
            (norm, norm > _fitted("max_norm", bound, norm, each.leaf))
            for each, norm in zip(found, units.norms_of(found), strict=True)
            if each.leaf.value.size
        ]

    return _with_gradient(clip, seen, tap, x, bound)


def clip_gradient_by_global_norm(
    tree: T, max_norm: ArrayLike, *, tap: jax.Array | None = None
) -> T:
    """Return `tree`, and clip the norm of its gradient, that of all leaves together.

    Args:
      tree: a pytree of arrays.
      max_norm: the bound, a number or a scalar array. Its own gradient is 0.
      tap: a :func:`tap`.

    Raises:
      TypeError, ValueError: `max_norm` is negative, NaN, not a number or not a scalar.
        JAX raises a TypeError in forward mode.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(tree):
      ...     tree = clipjax.clip_gradient_by_global_norm(tree, 1.0)
      ...     return 3.0 * tree["a"] + 4.0 * tree["b"]
      >>> gradient = jax.grad(loss)({"a": jnp.ones(()), "b": jnp.ones(())})
      >>> print(gradient["a"].round(3), gradient["b"].round(3))
      0.6 0.8
    """
    bound = bounds.as_constant("max_norm", max_norm, scalar=True)

    def seen(gradient: Any, bound: Any) -> list[taps.Seen]:
        norm = functional.global_norm(gradient)
        return [(norm, norm > jnp.asarray(bound, norm.dtype))]

    return _with_gradient(
        lambda *args: functional.clip_by_global_norm(*args)[0], seen, tap, tree, bound
    )


def _fitted(name: str, limit: Any, x: jax.Array, leaf: trees.Leaf) -> jax.Array:
    """Return a limit in the rank and the dtype of what it is compared with."""
    return jnp.asarray(bounds.fit_bound(name, limit, x, leaf), x.dtype)


def _with_gradient(
    change: Callable[..., Any],
    seen: Callable[..., list[taps.Seen]],
    tap: jax.Array | None,
    tree: T,
    *limits: Any,
) -> T:
    """Return a tree whose gradient becomes `change(gradient, *limits)`.

    Leaves without a gradient have float0. The gradient of the tap becomes the sums of
    what `seen(gradient, *limits)` returns.
    """
    taps.check_tap(tap)
    leaves, rebuild = trees.leaves_of(tree)
    # Arrays are arguments, since a custom derivative must not close over tracers;
    # numbers stay exact.
    arrays = [
        lax.stop_gradient(limit) if isinstance(limit, jax.Array) else None
        for limit in limits
    ]

    def call(function: Callable[..., Any], arrays: list[Any], gradient: Any) -> Any:
        pairs = zip(limits, arrays, strict=True)
        return function(gradient, *(a if b is None else b for a, b in pairs))

    def backward(kept: Any, gradient: Any) -> tuple[Any, None, Any]:
        arrays, tap = kept
        sums = None
        if tap is not None:
            sums = taps.sums_of(call(seen, arrays, gradient), tap)
        return call(change, arrays, gradient), None, sums

    @jax.custom_vjp
    def identity(tree: T, arrays: list[Any], tap: Any) -> T:
        return tree

    identity.defvjp(lambda tree, arrays, tap: (tree, (arrays, tap)), backward)
    tree = rebuild([leaf.value for leaf in leaves])
    # Raises its errors now.
    jax.eval_shape(functools.partial(call, change), arrays, tree)
    passed = trees.leaves_of(identity(tree, arrays, tap))[0]
    each = zip(leaves, passed, strict=True)
    return rebuild(
        [new.value if trees.is_float(old.value) else old.value for old, new in each]
    )


def scale_gradient(x: T, factor: ArrayLike) -> T:
    """Return `x`, and multiply its gradient by `factor`.

    A factor of -1 reverses the gradient, as domain-adversarial training does; 0 stops
    it, except NaN.

    Args:
      x: a pytree of arrays.
      factor: a finite number or an array that broadcasts to every leaf. Its own
        gradient is 0.

    Returns:
      `x`, bit for bit; forward mode multiplies the tangents.

    Raises:
      TypeError, ValueError: `factor` is not a number, NaN or infinite, or does not fit
        a leaf.

    References:
      Ganin et al., 2016, Domain-adversarial training of neural networks,
      arXiv:1505.07818.

    Example:
      >>> import clipjax, jax
      >>> float(jax.grad(lambda x: clipjax.scale_gradient(x, 5.0))(2.0))
      5.0
    """
    value = bounds.as_constant("factor", factor, -np.inf)
    if not isinstance(value, jax.core.Tracer) and not np.isfinite(value).all():
        raise ValueError(f"factor must be finite, got {short_repr(factor)}")
    leaves, rebuild = trees.leaves_of(x)

    def scale(leaf: Any) -> Any:
        if not trees.is_float(leaf.value):
            return leaf.value
        fitting = bounds.fit_bound("factor", value, leaf.value, leaf)
        wide = jnp.asarray(fitting, norms.sum_dtype(leaf.value.dtype))
        return _scaled(leaf.value, lax.stop_gradient(wide))

    return rebuild([scale(leaf) for leaf in leaves])


@jax.custom_jvp
def _scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return x, without a product that may be NaN; tangents have the factor."""
    return x


@_scaled.defjvp
def _scaled_jvp(primals: Any, tangents: Any) -> Any:
    x, factor = primals
    return _scaled(x, factor), clipping.rescale(jnp.asarray(tangents[0]), factor)


def replace_gradient(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Make a function with the value of `forward` and the gradient of `backward`.

    Args:
      forward: a function of pytrees, which need not be differentiable.
      backward: a function of the same arguments, whose result has the structure, shapes
        and dtypes of that of `forward`.

    Returns:
      A function of the same arguments. Its derivatives of all orders, in forward and
      reverse mode, are those of `backward`.

    Raises:
      TypeError: one of the two is not a function. When called: their results differ in
        structure, shape or dtype.

    References:
      Bengio et al., 2013, Estimating or propagating gradients through stochastic
      neurons for conditional computation, arXiv:1308.3432: the straight-through
      estimator.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> straight_through = clipjax.replace_gradient(jnp.round, lambda x: x)
      >>> value, gradient = jax.value_and_grad(straight_through)(1.7)
      >>> print(value, gradient)
      2.0 1.0
    """
    for name, given in (("forward", forward), ("backward", backward)):
        if not callable(given):
            raise TypeError(f"{name} must be a function, got {short_repr(given)}")

    def function(*args: Any, **kwargs: Any) -> Any:
        fixed = jax.tree.map(
            lambda x: lax.stop_gradient(x) if isinstance(x, jax.Array) else x,
            (args, kwargs),
        )
        values, rebuild = trees.leaves_of(forward(*fixed[0], **fixed[1]))
        others, _ = trees.leaves_of(backward(*args, **kwargs))
        kinds = [
            [f"{x.name} {x.value.dtype}{list(x.value.shape)}" for x in each]
            for each in (values, others)
        ]
        if kinds[0] != kinds[1]:
            raise TypeError(
                "forward and backward must return the same structure, shapes and "
                f"dtypes, got {kinds[0]} and {kinds[1]}"
            )
        each = zip(values, others, strict=True)
        return rebuild(
            [
                _replaced(a.value, b.value) if trees.is_float(a.value) else a.value
                for a, b in each
            ]
        )

    return function


@jax.custom_jvp
def _replaced(value: jax.Array, substitute: jax.Array) -> jax.Array:
    """Return the value; its tangents are those of the substitute."""
    return value


@_replaced.defjvp
def _replaced_jvp(primals: Any, tangents: Any) -> Any:
    return _replaced(*primals), tangents[1]
