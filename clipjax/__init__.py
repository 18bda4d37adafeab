"""clipjax clips gradients, constrains weights, and logs what it changed."""

import importlib
from typing import TYPE_CHECKING, Any

from clipjax import functional
from clipjax._adopt import adopt
from clipjax._core.aliases import SKIP
from clipjax._core.door import with_metrics
from clipjax._core.norms import fan_in
from clipjax._matching import matching
from clipjax.backward.clips import (
    clip_gradient_by_global_norm,
    clip_gradient_by_norm,
    clip_gradient_by_value,
)
from clipjax.backward.rules import replace_gradient, scale_gradient
from clipjax.composition import bounded
from clipjax.gradients.adagc import adagc
from clipjax.gradients.clips import (
    clip_by_global_norm,
    clip_by_norm,
    clip_by_rms,
    clip_by_value,
)
from clipjax.gradients.groups import clip_by_group_norm
from clipjax.gradients.nonfinite import skip_nonfinite, zero_nonfinite
from clipjax.gradients.quantiles import autoclip, clip_by_quantile
from clipjax.gradients.relative import adaptive_grad_clip, relative_update
from clipjax.gradients.spikes import skip_spikes
from clipjax.gradients.tangent_cone import tangent_cone
from clipjax.gradients.zclip import clip_by_lognormal, zclip
from clipjax.monitoring.bad_steps import bad_steps
from clipjax.monitoring.history import series, suggest
from clipjax.monitoring.metrics import metrics
from clipjax.monitoring.named import named
from clipjax.monitoring.record_norms import record_norms
from clipjax.monitoring.taps import probe, tap, tapped
from clipjax.monitoring.unless_skipped import unless_skipped
from clipjax.weights.box import box, non_negative
from clipjax.weights.norms import keep_norm, max_norm, min_max_norm, unit_norm
from clipjax.weights.projection import project
from clipjax.weights.qk_clip import qk_clip
from clipjax.weights.spectral import spectral_cap
from clipjax.weights.violations import violations

__version__ = "1.0.0"

__all__ = [
    "SKIP",
    "adagc",
    "adaptive_grad_clip",
    "adopt",
    "autoclip",
    "bad_steps",
    "bounded",
    "box",
    "clip_by_global_norm",
    "clip_by_group_norm",
    "clip_by_lognormal",
    "clip_by_norm",
    "clip_by_quantile",
    "clip_by_rms",
    "clip_by_value",
    "clip_gradient_by_global_norm",
    "clip_gradient_by_norm",
    "clip_gradient_by_value",
    "explain",
    "fan_in",
    "functional",
    "keep_norm",
    "matching",
    "max_norm",
    "metrics",
    "min_max_norm",
    "named",
    "non_negative",
    "probe",
    "project",
    "qk_clip",
    "record_norms",
    "relative_update",
    "replace_gradient",
    "scale_gradient",
    "series",
    "skip_nonfinite",
    "skip_spikes",
    "spectral_cap",
    "suggest",
    "tangent_cone",
    "tap",
    "tapped",
    "unit_norm",
    "unless_skipped",
    "violations",
    "with_metrics",
    "zclip",
    "zero_nonfinite",
]


# Modules that need packages of an extra are imported on first use, and so is `explain`,
# which rests on more of JAX than a step of training does.
_MODULES = ("equinox", "flax", "plots")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


if TYPE_CHECKING:
    from clipjax import equinox as equinox
    from clipjax import flax as flax
    from clipjax import plots as plots
    from clipjax.explaining.explain import explain
else:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name == "explain":
            return importlib.import_module("clipjax.explaining.explain").explain
        if name not in _MODULES:
            raise AttributeError(f"module 'clipjax' has no attribute {name!r}")
        try:
            return importlib.import_module(f"clipjax.{name}")
        except ImportError as error:  # hasattr() takes no other error for a no
            raise AttributeError(str(error)) from error
