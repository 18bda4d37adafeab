"""Mutants of the numbers: rounding, bounds, norms, derivatives, and what is not finite."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "no slack",
        "_core/rescale.py",
        "_SLACK = 2.0**-23 + 2 * NORM_ERROR",
        "_SLACK = 0.0",
        "tests/core/test_bounds.py::test_no_bound_is_exceeded_and_little_is_lost "
        "tests/core/test_bounds.py::test_a_clipped_norm_is_inside_its_bound",
    ),
    Mutant(
        "16 bits rounded to the nearest",
        "_core/rescale.py",
        "power * factor, x.dtype, toward_zero=True)",
        "power * factor, x.dtype, toward_zero=False)",
        "tests/core/test_bounds.py::test_no_bound_is_exceeded_and_little_is_lost "
        "tests/core/test_bounds.py::test_a_clipped_norm_is_inside_its_bound",
    ),
    Mutant(
        "limits of entries rounded outwards",
        "_core/rounding.py",
        "return _inward(low, dtype, jnp.inf), _inward(high, dtype, -jnp.inf)",
        "return _inward(low, dtype, -jnp.inf), _inward(high, dtype, jnp.inf)",
        "tests/core/test_bounds.py::test_the_python_float_is_the_bound "
        "tests/weights/test_entries.py::test_entries_end_inside_their_limits",
    ),
    Mutant(
        "a norm at the bound is outside",
        "_core/rescale.py",
        "inside = (norm <= bound) & (norm < jnp.inf)",
        "inside = (norm < bound) & (norm < jnp.inf)",
        "tests/core/test_edge_cases.py::test_a_bound_of_zero_gives_zeros_and_one_of_infinity_nothing",
    ),
    Mutant(
        "an infinite norm is finite",
        "_core/rescale.py",
        "return jnp.where(norm < jnp.inf, norm, jnp.nan)",
        "return norm",
        "tests/core/test_edge_cases.py::test_a_clip_propagates_a_nonfinite_entry_to_all_that_share_its_norm",
    ),
    Mutant(
        "NaN lost in a large maximum",
        "_core/maxima.py",
        "return jnp.where(jnp.isnan(total), jnp.nan, along(x, axes))",
        "return along(x, axes)",
        "tests/core/test_large_leaves.py::test_nan_reaches_the_norm_of_a_large_leaf "
        "tests/core/test_large_leaves.py::test_nan_reaches_the_metrics_of_a_clip_by_value",
    ),
    Mutant(
        "NaN lost in a large maximum of 16 bits",
        "_core/maxima.py",
        "return jnp.where(jnp.isnan(total), jnp.nan, along(of(wide(x)), axes))",
        "return along(of(wide(x)), axes)",
        "tests/core/test_large_leaves.py::test_nan_reaches_the_norm_of_a_large_leaf",
    ),
    Mutant(
        "no power of two beside the factor",
        "_core/rescale.py",
        "return _quotient(target, norm, (norm > 2.0**64 * target, 64), (norm > 2.0**180 * target, 123))",
        "return _quotient(target, norm)",
        "tests/core/test_precision.py::test_norms_neither_overflow_nor_underflow "
        "tests/core/test_derivatives.py::test_derivatives_far_outside_the_bound",
    ),
    Mutant(
        "sums in float32",
        "_core/platforms.py",
        "_SQUARES = Reduction(_square, jnp.add,",
        "_SQUARES = Reduction(lambda x: _square(x).astype(np.float32), jnp.add,",
        "tests/core/test_precision.py::test_norms_neither_overflow_nor_underflow "
        "tests/core/test_bounds.py::test_norms_are_right",
    ),
    Mutant(
        "entries that tie for the largest each get the whole derivative",
        "_core/norms.py",
        "slopes = [wide(size == norm) / ties * slope for size, slope in pairs]",
        "slopes = [wide(size == norm) * slope for size, slope in pairs]",
        "tests/core/test_derivatives.py::test_derivatives_of_norms",
    ),
    Mutant(
        "complex entries by their real part",
        "_core/norms.py",
        "((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))",
        "((x.real, 0 * x.imag) if jnp.iscomplexobj(x) else (x,))",
        "tests/contract/test_leaves.py::test_complex_leaves",
    ),
    Mutant(
        "a schedule below 0 flips signs",
        "_core/bounds.py",
        "return value if minimum is None else larger(value, minimum)",
        "return value",
        "tests/core/test_edge_cases.py::test_a_schedule_may_reach_zero_and_overshoot",
    ),
    Mutant(
        "weak types are lost",
        "_core/dtypes.py",
        'if not getattr(like, "weak_type", False) or x.weak_type:',
        "if like is not None:",
        "tests/contract/test_types.py::test_weak_types_are_kept",
    ),
    Mutant(
        "half of the slack",
        "_core/rescale.py",
        "_SLACK = 2.0**-23 + 2 * NORM_ERROR",
        "_SLACK = 2.0**-25",
        "tests/core/test_bounds.py::test_a_clipped_norm_is_inside_its_bound",
    ),
    Mutant(
        "no slack in float64",
        "_core/rescale.py",
        "_SLACK_FLOAT64 = 2.0**-50",
        "_SLACK_FLOAT64 = 0.0",
        "tests/weights/test_norm_limits.py::test_wide_leaves_grow_and_shrink_far",
    ),
    Mutant(
        "subnormal numbers rounded to the nearest",
        "_core/rounding.py",
        "whole = jnp.trunc(x / unit) if toward_zero else jnp.round(x / unit)",
        "whole = jnp.round(x / unit)",
        "tests/core/test_bounds.py::test_units_with_bounds_of_their_own_are_inside_them",
    ),
    Mutant(
        "sums of float64 powers are not scaled",
        "_core/norms.py",
        "unit = _nonzero(largest_of(xs, axes))",
        "unit = jnp.ones(())",
        "tests/core/test_precision.py::test_powers_beyond_the_range_of_float64_are_scaled",
    ),
    Mutant(
        "squares in the dtype of the leaf",
        "_core/platforms.py",
        "return wide(x) * wide(x)",
        "return wide(x * x)",
        "tests/core/test_precision.py::test_norms_neither_overflow_nor_underflow",
    ),
    Mutant(
        "the first slices of a large leaf are left out",
        "_core/xla_cpu.py",
        "for start in range(0, rounds * _SLICES * width, _SLICES * width):",
        "for start in range(_SLICES * width, rounds * _SLICES * width, _SLICES * width):",
        "tests/core/test_large_leaves.py::test_large_leaves_are_summed_right",
    ),
    Mutant(
        "a derivative that divides by a norm of 0",
        "_core/norms.py",
        "return jnp.where((x > 0) & (x < jnp.inf), x, 1.0)",
        "return jnp.where(x < jnp.inf, x, 1.0)",
        "tests/core/test_derivatives.py::test_derivatives_are_finite_at_zero",
    ),
    Mutant(
        "a schedule that is NaN is 0",
        "_core/bounds.py",
        "return value if minimum is None else larger(value, minimum)",
        "return value if minimum is None else jnp.where(value > minimum, value, minimum)",
        "tests/contract/test_bounds.py::test_zero_and_infinite_and_negative_bounds_work",
    ),
    Mutant(
        "the slack forgets what norms may be off by",
        "_core/rescale.py",
        "_SLACK = 2.0**-23 + 2 * NORM_ERROR",
        "_SLACK = 2.0**-23",
        "tests/core/test_tpu_arithmetic.py::test_the_slack_covers_what_a_norm_may_be_off_by",
    ),
    Mutant(
        "the power of two beside the factor is not multiplied by",
        "_core/rescale.py",
        "entries * power * factor",
        "entries * factor",
        "tests/core/test_precision.py::test_norms_neither_overflow_nor_underflow "
        "tests/core/test_derivatives.py::test_derivatives_far_outside_the_bound",
    ),
    Mutant(
        "what a sum of pairs rounds off is lost",
        "_core/pairs.py",
        "lost = jnp.minimum(a[0], b[0]) - (total - jnp.maximum(a[0], b[0]))",
        "lost = jnp.zeros_like(total)",
        "tests/core/test_pairs.py::test_hard_sums_are_as_exact_as_norms_have_to_be",
    ),
    Mutant(
        "heads of squares are a bit too long",
        "_core/pairs.py",
        "head = lax.reduce_precision(x, 8, 11)",
        "head = lax.reduce_precision(x, 8, 12)",
        "tests/core/test_pairs.py::test_every_square_is_exact_to_two_roundings_of_its_rest",
    ),
    Mutant(
        "on a TPU, every norm is taken to be in range",
        "_core/platforms.py",
        "return jnp.where((total >= _LEAST) & (total < _MOST), jnp.sqrt(total), larger)",
        "return jnp.sqrt(total)",
        "tests/core/test_tpu_arithmetic.py::test_norms_on_a_tpu",
    ),
    Mutant(
        "on a TPU, no norm is taken to be in range",
        "_core/platforms.py",
        "return jnp.where((total >= _LEAST) & (total < _MOST), jnp.sqrt(total), larger)",
        "return larger",
        "tests/core/test_tpu_arithmetic.py::test_norms_on_a_tpu",
    ),
    Mutant(
        "on a TPU, large entries are scaled as small ones",
        "_core/platforms.py",
        "instead = jnp.where(small < jnp.inf, below, above)",
        "instead = below",
        "tests/core/test_tpu_arithmetic.py::test_norms_on_a_tpu",
    ),
    Mutant(
        "on a TPU, a plain norm is not made larger",
        "_core/platforms.py",
        "wide(instead) * (1 + _PLAIN_ERROR)",
        "wide(instead)",
        "tests/core/test_tpu_arithmetic.py::test_norms_on_a_tpu",
    ),
    Mutant(
        "on a GPU, all entries are small",
        "_core/platforms.py",
        "(2.0**-40, 1.0), (2.0**23, 2.0**-65)",
        "(2.0**126, 1.0), (2.0**127, 2.0**-65)",
        "tests/core/test_tpu_arithmetic.py::test_norms_on_a_gpu",
    ),
    Mutant(
        "on a GPU, no entries are small",
        "_core/platforms.py",
        "_SCALES = ((0.0, 2.0**80), (2.0**-40, 1.0)",
        "_SCALES = ((0.0, 2.0**80), (0.0, 1.0)",
        "tests/core/test_tpu_arithmetic.py::test_norms_on_a_gpu",
    ),
    Mutant(
        "on a GPU, an infinite norm is NaN",
        "_core/platforms.py",
        "return jnp.where(largest < jnp.inf, total, wide(largest))",
        "return total",
        "tests/core/test_tpu_arithmetic.py::test_what_is_not_finite_shows_in_a_norm",
    ),
)
