"""`chain`, `metrics`, `with_metrics`, `matching` and `record_norms`."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax

TREE = {
    "encoder": {
        "layer_0": {"w": np.array([[3.0, 4.0]], np.float32)},
        "layer_1": {"w": np.array([[6.0, 8.0]], np.float32)},
    },
    "head": {"w": np.full((2, 2), 1.5, np.float32), "b": np.array([2.0], np.float16)},
    "count": np.array([7]),
}
CLIP, PROJECTION = clipjax.clip_by_global_norm(1.0), clipjax.max_norm(3.0)


def after(tx: Any, updates: Any = None, params: Any = None, steps: int = 1) -> Any:
    """The state after some steps."""
    state, updates = (
        tx.init(TREE if params is None else params),
        TREE if updates is None else updates,
    )
    for _ in range(steps):
        _, state = jax.jit(tx.update)(
            updates, state, TREE if params is None else params
        )
    return state


def test_a_chain_is_that_of_optax() -> None:
    links = (
        CLIP,
        optax.adam(0.1),
        PROJECTION,
        clipjax.box(-1.0, 1.0),
        clipjax.record_norms(of="params"),
    )
    ours, theirs = clipjax.chain(*links), optax.chain(*links)
    params = {"w": np.full((4, 2), 2.0, np.float32)}

    @jax.jit
    def both(grads: Any) -> Any:
        return [tx.update(grads, tx.init(params), params) for tx in (ours, theirs)]

    first, second = both({"w": np.full((4, 2), 5.0, np.float32)})
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    ("error", "message", "links"),
    [
        (ValueError, "a chain needs at least one", ()),
        (
            ValueError,
            r"links\[0\], clipjax.max_norm\(3.0\), must come after links\[1\]",
            (PROJECTION, optax.adam(0.1)),
        ),
        (
            ValueError,
            r"links\[1\].*must come after links\[3\]",
            (CLIP, PROJECTION, clipjax.record_norms(), CLIP),
        ),
        (
            TypeError,
            r"links\[1\] must be a gradient transformation.*call it",
            (CLIP, optax.adam),
        ),
        (TypeError, r"links\[0\] must be a gradient transformation, got \[", ([CLIP],)),
    ],
)
def test_wrong_links_raise_errors(
    error: type[Exception], message: str, links: Any
) -> None:
    with pytest.raises(error, match=message):
        clipjax.chain(*links)


def test_metrics_are_found_in_any_nest_and_repeated_names_get_numbers() -> None:
    inner = optax.chain(
        CLIP, clipjax.clip_by_norm(1.0), optax.chain(CLIP, optax.adam(0.1))
    )
    tx = optax.chain(
        clipjax.clip_by_global_norm(2.0),
        optax.masked(clipjax.skip_nonfinite(inner), clipjax.matching("w")),
        optax.MultiSteps(
            optax.chain(clipjax.record_norms(), PROJECTION), 1
        ).gradient_transformation(),
    )
    found = clipjax.metrics({"step": 3, "optimizer": [after(tx, steps=2), None]})
    names = [
        "clip_by_global_norm",
        "clip_by_global_norm_1",
        "clip_by_global_norm_2",
        "clip_by_norm",
    ]
    names += ["record_norms", "skip_nonfinite"]
    assert sorted({key.partition("/")[0] for key in found}) == names
    assert all(isinstance(x, jax.Array) and x.shape == () for x in found.values())
    norm = np.sqrt(
        sum(
            (x.astype(np.float64) ** 2).sum()
            for x in jax.tree.leaves(TREE)
            if x.dtype.kind == "f"
        )
    )
    expected = {
        "norm": norm,
        "norm_after": 2.0,
        "scale": 2 / norm,
        "clipped_fraction": 1,
        "nonfinite_count": 0,
    }
    for key, value in expected.items():
        np.testing.assert_allclose(
            found[f"clip_by_global_norm/{key}"], value, rtol=3e-6
        )
    assert {key for key in found if key.startswith("clip_by_norm/")} == {
        f"clip_by_norm/{key}" for key in (*expected, "steps")
    }
    np.testing.assert_allclose(found["clip_by_global_norm_2/norm"], 1.0, rtol=3e-6)
    assert found["clip_by_norm/steps"] == 2
    for nothing in (
        optax.adam(0.1).init(TREE),
        (),
        PROJECTION.init({"w": np.ones((2, 2))}),
    ):
        with pytest.raises(
            ValueError, match="opt_state: there is no state with metrics"
        ):
            clipjax.metrics(nothing)


def test_a_clip_of_a_user_has_metrics_and_a_memory() -> None:
    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        largest = jnp.max(jnp.abs(updates))
        most = jnp.maximum(memory["most"], largest)
        metrics = {
            "norm": largest,
            "entries": jnp.sum(jnp.abs(updates) > 2),
            "clipped": largest > 2,
            "step": step,
        }
        return (
            jnp.clip(updates, -2, 2),
            metrics | {"half": largest.astype(jnp.bfloat16)},
            {"most": most},
        )

    tx = clipjax.with_metrics(
        "mine", act, lambda params: {"most": jnp.zeros((), params.dtype)}
    )
    update, state = jax.jit(tx.update), tx.init(np.zeros(3, np.float32))
    for value in (1.0, 3.0, 5.0, np.inf):
        updates, new = update(np.array([value, 4.0, 0.0], np.float32), state)
        assert jax.tree.map(jnp.result_type, new) == jax.tree.map(
            jnp.result_type, state
        )
        state = new
    np.testing.assert_array_equal(updates, [2, 2, 0])
    found = {key: float(x) for key, x in clipjax.metrics(state).items()}
    assert found == {
        "mine/norm": np.inf,
        "mine/half": np.inf,
        "mine/entries": 7,  # of all steps
        "mine/step": 6,
        "mine/clipped_fraction": 1,
        "mine/nonfinite_count": 1,
        "mine/steps": 4,
    }
    assert state.memory["most"] == np.inf
    with pytest.raises(ValueError, match="mine needs the state that init returned"):
        tx.update(np.ones(3), None)
    with pytest.raises(
        TypeError, match="mine needs the state that its init returned, got TraceState"
    ):
        tx.update(np.ones(3), optax.trace(0.9).init(np.ones(3)))
    with pytest.raises(TypeError, match="name must be a str"):
        clipjax.with_metrics(1, act)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="act must be a function"):
        clipjax.with_metrics("mine", None)  # type: ignore[arg-type]


def test_matching_chooses_leaves_by_their_paths() -> None:
    def chosen(*patterns: str) -> list[str]:
        mask = clipjax.matching(*patterns)(TREE)
        assert jax.tree.structure(mask) == jax.tree.structure(TREE)
        paths = jax.tree_util.tree_leaves_with_path(mask)
        return [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, yes in paths
            if yes
        ]

    assert chosen("encoder/*") == ["encoder/layer_0/w", "encoder/layer_1/w"]
    assert chosen("b", "layer_1/w") == ["encoder/layer_1/w", "head/b"]
    assert chosen("layer_[0]/*") == ["encoder/layer_0/w"]
    assert chosen("/head/*", "/encoder/layer_1/w") == [
        "encoder/layer_1/w",
        "head/b",
        "head/w",
    ]
    with pytest.raises(ValueError, match="'/w' matches no leaf"):
        chosen("/w")
    assert len(chosen("*")) == 5
    with pytest.raises(
        ValueError,
        match=r"patterns: the pattern 'decoder/\*' matches no leaf.*encoder/layer_0/w",
    ):
        chosen("encoder/*", "decoder/*")
    # The arrays in Flax' boxes are at `value`, which paths leave out there, and only
    # there.
    attention = collections.namedtuple("Attention", "query value")(
        np.ones(2), np.ones(2)
    )
    assert clipjax.matching("value")({"attention": attention})["attention"] == (
        False,
        True,
    )
    for wrong in ((), (3,)):
        with pytest.raises(
            TypeError, match="patterns must be one or several path patterns"
        ):
            clipjax.matching(*wrong)
    # In a chain of masks the leaves that another mask has hidden are no error.
    tx = optax.masked(
        optax.masked(CLIP, clipjax.matching("head/*", "encoder/*")),
        clipjax.matching("head/*"),
    )
    np.testing.assert_allclose(
        clipjax.metrics(after(tx))["clip_by_global_norm/norm"],
        np.sqrt(4 * 1.5**2 + 4),
        rtol=1e-6,
    )


def test_record_norms_measures_and_changes_nothing() -> None:
    def found(*args: Any, **kwargs: Any) -> dict[str, float]:
        tx = clipjax.record_norms(*args, **kwargs)
        double = jax.tree.map(lambda x: 2 * x, TREE)
        updates, state = jax.jit(tx.update)(double, tx.init(TREE), TREE)
        jax.tree.map(np.testing.assert_array_equal, updates, double)
        read = clipjax.metrics(state)
        assert read.pop("record_norms/steps") == 1
        return {key.removeprefix("record_norms/"): float(x) for key, x in read.items()}

    total, encoder, head = (2 * float(np.sqrt(x)) for x in (138, 125, 13))
    layers = {"encoder/layer_0": 10, "encoder/layer_1": 20, "head/w": 6, "head/b": 4}
    leaves = {
        "encoder/layer_0/w": 10,
        "encoder/layer_1/w": 20,
        "head/w": 6,
        "head/b": 4,
    }
    for args, expected in (
        ((), {"": total}),
        (("leaf",), leaves),
        ((1,), {"encoder": encoder, "head": head}),
        ((2,), layers),
        ((["layer_0/*", "encoder/*"],), {"layer_0/*": 10, "encoder/*": 20}),
        (("head/*",), {"head/*": head}),
    ):
        assert found(*args) == pytest.approx(
            {f"updates/{key}".rstrip("/"): x for key, x in expected.items()}
        )
    assert found(name="gradients") == pytest.approx({"gradients": total})
    assert found(of="params") == pytest.approx({"params": total / 2})
    both = found(1, of=("updates", "params"), name="g")
    assert both == pytest.approx(
        {
            "g/encoder": encoder,
            "g/head": head,
            "params/encoder": encoder / 2,
            "params/head": head / 2,
        }
    )


def test_record_norms_rejects_other_forms() -> None:
    for message, arguments in (
        ("of must be 'updates', 'params' or both", {"of": "gradients"}),
        ("of must be 'updates', 'params' or both", {"of": ()}),
        ("name must be a str", {"name": ""}),
        ("groups must be a whole number of at least 1", {"groups": 0}),
        ("groups must be a whole number", {"groups": True}),
        ("groups must be one or several path patterns", {"groups": []}),
        ("groups must be one or several path patterns", {"groups": 1.5}),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            clipjax.record_norms(**arguments)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="groups: the pattern 'decoder' matches no leaf"
    ):
        clipjax.record_norms("decoder").init(TREE)
    tx = clipjax.record_norms(of="params")
    with pytest.raises(ValueError, match="params: record_norms needs them"):
        tx.update(TREE, tx.init(TREE))
