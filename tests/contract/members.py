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


class Row(NamedTuple):
    """A member with a bound, and what it should do."""

    name: str  # the public one; in the room functional with its prefix
    # "clip", "step", "projection", "function" (of a tree), "layer" (of a tree, in its
    # backward pass)
    kind: str
    make: Callable[[Any], Any]  # from the bound, a number or a traced array
    oracle: o.Oracle
    # which entries share a norm: "tree", "group", "leaf", "unit", "entry", or "none"
    shares: str
    title: str = ""  # tells rows of one member apart
    # of the norm; 1 also where entries are not squared, and so do not overflow before
    # they are infinite
    ord: float = 2
    # what it bounds of a leaf, if not a norm
    measure: Callable[[np.ndarray], Any] | None = None
    # its metric `norm`: the "largest" norm, that of the "tree", or a "multiple" of a
    # norm
    logs: str = "largest"
    bounds: bool = True  # it promises a bound
    ends: bool = True  # which may be 0 or infinite
    keeps: bool = True  # there is an inside, where nothing changes
    wide: bool = True  # norms are measured from 1e-18 to 1.8e19
    times: float = 1  # the bounds of the tests are larger by this
    # the past that makes the bound: norms at the bound, of the "tree" for 3 steps, of
    # each "leaf" for 1
    warm: str = ""
    # the member that `gradients/test_levels.py` runs, if that with its defaults is slow
    quick: Callable[[], Any] | None = None
    params: bool = False  # it needs the weights
    tree: str = "main"  # "matrices" and "heads" are smaller
    # how far below the bound a float32 result may be, if not 2e-6
    below: float | None = None
    # what rounding is relative to: each "entry", or the largest of the "input" or the
    # "result"
    rounds: str = "entry"
    idempotent: bool = True  # a second call changes nothing
    skips: bool = False  # it may skip a whole step
    orders: bool = False  # it needs an order, which complex numbers do not have
    passes: bool = True  # what is no float passes through
    same_code: bool = False  # another row differentiates what it calls
    axes: Callable[..., Any] | None = None  # from the bound and axes=
    # the bound is passed on as it is: schedules, too, unless it is a function
    schedule: bool = True
    twice: bool = True  # second derivatives are finite at 0, too

    @property
    def id(self) -> str:
        return f"{self.name}{' ' if self.title else ''}{self.title}"

    @property
    def remembers(self) -> bool:
        """Whether a clip follows the past, as its state says."""
        return self.kind == "clip" and has_memory(self.make)


@functools.cache
def has_memory(make: Callable[[Any], Any]) -> bool:
    """Say whether the state of a transformation has a memory."""
    tree = {"a": np.ones((2, 2), np.float32), "c_": np.ones(2, np.float32)}
    return bool(jax.tree.leaves(jax.eval_shape(make(1.0).init, tree).memory))


def _agc(bound: Any, **axes: Any) -> Any:
    return clipjax.adaptive_grad_clip(bound, **axes)


def _adagc(bound: Any, **axes: Any) -> Any:
    return clipjax.adagc(1.0, warmup_steps=1, max_norm=bound, **axes)


def _qk_clip(bound: Any) -> Any:
    logits = jnp.array(LOGITS, np.float32) * bound
    return lambda params: clipjax.qk_clip(bound).apply(params, max_logits=logits)


def _capped(bound: Any) -> Any:
    return clipjax.project(
        lambda tree: functional.clip_by_norm(tree, bound, clipjax.fan_in)
    )


def _largest_singular_value(x: np.ndarray) -> Any:
    return np.linalg.norm(x, 2) if x.ndim == 2 else np.zeros(())


LOGITS = (0.5, 4.0, 64.0)  # of each head, as multiples of the bound
SYMMETRIC = o.of_entries(lambda b: -b, lambda b: b)
LOPSIDED = o.of_entries(lambda b: -b, lambda b: 2 * b)
TENTH = o.of_entries(lambda b: -0.1, lambda b: 0.1)
BALL = o.between(lambda b: 0, lambda b: b)
UNITS, TREE = o.of_units(), o.of_tree()

