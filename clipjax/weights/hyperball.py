"""Steps on a sphere, on which each weight matrix keeps its initial norm."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import Axes, check_axes, is_measured
from clipjax._core.bounds import Bound, bound_at
from clipjax._core.dtypes import in_float64, norm_dtype, only_arrays, strong, weakly_typed_as, wide
from clipjax._core.links import placing
from clipjax._core.members import Acted, Memory, with_stats
from clipjax._core.mesh import AxisName, is_inside, placed_as
from clipjax._core.rescale import Precision, Scale, between, rescale
from clipjax._core.rounding import exactly, round_up, rounded, widened
from clipjax._core.stats import Stats
from clipjax._core.trees import Decision, Unit, decide, for_each, measure_units, size_of, units_of
from clipjax.weights.checks import check_are_weights
from clipjax.weights.constraints import scale_between, with_precision
from clipjax.weights.link import is_branch, larger_than, step_dtype, step_to
from clipjax.weights.units import OfUnits, steps_of_units


class HyperballState(NamedTuple):
    """State of :func:`hyperball`; `norm` is the largest after the step, before weights are rescaled to R."""

    hyperball: Stats
    radii: tuple[jax.Array, ...]  # float: for each leaf on a sphere, the norms of its units, which they keep


@explained
def hyperball(
    learning_rate: Bound, *, axes: Axes = None, specs: Any = None, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Step on the sphere of the initial norm R: w <- R N(w - learning_rate R N(u)), where N(x) = x / |x|.

    With weight decay, the norm of a weight settles where decay and updates balance, and that norm determines
    the angle by which a step rotates the weight. Here the norm is fixed, and the learning rate sets the
    angle, in radians for updates orthogonal to the weights.

    Put it **last** in a chain, in place of the learning rate and without weight decay, after transformations
    that scale the gradients without negating them::

        clipjax.chain(optax.scale_by_adam(), clipjax.hyperball(1e-2))

    After an optimizer with its own learning rate, such as `optax.adam(1e-3)`, whose updates are already
    negated, it would increase the loss.

    Args:
      learning_rate: the length of a step as a share of R: a number, a traced scalar or a schedule
        `step -> rate`. It should be below 1; with 1 or more a step may lead to the center of the sphere.
      axes: the axes that are reduced, so that their entries share one norm, as in
        :func:`clipjax.clip_by_norm`. None reduces each whole leaf; for layers stacked along their first axis,
        pass `{"layers/*": (1, 2)}`. Leaves that are left alone take plain steps, -learning_rate * u. The
        paper keeps matrices on spheres, and trains embeddings, biases and scales with Adam:
        `axes={"*embedding": clipjax.SKIP, "*kernel": None}`.
      specs: inside `shard_map`, the `PartitionSpec` tree of the parameters.
      axis_name: the mesh axes that split the units, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation that needs `params` in `init` and `update`. Its metric `norm` is the largest norm
      after the step, before weights are rescaled to norm R, and `scale` the smallest factor of that
      rescaling. `radii` in its state holds R for each leaf or unit, rounded up to float32 (float64 for
      float64 leaves). A run resumed from a checkpoint keeps these radii; a new `init` takes the norms of the
      weights that it gets.

    Raises:
      TypeError, ValueError: `learning_rate` is not a number, is negative, infinite or NaN; `axes` is
      invalid. In `init`: no leaf is on a sphere, or a leaf that is not a weight would be changed. In
      `update`: no `params`, or no state; the weights have more or fewer leaves than `init` got.

    Guarantees: measured in float64, after `optax.apply_updates` no unit's norm is above R, in any dtype, and
    none is more than 4 ulp below R (in 16 bits, an ulp of each entry). Where u or the learning rate is 0,
    the weights are unchanged, bit for bit. A unit whose initial weights are all 0, as biases often are, has
    no sphere, and a unit with a single entry cannot rotate: both take plain steps, like leaves that are left
    alone. A unit whose update is not finite becomes NaN. 16-bit leaves get a float32 update, which
    `optax.apply_updates` rounds once; an entry does not change if its step is less than half its ulp, as in
    any training in 16 bits.

    Equals the authors' AdamH and MuonH, after `optax.scale_by_adam` and Muon's scaling respectively. These
    divide by norms of at least 1e-10, so an update with a smaller norm takes a shorter step; here every
    update that is not 0 takes a step of the same length.

    References:
      Wen et al., 2026, Fantastic pretraining optimizers and where to find them II: hyperball optimization,
      arXiv:2606.16899.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> tx = clipjax.chain(optax.scale_by_adam(), clipjax.hyperball(0.75))
      >>> params = {"kernel": jnp.array([[0.0, 4.0]]), "bias": jnp.array([1.0])}
      >>> grads = {"kernel": jnp.array([[0.1, 0.0]]), "bias": jnp.array([0.1])}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)  # the kernel keeps its norm, of 4
      >>> print(params["kernel"].round(3), params["bias"].round(3))
      [[-2.4  3.2]] [0.25]
    """
    rate_at, axes = bound_at("learning_rate", learning_rate), check_axes(axes)
    _check_rate(learning_rate)

    def first(params: Any, stats: Stats) -> Memory:
        del stats
        params = only_arrays(params)
        units = in_float64(units_of)(params, axes, *_here(specs, axis_name))
        check_are_weights(params, [unit.position for unit in units])
        sizes = zip(measure_units(units), units, strict=True)
        norms = [(jnp.zeros_like(norm) if size_of(u) == 1 else norm, u) for norm, u in sizes]
        return (tuple(round_up(norm, norm_dtype([u.leaf])) for norm, u in norms),)

    @in_float64
    def act(updates: Any, memory: Memory, params: Any, step: Any, **extra_args: Any) -> Acted:
        del extra_args
        (radii,), rate = memory, rate_at(step)
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        before = jax.tree.leaves(params)
        units = units_of(params, axes, specs, axis_name)
        if len(units) != len(radii):
            raise ValueError(
                f"params: hyperball has the radii of {len(radii)} leaves from init, but got {len(units)} "
                f"leaves to place"
            )
        radius_of = {u.position: wide(radius) for u, radius in zip(units, radii, strict=True)}
        still: dict[int, jax.Array] = {}  # which units do not move

        def moved_by(units: Sequence[Unit], updates: list[Any]) -> list[Any]:
            each = zip(units, updates, strict=True)
            moving = [u._replace(leaf=placed_as(before[u.position], x)) for u, x in each]
            sizes = measure_units(moving)
            still.update({u.position: (n == 0) | (rate == 0) for u, n in zip(moving, sizes, strict=True)})
            scales, _ = decide(to_steps, moving, sizes)
            given = (*radii, *before) if step is None else (*radii, *before, step)
            scaled = zip(moving, scales, strict=True)
            return [_step(before[u.position], u.leaf, scale, given) for u, scale in scaled]

        def to_steps(units: Sequence[Unit], norms: Sequence[jax.Array]) -> Decision:
            pairs = list(zip(norms, units, strict=True))
            columns = [[for_each(norm, rate) for norm in norms]]
            columns.append([for_each(norm, radius_of[u.position]) for norm, u in pairs])
            return _scale_of_step, with_precision(units, norms, columns)

        def to_spheres(units: Sequence[Unit], norms: Sequence[jax.Array]) -> Decision:
            radii = [for_each(norm, radius_of[u.position]) for norm, u in zip(norms, units, strict=True)]
            free = [(r == 0) | for_each(r, still[u.position]) for r, u in zip(radii, units, strict=True)]
            low, high = (
                [jnp.where(any_norm, limit, radius) for any_norm, radius in zip(free, radii, strict=True)]
                for limit in (0.0, np.finfo(np.float64).max)
            )
            columns = [low, high, [jnp.ones_like(norm) for norm in norms]]
            return scale_between, with_precision(units, norms, columns)

        leaves = [x if i in radius_of else _plain_step(x, rate) for i, x in enumerate(leaves)]
        of_units = OfUnits(lambda _: to_spheres, axes, specs, axis_name)
        ready = radii[0] if radii else rate
        place = functools.partial(step_to, outside=larger_than, same_dtype=True)
        leaves, report = steps_of_units(of_units, before, leaves, treedef, step, ready, place, moved_by)
        given = zip(jax.tree.leaves(updates), leaves, strict=True)
        return treedef.unflatten([placed_as(u, x) for u, x in given]), report, (radii,)

    tx = with_stats(HyperballState, act, first, needs_params="places the weights", follows_past=True)
    return placing(f"clipjax.hyperball({shown(learning_rate)})", tx)


