"""All rows, by theme, and what comes of one."""

from __future__ import annotations

import ast
from typing import Any

from tests.mistakes import (
    axes_and_shapes,
    backward,
    bounds,
    composition,
    devices,
    models,
    monitoring,
    projections,
    signatures,
    update,
)
from tests.mistakes.prepared import EQUINOX, FLAX, names
from tests.mistakes.row import Row

THEMES: dict[str, tuple[Row, ...]] = {
    "A tree in place of a bound": signatures.TREES,
    "Names of other libraries, and misspelled names": signatures.NAMES,
    "Arguments that are missing or misplaced": signatures.PLACES,
    "Bounds and numbers": bounds.ROWS,
    "Axes and paths": axes_and_shapes.AXES,
    "Shapes of bounds": axes_and_shapes.SHAPES,
    "Projections": projections.ROWS,
    "Chains and wrappers": composition.ROWS,
    "States": update.STATES,
    "Parameters and gradients": update.TREES,
    "Devices": devices.ROWS,
    "Metrics, logs and checks": monitoring.ROWS,
    "Layers for the backward pass": backward.ROWS,
    "Flax and Equinox": models.ROWS,
}
ROWS = tuple(row for rows in THEMES.values() for row in rows)


def needs(row: Row) -> list[str]:
    """The libraries whose names a row uses and that are not those of every installation."""
    used = {node.id for node in ast.walk(ast.parse(row.typed)) if isinstance(node, ast.Name)}
    return [lib for lib, own in (("flax", FLAX), ("equinox", EQUINOX)) if used & set(own)]


def run(typed: str) -> Any:
    """Run code as a user's; return the error, or the value of its last expression."""
    tree = ast.parse(typed)
    own = dict(names())
    *before, last = tree.body
    try:
        exec(compile(ast.Module(before, []), "<typed>", "exec"), own)
        if isinstance(last, ast.Expr):
            return eval(compile(ast.Expression(last.value), "<typed>", "eval"), own)
        exec(compile(ast.Module([last], []), "<typed>", "exec"), own)
    except Exception as error:
        return error
    return None
