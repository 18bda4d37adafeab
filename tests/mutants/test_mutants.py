"""The operators make the mistakes that they say, and leave texts and types alone."""

import ast

from tests.mutants.operators import mutants

SOURCE = '''
"""A module of 1 docstring."""
from jax import lax

def inside(x: int | float, low: float = 0) -> bool | None:
    """Return 1 thing."""
    if not isinstance(x, int | float):
        raise TypeError(f"{x + 1} of 2")
    y = jnp.where(x < low, lax.stop_gradient(x), -low)
    y &= jnp.max(y, keepdims=low is None)
    return weak(x, y) if low == 0 and x else min(x * 2.5, y)

class Leaf:
    def __repr__(self):
        return "leaf" + str(1 + 1)
'''
WANTED = {
    ("number", "0", "1"),
    ("raise", "raise TypeError(f'{x + 1} of 2')", "pass"),
    ("operand", "not isinstance(x, int | float)", "isinstance(x, int | float)"),
    ("boundary", "x < low", "x <= low"),
    ("flip", "x < low", "x >= low"),
    (
        "arms",
        "jnp.where(x < low, lax.stop_gradient(x), -low)",
        "jnp.where(x < low, -low, lax.stop_gradient(x))",
    ),
    ("wrapper", "lax.stop_gradient(x)", "x"),
    ("operand", "-low", "low"),
    ("operator", "y &= jnp.max(y, keepdims=low is None)", None),
    ("name", "jnp.max", "jnp.min"),
    ("keepdims", "keepdims=low is None", "keepdims=not low is None"),
    ("flip", "low is None", "low is not None"),
    ("flip", "low == 0", "low != 0"),
    ("operator", "low == 0 and x", "low == 0 or x"),
    ("name", "min", "max"),
    ("operator", "x * 2.5", "x / 2.5"),
    ("number", "2.5", "3.5"),
}


def test_operators_change_what_they_say() -> None:
    found = mutants(SOURCE)
    pairs = {(m.operator, m.before, m.after) for m in found if m.operator != "test"}
    wanted = {
        (name, before, before.replace("&=", "|=") if after is None else after)
        for name, before, after in WANTED
    }
    assert pairs == wanted
    assert sum(m.operator == "test" for m in found) == 2  # of the one expression


def test_each_mutant_is_one_change() -> None:
    right = ast.unparse(ast.parse(SOURCE)).splitlines()
    for mutant in mutants(SOURCE):
        wrong = mutant.text().splitlines()
        assert len(wrong) == len(right)
        assert sum(map(str.__ne__, right, wrong)) == 1, mutant


def test_a_return_of_a_call_returns_its_first_argument() -> None:
    (mutant,) = mutants("def f(x):\n    return g(x, y)")
    assert mutant.text() == "def f(x):\n    return x"
