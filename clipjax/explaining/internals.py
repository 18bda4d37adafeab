"""What of JAX is public in name only.

Tried with JAX 0.10 and 0.12. It may change with any minor version, and so may the
parameters of `scan`, `while`, `cond` and `jit`, which `watch`, `walk` and `lines` read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

Equation = core.JaxprEqn
_Closed: Any = getattr(core, "ClosedJaxpr")  # noqa: B009 (its stubs lack it)


class Frame(NamedTuple):
    """A line of code that was run."""

    file: str
    line: int
    function: str


def closed(jaxpr: Any) -> Any:
    """Return a jaxpr with its constants."""
    return jaxpr if isinstance(jaxpr, _Closed) else _Closed(jaxpr, ())


def interpret(
    jaxpr: Any,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    known: Callable[[Any, Any], Any],
    step: Callable[[Equation, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Return the results of a jaxpr for values of any kind.

    Args:
      jaxpr: the program.
      constants: its constants.
      arguments: the values of its inputs.
      known: makes a value of a constant, or of a number in the text, and its type.
      step: makes the outputs of an equation from the values of its operands.
    """
    pairs = zip(jaxpr.constvars, constants, strict=True)
    values = {v: known(x, v.aval) for v, x in pairs}
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(v: Any) -> Any:
        return known(v.val, v.aval) if is_literal(v) else values[v]

    for eqn in jaxpr.eqns:
        outs = step(eqn, [read(v) for v in eqn.invars])
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def is_literal(variable: Any) -> bool:
    """Whether an operand is a number in the program's text."""
    return isinstance(variable, core.Literal)


def is_inexact(aval: Any) -> bool:
    """Whether an array's elements may be NaN: a reference is no array."""
    has_dtype = hasattr(aval, "dtype") and hasattr(aval, "shape")
    is_reference = type(aval).__name__ == "AbstractRef"
    return has_dtype and not is_reference and jnp.issubdtype(aval.dtype, jnp.inexact)


def bind(eqn: Equation, operands: Sequence[Any]) -> list[Any]:
    """Run an equation on other operands."""
    params = eqn.primitive.get_bind_params(eqn.params)
    outs = eqn.primitive.bind(*operands, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def in_this_mesh(x: jax.Array) -> jax.Array:
    """Return a vector as the context has it: `auto_axes` has a mesh of its own."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty or jax.typeof(x).sharding.mesh == mesh:
        return x
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.sharding.reshard(x, everywhere)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many operands of a scan are constants, and how many are carried."""
    if "num_consts" in params:  # before JAX 0.11
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def scopes(eqn: Equation) -> str:
    """Return the transformations and named scopes around an equation."""
    return str(eqn.source_info.name_stack)


def frames(eqn: Equation) -> Iterator[Frame]:
    """Return the lines that made an equation, innermost first."""
    traceback: Any = eqn.source_info.traceback
    for each in traceback.frames if traceback else ():
        yield Frame(each.file_name, each.line_num, each.function_name)
