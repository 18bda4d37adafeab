"""What every member is made of.

norms: norms of leaves and trees, over all devices.
rescale: a bound and a norm become a factor, and the factor meets the entries.
paths: leaves with their paths, and the patterns that match these.
axes: which entries of a leaf share a norm.
units: norms of trees and units, compared with bounds and rescaled.
entries: limits of single entries.
bounds: numbers that users give, checked and evaluated at each step.
transformation: with_metrics, and the states that it makes.
"""

from clipjax._core.axes import (
    FAN_IN_OF_MATRICES,
    FAN_IN_OR_ALL,
    SKIP,
    Axes,
    Skip,
    axes_of_leaves,
    check_axes,
    fan_in,
    fan_in_or_all,
    literal_axes,
)
from clipjax._core.bounds import (
    as_schedule,
    broadcastable,
    check_bound,
    check_count,
    check_fits,
    check_number,
    check_order,
    constant,
    is_real,
    not_static,
    short_repr,
)
from clipjax._core.entries import clip_entries, metrics_of_entries
from clipjax._core.norms import (
    check_ord,
    is_float,
    largest,
    mesh_axes,
    nan_unless,
    norm,
    over_devices,
    tree_norm,
    warn_if_local,
    wide,
)
from clipjax._core.paths import (
    Leaf,
    a_few,
    check_patterns,
    first_matches,
    leaves_of,
    matching,
    path_name,
    unboxed,
    with_paths,
)
from clipjax._core.rescale import factor_between, factor_to, margin, rescale, weak_like
from clipjax._core.transformation import (
    MetricsState,
    check_state,
    check_transformation,
    next_state,
    params_for,
    saturating_add,
    with_metrics,
)
from clipjax._core.units import (
    Units,
    clip_tree,
    clip_units,
    entries_per_unit,
    floats_of,
    metrics_of,
    norm_dtype,
    rescale_units,
    smallest,
    units_of,
)
