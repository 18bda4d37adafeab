"""Which entries share a norm: every form of `axes`, against norms taken by hand."""

from __future__ import annotations

import functools
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

    def leaf(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape), np.float32)

    return {
        "attention": {"query": {"kernel": leaf(4, 2, 3), "bias": leaf(2, 3)}},
        "embed": leaf(5, 4),
        "head": {"kernel": leaf(4, 6), "bias": leaf(6)},
        "scale": leaf(),
    }


def paths(tree: Any) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


ALL = {
    "attention/query/kernel": (0, 1, 2),
    "attention/query/bias": (0, 1),
    "embed": (0, 1),
    "head/kernel": (0, 1),
    "head/bias": (0,),
    "scale": (),
}


def by_rank_and_name(path: Any, leaf: Any) -> Any:
    if leaf.ndim == 3:
        return (0,)  # one norm for each head and channel
    return None if path[0].key == "embed" else SKIP


# Every form of `axes`, and which axes of which leaf it reduces: leaves without a name are left alone.
FORMS: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "None is the whole leaf": (None, ALL),
    "SKIP leaves all alone": (SKIP, {}),
    "fan_in": (
        fan_in,
        {
            "attention/query/kernel": (0, 1),
            "attention/query/bias": (0,),
            "embed": (0,),
            "head/kernel": (0,),
        },
    ),
    "a rule": (by_rank_and_name, {"attention/query/kernel": (0,), "embed": (0, 1)}),
    "a mapping takes the first match": (
        {"attention/*/kernel": 0, "*kernel": (0, 1), "embed": -1},
        {"attention/query/kernel": (0,), "head/kernel": (0, 1), "embed": (1,)},
    ),
    "a mapping to rules and None": (
        {"*kernel": fan_in, "attention/*": None},
        {"attention/query/kernel": (0, 1), "head/kernel": (0,), "attention/query/bias": (0, 1)},
    ),
    "a mapping may skip and end in a default": (
        {"embed": SKIP, "*": None},
        {key: value for key, value in ALL.items() if key != "embed"},
    ),
    "the last component of a path": (
        {"kernel": fan_in},
        {"attention/query/kernel": (0, 1), "head/kernel": (0,)},
    ),
    "the last components of a path": ({"query/bias": 1}, {"attention/query/bias": (1,)}),
    "a pattern that is shadowed still matches": ({"*": SKIP, "head/*": 0}, {}),
}


@functools.cache
def results() -> dict[str, Any]:
    """For each form: the norms, the leaves clipped, those projected, and the updates of a link."""

    @jax.jit
    def of_every_form(params: Any, zeros: Any) -> dict[str, Any]:
        found = {}
        for name, (axes, _) in FORMS.items():
            ball = clipjax.max_norm(0.5, axes=axes)
            found[name] = (
                functional.unitwise_norms(params, axes),
                functional.clip_by_norm(params, 0.5, axes),
                ball(params),
                ball.update(zeros, ball.init(params), params)[0],
            )
        return found

    return jax.tree.map(np.asarray, of_every_form(tree(), jax.tree.map(np.zeros_like, tree())))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_axes(form: str) -> None:
    params, reduced = tree(), FORMS[form][1]
    norms = jax.tree.leaves(results()[form][0], is_leaf=lambda x: x is None)
    norms = dict(zip(paths(params), norms, strict=True))
    clipped, projected, linked = map(paths, results()[form][1:])
    for path, leaf in paths(params).items():
        if path not in reduced:
            assert norms[path] is None
            assert same_bits(clipped[path], leaf)
            assert same_bits(projected[path], leaf)
            assert same_bits(linked[path], np.zeros_like(leaf))
            continue
        axis = reduced[path]
        expected = exact_norm(leaf, axis)
        assert norms[path].shape == expected.shape
        np.testing.assert_allclose(norms[path], expected, rtol=1e-6)
        after = exact_norm(clipped[path], axis)
        np.testing.assert_allclose(after, np.minimum(expected, 0.5), rtol=1e-6)
        assert (after <= 0.5).all()
        assert same_bits(projected[path], clipped[path])
        assert (exact_norm(leaf + linked[path], axis) <= 0.5).all()


def test_skip_has_a_name() -> None:
    assert repr(SKIP) == "clipjax.SKIP"


def test_a_rule_sees_path_and_leaf() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def rule(path: Any, leaf: Any) -> Any:
        seen.append((jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape))
        return SKIP

    functional.unitwise_norms(tree(), rule)
    assert seen == [(path, leaf.shape) for path, leaf in paths(tree()).items()]


RANKS: list[tuple[tuple[int, ...], Any]] = [
    ((), SKIP),
    ((3,), SKIP),
    ((3, 4), (0,)),
    ((5, 4, 8), (0, 1)),  # a Conv1D kernel: its units are the output channels
    ((3, 3, 4, 8), (0, 1, 2)),
    ((2, 3, 3, 4, 8), (0, 1, 2, 3)),
]


