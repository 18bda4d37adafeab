"""Inside `shard_map`: norms over the mesh axes in each leaf's type, states that stay
replicated, few collectives.
"""

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from clipjax import functional
from tests.devices.members import (
    CLIP,
    TAKE_LOSS,
    assert_same,
    drawn,
    init,
    members,
    step,
)

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

SPECS = {
    "both": P("model", "data"),
    "data": P("data"),
    "held": P(),
    "model": P(None, "model"),
}
SHAPES = {"both": (2, 8), "data": (8,), "held": (3,), "model": (3, 4)}
MEMBERS = members(lambda path, leaf: None)

weights = functools.partial(drawn, SHAPES)


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def on_mesh(
    mesh: Any,
    function: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    **options: Any,
) -> Any:
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options
        )
    )


def test_every_member_sums_over_the_axes_of_each_leaf_and_keeps_its_state_replicated(
    mesh: Any,
) -> None:
    # Sums over both axes, over one, and over none.
    specs_of_leaves = {name: SPECS[name] for name in ("both", "data", "held")}
    params, *trees = (
        {name: weights(seed)[name] for name in specs_of_leaves} for seed in range(4)
    )
    trees[2]["data"][5] = np.nan  # on two of the eight devices
    # One for each device along "data".
    losses = [np.full(4, 2.0, np.float32) for _ in range(3)]
    losses[1][2] = np.inf

    states = others = jax.jit(lambda params: init(MEMBERS, params))(params)
    specs = jax.tree.map(lambda x: P(), states)
    for name in TAKE_LOSS:  # what an optimizer keeps is as large as the parameters
        specs[name] = optax.tree.map_params(
            MEMBERS[name],
            lambda x, spec: spec,
            states[name],
            specs_of_leaves,
            transform_non_params=lambda x: P(),
        )
    # As the program leaves them, or it would be compiled again.
    states = jax.device_put(
        states, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    )
    on_devices = on_mesh(
        mesh,
        lambda states, tree, params, losses: step(
            MEMBERS, states, tree, params, losses[0]
        ),
        (specs, specs_of_leaves, specs_of_leaves, P("data")),
        (specs, dict.fromkeys(MEMBERS, specs_of_leaves)),
    )
    on_one = jax.jit(lambda *args: step(MEMBERS, *args))
    for tree, loss in zip(trees, losses, strict=True):
        states, updates = on_devices(states, tree, params, loss)
        others, expected = on_one(others, tree, params, loss.mean())
        assert_same(updates, expected)
        assert_same(states, others)
    for name in TAKE_LOSS:
        label = "skip_nonfinite" if name == "bounded" else name
        read = clipjax.metrics(states[name])
        kinds = ("skipped", "nonfinite_count", "nonfinite_loss_count")
        assert [int(read[f"{label}/{kind}"]) for kind in kinds] == [2, 1, 1], name
        assert not any(np.any(x) for x in jax.tree.leaves(updates[name])), name


def by_hand_global(tree: Any) -> Any:
    """What a user would write: one psum for each set of mesh axes."""
    sums = {name: jnp.sum(x * x) for name, x in tree.items()}
    over = {"both": ("data", "model"), "data": "data", "model": "model"}
    total = sums["held"] + sum(
        lax.psum(sums[name], axes) for name, axes in over.items()
    )
    norm = jnp.sqrt(total)
    return jax.tree.map(lambda x: x * jnp.where(norm > 1, 1 / norm, 1), tree), norm


def by_hand_leaves(tree: Any) -> Any:
    over = {
        "both": ("data", "model"),
        "data": ("data",),
        "model": ("model",),
        "held": (),
    }
    norms = {
        k: jnp.sqrt(lax.psum(jnp.sum(x * x), over[k]) if over[k] else jnp.sum(x * x))
        for k, x in tree.items()
    }
    clipped = {k: x * jnp.where(norms[k] > 1, 1 / norms[k], 1) for k, x in tree.items()}
    return clipped, jnp.max(jnp.stack(list(norms.values())))


def test_there_are_no_more_collectives_than_in_the_formula_by_hand(mesh: Any) -> None:
    def collectives(
        function: Callable[[Any], Any], tree: Any, specs: Any = SPECS
    ) -> int:
        text = (
            on_mesh(mesh, function, (specs,), (specs, P()))
            .lower(tree)
            .compile()
            .as_text()
        )
        return len(
            re.findall(
                r" (?:all-(?:reduce|gather|to-all)|collective-permute)(?:-start)?\(",
                text,
            )
        )

    def update(tree: Any) -> Any:
        return CLIP.update(tree, CLIP.init(tree))

    tree, each = weights(0), clipjax.clip_by_norm(1.0)
    assert collectives(update, tree) == collectives(by_hand_global, tree) == 3
    assert collectives(lambda t: each.update(t, each.init(t)), tree) <= collectives(
        by_hand_leaves, tree
    )
    # A second leaf with the same mesh axes costs no further one, and what every device
    # holds costs none.
    more, specs = tree | {"more": tree["data"]}, SPECS | {"more": P("data")}
    zero = clipjax.zero_nonfinite()
    assert collectives(update, more, specs) == 3
    assert collectives(lambda t: zero.update(t, zero.init(t)), more, specs) == 3
    assert collectives(update, tree, P()) == 0

    def probed(tree: Any) -> Any:
        def loss(tree: Any, tap: Any) -> Any:
            seen = clipjax.probe(tree, tap)
            return sum(jnp.sum(x * x) for x in jax.tree.leaves(seen))

        return jax.grad(loss, argnums=(0, 1))(tree, clipjax.tap(probe=True))

    assert collectives(probed, more, specs) == collectives(probed, tree)


