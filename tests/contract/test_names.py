"""The public names, a row for each member, and what importing clipjax imports."""

from __future__ import annotations

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
from benchmarks.members import MEMBERS
from tests.contract.members import CLIPS, OTHERS, PROJECTIONS, ROWS, STEPS

NAMES = [
    "clip_by_value",
    "clip_by_norm",
    "clip_by_global_norm",
    "clip_by_rms",
    "clip_by_group_norm",
    "adaptive_grad_clip",
    "tangent_cone",
    "relative_update",
    "autoclip",
    "clip_by_quantile",
    "zclip",
    "clip_by_lognormal",
    "adagc",
    "zero_nonfinite",
    "skip_nonfinite",
    "skip_spikes",
    "max_norm",
    "min_max_norm",
    "unit_norm",
    "keep_norm",
    "non_negative",
    "box",
    "spectral_cap",
    "qk_clip",
    "project",
    "violations",
    "bounded",
    "chain",
    "metrics",
    "record_norms",
    "NormLog",
    "with_metrics",
    "clip_gradient_by_value",
    "clip_gradient_by_norm",
    "clip_gradient_by_global_norm",
    "scale_gradient",
    "replace_gradient",
    "fan_in",
    "SKIP",
    "matching",
    "functional",
]

FUNCTIONS = [
    "global_norm",
    "leaf_norms",
    "unitwise_norms",
    "clip_by_value",
    "clip_by_norm",
    "clip_by_global_norm",
]


def test_the_public_names_are_these() -> None:
    assert sorted(clipjax.__all__) == sorted(NAMES)
    assert sorted(clipjax.functional.__all__) == sorted(FUNCTIONS)
    for name in NAMES:
        assert getattr(clipjax, name) is not None
        assert name in ("SKIP", "functional") or getattr(clipjax, name).__doc__


def test_the_types_of_arguments_are_known_at_runtime() -> None:
    for room in (clipjax, clipjax.functional):
        for name in room.__all__:
            if callable(member := getattr(room, name)):
                for argument, hint in typing.get_type_hints(member).items():
                    forms = [
                        typing.get_origin(x) or x
                        for x in typing.get_args(hint) or [hint]
                    ]
                    numpy_too = (
                        np.number in forms or argument == "groups"
                    )  # a depth, which is a literal
                    assert numpy_too or not (int in forms or float in forms), (
                        name,
                        argument,
                    )


def test_the_benchmarks_show_every_member() -> None:
    shown = {word.strip(",:") for label in MEMBERS for word in label.split()}
    missing = (
        {row.name for row in (*CLIPS, *STEPS, *PROJECTIONS)}
        - shown
        - {"chain", "project"}
    )  # these cost nothing
    assert not missing, f"{missing} are missing in benchmarks/members.py"


# What a name may be beside its rule, and why.
OTHERWISE = {
    "axes": "None is the whole leaf for gradients, 'auto' asks for weights; functions of trees take it by position",
    "warmup_steps": "None is half of the window",
    "name": "of a transformation, or which one a log reads",
    "threshold": "that of a picture is what was recorded, None if it is not drawn",
}


def test_one_parameter_is_one_thing() -> None:
    """What has no default is positional. Where it has one, a name has one kind, default
    type and annotation.
    """
    rules: dict[str, dict[Any, str]] = {}
    for room in ("", ".functional", ".flax", ".equinox", ".plots"):
        module = importlib.import_module(f"clipjax{room}")
        public = getattr(module, "__all__", None) or [
            n for n in vars(module) if re.match("(group_|unit_)?norms$", n)
        ]
        for function in filter(callable, (getattr(module, name) for name in public)):
            for name, each in inspect.signature(function).parameters.items():
                if each.default is not each.empty:
                    rule = each.kind, type(each.default), each.annotation
                    rules.setdefault(name, {}).setdefault(
                        rule, f"{module.__name__}.{function.__name__}"
                    )
                else:
                    assert each.kind is not each.KEYWORD_ONLY, (function, name)
    assert len(rules) > 30
    assert {
        name: rule
        for name, rule in rules.items()
        if len(rule) > 1 and name not in OTHERWISE
    } == {}
    assert all(len(rules[name]) > 1 for name in OTHERWISE)


def test_every_member_has_a_row() -> None:
    public = set(clipjax.__all__) | {
        f"functional.{name}" for name in clipjax.functional.__all__
    }
    with_rows = {row.name for row in ROWS}
    assert public - with_rows - OTHERS == set(), "add a row to members.py"
    assert with_rows | OTHERS == public
    assert not with_rows & OTHERS
    assert len({row.id for row in ROWS}) == len(ROWS)


def test_every_member_is_in_the_tables_that_a_new_one_needs() -> None:
    """CONTRIBUTING lists these places; the errors and the reference have tests of their
    own.
    """
    own = {
        "spectral_cap",
        "qk_clip",
    }  # on many devices they have tests in tests/weights
    wanted = {
        "devices/members.py": {
            row.name for row in ROWS if row.kind in ("clip", "step", "projection")
        }
        - own,
        "soak.py": {row.name for row in ROWS if row.kind == "clip"},
    }
    for place, names in wanted.items():
        text = (Path(__file__).parents[1] / place).read_text()
        assert not [name for name in names if not re.search(rf"\b{name}\b", text)], (
            f"add these to tests/{place}"
        )


def test_an_unknown_name_raises_as_usual() -> None:
    with pytest.raises(
        AttributeError, match=r"module 'clipjax' has no attribute 'clip_by_nrom'$"
    ):
        clipjax.clip_by_nrom


def test_importing_clipjax_imports_no_more_than_it_needs() -> None:
    code = "import sys, clipjax; print(*{'flax', 'equinox', 'matplotlib', 'haiku', 'orbax'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