def _check_rate(rate: Any) -> None:
    if callable(rate):
        return
    if np.ndim(rate):
        raise ValueError(f"learning_rate must be one number or a schedule, got {shown(rate)}")
    if not isinstance(rate, jax.core.Tracer) and np.isinf(rate):
        raise ValueError(f"learning_rate must be finite, got {shown(rate)}")


def _here(specs: Any, axis_name: AxisName) -> tuple[Any, AxisName]:
    """Return both arguments, or None for both if `init` runs outside `shard_map` and `pmap`."""
    return (specs, axis_name) if is_inside(specs, axis_name) else (None, None)


@in_float64
def _scale_of_step(size: jax.Array, rate: jax.Array, radius: jax.Array, *precision: jax.Array) -> Scale:
    """Return the scale for a step of length rate * radius, or for a plain step if there is no sphere."""
    length = rate * radius
    scale = between(size, length, length, jnp.ones_like(size), Precision(*precision))
    plain = radius == 0
    return Scale(jnp.where(plain, 1.0, scale.power), jnp.where(plain, rate, scale.factor))


def _step(before: jax.Array, update: jax.Array, scale: Scale, given: tuple[Any, ...]) -> jax.Array:
    """Return the step -scale * update: for 16 bits in float32, unless a branch requires the same dtype."""
    if jnp.iscomplexobj(update):
        return rescale(-update, scale)
    dtype = step_dtype(before, update)
    wider = update if update.dtype == dtype else lax.convert_element_type(update, dtype)
    step = rescale(-wider, scale)
    return exactly(rounded(step, update.dtype), update.dtype) if is_branch(given, step) else step


def _plain_step(update: Any, rate: jax.Array) -> Any:
    """Return the step of a leaf that is left alone, -rate * update, rounded once."""
    if not is_measured(update):
        return update

    def scaled(x: jax.Array) -> jax.Array:
        entries = widened(x)
        return exactly(rounded(entries * lax.convert_element_type(-rate, entries.dtype), x.dtype), x.dtype)

    x = strong(update)
    parts = lax.complex(scaled(x.real), scaled(x.imag)) if jnp.iscomplexobj(x) else scaled(x)
    return weakly_typed_as(update, parts)
