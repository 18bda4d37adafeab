"""Norms of each layer of a stack, as `nn.scan` and `nnx.vmap` make them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax

LAYERS = 3


def linen() -> Any:
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return x + nn.Dense(4)(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            stack = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LAYERS,
            )
            return nn.Dense(2)(stack(name="blocks")(x, None)[0])

    return (
        Model().init(jax.random.key(0), jnp.ones((1, 4)))["params"],
        "blocks/*",
        "Dense_0",
    )


def of_nnx() -> Any:
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self) -> None:
            make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))
            self.blocks = nnx.split_rngs(splits=LAYERS)(make)(nnx.Rngs(0))
            self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    return nnx.state(Model(), nnx.Param), "blocks/*", "head"


@pytest.mark.parametrize("model", [linen, of_nnx])
def test_each_layer_of_a_stack_has_a_norm(model: Any) -> None:
    params, stacks, head = model()
    grads = jax.tree.map(lambda x: x + jnp.arange(x.size).reshape(x.shape), params)
    tx = clipjax.bounded(
        optax.sgd(0.1),
        clip=[
            clipjax.record_norms(1, name="gradients", stacked=stacks),
            clipjax.clip_by_norm(1.0),
        ],
    )
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    found = {
        k: float(x)
        for k, x in clipjax.metrics(state).items()
        if k.startswith("record_norms/")
    }
    by_path = {
        jax.tree_util.keystr(p, simple=True, separator="/"): x
        for p, x in jax.tree_util.tree_leaves_with_path(grads)
    }
    expected = {"steps": 1.0}
    for i in range(LAYERS):
        expected[f"gradients/blocks/{i}"] = norm_of(
            x[i] for path, x in by_path.items() if path.startswith("blocks/")
        )
    expected[f"gradients/{head}"] = norm_of(
        x for path, x in by_path.items() if path.startswith(f"{head}/")
    )
    assert found == pytest.approx(
        {f"record_norms/{key}": x for key, x in expected.items()}, rel=1e-6
    )


def norm_of(leaves: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in leaves)))


def test_many_stacks_of_a_group_are_added_in_pairs() -> None:
    """One after the other, the norm of these would be off by 1.5e-6."""
    tree = {f"l{i}": jnp.full((2, 1), 1.5655) for i in range(200)}
    record = clipjax.record_norms(["*"], stacked="*")
    _, state = jax.jit(record.update)(tree, record.init(tree))
    found = clipjax.metrics(state)["record_norms/updates/*/0"]
    wanted = 200**0.5 * float(np.float32(1.5655))
    np.testing.assert_allclose(found, wanted, rtol=5e-7)


def test_names_of_layers_and_errors() -> None:
    tree = {"a": jnp.ones((2, 3)), "b": jnp.ones(2), "c": jnp.ones(5)}
    for arguments, keys in (
        ({"stacked": ["a", "b"]}, ["updates", "updates/0", "updates/1"]),
        (
            {"groups": "leaf", "stacked": "a"},
            ["updates/a/0", "updates/a/1", "updates/b", "updates/c"],
        ),
        (
            {"groups": ["a", "b"], "stacked": "b", "of": "params"},
            ["params/a", "params/b/0", "params/b/1"],
        ),
    ):
        recorder = clipjax.record_norms(**arguments)  # type: ignore[arg-type]
        found = clipjax.metrics(recorder.init(tree))
        assert sorted(found) == sorted(
            f"record_norms/{key}" for key in [*keys, "steps"]
        )
    with pytest.raises(
        ValueError,
        match=r"stacked: .* equally many layers .*: leaf 'b' of shape \(2,\), leaf 'c'",
    ):
        clipjax.record_norms(stacked=["b", "c"]).init(tree)
    twice = {"a": jnp.ones(2), "a/1": jnp.ones(1)}
    with pytest.raises(ValueError, match=r"groups: two norms .* called updates/a/1"):
        clipjax.record_norms("leaf", stacked="/a").init(twice)
    for groups in ("leaf", 2):
        with pytest.raises(ValueError, match=r"two norms .* called updates/a/1"):
            clipjax.record_norms(groups).init({"a/1": jnp.ones(1), "a": {"1": 1.0}})
    with pytest.raises(ValueError, match="stacked: the pattern 'd' matches no leaf"):
        clipjax.record_norms(stacked="d").init(tree)
    with pytest.raises(
        TypeError, match="stacked: path patterns must be one or more strings, got 1"
    ):
        clipjax.record_norms(stacked=1)  # type: ignore[arg-type]