@pytest.mark.parametrize(("shape", "reduced"), RANKS, ids=str)
def test_fan_in_of_every_rank(shape: tuple[int, ...], reduced: Any) -> None:
    ones = np.ones(shape, np.float32)
    assert fan_in((), ones) == reduced
    assert fan_in((), jnp.asarray(ones)) == reduced
    assert fan_in((), jax.ShapeDtypeStruct(shape, np.float32)) == reduced
    norms = jax.eval_shape(lambda x: functional.unitwise_norms(x, fan_in), ones)
    assert (norms is None) == (reduced is SKIP)
    if norms is not None:
        assert norms.shape == shape[-1:]


def test_the_units_of_a_conv1d_kernel_are_its_output_channels() -> None:
    norms = jax.jit(lambda x: functional.unitwise_norms(x, fan_in))(np.ones((5, 4, 8), np.float32))
    np.testing.assert_allclose(norms, np.full(8, np.sqrt(20)), rtol=1e-6)


MATRICES = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4) / 4,
    "b": np.arange(6, dtype=np.float32).reshape(2, 3) / 4,
}
NUMBERS: list[tuple[Any, tuple[int, ...]]] = [
    (0, (0,)),
    (1, (1,)),
    (-1, (1,)),
    (-2, (0,)),
    ((0, 1), (0, 1)),
    ([1, 0], (0, 1)),
    ((-1, 0), (0, 1)),
    (np.int64(1), (1,)),
    ((), ()),  # every entry is a unit
]


@functools.cache
def results_of_numbers() -> Any:
    def clip(matrices: Any, axes: Any) -> Any:
        return functional.unitwise_norms(matrices, axes), functional.clip_by_norm(matrices, 0.25, axes)

    of_all = jax.jit(
        lambda matrices: [(clip(matrices, axes), clip(matrices, same)) for axes, same in NUMBERS]
    )
    return jax.tree.map(np.asarray, of_all(MATRICES))


@pytest.mark.parametrize("i", range(len(NUMBERS)), ids=[str(axes) for axes, _ in NUMBERS])
def test_ints_and_tuples(i: int) -> None:
    axes = NUMBERS[i][1]
    (norms, clipped), same = results_of_numbers()[i]
    assert same_bits((norms, clipped), same)
    for key, leaf in MATRICES.items():
        exact = exact_norm(leaf, axes)
        np.testing.assert_allclose(norms[key], exact, rtol=1e-6)
        after = exact_norm(clipped[key], axes)
        assert (after <= 0.25).all()
        np.testing.assert_allclose(after, np.minimum(exact, 0.25), rtol=1e-6)


def test_a_pattern_does_not_match_part_of_a_name() -> None:
    with pytest.raises(ValueError, match="matches no leaf"):
        functional.unitwise_norms(tree(), {"ernel": 0})
    with pytest.raises(ValueError, match="matches no leaf"):
        functional.unitwise_norms(tree(), {"head/kern": 0})


def test_a_pattern_that_matches_nothing_lists_the_paths() -> None:
    with pytest.raises(ValueError, match="matches no leaf") as caught:
        functional.clip_by_norm(tree(), 1.0, {"*kernel": 0, "decoder/*": 0})
    message = str(caught.value)
    assert "'decoder/*'" in message
    assert "'*kernel'" not in message
    for path in paths(tree()):
        assert path in message


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
        jax.jit(lambda axis: functional.unitwise_norms(MATRICES, axis))(0)


def test_leaves_that_do_not_count_need_no_axes() -> None:
    odd = {"kernel": 4 * jnp.ones((2, 3)), "step": jnp.asarray(3), "key": jax.random.key(0), "none": None}
    clipped = functional.clip_by_norm(odd, 1.0, 0)
    assert same_bits(
        {k: v for k, v in clipped.items() if k != "kernel"}, {k: v for k, v in odd.items() if k != "kernel"}
    )
    assert (exact_norm(clipped["kernel"], 0) <= 1).all()


def test_rms_divides_by_the_entries_of_a_unit() -> None:
    kernel = {"kernel": tree()["head"]["kernel"]}
    forms = [(None, None), (fan_in, (0,)), ({"kernel": 1}, (1,))]

    @jax.jit
    def clip(kernel: Any) -> Any:
        clips = [clipjax.clip_by_rms(0.25, axes=axes) for axes, _ in forms]
        return [tx.update(kernel, tx.init(kernel))[0]["kernel"] for tx in clips]

    for (_, axis), leaf in zip(forms, clip(kernel), strict=True):
        after, before = (np.asarray(x, np.float64) for x in (leaf, kernel["kernel"]))
        rms, expected = (np.sqrt(np.mean(x**2, axis=axis)) for x in (after, before))
        np.testing.assert_allclose(rms, np.minimum(expected, 0.25), rtol=1e-6)
        assert (rms <= 0.25 * (1 + 1e-15)).all()  # the mean itself is rounded
