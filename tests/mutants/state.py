"""Mutants of what is remembered: counters, metrics, and the statistics of past norms."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "the metric is the norm after clipping",
        "_metrics.py",
        "norm=lax.convert_element_type(report.norm, seen.norm.dtype)",
        "norm=lax.convert_element_type(report.norm * report.scale, seen.norm.dtype)",
        "tests/contract/test_metrics.py::test_metrics_say_what_happened",
    ),
    Mutant(
        "steps that are not finite are not counted as steps",
        "_metrics.py",
        "steps=count(seen.steps, jnp.ones((), bool))",
        "steps=count(seen.steps, finite)",
        "tests/contract/test_metrics.py::test_metrics_say_what_happened",
    ),
    Mutant(
        "steps that are not finite count as clipped",
        "_metrics.py",
        "report.clipped & finite",
        "report.clipped",
        "tests/contract/test_metrics.py::test_metrics_say_what_happened",
    ),
    Mutant(
        "counters wrap around",
        "_metrics.py",
        "return counter + jnp.minimum(lax.convert_element_type(event, np.int32), room)",
        "return counter + lax.convert_element_type(event, np.int32)",
        "tests/contract/test_metrics.py",
    ),
    Mutant(
        "a second state of one kind hides the first",
        "_metrics.py",
        'label = f"{name}_{repeats[name]}" if repeats[name] else name',
        "label = name",
        "tests/contract/test_metrics.py::test_repeated_names_are_numbered",
    ),
    Mutant(
        "counters share a buffer",
        "_clipping.py",
        "return ZeroNonfiniteState(*(jnp.zeros((), jnp.int32) for _ in range(3)))",
        "return ZeroNonfiniteState(*[jnp.zeros((), jnp.int32)] * 3)",
        "tests/contract/test_wrappers.py::test_donated_state_works_again_and_again",
    ),
    Mutant(
        "a good step does not end a row of skipped ones",
        "_bounded.py",
        "skipped_in_a_row=jnp.where(good, 0, count(state.skipped_in_a_row, ~good))",
        "skipped_in_a_row=count(state.skipped_in_a_row, ~good)",
        "tests/contract/test_nonfinite.py::test_skip_nonfinite_freezes_the_inner_state",
    ),
    Mutant(
        "a skipped step moves the inner state",
        "_bounded.py",
        "jnp.zeros(u.shape, u.dtype)), shapes), old",
        "jnp.zeros(u.shape, u.dtype)), shapes), step()[1]",
        "tests/core/test_hostile.py::test_a_skipped_step_changes_neither_the_weights_nor_the_state",
    ),
    Mutant(
        "a norm at the quantile is above it",
        "_quantiles.py",
        "inside = wide(norm <= bound)",
        "inside = wide(norm < bound)",
        "tests/gradients/test_norm_rules.py::test_a_norm_at_the_threshold_of_the_quantile_rule_counts_as_below_it",
    ),
    Mutant(
        "the ring of past norms never turns",
        "_quantiles.py",
        "history = history.at[taken % length]",
        "history = history.at[jnp.minimum(taken, length - 1)]",
        "tests/gradients/test_norm_rules.py::test_it_follows_its_oracle",
    ),
    Mutant(
        "a spike is clipped to the threshold, however far away",
        "_outliers.py",
        "wide(z_threshold) ** 2 * std * width / excess",
        "wide(z_threshold) * std",
        "tests/gradients/test_norm_rules.py::test_it_follows_its_oracle",
    ),
    Mutant(
        "the variance of the warm-up is none of the population",
        "_outliers.py",
        "spread = jnp.where(warming, rate * (1 - rate), rate * (1 - rate) ** 2) * away**2",
        "spread = jnp.where(warming, rate, rate * (1 - rate) ** 2) * away**2",
        "tests/gradients/test_norm_rules.py::test_what_a_warm_up_leaves_is_its_mean_and_standard_deviation",
    ),
    Mutant(
        "the statistics take in a spike as it was",
        "_outliers.py",
        "away = jnp.where(spike, spike_bound, norm) - mean",
        "away = norm - mean",
        "tests/gradients/test_norm_rules.py::test_it_follows_its_oracle",
    ),
    Mutant(
        "the first steps are no plain averages",
        "_outliers.py",
        "old = jnp.minimum(wide(decay), wide(taken) / (wide(taken) + 1))",
        "old = jnp.minimum(wide(decay), wide(taken))",
        "tests/gradients/test_norm_rules.py::test_it_follows_its_oracle",
    ),
    Mutant(
        "one step of warm-up more",
        "_adagc.py",
        "warming, cap, at_step = taken < warmup_steps,",
        "warming, cap, at_step = taken <= warmup_steps,",
        "tests/gradients/test_adagc.py::test_it_follows_its_oracle",
    ),
    Mutant(
        "eps is added to the norm of the weights",
        "_relative.py",
        "jnp.maximum(norm, at_least)",
        "(norm + at_least)",
        "tests/gradients/test_adaptive_grad_clip.py::test_it_follows_its_oracle",
    ),
    Mutant(
        "the settled threshold is that of the first steps",
        "_norm_log.py",
        "np.median(replay.thresholds[-_SETTLED:])",
        "np.median(replay.thresholds[:_SETTLED])",
        "tests/monitoring/test_norm_log_rules.py::test_autoclip_is_suggested_as_the_percentile_of_all",
    ),
    Mutant(
        "norms that are not finite count as steps not clipped",
        "_norm_log.py",
        "np.mean(replay.clipped[np.isfinite(norms)])",
        "np.mean(replay.clipped)",
        "tests/monitoring",
    ),
)