def test_units_of_a_leaf_that_differs_raise_an_error(mesh: Any) -> None:
    units = [
        clipjax.clip_by_norm(1.0, axes=0),
        clipjax.adaptive_grad_clip(),
        clipjax.adagc(axes=0),
    ]
    units += [
        clipjax.clip_by_rms(1.0, axes=0),
        clipjax.tangent_cone(1.0),
        clipjax.max_norm(1.0),
        clipjax.unit_norm(),
        clipjax.keep_norm(axes=0),
        clipjax.relative_update(axes=0),
    ]

    def update(tx: Any, tree: Any) -> Any:
        return tx.update(tree, tx.init(tree), tree)[0]

    for tx in units:
        with pytest.raises(
            ValueError, match=r"inside shard_map, leaf 'both' .*under jit"
        ):
            on_mesh(mesh, lambda tree, tx=tx: update(tx, tree), (SPECS,), SPECS)(
                weights(0)
            )
        # What every device holds as a whole has units there, too.
        on_mesh(mesh, lambda tree, tx=tx: update(tx, tree), (P(),), P()).lower(
            weights(0)
        )


def test_where_types_do_not_say_what_differs_norms_are_local_with_a_warning(
    mesh: Any,
) -> None:
    tree = {"w": np.array([3.0, 4.0, 6.0, 8.0] * 2, np.float32)}

    def update(tree: Any) -> Any:
        return CLIP.update(tree, CLIP.init(tree))[0]

    unchecked = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=P(("data", "model")),
        out_specs=P(("data", "model")),
        check_vma=False,
    )
    with pytest.warns(UserWarning, match="each device alone") as warned:
        found = jax.jit(unchecked)(tree)
    assert __file__ in {each.filename for each in warned}  # the line of the user
    np.testing.assert_allclose(found["w"], np.ones(8), rtol=2e-6)
    with pytest.warns(UserWarning, match="each device alone, since over the axis 'i'"):
        found = jax.pmap(update, axis_name="i")({"w": tree["w"].reshape(8, 1)})
    np.testing.assert_allclose(found["w"], np.ones((8, 1)), rtol=2e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        jax.pmap(update, axis_name="i", devices=jax.devices()[:1])(
            jax.tree.map(lambda x: x[None], tree)
        )


def linked(tx: Any) -> Callable[[Any], Any]:
    return lambda tree: tx.update(tree, tx.init(tree), tree)[0]


MEASURING = {
    "clip": linked(CLIP),
    "skip": linked(clipjax.skip_nonfinite(optax.identity())),
    "link of a projection": linked(clipjax.max_norm(1.0, axes=None)),
    "projection": clipjax.max_norm(1.0, axes=None).apply,
    "global_norm": functional.global_norm,
    "leaf_norms": functional.leaf_norms,
    "unitwise_norms": lambda tree: functional.unitwise_norms(tree, axes=None),
    "clip_by_norm": lambda tree: functional.clip_by_norm(tree, 1.0),
    "clip_by_global_norm": lambda tree: functional.clip_by_global_norm(tree, 1.0),
    "probe": lambda tree: clipjax.probe(tree, clipjax.tap(probe=True)),
    "backward clip": lambda tree: clipjax.clip_gradient_by_norm(tree, 1.0),
    "by value": lambda tree: clipjax.clip_gradient_by_value(tree, 1.0),
    "joint": lambda tree: clipjax.clip_gradient_by_global_norm(tree, 1.0),
}


@pytest.mark.parametrize("name", MEASURING)
def test_whatever_measures_warns_where_norms_are_local(mesh: Any, name: str) -> None:
    unchecked = jax.shard_map(
        MEASURING[name],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.warns(UserWarning, match="each device alone") as warned:
        jax.eval_shape(unchecked, {"w": jnp.ones(8)})
    package = str(Path(clipjax.__file__).parent)
    assert not any(each.filename.startswith(package) for each in warned)


def test_backward_layers_clip_the_norm_on_all_devices(mesh: Any) -> None:
    slopes = weights(4)

    def gradients(tree: Any, slopes: Any, over: Callable[..., Any]) -> Any:
        def loss(tree: Any) -> Any:
            tree = {k: clipjax.clip_gradient_by_norm(x, 2.0) for k, x in tree.items()}
            tree = clipjax.clip_gradient_by_global_norm(tree, 5.0)
            tree = clipjax.scale_gradient(
                clipjax.clip_gradient_by_value(tree, -2.0, 2.0), 3.0
            )
            return over({k: jnp.sum(tree[k] * slopes[k]) for k in tree})

        return jax.grad(loss)(tree)

    def summed(parts: Any) -> Any:
        over = {"both": ("data", "model"), "data": "data", "model": "model"}
        return parts["held"] + sum(
            lax.psum(parts[name], axes) for name, axes in over.items()
        )

    found = on_mesh(mesh, lambda t, s: gradients(t, s, summed), (SPECS, SPECS), SPECS)(
        weights(0), slopes
    )
    expected = jax.jit(lambda t, s: gradients(t, s, lambda parts: sum(parts.values())))(
        weights(0), slopes
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), found, expected
    )
    norms = [np.linalg.norm(np.asarray(x, np.float64)) for x in jax.tree.leaves(found)]
    assert max(norms) <= 2.0 * (1 + 1e-6)