# The bound of the methods with a memory is what `warm` makes of them, so that they all
# clip to `b`.
CLIPS = [
    Row("clip_by_global_norm", "clip", clipjax.clip_by_global_norm, TREE, "tree"),
    Row(
        "clip_by_global_norm",
        "clip",
        lambda b: clipjax.clip_by_global_norm(b, ord=1),
        o.of_tree(1),
        "tree",
        "1-norm",
        ord=1,
        times=4096,
    ),
    Row(
        "clip_by_global_norm",
        "clip",
        lambda b: clipjax.clip_by_global_norm(b, ord=jnp.inf),
        o.of_tree(np.inf),
        "tree",
        "max norm",
        ord=np.inf,
    ),
    Row("clip_by_norm", "clip", clipjax.clip_by_norm, o.of_leaves(), "leaf"),
    Row(
        "clip_by_norm",
        "clip",
        lambda b: clipjax.clip_by_norm(b, ord=3),
        o.of_leaves(3),
        "leaf",
        "3-norm",
        ord=3,
        wide=False,
    ),
    Row(
        "clip_by_norm",
        "clip",
        lambda b: clipjax.clip_by_norm(b, axes=0),
        UNITS,
        "unit",
        "axes=0",
        axes=clipjax.clip_by_norm,
    ),
    Row(
        "clip_by_rms",
        "clip",
        clipjax.clip_by_rms,
        o.of_leaves(rms=True),
        "leaf",
        logs="multiple",
        axes=clipjax.clip_by_rms,
    ),
    Row(
        "clip_by_rms",
        "clip",
        lambda b: clipjax.clip_by_rms(b, axes=0),
        o.of_units(rms=True),
        "unit",
        "axes=0",
        same_code=True,
    ),
    Row("clip_by_value", "clip", clipjax.clip_by_value, SYMMETRIC, "entry"),
    Row(
        "clip_by_value",
        "clip",
        lambda b: clipjax.clip_by_value(low=-b, high=2 * b),
        LOPSIDED,
        "entry",
        "low, high",
        schedule=False,
        orders=True,
        same_code=True,
    ),
    Row(
        "clip_by_value",
        "clip",
        lambda b: clipjax.clip_by_value(0.1),
        TENTH,
        "entry",
        "0.1",
        keeps=False,
        schedule=False,
        same_code=True,
    ),
    Row(
        "clip_by_group_norm",
        "clip",
        lambda b: clipjax.clip_by_group_norm({"c_*": b, "*": b}),
        o.of_groups("c_"),
        "group",
    ),
    Row(
        "adaptive_grad_clip",
        "clip",
        _agc,
        o.of_units(relative_to=1e-3),
        "unit",
        params=True,
        axes=_agc,
    ),
    Row(
        "autoclip",
        "clip",
        lambda b: clipjax.autoclip(window=8),
        TREE,
        "tree",
        warm="tree",
        # as fast as its window, here a tenth of the default
        quick=lambda: clipjax.autoclip(window=100),
        schedule=False,
    ),
    Row(
        "clip_by_quantile",
        "clip",
        lambda b: clipjax.clip_by_quantile(initial_max_norm=b),
        TREE,
        "tree",
        schedule=False,
        ends=False,
    ),
    Row(
        "zclip",
        "clip",
        lambda b: clipjax.zclip(warmup_steps=2, mode="mean", eps=0.0),
        TREE,
        "tree",
        warm="tree",
        schedule=False,
    ),
    Row(
        "clip_by_lognormal",
        "clip",
        lambda b: clipjax.clip_by_lognormal(max_norm=b),
        TREE,
        "tree",
    ),
    Row(
        "adagc",
        "clip",
        _adagc,
        o.of_leaves(),
        "leaf",
        warm="leaf",
        # as fast as its decay, which by default is slow
        quick=lambda: clipjax.adagc(decay=0.5),
        axes=_adagc,
        schedule=False,
        logs="tree",
    ),
]

STEPS = [
    Row(
        "tangent_cone",
        "step",
        clipjax.tangent_cone,
        o.of_cone,
        "none",
        bounds=False,
        params=True,
        axes=clipjax.tangent_cone,
        rounds="input",
        idempotent=False,
    ),
    Row(
        "relative_update",
        "step",
        lambda b: clipjax.relative_update(),
        o.of_norms,
        "leaf",
        bounds=False,
        params=True,
        keeps=False,
        schedule=False,
        axes=lambda b, **axes: clipjax.relative_update(**axes),
        idempotent=False,
    ),
    Row(
        "zero_nonfinite",
        "step",
        lambda b: clipjax.zero_nonfinite(),
        o.times(1),
        "none",
        bounds=False,
        schedule=False,
    ),
    Row(
        "skip_nonfinite",
        "step",
        lambda b: clipjax.skip_nonfinite(clipjax.clip_by_norm(b)),
        o.of_leaves(),
        "none",
        skips=True,
    ),
    Row(
        "skip_spikes",
        "step",
        lambda b: clipjax.skip_spikes(clipjax.clip_by_norm(b)),
        o.of_leaves(),
        "none",
        skips=True,
        same_code=True,
    ),
    Row(
        "record_norms",
        "step",
        lambda b: clipjax.record_norms(),
        o.times(1),
        "none",
        bounds=False,
        schedule=False,
        same_code=True,
    ),
    Row(
        "record_norms",
        "step",
        lambda b: clipjax.record_norms(keep=2),
        o.times(1),
        "none",
        title="keep",
        bounds=False,
        schedule=False,
        same_code=True,
    ),
    Row(
        "bounded",
        "step",
        lambda b: clipjax.bounded(optax.identity(), clip=clipjax.clip_by_norm(b)),
        o.of_leaves(),
        "leaf",
        same_code=True,
    ),
    Row(
        "chain",
        "step",
        lambda b: clipjax.chain(clipjax.clip_by_norm(b), optax.identity()),
        o.of_leaves(),
        "leaf",
        same_code=True,
    ),
]

