"""What changes tangents, by linear rules that have both modes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from clipjax._core.norms import in_float64, strong
from clipjax._core.rounding import widened


@jax.custom_jvp
def scaled(leaves: list[Any], factor: Any) -> list[Any]:
    """The identity, whose tangents are multiplied by `factor`."""
    del factor
    return leaves


@scaled.defjvp
@in_float64
def _scaled_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    leaves, factor = primals

    def scale(tangent: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(tangent):
            return lax.complex(scale(tangent.real), scale(tangent.imag))
        wide = widened(strong(tangent))  # one rounding for 16 bits
        return lax.convert_element_type(wide * jnp.asarray(factor, wide.dtype), tangent.dtype)

    return leaves, [scale(tangent) for tangent in tangents[0]]


@jax.custom_jvp
def first(value: list[Any], substitute: list[Any]) -> list[Any]:
    """The one, with the derivatives of the other. Their sum and difference would not be exact."""
    del substitute
    return value


@first.defjvp
def _first_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return first(*primals), tangents[1]


def stopped(leaf: Any) -> Any:
    """Cut the derivatives of an array; anything else has none."""
    return lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf


def check_alike(value: Any, substitute: Any) -> None:
    """Raise if the results of `forward` and `backward` differ in structure, shape or dtype."""
    structure: Any
    structure, other = jax.tree.structure(value), jax.tree.structure(substitute)
    if structure != other:
        raise ValueError(f"forward returns {structure}, but backward returns {other}")
    pairs = zip(jax.tree_util.tree_flatten_with_path(value)[0], jax.tree.leaves(substitute), strict=True)
    for (path, a), b in pairs:
        if (jnp.shape(a), a.dtype) != (jnp.shape(b), b.dtype):
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise ValueError(
                f"forward returns {a.dtype}{list(jnp.shape(a))}{where}, "
                f"but backward returns {b.dtype}{list(jnp.shape(b))}"
            )
