"""Mesh axes and specs that do not fit: here on one device."""

from __future__ import annotations

from tests.mistakes.row import Row, kind, value

VMAP = "jax.vmap(lambda g: {}, axis_name='batch')(jnp.ones((2, 3)))"
SHARD = (
    "jax.shard_map(lambda p: {}, mesh=mesh, in_specs=P('data'), out_specs=P('data'), check_vma={})"
    "({{'kernel': jnp.ones((4, 3))}})"
)
CLIPPED = "clip_by_global_norm(1.0, axis_name={}).update(g, None)[0]"
PROJECTED = "max_norm(3.0, axis_name={})(p)"
OF_SPECS = "max_norm(3.0, specs={})(p)"

ROWS: tuple[Row, ...] = (
    value("clip_by_global_norm(1.0, axis_name='data').update(grads, None)", "axis_name", "'data'"),
    value("max_norm(3.0, axis_name='data')(params)", "axis_name", "'data'"),
    value("zero_nonfinite(axis_name='data').update(grads, zero_nonfinite().init(params))", "axis_name"),
    value("jax.jit(max_norm(3.0, axis_name='data').__call__)(params)", "axis_name", "'data'"),
    value(VMAP.format(CLIPPED.format("'batches'")), "axis_name", "'batches'", "vmap"),
    value(SHARD.format(PROJECTED.format("'dat'"), False), "axis_name", "'dat'", "shard_map"),
    value(SHARD.format(PROJECTED.format("('data', 'model')"), False), "axis_name", "'model'", "shard_map"),
    kind("clip_by_global_norm(1.0, axis_name=0)", "axis_name", "0", "name"),
    kind("max_norm(3.0, axis_name=mesh)", "axis_name", "Mesh", "name"),
    value(SHARD.format("max_norm(3.0)(p)", True), "specs", "'kernel'", "'data'"),
    value(SHARD.format(OF_SPECS.format("P('model')"), True), "specs", "'model'", "mesh"),
    value(SHARD.format(OF_SPECS.format("P(None, None, 'data')"), True), "specs", "'kernel'", "(4, 3)"),
    value(SHARD.format(OF_SPECS.format("{'weight': P('data')}"), True), "specs", "weight", "kernel"),
    value(SHARD.format(OF_SPECS.format("[P('data')]"), True), "specs"),
    kind(SHARD.format(OF_SPECS.format("'data'"), True), "specs", "'data'", "PartitionSpec"),
    kind(SHARD.format(OF_SPECS.format("{'kernel': 'data'}"), True), "specs", "'data'", "PartitionSpec"),
    value("max_norm(3.0, specs={'kernel': P('data'), 'bias': P()})(params)", "specs", "'data'"),
    kind("clip_by_norm(1.0, axes=0, specs=3).update(grads, None)", "specs", "3", "PartitionSpec"),
    kind("clip_by_global_norm(1.0, axis_name={'kernel': 0})", "axis_name['kernel']", "0", "name"),
    kind("clip_by_global_norm(1.0, axis_name={0: 'data'})", "axis_name", "0", "pattern"),
    value(
        SHARD.format(CLIPPED.format("{'kernels': 'data'}").replace("(g,", "(p,"), False),
        "axis_name",
        "'kernels'",
        "kernel",
    ),
    value(
        SHARD.format(CLIPPED.format("{'kernel': 'model'}").replace("(g,", "(p,"), False),
        "axis_name",
        "'model'",
        "shard_map",
    ),
)
