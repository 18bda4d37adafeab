"""Identities with custom derivatives, from which the layers are built.

A clip is not linear in the gradient, so it has no forward mode. An error must say so and name the layer,
also under `jit`, where JAX differentiates before it computes. So the clip is preceded by an identity whose
tangents JAX can transpose, as reverse mode does, but cannot compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from clipjax._core.axes import is_measured
from clipjax._core.dtypes import as_arrays, in_float64, strong
from clipjax._core.rounding import widened
from clipjax._core.trees import Report


def floats_of(tree: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Return the leaves that have a gradient, and a function that puts such leaves back into the tree."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(as_arrays(tree))
    others = [None if is_measured(x) else x for x in leaves]

    def rebuild(floats: Any) -> Any:
        rest = iter(floats)
        return treedef.unflatten([next(rest) if other is None else other for other in others])

    return [x for x in leaves if is_measured(x)], rebuild


@jax.custom_jvp
def scaled(leaves: list[Any], _factor: Any) -> list[Any]:
    """Return the leaves; their tangents are multiplied by the factor."""
    return leaves


@scaled.defjvp
@in_float64
def _scaled_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    leaves, factor = primals

    def scale(tangent: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(tangent):
            return lax.complex(scale(tangent.real), scale(tangent.imag))
        wide = widened(strong(tangent))  # so that 16-bit tangents are rounded once
        return lax.convert_element_type(wide * jnp.asarray(factor, wide.dtype), tangent.dtype)

    return leaves, [scale(tangent) for tangent in tangents[0]]


@jax.custom_jvp
def replaced(value: list[Any], _substitute: list[Any]) -> list[Any]:
    """Return the value; its tangents are those of the substitute."""
    return value


@replaced.defjvp
def _replaced_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return replaced(*primals), tangents[1]


def change_cotangents(
    name: str, change: Callable[..., tuple[Any, Report]], tree: Any, bounds: tuple[Any, ...], probe: Any
) -> Any:
    """Return `tree`, with cotangents changed by `change(cotangents, *bounds) -> (cotangents, report)`.

    The gradient of `probe` is the norm in the report; that of the bounds is 0. `name` is the layer's name.
    """
    if probe is not None:
        probe = as_arrays(probe)
        if jnp.shape(probe) != () or not jnp.issubdtype(probe.dtype, jnp.floating):
            raise TypeError(f"probe must be a float scalar, got {probe.dtype}{list(jnp.shape(probe))}")
    tree = as_arrays(tree)
    leaves, rebuild = floats_of(tree)
    no_gradient = np.zeros((), jax.dtypes.float0)
    as_tree = floats_of(jax.tree.map(lambda x: x if is_measured(x) else no_gradient, tree))[1]

    @in_float64
    def backward(kept: Any, cotangents: list[Any]) -> tuple[Any, Any, None]:
        probe, bounds = kept
        changed, report = change(as_tree(cotangents), *bounds)
        if probe is not None:
            probe = lax.stop_gradient(lax.convert_element_type(report.norm, probe.dtype))
        return floats_of(changed)[0], probe, None

    identity = jax.custom_vjp(lambda leaves, *_: leaves)
    identity.defvjp(lambda leaves, *kept: (leaves, kept), backward)
    try:
        return rebuild(identity(*_without_forward_mode((leaves, probe), name), bounds))
    except TypeError as error:
        if "forward-mode" in str(error):  # JAX may raise first, without the name of the layer
            _raise(name=name)
        raise


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _without_forward_mode(tree: Any, _name: str) -> Any:
    return tree


def _jvp(name: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
    treedef: Any
    leaves, treedef = jax.tree.flatten(tangents[0])
    nonzero = [i for i, tangent in enumerate(leaves) if not isinstance(tangent, SymbolicZero)]
    # One operation for all: otherwise JAX would compute the tangents that it already knows, such as zeros.
    kept = _transposable().bind(*(leaves[i] for i in nonzero), name=name)
    for i, tangent in zip(nonzero, kept, strict=True):
        leaves[i] = tangent
    return primals[0], treedef.unflatten(leaves)


_without_forward_mode.defjvp(_jvp, symbolic_zeros=True)


@functools.cache
def _transposable() -> Any:
    """Make the identity on tangents, as a primitive that can be transposed and mapped but not computed."""

    def transpose(cotangents: Any, *tangents: Any, **_: Any) -> list[Any]:
        return [c if ad.is_undefined_primal(t) else None for c, t in zip(cotangents, tangents, strict=True)]

    # The class of all primitives. Importing it from `jax.extend` is slow, as that loads Pallas.
    primitive = type(lax.add_p)("clipjax_transposable")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *tangents, **_: tangents)
    primitive.def_impl(_raise)
    mlir.register_lowering(primitive, _raise)
    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = lambda xs, dims, name: (primitive.bind(*xs, name=name), dims)
    return primitive


def _raise(*_: Any, name: str) -> Any:
    raise TypeError(
        f"{name} has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize): a clipped gradient is "
        "not linear in the gradient.\nDifferentiate in reverse mode first (jax.grad, jax.vjp, jax.jacrev); "
        "forward mode over that works, as in jax.hessian or jax.jvp(jax.grad(f), …)."
    )
