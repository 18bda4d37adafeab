"""Which operation, in which line, made a result NaN or infinite."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from clipjax.explaining.accused import first_causes, large_argument, large_operation
from clipjax.explaining.causes import Cause
from clipjax.explaining.internals import is_inexact, is_traced
from clipjax.explaining.lines import Passes, decides
from clipjax.explaining.walk import TOLD, Event, Tape, Value, Walk, given, joined
from clipjax.explaining.watch import Watch, magnitude


def explain(
    function: Callable[..., Any], *args: Any, usual: Sequence[Any] | None = None
) -> list[Cause]:
    """Name the operation, and its line, that made a result NaN or infinite.

    Use it after a step broke, with the arguments of that step: what was run is run once
    more, watched, and nothing in the model has to change. A step that
    :func:`skip_nonfinite` skipped left the weights as they were, so the call right
    after it, with the same batch, is that step; after a crash, restore the last
    checkpoint and give the batch that followed.

    The call is compiled again with one number for each array, its largest magnitude.
    From the bad results the answer goes back to the operations which made NaN or
    infinity of finite inputs. Infinities that reach no result, as in a mask, are not
    causes.

    Args:
      function: what was run: `jax.value_and_grad(loss)`, or a whole training step,
        jitted or not. It is called once with copies of the arguments, to see which
        results are bad, unless it prints or calls the host. Then its calls without
        results are left out.
      *args: its arguments. All that are no arrays are static.
      usual: the arguments of a good step, of the same shapes, as a tuple. If nothing
        is NaN or infinite, the answer tells which arguments are more than 3 times as
        large as there, and at which lines sizes grew most, compared with it.

    Returns:
      A list of causes, in the order in which they arose; it is empty if nothing was
      bad. `print` tells a cause in a line. Of its fields, `began_in` is "forward",
      "backward" or "update"; an iteration `(3, 6)` has the index 3 of 6; `library` is
      the function that the line calls, as "flax Linear"; `given` is the path of an
      argument that was bad before the call; `became_nan` is the cause that tells where
      the infinity became NaN; `handled` says that the result is finite, since a check
      of finiteness, as in a skip, caught what is told. If the call is bad, but the
      watched program is not, the only cause has the kind "unseen".

    Raises:
      TypeError: an argument is traced: call it outside `jit`.
      ValueError: an argument was donated and is gone; `usual` has other shapes.

    Kernels, `shard_map` and `custom_linear_solve` are named as a whole. What a rule of
    `jax.custom_vjp` does has the line of the call, not that of the rule.

    See Also:
      :func:`bad_steps` says which step broke; :func:`skip_nonfinite` skips such steps.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(w, x):
      ...     distance = jnp.sqrt(jnp.sum((x - w) ** 2))
      ...     return jnp.where(distance > 0, distance, 0.0)
      >>> w = x = jnp.ones(2)
      >>> for cause in clipjax.explain(jax.value_and_grad(loss), w, x):
      ...     print(cause)  # doctest: +NORMALIZE_WHITESPACE
      inf in the backward pass, at <doctest ...>:2 (loss): the slope of sqrt at 0
      (div of 0.5 and 0), after w; it became nan there (0 · inf)
    """
    call = _Call(function, args)
    with jax.debug_nans(False), jax.debug_infs(False):
        watched = _Watched(call)
        results, walk = watched.walk(call.arrays)
        bad = _bad_names(call, watched, results)
        passes = Passes(watched.program.jaxpr)
        seen = {name: results[name] for name in bad if results[name].is_bad}
        if bad and not seen:
            return [Cause("unseen", results=tuple(bad))]
        events = {name: joined([value]) for name, value in seen.items()}
        if not bad:
            events = _checked(walk)
        causes = first_causes(events, passes, call.named)
        causes = [cause._replace(handled=not bad) for cause in causes]
        if causes or usual is None:
            return causes
        return _larger(watched, call, _Call(function, tuple(usual)), passes)


class _Call:
    """A function of arrays, and those that it is called with."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.tree: Any
        paths, self.tree = tree_flatten_with_path(args)
        self.leaves = [leaf for _, leaf in paths]
        # Anything else may be static, and is closed over.
        arrays = jax.Array | np.ndarray | np.generic
        self.places = [
            k for k, leaf in enumerate(self.leaves) if isinstance(leaf, arrays)
        ]
        self.arrays = [self.leaves[k] for k in self.places]
        labels = _labels(function, [path for path, _ in paths])
        self.names = [labels[k] for k in self.places]
        for name, x in zip(self.names, self.arrays, strict=True):
            if is_traced(x):
                raise TypeError(
                    f"{name}: explain needs known arrays: call it outside jit"
                )
            if isinstance(x, jax.Array) and x.is_deleted():
                raise ValueError(
                    f"{name}: the array is deleted, since it was donated to a call. "
                    "Call explain before that call, or with copies"
                )

    @property
    def named(self) -> dict[str, Any]:
        """The arrays by name."""
        return dict(zip(self.names, self.arrays, strict=True))

    def run(self, *arrays: Any) -> dict[str, Any]:
        """Return the results by path; what was changed in place is one, too."""
        leaves = list(self.leaves)
        for k, x in zip(self.places, arrays, strict=True):
            leaves[k] = x
        args = self.tree.unflatten(leaves)
        outs, _ = tree_flatten_with_path(self.function(*args))
        found = {_path(path) or "the result": x for path, x in outs}
        after = jax.tree.leaves(args)
        for name, k in zip(self.names, self.places, strict=True):
            if after[k] is not leaves[k]:
                found[f"{name} afterwards"] = after[k]
        return {name: x for name, x in found.items() if _is_number(x)}


