"""Projections of weights: each is a function of the weights, and can be the last link of a chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core.arguments import explained, makes_transformations, shown
from clipjax._core.axes import is_measured, leaves_with_paths, path_name
from clipjax._core.dtypes import as_arrays, in_float64, only_arrays, wide
from clipjax._core.members import Acted, Memory, with_stats
from clipjax._core.mesh import Names, varying
from clipjax._core.norms import norm_of, tree_norm
from clipjax._core.paths import the_leaf
from clipjax._core.rounding import widened
from clipjax._core.stats import Stats
from clipjax._core.trees import Report, most_of
from clipjax.weights.checks import check_are_weights
from clipjax.weights.link import Outside, applied, is_branch, short_of, step_to
from clipjax.weights.units import OfUnits, steps_of_units

T = TypeVar("T")

if TYPE_CHECKING:
    from optax import GradientTransformationExtraArgs as _Base
else:
    _Base = object


class Measured(NamedTuple):
    """What a projection bounds in one leaf: a value for each unit, and limits that broadcast to these."""

    path: str
    value: jax.Array
    low: jax.Array
    high: jax.Array
    over: Names = ()  # the mesh axes over which values differ, if types do not show them


Constrain = Callable[..., tuple[Any, Report]]  # (params, step, …)
Measure = Callable[[Any, Any], list[Measured]]
Settle = Callable[[Any, Any, Any, Any, Any], Any]


class How(NamedTuple):
    """The options of a projection as a link."""

    # Of the two representable weights next to the projected one, the link takes the one that is not
    # `outside`.
    outside: Outside = short_of
    # The rule, if it applies to each leaf separately: then the link handles the leaves one after the other.
    of_units: OfUnits | None = None
    # For bounds that no choice entry by entry can keep: `settle(before, after, wanted, updates, step)`
    # returns the final updates.
    settle: Settle | None = None
    # The names of extra arguments of `update` that `constrain` also takes.
    extra: tuple[str, ...] = ()
    # Called in `init`: raises an error if the weights are invalid.
    check: Callable[[Any], object] = lambda _: None


class ProjectState(NamedTuple):
    """State of :func:`project` as a link; `norm` is the distance by which it moved the weights."""

    project: Stats
    violation: jax.Array  # float: by how much the incoming weights were out of bounds


class Projection(_Base):
    """A projection of weights, which can be used in two ways.

    When called, it projects the weights: `params = max_norm(3.0)(params)`. As the **last** link of a chain,
    it changes the update so that the parameters end up projected: `clipjax.chain(…, max_norm(3.0))`. It is
    a gradient transformation for Optax and a function for JAX: `jax.jit` and `jax.lax.cond` accept it.

    A link that is not last bounds nothing. `clipjax.chain` and `clipjax.bounded` raise an error in that
    case. `optax.chain` cannot do so; there the link measures the incoming weights, at the cost of a pass
    over them, and its metric `violation` says by how much they were out of bounds. If the link is last,
    `violation` is 0 from the second step on.
    """

    init: optax.TransformInitFn
    update: optax.TransformUpdateExtraArgsFn
    last: optax.GradientTransformationExtraArgs  # the link, if it is already known to be last
    constrain: Constrain
    measure: Measure
    name: str

    def __init__(
        self, name: str, state: type[Any], constrain: Constrain, measure: Measure, how: How | None = None
    ) -> None:
        """Make a projection from `constrain(params, step)`; `measure(params, step)` is for `verify`."""
        how = how or How()
        init, update = _link(state, constrain, measure, how)
        last = _link(state, constrain, None, how)
        self.__dict__ |= {"init": init, "update": update, "last": last}
        self.__dict__ |= {"constrain": constrain, "measure": measure, "name": name}

    # This is not a tuple, because JAX keeps weak references to the functions that it transforms, which tuples
    # do not support. For `isinstance` it is nevertheless Optax's named tuple.
    __class__ = property(lambda _: optax.GradientTransformationExtraArgs)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.init, self.update))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return (self.init, self.update)[index]

    def __repr__(self) -> str:
        return self.name

    def __copy__(self) -> Projection:
        return self

    def __deepcopy__(self, memo: Any) -> Projection:
        return self

    def __reduce__(self) -> Any:
        return _rebuilt, (self.__dict__,)

    def _replace(self, **fields: Any) -> Projection:
        return _rebuilt(self.__dict__ | fields)

    def __call__(self, params: T, step: Any = None, **extra_args: Any) -> T:
        """Project `params`; `step` is needed if a bound is a schedule."""
        return self.constrain(params, step, **extra_args)[0]


def _rebuilt(fields: dict[str, Any]) -> Projection:
    projection = object.__new__(Projection)
    projection.__dict__ |= fields
    return projection


def _link(
    state: type[Any], constrain: Constrain, measure: Measure | None, how: How
) -> optax.GradientTransformationExtraArgs:
    def first(params: Any, stats: Stats) -> Memory:
        how.check(only_arrays(params))
        return (jnp.zeros_like(stats.norm),)

    def act(updates: Any, memory: Memory, params: Any, step: Any, **extra_args: Any) -> Acted:
        (violation,) = memory
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        before = jax.tree.leaves(params)
        # If the link is last, the incoming weights are those that it projected one step ago.
        if measure is not None:
            incoming = [lax.stop_gradient(p) if is_measured(p) else p for p in before]
            past = None if step is None else jnp.maximum(step - 1, 0)
            worst = _worst(measure(treedef.unflatten(incoming), past))
            violation = lax.convert_element_type(worst, violation.dtype)

        def step_of(before: Any, update: Any, after: Any, wanted: Any) -> Any:
            """Return the update of a leaf."""
            if not is_measured(before):
                return update
            same_dtype = is_branch((before,) if step is None else (step, before), after)
            new = step_to(before, update, after, wanted, how.outside, same_dtype=same_dtype)
            # The condition is never true, but it makes the step depend on the measurement. So XLA measures
            # first, and need not copy the old weights before the new ones overwrite them.
            return new if measure is None else jnp.where(violation < 0, jnp.zeros_like(new), new)

        if how.of_units is not None:
            leaves, report = steps_of_units(how.of_units, before, leaves, treedef, step, memory[0], step_of)
        else:
            after = [applied(p, u) for p, u in zip(before, leaves, strict=True)]
            taken = {name: extra_args[name] for name in how.extra if name in extra_args}
            wanted, report = constrain(treedef.unflatten(after), step, **taken)
            each = zip(before, leaves, after, treedef.flatten_up_to(wanted), strict=True)
            leaves = [step_of(*leaf) for leaf in each]
            if how.settle is not None:
                old, moved, new = (treedef.unflatten(x) for x in (before, after, leaves))
                leaves = treedef.flatten_up_to(how.settle(old, moved, wanted, new, step))
        return treedef.unflatten(leaves), report, (violation,)

    return with_stats(state, act, first, needs_params="bounds the weights after the update")


@in_float64
def _worst(measured: list[Measured]) -> jax.Array:
    """Return by how much the worst unit is out of bounds."""
    return (
        most_of([_excess(m) for m in measured], over=[m.over for m in measured])[0] if measured else wide(0.0)
    )


@in_float64
def _excess(m: Measured) -> jax.Array:
    value = widened(m.value)
    low, high = (
        jnp.broadcast_to(lax.convert_element_type(x, value.dtype), value.shape) for x in (m.low, m.high)
    )
    return jnp.maximum(jnp.maximum(value - high, low - value), jnp.zeros_like(value))


@explained
def project(function: Callable[[Any], Any]) -> Projection:
    """Make a projection from any function of the weights; a projection is returned unchanged.

    Args:
      function: `params -> params`, which keeps structure, shapes and dtypes, such as the functions in
        `optax.projections`.

    Returns:
      A :class:`Projection`. As a link, its metric `norm` is the distance by which it moved the weights at the
      last step. After `optax.apply_updates` every entry is what `function` returned, up to the rounding of
      that sum, which goes inward: away from the unprojected entry.

    Raises:
      TypeError: `function` cannot be called, or does not keep structure, shapes and dtypes.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> simplex = clipjax.project(optax.projections.projection_simplex)
      >>> print(simplex(jnp.array([2.0, 0.0])))
      [1. 0.]
    """
    if isinstance(function, Projection):
        return function
    if not callable(function):
        raise TypeError(f"function must be a function of the weights, got {shown(function)}")
    if makes_transformations(function):
        raise TypeError(
            f"function must be a function of the weights, got {shown(function)}: call it, as in "
            f"{function.__name__}(…)"
        )

    def constrain(params: Any, step: Any) -> tuple[Any, Report]:
        del step
        params = as_arrays(params)
        projected = as_arrays(function(params))
        given: Any
        given, returned = jax.tree.structure(params), jax.tree.structure(projected)
        if returned != given:
            raise TypeError(
                f"function must keep the structure of the weights, {given}, but returned {returned}"
            )
        jax.tree_util.tree_map_with_path(_check_kept, params, projected)
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(projected), strict=True)
        check_are_weights(params, [i for i, (old, new) in enumerate(pairs) if new is not old])
        moved = tree_norm(_difference(projected, params), 2.0)
        return projected, in_float64(lambda: Report(moved, jnp.ones(()), moved > 0, 0 * moved))()

    def measure(params: Any, step: Any) -> list[Measured]:
        differences = _difference(constrain(params, step)[0], as_arrays(params))
        paths = leaves_with_paths(differences)
        nothing = in_float64(lambda: wide(0.0))()
        return [
            Measured(path_name(path), norm_of(leaf, None, 2.0, varying(leaf)), nothing, nothing)
            for path, leaf in paths
        ]

    return Projection(f"clipjax.project({shown(function)})", ProjectState, constrain, measure)


def _check_kept(path: Any, given: Any, returned: Any) -> None:
    if (given.shape, given.dtype) != (returned.shape, returned.dtype):
        raise TypeError(
            f"function must keep shapes and dtypes, but made {returned.dtype}{list(returned.shape)} of "
            f"{the_leaf(path)}, which is {given.dtype}{list(given.shape)}"
        )


def _difference(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x - y if is_measured(x) else None, a, b)
