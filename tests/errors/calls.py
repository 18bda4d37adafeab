"""Calls with a wrong argument in the place of $, many with its name: the rows and columns of `table.py`."""

from __future__ import annotations

# Names of bounds, which are at least 0, calls that have one in the place of $, and which forms it has: "scalar" is no
# array, "constant" no schedule, "optional" may be None.
BOUNDS = [
    ("max_norm", "clip_by_global_norm($)", "scalar"), ("max_norm", "clip_by_norm($)", ""),
    ("threshold", "clip_by_rms($)", ""), ("bound", "clip_by_value(bound=$)", "optional"),
    ("max_norms['*']", "clip_by_group_norm({'*': $})", "scalar"), ("clipping", "adaptive_grad_clip($)", ""),
    ("eps", "adaptive_grad_clip(eps=$)", "constant"), ("radius", "tangent_cone($)", ""), ("radius", "max_norm($)", ""),
    ("high", "min_max_norm(0.0, $)", ""), ("low", "min_max_norm($, 9.0)", ""),
    ("rate", "min_max_norm(0.0, 1.0, rate=$)", ""), ("bound", "spectral_cap($)", ""), ("threshold", "qk_clip($)", ""),
    ("max_norm", "functional.clip_by_norm(x, $)", "constant"),
    ("max_norm", "functional.clip_by_global_norm(x, $)", "scalar constant"),
    ("max_norm", "clip_gradient_by_norm(x, $)", "constant"),
    ("max_norm", "clip_gradient_by_global_norm(x, $)", "scalar constant"), ("relative_bound", "adagc($)", "scalar"),
    ("max_norm", "adagc(max_norm=$)", "scalar"), ("z_threshold", "zclip($)", "scalar"),
    ("clip_factor", "zclip(clip_factor=$)", "constant"), ("eps", "zclip(eps=$)", "constant"),
    ("max_norm", "zclip(max_norm=$)", "scalar"), ("z_threshold", "clip_by_lognormal($)", "scalar"),
    ("eps", "clip_by_lognormal(eps=$)", "constant"), ("max_norm", "clip_by_lognormal(max_norm=$)", "scalar"),
    ("percentile", "autoclip($)", "constant"), ("quantile", "clip_by_quantile($)", "constant"),
    ("learning_rate", "clip_by_quantile(learning_rate=$)", "constant"),
    ("initial_max_norm", "clip_by_quantile(initial_max_norm=$)", "constant"), ("decay", "zclip(decay=$)", "constant"),
    ("decay", "clip_by_lognormal(decay=$)", "constant"), ("decay", "adagc(decay=$)", "constant"),
    ("z_threshold", "skip_spikes(sgd, $)", "scalar"), ("max_norm", "skip_spikes(sgd, max_norm=$)", "scalar"),
]  # fmt: skip
# Limits of any sign.
LIMITS = [
    ("low", "clip_by_value(low=$, high=1.0)", "optional"), ("high", "clip_by_value(low=-1.0, high=$)", "optional"),
    ("low", "box($, 9.0)", ""), ("high", "box(-9.0, $)", ""), ("low['kernel']", "box({'kernel': $}, 9.0)", ""),
    ("low", "functional.clip_by_value(x, $, 9.0)", "constant"),
    ("high", "clip_gradient_by_value(x, -9.0, $)", "constant"), ("factor", "scale_gradient(x, $)", "constant"),
]  # fmt: skip
# Numbers that infinity would turn into nonsense: those of the adaptive clips.
FINITE = [
    ("eps", "adaptive_grad_clip(eps=$)"), ("decay", "zclip(decay=$)"), ("clip_factor", "zclip(clip_factor=$)"),
    ("eps", "zclip(eps=$)"), ("decay", "clip_by_lognormal(decay=$)"), ("eps", "clip_by_lognormal(eps=$)"),
    ("quantile", "clip_by_quantile($)"),
    ("learning_rate", "clip_by_quantile(learning_rate=$)"), ("percentile", "autoclip($)"),
    ("initial_max_norm", "clip_by_quantile(initial_max_norm=$)"), ("decay", "adagc(decay=$)"),
]  # fmt: skip
COUNTS = [
    ("window", "autoclip(window=$)"), ("warmup_steps", "zclip(warmup_steps=$)"),
    ("warmup_steps", "adagc(warmup_steps=$)"), ("window", "skip_spikes(sgd, window=$)"),
    ("warmup_steps", "skip_spikes(sgd, warmup_steps=$)"), ("max_consecutive", "skip_spikes(sgd, max_consecutive=$)"),
    ("max_consecutive", "skip_nonfinite(sgd, max_consecutive=$)"), ("accumulate", "bounded(adam, accumulate=$)"),
]  # fmt: skip
ORDERS = [
    "clip_by_global_norm(1.0, ord=$)", "clip_by_norm(1.0, ord=$)", "clip_by_group_norm({'*': 1.0}, ord=$)",
    "functional.global_norm(x, ord=$)", "functional.leaf_norms(x, ord=$)", "functional.unitwise_norms(x, 0, ord=$)",
    "functional.clip_by_norm(x, 1.0, ord=$)", "functional.clip_by_global_norm(x, 1.0, ord=$)",
]  # fmt: skip
AXES = [
    "max_norm(3.0, axes=$)(params)", "min_max_norm(0.0, 3.0, axes=$)(params)", "unit_norm(axes=$)(params)",
    "tangent_cone(3.0, axes=$).init(params)", "clip_by_norm(1.0, axes=$).init(params)",
    "clip_by_rms(1.0, axes=$).init(params)", "adaptive_grad_clip(axes=$).init(params)", "adagc(axes=$).init(params)",
    "functional.clip_by_norm(params, 1.0, axes=$)", "functional.unitwise_norms(params, axes=$)",
    "clip_gradient_by_norm(params, 1.0, axes=$)",
]  # fmt: skip
TRANSFORMATIONS = [
    ("optimizer", "bounded($)"), ("clip", "bounded(adam, clip=$)"), ("links[1]", "chain(clip, $)"),
    ("optimizer", "skip_nonfinite($)"), ("optimizer", "skip_spikes($)"),
]  # fmt: skip
WITH_PARAMS = [
    ("max_norm", "max_norm(3.0)"), ("min_max_norm", "min_max_norm(0.0, 3.0)"), ("unit_norm", "unit_norm()"),
    ("non_negative", "non_negative()"), ("box", "box(0.0, 1.0)"), ("spectral_cap", "spectral_cap(1.0)"),
    ("project", "project(lambda w: w)"), ("adaptive_grad_clip", "adaptive_grad_clip()"),
    ("tangent_cone", "tangent_cone(3.0)"), ("record_norms", "record_norms(of='params')"),
]  # fmt: skip
TAKE_A_TREE = [
    "clip.init($)", "clip.update($, None)", "clip_by_value(1.0).update($, None)", "zero_nonfinite().init($)",
    "skip_nonfinite(sgd).init($)", "skip_spikes(sgd).init($)", "bounded(sgd, clip=clip, nonfinite='skip').init($)",
    "autoclip().init($)", "adagc().init($)", "record_norms().init($)", "max_norm(3.0, axes=None)($)",
    "box(0.0, 1.0)($)", "spectral_cap(1.0)($)", "qk_clip().init($)", "project(lambda w: w)($)",
    "violations($, max_norm(3.0, axes=None))", "functional.global_norm($)", "functional.leaf_norms($)",
    "functional.unitwise_norms($, None)", "functional.clip_by_norm($, 1.0)", "functional.clip_by_global_norm($, 1.0)",
    "functional.clip_by_value($, -1.0, 1.0)", "clip_gradient_by_norm($, 1.0)", "clip_gradient_by_global_norm($, 1.0)",
    "clip_gradient_by_value($, -1.0, 1.0)", "scale_gradient($, 2.0)",
]  # fmt: skip
STATES = [
    ("clip_by_global_norm", "clip"), ("clip_by_value", "clip_by_value(1.0)"),
    ("adaptive_grad_clip", "adaptive_grad_clip()"), ("tangent_cone", "tangent_cone(3.0)"),
    ("zero_nonfinite", "zero_nonfinite()"), ("record_norms", "record_norms()"), ("autoclip", "autoclip()"),
    ("clip_by_quantile", "clip_by_quantile()"), ("zclip", "zclip()"), ("clip_by_lognormal", "clip_by_lognormal()"),
    ("adagc", "adagc()"), ("skip_nonfinite", "skip_nonfinite(sgd)"), ("skip_spikes", "skip_spikes(sgd)"),
    ("max_norm", "max_norm(schedule)"),
]  # fmt: skip
NUMBERS = BOUNDS + LIMITS
BY_LEAF = [
    ("threshold", "clip_by_rms($).init(params)"), ("bound", "clip_by_value($).init(params)"),
    ("low", "clip_by_value(low=-$, high=1.0).init(params)"), ("clipping", "adaptive_grad_clip($).init(params)"),
    ("low", "box(-$, 1.0)(params)"), ("high", "box(-1.0, $).init(params)"),
    ("low", "functional.clip_by_value(params, -$, 1.0)"),
    ("max_norm", "functional.clip_by_norm(params, $, axes=0)"), ("factor", "scale_gradient(params, $)"),
    ("max_norm", "clip_gradient_by_norm(params, $, axes=0)"), ("high", "clip_gradient_by_value(params, -1.0, $)"),
]  # fmt: skip
BY_UNIT = [
    ("max_norm", "clip_by_norm($, axes=0).init(params)"), ("radius", "tangent_cone($).init(params)"),
    ("radius", "max_norm($)(params)"), ("high", "min_max_norm(0.5, $)(params)"),
    ("rate", "min_max_norm(0.5, 1.0, rate=$).init(params)"), ("bound", "spectral_cap($)(params)"),
]  # fmt: skip
IN_ORDER = [
    "clip_by_value($)", "min_max_norm($)", "box($)", "functional.clip_by_value(x, $)", "clip_gradient_by_value(x, $)",
]  # fmt: skip
ATTENTION = [
    "max_norm(3.0)(attention)", "unit_norm().init(attention)", "tangent_cone(3.0).init(attention)",
    "chain(adam, min_max_norm(0.0, 3.0)).init(attention)", "spectral_cap(1.0)(attention)",
]  # fmt: skip
PATTERNS = [
    ("max_norms", "clip_by_group_norm({$: 1.0}).init(params)"), ("groups", "record_norms([$]).init(params)"),
    ("low", "box({$: 0.0}, 1.0)(params)"), ("where", "non_negative(where=$)(params)"),
    ("patterns", "optax.masked(clip, matching($)).init(params)"), ("axes", "max_norm(3.0, axes={$: 0})(params)"),
    ("flatten", "spectral_cap(1.0, flatten={$: (0, 1)})(params)"), ("radius", "max_norm({$: 1.0})(params)"),
    ("low", "min_max_norm({$: 1.0}, 2.0)(params)"),
]  # fmt: skip
