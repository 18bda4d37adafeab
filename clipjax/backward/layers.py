"""Layers that change the gradient on its way back: the identity forward, on any pytree.

Scaling is linear, and so is a replaced gradient: both have forward and reverse mode. A clipped
gradient is not a linear function of the gradient, so it is the transpose of nothing: reverse mode only.

A gradient is changed once. Who differentiates it again gets the derivative of what came out: the rules
return the leaves themselves, and not the layer's result, whose next derivative would be changed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._core.axes import Axes, check_axes
from clipjax._core.bounds import Bound, bound_at, check_bound, check_fits, check_order
from clipjax._core.limits import clip_entries
from clipjax._core.mesh import AxisName
from clipjax._core.norms import as_arrays
from clipjax._core.trees import Report, clip_tree, clip_units, units_of
from clipjax.backward.cotangents import altered_back, floats_of
from clipjax.backward.linear_rules import check_alike, first, scaled, stopped

_T = TypeVar("_T")


def clip_gradient_by_value(
    x: _T,
    low: Bound,
    high: Bound | None = None,
    *,
    axis_name: AxisName = None,
    probe: jax.Array | None = None,
) -> _T:
    """Return `x`, and clip each entry of its gradient to `[low, high]`.

    Args:
      x: a pytree of arrays of any shapes and dtypes.
      low: the lower limit; or, without `high`, the bound on the absolute value, for complex entries
        too. A number or an array that broadcasts to every leaf, traced or not. Its own gradient is 0.
      high: the upper limit, likewise.
      axis_name: the mesh axes over which `probe` is taken, in `pmap` and unchecked `shard_map`.
      probe: a float scalar that changes nothing, and whose gradient is the largest absolute entry of
        the gradient of `x` before it was clipped.

    Returns:
      `x`, bit for bit.

    Raises:
      TypeError, ValueError: a limit is no number, a schedule, NaN, negative as the only one, does not
        fit a leaf, or is above the other; a leaf is complex, and there are two limits. Under
        `jax.jvp`: there is no forward mode.

    Guarantees: those of `clip_by_value`, for the gradient: no entry is outside, measured in float64;
    entries inside come back bit for bit; NaN stays NaN.

    Equals `x.register_hook(lambda g: g.clamp(low, high))` in PyTorch.

    Example:
      >>> import clipjax, jax
      >>> jax.grad(lambda x: 5.0 * clipjax.clip_gradient_by_value(x, -1.0, 1.0))(2.0)
      Array(1., dtype=float32, weak_type=True)
    """
    if high is None:
        _check_constant("bound", low)
    else:
        _check_constant("low", low, None)
        _check_constant("high", high, None)
        check_order(low, high)
    for leaf in floats_of(x)[0]:
        if high is not None and jnp.iscomplexobj(leaf):
            raise TypeError(f"x has a complex leaf, of dtype {leaf.dtype}: pass one bound, on |z|")
        for limit in (low, high):
            _check_shape(limit, leaf.shape, "a leaf")

    def change(tree: Any, low: Any, high: Any) -> tuple[Any, Report]:
        if high is None:
            return clip_entries(tree, None, _evaluate("bound", low), axis_name)
        return clip_entries(tree, _evaluate("low", low, None), _evaluate("high", high, None), axis_name)

    return altered_back("clip_gradient_by_value", change, x, (low, high), probe)


def clip_gradient_by_norm(
    x: _T,
    max_norm: Bound,
    axes: Axes = None,
    *,
    specs: Any = None,
    axis_name: AxisName = None,
    probe: jax.Array | None = None,
) -> _T:
    """Return `x`, and clip the norm of its gradient: of each leaf, or of each unit along `axes`.

    Called between two layers of a model, it reads as a layer: `x = clip_gradient_by_norm(x, 1.0)`. On
    the carry of a recurrent cell it bounds the gradient at every step back. Under `vmap` each example
    is clipped by itself; of an `x` that is not mapped, there is one gradient, the sum over the examples.
    To clip each example of a batch that is an axis of `x`, reduce the other axes.

    Args:
      x: a pytree of arrays of any shapes and dtypes.
      max_norm: the bound, a number or an array that broadcasts to the norms, traced or not. Its own
        gradient is 0.
      axes: the axes that are reduced, those whose entries share a norm. None is the whole leaf; an
        int, a tuple, a rule such as `clipjax.fan_in`, or a mapping from path patterns to these.
      specs: inside `shard_map`, the PartitionSpec tree of `x`, for norms of units.
      axis_name: the mesh axes that a norm is spread over, in `pmap` and unchecked `shard_map`.
      probe: a float scalar that changes nothing, and whose gradient is the largest norm before
        clipping. One for each place: the gradients of a probe that is used twice add up. Under `scan`
        or `vmap`, pass an array of zeros along the mapped axis, and get a norm for each step or example.

    Returns:
      `x`, bit for bit.

    Raises:
      TypeError, ValueError: `max_norm` is no number, a schedule, negative or NaN, or does not fit the
        norms; `axes` do not fit a leaf, or a pattern matches none; `probe` is no float scalar. Under
        `jax.jvp`: there is no forward mode.

    Guarantees: those of `clip_by_norm`, for the gradient: measured in float64, no norm is above
    `max_norm`; what is inside comes back bit for bit; a non-finite entry makes every entry that shares
    its norm NaN. Gradients of gradients are right, `jax.hessian` (forward over reverse) included.

    Equals a `tf.custom_gradient` that is the identity, with `tf.clip_by_norm` of the gradient.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(x, probe):
      ...     return jnp.sum(jnp.array([3.0, 4.0]) * clipjax.clip_gradient_by_norm(x, 1.0, probe=probe))
      >>> gradient, norm = jax.grad(loss, argnums=(0, 1))(jnp.ones(2), jnp.zeros(()))
      >>> print(gradient.round(3), norm)
      [0.6 0.8] 5.0
    """
    _check_constant("max_norm", max_norm)
    axes = check_axes(axes)
    for unit in units_of(as_arrays(x), axes, specs, axis_name):
        reduced, shape = unit.reduced, unit.leaf.shape
        kept = () if reduced is None else tuple(1 if i in reduced else n for i, n in enumerate(shape))
        _check_shape(max_norm, kept, "the norms")

    def change(tree: Any, bound: Any) -> tuple[Any, Report]:
        limit = _evaluate("max_norm", bound)
        return clip_units(tree, lambda _: limit, axes, 2.0, specs, axis_name)

    return altered_back("clip_gradient_by_norm", change, x, (max_norm,), probe)


def clip_gradient_by_global_norm(
    tree: _T, max_norm: Bound, *, axis_name: AxisName = None, probe: jax.Array | None = None
) -> _T:
    """Return `tree`, and clip the norm of its gradient, of all leaves together.

    Under `vmap` each example is clipped by itself; of a tree that is not mapped, there is one gradient,
    the sum over the examples.

    Args:
      tree: a pytree of arrays of any shapes and dtypes.
      max_norm: the bound, a number or a scalar array, traced or not. Its own gradient is 0.
      axis_name: the mesh axes that every leaf is spread over, in `pmap` and unchecked `shard_map`.
      probe: a float scalar that changes nothing, and whose gradient is the norm before clipping. See
        :func:`clip_gradient_by_norm`.

    Returns:
      `tree`, bit for bit.

    Raises:
      TypeError, ValueError: `max_norm` is no number, a schedule, negative, NaN or not a scalar; `probe`
        is no float scalar. Under `jax.jvp`: there is no forward mode.

    Guarantees: those of `clip_by_global_norm`, for the gradient. Every leaf of `tree` counts towards
    the norm, also one with respect to which nobody differentiates.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(tree):
      ...     tree = clipjax.clip_gradient_by_global_norm(tree, 1.0)
      ...     return 3.0 * tree["a"] + 4.0 * tree["b"]
      >>> gradient = jax.grad(loss)({"a": jnp.ones(()), "b": jnp.ones(())})
      >>> print({key: value.round(3) for key, value in gradient.items()})
      {'a': Array(0.6, dtype=float32), 'b': Array(0.8, dtype=float32)}
    """
    _check_constant("max_norm", max_norm)
    _check_shape(max_norm, (), "one norm")

    def change(tree: Any, bound: Any) -> tuple[Any, Report]:
        return clip_tree(tree, _evaluate("max_norm", bound), 2.0, axis_name)

    return altered_back("clip_gradient_by_global_norm", change, tree, (max_norm,), probe)


def scale_gradient(x: _T, factor: float | jax.Array | np.ndarray) -> _T:
    """Return `x`, and multiply its gradient by `factor`.

    A factor of -1 reverses the gradient, as domain-adversarial training does; 0 stops it.

    Args:
      x: a pytree of arrays of any shapes and dtypes.
      factor: a real, finite number or an array that broadcasts to every leaf, traced or not. Its own
        gradient is 0.

    Returns:
      `x`, bit for bit. Forward mode works, too: tangents are multiplied by the factor.

    Raises:
      TypeError, ValueError: `factor` is no number, a schedule, NaN or infinite, or does not fit a leaf.

    References:
      Ganin et al., Domain-adversarial training of neural networks, 2016 (arXiv 1505.07818)

    Example:
      >>> import clipjax, jax
      >>> jax.grad(lambda x: clipjax.scale_gradient(x, 5.0))(2.0)
      Array(5., dtype=float32, weak_type=True)
    """
    _check_constant("factor", factor, None)
    if not isinstance(factor, jax.core.Tracer) and not np.isfinite(np.asarray(factor, np.float64)).all():
        raise ValueError(f"factor must be finite, got {factor!r}")
    leaves, rebuild = floats_of(x)
    for leaf in leaves:
        _check_shape(factor, leaf.shape, "a leaf")
    return rebuild(scaled(leaves, factor))


def replace_gradient(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function with the value of `forward` and the gradient of `backward`.

    The value is exactly that of `forward`, which need not be differentiable. Gradients flow to whatever
    `backward` depends on, values that it closes over included; nothing flows through `forward`.
    Derivatives of all orders are those of `backward`, in forward and reverse mode.

    Args:
      forward: a function of pytrees.
      backward: a function of the same arguments, whose result has the structure, the shapes and the
        dtypes of that of `forward`.

    Returns:
      A function of the same arguments.

    Raises:
      TypeError, ValueError: one of the two is no function. In a call: the results differ in
        structure, shape or dtype.

    References:
      Bengio et al., Estimating or propagating gradients through stochastic neurons for conditional
      computation, 2013 (arXiv 1308.3432): the straight-through estimator.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> straight_through = clipjax.replace_gradient(jnp.round, lambda x: x)
      >>> jax.value_and_grad(straight_through)(1.7)
      (Array(2., dtype=float32, weak_type=True), Array(1., dtype=float32, weak_type=True))
    """
    for key, function in (("forward", forward), ("backward", backward)):
        if not callable(function):
            raise TypeError(f"{key} must be a function, got {function!r}")

    def replaced(*args: Any, **kwargs: Any) -> Any:
        stopped_args, stopped_kwargs = jax.tree.map(stopped, (args, kwargs))
        value = as_arrays(forward(*stopped_args, **stopped_kwargs))
        substitute = as_arrays(backward(*args, **kwargs))
        check_alike(value, substitute)
        leaves, rebuild = floats_of(value)
        return rebuild(first(leaves, floats_of(substitute)[0]))

    return replaced


# --------------------------------------------------------------------------------------------------
# Bounds.


def _check_constant(name: str, bound: Any, minimum: float | None = 0.0) -> None:
    if callable(bound):
        raise TypeError(
            f"{name} must be a number or an array here, not a schedule: a layer does not know the step. "
            f"Got {bound!r}"
        )
    check_bound(name, bound, minimum=minimum)


def _check_shape(bound: Any, shape: tuple[int, ...], of: str) -> None:
    if bound is not None:
        check_fits(as_arrays(bound), shape, of)


def _evaluate(name: str, bound: Any, minimum: float | None = 0.0) -> jax.Array:
    return bound_at(name, bound, minimum=minimum)(None)
