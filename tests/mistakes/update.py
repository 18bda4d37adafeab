"""Calls of `update` with arguments swapped or missing, states of others, and trees of another structure."""

from __future__ import annotations

from tests.mistakes.row import Row, kind, value

AGC = "agc = adaptive_grad_clip(0.01); "
LINK = "link = max_norm(3.0); "
SKIP = "skip = skip_nonfinite(sgd); "
SPIKES = "skip = skip_spikes(sgd); "
FEW = "{'kernel': x, 'bias': x}"  # a kernel of shape (3,)

STATES: tuple[Row, ...] = (
    kind("clip.update(grads)", "state"),
    kind("clip.update(clip.init(params), grads)", "state", "update(grads, state, params)"),
    kind("clip.update(grads, params)", "state", "init"),
    kind("clip.update(grads, clip)", "state", "init"),
    kind("clip.update(grads, clip.init)", "state", "init"),
    kind("clip.update(grads, tx.init(params))", "state", "ClipByGlobalNormState", "tuple"),
    kind("clip.update(grads, autoclip().init(params))", "state", "ClipByGlobalNormState", "AutoclipState"),
    kind("autoclip().update(grads, clip.init(params))", "state", "AutoclipState", "ClipByGlobalNormState"),
    kind("autoclip().update(grads, None)", "state", "AutoclipState", "None", "init"),
    kind("autoclip().update(grads, {})", "state", "AutoclipState", "{}", "init"),
    kind("clip.update(grads, {'stats': {'norm': 1.0}})", "state", "ClipByGlobalNormState", "restore"),
    kind("zero_nonfinite().update(grads, {'steps': 1})", "state", "ZeroNonfiniteState", "restore"),
    kind("skip_nonfinite(sgd).update(grads, sgd.init(params), params)", "state", "SkipNonfiniteState"),
    kind(
        "skip_nonfinite(sgd).update(grads, {'inner': ()}, params)", "state", "SkipNonfiniteState", "restore"
    ),
    kind("skip_spikes(sgd).update(grads, {'norms': [1.0]}, params)", "state", "SkipSpikesState", "restore"),
    kind(LINK + "link.update(grads, {'stats': {}}, params)", "state", "MaxNormState", "restore"),
    kind(LINK + "link.update(grads, clip.init(params), params)", "state", "MaxNormState"),
    kind(LINK + "link.update(link.init(params), grads, params)", "state", "update(grads, state, params)"),
    kind(AGC + "agc.update(grads, {'stats': {}}, params)", "state", "AdaptiveGradClipState", "restore"),
    kind("tangent_cone(3.0).update(grads, clip.init(params), params)", "state", "TangentConeState"),
    value(
        "skip_spikes(sgd, window=64).update(grads, skip_spikes(sgd, window=128).init(params), params)",
        *("state", "window", "64", "128"),
    ),
    value(
        "autoclip(window=10).update(grads, autoclip(window=100).init(params))",
        *("state", "window", "100", "10"),
    ),
    value("adagc().update(grads, adagc().init(layers))", "adagc", "96", "init"),
    value("adagc().update(grads, adagc().init([x]))", "adagc", "1", "init"),
    value(
        "tx = adagc(axes={'kernel': 0}); tx.update({'kernel': jnp.ones((4, 5))}, tx.init(params))",
        *("adagc", "'kernel'", "(1, 5)", "(1, 3)", "init"),
    ),
    value(
        "normalize_by_moving_norm().update(grads, normalize_by_moving_norm().init([x]))",
        *("normalize_by_moving_norm", "1", "init"),
    ),
    kind("adagc(axes=0).update(grads, clip_by_moving_max().init(params))", "state", "AdagcState"),
)

# Parameters that are missing or others, gradients that are none.
TREES: tuple[Row, ...] = (
    value(LINK + "link.update(grads, link.init(params))", "max_norm", "params", "(grads, state, params)"),
    value(AGC + "agc.update(grads, agc.init(params))", "adaptive_grad_clip", "params"),
    value("cone = tangent_cone(3.0); cone.update(grads, cone.init(params))", "tangent_cone", "params"),
    value("space = tangent_space(); space.update(grads, space.init(params))", "tangent_space", "params"),
    value("ball = hyperball(1e-2); ball.update(grads, ball.init(params))", "hyperball", "params"),
    value("cap = spectral_cap(1.0); cap.update(grads, cap.init(params))", "spectral_cap", "params"),
    value("tx = bounded(sgd, project=max_norm(3.0)); tx.update(grads, tx.init(params))", "params"),
    value(LINK + "link.update(grads, link.init(params), [x])", "updates", "params"),
    value(LINK + "link.update(grads, link.init(params), {'params': params})", "updates", "'params/bias'"),
    value(LINK + "link.update((1.0, grads), link.init(params), params)", "updates", "params"),
    value(LINK + "link.update(grads['kernel'], link.init(params), params)", "updates", "params"),
    value(LINK + "link.update({'kernel': grads['kernel']}, link.init(params), params)", "params", "'bias'"),
    value(LINK + f"link.update({FEW}, link.init(params), params)", "'kernel'", "(3,)", "(4, 3)"),
    value(AGC + "agc.update(grads, agc.init(params), [x])", "updates", "params"),
    value(AGC + "agc.update(grads, agc.init(params), {'params': params})", "updates", "'params/bias'"),
    value(AGC + f"agc.update({FEW}, agc.init(params), params)", "'kernel'", "(3,)", "(4, 3)"),
    value("cone = tangent_cone(3.0); cone.update(grads, cone.init(params), [x])", "updates", "params"),
    value(
        f"cone = tangent_cone(3.0); cone.update({FEW}, cone.init(params), params)",
        *("'kernel'", "(3,)", "(4, 3)"),
    ),
    value(
        f"tx = bounded(sgd, clip=clip, project=max_norm(3.0)); tx.update({FEW}, tx.init(params), params)",
        *("'kernel'", "(3,)", "(4, 3)"),
    ),
    value("tx = chain(sgd, non_negative()); tx.update([x], tx.init(params), params)", "updates", "params"),
    kind("clip.update('grads', None)", "str", "array"),
    kind("clip.update({'kernel': 'ones'}, None)", "'kernel'", "str", "array"),
    kind("clip.update({'kernel': jnp.ones}, None)", "'kernel'", "array"),
    kind("functional.global_norm({'kernel': 'ones'})", "'kernel'", "str", "array"),
    kind("functional.clip_by_global_norm({'kernel': jnp.ones}, 1.0)", "'kernel'", "array"),
    kind("functional.clip_by_global_norm(1.0, grads)", "max_norm", "number"),
    value(SKIP + "skip.update(grads, skip.init(params), params, loss=x)", "loss", "(3,)", "mean"),
    kind(SKIP + "skip.update(grads, skip.init(params), params, loss=True)", "loss", "True", "number"),
    kind(SKIP + "skip.update(grads, skip.init(params), params, loss=[1.0])", "loss", "[1.0]", "number"),
    kind(SPIKES + "skip.update(grads, skip.init(params), params, loss=sum)", "loss", "sum", "number"),
    kind(SPIKES + "skip.update(grads, skip.init(params), params, 1.0)", "positional"),
    value("q = qk_clip(); q.update(heads, q.init(heads), heads)", "qk_clip", "max_logits"),
)
