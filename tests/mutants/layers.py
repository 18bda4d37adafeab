"""Mutants of the bounds on weights, and of the layers that bound gradients in the backward pass."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "the rate is ignored",
        "_rescale.py",
        "target = rate * limit + (1 - rate) * outside",
        "target = limit",
        "tests/weights/test_norm_limits.py::test_the_formula_holds_for_any_rate",
    ),
    Mutant(
        "a unit of norm 0 grows",
        "_rescale.py",
        "return jnp.where(flushed, 0.0, floor)",
        "return floor",
        "tests/weights/test_norm_limits.py::test_units_of_norm_zero_stay",
    ),
    Mutant(
        "verify lists what is at its limit",
        "_verify.py",
        "(value <= high)",
        "(value < high)",
        "tests/weights/test_verify.py",
    ),
    Mutant(
        "capped weights are not made smaller until they are inside",
        "_singular.py",
        "return end(least_shrink(end, bound, eps))",
        "return end(jnp.zeros_like(bound))",
        "tests/weights/test_spectral.py::test_hostile_matrices_stay_below_the_bound "
        "tests/weights/test_spectral.py::test_the_bound_is_certain_and_the_cap_is_right",
    ),
    Mutant(
        "the key takes all of a logit's factor",
        "_qk_clip.py",
        "of_key = jnp.sqrt(jnp.min(factor.reshape(*stack, key_heads, shared_by), axis=-1))",
        "of_key = jnp.min(factor.reshape(*stack, key_heads, shared_by), axis=-1)",
        "tests/weights/test_qk_clip.py::test_the_factors_by_hand",
    ),
    Mutant(
        "logits are differentiated",
        "_qk_clip.py",
        "logits = wide(lax.stop_gradient(jnp.asarray(value)))",
        "logits = wide(jnp.asarray(value))",
        "tests/weights/test_qk_clip.py::test_gradients_flow_through_to_the_weights_alone",
    ),
    Mutant(
        "what points inward is taken out",
        "_tangent.py",
        "outward = (norm >= least) & (radial < 0)",
        "outward = (norm >= least) & (radial > 0)",
        "tests/weights/test_tangent.py::test_right_in_every_dtype",
    ),
    Mutant(
        "a unit at the least saturated norm is not saturated",
        "_tangent.py",
        "outward = (norm >= least) & (radial < 0)",
        "outward = (norm > least) & (radial < 0)",
        "tests/weights/test_tangent.py::test_saturated_is_from_eight_units_of_precision_below_the_radius_on",
    ),
    Mutant(
        "the gradient of a probe is differentiated",
        "_cotangents.py",
        "probe = lax.stop_gradient(lax.convert_element_type(norm, probe.dtype))",
        "probe = lax.convert_element_type(norm, probe.dtype)",
        "tests/backward/test_probe.py",
    ),
)
