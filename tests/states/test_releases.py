"""States of released versions go on in this one, and equal a run without a break.

Each folder here is the checkpoint of a release, which `make.py` wrote with the code of
the release, and which nobody edits.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import clipjax
from tests.states import make

VERSIONS = sorted(x.name for x in make.HERE.iterdir() if x.name[0].isdigit())
WITHOUT_TEMPLATE = ("pickle", "msgpack", "orbax")
WITH_TEMPLATE = ("typed", "msgpack template", "orbax template")
FORMS = (*WITHOUT_TEMPLATE, *WITH_TEMPLATE)


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
        like = new if form in WITHOUT_TEMPLATE else None
        state = clipjax.adopt(states[name], into=new, like=like)
        yield name, state, read["params"][name], updates


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_state_of_a_release_goes_on(version: str, form: str) -> None:
    """Updates and metrics are those of the release, to a rounding."""
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


@pytest.mark.parametrize("form", FORMS)
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
