"""Which entries share a norm: every form of `axes`, against norms taken by hand."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import SKIP, fan_in, functional
from tests.support.oracles import exact_norm
from tests.support.trees import same_bits


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def leaf(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), np.float32)

    return {
        "attention": {"query": {"kernel": leaf(4, 2, 3), "bias": leaf(2, 3)}},
        "embed": leaf(5, 4),
        "head": {"kernel": leaf(4, 6), "bias": leaf(6)},
        "scale": leaf(),
    }


def paths(tree: Any) -> dict[str, jax.Array]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def check(axes: Any, reduced: dict[str, Any]) -> None:
    """`reduced` says which axes of which leaf; the leaves it does not name are left alone."""
    params = tree()
    norms = functional.unit_norms(params, axes)
    clipped = paths(functional.clip_by_norm(params, 0.5, axes))
    projected = paths(clipjax.max_norm(0.5, axes=axes)(params))
    link = clipjax.max_norm(0.5, axes=axes)
    zeros = jax.tree.map(jnp.zeros_like, params)
    linked = paths(link.update(zeros, link.init(params), params)[0])
    flat_norms = dict(zip(paths(params), jax.tree.leaves(norms, is_leaf=lambda x: x is None), strict=True))
    for path, leaf in paths(params).items():
        if path not in reduced:
            assert flat_norms[path] is None
            assert same_bits(clipped[path], leaf)
            assert same_bits(projected[path], leaf)
            assert same_bits(linked[path], jnp.zeros_like(leaf))
            continue
        axis = reduced[path]
        expected = exact_norm(leaf, axis)
        assert flat_norms[path].shape == expected.shape
        np.testing.assert_allclose(flat_norms[path], expected, rtol=1e-6)
        after = exact_norm(clipped[path], axis)
        np.testing.assert_allclose(after, np.minimum(expected, 0.5), rtol=1e-6)
        assert (after <= 0.5).all() or (after[expected > 0.5] <= 0.5).all()
        assert same_bits(projected[path], clipped[path])


ALL = {
    "attention/query/kernel": (0, 1, 2),
    "attention/query/bias": (0, 1),
    "embed": (0, 1),
    "head/kernel": (0, 1),
    "head/bias": (0,),
    "scale": (),
}


def test_none_is_the_whole_leaf() -> None:
    check(None, ALL)


def test_skip_leaves_all_alone() -> None:
    check(SKIP, {})
    assert repr(SKIP) == "clipjax.SKIP"


def test_fan_in() -> None:
    check(
        fan_in,
        {
            "attention/query/kernel": (0, 1),
            "attention/query/bias": (0,),
            "embed": (0,),
            "head/kernel": (0,),
        },
    )


@pytest.mark.parametrize(
    ("shape", "reduced"),
    [
        ((), SKIP),
        ((3,), SKIP),
        ((3, 4), (0,)),
        ((5, 4, 8), (0, 1)),
        ((3, 3, 4, 8), (0, 1, 2)),
        ((2, 3, 3, 4, 8), (0, 1, 2, 3)),
    ],
)
def test_fan_in_of_every_rank(shape: tuple[int, ...], reduced: Any) -> None:
    assert fan_in((), jnp.ones(shape)) == reduced
    assert fan_in((), np.ones(shape)) == reduced
    assert fan_in((), jax.ShapeDtypeStruct(shape, np.float32)) == reduced
    leaf = 2 * jnp.ones(shape)
    norms = functional.unit_norms(leaf, fan_in)
    assert (norms is None) == (reduced is SKIP)
    if norms is not None:
        assert norms.shape == shape[-1:]


MATRICES = {"a": jnp.arange(12.0).reshape(3, 4) / 4, "b": jnp.arange(6.0).reshape(2, 3) / 4}


@pytest.mark.parametrize(
    ("axes", "same"),
    [(0, (0,)), (1, (1,)), (-1, (1,)), (-2, (0,)), ((0, 1), (0, 1)), ([1, 0], (0, 1)), ((-1, 0), (0, 1))],
)
def test_ints_and_tuples(axes: Any, same: tuple[int, ...]) -> None:
    norms = functional.unit_norms(MATRICES, axes)
    for key, leaf in MATRICES.items():
        np.testing.assert_allclose(norms[key], exact_norm(leaf, same), rtol=1e-6)
    clipped = functional.clip_by_norm(MATRICES, 0.25, axes)
    assert same_bits(clipped, functional.clip_by_norm(MATRICES, 0.25, same))
    for leaf in clipped.values():
        assert (exact_norm(leaf, same) <= 0.25).all()


def test_numpy_ints_are_axes() -> None:
    assert same_bits(functional.unit_norms(MATRICES, np.int64(1)), functional.unit_norms(MATRICES, 1))


def test_the_empty_tuple_makes_every_entry_a_unit() -> None:
    norms = functional.unit_norms(MATRICES, ())
    assert same_bits(norms, MATRICES)  # they are not negative
    clipped = functional.clip_by_norm(MATRICES, 0.5, ())
    for key, leaf in clipped.items():
        assert (np.asarray(leaf) <= 0.5).all()
        np.testing.assert_allclose(leaf, np.minimum(MATRICES[key], 0.5), rtol=1e-6)


def test_a_rule_sees_path_and_leaf() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def rule(path: Any, leaf: Any) -> Any:
        seen.append((jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape))
        if leaf.ndim == 3:
            return (0,)  # one norm for each head and channel
        return None if path[0].key == "embed" else SKIP

    check(rule, {"attention/query/kernel": (0,), "embed": (0, 1)})
    assert ("attention/query/kernel", (4, 2, 3)) in seen
    assert ("scale", ()) in seen


def test_a_mapping_takes_the_first_match_and_leaves_the_rest_alone() -> None:
    check(
        {"attention/*/kernel": 0, "*kernel": (0, 1), "embed": -1},
        {"attention/query/kernel": (0,), "head/kernel": (0, 1), "embed": (1,)},
    )
    check(
        {"*kernel": fan_in, "attention/*": None},
        {"attention/query/kernel": (0, 1), "head/kernel": (0,), "attention/query/bias": (0, 1)},
    )


def test_a_mapping_may_skip_and_end_in_a_default() -> None:
    rest = {key: value for key, value in ALL.items() if key != "embed"}
    check({"embed": SKIP, "*": None}, rest)


def test_a_pattern_may_be_the_last_components_of_a_path() -> None:
    check({"kernel": fan_in}, {"attention/query/kernel": (0, 1), "head/kernel": (0,)})
    check({"query/bias": 1}, {"attention/query/bias": (1,)})


def test_a_pattern_does_not_match_part_of_a_name() -> None:
    with pytest.raises(ValueError, match="matches no leaf"):
        functional.unit_norms(tree(), {"ernel": 0})
    with pytest.raises(ValueError, match="matches no leaf"):
        functional.unit_norms(tree(), {"head/kern": 0})


def test_a_pattern_that_matches_nothing_lists_the_paths() -> None:
    with pytest.raises(ValueError, match="matches no leaf") as caught:
        functional.clip_by_norm(tree(), 1.0, {"*kernel": 0, "decoder/*": 0})
    message = str(caught.value)
    assert "'decoder/*'" in message
    assert "'*kernel'" not in message
    for path in paths(tree()):
        assert path in message


def test_a_pattern_that_is_shadowed_still_matches() -> None:
    check({"*": SKIP, "head/*": 0}, {})


@pytest.mark.parametrize(
    "update",
    [
        lambda axes: clipjax.clip_by_norm(1.0, axes=axes),
        lambda axes: clipjax.clip_by_rms(1.0, axes=axes),
        lambda axes: clipjax.max_norm(1.0, axes=axes),
    ],
    ids=["clip_by_norm", "clip_by_rms", "max_norm"],
)
class TestErrors:
    @pytest.mark.parametrize(
        ("axes", "message"),
        [
            (1, "axes: 1 is out of range for leaf 'head/bias' of shape (6,)"),
            (-2, "axes: -2 is out of range for leaf 'head/bias' of shape (6,)"),
            ({"head/bias": 3}, "axes: 3 is out of range for leaf 'head/bias' of shape (6,)"),
            (lambda *_: (0, 5), "axes: 5 is out of range for leaf 'head/bias' of shape (6,)"),
            ({"head/kernel": (0, 0)}, "names an axis twice for leaf 'head/kernel' of shape (4, 6)"),
            ({"head/kernel": (1, -1)}, "names an axis twice for leaf 'head/kernel' of shape (4, 6)"),
        ],
    )
    def test_in_update(self, update: Any, axes: Any, message: str) -> None:
        params = {"head": tree()["head"]}
        tx = update(axes)
        with pytest.raises(ValueError, match=re.escape(message)):
            tx.update(params, tx.init(params), params)

    @pytest.mark.parametrize(
        "axes",
        [
            True,
            "0",
            "kernel",
            1.0,
            (0, 1.5),
            (0, True),
            {"kernel": "0"},
            {"kernel": True},
            {"a": {"b": 0}},
            {0: 0},
        ],
    )
    def test_when_built(self, update: Any, axes: Any) -> None:
        with pytest.raises(TypeError, match="axes"):
            update(axes)


def test_a_rule_that_returns_nonsense_raises() -> None:
    for nonsense in (True, "0", 1.5):
        with pytest.raises(TypeError, match="axes"):
            functional.clip_by_norm(tree(), 1.0, lambda *_, nonsense=nonsense: nonsense)


def test_a_traced_axis_raises() -> None:
    with pytest.raises(TypeError, match="known when tracing"):
        jax.jit(lambda axis: functional.unit_norms(MATRICES, axis))(0)


def test_leaves_that_do_not_count_need_no_axes() -> None:
    odd = {"kernel": 4 * jnp.ones((2, 3)), "step": jnp.asarray(3), "key": jax.random.key(0), "none": None}
    clipped = functional.clip_by_norm(odd, 1.0, 0)
    assert same_bits(
        {k: v for k, v in clipped.items() if k != "kernel"}, {k: v for k, v in odd.items() if k != "kernel"}
    )
    assert (exact_norm(clipped["kernel"], 0) <= 1).all()


def test_rms_divides_by_the_entries_of_a_unit() -> None:
    params = tree()
    for axes, axis in ((None, None), (fan_in, (0,)), ({"head/kernel": 1}, (1,))):
        tx = clipjax.clip_by_rms(0.25, axes=axes)
        leaf = tx.update(params, tx.init(params))[0]["head"]["kernel"]
        exact = np.asarray(leaf, np.float64)
        before = np.asarray(params["head"]["kernel"], np.float64)
        rms, expected = (np.sqrt(np.mean(x**2, axis=axis)) for x in (exact, before))
        np.testing.assert_allclose(rms, np.minimum(expected, 0.25), rtol=1e-6)
        assert (rms <= 0.25 * (1 + 1e-15)).all()  # the mean itself is rounded
