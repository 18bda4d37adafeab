"""The tests of peers that fail with ours on purpose, and why; `docs/outside.md` says the same."""

from __future__ import annotations

import fnmatch
from typing import NamedTuple


class Difference(NamedTuple):
    """Tests that differ for one reason."""

    runs: str  # a pattern, as `optax-*`
    tests: str  # patterns of `file::class::test parameters`, one a line
    why: str


DIFFERENCES = (
    Difference(
        "optax-members",
        """_conditionality_test.py::ConditionalityTest::test_apply_if_finite
           ConditionallyTransformTest::test_statefull_inner
           ConditionallyMaskTest::test_statefull_inner
           ConstraintsTest::test_zero_nans""",
        "They read fields of Optax' states, `last_finite`, `notfinite_count` and `found_nan`. Ours are "
        "scalars with other names, which `clipjax.metrics` reads. `skip_nonfinite` never gives up, and "
        "`zero_nonfinite` zeroes infinities, too.",
    ),
    Difference(
        "optax-members",
        "ClippingTest::test_per_example_global_norm_clip",
        "One of the two leaves is of integers, which count towards Optax' norm and not towards ours.",
    ),
    Difference(
        "optax-members",
        "ClippingTest::test_clip_by_block_rms",
        "It wants the bound met to 5e-8, which is less than an ulp of float32 at 1. Ours ends up to 4 ulp "
        "below. It fails with Optax' own clip, too.",
    ),
    Difference(
        "optax-members",
        "ProjectionsTest::test_projection_box",
        "The limits are trees. Ours are numbers, arrays or schedules; other limits for other leaves are "
        "several projections, each with its `where`.",
    ),
    Difference(
        "optax-members",
        "ProjectionsTest::test_projection_hypercube",
        "The limit is 0.8, and float32's nearest number to it is above. Ours rounds a limit inwards, to the "
        "one below.",
    ),
    Difference(
        "torch-clips",
        """test_clip_grad_norm_error_if_nonfinite
           test_clip_grad_norm_foreach_*_norm_type_0_5""",
        "An order below 1 gives no norm: ours refuses it, with a `ValueError`. torch takes it, and 0 and "
        "negative ones.",
    ),
)


def why(run: str, test: str) -> str | None:
    """The reason for which a test is expected to fail, or None."""
    for difference in DIFFERENCES:
        if fnmatch.fnmatchcase(run, difference.runs) and any(
            fnmatch.fnmatchcase(test, f"*{pattern.strip()}*") for pattern in difference.tests.splitlines()
        ):
            return difference.why
    return None
