"""One row for every public member that changes gradients or weights.

All suites that go over members take them from here, so that a new one is one row.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax
from clipjax import functional
from tests.support import oracles as o

# Three rows for as many heads, with an element below 0, and no norm that is a bound.
MATRIX = {"a": np.array([[0.5, -2.0, 1.0]] * 3)}
WEIGHTS = {"a": np.array([[3.0, 1.0, 2.0]] * 3)}


class Row(NamedTuple):
    """A member with a bound, and what it should do."""

    # "clip", "step", "projection", "function" (of a tree), "layer" (of a tree, in its
    # backward pass)
    kind: str
    name: str  # the public one; in the room functional with its prefix
    # from the bound, a number or a traced array, and axes= if the member takes them
    make: Callable[..., Any]
    oracle: o.Oracle
    # which entries share a norm: "tree", "group", "leaf", "unit", "entry", or "none"
    shares: str
    title: str = ""  # tells rows of one member apart
    ord: float = 2  # of the norm
    bounds: bool = True  # it promises a bound
    # Only the past makes its bound: norms at the bound, of the tree for 3 steps, or of
    # each leaf for 1.
    warm: bool = False
    tree: str = "main"  # "matrices" and "heads" are smaller

    @property
    def id(self) -> str:
        return f"{self.name}{' ' if self.title else ''}{self.title}"

    @property
    def remembers(self) -> bool:
        """Whether a clip follows the past, as its state says."""
        return self.kind == "clip" and has_memory(self.make)

    @property
    def skips(self) -> bool:
        """Whether it may skip a whole step."""
        return self.name.startswith("skip_")

    @property
    def takes_axes(self) -> bool:
        return "axes" in inspect.signature(self.make).parameters

    @property
    def params(self) -> bool:
        """Whether it needs the weights, as its oracle does."""
        try:
            self.oracle(MATRIX, {}, 1.0)
        except KeyError:
            return True
        return False

    @property
    def keeps(self) -> bool:
        """Whether there is an inside, where nothing changes."""
        after = self.oracle(MATRIX, WEIGHTS, 1e4)
        return bool((after["a"] == MATRIX["a"]).all())

    @property
    def wide(self) -> bool:
        """Whether norms from 1e-18 to 1.8e19 are measured: other powers overflow."""
        return self.ord in (1, 2, np.inf)

    @property
    def times(self) -> float:
        """By how much the bounds of the tests are larger: 1-norms of trees are large,
        and entries far below them would be subnormal.
        """
        return 4096 if self.ord == 1 else 1


@functools.cache
def has_memory(make: Callable[..., Any]) -> bool:
    """Say whether the state of a transformation has a memory."""
    tree = {"a": np.ones((2, 2), np.float32), "c_": np.ones(2, np.float32)}
    return bool(jax.tree.leaves(jax.eval_shape(make(1.0).init, tree).memory))


clip, step, projection, function, layer = (
    functools.partial(Row, kind)
    for kind in ("clip", "step", "projection", "function", "layer")
)


def _qk_clip(bound: Any) -> Any:
    logits = jnp.array(LOGITS, np.float32) * bound
    return lambda params: clipjax.qk_clip(bound).apply(params, max_logits=logits)


def _capped(bound: Any) -> Any:
    return clipjax.project(
        lambda tree: functional.clip_by_norm(tree, bound, axes=clipjax.fan_in)
    )


LOGITS = (0.5, 4.0, 64.0)  # of each head, as multiples of the bound
SYMMETRIC = o.of_entries(lambda b: -b, lambda b: b)
LOPSIDED = o.of_entries(lambda b: -b, lambda b: 2 * b)
UNCHANGED = o.times(1)
TENTH = o.of_entries(lambda b: -0.1, lambda b: 0.1)
BALL = o.between(lambda b: 0, lambda b: b)
UNITS, TREE = o.of_units(), o.of_tree()

# The bound of the methods with a memory is what `warm` makes of them, so that they all
# clip to `b`.
CLIPS = [
    clip("clip_by_global_norm", clipjax.clip_by_global_norm, TREE, "tree"),
    clip(
        "clip_by_global_norm",
        lambda b: clipjax.clip_by_global_norm(b, ord=1),
        o.of_tree(1),
        "tree",
        "1-norm",
        ord=1,
    ),
    clip(
        "clip_by_global_norm",
        lambda b: clipjax.clip_by_global_norm(b, ord=jnp.inf),
        o.of_tree(np.inf),
        "tree",
        "max norm",
        ord=np.inf,
    ),
    clip("clip_by_norm", clipjax.clip_by_norm, o.of_leaves(), "leaf"),
    clip(
        "clip_by_norm",
        lambda b: clipjax.clip_by_norm(b, ord=3),
        o.of_leaves(3),
        "leaf",
        "3-norm",
        ord=3,
    ),
    clip(
        "clip_by_norm",
        lambda b: clipjax.clip_by_norm(b, axes=0),
        UNITS,
        "unit",
        "axes=0",
    ),
    clip("clip_by_rms", clipjax.clip_by_rms, o.of_leaves(rms=True), "leaf"),
    clip(
        "clip_by_rms",
        lambda b: clipjax.clip_by_rms(b, axes=0),
        o.of_units(rms=True),
        "unit",
        "axes=0",
    ),
    clip("clip_by_value", clipjax.clip_by_value, SYMMETRIC, "entry"),
    clip(
        "clip_by_value",
        lambda b: clipjax.clip_by_value(low=-b, high=2 * b),
        LOPSIDED,
        "entry",
        "low, high",
    ),
    clip("clip_by_value", lambda b: clipjax.clip_by_value(0.1), TENTH, "entry", "0.1"),
    clip(
        "clip_by_group_norm",
        lambda b: clipjax.clip_by_group_norm({"c_*": b, "*": b}),
        o.of_groups("c_"),
        "group",
    ),
    clip(
        "adaptive_grad_clip",
        clipjax.adaptive_grad_clip,
        o.of_units(relative_to=1e-3),
        "unit",
    ),
    clip("autoclip", lambda b: clipjax.autoclip(window=8), TREE, "tree", warm=True),
    clip(
        "clip_by_quantile",
        lambda b: clipjax.clip_by_quantile(initial_max_norm=b),
        TREE,
        "tree",
    ),
    clip(
        "zclip",
        lambda b: clipjax.zclip(warmup_steps=2, mode="mean", eps=0.0),
        TREE,
        "tree",
        warm=True,
    ),
    clip(
        "clip_by_lognormal",
        lambda b: clipjax.clip_by_lognormal(max_norm=b),
        TREE,
        "tree",
    ),
    clip(
        "adagc",
        lambda b, **axes: clipjax.adagc(1.0, warmup_steps=1, warmup_max_norm=b, **axes),
        o.of_leaves(),
        "leaf",
        warm=True,
    ),
]

STEPS = [
    step("tangent_cone", clipjax.tangent_cone, o.of_cone, "none", bounds=False),
    step(
        "relative_update",
        lambda b, **axes: clipjax.relative_update(**axes),
        o.of_norms,
        "leaf",
        bounds=False,
    ),
    step(
        "zero_nonfinite",
        lambda b: clipjax.zero_nonfinite(),
        UNCHANGED,
        "none",
        bounds=False,
    ),
    step(
        "skip_nonfinite",
        lambda b: clipjax.skip_nonfinite(clipjax.clip_by_norm(b)),
        o.of_leaves(),
        "none",
    ),
    step(
        "skip_spikes",
        lambda b: clipjax.skip_spikes(clipjax.clip_by_norm(b)),
        o.of_leaves(),
        "none",
    ),
    step(
        "record_norms",
        lambda b: clipjax.record_norms(),
        UNCHANGED,
        "none",
        bounds=False,
    ),
    step(
        "record_norms",
        lambda b: clipjax.record_norms(keep=2),
        UNCHANGED,
        "none",
        "keep",
        bounds=False,
    ),
    step(
        "bounded",
        lambda b: clipjax.bounded(optax.identity(), clip=clipjax.clip_by_norm(b)),
        o.of_leaves(),
        "leaf",
    ),
]

PROJECTIONS = [
    projection("max_norm", clipjax.max_norm, BALL, "unit"),
    projection(
        "min_max_norm",
        lambda b, **axes: clipjax.min_max_norm(0.0, b, **axes),
        BALL,
        "unit",
    ),
    projection(
        "min_max_norm",
        lambda b: clipjax.min_max_norm(b, 2 * b),
        o.between(lambda b: b, lambda b: 2 * b),
        "unit",
        "low",
    ),
    projection(
        "unit_norm",
        lambda b, **axes: clipjax.unit_norm(**axes),
        o.between(lambda b: 1, lambda b: 1),
        "unit",
    ),
    # It needs the old weights, whose norm it reaches from both sides, with no margin.
    projection(
        "keep_norm",
        lambda b, **axes: clipjax.keep_norm(**axes),
        o.of_norms,
        "leaf",
        bounds=False,
    ),
    projection(
        "non_negative",
        lambda b: clipjax.non_negative(),
        o.of_entries(lambda b: 0, lambda b: np.inf),
        "entry",
    ),
    projection("box", lambda b: clipjax.box(-b, 2 * b), LOPSIDED, "entry"),
    projection("project", _capped, UNITS, "unit"),
    projection(
        "spectral_cap",
        lambda b: clipjax.spectral_cap(b),
        o.of_singular_values,
        "leaf",
        tree="matrices",
    ),
    projection(
        "qk_clip", _qk_clip, o.of_heads(LOGITS), "none", bounds=False, tree="heads"
    ),
]

FUNCTIONS = [
    function(
        "functional.clip_by_global_norm",
        lambda b: lambda x: functional.clip_by_global_norm(x, b)[0],
        TREE,
        "tree",
    ),
    function(
        "functional.clip_by_norm",
        lambda b: lambda x: functional.clip_by_norm(x, b),
        o.of_leaves(),
        "leaf",
    ),
    function(
        "functional.clip_by_value",
        lambda b: lambda x: functional.clip_by_value(x, -b, 2 * b),
        LOPSIDED,
        "entry",
    ),
    layer(
        "clip_gradient_by_global_norm",
        lambda b: lambda x: clipjax.clip_gradient_by_global_norm(x, b),
        TREE,
        "tree",
    ),
    layer(
        "clip_gradient_by_norm",
        lambda b: lambda x: clipjax.clip_gradient_by_norm(x, b),
        o.of_leaves(),
        "leaf",
    ),
    layer(
        "clip_gradient_by_value",
        lambda b: lambda x: clipjax.clip_gradient_by_value(x, -b, 2 * b),
        LOPSIDED,
        "entry",
    ),
    layer(
        "scale_gradient",
        lambda b: lambda x: clipjax.scale_gradient(x, -2.0),
        o.times(-2),
        "none",
        bounds=False,
    ),
    layer(
        "replace_gradient",
        lambda b: clipjax.replace_gradient(
            lambda x: x, lambda x: jax.tree.map(lambda v: 4 * v, x)
        ),
        o.times(4),
        "none",
        bounds=False,
    ),
]

ROWS = CLIPS + STEPS + PROJECTIONS + FUNCTIONS
# The first row of each member, which is the plain one.
FIRST = {row.name: row for row in reversed(ROWS)}
FIRST = {name: FIRST[name] for name in dict.fromkeys(row.name for row in ROWS)}


def usual(name: str) -> Any:
    """Make a member with its defaults, if it has some for all of its arguments."""
    member = getattr(clipjax, name)
    needed = [
        x.default is x.empty for x in inspect.signature(member).parameters.values()
    ]
    return FIRST[name].make(1.0) if any(needed) else member()


def with_axes(name: str, bound: Any, axes: Any) -> Any:
    """Make a member that reduces these axes, if it takes such."""
    row = FIRST[name]
    return row.make(bound, axes=axes) if row.takes_axes else row.make(bound)


# A member that does to a leaf of any kind what the user's function does.
USERS_OWN = {"replace_gradient"}

# Public names that change neither gradients nor weights, or only as a function of the
# user's does.
OTHERS = {
    "adopt",
    "bad_steps",
    "explain",
    "named",
    "probe",
    "unless_skipped",
    "SKIP",
    "fan_in",
    "functional",
    "functional.global_norm",
    "functional.leaf_norms",
    "functional.unitwise_norms",
    "matching",
    "metrics",
    "series",
    "suggest",
    "tap",
    "tapped",
    "violations",
    "with_metrics",
}
