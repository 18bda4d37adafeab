"""What bounds nothing says so, and what a rank does not tell is not guessed."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax import SKIP, fan_in, functional
from clipjax.backward.layers import clip_gradient_by_norm
from tests.support.trees import same_bits

VECTORS = {"bias": np.ones(3, np.float32), "norm": {"scale": np.ones(4, np.float32)}}
KERNEL = {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float32)}

# What bounds nothing of VECTORS, by its default or by an argument, and what the error says of a leaf.
NOTHING = {
    "max_norm": (clipjax.max_norm(1.0), "'bias' of shape (3,): clipjax.fan_in leaves rank 1 alone"),
    "min_max_norm": (clipjax.min_max_norm(1.0, 2.0), "clipjax.fan_in leaves rank 1 alone"),
    "unit_norm": (clipjax.unit_norm(axes={"bias": fan_in}), "'norm/scale' of shape (4,): no pattern of axes"),
    "fan_in by path": (clipjax.max_norm(1.0, axes={"bias": fan_in}), "clipjax.fan_in leaves rank 1 alone"),
    "some asked for": (clipjax.max_norm(1.0, axes={"bias": SKIP}), "'bias' of shape (3,): clipjax.SKIP asks"),
    "spectral_cap": (clipjax.spectral_cap(1.0), "'bias' of shape (3,): it is not a matrix"),
    "box": (clipjax.box(0.0, 1.0, where=lambda *_: False), "the rule does not choose it"),
    "non_negative": (clipjax.non_negative(where=lambda *_: False), "the rule does not choose it"),
    "qk_clip": (clipjax.qk_clip(), "no layer has both 'query' and 'key'"),
    "tangent_cone": (clipjax.tangent_cone(1.0), "clipjax.fan_in leaves rank 1 alone"),
    "tangent_space": (clipjax.tangent_space(axes=fan_in), "clipjax.fan_in leaves rank 1 alone"),
    "clip_by_norm": (clipjax.clip_by_norm(1.0, axes=fan_in), "clipjax.fan_in leaves rank 1 alone"),
    "clip_by_spectral_norm": (clipjax.clip_by_spectral_norm(1.0), "'bias' of shape (3,): it is not a matrix"),
    "clip_by_rms": (clipjax.clip_by_rms(1.0, axes=fan_in), "clipjax.fan_in leaves rank 1 alone"),
    "adaptive_grad_clip": (clipjax.adaptive_grad_clip(axes=fan_in), "clipjax.fan_in leaves rank 1 alone"),
}
# What bounds nothing of VECTORS because that was asked for.
ASKED_FOR = {
    "SKIP": clipjax.max_norm(1.0, axes=SKIP),
    "a mapping": clipjax.max_norm(1.0, axes={"*": SKIP}),
    "a rule": clipjax.max_norm(1.0, axes=lambda path, leaf: fan_in(path, leaf)),
    "each leaf by its path": clipjax.tangent_cone(1.0, axes={"norm/scale": SKIP, "bias": SKIP}),
    "flatten": clipjax.spectral_cap(1.0, flatten=SKIP),
    "a clip": clipjax.clip_by_norm(1.0, axes=SKIP),
}
WITHOUT_FLOATS = {
    "empty": {},
    "None": {"kernel": None},
    "masked": {"kernel": optax.MaskedNode()},
    "ints": {"bias": np.ones((2, 2), np.int32)},
    "no entries": {"bias": np.ones(0, np.float32)},
}


def message_of(function: Any, *args: Any) -> str:
    with pytest.raises(ValueError, match="nothing is bounded") as caught:
        function(*args)
    return str(caught.value)


@pytest.mark.parametrize("name", NOTHING)
def test_what_bounds_nothing_says_so_in_init(name: str) -> None:
    tx, reason = NOTHING[name]
    message = message_of(tx.init, VECTORS)
    assert reason in message
    assert message_of(tx.init, jax.tree.map(jnp.asarray, VECTORS)) == message


@pytest.mark.parametrize("name", [name for name, (tx, _) in NOTHING.items() if callable(tx)])
def test_a_projection_that_bounds_nothing_says_so_when_called_and_to_verify(name: str) -> None:
    projection, reason = NOTHING[name]
    if name != "qk_clip":  # which needs its logits
        assert reason in message_of(projection, VECTORS)
    assert reason in message_of(clipjax.verify, VECTORS, projection)


def test_an_update_that_bounds_nothing_says_so() -> None:
    """As where the state was made for other weights, and restored."""
    message_of(NOTHING["max_norm"][0].update, VECTORS, clipjax.max_norm(1.0).init(KERNEL), VECTORS)
    tx = clipjax.clip_by_norm(1.0, axes=fan_in)
    message_of(tx.update, VECTORS, tx.init(KERNEL), VECTORS)
    tx = clipjax.box(-1.0, 1.0, where=lambda _, leaf: leaf.ndim == 2)
    message_of(tx.update, VECTORS, tx.init(KERNEL), VECTORS)


def test_the_functions_on_trees_and_the_layers() -> None:
    message_of(functional.clip_by_norm, VECTORS, 1.0, fan_in)
    message_of(lambda x: clip_gradient_by_norm(x, 1.0, axes=fan_in), jnp.ones(3))
    assert functional.unitwise_norms(VECTORS, fan_in) == {"bias": None, "norm": {"scale": None}}


def test_optax_flatten_around_a_projection() -> None:
    message_of(optax.flatten(clipjax.max_norm(1.0)).init, KERNEL)


def test_a_long_list_is_cut() -> None:
    many = {f"layer_{i}" * (40 if i == 0 else 1): np.ones(2, np.float32) for i in range(9)}
    lines = message_of(clipjax.max_norm(1.0), many).splitlines()
    assert lines[-2] == "  and 4 more"
    assert "axes={'*bias': None}" in lines[-1]
    assert max(map(len, lines[:-1])) <= 122


@pytest.mark.parametrize("name", ASKED_FOR)
def test_what_was_asked_for_is_no_error(name: str) -> None:
    tx = ASKED_FOR[name]
    updates, _ = tx.update(VECTORS, tx.init(VECTORS), VECTORS)
    assert same_bits(updates, VECTORS)


@pytest.mark.parametrize("kind", WITHOUT_FLOATS)
@pytest.mark.parametrize("name", NOTHING)
def test_a_tree_without_floats_is_no_error(name: str, kind: str) -> None:
    tree, tx = WITHOUT_FLOATS[kind], NOTHING[name][0]
    state = tx.init(tree)
    extra = {"max_logits": {}} if name == "qk_clip" else {}
    assert same_bits(tx.update(tree, state, tree, **extra)[0], tree)
    if callable(tx):
        assert same_bits(tx(tree, **extra), tree)
        assert clipjax.verify(tree, tx) == []


def test_a_group_that_wrappers_leave_empty_is_no_error() -> None:
    for axes in (fan_in, {"kernel": 0}):
        projection = clipjax.max_norm(1.0, axes=axes)
        labels = {"kernel": "trained", "bias": "frozen"}
        groups = {"trained": projection, "frozen": optax.set_to_zero(), "unused": projection}
        kernels = optax.masked(projection, {"kernel": True, "bias": False})
        for tx in (optax.partition(groups, labels), kernels, optax.MultiSteps(kernels, 2)):
            updates, _ = tx.update(KERNEL, tx.init(KERNEL), KERNEL)
            assert jax.tree.structure(updates) == jax.tree.structure(KERNEL)


def test_the_placeholders_of_optax_are_no_error() -> None:
    tx = clipjax.bounded(optax.adam(1e-3), project=clipjax.max_norm(1.0, axes={"kernel": 0}))
    mapped = optax.tree.map_params(tx, lambda x: x + 1, tx.init(KERNEL))
    assert float(optax.tree.get(mapped, "mu")["bias"][0]) == 1


# --------------------------------------------------------------------------------------------------
# Ranks.

CONVOLUTION = {"conv": {"kernel": np.ones((3, 3, 2, 4), np.float32)}, "head": np.ones((2, 3), np.float32)}
BY_DEFAULT = {
    "max_norm": clipjax.max_norm(1.0),
    "min_max_norm": clipjax.min_max_norm(1.0, 2.0),
    "unit_norm": clipjax.unit_norm(),
    "tangent_cone": clipjax.tangent_cone(1.0),
    "spectral_cap": clipjax.spectral_cap(1.0),
    "clip_by_spectral_norm": clipjax.clip_by_spectral_norm(1.0),
}


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_no_default_guesses_what_a_rank_means(name: str) -> None:
    tx = BY_DEFAULT[name]
    calls = [tx.init]
    if callable(tx):
        calls += [tx, lambda params: clipjax.verify(params, tx)]
    for call in calls:
        with pytest.raises(ValueError, match="does not determine what it is") as caught:
            call(CONVOLUTION)
        message = str(caught.value)
        assert "leaf 'conv/kernel' of shape (3, 3, 2, 4)" in message
        if "spectral" in name:
            assert "flatten={'conv/kernel': (rows, columns)}" in message
        else:
            for advice in (
                "axes=clipjax.fan_in",
                "clipjax.flax.unit_axes(model)",
                "'conv/kernel': (0, 1, 2)",
            ):
                assert advice in message


def test_fan_in_itself_takes_any_rank() -> None:
    projected = jax.jit(lambda x: clipjax.max_norm(1.0, axes=fan_in)(x))(CONVOLUTION)
    np.testing.assert_allclose(
        np.linalg.norm(projected["conv"]["kernel"].reshape(-1, 4), axis=0), 1, rtol=1e-6
    )


def test_adaptive_grad_clip_takes_any_rank() -> None:
    tx = clipjax.adaptive_grad_clip()
    assert jax.eval_shape(tx.init, CONVOLUTION)


def test_the_default_reads_as_a_name() -> None:
    defaults = {"max_norm": "fan_in", "adaptive_grad_clip": "fan_in_or_whole"}
    for name, shown in defaults.items():
        assert repr(inspect.signature(getattr(clipjax, name)).parameters["axes"].default) == shown


def test_the_errors_name_what_can_be_typed() -> None:
    """Without an import of its own, and with none by `import clipjax` itself."""
    code = """if True:
        import sys, clipjax
        assert not {"flax", "equinox"} & set(sys.modules), "imported by clipjax"
        assert not hasattr(clipjax, "flaks")
        for name in ("flax", "equinox"):
            assert callable(getattr(clipjax, name).unit_axes)
    """
    pytest.importorskip("flax")
    pytest.importorskip("equinox")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
