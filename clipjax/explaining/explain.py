"""Which operation, in which line, made a result NaN or infinite."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten_with_path

from clipjax._core.leaves import path_name, short_repr
from clipjax._core.states import SkipMemory
from clipjax.explaining.accused import first_causes, larger
from clipjax.explaining.causes import Cause
from clipjax.explaining.events import CONSTANT, Event, Value, joined
from clipjax.explaining.internals import is_inexact
from clipjax.explaining.lines import Passes, decides
from clipjax.explaining.primitives import is_check
from clipjax.explaining.walk import Tape, Walk, given
from clipjax.explaining.watch import Watch, magnitude
from clipjax.monitoring.metrics import labeled_states_in


def explain(
    function: Callable[..., Any], *args: Any, usual: Sequence[Any] | None = None
) -> list[Cause]:
    """Name the operation, and its line, that made a result NaN or infinite.

    Use it after a step broke, with the arguments of that step: the call is run once
    more and watched, and nothing in the model has to change. A step that
    :func:`skip_nonfinite` skipped left the weights as they were, so the call right
    after it, with the same batch, is that step; after a crash, restore the last
    checkpoint and give the batch that followed.

    The call is compiled again, with some more results for each array, such as its
    largest magnitude. From the bad results, `explain` goes back to the operations that
    made NaN or infinity out of finite inputs. Infinities that reach no result, as in a
    mask, are not causes.

    Args:
      function: what was run: `jax.value_and_grad(loss)`, or a whole training step,
        jitted or not. It is called once with copies of the arguments, to see which
        results are bad. If it prints or calls the host, this call is not made, and
        calls of the host that return nothing are left out.
      *args: its arguments. Those that are not arrays are static. For an argument that
        is given by name, pass `functools.partial(function, name=value)`.
      usual: the arguments of a good step, of the same shapes, as a tuple. If nothing is
        NaN or infinite, the answer tells which finite arrays among them are more than
        3 times as large as in that step, and at which lines sizes grew most, compared
        with it.

    Returns:
      A list of causes, those of a NaN before those of infinities, each in the order of
      the program; it is empty if nothing was bad, or only an infinity that was given or
      written in the program and was moved to the result. `print` writes a cause in a
      line. Some of its fields: `began_in` is "forward", "backward", "update" for what
      an optimizer does, or "after" for what else uses a gradient; an iteration `(3, 6)`
      has the index 3 of 6; `bad` says how many elements of the array were bad, and the
      index of the first; `library` is the library function that the line calls, such as
      "flax Linear"; `given` is the path of an argument that was bad before the call;
      and `became_nan` is the cause that says where the infinity became NaN. `handled`
      is true if the result is finite because a check of finiteness, as in a skip,
      caught the cause; what clipjax's states log does not count as a result.
      If the call is bad, but the watched program is not, the only cause has the kind
      "unseen".

    Raises:
      TypeError: `function` is not a function; an argument is traced: call it outside
        `jit`.
      ValueError: an argument was donated and is gone; `usual` has other shapes.

    Kernels, `shard_map` and `custom_linear_solve` are named as a whole. An operation in
    the rule of a `jax.custom_vjp` gets the line of the call, not that of the rule.

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
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        program = _Program(call)
        results, walk = program.walk(call.arrays)
        bad = [name for name, value in results.items() if value.is_bad]
        if not program.jaxpr.effects:  # or the host would be called again
            bad = [name for name in call.bad_results() if name in results]
        events = {name: results[name].event for name in bad}
        seen = {name: event for name, event in events.items() if event}
        if bad and not seen:
            return [Cause("unseen", results=tuple(bad))]
        passes = Passes(program.jaxpr.jaxpr)
        causes = first_causes(seen or _checked(walk), passes, call.named)
        if not bad:
            causes = [each._replace(handled=True, results=()) for each in causes]
        if causes or usual is None:
            return causes
        usually = _Call(function, tuple(usual))
        call.check_shapes(usually)
        pairs = _pairs(walk, program.walk(usually.arrays)[1])
        sizes = zip(map(_size, call.arrays), map(_size, usually.arrays), strict=True)
        return larger(dict(zip(call.names, sizes, strict=True)), pairs, passes)


