"""Layers that are the identity in the forward pass and change the gradient in the backward pass.

They take any pytree. Layers that clip support only reverse mode; the others support forward mode too. Higher
derivatives are those of the changed gradient: a layer does not change them a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import Axes, check_axes
from clipjax._core.bounds import Bound, bound_at, check_bound, check_fits, check_fits_leaves, check_order
from clipjax._core.clip_entries import check_entries, clip_entries
from clipjax._core.dtypes import as_arrays
from clipjax._core.mesh import AxisName
from clipjax._core.trees import Report, clip_tree, clip_units, units_of
from clipjax.backward.rules import change_cotangents, floats_of, replaced, scaled

_T = TypeVar("_T")


@explained
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
      low: the lower limit; without `high`, the bound on absolute values, also for complex entries. A
        number or an array that broadcasts to every leaf, traced or not. Its own gradient is 0.
      high: the upper limit, in the same forms.
      axis_name: in `pmap` and unchecked `shard_map`, the mesh axes that `probe` covers.
      probe: as in :func:`clip_gradient_by_norm`, for the largest absolute entry of the gradient.

    Returns:
      `x`, bit for bit.

    Raises:
      TypeError, ValueError: a limit is not a number, is a schedule or NaN, or does not fit a leaf;
        `low` is above `high`; a single limit is negative; there are two limits and a leaf is complex; `probe`
        is not a float scalar; forward mode is used, as in `jax.jvp`.

    Guarantees: those of `clip_by_value`, for the gradient. Measured in float64, no entry is outside;
    entries inside are unchanged, bit for bit; NaN stays NaN. Equals `x.register_hook(lambda g: g.clamp(low,
    high))` in PyTorch.

    Example:
      >>> import clipjax, jax
      >>> jax.grad(lambda x: 5.0 * clipjax.clip_gradient_by_value(x, -1.0, 1.0))(2.0)
      Array(1., dtype=float32, weak_type=True)
    """
    bounds: tuple[Any, Any]
    if high is None:
        bounds = (None, _float64("bound", low))
    else:
        bounds = (_float64("low", low, None), _float64("high", high, None))
        check_order(low, high)
    check_entries(as_arrays(x), *bounds)

    def clip(gradient: Any, low: Any, high: Any) -> tuple[Any, Report]:
        return clip_entries(gradient, low, high, axis_name)

    return change_cotangents("clip_gradient_by_value", clip, x, bounds, probe)


