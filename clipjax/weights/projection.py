"""A projection: a function of the weights that is also the last link of a chain."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core import bounds, clipping, norms, states, trees, units
from clipjax._core.aliases import Scalar, Tree
from clipjax._core.messages import short_repr

T = TypeVar("T")
# Optax and type checkers ask for Optax's class. A subclass of it would be a tuple,
# which takes no weak references, so that jax.jit(projection) would fail.
_OptaxClass: Any = optax.GradientTransformationExtraArgs if TYPE_CHECKING else object


class ProjectionState(NamedTuple):
    """The state of a projection whose bound is a schedule.

    Others have no state, and no metrics: for the largest norm, say, all new weights
    would have to stay in memory.
    """

    step: Scalar  # int32: how many updates there were


@dataclasses.dataclass(eq=False, repr=False)
class Projection(_OptaxClass):
    """A projection of weights, as a function and as the last link of a chain.

    Called, it projects the weights: `params = max_norm(3.0)(params)`. As the last link
    of a chain it changes the update so that the weights end there:
    `clipjax.chain(optax.adam(1e-3), max_norm(3.0))`. A link after it would move them
    again, which :func:`clipjax.chain` refuses.
    """

    __class__ = property(lambda _: optax.GradientTransformationExtraArgs)

    name: str  # as a user wrote it
    function: Callable[..., Tree]  # of (weights, step, **needs)
    _: dataclasses.KW_ONLY
    # What else the function needs by keyword: `old`, the weights before the update, or
    # arguments of `update`. None where they are not given.
    needs: tuple[str, ...] = ()
    scheduled: bool = False  # it depends on the step
    units_of: Callable[[Tree], list[units.LeafUnits]] | None = None  # that it rescales
    # As a link it gets sums before they are rounded to 16 bits.
    unrounded: bool = False
    # Raises the errors of `init`, where what the function needs is not known yet.
    check: Callable[[Tree], Any] | None = None

    def __call__(self, params: T, *args: Any, **kwargs: Any) -> T:
        """Project weights; `step` is needed if a bound is a schedule."""
        norms.warn_if_local()
        _check_is_no_module(self.name, params)
        names = (*self.needs, "step")
        given = dict(zip(names, args, strict=False))
        wrong = kwargs.keys() - (set(names) - given.keys())
        if wrong or len(args) > len(names):
            raise TypeError(
                f"{self} takes params and {', '.join(names)}, each once, got "
                f"{sorted(wrong) or short_repr(args)}"
            )
        given |= kwargs
        step = given.pop("step", None)
        if step is not None and not (bounds.is_real(step) and np.ndim(step) == 0):
            raise TypeError(f"step must be a number, got {short_repr(step)}")
        # JAX's arrays, of which those that do not change stay the same.
        leaves, rebuild = trees.leaves_of(params)
        return self._projected(rebuild([leaf.value for leaf in leaves]), step, given)

    def init(self, params: Tree) -> Any:
        """Raise errors, and return the state."""
        step = jnp.zeros((), np.int32) if self.scheduled else None
        if self.check is None:
            trees.eval_shape(
                lambda tree: self._projected(tree, step, {"old": tree}), params
            )
        else:
            self.check(params)
        return optax.EmptyState() if step is None else ProjectionState(step)

    def update(
        self, updates: Tree, state: Any, params: Tree = None, **extra: Any
    ) -> tuple[Tree, Any]:
        """Return the updates that take weights to the projection of their sum."""
        norms.warn_if_local()
        if self.scheduled:
            states.check_state(self.name, ProjectionState, state)
        params = trees.params_for(self.name, updates, params)
        before, as_params = trees.leaves_of(params)
        changes, as_updates = trees.leaves_of(updates)
        pairs = list(zip(before, changes, strict=True))
        added = _sum if self.unrounded else applied
        summed = [added(param.value, update.value) for param, update in pairs]
        if self.units_of is not None:
            # Weights of 16 bits are compared with what they become. Without it, on
            # an H100 a step moves 19.0 instead of 16.0 (JAX 0.12).
            summed = [
                lax.optimization_barrier(x) if _is_narrow(x) else x for x in summed
            ]
        step = state.step if self.scheduled else None
        known = {**extra, "old": params}
        wanted = jax.tree.leaves(self._projected(as_params(summed), step, known))
        steps = [
            _step_to(new, old, param.value, update.value)
            for new, old, (param, update) in zip(wanted, summed, pairs, strict=True)
        ]
        if step is not None:
            state = ProjectionState(optax.safe_increment(step))
        return as_updates(steps), state

    def _projected(self, params: Any, step: Any, known: Mapping[str, Any]) -> Any:
        given = {name: known[name] for name in self.needs if name in known}
        wanted = self.function(params, step, **given)
        _check_are_weights(params, wanted)
        return wanted

    def apply(self, params: T, *args: Any, **kwargs: Any) -> T:
        """Project weights; `step` is needed if a bound is a schedule."""
        return self(params, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.init, self.update))

    def __repr__(self) -> str:
        return self.name

    def __deepcopy__(self, memo: Any = None) -> "Projection":
        return self  # so that a copied TrainState has the same structure

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        return functools.partial(Projection, **vars(self)), ()


def rescaled_weights(
    params: Tree, found: list[units.LeafUnits], factors: list[jax.Array]
) -> Tree:
    """Return weights whose units, of which the norms were measured, met factors.

    XLA would compute new weights twice, from both moments of Adam, rather than keep
    them while they are measured: with a clip, a step in a chain moves 11.0 on a TPU v5e
    instead of 9.0. In front of the measurement the barrier would cost a pass over
    leaves that are larger than the chip's own memory (JAX 0.12).
    """
    kept = []
    for each in found:
        value = lax.optimization_barrier(each.leaf.value)
        kept.append(each._replace(leaf=each.leaf._replace(value=value)))
    return clipping.rescaled(params, kept, factors)


def written(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return the call that made a projection, without options that are the default."""
    parameters = inspect.signature(function).parameters
    shown = [short_repr(value) for value in args]
    for key, value in options.items():
        text = short_repr(value)
        if text != repr(parameters[key].default):
            shown.append(f"{key}={text}")
    return f"clipjax.{function.__name__}({', '.join(shown)})"