def _is_number(x: Any) -> bool:
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic | float | complex)
    return is_array and is_inexact(jnp.asarray(x))


def _path(path: Sequence[Any]) -> str:
    text = keystr(tuple(path), simple=True, separator="/")
    return re.sub(r"/(value|raw_value)$", "", text)  # of Flax NNX's variables


def _labels(function: Callable[..., Any], paths: Sequence[Any]) -> list[str]:
    """Return the names of arguments, as the function's signature has them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built-in functions have none
        parameters = []
    by_place = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    known = [each.name for each in parameters if each.kind in by_place]
    labels = []
    for path in paths:
        k = path[0].idx
        name = known[k] if k < len(known) else f"args[{k}]"
        labels.append("/".join(filter(None, (name, _path(path[1:])))))
    return labels


class _Watched:
    """The watched program of a call, for all arrays of its shapes."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.results: list[str] = []

        def results_of(*arrays: Any) -> list[Any]:
            results = call.run(*arrays)
            self.results = list(results)
            return list(results.values())

        self.program = jax.make_jaxpr(results_of)(*call.arrays)
        self._compile({})

    def _compile(self, room: dict[int, int]) -> None:
        self.watch = Watch(room)
        jaxpr = self.program.jaxpr

        def watched(constants: Sequence[Any], arrays: Sequence[Any]) -> Any:
            _, numbers = self.watch.run(jaxpr, constants, arrays)
            return [_size(x) for x in constants], [_size(x) for x in arrays], numbers

        self.run = jax.jit(watched)

    def walk(
        self, arrays: Sequence[Any], usual: Any = None, growths: Sequence[float] = ()
    ) -> tuple[dict[str, Value], Walk]:
        """Return the values of the results, and the walk that found them."""
        jaxpr = self.program.jaxpr
        while True:
            found = jax.device_get(self.run(self.program.consts, list(arrays)))
            of_constants, self.sizes, numbers = found
            walk = Walk(self.watch.widths, self.watch.room, usual)
            constants = [given(float(size), "") for size in of_constants]
            arguments = [
                given(float(size), name)
                for size, name in zip(self.sizes, self.call.names, strict=True)
            ]
            if growths:
                pairs = zip(arguments, growths, strict=True)
                arguments = [value._replace(growth=times) for value, times in pairs]
            values = walk.run(jaxpr, constants, arguments, Tape(numbers))
            if not walk.short:
                return dict(zip(self.results, values, strict=True)), walk
            self._compile({**self.watch.room, **walk.short})


def _size(x: Any) -> Any:
    return magnitude(x) if is_inexact(x) else jnp.float32(0)


def _bad_names(
    call: _Call, watched: _Watched, results: Mapping[str, Value]
) -> list[str]:
    """Return the results that are bad in the call itself, run on copies.

    A program that calls the host is not called again; then the watched results count.
    """
    if watched.program.effects:
        return [name for name, value in results.items() if value.is_bad]
    copies = [
        x.copy() if isinstance(x, jax.Array | np.ndarray) else x for x in call.arrays
    ]
    found = call.run(*copies)
    sizes = jax.device_get(
        jax.jit(lambda xs: [_size(x) for x in xs])(list(found.values()))
    )
    pairs = zip(found, sizes, strict=True)
    return [name for name, size in pairs if not np.isfinite(size) and name in results]


def _checked(walk: Walk) -> dict[str, Event | None]:
    """Return what checks of finiteness saw that decide about more than an element."""
    found = [event for jaxpr, check, event in walk.checks if decides(jaxpr, check)]
    return {str(k): event for k, event in enumerate(found)}


def _larger(
    watched: _Watched, call: _Call, usual: _Call, passes: Passes
) -> list[Cause]:
    """Return the arguments that are larger than usual, and where sizes grow most."""
    shapes = [jnp.shape(x) for x in call.arrays], [jnp.shape(x) for x in usual.arrays]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"usual: its arrays must have the shapes of args, {shapes[0]}, got "
            f"{shapes[1]}"
        )
    _, before = watched.walk(usual.arrays, {})
    usually = watched.sizes
    watched.walk(call.arrays)
    pairs = list(zip(watched.sizes, usually, strict=True))
    growths = [float(x / u) if x and u else 1.0 for x, u in pairs]
    _, walk = watched.walk(call.arrays, before.sizes, growths)
    causes = [
        large_argument(name, times, *pair)
        for name, times, pair in zip(call.names, growths, pairs, strict=True)
        if times > TOLD
    ]
    lines: dict[Any, Cause] = {}
    for times, event in sorted(walk.grown, key=lambda each: -each[0]):
        cause = large_operation(event, times, passes)
        lines.setdefault((cause.file, cause.line, cause.began_in), cause)
    return [*causes, *list(lines.values())[:3]]
