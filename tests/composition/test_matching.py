"""`matching`: which leaves path patterns choose."""

import collections

import jax
import numpy as np
import optax

import clipjax
from clipjax._core.leaves import matches
from tests.support.trees import NESTED


def test_matching_chooses_leaves_by_their_paths() -> None:
    def chosen(*patterns: str) -> list[str]:
        mask = clipjax.matching(*patterns)(NESTED)
        assert jax.tree.structure(mask) == jax.tree.structure(NESTED)
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
    assert len(chosen("*")) == 5
    # A whole path, or its end, matches as it is, too.
    tree = {"a": {"w[0]": np.ones(2), "w[1]": np.ones(2)}}
    assert clipjax.matching("w[0]")(tree) == {"a": {"w[0]": True, "w[1]": False}}
    assert matches("w[0]", "a/w[0]")
    assert matches("/a/w[0]", "a/w[0]")
    slash = {"a": 1.0, "x": {"/a": 1.0}}
    assert clipjax.matching("/a")(slash) == {"a": True, "x": {"/a": False}}
    # The arrays in Flax' boxes are at `value`, which paths leave out there, and only
    # there.
    attention = collections.namedtuple("Attention", "query value")(
        np.ones(2), np.ones(2)
    )
    assert clipjax.matching("value")({"attention": attention})["attention"] == (
        False,
        True,
    )
    # In a chain of masks the leaves that another mask has hidden are no error.
    tx = optax.masked(
        optax.masked(
            clipjax.clip_by_global_norm(1.0), clipjax.matching("head/*", "encoder/*")
        ),
        clipjax.matching("head/*"),
    )
    _, state = jax.jit(tx.update)(NESTED, tx.init(NESTED))
    np.testing.assert_allclose(
        clipjax.metrics(state)["clip_by_global_norm/norm"],
        np.sqrt(4 * 1.5**2 + 4),
        rtol=1e-6,
    )