def applied(param: Any, update: Any) -> Any:
    """Return what `optax.apply_updates` makes of a parameter.

    Inside a program XLA may leave out the rounding to 16 bits, but not a
    `reduce_precision`, which makes subnormal numbers 0: in float16 those are up to
    6e-5.
    """
    if not trees.is_float(param):
        return param
    total = _sum(param, update)
    info = jnp.finfo(param.dtype)
    # Those of 8 bits may have no infinity, for which reduce_precision would keep the
    # largest exponent.
    if info.bits != 16:
        return total.astype(param.dtype)
    rounded = lax.reduce_precision(total, info.nexp, info.nmant)
    if info.nexp < 8:
        is_subnormal = jnp.abs(total) < float(info.smallest_normal)
        rounded = jnp.where(is_subnormal, total, rounded)
    return rounded.astype(param.dtype)


def _is_narrow(x: Any) -> bool:
    """Return whether x is of floats with 16 bits or less."""
    return trees.is_float(x) and jnp.finfo(x.dtype).bits < 32


def _sum(param: Any, update: Any) -> Any:
    """Return a sum, of 16 bits in float32."""
    if not trees.is_float(param):
        return param
    if not _is_narrow(param):
        return (param + update).astype(param.dtype)
    wide = norms.sum_dtype(param.dtype)
    return param.astype(wide) + update.astype(wide)


def _step_to(wanted: Any, summed: Any, param: Any, update: Any) -> Any:
    """Return the update that takes a parameter to `wanted`, in a dtype that holds both.

    For float32, p + ((p + u) - p) is p + u. In 16 bits it may not be: there an entry
    inside keeps its update.
    """
    if wanted is summed or not trees.is_float(param):
        return update
    if update.dtype == param.dtype and _is_narrow(param):
        step = wanted - param.astype(wanted.dtype)
        return jnp.where(wanted == summed, update, step.astype(update.dtype))
    both = np.result_type(norms.sum_dtype(param.dtype), norms.sum_dtype(update.dtype))
    dtype = param.dtype if jnp.iscomplexobj(param) else both
    return wanted.astype(dtype) - param.astype(dtype)


