"""clipjax: bounds for the gradients and the weights of JAX training."""

from clipjax import functional
from clipjax._axes import SKIP, fan_in
from clipjax._bounded import bounded, skip_nonfinite
from clipjax._clipping import (
    clip_by_global_norm,
    clip_by_norm,
    clip_by_rms,
    clip_by_value,
    zero_nonfinite,
)
from clipjax._metrics import metrics
from clipjax._projections import Projection, max_norm, project

__version__ = "0.1.0"

__all__ = [
    "SKIP",
    "Projection",
    "bounded",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_rms",
    "clip_by_value",
    "fan_in",
    "functional",
    "max_norm",
    "metrics",
    "project",
    "skip_nonfinite",
    "zero_nonfinite",
]
