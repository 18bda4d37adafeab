"""Methods that bound singular values, up to rounding, in the precision of the given matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._matrices.proof import gram, identity, matmul

# (Gram matrix G, an upper bound of its eigenvalues) -> P^(-1/2), where P is max(G, I), or I + G for soft caps
Scaling = Callable[[jax.Array, jax.Array], jax.Array]

# How far below the bound Newton-Schulz aims, so that a value slightly above the aim is still inside; and the
# same where it replaces the SVD.
AIM, _FINE_AIM = 2.0**-11, 2.0**-14

# For a soft bound in float64, a norm up to this multiple of the bound needs no further stage. Soft bounds
# have no aim below the bound.
_SOFTLY_FAR = 300.0


def frobenius_norm(x: jax.Array) -> jax.Array:
    """Return the Frobenius norm."""
    return jnp.sqrt(jnp.sum(jnp.square(x.real) + (jnp.square(x.imag) if jnp.iscomplexobj(x) else 0)))


def largest_entry(w: jax.Array) -> jax.Array:
    """Return the largest |entry|, or 1 if that is 0, NaN or infinity, so that it can be a divisor."""
    largest = jnp.max(jnp.abs(w))
    return jnp.where((largest > 0) & (largest < jnp.inf), largest, 1.0)


def by_svd(w: jax.Array, bound: jax.Array) -> jax.Array:
    """Cap by U min(S, bound) Vᴴ, from the eigenvectors U and eigenvalues S² of W Wᴴ.

    In float32 it uses products: XLA takes minutes to compile a decomposition for a TPU. Also, JAX cannot
    export a float64 SVD for a set of platforms with a TPU, even if the TPU does not use it.
    """
    if bound.dtype == np.float32:
        return by_newton_schulz(w, bound, _FINE_AIM)

    def scaling(g: jax.Array, top: jax.Array) -> jax.Array:
        del top
        return _function_of(g, lambda values: lax.rsqrt(jnp.maximum(values, 1.0)))

    return _in_stages(w, bound, 300.0, scaling, _same, sharp=False)


def by_newton_schulz(w: jax.Array, bound: jax.Array, below: float = AIM) -> jax.Array:
    """Cap by matrix products, at `bound` times 1 - `below`.

    P = max(G, I) = I + (G - I)(I + S) / 2, where S is the sign of G - I. The sign and the inverse root of P
    take a Newton-Schulz iteration each. If an eigenvalue of G - I is so small that its sign has not
    converged, P is too small by an eighth of the tolerance of the sign, which is less than `below`.
    """
    # The multiple of the bound up to which one stage suffices, and when an iteration has converged.
    far, close = (1e4, 1e-9) if bound.dtype == np.float64 else (8.0, 1e-5)

    def scaling(g: jax.Array, top: jax.Array) -> jax.Array:
        eye = identity(len(g), g.dtype)
        width = jnp.maximum(top - 1, 1.0)
        sign = _sign((g - eye) / width, 4 * below / width, close)
        p = eye + matmul(g - eye, eye + sign) / 2
        return _inverse_root(p, jnp.minimum(top, 1 + frobenius_norm(p - eye)) * (1 + below), close)

    return _in_stages(w, bound * (1 - below), far, scaling, _same, sharp=True)


def softly_by_svd(w: jax.Array, bound: jax.Array) -> jax.Array:
    """Bring each singular value s to s / sqrt(1 + s² / bound²), as :func:`by_svd` does its own."""
    if bound.dtype == np.float32:
        return softly_by_newton_schulz(w, bound)

    def scaling(g: jax.Array, top: jax.Array) -> jax.Array:
        del top
        return _function_of(g, lambda values: lax.rsqrt(1 + jnp.maximum(values, 0.0)))

    return _in_stages(w, bound, _SOFTLY_FAR, scaling, _rest, sharp=False)


def softly_by_newton_schulz(w: jax.Array, bound: jax.Array) -> jax.Array:
    """Bring each singular value s to s / sqrt(1 + s² / bound²), by matrix products: (I + G)^(-1/2) X."""
    far, close = (_SOFTLY_FAR, 1e-12) if bound.dtype == np.float64 else (8.0, 1e-5)

    def scaling(g: jax.Array, top: jax.Array) -> jax.Array:
        return _inverse_root(g + identity(len(g), g.dtype), 1 + top, close)

    return _in_stages(w, bound, far, scaling, _rest, sharp=True)


def _same(aim: jax.Array, level: jax.Array) -> jax.Array:
    """Return the bound that remains of `aim` after a cap at `level`."""
    del level
    return aim


def _rest(aim: jax.Array, level: jax.Array) -> jax.Array:
    """Do the same for soft bounds, for which 1 / aim² is the sum of 1 / level² over all stages."""
    eps = float(jnp.finfo(aim.dtype).eps)
    return aim * lax.rsqrt(jnp.maximum(1 - jnp.square(aim / level), eps))


def _function_of(g: jax.Array, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Apply a function to the eigenvalues of a Hermitian matrix."""
    u, values = lax.linalg.eigh(g, symmetrize_input=False)
    return matmul(u * function(values)[None, :], jnp.conj(u.T))


