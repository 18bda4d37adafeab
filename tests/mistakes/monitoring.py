"""Metrics, logs and checks of what has none."""

from __future__ import annotations

from tests.mistakes.row import Row, kind, value

TWO = "{'clip_by_global_norm/norm': 1.0, 'zclip/norm': 2.0}"

ROWS: tuple[Row, ...] = (
    value("metrics(adam.init(params))", "opt_state", "no state"),
    value("metrics(tx)", "opt_state", "tx.init"),
    kind("verify(params, clip)", "projection", "gradient transformation"),
    kind("verify(params, optax.chain(adam, max_norm(3.0)))", "projection", "clipjax.chain"),
    kind("verify(max_norm(3.0), params)", "params", "projection"),
    kind("jax.jit(lambda p: verify(p, max_norm(3.0)))(params)", "params", "outside jit"),
    kind("log.append(clip.init(params))", "norm", "metrics"),
    value("log.append(jnp.ones(3))", "(3,)", "extend"),
    value("log.quantiles(50)", "50", "1"),
    kind("log.replay(autoclip)", "transformation", "autoclip", "call it"),
    value("metrics(params)", "opt_state", "no state"),
    value("metrics({})", "opt_state", "no state"),
    value("metrics(None)", "opt_state", "None"),
    value("metrics(clip)", "opt_state", "tx.init"),
    value("metrics(max_norm(3.0))", "opt_state", "tx.init"),
    kind("verify(params)", "projection"),
    kind("verify(params, 3.0)", "projection", "3.0"),
    kind("verify(params, max_norm)", "max_norm(…)"),
    value("verify(params, chain(clip, adam))", "projection", "none"),
    value("verify(params, [])", "projection"),
    value("verify(params, max_norm(schedule))", "radius", "schedule", "step"),
    kind("NormLog(3)", "name", "3"),
    value("NormLog(capacity=0)", "capacity", "0", "at least 1"),
    kind("NormLog(capacity='1000')", "capacity", "'1000'"),
    value(f"log.append({TWO})", "name", "clip_by_global_norm", "zclip"),
    value("log.append({})", "name", "norm"),
    value(f"NormLog('autoclip').append({TWO})", "name", "'autoclip'", "clip_by_global_norm"),
    value("log.append(grads)", "metrics", "norm"),
    kind("log.append('1.0')", "norm", "'1.0'"),
    kind("log.append(None)", "norm", "None"),
    kind("jax.jit(log.append)(1.0)", "norm", "outside"),
    value("log.extend(1.0)", "norms", "()", "append"),
    value("log.clip_rate(float('nan'))", "threshold", "NaN"),
    value("NormLog().suggest()", "norm"),
    kind("log.replay('autoclip')", "transformation", "'autoclip'"),
    value("log.replay(adam)", "transformation", "threshold"),
    value("log.replay(clip_by_global_norm(1.0))", "transformation", "threshold"),
    kind("log.suggest([autoclip(25.0)])", "rules", "names", "list"),
    value("NormLog.load(clipjax.__file__)", "path", "NormLog.save"),
    value("raise_if_skipping(adam.init(params), 10)", "opt_state", "no state", "skip_nonfinite"),
    value("raise_if_skipping(clip.init(params), 10)", "opt_state", "no state", "skip_nonfinite"),
    value("raise_if_skipping(skip_nonfinite(sgd).init(params), 0)", "max_consecutive", "0"),
    kind("raise_if_skipping(skip_nonfinite(sgd).init(params))", "raise_if_skipping", "max_consecutive"),
    kind("raise_if_skipping(10, skip_nonfinite(sgd).init(params))", "max_consecutive", "int"),
    kind(
        "jax.jit(lambda s: raise_if_skipping(s, 10))(skip_nonfinite(sgd).init(params))",
        *("opt_state", "outside jit"),
    ),
)
