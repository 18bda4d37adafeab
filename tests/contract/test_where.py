"""`where=` of every clip: leaves outside do not count, and pass as they are, whatever they hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.contract.cases import DEFAULTS
from tests.support.trees import same_bits
from tests.support.walk import Case, build, is_projection, parameters

CLIPS = [case for case in DEFAULTS if "where" in parameters(case.name) and not is_projection(build(case))]
every_clip = pytest.mark.parametrize("case", CLIPS, ids=str)

WHERE = {
    "a pattern": "inner/*",
    "patterns": ["inner/kernel", "bias"],
    "a rule": lambda path, leaf: path[0].key == "inner",
    "a tree": {"inner": {"kernel": True, "bias": True}, "outer": {"kernel": False, "count": True}},
    "a prefix of a tree": {"inner": True, "outer": False},
}


def inner(seed: int, size: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "kernel": (size * rng.standard_normal((4, 3))).astype(np.float32),
        "bias": (size * rng.standard_normal(3)).astype(np.float32),
    }


def among(tree: Any) -> dict[str, Any]:
    """The tree beside leaves that would make every norm of both NaN, and one that is no float."""
    outer = {"kernel": np.array([np.nan, np.inf, 1e30], np.float32), "count": np.arange(3, dtype=np.int32)}
    return {"inner": tree, "outer": outer}


def test_there_are_clips() -> None:
    assert {case.name for case in CLIPS} >= {"clip_by_value", "clip_by_global_norm", "adagc", "zclip"}


@every_clip
def test_leaves_outside_do_not_count(case: Case) -> None:
    soon = {key: 1 for key in ("warmup_steps", "max_norm") if key in parameters(case.name)}
    forms = {name: build(case, where=where, **soon) for name, where in WHERE.items()}

    @jax.jit
    def run(params: Any, grads: list[Any]) -> Any:
        def steps(tx: Any, put: Any) -> Any:
            state, found = tx.init(put(params)), []
            for each in grads:
                updates, state = tx.update(put(each), state, put(params))
                found.append((updates, clipjax.metrics(state)))
            return found

        return steps(build(case, **soon), dict), {name: steps(tx, among) for name, tx in forms.items()}

    grads = [inner(seed, size) for seed, size in enumerate((1.0, 0.9, 1.1, 300.0))]
    alone, found = run(inner(9, 1.0), grads)
    assert any(not same_bits(updates, each) for (updates, _), each in zip(alone, grads, strict=True))
    for name, steps in found.items():
        for (updates, seen), (expected, expected_seen), grad in zip(steps, alone, grads, strict=True):
            assert same_bits(updates["inner"], expected), name
            assert same_bits(updates["outer"], among(grad)["outer"]), name
            assert same_bits(seen, expected_seen), name


@every_clip
def test_outside_may_be_no_arrays(case: Case) -> None:
    """As in an Equinox module, or where Flax keeps statistics of its own among the gradients."""
    tx = build(case, where="inner/*")
    grads = {"inner": inner(0, 9.0), "outer": {"activation": jnp.tanh, "name": "relu", "none": None}}
    updates, state = tx.update(grads, tx.init(grads), grads)
    assert updates["outer"] == grads["outer"]
    expected, _ = build(case).update(grads["inner"], build(case).init(grads["inner"]), grads["inner"])
    np.testing.assert_allclose(updates["inner"]["kernel"], expected["kernel"], rtol=1e-6)
    assert clipjax.metrics(state)


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        ("kernels", ValueError, r"where: the pattern 'kernels' matches no leaf(.|\n)*inner/kernel"),
        ("count", ValueError, "where: nothing is bounded"),
        (lambda path, leaf: 1, TypeError, "where: a rule must return a bool, got 1"),
        ({"inner": True}, ValueError, r"where must be one bool, or have the structure(.|\n)*outer/kernel"),
        (False, ValueError, "where is False for it"),
    ],
)
@every_clip
def test_what_fits_no_tree_is_an_error_in_init(
    case: Case, where: Any, error: type[Exception], text: str
) -> None:
    tx = build(case, where=where)
    with pytest.raises(error, match=text):
        tx.init(among(inner(0, 1.0)))


@every_clip
def test_a_bad_form_is_an_error_when_built(case: Case) -> None:
    for bad in (3, [1], {"kernel": 1}):
        with pytest.raises(TypeError, match=r"where must be path patterns.*got"):
            build(case, where=bad)
    with pytest.raises(ValueError, match="where must name at least one"):
        build(case, where=[])


def test_groups_of_optax_leave_out_what_where_names() -> None:
    """Where a wrapper keeps the leaves of a pattern to itself, the pattern is no mistake."""
    clip = clipjax.clip_by_global_norm(1.0, where=["inner/*", "outer/kernel"])
    labels = {"inner": "clipped", "outer": {"kernel": "other", "count": "other"}}
    tx = optax.partition({"clipped": clip, "other": optax.identity()}, labels)
    grads = among(inner(0, 9.0))
    updates, _ = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_allclose(optax.tree.norm(updates["inner"]), 1.0, rtol=1e-6)
    assert same_bits(updates["outer"], grads["outer"])


def test_the_gradient_of_what_is_outside_is_that_of_the_identity() -> None:
    clip = clipjax.clip_by_global_norm(1.0, where="a")

    def total(grads: Any) -> Any:
        return sum(jnp.sum(3 * x) for x in jax.tree.leaves(clip.update(grads, None)[0]))

    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([100.0, 200.0])}
    slopes = jax.jit(jax.grad(total))(grads)
    np.testing.assert_array_equal(slopes["b"], [3.0, 3.0])
    np.testing.assert_allclose(slopes["a"], 3 / 5 * (1 - np.array([0.6, 0.8]) * 1.4), rtol=1e-6)