def _in_stages(
    w: jax.Array,
    aim: jax.Array,
    far: float,
    scaling: Scaling,
    rest: Callable[[jax.Array, jax.Array], jax.Array],
    sharp: bool,
) -> jax.Array:
    """Bound by P^(-1/2) W, where X = W / aim, G = X Xᴴ, and P^(-1/2) is the scaling of G.

    G loses accuracy by a factor |X|². So a matrix whose norm is more than `far` times the bound is first
    bounded at a fraction of its own norm, as often as needed; `rest` returns the remaining bound. `sharp`
    estimates that norm to some percent, at the cost of two products.
    """

    def stage(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        unit = largest_entry(state[1])
        x, aim = state[1] / unit, state[2] / unit
        g, top = gram(x), frobenius_norm(x) ** 2
        if sharp:  # |G| <= |G⁴|_F^(1/4), which is at most k^(1/8) times too large
            g2 = matmul(g, g)
            top = jnp.minimum(jnp.sqrt(jnp.sqrt(frobenius_norm(matmul(g2, g2)))), top)
        top *= 1 + 100 * float(jnp.finfo(top.dtype).eps)
        again = jnp.sqrt(top) / far > aim
        # Of zeros, any level does: the square of a small aim may be flushed to 0.
        level = jnp.where(top > 0, jnp.maximum(jnp.sqrt(top) / far, aim), 1.0)
        scale = scaling(g / level**2, top / level**2)
        x = matmul(scale, x) if x.shape[0] <= x.shape[1] else matmul(x, scale)
        return again, x * unit, rest(state[2], level * unit)

    # Bounds of 0 and infinity need no stage.
    start = jnp.all(jnp.isfinite(w)) & (aim > 0) & (aim < jnp.inf)
    aim = jnp.where(start, aim, 0.0)  # so that in `shard_map` it varies over the same mesh axes as w
    return lax.while_loop(lambda state: state[0], stage, (start, w, aim))[1]


def _newton_schulz(low: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a, b and the new low of a step x -> x (a - b x²), which maps [low, 1] onto [new low, 1].

    This is the scaled Newton-Schulz step of Chen and Chow, 2014: it never leaves [0, 1] and flips no sign.
    """
    square = 3 / (1 + low + low * low)
    a = 1.5 * jnp.sqrt(square)
    b = a * square / 3
    return a, b, low * (a - b * low * low)


def _sign(y: jax.Array, low: jax.Array, close: float) -> jax.Array:
    """Return the sign of a Hermitian matrix with eigenvalues in [-1, 1], converged for |eigenvalue| > low."""

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, low = state
        a, b, low = _newton_schulz(low)
        return a * y - b * matmul(y, matmul(y, y)), low

    return lax.while_loop(lambda state: 1 - state[1] > close, step, (y, low))[0]


def _inverse_root(p: jax.Array, largest: jax.Array, close: float) -> jax.Array:
    """Return the inverse square root of a Hermitian matrix with eigenvalues in [1, largest]."""
    eye = identity(len(p), p.dtype)
    p, low = p / largest, 0.999 * lax.rsqrt(largest)

    def step(state: Any) -> Any:
        y, z, low = state
        a, b, low = _newton_schulz(low)
        t = a * eye - b * matmul(z, y)
        return matmul(y, t), matmul(t, z), low

    start = jnp.where(low > 0, eye, 0)  # the identity; in `shard_map` it varies over the same mesh axes as p
    return lax.while_loop(lambda state: 1 - state[2] > close, step, (p, start, low))[1] * lax.rsqrt(largest)
