"""The names in states: Optax finds its own and ours, each once."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import clipjax
from tests.contract.cases import default, every_case, problem
from tests.support.walk import Case


def fields_of_optax() -> set[str]:
    found: set[str] = set()
    for module in pkgutil.walk_packages(optax.__path__, "optax."):
        if "_test" not in module.name and "test_utils" not in module.name:
            for value in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(value) and value.__name__.endswith("State"):
                    found |= set(getattr(value, "_fields", ()))
    return found


def states_in(tree: Any) -> list[Any]:
    """The named tuples of ours in a state, from the outside in."""
    if not isinstance(tree, tuple):
        return []
    own = [tree] if type(tree).__module__.startswith("clipjax.") else []
    return own + [state for part in tree for state in states_in(part)]


@pytest.fixture(scope="module")
def theirs() -> set[str]:
    found = fields_of_optax()
    assert {"count", "mu", "scale", "z", "gamma", "inner_state"} <= found
    return found


@every_case
def test_no_field_is_called_as_one_of_optax(case: Case, theirs: set[str]) -> None:
    states = states_in(default(case).init(problem()[1]))
    assert states
    assert not {field for state in states for field in state._fields} & theirs


@every_case
def test_a_state_is_found_by_the_name_of_its_transformation(case: Case) -> None:
    if case.name == "bounded":
        return
    state = optax.chain(default(case), optax.adam(1e-3)).init(problem()[1])
    if "skip" not in case.name and case.name != "zero_nonfinite":
        assert optax.tree.get(state, case.name).steps == 0
    assert optax.tree.get(state, "count") == 0


def test_the_scale_that_optax_finds_is_its_own() -> None:
    """As in Optax's notebook on reducing the learning rate on a plateau."""
    tx = optax.chain(clipjax.clip_by_global_norm(1.0), optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    assert optax.tree.get(tx.init(jnp.ones(3)), "scale") == 1
