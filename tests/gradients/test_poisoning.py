"""Steps that are not finite never reach a statistic: the run goes on as if they had not been.

Over every public transformation that remembers anything but what it shows: a run with bad steps in it is
compared with the run without them, bit for bit, in the statistics and in the updates that follow.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax._core.stats import Stats
from clipjax.gradients.groups import OfGroup
from clipjax.monitoring.records import Recorded
from tests.support.trees import bits, random_tree, same_bits
from tests.support.walk import Case, build, cases, is_projection, parameters

PARAMS = random_tree(7)

# What says how the last step went, how many steps there were of a kind, and what no step changes. All else is
# remembered.
SHOWN = {
    "radii",
    "threshold",
    "norm",
    "z_score",
    "steps",
    "skipped",
    "skipped_last",
    "skipped_in_a_row",
    "nonfinite_count",
    "nonfinite_steps",
    "norm_spike_count",
    "loss_z_score",
    "loss_threshold",
}


KINDS_SHOWN = (Stats, OfGroup, Recorded)


def is_own_state(node: Any) -> bool:
    return hasattr(node, "_fields") and type(node).__module__.startswith("clipjax.")


def remembered(state: Any) -> list[Any]:
    """The statistics in a state, by name, wherever they are nested."""
    found = []
    for node in jax.tree.leaves(state, is_leaf=is_own_state):
        if is_own_state(node) and not isinstance(node, KINDS_SHOWN):
            for name, value in node._asdict().items():
                if name not in SHOWN and not isinstance(value, KINDS_SHOWN):
                    parts = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, KINDS_SHOWN))
                    others = [(name, part) for part in parts if not isinstance(part, KINDS_SHOWN)]
                    found += remembered(value) or others
    return found


def remembering() -> list[Case]:
    small = {"window": 8, "warmup_steps": 4}
    found = []
    for case in cases():
        # An optimizer's own moments are no statistics of ours; skipping is what protects them.
        options = {"nonfinite": "skip"} if case.name == "bounded" else {}
        options |= {key: value for key, value in small.items() if key in parameters(case.name)}
        tx = build(Case(case.name, options))
        if remembered(tx.init(PARAMS)) and not is_projection(tx):
            found.append(Case(case.name, options))
    return found


EVERY = pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in remembering()])


def gradient(seed: int, scale: float = 1.0) -> Any:
    size = scale * math.exp(0.5 * np.random.default_rng(seed).standard_normal())
    return random_tree(seed, scale=size)


def spoilt(seed: int, value: float, *, everywhere: bool) -> Any:
    grads = gradient(seed)
    if everywhere:
        return jax.tree.map(lambda x: jnp.full_like(x, value), grads)
    grads["dense"]["kernel"] = grads["dense"]["kernel"].at[1, 2].set(value)
    return grads


BAD = [
    spoilt(seed, value, everywhere=everywhere)
    for seed, (value, everywhere) in enumerate(
        (value, everywhere) for value in (math.nan, math.inf, -math.inf) for everywhere in (False, True)
    )
]
# Norms that are finite, but not in the float32 of the state.
TOO_LARGE = jax.tree.map(lambda x: jnp.full_like(x, 3e38), PARAMS)


@functools.cache
def built(label: str) -> tuple[Any, Any]:
    tx = build(next(case for case in remembering() if str(case) == label))
    return tx, jax.jit(tx.update)


def run(case: Case, steps: list[Any], state: Any = None) -> tuple[list[Any], Any]:
    tx, update = built(str(case))
    state = tx.init(PARAMS) if state is None else state
    all_updates = []
    for grads in steps:
        updates, state = update(grads, state, PARAMS)
        all_updates.append(updates)
    return all_updates, state


def test_the_walk_finds_what_remembers() -> None:
    assert {"autoclip", "zclip", "adagc", "clip_by_lognormal", "clip_by_quantile"} <= {
        case.name for case in remembering()
    }


GOOD = [gradient(seed) for seed in range(100, 117)]
# Before the first step, in the warm-up, at its end, after it, and where the window has gone round.
PLACES = {"first": 0, "warm-up": 2, "last-of-warm-up": 3, "after-warm-up": 4, "later": 12}


@pytest.mark.parametrize("count", [1, 6, 100])
@pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))
@EVERY
def test_bad_steps_leave_the_statistics_as_they_were(case: Case, place: int, count: int) -> None:
    bad = [BAD[i % len(BAD)] for i in range(count)]
    _, before = run(case, GOOD[:place])
    spoilt_updates, after = run(case, bad, before)
    assert bits(remembered(after)) == bits(remembered(before))
    skips = not any(np.isnan(x).any() for x in jax.tree.leaves(spoilt_updates[0]))
    assert skips == any("skip" in key for key in clipjax.metrics(after)), "neither loud nor skipped"

    updates, state = run(case, GOOD[place:], after)
    clean_updates, clean = run(case, GOOD[place:], before)
    assert bits(remembered(state)) == bits(remembered(clean))
    assert same_bits(updates, clean_updates)
    assert bits(remembered(state)) != bits(remembered(before)), "it has stopped adapting"


@EVERY
def test_norms_that_the_state_cannot_hold_do_not_enter_it(case: Case) -> None:
    _, before = run(case, GOOD)
    _, after = run(case, [TOO_LARGE] * 3, before)
    moments = "inner"  # of the optimizer inside a wrapper, which may well overflow
    assert all(np.isfinite(value).all() for name, value in remembered(after) if name != moments)
    if all(name != moments for name, _ in remembered(after)):
        updates, _ = run(case, GOOD, after)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e18, 1e30])
@EVERY
def test_statistics_stay_finite_at_every_scale(case: Case, scale: float) -> None:
    with np.errstate(under="ignore"):
        steps = [gradient(seed, scale) for seed in range(20)]
    updates, state = run(case, steps)
    for _, value in remembered(state):
        assert not np.isnan(value).any()
    for tree in updates:
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(tree))
    after, _ = run(case, GOOD, state)
    assert all(np.isfinite(x).all() for tree in after for x in jax.tree.leaves(tree))
