"""Arguments that have other names in other libraries, or are misspelled, missing or misplaced."""

from __future__ import annotations

from tests.mistakes.row import Row, kind

# A tree, as to TensorFlow's and torch's functions.
TREES: tuple[Row, ...] = (
    kind("clip_by_global_norm(grads, 1.0)", "clip_by_global_norm", "clipjax.functional"),
    kind("clip_by_global_norm(grads)", "clip_by_global_norm", "clipjax.functional"),
    kind("clip_by_norm(grads, 1.0)", "clip_by_norm", "clipjax.functional"),
    kind("clip_by_norm(grads['kernel'], 1.0, axes=0)", "clip_by_norm", "clipjax.functional"),
    kind("clip_by_value(grads, -1.0, 1.0)", "clip_by_value", "clipjax.functional"),
    kind("clip_by_value(grads, 1.0)", "clip_by_value", "clipjax.functional"),
    kind("clip_by_global_norm(max_norm=layers)", "max_norm", "layer_0", "number"),
    kind("max_norm(params, 3.0)", "max_norm(…)(params)"),
    kind("max_norm(params)", "max_norm(…)(params)"),
    kind("unit_norm(params)", "unit_norm(…)(params)"),
    kind("non_negative(params)", "non_negative(…)(params)"),
    kind("adaptive_grad_clip(params, grads)", "adaptive_grad_clip", "gradient transformation"),
    kind("zero_nonfinite(grads)", "zero_nonfinite", "gradient transformation"),
)

NAMES: tuple[Row, ...] = (
    kind("clip_by_global_norm(clip_norm=1.0)", "clip_norm", "but 'max_norm'"),
    kind("clip_by_global_norm(max_grad_norm=1.0)", "max_grad_norm", "but 'max_norm'"),
    kind("clip_by_global_norm(global_clipnorm=1.0)", "global_clipnorm", "but 'max_norm'"),
    kind("clip_by_global_norm(1.0, norm_type=1)", "norm_type", "but 'ord'"),
    kind("clip_by_global_norm(1.0, p=1)", "p=", "but 'ord'"),
    kind("clip_by_global_norm(1.0, error_if_nonfinite=True)", "no argument error_if_nonfinite=True"),
    kind("clip_by_norm(clipnorm=1.0)", "clipnorm", "but 'max_norm'"),
    kind("clip_by_norm(1.0, axis=0)", "axis=", "but 'axes'"),
    kind("clip_by_norm(1.0, dim=0)", "dim=", "but 'axes'"),
    kind("clip_by_value(clip_value=1.0)", "clip_value", "but 'bound'"),
    kind("clip_by_value(clipvalue=1.0)", "clipvalue", "but 'bound'"),
    kind("clip_by_value(clip_value_min=-1.0, clip_value_max=1.0)", "clip_value_min", "but 'low'", "high"),
    kind("clip_by_value(min=-1.0, max=1.0)", "min=", "but 'low'", "high"),
    kind("clip_by_rms(clip_threshold=1.0)", "clip_threshold", "but 'threshold'"),
    kind("adaptive_grad_clip(clip_factor=0.01)", "clip_factor", "clipping"),
    kind("autoclip(clip_percentile=10.0)", "clip_percentile", "but 'percentile'"),
    kind("zclip(z_thresh=2.5, alpha=0.97)", "z_thresh", "but 'z_threshold'"),
    kind("skip_nonfinite(adam, max_consecutive_errors=5)", "max_consecutive_errors", "but 'max_consecutive'"),
    kind("max_norm(max_value=3.0)", "max_value", "but 'radius'"),
    kind("max_norm(3.0, axis=0)", "axis=", "but 'axes'"),
    kind("max_norm(threshold=3.0)", "threshold", "but 'radius'"),
    kind("min_max_norm(min_value=0.5, max_value=2.0)", "min_value", "but 'low'", "high"),
    kind("unit_norm(axis=0)", "axis=", "but 'axes'"),
    kind("box(lower=0.0, upper=1.0)", "lower", "but 'low'", "high"),
    kind("non_negative(mask=lambda path, leaf: True)", "mask", "but 'where'"),
    kind("spectral_cap(max_norm=1.0)", "max_norm", "but 'bound'"),
    kind("bounded(adam, clipping=clip)", "clipping", "but 'clip'"),
    kind("bounded(adam, projection=max_norm(3.0))", "projection", "but 'project'"),
    kind("bounded(adam, constraint=max_norm(3.0))", "constraint", "but 'project'"),
    kind("functional.clip_by_norm(grads, 1.0, axis=0)", "axis=", "but 'axes'"),
    kind("functional.clip_by_norm(grads, clip_norm=1.0)", "clip_norm", "but 'max_norm'"),
    kind("functional.clip_by_global_norm(grads, 1.0, use_norm=5.0)", "use_norm", "but 'norm'"),
    kind("functional.global_norm(grads, norm_type=1)", "norm_type", "but 'ord'"),
    kind("functional.unitwise_norms(grads, axis=0)", "axis=", "but 'axes'"),
    kind("clip_by_global_norm(maxnorm=1.0)", "maxnorm", "but 'max_norm'"),
    kind("max_norm(raduis=3.0)", "raduis", "but 'radius'"),
    kind("max_norm(3.0, axs=0)", "axs", "but 'axes'"),
)

# Missing, or by place where a name is needed.
PLACES: tuple[Row, ...] = (
    kind("clip_by_global_norm()", "clip_by_global_norm", "max_norm"),
    kind("max_norm()", "max_norm", "radius"),
    kind("max_norm(axes=0)", "max_norm", "radius"),
    kind("min_max_norm(0.5)", "min_max_norm", "high"),
    kind("clip_by_global_norm(1.0, 2)", "ord="),
    kind("clip_by_norm(1.0, 0)", "axes="),
    kind("max_norm(3.0, 0)", "axes="),
    kind("non_negative('bias')", "where="),
    kind("unit_norm(2.0)", "unit_norm", "axes="),
    kind("bounded(adam, clip)", "clip="),
    kind("skip_spikes(z_threshold=6.0)", "skip_spikes", "optimizer"),
    kind("clip_by_value(low=0.0)", "low=0.0", "low and high"),
    kind("clip_by_value(high=1.0)", "high", "low"),
)
