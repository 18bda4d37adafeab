"""States of released versions go on in this one, and equal a run without a break.

Each folder here is the checkpoint of a release, which `make.py` wrote with the code of
the release, and which nobody edits.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import clipjax
from tests.states import make

VERSIONS = sorted(x.name for x in make.HERE.iterdir() if x.name[0].isdigit())
WITHOUT_TEMPLATE = ("pickle", "msgpack", "orbax")
# States of 0.4.0 have other types: they are restored without a template only.
WITH_TEMPLATE = ("typed", "msgpack template", "orbax template")
FORMS = [
    (version, form)
    for version in VERSIONS
    for form in (*WITHOUT_TEMPLATE, *(() if version == "0.4.0" else WITH_TEMPLATE))
]


def restored(folder: Path, form: str) -> Any:
    """Return the states of all members as one form of a checkpoint restores them."""
    read = make.read(folder)
    if form in WITHOUT_TEMPLATE:
        return read[form]
    if form == "typed":
        return make.pickle.loads(read["typed"])
    template = {name: tx.init(make.params()) for name, tx in make.members().items()}
    if form == "msgpack template":
        return serialization.from_state_dict(template, read["msgpack"])
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder.absolute() / "orbax", template)


def adopted(folder: Path, form: str) -> Any:
    """Yield each member's name, its state in this version, weights, and updates."""
    read, states = make.read(folder), restored(folder, form)
    for name, updates in read["updates"].items():
        new = make.members()[name].init(make.params())
        yield name, clipjax.adopt(states[name], new), read["params"][name], updates


@pytest.mark.parametrize(("version", "form"), FORMS)
def test_a_state_of_a_release_goes_on(version: str, form: str) -> None:
    """Updates and metrics are those of the release, to a rounding.

    Since 0.4.0, `skip_spikes` and `record_norms(keep=)` compare a norm with the trend
    of the last ones. A trend needs 16 norms, and here are less, so that updates are the
    same.
    """
    folder = make.HERE / version
    seeds = make.read(folder)["seeds"]
    for name, state, weights, updates in adopted(folder, form):
        after, _, seen = make.run(name, state, weights, seeds)
        pairs = zip(*map(jax.tree.leaves, (seen, updates)), strict=True)
        for here, there in pairs:
            np.testing.assert_allclose(here, there, 2e-5, 2e-6, err_msg=name)
        metrics = make.metrics_of(after)
        for key, x in make.read(folder)["metrics"][name].items():
            np.testing.assert_allclose(metrics[key], x, 2e-5, err_msg=f"{name} {key}")


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states") / "today"
    make.write(folder)
    return folder


@pytest.mark.parametrize("form", [*WITHOUT_TEMPLATE, *WITH_TEMPLATE])
def test_a_state_of_this_version_goes_on_bit_for_bit(today: Path, form: str) -> None:
    states = make.pickle.loads(make.read(today)["typed"])
    seeds = make.read(today)["seeds"]
    for name, state, weights, updates in adopted(today, form):
        like = jax.eval_shape(make.members()[name].init, make.params())
        assert jax.tree.structure(state) == jax.tree.structure(like)
        expected = make.run(name, states[name], weights, seeds)[0]
        found, _, seen = make.run(name, state, weights, seeds)
        trees = (seen, found), (updates, expected)
        for x, y in zip(*map(jax.tree.leaves, trees), strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)


def test_windows_of_0_4_0_are_put_in_the_order_of_time() -> None:
    """A ring of four that five norms have entered begins with the newest."""
    old = make.read(make.HERE / "0.4.0")["pickle"]["autoclip"]
    ring = old["memory"]["values"]
    new = make.members()["autoclip"].init(make.params())
    window = clipjax.adopt(old, new).memory
    np.testing.assert_array_equal(window.values, [*ring[1:], ring[0]])
    assert window.held == 4

    norms = [
        np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(make.gradients(i))))
        for i in range(make.STEPS)
    ]
    np.testing.assert_allclose(window.values, norms[1:], rtol=1e-6)


def test_bad_steps_of_0_4_0_are_found() -> None:
    old = make.read(make.HERE / "0.4.0")["orbax"]["record_norms of leaves"]
    new = make.members()["record_norms of leaves"].init(make.params())
    (bad,) = clipjax.bad_steps(clipjax.adopt(old, new))
    assert bad.step == 2
    assert [name for name, norm in bad.groups.items() if not np.isfinite(norm)] == [
        "head"
    ]
    assert jnp.isfinite(bad.groups["dense/bias"])


def test_stacked_norms_of_0_4_0_keep_their_names() -> None:
    """As of an ensemble, whose states share the names."""
    old = make.read(make.HERE / "0.4.0")["msgpack"]["record_norms of leaves"]
    tx = make.members()["record_norms of leaves"]
    both = jax.tree.map(lambda x: np.stack([x, x]), (old, make.params()))
    adopted = clipjax.adopt(both[0], jax.vmap(tx.init)(both[1]))
    one = clipjax.metrics(clipjax.adopt(old, tx.init(make.params())))
    for key, x in jax.vmap(clipjax.metrics)(adopted).items():
        np.testing.assert_array_equal(x, [one[key]] * 2, err_msg=key)
