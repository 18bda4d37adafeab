"""Gradients that are scaled or replaced in the backward pass, at a place in a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from clipjax._core.bounds import fit_bound, number
from clipjax._core.clip import rescale
from clipjax._core.leaves import Leaf, flatten, is_inexact, short_repr
from clipjax._core.norms import sum_dtype

T = TypeVar("T")


def scale_gradient(x: T, factor: ArrayLike) -> T:
    """Return `x`, and multiply its gradient by a factor.

        backward:  g * factor

    Use it to slow a part of a model down, or to reverse its gradient by a factor of -1,
    as domain-adversarial training does. A factor of 0 stops the gradient, except for
    elements that are NaN or infinite, which become NaN.

    Args:
      x: a pytree of arrays.
      factor: a finite number, or an array that broadcasts to every leaf. Its own
        gradient is 0.

    Returns:
      `x`, bit for bit; forward mode multiplies the tangents.

    Raises:
      TypeError: `factor` is not a number, or is a schedule.
      ValueError: `factor` is NaN or infinite, or does not fit a leaf.

    Equals `optax.scale_gradient`, except that Optax takes neither traced factors nor
    arrays of several elements, raises an error in forward mode, and stops NaN with a
    factor of 0.

    References:
      Ganin et al., 2016, Domain-adversarial training of neural networks,
      arXiv:1505.07818.

    See Also:
      :func:`replace_gradient` takes the gradient of another function;
      :func:`clip_gradient_by_norm` clips it.

    Example:
      >>> import clipjax, jax
      >>> float(jax.grad(lambda x: clipjax.scale_gradient(x, 5.0))(2.0))
      5.0
    """
    value = number("factor", factor, "(-inf, inf)", scalar=False)
    leaves = flatten(x)

    def scale(leaf: Leaf) -> Any:
        if not is_inexact(leaf.value):
            return leaf.value
        fitting = fit_bound("factor", value, leaf.value, leaf)
        wide = jnp.asarray(fitting, sum_dtype(leaf.value.dtype))
        return _scaled(leaf.value, lax.stop_gradient(wide))

    return leaves.rebuild(list(map(scale, leaves.each)))


@jax.custom_jvp
def _scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return x, which has the factor in its tangents; no product could make it NaN."""
    return x


@_scaled.defjvp
def _scaled_jvp(primals: Any, tangents: Any) -> Any:
    x, factor = primals
    return _scaled(x, factor), rescale(jnp.asarray(tangents[0]), factor)


def replace_gradient(
    forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Make a function with the value of `forward` and the gradient of `backward`.

        value:  forward(x),   derivative:  backward'(x)

    Use it for a function whose own derivative is 0 or missing, such as rounding, a
    step, or a sample: with the identity as `backward` it is the straight-through
    estimator.

    Args:
      forward: a function of pytrees, which need not be differentiable.
      backward: a function of the same arguments, whose result has the structure, shapes
        and dtypes of the result of `forward`. JAX differentiates this function; it is
        not a rule that maps gradients to gradients, as a VJP is.

    Returns:
      A function of the same arguments. Its derivatives of all orders, in forward and
      reverse mode, are those of `backward`.

    Raises:
      TypeError: an argument is not a function; when the result is called, the results
        of the two functions differ in the paths, shapes or dtypes of their leaves.

    References:
      Bengio et al., 2013, Estimating or propagating gradients through stochastic
      neurons for conditional computation, arXiv:1308.3432: the straight-through
      estimator.

    See Also:
      :func:`scale_gradient` multiplies the gradient of the identity.

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
        values = flatten(forward(*fixed[0], **fixed[1]))
        others = flatten(backward(*args, **kwargs))
        kinds = [
            [f"{x.name} {x.value.dtype}{list(x.value.shape)}" for x in leaves.each]
            for leaves in (values, others)
        ]
        if kinds[0] != kinds[1]:
            raise TypeError(
                "forward and backward must return the same structure, shapes and "
                f"dtypes, got {kinds[0]} and {kinds[1]}"
            )
        pairs = zip(values.values, others.values, strict=True)
        return values.rebuild(
            [
                _replaced(value, of) if is_inexact(value) else value
                for value, of in pairs
            ]
        )

    return function


@jax.custom_jvp
def _replaced(value: jax.Array, substitute: jax.Array) -> jax.Array:
    """Return the value, with the tangents of the substitute."""
    return value


@_replaced.defjvp
def _replaced_jvp(primals: Any, tangents: Any) -> Any:
    return _replaced(*primals), tangents[1]
