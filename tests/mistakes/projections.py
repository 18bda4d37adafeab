"""Projections called on what they cannot bound."""

from __future__ import annotations

from tests.mistakes.row import Row, kind, value

ROWS: tuple[Row, ...] = (
    value("max_norm(3.0)([x, x])", "axes", "nothing", "(3,)"),
    value("max_norm(3.0)({'bias': x, 'scale': x})", "axes", "nothing", "bias", "(3,)"),
    value("unit_norm()({'bias': x})", "axes", "nothing", "bias", "(3,)"),
    value("max_norm(3.0, axes={'bias': fan_in})(params)", "axes", "nothing", "bias", "(3,)"),
    value("non_negative(where=lambda path, leaf: False)(params)", "where", "nothing", "bias"),
    value("chain(sgd, max_norm(3.0)).init({'bias': x})", "axes", "nothing", "bias"),
    value("spectral_cap(1.0)({'bias': x})", "flatten", "nothing", "bias"),
    value("verify({'bias': x}, max_norm(3.0))", "axes", "nothing", "bias"),
    value("non_negative()(variables)", "batch_stats", "params"),
    value("box(0.0, 1.0)(variables)", "batch_stats", "params"),
    value("max_norm(schedule)(params)", "radius", "schedule", "step"),
    kind("max_norm(3.0)()", "params"),
    kind("max_norm(3.0)('params.npy')", "str", "array"),
    kind("max_norm(3.0)({'kernel': 'params.npy'})", "'kernel'", "str", "array"),
    kind("max_norm(3.0)(adam)", "function", "array"),
    kind("box(-1.0, 1.0)({'z': 1j * x})", "'z'", "complex"),
    value("box({'kernels': -1.0}, 1.0)(params)", "low", "'kernels'", "bias"),
    value("box({'kernel': 2.0}, {'kernel': 1.0})", "low", "'kernel'", "2.0", "1.0"),
    kind("box({'dense': {'kernel': -1.0}}, 1.0)", "low['dense']", "'dense/kernel'"),
    kind("box(lambda *args: -1.0, 1.0)", "low", "(step)", "(path, leaf)"),
    value("hyperball(1e-2, axes={'kernels': None}).init(params)", "axes", "'kernels'", "kernel"),
    kind("project(3)", "function", "3"),
    kind("project(None)", "function", "None"),
    kind("project(max_norm)", "function", "max_norm", "call it"),
    kind("project(clip)", "function", "gradient transformation"),
    kind("project(optax.projections.projection_non_negative(params))", "project(…)(params)", "bias"),
    kind("project(lambda params: None)(params)", "function", "structure", "None"),
    kind("project(lambda params: params['kernel'])(params)", "function", "structure"),
    kind("project(lambda w: w[:2])(x)", "function", "float32[2]", "float32[3]"),
    kind("project(lambda w: w > 0)(x)", "function", "bool[3]", "float32[3]"),
    value("qk_clip()(params)", "max_logits"),
    value("qk_clip()(params, max_logits=jnp.ones(2))", "nothing", "query", "key", "bias"),
)
