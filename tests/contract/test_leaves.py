"""What is no float passes through and counts for nothing; complex ones by |z|."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax import functional
from tests.contract.members import ROWS, USERS_OWN, Row
from tests.support.programs import apply, is_transformation
from tests.support.tolerances import tolerance_of
from tests.support.trees import changed, exact

FLOATS = {
    "a": np.float32([[3.0, -2.0], [1.0, 4.0]]),
    "c_vector": np.float32([5.0, 0.1, 1.0]),
}
COMPLEX = {
    k: (x * np.exp(1j * np.arange(x.size).reshape(x.shape))).astype(np.complex64)
    for k, x in FLOATS.items()
}
BOUND = 0.6875


def others() -> dict[str, Any]:
    """Make one leaf of each kind that has no norm."""
    return {
        "int": jnp.arange(3),
        "bool": jnp.array([True, False]),
        "key": jax.random.key(0),
        "float0": np.zeros(2, jax.dtypes.float0),
        "uint8": jnp.full((2, 2), 200, np.uint8),
    }


def nothing() -> dict[str, Any]:
    return {
        "none": None,
        "masked": optax.MaskedNode(),
        "empty": jnp.zeros((0, 3)),
        "empty_vector": jnp.zeros(0),
    }


def once(row: Row, tree: Any, bound: Any = BOUND) -> Any:
    """Apply a row from its first state to a tree, which is also the weights."""
    return with_state(row, tree, bound)[0]


def with_state(row: Row, tree: Any, bound: Any) -> Any:
    state = row.make(bound).init(tree) if is_transformation(row) else None
    # Integers have gradients of float0: test_layers_pass_integers.
    if row.kind == "layer":
        tree = {k: x for k, x in tree.items() if k not in others()}
    return apply(row, tree, state, tree if row.params else None, bound)


PASSING = {
    row.id: row for row in ROWS if row.tree != "heads" and row.name not in USERS_OWN
}


def beside_others(row: Row, tree: Any, bound: Any) -> Any:
    """Apply a row to a tree beside leaves of other kinds, and alone."""
    extra = others()
    result, state = with_state(row, {**tree, **extra, **nothing()}, bound)
    # A choice is another object.
    if row.kind != "layer" and not row.skips:
        for name, x in extra.items():
            assert result[name] is x, (row.id, name)
    assert result["none"] is None, row.id
    assert isinstance(result["masked"], optax.MaskedNode), row.id
    assert result["empty"].shape == (0, 3), row.id
    alone, state_alone = with_state(row, tree, bound)
    states = (state, state_alone) if is_transformation(row) else ()
    return {k: result[k] for k in tree}, alone, [clipjax.metrics(x) for x in states]


@functools.cache
def all_beside_others() -> Any:
    @jax.jit
    def program(tree: Any, bound: Any) -> Any:
        return {name: beside_others(row, tree, bound) for name, row in PASSING.items()}

    return program(FLOATS, BOUND)


@pytest.mark.parametrize("row", PASSING.values(), ids=lambda row: row.id)
def test_others_count_for_nothing(row: Row) -> None:
    beside, alone, metrics = all_beside_others()[row.id]
    assert not changed(alone, beside)
    if metrics:
        jax.tree.map(np.testing.assert_array_equal, *metrics)
    if row.keeps and row.bounds and not row.warm and not row.params:
        assert changed(FLOATS, alone)


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.kind == "layer" and row.name not in USERS_OWN],
    ids=lambda row: row.id,
)
def test_layers_pass_integers(row: Row) -> None:
    tree = {**FLOATS, **others(), **nothing()}
    result = row.make(BOUND)(tree)
    assert all(result[name] is tree[name] for name in others())
    assert not changed(FLOATS, {k: result[k] for k in FLOATS})
    ints = {"a": FLOATS["a"], "n": jnp.arange(2)}
    slopes = jax.grad(lambda x: row.make(BOUND)(x)["a"].sum(), allow_int=True)(ints)
    assert slopes["n"].dtype == jax.dtypes.float0


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.skips], ids=lambda row: row.id
)
def test_skipping_keeps_keys(row: Row) -> None:
    """A skipped step returns leaves of the same dtypes."""
    tree = {"w": jnp.array([jnp.nan]), "key": jax.random.key(3), "n": jnp.arange(2)}
    tx = row.make(BOUND)
    updates, _ = jax.jit(tx.update)(tree, tx.init(tree))
    assert updates["w"] == 0
    assert updates["key"].dtype == tree["key"].dtype


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_empty_trees_work(row: Row) -> None:
    if row.tree != "heads":
        assert jax.eval_shape(lambda: once(row, {})) == {}
        assert set(jax.eval_shape(lambda: once(row, nothing()))) == set(nothing())
        tx = row.make(BOUND)
        if row.kind in ("clip", "step", "projection"):
            assert jax.eval_shape(lambda: tx.update({}, tx.init({}))[0]) == {}


def needs_order(row: Row) -> bool:
    """Return whether limits of single entries differ by sign: no moduli have these."""
    far = {"a": np.array([-1e9, 1e9])}
    return row.shares == "entry" and row.oracle(far, {}, 1.0)["a"].sum() != 0


MODULI = {row.id: row for row in ROWS if row.tree != "heads" and not row.warm}


@functools.cache
def all_of_complex() -> Any:
    @jax.jit
    def program(tree: Any, bound: Any) -> Any:
        rows = {name: row for name, row in MODULI.items() if not needs_order(row)}
        return {name: once(row, tree, bound) for name, row in rows.items()}

    return program(COMPLEX, BOUND)


@pytest.mark.parametrize("row", MODULI.values(), ids=lambda row: row.id)
def test_complex_leaves_count_by_modulus(row: Row) -> None:
    if needs_order(row):
        with pytest.raises(TypeError, match="complex"):
            jax.eval_shape(lambda: once(row, COMPLEX))
        return
    result = all_of_complex()[row.id]
    weights = exact(COMPLEX)
    want = row.oracle(exact(COMPLEX), weights, BOUND)
    if row.shares == "entry":  # an oracle for real numbers clips the modulus
        sizes = row.oracle({k: np.abs(x) for k, x in weights.items()}, {}, BOUND)
        want = {k: x / np.abs(x) * sizes[k] for k, x in weights.items()}
    for name, x in exact(result).items():
        assert result[name].dtype == np.complex64
        np.testing.assert_allclose(
            x, want[name], rtol=tolerance_of(row, np.float32), atol=1e-5
        )


def test_python_numbers_and_numpy_arrays_count() -> None:
    tree = {
        "float": 3.0,
        "numpy": np.array([4.0], np.float32),
        "int": 7,
        "matrix": np.zeros((1, 2), np.float32),
    }
    tx = optax.chain(clipjax.clip_by_group_norm({"*": 1.0}))
    result, _ = tx.update(tree, tx.init(tree))
    assert result["int"] == 7
    assert all(isinstance(x, jax.Array) for x in result.values())

    @jax.jit
    def all_of() -> Any:  # in which they are still Python's and NumPy's
        tx = clipjax.clip_by_global_norm(1.0)
        limited = functional.clip_by_value(tree, -1.0, 1.0)
        projected = clipjax.max_norm(1.0).apply(tree)
        clipped, _ = tx.update(tree, tx.init(tree))
        return clipped, limited, projected, functional.global_norm(tree)

    clipped, limited, projected, norm = all_of()
    for each in (result, clipped):
        np.testing.assert_allclose(
            [each["float"], each["numpy"][0]], [0.6, 0.8], rtol=2e-6
        )
    assert (clipped["int"], limited["float"], projected["float"], norm) == (7, 1, 3, 5)
