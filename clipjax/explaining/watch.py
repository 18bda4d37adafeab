"""A program that does what another one does, and writes down how large things are.

It runs under `jit`, since the compiler decides what is finite: it fuses and rounds.
Each equation writes some numbers, in the order of the equations; those of a scan stand
in rows, one for each iteration. :mod:`clipjax.explaining.walk` reads them in the same
order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax.explaining.internals import (
    Equation,
    bind,
    closed,
    in_this_mesh,
    interpret,
    is_inexact,
    scan_counts,
)
from clipjax.explaining.primitives import callee, is_remat, is_silent, measured

# How many iterations of a while loop are written down in the first run.
ROOM = 64
# The place of no element.
LAST = np.uint32(2**32 - 1)


def _bits(x: jax.Array) -> jax.Array:
    """Return |x|, or the larger part of a complex number, as bits.

    Those of NaN are above those of infinity, and these above those of numbers. XLA on a
    CPU loses NaN in a maximum of floats.
    """
    if jnp.iscomplexobj(x):
        return jnp.maximum(_bits(x.real), _bits(x.imag))
    return _word(jnp.abs(x))


def _word(x: jax.Array) -> jax.Array:
    """Return the bits of float32, or with x64 the first half of those of float64."""
    if not _is_wide():
        return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    bits = lax.bitcast_convert_type(x.astype(jnp.float64), jnp.uint64)
    return (bits >> 32).astype(jnp.uint32)


def as_float(word: np.ndarray) -> float:
    """Return the number of a word."""
    wide = (word.astype(np.uint64) << 32).view(np.float64)
    return float(wide if _is_wide() else word.view(np.float32)) + 0.0  # no -0


def _is_wide() -> bool:
    return bool(jax.dtypes.canonicalize_dtype(float) == np.float64)


def _met(operands: Sequence[jax.Array], out: jax.Array, name: str) -> Any:
    """Return what is bad in the output at the places where operands are.

    These are bits, and which elements are NaN or infinite where no operand is. The
    three bits of operand k, from 3 k + 1 on, say whether the output is infinite where
    it is, NaN where it is, and NaN where it is infinite and no operand is NaN. Bit 0
    says whether NaN arose where the first operand is -inf.
    """
    is_nan, is_inf = jnp.isnan(out), jnp.isinf(out)
    new_nan, new_inf = is_nan, is_inf
    of_operands = []
    for place, x in enumerate(operands):
        if is_inexact(x):
            counts = operands[0] == place - 1 if name == "select_n" else True
            nan, inf = jnp.isnan(x) & counts, jnp.isinf(x) & counts
            new_nan, new_inf = new_nan & ~nan, new_inf & ~inf
            of_operands.append((place, nan, inf))
    bits = jnp.zeros(out.shape, jnp.uint32)
    for place, nan, inf in of_operands:
        for k, flags in enumerate((is_inf & inf, is_nan & nan, new_nan & inf)):
            bits |= flags.astype(jnp.uint32) << (3 * place + k + 1)
    if name in ("add", "sub") and not jnp.iscomplexobj(out):
        bits |= (new_nan & (operands[0] == -jnp.inf)).astype(jnp.uint32)
    return bits, new_nan, new_inf


def _signed(x: jax.Array, name: str) -> jax.Array:
    """Return what the least element is of: of divisors and complex numbers, |x|."""
    is_real = not jnp.iscomplexobj(x)
    x = x if is_real and name != "div" else jnp.abs(x)
    return jnp.where(jnp.isnan(x), jnp.inf, x)


@functools.partial(jax.jit, static_argnames="name")  # which traces it once for a shape
def _numbers(
    out: jax.Array,
    operands: Sequence[jax.Array] = (),
    judged: jax.Array | None = None,
    name: str = "",
) -> jax.Array:
    """Return what is written down of an array that an operation made.

    These are its largest magnitude; how many elements are NaN, and the place of the
    first of them; the same of infinities. With operands, only elements count where they
    are not bad themselves, and the bits of `_met` come next; then, for the operand that
    is judged, its least elements where the output is newly NaN, and newly infinite.
    All are one reduction: with one for each, fewer of them took 1.7 times as long as
    the step, in place of 1.2 times (a decoder, JAX 0.12 on a CPU).
    """
    none, places = np.uint32(0), lax.iota(jnp.uint32, out.size).reshape(out.shape)
    parts: list[Any] = [(_bits(out), none, jnp.maximum)]
    bits, *bad = _met(operands, out, name)
    for flags in bad:
        parts.append((flags.astype(jnp.uint32), none, jnp.add))
        parts.append((jnp.where(flags, places, LAST), LAST, jnp.minimum))
    if operands:
        parts.append((bits, none, jnp.bitwise_or))
    if judged is not None:
        signed = _signed(judged, name)
        for flags in bad:
            least = jnp.where(flags, signed, jnp.inf)
            parts.append((least, least.dtype.type(jnp.inf), jnp.minimum))
    arrays, starts, functions = zip(*parts, strict=True)

    def both(xs: Any, ys: Any) -> Any:
        return [f(x, y) for f, x, y in zip(functions, xs, ys, strict=True)]

    numbers = lax.reduce(arrays, starts, both, tuple(range(out.ndim)))
    return jnp.stack([x if x.dtype == jnp.uint32 else _word(x) for x in numbers])


def numbers_of(x: jax.Array) -> np.ndarray:
    """Return what is written down of an array that was given."""
    return np.asarray(_numbers(x))


def magnitude(x: jax.Array) -> float:
    """Return the largest |x|, where NaN is larger than infinity."""
    return as_float(numbers_of(x)[0])


def _row(numbers: Sequence[jax.Array]) -> jax.Array:
    """Return one vector of all numbers."""
    empty = jnp.zeros(0, jnp.uint32)
    return jnp.concatenate([empty, *(jnp.ravel(x) for x in numbers)])


def _measure(
    eqn: Equation, operands: Sequence[jax.Array], outs: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the numbers of one operation."""
    name, what = eqn.primitive.name, measured(eqn)
    by_place = operands if what.by_place else ()
    judged = None if what.judged is None else operands[what.judged]
    return [_numbers(outs[k], by_place, judged, name) for k in what.outputs]


