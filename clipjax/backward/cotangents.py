"""What changes cotangents: the identity, whose rule in reverse mode is any function of them.

There is no forward mode, and an error that says so: before the identity that JAX differentiates by
its `custom_vjp` comes one whose tangents can be transposed, but not computed.
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
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from clipjax._core.axes import is_measured
from clipjax._core.norms import as_arrays, in_float64
from clipjax._core.trees import Report


def altered_back(
    name: str, change: Callable[..., tuple[Any, Report]], tree: Any, bounds: tuple[Any, ...], probe: Any
) -> Any:
    """Return `tree`, whose cotangents `change(cotangents, *bounds) -> (cotangents, report)` changes."""
    if probe is not None:
        probe = as_arrays(probe)
        if jnp.shape(probe) != () or not jnp.issubdtype(probe.dtype, jnp.floating):
            raise TypeError(f"probe must be a float scalar, got {probe.dtype}{list(jnp.shape(probe))}")
    leaves, rebuild = floats_of(tree)
    # Known bounds stay outside, in full precision; traced ones are operands, as JAX wants them.
    traced = [bound if isinstance(bound, jax.core.Tracer) else None for bound in bounds]
    known = [bound if operand is None else None for bound, operand in zip(bounds, traced, strict=True)]
    alone = floats_of(tree, without_others=True)[1]

    def back(cotangents: list[Any], traced: list[Any]) -> tuple[list[Any], jax.Array]:
        given = [k if t is None else t for k, t in zip(known, traced, strict=True)]
        changed, report = change(alone(cotangents), *given)
        return floats_of(changed)[0], report.norm

    try:
        return rebuild(_identity(back, *_reverse_only((leaves, probe), name), traced))
    except TypeError as error:
        # JAX was faster than `_reverse_only`: it maps forward mode over a batch under jit.
        if "forward-mode" in str(error):
            _refuse(name=name)
        raise


def floats_of(tree: Any, *, without_others: bool = False) -> tuple[list[Any], Callable[[Any], Any]]:
    """The leaves that have a gradient, and how to put them back beside the others."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(as_arrays(tree))
    nothing = np.zeros((), jax.dtypes.float0)
    others = [None if is_measured(x) else nothing if without_others else x for x in leaves]

    def rebuild(floats: Any) -> Any:
        rest = iter(floats)
        return treedef.unflatten([next(rest) if other is None else other for other in others])

    return [x for x in leaves if is_measured(x)], rebuild


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _identity(back: Any, leaves: list[Any], probe: Any, traced: list[Any]) -> list[Any]:
    del back, probe, traced
    return leaves


def _identity_fwd(back: Any, leaves: list[Any], probe: Any, traced: list[Any]) -> tuple[Any, Any]:
    del back
    return leaves, (probe, traced)


@in_float64
def _identity_bwd(back: Any, kept: Any, cotangents: list[Any]) -> tuple[Any, Any, Any]:
    probe, traced = kept
    changed, norm = back(cotangents, traced)
    if probe is not None:
        probe = lax.stop_gradient(lax.convert_element_type(norm, probe.dtype))
    return changed, probe, None


_identity.defvjp(_identity_fwd, _identity_bwd)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _reverse_only(tree: Any, name: str) -> Any:
    """The identity, whose tangents may be transposed, but not computed."""
    del name
    return tree


def _reverse_only_jvp(name: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
    treedef: Any
    leaves, treedef = jax.tree.flatten(tangents[0])
    moving = [i for i, tangent in enumerate(leaves) if not isinstance(tangent, SymbolicZero)]
    # All at once: a zero among them that is known is not computed while the others are not known.
    for i, tangent in zip(moving, _transposed_p.bind(*(leaves[i] for i in moving), name=name), strict=True):
        leaves[i] = tangent
    return primals[0], treedef.unflatten(leaves)


_reverse_only.defjvp(_reverse_only_jvp, symbolic_zeros=True)


def _refuse(*_: Any, name: str) -> Any:
    raise TypeError(
        f"{name} has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize): a clipped gradient is "
        "not linear in the gradient. Differentiate in reverse mode first (jax.grad, jax.vjp, jax.jacrev); "
        "forward mode over that works, as in jax.hessian or jax.jvp(jax.grad(f), …)."
    )


def _transpose(cotangents: Any, *tangents: Any, name: str) -> list[Any]:
    del name
    return [c if ad.is_undefined_primal(t) else None for c, t in zip(cotangents, tangents, strict=True)]


def _unchanged(*tangents: Any, name: str) -> Any:
    del name
    return tangents


def _batched(tangents: Any, dims: Any, *, name: str) -> Any:
    return _transposed_p.bind(*tangents, name=name), dims


_transposed_p = Primitive("clipjax_transposed")
_transposed_p.multiple_results = True
_transposed_p.def_impl(_refuse)
_transposed_p.def_abstract_eval(_unchanged)
ad.deflinear2(_transposed_p, _transpose)
batching.primitive_batchers[_transposed_p] = _batched
mlir.register_lowering(_transposed_p, _refuse)
