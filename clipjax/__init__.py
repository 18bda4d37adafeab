"""clipjax: bounds for the gradients and the weights of JAX training."""

import importlib
from typing import TYPE_CHECKING, Any

from clipjax import functional
from clipjax._core.axes import SKIP, Axes, fan_in
from clipjax._core.bounds import Bound
from clipjax.backward.layers import (
    clip_gradient_by_global_norm,
    clip_gradient_by_norm,
    clip_gradient_by_value,
    replace_gradient,
    scale_gradient,
)
from clipjax.composition import bounded, chain
from clipjax.gradients.adagc import adagc
from clipjax.gradients.fixed import (
    clip_by_global_norm,
    clip_by_norm,
    clip_by_rms,
    clip_by_value,
)
from clipjax.gradients.groups import clip_by_group_norm
from clipjax.gradients.moving import clip_by_moving_max, normalize_by_moving_norm
from clipjax.gradients.nonfinite import skip_nonfinite, zero_nonfinite
from clipjax.gradients.outliers import clip_by_lognormal, zclip
from clipjax.gradients.quantiles import autoclip, clip_by_quantile
from clipjax.gradients.relative import adaptive_grad_clip, fan_in_or_whole
from clipjax.gradients.spectral import clip_by_spectral_norm
from clipjax.gradients.spikes import skip_spikes
from clipjax.gradients.tangent_cone import tangent_cone
from clipjax.gradients.tangent_space import tangent_space
from clipjax.monitoring.metrics import metrics
from clipjax.monitoring.norm_log import NormLog
from clipjax.monitoring.raising import raise_if_skipping
from clipjax.monitoring.records import record_norms
from clipjax.monitoring.replay import Replay, Suggestion
from clipjax.weights.constraints import max_norm, min_max_norm, unit_norm
from clipjax.weights.entries import box, non_negative
from clipjax.weights.hyperball import hyperball
from clipjax.weights.projections import Projection, project
from clipjax.weights.qk_clip import qk_clip
from clipjax.weights.spectral import spectral_cap
from clipjax.weights.verify import Violation, verify

__version__ = "0.1.0"

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import `clipjax.flax`, `.equinox` and `.plots` on first use, since they need more packages."""
        if name in ("flax", "equinox", "plots"):
            return importlib.import_module(f"clipjax.{name}")
        raise AttributeError(f"module 'clipjax' has no attribute {name!r}")


__all__ = [
    "SKIP",
    "Axes",
    "Bound",
    "NormLog",
    "Projection",
    "Replay",
    "Suggestion",
    "Violation",
    "adagc",
    "adaptive_grad_clip",
    "autoclip",
    "bounded",
    "box",
    "chain",
    "clip_by_global_norm",
    "clip_by_group_norm",
    "clip_by_lognormal",
    "clip_by_moving_max",
    "clip_by_norm",
    "clip_by_quantile",
    "clip_by_rms",
    "clip_by_spectral_norm",
    "clip_by_value",
    "clip_gradient_by_global_norm",
    "clip_gradient_by_norm",
    "clip_gradient_by_value",
    "fan_in",
    "fan_in_or_whole",
    "functional",
    "hyperball",
    "max_norm",
    "metrics",
    "min_max_norm",
    "non_negative",
    "normalize_by_moving_norm",
    "project",
    "qk_clip",
    "raise_if_skipping",
    "record_norms",
    "replace_gradient",
    "scale_gradient",
    "skip_nonfinite",
    "skip_spikes",
    "spectral_cap",
    "tangent_cone",
    "tangent_space",
    "unit_norm",
    "verify",
    "zclip",
    "zero_nonfinite",
]
