"""The mistakes that can be made in a source text, from its syntax tree."""

import ast
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple


def _both_ways(*pairs: tuple[Any, Any]) -> dict[Any, Any]:
    return dict(pairs) | {second: first for first, second in pairs}


COMPARISONS = {
    "boundary": _both_ways((ast.Lt, ast.LtE), (ast.Gt, ast.GtE)),
    "flip": _both_ways(
        (ast.Lt, ast.GtE),
        (ast.Gt, ast.LtE),
        (ast.Eq, ast.NotEq),
        (ast.Is, ast.IsNot),
        (ast.In, ast.NotIn),
    ),
}
OPERATORS = _both_ways(
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
)
NAMES = _both_ways(
    ("minimum", "maximum"), ("min", "max"), ("psum", "pmax"), ("any", "all")
)
WRAPPERS = {"stop_gradient", "isfinite", "isnan", "abs", "square", "sqrt", "sorted"}
FIELDS = {"annotation", "returns", "decorator_list"}  # which are left alone


class Mutant(NamedTuple):
    """One mistake in a module."""

    line: int
    operator: str
    before: str
    after: str
    text: Callable[[], str]  # of the module with the mistake


def mutants(source: str) -> list[Mutant]:
    """Return every mistake that can be made in a source text, in its order."""
    module = ast.parse(source)

    def text(put: Callable[[Any], None], node: ast.AST, new: ast.AST) -> str:
        put(new)
        changed = ast.unparse(module)
        put(node)
        return changed

    return [
        Mutant(node.lineno, operator, _shown(node), _shown(new), partial(text, *how))
        for node, put in _places(module)
        for operator, new in _changes(node)
        for how in [(put, node, new)]
    ]


def _shown(node: ast.AST) -> str:
    """Return the first line of a node, which for a raise or an if is enough."""
    return ast.unparse(node).splitlines()[0]


def _places(node: ast.AST) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Yield the nodes below a node, each with what puts another in its place."""
    for field, value in ast.iter_fields(node):
        if field in FIELDS or _is_left_out(node, field):
            continue
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(children):
            if not isinstance(child, ast.AST) or _is_text(child):
                continue
            if isinstance(value, list):
                put = partial(value.__setitem__, i)
            else:
                put = partial(setattr, node, field)
            if hasattr(child, "lineno"):
                yield child, put
            if not isinstance(child, ast.Import | ast.ImportFrom | ast.Raise):
                yield from _places(child)


def _is_text(node: ast.AST) -> bool:
    """Return whether a node is a text, or a choice of texts, as of an error."""
    match node:
        case ast.JoinedStr() | ast.Constant(value=str()):
            return True
        case ast.IfExp():
            return _is_text(node.body) or _is_text(node.orelse)
    return False


def _is_left_out(node: ast.AST, field: str) -> bool:
    """Return whether a field is a type, the text of a repr, or `strict=True`."""
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass")):
            return field == "args" and isinstance(node.args[0], ast.Name)
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
        case ast.keyword(arg="strict"):
            return True
    return False


def _changes(node: Any) -> Iterator[tuple[str, ast.AST]]:
    """Yield what may stand in the place of a node, with the name of the operator."""

    def but(**fields: Any) -> Any:
        new = copy.copy(node)
        vars(new).update(fields)
        return new

    match node:
        case ast.Compare():
            for name, table in COMPARISONS.items():
                for i, op in enumerate(node.ops):
                    if type(op) in table:
                        ops = [*node.ops]
                        ops[i] = table[type(op)]()
                        yield name, but(ops=ops)
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp():
            if type(node.op) in OPERATORS:
                yield "operator", but(op=OPERATORS[type(node.op)]())
        case ast.UnaryOp():
            yield "operand", node.operand
        case ast.Constant(value=bool(value)):
            yield "bool", but(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "number", but(value=value + 1)
        case ast.Name(id=name) if name in NAMES:
            yield "name", but(id=NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield "name", but(attr=NAMES[name])
        case ast.keyword(arg="keepdims") if not isinstance(node.value, ast.Constant):
            yield "keepdims", but(value=ast.UnaryOp(ast.Not(), node.value))
        case ast.Call(args=[test, yes, no]) if _called(node) == "where":
            yield "arms", but(args=[test, no, yes])
        case ast.Call(args=[inner], keywords=[]) if _called(node) in WRAPPERS:
            yield "wrapper", inner
        case ast.If(body=[ast.Raise()]):  # as without the raise
            pass
        case ast.If() | ast.IfExp():
            for value in (True, False):
                yield "test", but(test=ast.Constant(value))
        case ast.Raise():
            yield "raise", ast.Pass()
        case ast.Return(value=ast.Call(args=[ast.Name() as first, *_])):
            yield "argument", but(value=first)


def _called(node: ast.Call) -> str:
    """Return the last name of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))
