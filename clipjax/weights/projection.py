"""A projection: a function of the weights that is also the last link of a chain."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax import _checks
from clipjax._core import bounds, norms, transformation, trees, units

T = TypeVar("T")
# Optax and type checkers ask for Optax's class. A subclass of it would be a tuple,
# which takes no weak references, so that jax.jit(projection) would fail.
_OptaxClass: Any = optax.GradientTransformationExtraArgs if TYPE_CHECKING else object


class ProjectionState(NamedTuple):
    """The state of a projection whose bound is a schedule.

    Others have no state, and no metrics: for the largest norm, say, all new weights
    would have to stay in memory.
    """

    step: jax.Array  # int32: how many updates there were


class Projection(_OptaxClass):
    """A projection of weights, as a function and as the last link of a chain.

    Called, it projects the weights: `params = max_norm(3.0)(params)`. As the last link
    of a chain it changes the update so that the weights end there:
    `clipjax.chain(optax.adam(1e-3), max_norm(3.0))`. A link after it would move them
    again, which :func:`clipjax.chain` refuses.
    """

    __class__ = property(lambda _: optax.GradientTransformationExtraArgs)

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        scheduled: bool = False,
        find: Callable[[Any], list[units.LeafUnits]] | None = None,
        check: Callable[[Any], Any] | None = None,
    ) -> None:
        """Make a projection from `function(params, step)`; it is scheduled if it depends on the step.

        `find(params)` returns the units that it rescales, if it does. If it needs more
        than the weights, `function(params, step, **extra)` gets what is given to
        `update`, and `check(params)` raises the errors of `init`, where that is not
        known yet.
        """
        self.name, self.function, self.scheduled, self.find, self.check = (
            name,
            function,
            scheduled,
            find,
            check,
        )

    def __call__(self, params: T, step: Any = None, **extra: Any) -> T:
        """Project weights; `step` is needed if a bound is a schedule."""
        if extra and not self.check:
            raise TypeError(
                f"{self} takes params and step, got {', '.join(extra)}, too"
            )
        if step is not None and not (bounds.is_real(step) and np.ndim(step) == 0):
            raise TypeError(f"step must be a number, got {bounds.short_repr(step)}")
        leaves, rebuild = trees.leaves_of(
            params
        )  # JAX's arrays, of which those that do not change stay the same
        return self._projected(rebuild([leaf.value for leaf in leaves]), step, **extra)

    def init(self, params: Any) -> Any:
        """Raise errors, and return the state."""
        step = jnp.zeros((), np.int32) if self.scheduled else None
        trees.leaves_of(params)  # raises its errors
        if self.check is None:
            jax.eval_shape(
                lambda tree: self._projected(tree, step), params
            )  # raises its errors
        else:
            self.check(params)
        return optax.EmptyState() if step is None else ProjectionState(step)

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        """Return the updates that take the weights to the projection of `params + updates`."""
        if self.scheduled:
            transformation.check_state(self.name, ProjectionState, state)
        params = _checks.params_for(self.name, updates, params)
        (before, as_params), (changes, as_updates) = (
            trees.leaves_of(params),
            trees.leaves_of(updates),
        )
        summed = [
            applied(p.value, u.value) for p, u in zip(before, changes, strict=True)
        ]
        if self.find:
            # Norms are measured before their weights change. XLA would compute new
            # weights twice, from both moments of Adam, rather than keep them meanwhile:
            # on a TPU v5e a step moves 11.0 instead of 9.0 (JAX 0.12).
            summed = [
                lax.optimization_barrier(x) if trees.is_float(x) else x for x in summed
            ]
        step = state.step if self.scheduled else None
        wanted = self._projected(
            as_params(summed), step, **(extra if self.check else {})
        )
        each = zip(trees.leaves_of(wanted)[0], summed, before, changes, strict=True)
        steps = as_updates(
            [_step_to(new.value, old, p.value, u.value) for new, old, p, u in each]
        )
        return steps, ProjectionState(
            optax.safe_increment(step)
        ) if self.scheduled else state

    def _projected(self, params: Any, step: Any, **extra: Any) -> Any:
        wanted = self.function(params, step, **extra)
        _checks.check_are_weights(params, wanted)
        return wanted

    def __iter__(self) -> Iterator[Any]:
        return iter((self.init, self.update))

    def __repr__(self) -> str:
        return self.name

    def __deepcopy__(self, memo: Any = None) -> Projection:
        return self  # so that a copied TrainState has the same structure

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        return Projection, (
            self.name,
            self.function,
            self.scheduled,
            self.find,
            self.check,
        )


def is_projection(value: Any) -> bool:
    """Return whether a value is a projection; `isinstance` would ask for Optax's class."""
    return type(value) is Projection


