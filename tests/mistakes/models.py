"""Models of Flax and Equinox, whole or in part, where arrays are expected."""

from __future__ import annotations

from tests.mistakes.row import Row, kind, value

ROWS: tuple[Row, ...] = (
    kind("unit_axes(params)", "model", "Flax module", "dict"),
    kind("unit_axes(nn.Dense)", "model", "Flax module", "Dense"),
    kind("unit_axes(dense)", "key", "inputs"),
    value("unit_axes(dense, x)", "PRNGKey"),
    value("unit_axes(dense, params)", "PRNGKey"),
    kind("unit_axes(linear, key, x)", "NNX", "no further arguments"),
    kind("unit_axes(nnx.state(linear))", "model", "Flax module"),
    value("unit_axes(own, key, x)", "table", "(3, 2)", "other="),
    value("unit_axes(own, key, x, other={'tabel': 0})", "other", "'tabel'", "table"),
    kind("unit_axes(own, key, x, other={'table': 'rows'})", "other", "'table'", "'rows'"),
    kind("unit_axes(own, key, x, other=0)", "other", "0"),
    kind("max_norm(3.0, axes=unit_axes)(params)", "axes", "unit_axes(model"),
    kind("max_norm(3.0)(dense)", "Dense", "array"),
    value("max_norm(3.0, axes=0)(variables)", "batch_stats", "variables['params']"),
    value("max_norm(3.0)(lin)", "axes", "Linear", "Equinox", "clipjax.equinox.unit_axes"),
    value("unit_norm()(eqx.filter(mlp, eqx.is_array))", "axes", "MLP", "clipjax.equinox.unit_axes"),
    kind("max_norm(3.0, axes=1)(mlp)", "activation", "eqx.filter"),
    kind("non_negative()(mlp)", "activation", "eqx.filter"),
    kind("project(optax.projections.projection_non_negative)(mlp)", "activation", "eqx.filter"),
    kind("functional.global_norm(mlp)", "activation", "eqx.filter"),
    kind("functional.clip_by_global_norm(mlp, 1.0)", "activation", "eqx.filter"),
    kind("clip.update(mlp, None)", "activation", "eqx.filter"),
    kind("clip.init(mlp)", "activation", "eqx.filter"),
    kind("unit_axes(mlp)", "model", "Flax module"),
)
