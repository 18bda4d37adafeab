"""What is known of primitives; of any other, each output depends on each input."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from clipjax.explaining.internals import Equation, closed, is_inexact

# The output is the input, in another form.
SAME = {
    *("reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "rev", "name"),
    *("optimization_barrier", "sharding_constraint", "reshard", "pvary"),
}
# Of them, those whose elements are in other places.
REARRANGED = {"reshape", "transpose", "rev", "squeeze", "broadcast_in_dim"}
# The output is a part of the input, or the input rounded, and has its name.
PARTS = {"convert_element_type", "reduce_precision", "slice", "dynamic_slice"}
# An infinity goes through unchanged, from one place to another.
MOVES = SAME | PARTS
MOVES |= {
    *("select_n", "max", "min", "clamp", "concatenate", "pad", "gather", "scatter"),
    *("dynamic_update_slice", "sort", "reduce_max", "reduce_min", "cummax", "cummin"),
    *("top_k", "split", "stack", "unstack", "tile"),
}
# What they lose, as a field of `Value`. XLA on a CPU may lose NaN in a maximum, so that
# -inf - max(-inf, NaN) is a new one; exp(-inf) is 0, and so may be a sum, whose log is
# infinite again.
LOSES = {
    "reduce_max": "nan",
    "reduce_min": "nan",
    "exp": "inf",
    "exp2": "inf",
    "reduce_sum": "lost",
    "abs": "lost",
}
# An infinity that is given to one of these is no mask.
MULTIPLY = {"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"}
# Where the operand is at an end of the domain, values or slopes are not finite.
HAS_END_AT_0 = {"log", "sqrt", "rsqrt", "cbrt", "pow", "integer_pow", "div"}
HAS_ENDS = HAS_END_AT_0 | {
    *("log1p", "acos", "acosh", "asin", "atanh", "lgamma", "digamma", "erf_inv"),
}
# An element of the output depends on the elements of the inputs at its place, and may
# be bad where they are not, or is one of them.
BY_PLACE = HAS_ENDS | {
    *("add", "sub", "mul", "max", "min", "add_any", "atan2", "rem", "nextafter"),
    *("select_n", "clamp", "exp", "exp2", "expm1", "square", "sinh", "cosh", "tan"),
}
# Their infinities are at such an end, and no overflow.
HAVE_POLES = HAS_ENDS - {"div", "pow", "integer_pow"}
# They may have a jaxpr that is no call, or none that can be followed.
WHOLE = {
    *("shard_map", "pallas_call", "custom_linear_solve", "reduce", "reduce_window"),
    *("run_state", "core_map"),
}
CALLEES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


class Measured(NamedTuple):
    """What is written down of an equation."""

    outputs: tuple[int, ...] = ()  # the places of those whose magnitude is
    by_place: bool = False  # whether is, which inputs are bad where the output is
    judged: int | None = None  # the place of the input whose least element is


def measured(eqn: Equation) -> Measured:
    """Return what is written down of an equation."""
    name = eqn.primitive.name
    outputs = tuple(k for k, v in enumerate(eqn.outvars) if is_inexact(v.aval))
    if name in SAME or not outputs:
        return Measured()
    by_place = name in BY_PLACE or _is_narrower(eqn)
    by_place &= len(eqn.invars) <= 10  # which have three bits each
    judged = None if name not in HAS_ENDS else 1 if name == "div" else 0
    if name == "integer_pow" and eqn.params["y"] > 0:
        judged = None
    return Measured(outputs, by_place, judged)


def _is_narrower(eqn: Equation) -> bool:
    """Whether an equation rounds to a narrower dtype, which may overflow."""
    avals: Any = [v.aval for v in (*eqn.outvars, *eqn.invars)]
    if eqn.primitive.name != "convert_element_type" or not all(map(is_inexact, avals)):
        return False
    new, old = (jnp.finfo(aval.dtype).max for aval in avals)
    return float(new) < float(old)


def callee(eqn: Equation) -> Any:
    """Return the jaxpr that an equation calls once, or None."""
    if eqn.primitive.name in WHOLE:
        return None
    found = (eqn.params.get(key) for key in CALLEES)
    return next((closed(jaxpr) for jaxpr in found if hasattr(jaxpr, "eqns")), None)


def is_check(eqn: Equation) -> bool:
    """Whether an equation checks for NaN or infinity; `isnan` is x != x."""
    name, operands = eqn.primitive.name, eqn.invars
    return name == "is_finite" or (name == "ne" and operands[0] is operands[1])


def is_remat(eqn: Equation) -> bool:
    """Whether an equation is computed again in the backward pass, to save memory."""
    return eqn.primitive.name.startswith(("remat", "checkpoint"))


def is_silent(eqn: Equation) -> bool:
    """Whether an equation only prints, or calls the host without a result."""
    name = eqn.primitive.name
    return not eqn.outvars and ("callback" in name or name == "debug_print")