def written(name: str, *args: Any, **options: tuple[Any, Any]) -> str:
    """Return the call that made a projection; of options, `(value, default)`, those that are not the default."""
    shown = {key: tuple(map(bounds.short_repr, pair)) for key, pair in options.items()}
    given = [
        *map(bounds.short_repr, args),
        *(f"{key}={x}" for key, (x, default) in shown.items() if x != default),
    ]
    return f"clipjax.{name}({', '.join(given)})"


def applied(param: Any, update: Any) -> Any:
    """Return what `optax.apply_updates` makes of a parameter.

    Inside a program XLA may leave out the rounding to 16 bits, but not a
    `reduce_precision`, which makes subnormal numbers 0: in float16 those are up to
    6e-5.
    """
    if not trees.is_float(param):
        return param
    info, wide = jnp.finfo(param.dtype), norms.sum_dtype(param.dtype)
    if info.bits >= 32:
        return (param + update).astype(param.dtype)
    total = param.astype(wide) + update.astype(wide)
    if (
        info.bits < 16
        # some have no infinity, for which reduce_precision would keep the largest
        # exponent
    ):
        return total.astype(param.dtype)
    rounded = lax.reduce_precision(total, info.nexp, info.nmant)
    if info.nexp < 8:
        rounded = jnp.where(
            jnp.abs(total) < float(info.smallest_normal), total, rounded
        )
    return rounded.astype(param.dtype)


def _step_to(wanted: Any, summed: Any, param: Any, update: Any) -> Any:
    """Return the update that takes a parameter to `wanted`, in a dtype that holds both.

    For float32, p + ((p + u) - p) is p + u. In 16 bits it may not be: there an entry
    inside keeps its update.
    """
    if wanted is summed or not trees.is_float(param):
        return update
    if update.dtype == param.dtype and jnp.finfo(param.dtype).bits < 32:
        return jnp.where(wanted == summed, update, wanted - param)
    both = np.result_type(norms.sum_dtype(param.dtype), norms.sum_dtype(update.dtype))
    dtype = param.dtype if jnp.iscomplexobj(param) else both
    return wanted.astype(dtype) - param.astype(dtype)


def project(function: Callable[[Any], Any]) -> Projection:
    """Make a projection from any function of the whole tree of weights; a projection is returned as it is.

    Args:
      function: `params -> params`, which keeps structure, shapes and dtypes, such as
        those in `optax.projections`.

    Raises:
      TypeError: `function` is not a function of weights. When called, or in `init`: it
        does not keep structure, shapes and dtypes.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> simplex = clipjax.project(optax.projections.projection_simplex)
      >>> print(simplex(jnp.array([2.0, 0.0])))
      [1. 0.]
    """
    return as_projection("function", function)


def as_projection(name: str, function: Any) -> Projection:
    """Return a projection, or make one from a function, or raise an error that names the argument."""
    if is_projection(function):
        return function
    ours = isinstance(function, types.FunctionType) and str(
        function.__module__
    ).startswith("clipjax.")
    hint = ""
    if isinstance(function, optax.GradientTransformation):
        hint = ", a gradient transformation; clips are for clip=, and masks are written as axes= or where="
    elif ours and not hasattr(
        function, "__wrapped__"
    ):  # which jax.vmap(max_norm(3.0)) has
        hint = ": call it, as in clipjax.max_norm(3.0)"
    if hint or not callable(function):
        raise TypeError(
            f"{name} must be a projection or a function of the weights, got "
            f"{bounds.short_repr(function)}{hint}"
        )

    def call(params: Any, step: Any) -> Any:
        try:
            projected = function(params)
        except TypeError as error:
            error.add_note(
                "The function gets the whole tree of weights; for each leaf, use "
                "jax.tree.map in it."
            )
            raise
        given: Any
        given, returned = jax.tree.structure(params), jax.tree.structure(projected)
        if returned != given:
            raise TypeError(
                f"function must keep the structure of the weights, {given}, but "
                f"returned {returned}"
            )
        for old, new in zip(
            trees.leaves_of(params)[0], trees.leaves_of(projected)[0], strict=True
        ):
            was, now = (
                f"{leaf.value.dtype}{list(leaf.value.shape)}" for leaf in (old, new)
            )
            if was != now:
                raise TypeError(
                    f"function must keep shapes and dtypes, but made {now} of {old}, "
                    f"which is {was}"
                )
        return projected

    return Projection(f"clipjax.project({bounds.short_repr(function)})", call)