PROJECTIONS = [
    Row(
        "max_norm", "projection", clipjax.max_norm, BALL, "unit", axes=clipjax.max_norm
    ),
    Row(
        "min_max_norm",
        "projection",
        lambda b: clipjax.min_max_norm(0.0, b),
        BALL,
        "unit",
        same_code=True,
        axes=lambda b, **axes: clipjax.min_max_norm(0.0, b, **axes),
    ),
    Row(
        "min_max_norm",
        "projection",
        lambda b: clipjax.min_max_norm(b, 2 * b),
        o.between(lambda b: b, lambda b: 2 * b),
        "unit",
        "low",
        keeps=False,
        schedule=False,
    ),
    Row(
        "unit_norm",
        "projection",
        lambda b: clipjax.unit_norm(),
        o.between(lambda b: 1, lambda b: 1),
        "unit",
        keeps=False,
        schedule=False,
        same_code=True,
        axes=lambda b, **axes: clipjax.unit_norm(**axes),
    ),
    # It needs the old weights, whose norm it reaches from both sides, with no margin.
    Row(
        "keep_norm",
        "projection",
        lambda b: clipjax.keep_norm(),
        o.of_norms,
        "leaf",
        bounds=False,
        params=True,
        keeps=False,
        schedule=False,
        axes=lambda b, **axes: clipjax.keep_norm(**axes),
        idempotent=False,
    ),
    Row(
        "non_negative",
        "projection",
        lambda b: clipjax.non_negative(),
        o.of_entries(lambda b: 0, lambda b: np.inf),
        "entry",
        keeps=False,
        schedule=False,
        orders=True,
    ),
    Row(
        "box",
        "projection",
        lambda b: clipjax.box(-b, 2 * b),
        LOPSIDED,
        "entry",
        schedule=False,
        orders=True,
    ),
    Row(
        "project", "projection", _capped, UNITS, "unit", schedule=False, same_code=True
    ),
    Row(
        "spectral_cap",
        "projection",
        lambda b: clipjax.spectral_cap(b),
        o.of_singular_values,
        "leaf",
        tree="matrices",
        below=4e-5,
        twice=False,
        ord=1,
        measure=_largest_singular_value,
        rounds="result",
    ),
    Row(
        "qk_clip",
        "projection",
        _qk_clip,
        o.of_heads(LOGITS),
        "none",
        bounds=False,
        keeps=False,
        tree="heads",
        schedule=False,
        idempotent=False,
    ),
]

FUNCTIONS = [
    Row(
        "functional.clip_by_global_norm",
        "function",
        lambda b: lambda x: functional.clip_by_global_norm(x, b)[0],
        TREE,
        "tree",
        same_code=True,
    ),
    Row(
        "functional.clip_by_norm",
        "function",
        lambda b: lambda x: functional.clip_by_norm(x, b),
        o.of_leaves(),
        "leaf",
        same_code=True,
    ),
    Row(
        "functional.clip_by_value",
        "function",
        lambda b: lambda x: functional.clip_by_value(x, -b, 2 * b),
        LOPSIDED,
        "entry",
        schedule=False,
        orders=True,
        same_code=True,
    ),
    Row(
        "clip_gradient_by_global_norm",
        "layer",
        lambda b: lambda x: clipjax.clip_gradient_by_global_norm(x, b),
        TREE,
        "tree",
    ),
    Row(
        "clip_gradient_by_norm",
        "layer",
        lambda b: lambda x: clipjax.clip_gradient_by_norm(x, b),
        o.of_leaves(),
        "leaf",
    ),
    Row(
        "clip_gradient_by_value",
        "layer",
        lambda b: lambda x: clipjax.clip_gradient_by_value(x, -b, 2 * b),
        LOPSIDED,
        "entry",
        schedule=False,
        orders=True,
    ),
    Row(
        "scale_gradient",
        "layer",
        lambda b: lambda x: clipjax.scale_gradient(x, -2.0),
        o.times(-2),
        "none",
        bounds=False,
        keeps=False,
        schedule=False,
        idempotent=False,
    ),
    Row(
        "replace_gradient",
        "layer",
        lambda b: clipjax.replace_gradient(
            lambda x: x, lambda x: jax.tree.map(lambda v: 4 * v, x)
        ),
        o.times(4),
        "none",
        bounds=False,
        keeps=False,
        schedule=False,
        idempotent=False,
        passes=False,
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
    takes = [row.axes for row in ROWS if row.name == name and row.axes]
    return takes[0](bound, axes=axes) if takes else FIRST[name].make(bound)


# Public names that change neither gradients nor weights, or only as a function of the
# user's does.
OTHERS = {
    "adopt",
    "bad_steps",
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