def _known(x: Any, aval: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)


class Watch:
    """Runs jaxprs, and writes numbers.

    `room` has the iterations of while loops that are to be written down; `widths` gets
    the length of the rows of each loop. The keys of both are equations by identity.
    """

    def __init__(self, room: dict[int, int]) -> None:
        self.room = room
        self.widths: dict[int, int] = {}

    def run(
        self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]
    ) -> tuple[list[Any], jax.Array]:
        """Return the results of a jaxpr, and its numbers."""
        numbers: list[jax.Array] = []

        def step(eqn: Equation, operands: list[Any]) -> list[Any]:
            outs, new = self._step(eqn, operands)
            numbers.extend(new)
            return outs

        outs = interpret(jaxpr, constants, arguments, _known, step)
        return outs, _row(numbers)

    def _step(self, eqn: Equation, operands: list[Any]) -> Any:
        """Return the outputs of an equation, and its numbers."""
        name, called = eqn.primitive.name, callee(eqn)
        if name == "scan":
            return self._scan(eqn, operands)
        if name == "while":
            return self._while(eqn, operands)
        if name == "cond":
            return self._cond(eqn, operands)
        if is_silent(eqn):
            return [], []
        if called is None:
            with eqn.ctx.manager:  # the mesh, and the precision, of its call
                outs = bind(eqn, operands)
                numbers = _measure(eqn, operands, outs)
            return outs, [in_this_mesh(x) for x in numbers]
        if is_remat(eqn) and operands:  # or XLA would keep what it computes again
            operands = lax.optimization_barrier(operands)
        outs, row = self.run(called.jaxpr, called.consts, operands)
        return outs, [row]

    def _scan(self, eqn: Equation, operands: list[Any]) -> Any:
        params, body = eqn.params, closed(eqn.params["jaxpr"])
        first, carried = scan_counts(params)
        constants, rest = operands[:first], operands[first:]

        def step(carry: list[Any], xs: list[Any]) -> Any:
            outs, row = self.run(body.jaxpr, body.consts, [*constants, *carry, *xs])
            sizes = [_numbers(x)[:1] for x in xs if is_inexact(x.aval)]
            return outs[:carried], (outs[carried:], _row([*sizes, row]))

        carry, (ys, rows) = lax.scan(
            step,
            rest[:carried],
            rest[carried:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        self.widths[id(eqn)] = rows.shape[1]
        return [*carry, *ys], [rows]

    def _while(self, eqn: Equation, operands: list[Any]) -> Any:
        params, room = eqn.params, self.room.get(id(eqn), ROOM)
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        tests, rest = operands[:of_test], operands[of_test:]
        constants, carry = rest[:of_body], rest[of_body:]
        test, body = params["cond_jaxpr"], params["body_jaxpr"]

        def goes_on(state: Any) -> Any:
            return self.run(test.jaxpr, test.consts, [*tests, *state[1]])[0][0]

        def once(carry: Any) -> Any:
            return self.run(body.jaxpr, body.consts, [*constants, *carry])

        def step(state: Any) -> Any:
            count, carry, rows = state
            outs, row = once(carry)
            return count + 1, outs, lax.dynamic_update_index_in_dim(rows, row, count, 0)

        width = jax.eval_shape(once, carry)[1].shape[0]
        state = jnp.uint32(0), carry, jnp.zeros((room, width), jnp.uint32)
        count, carry, rows = lax.while_loop(goes_on, step, state)
        self.widths[id(eqn)] = width
        return list(carry), [count, rows]

    def _cond(self, eqn: Equation, operands: list[Any]) -> Any:
        branches = eqn.params["branches"]
        index = jnp.clip(operands[0].astype(jnp.int32), 0, len(branches) - 1)

        def runs(branch: Any) -> Any:
            return lambda *given: self.run(branch.jaxpr, branch.consts, given)

        def padded(branch: Any) -> Any:
            def run(*given: Any) -> Any:
                outs, row = runs(branch)(*given)
                return outs, jnp.pad(row, (0, width - row.shape[0]))

            return run

        rows = [jax.eval_shape(runs(each), *operands[1:])[1] for each in branches]
        self.widths[id(eqn)] = width = max(row.shape[0] for row in rows)
        outs, row = lax.switch(
            index, [padded(each) for each in branches], *operands[1:]
        )
        return outs, [index.astype(jnp.uint32), row]