class _Call:
    """A function of arrays, and those that it is called with."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if not callable(function):
            raise TypeError(
                "function must be a function, such as jax.grad(loss): pass it and its "
                f"arguments apart, got {short_repr(function)}"
            )
        self.function = function
        self.tree: Any
        paths, self.tree = tree_flatten_with_path(args)
        self.leaves = [leaf for _, leaf in paths]
        # Anything else may be static, and is closed over.
        self.places = [k for k, leaf in enumerate(self.leaves) if _is_array(leaf)]
        self.arrays = [self.leaves[k] for k in self.places]
        self.names = [_argument(function, paths[k][0]) for k in self.places]
        self.named = dict(zip(self.names, self.arrays, strict=True))
        for name, x in self.named.items():
            if isinstance(x, jax.core.Tracer):
                raise TypeError(
                    f"{name}: explain needs known arrays: call it outside jit"
                )
            if isinstance(x, jax.Array) and x.is_deleted():
                raise ValueError(
                    f"{name}: the array is deleted, since it was donated to a call. "
                    "Call explain before that call, or with copies"
                )

    def check_shapes(self, usual: _Call) -> None:
        """Raise if the arrays of another call have other shapes."""
        shapes, others = (list(map(jnp.shape, x.arrays)) for x in (self, usual))
        if shapes != others:
            raise ValueError(
                f"usual must be a tuple of arguments of the shapes {shapes}, got "
                f"{others}"
            )

    def run(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Return the results by path; what was changed in place is one, too."""
        leaves = list(self.leaves)
        for k, x in zip(self.places, arrays, strict=True):
            leaves[k] = x
        args = self.tree.unflatten(leaves)
        outs = self.function(*args)
        found = {
            _path(path) or "the result": x
            for path, x in tree_flatten_with_path(outs)[0]
        }
        after = jax.tree.leaves(args)
        for name, k in zip(self.names, self.places, strict=True):
            if after[k] is not leaves[k]:
                found[f"{name} afterwards"] = after[k]
        return _without_statistics(found, (outs, args))

    def bad_results(self) -> list[str]:
        """Return the paths of the results that are NaN or infinite."""
        copies = [x.copy() for x in self.arrays]  # they may be donated
        found = self.run(copies)
        return [name for name, x in found.items() if not np.isfinite(_size(x))]


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.inexact)


def _without_statistics(results: dict[str, Any], tree: Any) -> dict[str, Any]:
    """Leave out what is no number, and what clipjax's states in a tree remember.

    A skip logs the norm of the step that it skipped, and a window has infinities where
    no step has been.
    """
    labels = labeled_states_in(tree)
    own: set[int] = set()
    for label in labels.values():
        memory: Any = label.state.memory
        memory = memory.past if isinstance(memory, SkipMemory) else memory
        own |= set(map(id, jax.tree.leaves((label.state.metrics, memory))))
    return {
        name: x
        for name, x in results.items()
        if (_is_array(x) or isinstance(x, float | complex))
        and is_inexact(jnp.asarray(x))
        and id(x) not in own
        and not any(f"/{label}/" in f"/{name}" for label in labels)
    }


def _path(path: Sequence[Any]) -> str:
    # Flax NNX's variables have more names at their end.
    return re.sub(r"/(value|raw_value)$", "", path_name(tuple(path)))


def _argument(function: Callable[..., Any], path: Sequence[Any]) -> str:
    """Return the name of an argument, as the function's signature has it."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built-in functions have none
        parameters = []
    k = path[0].idx
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    is_named = k < len(parameters) and parameters[k].kind in kinds
    name = parameters[k].name if is_named else f"args[{k}]"
    return "/".join(filter(None, (name, _path(path[1:]))))


class _Program:
    """The program of a call, which is watched with any arrays of its shapes."""

    def __init__(self, call: _Call) -> None:
        self.names, self.results = call.names, list[str]()

        def results_of(*arrays: Any) -> list[Any]:
            found = call.run(arrays)
            self.results = list(found)
            return list(found.values())

        self.jaxpr = jax.make_jaxpr(results_of)(*call.arrays)
        self._watch({})

    def _watch(self, room: dict[int, int]) -> None:
        self.watch = Watch(room)
        jaxpr = self.jaxpr.jaxpr
        self.run = jax.jit(lambda *given: self.watch.run(jaxpr, *given)[1])

    def walk(self, arrays: list[Any]) -> tuple[dict[str, Value], Walk]:
        """Return the values of the results, and the walk that found them."""
        arguments = [
            given(x, name) if is_inexact(x) else Value(name=name)
            for name, x in zip(self.names, arrays, strict=True)
        ]
        while True:
            numbers = jax.device_get(self.run(self.jaxpr.consts, arrays))
            walk = Walk(self.watch)
            values = walk.run(
                self.jaxpr.jaxpr, self.jaxpr.consts, arguments, Tape(numbers)
            )
            if not walk.short:
                return dict(zip(self.results, values, strict=True)), walk
            self._watch({**self.watch.room, **walk.short})


def _size(x: Any) -> float:
    x = jnp.asarray(x)
    return magnitude(x) if is_inexact(x) else 0.0


def _checked(walk: Walk) -> dict[str, Event]:
    """Return what checks of finiteness saw that decide about more than an element.

    Infinities of constants are left out: these were meant.
    """
    checks = [each for each in walk.operations if is_check(each.eqn)]
    events = [
        joined(x.event for x in check.operands) for check in checks if decides(check)
    ]
    return {
        str(k): event
        for k, event in enumerate(events)
        if event and any(root.given != CONSTANT for root in event.roots)
    }


def _pairs(now: Walk, usual: Walk) -> list[tuple[Event, Event]]:
    """Return the operations of two calls of a program that run in both."""

    def by_place(walk: Walk) -> dict[Any, Event]:
        places = [event.place for event in walk.operations]
        keys = [((*map(id, place.eqns),), place.iterations) for place in places]
        return dict(zip(keys, walk.operations, strict=True))

    others = by_place(usual)
    return [(event, others[k]) for k, event in by_place(now).items() if k in others]