@explained
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

    Use it as a layer of a model, `x = clip_gradient_by_norm(x, 1.0)`; on the carry of a recurrent cell it
    bounds the gradient at every step. Under `vmap` each example is clipped separately; an `x` that is not
    mapped has one gradient, the sum over the examples. If the batch is an axis of `x`, reduce the other
    axes to clip each example.

    Args:
      x: a pytree of arrays of any shapes and dtypes.
      max_norm: the bound, a number or an array that broadcasts to the norms, traced or not. Its own
        gradient is 0.
      axes: the axes to reduce, whose entries share a norm. None is the whole leaf; or an int, a tuple,
        a rule such as `clipjax.fan_in`, or a mapping from path patterns to these.
      specs: inside `shard_map`, the PartitionSpec tree of `x`, for norms of units.
      axis_name: in `pmap` and unchecked `shard_map`, the mesh axes that a norm is spread over.
      probe: a float scalar whose value is not used; its gradient is the largest norm before clipping. Use
        each probe only once, as gradients add up. Under `scan` or `vmap`, an array of zeros along the mapped
        axis gives a norm for each step or example.

    Returns:
      `x`, bit for bit.

    Raises:
      TypeError, ValueError: `max_norm` is not a number, is a schedule, negative or NaN, or does not fit
        the norms; `axes` do not fit a leaf, a pattern matches no leaf, or no leaf is clipped; `probe` is
        not a float scalar; forward mode is used, as in `jax.jvp`.

    Guarantees: those of `clip_by_norm`, for the gradient. Measured in float64, no norm is above
    `max_norm`; a gradient inside is unchanged, bit for bit; a non-finite entry makes every entry that shares
    its norm NaN. Gradients of gradients are correct, also with `jax.hessian` (forward over reverse). Equals a
    `tf.custom_gradient` that returns its input and applies `tf.clip_by_norm` to the gradient.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(x, probe):
      ...     return jnp.sum(jnp.array([3.0, 4.0]) * clipjax.clip_gradient_by_norm(x, 1.0, probe=probe))
      >>> gradient, norm = jax.grad(loss, argnums=(0, 1))(jnp.ones(2), jnp.zeros(()))
      >>> print(gradient.round(3), norm)
      [0.6 0.8] 5.0
    """
    axes = check_axes(axes)
    bound = _float64("max_norm", max_norm)
    for unit in units_of(as_arrays(x), axes, specs, axis_name):
        shape = enumerate(unit.leaf.shape)
        kept = () if unit.reduced is None else tuple(1 if i in unit.reduced else n for i, n in shape)
        check_fits(
            "max_norm", bound, kept, f"the norms of {unit.path!r}" if unit.path else "the norms of the array"
        )

    def clip(gradient: Any, bound: Any) -> tuple[Any, Report]:
        return clip_units(gradient, lambda _: bound, axes, 2.0, specs, axis_name)

    return change_cotangents("clip_gradient_by_norm", clip, x, (bound,), probe)


@explained
def clip_gradient_by_global_norm(
    tree: _T, max_norm: Bound, *, axis_name: AxisName = None, probe: jax.Array | None = None
) -> _T:
    """Return `tree`, and clip the global norm of its gradient: that of all leaves together.

    Every leaf counts toward the norm, even if no gradient with respect to it is requested. `vmap` acts as in
    :func:`clip_gradient_by_norm`.

    Args:
      tree: a pytree of arrays of any shapes and dtypes.
      max_norm: the bound, a number or a scalar array, traced or not. Its own gradient is 0.
      axis_name: in `pmap` and unchecked `shard_map`, the mesh axes that every leaf is spread over.
      probe: as in :func:`clip_gradient_by_norm`.

    Returns:
      `tree`, bit for bit.

    Raises:
      TypeError, ValueError: `max_norm` is not a number, is a schedule, negative, NaN or not a scalar;
        `probe` is not a float scalar; forward mode is used, as in `jax.jvp`.

    Guarantees: those of `clip_by_global_norm`, for the gradient.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(tree):
      ...     tree = clipjax.clip_gradient_by_global_norm(tree, 1.0)
      ...     return 3.0 * tree["a"] + 4.0 * tree["b"]
      >>> gradient = jax.grad(loss)({"a": jnp.ones(()), "b": jnp.ones(())})
      >>> print({key: value.round(3) for key, value in gradient.items()})
      {'a': Array(0.6, dtype=float32), 'b': Array(0.8, dtype=float32)}
    """
    bound = check_fits("max_norm", _float64("max_norm", max_norm), (), "the norm of all leaves")

    def clip(gradient: Any, bound: Any) -> tuple[Any, Report]:
        return clip_tree(gradient, bound, 2.0, axis_name)

    return change_cotangents("clip_gradient_by_global_norm", clip, tree, (bound,), probe)


@explained
def scale_gradient(x: _T, factor: float | jax.Array | np.ndarray) -> _T:
    """Return `x`, and multiply its gradient by `factor`.

    A factor of -1 reverses the gradient, as domain-adversarial training does; 0 stops it.

    Args:
      x: a pytree of arrays of any shapes and dtypes.
      factor: a real, finite number or an array that broadcasts to every leaf, traced or not. Its own
        gradient is 0.

    Returns:
      `x`, bit for bit. Forward mode multiplies the tangents by the factor.

    Raises:
      TypeError, ValueError: `factor` is not a number, is a schedule, NaN or infinite, or does not fit
        a leaf.

    References:
      Ganin et al., Domain-adversarial training of neural networks, 2016 (arXiv 1505.07818)

    Example:
      >>> import clipjax, jax
      >>> jax.grad(lambda x: clipjax.scale_gradient(x, 5.0))(2.0)
      Array(5., dtype=float32, weak_type=True)
    """
    leaves, rebuild = floats_of(x)
    value = check_fits_leaves("factor", _float64("factor", factor, None), as_arrays(x))
    if not isinstance(factor, jax.core.Tracer) and not np.isfinite(factor).all():
        raise ValueError(f"factor must be finite, got {shown(factor)}")
    return rebuild(scaled(leaves, value))


def replace_gradient(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function with the value of `forward` and the gradient of `backward`.

    The value is exactly that of `forward`, which need not be differentiable: no gradient flows through
    it. Gradients flow to everything that `backward` depends on, including values that it closes over.
    Derivatives of all orders are those of `backward`, in forward and reverse mode.

    Args:
      forward: a function of pytrees.
      backward: a function of the same arguments, whose result has the structure, shapes and dtypes of
        that of `forward`.

    Returns:
      A function of the same arguments.

    Raises:
      TypeError, ValueError: `forward` or `backward` is not a function. In a call: their results differ in
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
    for key, given in (("forward", forward), ("backward", backward)):
        if not callable(given):
            raise TypeError(f"{key} must be a function, got {shown(given)}")

    def without_gradient(leaf: Any) -> Any:
        return lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf

    def function(*args: Any, **kwargs: Any) -> Any:
        stopped_args, stopped_kwargs = jax.tree.map(without_gradient, (args, kwargs))
        value = as_arrays(forward(*stopped_args, **stopped_kwargs))
        substitute = as_arrays(backward(*args, **kwargs))
        _check_alike(value, substitute)
        leaves, rebuild = floats_of(value)
        return rebuild(replaced(leaves, floats_of(substitute)[0]))

    return function


def _float64(name: str, bound: Any, minimum: float | None = 0.0) -> jax.Array:
    """Check a bound, and convert it to float64."""
    if callable(bound):
        raise TypeError(
            f"{name} must be a number or an array here, not a schedule: a layer does not know the step. "
            f"Got {shown(bound)}"
        )
    check_bound(name, bound, minimum=minimum, forms="a number or an array")
    return bound_at(name, bound, minimum=minimum)(None)


def _check_alike(value: Any, substitute: Any) -> None:
    structure: Any
    structure, other = jax.tree.structure(value), jax.tree.structure(substitute)
    if structure != other:
        raise ValueError(
            f"forward and backward must return the same structure: forward returns {structure}, but backward "
            f"returns {other}"
        )
    leaves = jax.tree_util.tree_leaves_with_path(value)
    for (path, a), b in zip(leaves, jax.tree.leaves(substitute), strict=True):
        one, two = (f"{leaf.dtype}{list(jnp.shape(leaf))}" for leaf in (a, b))
        if one != two:
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise ValueError(f"forward returns {one}{where}, but backward returns {two}")
