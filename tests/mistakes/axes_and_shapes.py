"""Axes, path patterns and bounds that do not fit the tree."""

from __future__ import annotations

from tests.mistakes.row import Row, kind, value

AXES: tuple[Row, ...] = (
    value("clip_by_group_norm({'experts/*': 1.0}).init(params)", "max_norms", "'experts/*'", "kernel"),
    value("clip_by_group_norm({'*': 1.0, 'kernel': 2.0}).init(params)", "'kernel'", "narrower pattern first"),
    value("clip_by_group_norm({'*': 1.0}, stack={'*': 0}).init(params)", "stack", "layers", "'kernel' has 4"),
    kind("max_norm(3.0, axes='kernel')", "axes", "'kernel'"),
    kind("max_norm(3.0, axes=1.0)", "axes", "1.0"),
    kind("max_norm(3.0, axes=True)", "axes", "True"),
    kind("max_norm(3.0, axes=[0, None])", "axes", "[0, None]"),
    kind("max_norm(3.0, axes={0: 1})", "axes", "pattern", "0"),
    kind("max_norm(3.0, axes={'dense': {'kernel': 0}})", "axes", "'dense'", "'dense/kernel'"),
    kind("max_norm(3.0, axes={'kernel': 'fan_in'})", "axes", "'kernel'", "'fan_in'", "clipjax.fan_in"),
    kind("max_norm(3.0, axes=fan_in())", "fan_in", "path"),
    kind("max_norm(3.0, axes=lambda leaf: 0)(params)", "axes", "(path, leaf)"),
    kind("max_norm(3.0, axes=lambda path, leaf: '0')(params)", "axes", "'0'", "'bias'"),
    value("max_norm(3.0, axes=1)(params)", "axes", "1", "'bias'", "(3,)"),
    value("clip_by_norm(1.0, axes=2).update(grads, None)", "axes", "2", "'bias'", "(3,)"),
    value("max_norm(3.0, axes=(0, 0))(params)", "axes", "(0, 0)", "twice"),
    value("max_norm(3.0, axes={'kernel': (0, -2)})(params)", "axes", "twice", "'kernel'"),
    value("max_norm(3.0, axes={'kernal': 0})(params)", "axes", "'kernal'", "kernel", "bias"),
    value("max_norm(3.0, axes={'Dense_0/kernel': 0})(params)", "axes", "'Dense_0/kernel'", "kernel"),
    value("max_norm(3.0, axes={'kernal': 0})(layers)", "axes", "'kernal'", "layer_0/kernel"),
    value("non_negative(where='kernal')(params)", "where", "'kernal'", "kernel"),
    value("non_negative(where=())", "where", "()", "pattern"),
    kind("non_negative(where=1)", "where", "1", "pattern"),
    kind("non_negative(where={'bias': 1})", "where", "{'bias': 1}", "pattern"),
    value("non_negative(where={'bias': True})(params)", "where", "kernel", "structure"),
    value("clip_by_global_norm(1.0, where='kernal').init(params)", "where", "'kernal'", "kernel"),
    value(
        "clip_by_global_norm(1.0, where={'bias': True}).update(grads, None)", "where", "kernel", "structure"
    ),
    kind("clip_by_norm(1.0, mask='kernel')", "mask='kernel'", "'where'"),
    kind("non_negative(where=lambda leaf: True)(params)", "where", "(path, leaf)"),
    kind("non_negative(where=lambda path, leaf: None)(params)", "where", "None", "bool", "'bias'"),
    value("adagc(axes={'kernal': 0}).init(params)", "axes", "'kernal'", "kernel"),
    value("functional.clip_by_norm(grads, 1.0, axes=2)", "axes", "2", "'bias'", "(3,)"),
    value("functional.unitwise_norms(grads, {'kernal': 0})", "axes", "'kernal'", "kernel"),
    # What shares a norm in a leaf of rank 3 or 4 is not told by its shape.
    value("max_norm(3.0)(conv)", "axes", "'kernel'", "(3, 4, 5)", "clipjax.fan_in", "unit_axes"),
    value("max_norm(3.0)(images)", "axes", "'kernel'", "(3, 3, 4, 5)", "clipjax.fan_in", "unit_axes"),
    value("unit_norm()(conv)", "axes", "'kernel'", "(3, 4, 5)", "clipjax.fan_in"),
    value("chain(adam, max_norm(3.0)).init(conv)", "axes", "'kernel'", "(3, 4, 5)", "clipjax.fan_in"),
    value("spectral_cap(1.0)(conv)", "flatten", "'kernel'", "(3, 4, 5)"),
    value("clip_by_spectral_norm(1.0).init(conv)", "flatten", "'kernel'", "(3, 4, 5)"),
    value("clip_by_spectral_norm(1.0).init({'bias': x})", "flatten", "nothing", "bias"),
    value(
        "qk_clip(head_dim=3, parts={'query': [('query', 4), ('query_rope', 2)]})"
        "(heads, max_logits=jnp.ones(2))",
        "parts",
        "head_dim=3",
        "4",
    ),
    value(
        "tangent_cone(3.0).update(conv, tangent_cone(3.0).init(conv), conv)",
        *("axes", "'kernel'", "(3, 4, 5)", "clipjax.fan_in"),
    ),
)

# Bounds of another shape than what they bound.
SHAPES: tuple[Row, ...] = (
    value("max_norm(jnp.ones(5))(params)", "radius", "(5,)", "'kernel'", "(1, 3)"),
    value("unit_norm(axes=0)(params); max_norm(jnp.ones((4, 3)))(params)", "radius", "(4, 3)", "'kernel'"),
    value("min_max_norm(0.5, jnp.ones(5))(params)", "high", "(5,)", "'kernel'"),
    value("box(-jnp.ones(5), 1.0)(params)", "low", "(5,)", "'bias'", "(3,)"),
    value("clip_by_value(jnp.ones(4)).update(grads, None)", "bound", "(4,)", "'bias'", "(3,)"),
    value("clip_by_norm(jnp.ones(5), axes=0).update(grads, None)", "max_norm", "(5,)", "'bias'"),
    value("clip_by_rms(jnp.ones(5)).update(grads, None)", "threshold", "(5,)", "'bias'"),
    value("spectral_cap(jnp.ones(5))(params)", "bound", "(5,)", "'kernel'"),
    value("functional.clip_by_norm(grads, jnp.ones(5), axes=0)", "max_norm", "(5,)", "'bias'"),
    value("functional.clip_by_value(grads, jnp.zeros(5), 1.0)", "low", "(5,)", "'bias'"),
    value("functional.clip_by_global_norm(grads, jnp.ones(3))", "max_norm", "(3,)", "scalar"),
    kind("clip_by_value(-1.0, 1.0).update({'z': 1j * x}, None)", "'z'", "complex", "one bound"),
    kind("functional.clip_by_value({'z': 1j * x}, -1.0, 1.0)", "'z'", "complex"),
)
