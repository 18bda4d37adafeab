"""The public names, a row for each member, and what importing clipjax imports."""

import importlib
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipjax
from tests.contract.members import OTHERS, ROWS

# Flax and Equinox configure JAX, which then compiles anew what it had compiled before:
# they are imported before any test runs.
ROOMS = ("", ".functional", ".flax", ".equinox", ".plots")
GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
MODULES = [importlib.import_module(f"clipjax{room}") for room in ROOMS]


def test_every_public_name_says_what_it_is() -> None:
    for room in (clipjax, clipjax.functional):
        for name in room.__all__:
            assert name in ("SKIP", "functional") or getattr(room, name).__doc__, name


def test_the_types_of_arguments_are_known_at_runtime() -> None:
    for room in (clipjax, clipjax.functional):
        for name in room.__all__:
            if callable(member := getattr(room, name)):
                for argument, hint in typing.get_type_hints(member).items():
                    forms = [
                        typing.get_origin(x) or x
                        for x in typing.get_args(hint) or [hint]
                    ]
                    # A depth, which is a literal.
                    numpy_too = np.number in forms or argument == "groups"
                    assert numpy_too or not (int in forms or float in forms), (
                        name,
                        argument,
                    )


# What a name may be beside its rule, and why.
OTHERWISE = {
    "axes": "None is the whole leaf for gradients, 'auto' asks for weights",
    "warmup_steps": "None follows from the window",
    **dict.fromkeys(("bound", "high", "low"), "no schedule where there is no step"),
    "z_threshold": "record_norms is about norms, and takes it by name",
    "name": "of a transformation, or which one a picture shows",
}


# What has no default, and is not positional, since it could be swapped in silence.
NAMED = {"axes", "into", "new", "old"}


def test_one_parameter_is_one_thing() -> None:
    """What has no default is positional; else a name has one kind, type, annotation.

    A table in CONTRIBUTING.md says what each is.
    """
    rules: dict[str, dict[Any, str]] = {}
    section = GUIDE.read_text().partition("## Parameters")[2].partition("##")[0]
    listed = {*re.findall(r"`(\w+)`", section), "args", "kwargs"}
    for module in MODULES:
        members = (getattr(module, name) for name in module.__all__)
        for function in filter(callable, members):
            for name, each in inspect.signature(function).parameters.items():
                assert name in listed, (function, name)
                if each.default is not each.empty:
                    rule = each.kind, type(each.default), each.annotation
                    rules.setdefault(name, {}).setdefault(
                        rule, f"{module.__name__}.{function.__name__}"
                    )
                else:
                    is_named = each.kind is each.KEYWORD_ONLY
                    assert not is_named or name in NAMED, (function, name)
    assert len(rules) > 30
    assert {
        name: rule
        for name, rule in rules.items()
        if len(rule) > 1 and name not in OTHERWISE
    } == {}
    assert {name for name in OTHERWISE if len(rules[name]) == 1} == set()


def test_every_member_has_a_row() -> None:
    public = set(clipjax.__all__) | {
        f"functional.{name}" for name in clipjax.functional.__all__
    }
    with_rows = {row.name for row in ROWS}
    assert public - with_rows - OTHERS == set(), "add a row to members.py"
    assert with_rows | OTHERS == public
    assert not with_rows & OTHERS
    assert len({row.id for row in ROWS}) == len(ROWS)


def test_an_unknown_name_raises_as_usual() -> None:
    with pytest.raises(
        AttributeError, match=r"module 'clipjax' has no attribute 'clip_by_nrom'$"
    ):
        getattr(clipjax, "clip_by_nrom")  # noqa: B009


def test_importing_clipjax_imports_no_more_than_it_needs() -> None:
    others = {"flax", "equinox", "matplotlib", "haiku", "orbax"}
    code = f"import sys, clipjax; print(*{others} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