def project(function: Callable[[Any], Any]) -> Projection:
    """Make a projection from any function of the whole tree of weights.

    A projection is returned as it is.

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
    """Return a projection, or make one from a function; errors name the argument."""
    if isinstance(function, Projection):
        return function
    hint = ""
    if isinstance(function, optax.GradientTransformation):
        hint = (
            ", a gradient transformation: pass the last link of a chain, and a clip as "
            "clip=; masks are written as axes= or where="
        )
    elif _is_ours(function):
        hint = ": call it, as in clipjax.max_norm(3.0)"
    if hint or not callable(function):
        raise TypeError(
            f"{name} must be a projection or a function of the weights, got "
            f"{short_repr(function)}{hint}"
        )

    def call(params: Tree, step: Any) -> Tree:
        try:
            projected = function(params)
        except TypeError as error:
            error.add_note(
                "The function gets the whole tree of weights; for each leaf, use "
                "jax.tree.map in it."
            )
            raise
        given: Any = jax.tree.structure(params)
        returned: Any = jax.tree.structure(projected)
        if returned != given:
            raise TypeError(
                f"function must keep the structure of the weights, {given}, but "
                f"returned {returned}"
            )
        before, _ = trees.leaves_of(params)
        after, rebuild = trees.leaves_of(projected)
        for old, new in zip(before, after, strict=True):
            was, now = (f"{x.value.dtype}{list(x.value.shape)}" for x in (old, new))
            if was != now:
                raise TypeError(
                    f"function must keep shapes and dtypes, but made {now} of {old}, "
                    f"which is {was}"
                )
        return rebuild([leaf.value for leaf in after])

    return Projection(f"clipjax.project({short_repr(function)})", call)


def _is_ours(function: Any) -> bool:
    """Return whether a function is one of this package, such as max_norm itself."""
    is_wrapped = hasattr(function, "__wrapped__")  # as jax.vmap(max_norm(3.0)) is
    is_function = isinstance(function, types.FunctionType) and not is_wrapped
    return is_function and str(function.__module__).startswith("clipjax.")


def _check_is_no_module(name: str, params: Any) -> None:
    """Raise an error for a module of Flax NNX, of which a copy would be changed."""
    for kind in type(params).__mro__:
        if kind.__name__ == "Module" and kind.__module__.startswith("flax.nnx"):
            raise TypeError(
                f"params: {name} returns new weights and changes no nnx.Module in "
                f"place: nnx.update(model, {name}(nnx.state(model, nnx.Param)))"
            )


# What a tree with all variables of a Flax model holds beside its weights: collections
# of Linen, variables of NNX, and the moments in a TrainState, whose paths end as those
# of the weights.
_SCALES = "_overwrite_with_gradient"  # of 8 bits
_COLLECTIONS = ("batch_stats", "cache", "intermediates", "opt_state", _SCALES)
_VARIABLES = ("BatchStat", "Cache", "Intermediate")


def _check_are_weights(params: Tree, wanted: Tree) -> None:
    """Raise an error if a projection would change what is known not to be a weight."""

    def is_variable(node: Any) -> bool:
        kind = type(node)
        return kind.__name__ in _VARIABLES and kind.__module__.startswith("flax.")

    is_state = hasattr(params, "opt_state")
    weights = params.get("params") if isinstance(params, Mapping) else None
    names = {path[-1:] for path, _ in trees.with_paths(weights)}
    flatten = jax.tree_util.tree_leaves_with_path
    each = zip(
        flatten(params, is_leaf=is_variable),
        jax.tree.leaves(wanted, is_leaf=is_variable),
        strict=True,
    )
    for (path, old), new in each:
        kind = type(old).__name__
        if not is_variable(old):
            # A module may be called "cache": its leaves are called as other weights.
            in_variables = weights is not None and path[-1:] not in names
            kind = trees.path_name(path[:1]) if is_state or in_variables else ""
        leaves = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if kind in (*_COLLECTIONS, *_VARIABLES) and any(a is not b for a, b in leaves):
            raise ValueError(
                f"params: {trees.path_name(path)!r}, of {kind}, is not a weight, but "
                "would be changed: pass only the weights, as in variables['params'], "
                "train_state.params or nnx.state(model, nnx.Param)"
            )
