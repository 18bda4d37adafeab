"""The tests of peers that fail with ours on purpose, and why; `docs/outside.md` says the same."""

from __future__ import annotations

import fnmatch
from typing import NamedTuple


class Difference(NamedTuple):
    """Tests that differ for one reason."""

    runs: str  # a pattern, as `optax-*`
    tests: str  # patterns of `class::test (parameters)`, one a line
    why: str


DIFFERENCES = (
    Difference(
        "optax-members",
        """ConditionalityTest::test_apply_if_finite_*
           ConditionallyTransformTest::test_statefull_inner
           ConditionallyMaskTest::test_statefull_inner
           ConstraintsTest::test_zero_nans""",
        "They read fields of Optax's states, `last_finite`, `notfinite_count` and `found_nan`. clipjax's are "
        "scalars with other names, which `clipjax.metrics` reads; and `zero_nonfinite` zeroes infinities, "
        "too.",
    ),
    Difference(
        "optax-members",
        "ClippingTest::test_per_example_global_norm_clip",
        "One of the two leaves holds integers, which count toward Optax's norm and not toward clipjax's.",
    ),
    Difference(
        "optax-members",
        "ClippingTest::test_clip_by_block_rms",
        "It expects the norm to equal the bound to 5e-8, which is less than an ulp of float32 at 1. "
        "clipjax's norm ends up to 4 ulp below. The test fails with Optax's own clip, too.",
    ),
    Difference(
        "optax-members",
        "ProjectionsTest::test_projection_box",
        "The limits are trees of the parameters. `box` takes numbers, arrays or schedules, or limits by path "
        "pattern or by rule.",
    ),
    Difference(
        "optax-members",
        "ProjectionsTest::test_projection_hypercube",
        "The limit is 0.8, and the float32 number nearest to it is above. clipjax rounds a limit inward, to "
        "the number below.",
    ),
    Difference(
        "optax-*",
        """MaskedTest::test_masked_state_structure
           StateUtilsTest::test_adam
           StateUtilsTest::test_inject_hparams
           StateUtilsTest::test_map_non_params_to_none
           StateUtilsTest::test_map_params_to_none""",
        "They access the state of an optimizer by position. Inside clipjax's wrappers, that state is one "
        "level deeper; `optax.tree.get` finds it.",
    ),
    Difference(
        "optax-*",
        """FreezeTest::test_bad_structure_raises
           SelectiveTransformTest::test_selective_bad_structure""",
        "They expect the words of an error message that JAX 0.10 no longer uses. They fail with Optax alone, "
        "too.",
    ),
    Difference(
        "optax-*",
        """ShardingTest::test_state_sharding_type_*_lbfgs
           LinearAlgebraTest::test_nnls4 *
           LinearAlgebraTest::test_nnls5 *""",
        "They fail with Optax alone, too. (They use nothing of clipjax, or `lbfgs` makes zeros without the "
        "sharding of the parameters.)",
    ),
    Difference(
        "optax-skip",
        "ConditionalityTest::test_apply_if_finite_*sgd*",
        "They expect `apply_if_finite` to let a NaN through after two skipped steps; `skip_nonfinite` inside "
        "it, without `max_consecutive`, never lets one through.",
    ),
    Difference(
        "optax-project",
        """AliasTest::test_preserve_dtype* dtype='bfloat16')
           ContribTest::test_preserve_dtype*'muon'* dtype='bfloat16')
           ContribTest::test_preserve_dtype*'mechanize'* dtype='bfloat16')
           ContribTest::test_preserve_dtype*'reduce_on_plateau'* dtype='bfloat16')""",
        "The update of bfloat16 weights is float32 after a projection, because only then does adding it end "
        "at the bound. The new weights are bfloat16.",
    ),
    Difference(
        "optax-project",
        """ExtraArgsTest::test_extra_args
           PartitionTest::test_labels_mismatch? (False, *)
           LayoutsTest::test_flatten
           MaskedTest::test_masked_*sgd*
           MaskedTest::test_prefix_mask_*sgd
           MonitoringTest::test_monitor
           MonitoringTest::test_snapshot
           StateUtilsTest::test_tree_get
           StateUtilsTest::test_tree_set""",
        "They call `update` without the parameters, which a projection needs; its error says so.",
    ),
    Difference(
        "torch-clips",
        """TestNNDeviceTypeCPU::test_clip_grad_norm_error_if_nonfinite_cpu
           TestNNDeviceTypeCPU::test_clip_grad_norm_foreach_*_norm_type_0_5_cpu""",
        "An order below 1 does not give a norm, and clipjax raises a `ValueError`. torch accepts it, and "
        "also 0 and negative orders.",
    ),
)


def why(run: str, test: str) -> str | None:
    """The reason for which a test is expected to fail, or None."""
    for difference in DIFFERENCES:
        if fnmatch.fnmatchcase(run, difference.runs) and any(
            fnmatch.fnmatchcase(test, f"*::{pattern.strip()}") for pattern in difference.tests.splitlines()
        ):
            return difference.why
    return None
