"""clipjax: bounds for the gradients and the weights of JAX training."""

from clipjax import functional
from clipjax._adagc import adagc
from clipjax._axes import SKIP, fan_in
from clipjax._backward import (
    clip_gradient_by_global_norm,
    clip_gradient_by_norm,
    clip_gradient_by_value,
    replace_gradient,
    scale_gradient,
)
from clipjax._bounded import bounded, skip_nonfinite
from clipjax._chain import chain
from clipjax._clipping import (
    clip_by_global_norm,
    clip_by_norm,
    clip_by_rms,
    clip_by_value,
    zero_nonfinite,
)
from clipjax._constraints import max_norm, min_max_norm, unit_norm
from clipjax._entries import box, non_negative
from clipjax._metrics import metrics
from clipjax._norm_log import NormLog
from clipjax._outliers import clip_by_lognormal, zclip
from clipjax._projections import Projection, project
from clipjax._qk_clip import qk_clip
from clipjax._quantiles import autoclip, clip_by_quantile
from clipjax._relative import adaptive_grad_clip, fan_in_or_whole
from clipjax._spectral import spectral_cap
from clipjax._spikes import skip_spikes
from clipjax._tangent import tangent
from clipjax._verify import verify

__version__ = "0.1.0"

__all__ = [
    "SKIP",
    "NormLog",
    "Projection",
    "adagc",
    "adaptive_grad_clip",
    "autoclip",
    "bounded",
    "box",
    "chain",
    "clip_by_global_norm",
    "clip_by_lognormal",
    "clip_by_norm",
    "clip_by_quantile",
    "clip_by_rms",
    "clip_by_value",
    "clip_gradient_by_global_norm",
    "clip_gradient_by_norm",
    "clip_gradient_by_value",
    "fan_in",
    "fan_in_or_whole",
    "functional",
    "max_norm",
    "metrics",
    "min_max_norm",
    "non_negative",
    "project",
    "qk_clip",
    "replace_gradient",
    "scale_gradient",
    "skip_nonfinite",
    "skip_spikes",
    "spectral_cap",
    "tangent",
    "unit_norm",
    "verify",
    "zclip",
    "zero_nonfinite",
]
