# /// script
# dependencies = ["optax==0.2.8", "flax", "absl-py", "pytest"]
# ///
"""Optax's own tests, those of the installed package, of clipjax in Optax's place."""

import importlib
import os
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
import pytest

import clipjax

SUITES = [
    "accumulation",
    "clipping",
    "combining",
    "conditionality",
    "constraining",
    "masking",
]
DIFFERENT = {
    "test_adaptive_grad_clip_default_axis_conv3d": "rank 5 needs axes",
    "test_clip_by_block_rms": "ends below the bound; Optax's fails, too",
    "test_clip_by_global_norm": "ends 8 roundings below the bound, 5 are asked for",
    "test_statefull_inner": "names of the state",
    "test_zero_nans": "names of the state, and infinity is zeroed, too",
    "test_masked_state_structure": "the chain is longer by our clip",
}


def adaptive_grad_clip(clipping, axis=None):
    return clipjax.adaptive_grad_clip(clipping, **({"axes": axis} if axis else {}))


class Skipped(NamedTuple):
    """The state of `skip_nonfinite`, read by Optax's names."""

    state: Any
    last_finite = property(lambda self: self.seen("skipped_last") == 0)
    notfinite_count = property(lambda self: self.seen("skipped_in_a_row"))
    total_notfinite = property(lambda self: self.seen("nonfinite_count"))

    def seen(self, name):
        return clipjax.metrics(self.state)[f"skip_nonfinite/{name}"]


def apply_if_finite(optimizer, max_consecutive_errors):
    ours = clipjax.skip_nonfinite(optimizer, max_consecutive=max_consecutive_errors)

    def init(params):
        return Skipped(ours.init(params))

    def update(updates, state, params=None, **extra):
        updates, state = ours.update(updates, state.state, params, **extra)
        return updates, Skipped(state)

    return optax.GradientTransformationExtraArgs(init, update)


def sgd(*args, theirs=optax.sgd, **settings):
    """Return SGD after a clip that changes nothing, for the tests of wrappers."""
    return optax.chain(clipjax.clip_by_global_norm(jnp.inf), theirs(*args, **settings))


OURS = {
    "_src.alias.sgd": sgd,
    "transforms._clipping.clip": clipjax.clip_by_value,
    "transforms._clipping.clip_by_block_rms": clipjax.clip_by_rms,
    "transforms._clipping.clip_by_global_norm": clipjax.clip_by_global_norm,
    "transforms._clipping.adaptive_grad_clip": adaptive_grad_clip,
    "transforms._constraining.keep_params_nonnegative": clipjax.non_negative,
    "transforms._constraining.zero_nans": clipjax.zero_nonfinite,
    "transforms._conditionality.apply_if_finite": apply_if_finite,
}


class Results:
    """A plugin of pytest that keeps the names of tests."""

    def __init__(self):
        self.passed, self.failed = [], []

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            kept = self.passed if report.passed else self.failed
            kept.append(report.nodeid.rpartition("::")[2])


if __name__ == "__main__":
    modules = [importlib.import_module(f"optax.transforms._{x}_test") for x in SUITES]
    for path, ours in OURS.items():
        module, _, name = path.rpartition(".")
        setattr(importlib.import_module(f"optax.{module}"), name, ours)
    results = Results()
    alone = ["-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
    shown = ["--quiet", "--tb=line", "--no-summary"]
    pytest.main([*alone, *shown, *(m.__file__ for m in modules)], plugins=[results])
    for name in sorted(set(results.failed)):
        print(name, DIFFERENT.get(name, "WHY?"), sep=": ")
    assert set(results.failed) == set(DIFFERENT)
    assert len(results.passed) > 60
