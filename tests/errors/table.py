"""Wrong calls, by theme: what is written, the exception, and words it has."""

from typing import Any, NamedTuple

from tests.errors import calls as c


class Row(NamedTuple):
    """A wrong call, in the names of `test_errors.py`, and what comes of it."""

    call: str
    error: Any  # the exception, or several of which it is one
    words: tuple[str, ...]  # the argument, the value and the leaf, as far as there are


ANY = (TypeError, ValueError)


def of_type(call: str, *words: str) -> Row:
    return Row(call, TypeError, words)


def of_value(call: str, *words: str) -> Row:
    return Row(call, ValueError, words)


def crossed(calls: list[Any], *wrong: tuple[Any, ...]) -> list[Row]:
    """Return a row for each call and each `(wrong value, exception, *words)`, beside
    the name of the argument.
    """
    return [
        Row(call.replace("$", x), error, (name, *words))
        for name, call, *_ in calls
        for x, error, *words in wrong
    ]


def with_form(form: str, *, have: bool = True) -> list[Any]:
    """Return the calls with a number that has a form, or has not."""
    return [each for each in c.NUMBERS if (form in each[2].split()) == have]


def all_of(name: str, calls: list[str], *wrong: tuple[Any, ...]) -> list[Row]:
    return crossed([(name, call) for call in calls], *wrong)


def each(error: Any, *values: str) -> list[tuple[Any, ...]]:
    return [(x, error, f"got {x}") for x in values]


THEMES = {
    "numbers": [  # Bounds and other numbers.
        *crossed(
            c.NUMBERS,
            *each(TypeError, "True", "'1.0'", "[1.0]", "1j"),
            ("jnp.nan", ValueError, "got nan"),
        ),
        *crossed(with_form("signed", have=False), ("-1.0", ValueError, "-1.0")),
        *crossed(
            with_form("signed", have=False),
            ("jnp.array([1.0, -2.0])", ANY),
        ),
        *crossed(with_form("optional", have=False), *each(TypeError, "None")),
        *crossed(with_form("constant"), ("schedule", TypeError, "a number")),
        *crossed(
            c.COUNTS,
            *each(TypeError, "1.5", "'1'", "True"),
            *each(ValueError, "-1", str(2**31)),
        ),
        *crossed(c.AT_LEAST_1, ("0", ValueError, "at least 1", "got 0")),
        *crossed(c.DECAYS, *each(ValueError, "1.0", "-0.1")),
        *all_of(
            "ord",
            c.ORDERS,
            *each(ValueError, "0.5", "-1", "0"),
            *each(TypeError, "'fro'", "True", "[2]"),
        ),
        *all_of("low=2.0", c.IN_ORDER, ("2.0", ValueError, "high=1.0")),
        of_value("clip_by_norm(1.0, ord=jnp.nan)", "ord", "nan"),
        of_type("clip_by_value()", "one bound", "nothing"),
        of_type("clip_by_global_norm(grads, 1.0)", "functional.clip_by_global_norm"),
        of_value("clip_gradient_by_norm(1.0, x)", "max_norm", "scalar", "(3,)"),
        of_type("clip_by_norm(grads, 1.0)", "functional.clip_by_global_norm(tree, max"),
        of_type("clip_by_value(low=0.0)", "low=0.0", "low and high"),
        of_type("clip_by_norm(1.0, axes={'kernel': 0, 1: 0})", "axes: a mapping must"),
        of_type("max_norm({'layer': params})", "radius['layer']", "kernel"),
        of_type("clip_by_global_norm(10**400)", "max_norm", "1000"),
        of_type("min_max_norm(1.0, 2.0, rate={'kernel': 0.5})", "rate", "0.5"),
        of_value(
            "min_max_norm({'*': 3.0}, 1.0, rate=schedule, axes=0)"
            ".apply(params, step=0)",
            "low=3.0",
            "high=1.0",
            "kernel",
        ),
        of_value(
            "box({'kernel': 2.0, '*': schedule}, 1.0).apply(params, step=0)",
            "low=2.0",
            "high=1.0",
            "kernel",
        ),
        of_value(
            "min_max_norm({'*': 3.0}, {'*': 1.0}, axes=0).apply(params)",
            "low=3.0",
            "high=1.0",
            "kernel",
        ),
        of_type("min_max_norm({'layer': params}, 1.0)", "low['layer']", "kernel"),
        of_type("clip_by_value(high=1.0)", "high=1.0", "low and high"),
        of_type("clip_by_value(1.0, low=0.0, high=1.0)", "bound=1.0", "low and high"),
        of_value("min_max_norm(jnp.inf, jnp.inf)", "low", "finite", "inf"),
        of_value("min_max_norm(0.5, 1.0, rate=2.0)", "rate", "at most 1", "2.0"),
        of_value("keep_norm(rate=2.0)", "rate", "at most 1", "2.0"),
        of_value("keep_norm().apply(params)", "old", "weights before the update"),
        of_type("max_norm(schedule).apply(params, 3)", "takes params, and step="),
        of_type("max_norm(1.0).apply(params, old=params)", "takes params, and step="),
        of_type("keep_norm().apply(params, params, 3)", "takes params, old, and"),
        of_type("keep_norm().apply(params, params, old=params)", "takes params, old,"),
        of_type("max_norm(3.0).apply()", "clipjax.max_norm(3.0).apply()", "'params'"),
        of_value("violations(params, keep_norm())", "old", "old=old"),
        of_value("keep_norm().apply(params, [params])", "old", "structure", "kernel"),
        of_value(
            "keep_norm().apply({'w': jnp.ones((2, 3))}, {'w': jnp.ones((3, 2))})",
            "old",
            "'w'",
            "(2, 3)",
        ),
        of_value(
            "keep_norm().init(attention)", "axes", "stack", "axes={", "None", "SKIP"
        ),
        of_value(
            "relative_update().init(attention)", "axes", "stack", "axes={", "None"
        ),
        of_value("box(jnp.zeros(3), jnp.ones(2))", "low and high", "(3,)", "(2,)"),
        of_type(
            "jax.jit(lambda a: max_norm(1.0, axes=a).init(params))(0)",
            "axes",
            "static_args",
        ),
        of_type("box((0.0, 0.0), 1.0)", "low", "mapping", "(0.0, 0.0)"),
        of_type(
            "skip_nonfinite(optax.MultiSteps(sgd, 2))",
            "optimizer",
            ".gradient_transformation()",
        ),
        of_value(
            "matching('enc')({'enc': params})",
            "'enc' matches no leaf; 'enc/*' matches some",
        ),
        of_type(
            "jax.jit(lambda p: clip_by_norm(1.0, ord=p).init(params))(2.0)",
            "ord",
            "static_args",
        ),
        of_type("clip_by_norm(1.0, ord=10**400)", "ord", "[1, inf], got 1000"),
        of_value(
            "box({'kernel': 2.0}, {'kernel': 1.0}).apply(params)",
            "low",
            "2.0",
            "1.0",
            "'kernel'",
        ),
        of_value("autoclip(0.1)", "percentile", "0.1", "clip_by_quantile"),
        of_value("autoclip(101)", "percentile", "[0, 100]", "101"),
        of_value("clip_by_quantile(50)", "quantile", "(0, 1)", "got 50"),
        of_value("clip_by_quantile(learning_rate=0.0)", "learning_rate", "got 0.0"),
        *crossed(c.FINITE, ("jnp.inf", ValueError, "inf")),
        of_value("clip_by_lognormal(eps=0.0)", "eps", "got 0.0"),
        of_value("adagc(decay=2.0)", "decay", "[0, 1)", "2.0"),
        of_value("clip_by_quantile(0.0)", "quantile", "(0, 1)", "got 0.0"),
        of_value("clip_by_quantile(1.0)", "quantile", "(0, 1)", "got 1.0"),
        of_value(
            "clip_by_quantile(initial_max_norm=0.0)", "initial_max_norm", "got 0.0"
        ),
        of_value("zclip(mode=None)", "mode", "'adaptive'", "None"),
        of_type("bounded(adam, accumulate=jnp.array(2))", "accumulate", "static_args"),
        of_value("zclip(mode='clip')", "mode", "'adaptive'", "'clip'"),
        of_value("zclip(mode=jax.device_get(x))", "mode", "array([1., 1., 1.]"),
        of_type("record_norms(jax.device_get(x))", "groups", "array([1., 1., 1.]"),
        of_value("record_norms(of=jax.device_get(x[None]))", "of must", "array([[1., "),
        of_value(
            "adagc(warmup_norms='during')", "warmup_norms", "'before'", "'during'"
        ),
        of_type("zclip(update_on_spike=1)", "update_on_spike", "bool", "got 1"),
        of_value(
            "skip_spikes(sgd, window=10, warmup_steps=20)",
            "warmup_steps",
            "window=10",
            "got 20",
        ),
        of_value("record_norms(0)", "groups", "at least 1", "got 0"),
        of_type(
            "jax.jit(lambda n: autoclip(window=n).init(params))(10)",
            "window",
            "static_args",
        ),
        of_type(
            "jax.jit(lambda n: skip_spikes(sgd, window=n).init(params))(10)",
            "window",
            "static_args",
        ),
        of_type("clip_by_global_norm(params)", "max_norm", "kernel"),
        of_type(
            "clip_by_global_norm(lambda step: 1j).init(params)",
            "max_norm",
            "schedule",
            "returned 1j",
        ),
        of_value(
            "clip_by_group_norm({'*': lambda step: x}).init(params)",
            "max_norms['*']",
            "(3,)",
        ),
        of_value(
            "skip_spikes(sgd, max_norm=lambda step: x).init(params)", "max_norm", "(3,)"
        ),
        of_value("adagc(lambda step: x).init(params)", "relative_bound", "(3,)"),
        of_value(
            "jax.jit(lambda c: clip_by_global_norm(c).init(params))(x)",
            "max_norm",
            "(3,)",
        ),
        of_type(
            "optax.inject_hyperparams(record_norms)(groups=1).init(params)",
            "groups",
            "static_args",
        ),
        of_type(
            "clip_by_norm(lambda step: step >= 0).init(params)",
            "max_norm",
            "schedule",
            "returned",
        ),
        of_type(
            "jax.jit(lambda b: functional.clip_by_norm(x, b))(1j)",
            "max_norm",
            "real numbers",
        ),
        of_type(
            "clip_by_global_norm(optax.adam).init(params)",
            "max_norm",
            "schedule",
            "returned",
        ),
        of_type("clip_by_group_norm(1.0)", "max_norms", "1.0"),
        of_type("clip_by_group_norm({0: 1.0})", "max_norms", "strings, got (0,)"),
        of_type("clip_by_group_norm({})", "max_norms", "strings, got ()"),
    ],
    "shapes": [  # of bounds, other than what they bound
        *crossed(with_form("scalar"), ("jnp.ones(3)", ValueError, "scalar", "(3,)")),
        *crossed(
            c.BY_LEAF, ("jnp.ones(5)", ValueError, "(5,)", "'bias' of shape (3,)")
        ),
        *crossed(
            c.BY_UNIT, ("jnp.ones(5)", ValueError, "(5,)", "'kernel' of shape (4, 3)")
        ),
        of_value(
            "functional.clip_by_global_norm(x, 1.0, norm=jnp.ones(3))",
            "norm",
            "scalar",
            "(3,)",
        ),
        of_value(
            "jax.jit(lambda b: clip_by_global_norm(b).init(params))(x)",
            "max_norm",
            "scalar",
            "(3,)",
        ),
        of_value(
            "max_norm(jnp.ones((4, 3))).init(params)",
            "radius",
            "(4, 3)",
            "'kernel'",
            "(1, 3)",
        ),
        of_value(
            "qk_clip(jnp.ones(5)).apply(heads, max_logits=jnp.ones(2))",
            "threshold",
            "(5,)",
            "(2,)",
        ),
        of_type("autoclip(jnp.ones(3))", "percentile", "number", "[1., 1., 1.]"),
    ],
    "axes": [  # Axes and patterns.
        *all_of(
            "axes",
            c.AXES,
            *each(TypeError, "True", "'0'", "1.0", "[0, None]", "{0: 1}", "{}"),
        ),
        *all_of("axes['*']", c.AXES, ("{'*': 'rows'}", TypeError, "got 'rows'")),
        *all_of(
            "axes",
            c.AXES,
            ("{'*': {'kernel': 0}}", TypeError, "'encoder/kernel'", "{'kernel': 0}"),
        ),
        *all_of(
            "axes",
            c.AXES,
            ("lambda path, leaf: '0'", TypeError, "by the rule", "got '0'"),
        ),
        *all_of(
            "axes",
            c.AXES,
            ("2", ValueError, "2 is out of range"),
            ("(0, -2)", ValueError, "(0, -2)"),
            ("{'kernal': 0}", ValueError, "'kernal' matches no leaf"),
        ),
        *all_of(
            "axes",
            c.OF_MATRICES,
            ("{'bias': 0}", ValueError, "nothing is changed", "{'bias': 0} applies"),
        ),
        *crossed(
            c.PATTERNS,
            ("'kernal'", ValueError, "'kernal' matches no leaf", "bias, kernel"),
        ),
        *all_of(
            "'key/kernel' of shape (4, 2, 3)",
            c.ATTENTION,
            ("", ValueError, "attention heads", "Pass"),
        ),
        of_value(
            "max_norm(3.0, axes=(0, 0)).apply(params)",
            "axes",
            "(0, 0)",
            "twice",
            "'kernel'",
        ),
        of_value(
            "max_norm(3.0, axes={'*': 0, 'bias': SKIP}).apply(params)",
            "axes",
            "bias comes after",
        ),
        of_value(
            "box({'*': 0.0, 'bias': 1.0}, 2.0).apply(params)", "low", "bias comes after"
        ),
        of_value(
            "max_norm(3.0, axes={'bias': SKIP}).apply(params)",
            "axes",
            "nothing is changed",
            "its patterns match",
        ),
        of_value(
            "max_norm(3.0).apply({'bias': x})",
            "axes",
            "nothing is changed",
            "'bias'",
            "(3,)",
        ),
        of_value(
            "clip_by_norm(1.0, axes=0).init({'bias': x})",
            "axes",
            "nothing is changed",
            "'bias'",
        ),
        of_value(
            "spectral_cap(1.0).apply({'bias': x})",
            "flatten",
            "nothing is changed",
            "'bias'",
        ),
        of_type("spectral_cap(1.0, flatten=0)", "flatten", "pair", "got 0"),
        *all_of(
            "flatten",
            ["spectral_cap(1.0, flatten=$)"],
            *[
                (x, TypeError)
                for x in ("(1,)", "(0, 1.0)", "'ab'", "{}", "{0: (0, 1)}")
            ],
        ),
        *[
            of_value(f"spectral_cap(jnp.ones(3), flatten={x}).init({c.CONV})", *words)
            for x, *words in (
                ("None", "flatten: leaf 'conv' of shape", "Pass flatten={'conv'"),
                ("(0, 3)", "((0,), (3,)) is out of range for leaf 'conv'"),
                ("((0, 1), -2)", "names an axis twice for leaf 'conv'"),
                ("(1, 2)", "bound must broadcast to shape (2,", "of leaf 'conv'"),
            )
        ],
        of_type("matching()", "patterns", "()"),
        of_value("matching('/w')({'a': {'w': x}})", "'/w' matches no leaf"),
        of_value(
            "matching('kernel', 'dec/*')(params)",
            "patterns: the pattern 'dec/*' matches no leaf",
            "kernel",
        ),
        of_type("record_norms(True)", "groups", "whole number", "True"),
        of_type("record_norms([])", "groups", "path patterns must be one or more"),
        of_type(
            "spectral_cap(1.0, flatten=(0, '1'))", "flatten", "pair", "got (0, '1')"
        ),
        of_type(
            "spectral_cap(1.0, flatten={'kernel': 0})",
            "flatten['kernel']",
            "pair",
            "got 0",
        ),
        of_type(
            "spectral_cap(1.0, flatten={'layer': {'kernel': (0, 1)}})",
            "flatten['layer']",
            "pair",
            "got {'kernel': (0, 1)}",
        ),
        of_type(
            "spectral_cap(1.0, flatten=lambda path, leaf: {'w': (0, 1)}).apply(params)",
            "by the rule, must be a pair",
            "got {'w': (0, 1)}",
        ),
        of_value(
            "spectral_cap(1.0, flatten={'kernel': (0, 2)}).apply(params)",
            "flatten",
            "out of range",
            "'kernel'",
        ),
        of_value(
            "spectral_cap(1.0, flatten={'kernel': (0, 0)}).apply(params)",
            "flatten",
            "twice",
            "'kernel'",
        ),
        of_value(
            "record_norms('leaves').init(params)", "groups", "'leaves'", "bias, kernel"
        ),
        of_type("record_norms([1])", "groups", "[1]"),
        of_type("record_norms(1.5)", "groups", "1.5"),
        of_value("record_norms(of='grads')", "of", "'updates'", "'grads'"),
        *[
            of_type(
                f"optax.inject_hyperparams({make}).init(jnp.ones(3, {dtype!r}))",
                name,
                dtype,
                "hyperparam_dtype=jnp.float32",
            )
            for dtype in ("complex64", "float8_e4m3fn")
            for name, make in (
                ("max_norm", "clip_by_global_norm)(max_norm=1.0"),
                ("quantile", "clip_by_quantile)(quantile=0.5"),
            )
        ],
        of_value("record_norms(of=())", "of", "()"),
        of_type("record_norms(name='')", "name", "''"),
        of_value("record_norms(of='params', keep=2)", "keep", "of='params'"),
        of_value(
            "record_norms(keep=2).update(x, state_of(record_norms(keep=3)))",
            "keep",
            "made with 3, got 2",
        ),
        of_value(
            "record_norms().update(x, record_norms(keep=3).init(x))",
            "keep",
            "made with 3, got 0",
        ),
        of_type(
            "jax.jit(lambda n: record_norms(keep=n).init(params))(10)", "keep", "static"
        ),
        of_type(
            "record_norms(keep=2).update(x, record_norms(keep=2).init(x), loss=x)",
            "loss",
            "shape (3,)",
        ),
        of_value(
            "bad_steps(state_of(clip))", "opt_state", "record_norms('leaf', keep=16)"
        ),
        of_type(
            "jax.jit(lambda s: len(bad_steps(s)))(record_norms(keep=2).init(x))",
            "opt_state",
            "outside jit",
        ),
        of_type(
            "bad_steps(jax.eval_shape(record_norms(keep=2).init, x))",
            "opt_state",
            "ShapeDtypeStruct",
        ),
        of_value(
            "record_norms('leaf', keep=2).update(x, record_norms('leaf', keep=2)"
            ".init(params))",
            "state",
            "2 norms",
        ),
        of_value(
            "skip_nonfinite(record_norms(keep=2)).init(x)",
            "keep",
            "wrapped by skip_nonfinite",
        ),
        of_type("box({0: 0.0}, 1.0)", "low", "(0,)"),
        of_type("non_negative(where=1)", "where", "got 1"),
        of_type("non_negative(where=())", "where", "()"),
        of_type("matching(1)", "patterns", "(1,)"),
        of_value(
            "non_negative(where=lambda path, leaf: False).apply(params)",
            "where",
            "'bias'",
        ),
        of_type(
            "non_negative(where=matching('kernel')).apply(params)",
            "matching('kernel',)",
            "where= takes the patterns",
        ),
        of_type(
            "max_norm(3.0, axes=matching('kernel')).apply(params)",
            "matching('kernel',)",
            "where= takes the",
        ),
    ],
    "chains": [  # Chains, wrappers, and what is no transformation.
        *crossed(c.TRANSFORMATIONS, *each(TypeError, "1.0", "'adam'", "{'a': 1}")),
        *crossed(
            c.TRANSFORMATIONS,
            *[
                (x, TypeError, "gradient transformation")
                for x in ("optax.adam", "clip_by_norm")
            ],
        ),
        of_type("bounded(None)", "optimizer", "None"),
        of_value("chain()", "links", "at least one"),
        of_value(
            "chain(clip, max_norm(3.0), record_norms(), clip)",
            "links[1]",
            "after links[3]",
        ),
        of_type("bounded(adam, clip=[clip_by_norm])", "clip", "clip_by_norm"),
        of_value(
            "bounded(optax.MultiSteps(adam, 4).gradient_transformation(), clip=clip)",
            "optimizer",
            "optax.MultiSteps",
        ),
        of_value(
            "tx = bounded(sgd, project=max_norm(1.0)); "
            "tx.update(grads, tx.init(params))",
            "params",
            "clipjax.max_norm(1.0) needs them, as in tx.update(updates, state, params)",
        ),
        of_type("chain([clip, adam])", "links[0]", "gradient transformation"),
        of_value(
            "chain(max_norm(3.0), adam)", "links[0]", "max_norm(3.0)", "after links[1]"
        ),
        of_value(
            "chain(clip, max_norm(3.0), adam)",
            "links[1]",
            "max_norm(3.0)",
            "after links[2]",
        ),
        of_value(
            "bounded(adam, clip=max_norm(3.0))", "clip", "max_norm(3.0)", "project="
        ),
        of_value(
            "bounded(adam, clip=[clip, unit_norm()])", "clip", "unit_norm()", "project="
        ),
        of_value("bounded(max_norm(3.0))", "optimizer", "max_norm(3.0)", "project="),
        of_type("bounded(adam, project=clip)", "project", "a clip is no projection"),
        of_type("project(3)", "function", "got 3"),
        of_type("bounded(adam, project=3.0)", "project", "3.0"),
        of_type("project(None)", "function", "None"),
        of_value(
            "bounded(optax.MultiSteps(adam, 4), clip=clip)", "optimizer", "accumulate=k"
        ),
        of_value("functional.clip_by_global_norm(x, 1.0, norm=-5.0)", "norm", "-5.0"),
        of_value(
            "functional.clip_by_global_norm(x, 1.0, norm=jnp.array(-5.0))",
            "norm",
            "-5.",
        ),
        of_type(
            "functional.clip_by_global_norm(x, 1.0, norm=jnp.array(True))",
            "norm",
            "True",
        ),
        of_type("functional.clip_by_norm(x, schedule)", "max_norm", "not a schedule"),
        of_type(
            "bounded(optax.MultiSteps(adam, 4))",
            "optimizer",
            ".gradient_transformation()",
        ),
        of_type("tangent_cone(max_norm(3.0))", "radius", "clipjax.max_norm(3.0)"),
        of_type(
            "skip_spikes(sgd, max_norm=unit_norm())", "max_norm", "clipjax.unit_norm()"
        ),
        of_type(
            "bounded(adam, accumulate=2).init({'z': 1j * x})",
            "accumulate",
            "'z'",
            "complex",
        ),
        of_type(
            "jax.jit(lambda n: bounded(adam, accumulate=n).init(params))(2)",
            "accumulate",
            "static_args",
        ),
        of_value(
            "bounded(adam, nonfinite='ignore')", "nonfinite", "'skip'", "'ignore'"
        ),
        of_value("bounded(adam, nonfinite=None)", "nonfinite", "'skip'", "None"),
        of_type("project(clip)", "function", "gradient transformation"),
        of_type("project(lambda w: None).apply(x)", "function", "structure", "None"),
        of_type("project(lambda w: w[:2]).apply(x)", "function", "float32[2]", "(3,)"),
        of_type(
            "project(lambda w: w > 0).apply(params['bias'])",
            "function",
            "bool[3]",
            "float32",
        ),
        of_type(
            "with_metrics('x', lambda u, p, s, m: (u, {}, 1.0), lambda p: "
            "jnp.zeros(3)).init(params)",
            "act of x",
            "memory",
            "float32[3]",
            "got float32[]",
        ),
        of_type(
            "max_norm(1.0).apply(grads, step=params)", "step", "number", "'kernel'"
        ),
        of_type("with_metrics('a/b', lambda *args: args)", "name", "'a/b'"),
        of_type("with_metrics(1, lambda *args: args)", "name", "got 1"),
        of_type("with_metrics('', lambda *args: args)", "name", "''"),
        of_type("with_metrics('a', 3)", "act", "got 3"),
        of_value(
            "with_metrics('a', lambda u, *_: (u, {'steps': x[0]}, ())).init(x)",
            "metrics",
            "'steps'",
            "of a",
        ),
        of_value(
            "with_metrics('a', lambda u, *_: (u, {'b/steps': x[0]}, ())).init(x)",
            "metrics",
            "'b/steps'",
            "of a",
        ),
        of_value("record_norms(name='steps')", "name", "'steps'"),
        of_value("record_norms(name='forward/x')", "name", "'forward/x'"),
        *[
            of_type(
                f"with_metrics('a', lambda u, *_: (u, {{'b': {value}}}, ())).init(x)",
                "act",
                "'b'",
                "scalar",
                word,
            )
            for value, word in (("x", "(3,)"), ("'s'", "'s'"), ("1j", "1j"))
        ],
    ],
    "trees": [  # Parameters and gradients.
        *[
            of_value(f"({tx}).update(grads, state_of({tx}))", "params", name)
            for name, tx in c.WITH_PARAMS
        ],
        *[
            of_value(
                f"({tx}).update(other_shape, state_of({tx}), params)",
                "'kernel'",
                "(3,)",
                "(4, 3)",
                name,
            )
            for name, tx in c.WITH_PARAMS
        ],
        *[
            of_value(f"({tx}).update(grads, state_of({tx}), [x])", "params", name)
            for name, tx in c.WITH_PARAMS
        ],
        *[
            of_value(
                f"({tx}).update(grads, state_of({tx}), {{**params, 'bias': None}})",
                "params",
                "none for bias",
                name,
            )
            for name, tx in c.WITH_PARAMS
        ],
        *all_of(
            "leaf 'act'", c.TAKE_A_TREE, ("{'act': jnp.tanh}", TypeError, "eqx.filter")
        ),
        *all_of("leaf 'act'", c.TAKE_A_TREE, ("{'act': 'ones'}", TypeError, "got str")),
        *[
            of_type(call, "'z'", "complex", "no order")
            for call in (
                "clip_by_value(-1.0, 1.0).init({'z': 1j * x})",
                "box(-1.0, 1.0).apply({'z': 1j * x})",
                "non_negative().init({'z': 1j * x})",
                "functional.clip_by_value({'z': 1j * x}, -1.0, 1.0)",
                "clip_gradient_by_value({'z': 1j * x}, -1.0, 1.0)",
            )
        ],
        of_value(
            "adagc().update({'kernel': x}, state_of(adagc()))", "adagc", "[(), ()]"
        ),
        of_type(
            "tx = bounded(sgd, accumulate=2); tx.update({'w': jnp.sin}, tx.init(x))",
            "leaf 'w'",
            "array of numbers",
        ),
        *[
            of_value(
                f"adaptive_grad_clip().init({{'blocks': {{'kernel': jnp.ones({x})}}}})",
                "axes",
                "'blocks/kernel'",
                "a stack of layers",
            )
            for x in ("(2, 4, 3)", "(2, 3, 3, 4, 3)")
        ],
        of_value(
            "adagc(axes=0).update({'kernel': jnp.ones((4, 5))}, "
            "state_of(adagc(axes={'kernel': 0})))",
            "adagc",
            "(1, 5)",
            "(1, 3)",
        ),
        *[
            of_type(
                f"tx = {tx}(sgd); tx.update(grads, tx.init(params), params, "
                f"loss={loss})",
                "loss",
                "scalar",
                word,
            )
            for tx in ("skip_nonfinite", "skip_spikes")
            for loss, word in (
                ("x", "(3,)"),
                ("jnp.zeros((1, 1))", "(1, 1)"),
                ("True", "True"),
                ("'1.0'", "'1.0'"),
                ("1j", "1j"),
                ("{'a': 1}", "'a'"),
            )
        ],
    ],
    "states": [  # States and steps.
        *[
            of_type(
                f"({tx}).update(grads, adam.init(params), params)",
                "state",
                name,
                "tuple",
            )
            for name, tx in c.STATES
        ],
        *[
            of_value(f"({tx}).update(grads, None)", "state", name, "init")
            for name, tx in c.REMEMBER
        ],
        *[
            of_value(f"({tx}).update(grads, None, params)", "state", name, "None")
            for name, tx in c.SKIP
        ],
        of_type(
            "zclip().update(grads, state_of(autoclip()))", "state", "zclip", "autoclip"
        ),
        of_type(
            "clip.update(grads, state_of(clip_by_norm(1.0)))",
            "state",
            "clip_by_global_norm",
            "clip_by_norm",
        ),
        of_value(
            "clip_by_global_norm(schedule).update(grads, None)",
            "max_norm",
            "schedule",
            "state",
        ),
        of_value(
            "clip_by_value(schedule).update(grads, None)", "bound", "schedule", "state"
        ),
        *[
            of(
                f"bounded(sgd, accumulate=2).update(grads, {state})",
                "state",
                "bounded with accumulate= needs the state",
            )
            for of, state in ((of_type, "state_of(bounded(sgd))"), (of_value, "None"))
        ],
        *[
            of_value(f"({tx}).update(grads, optax.EmptyState(), params)", "state", name)
            for name, tx in c.SKIP
        ],
        *[
            of_value(f"({tx}).update(grads, optax.EmptyState())", "state", name, "init")
            for name, tx in c.REMEMBER
        ],
        of_value(
            "with_metrics('a', lambda u, p, s, m: (u, {}, m), lambda p: x)"
            ".update(x, None)",
            "a needs the state that init returned",
        ),
        *[
            of_value(
                f"({make}(window=16)).update(x, state_of({make}(window=8)), x)",
                "window: the state was made with 8, got 16",
            )
            for make in ("autoclip", "functools.partial(skip_spikes, sgd)")
        ],
        of_value("max_norm(schedule).apply(params)", "radius", "schedule", "step="),
        of_value(
            "min_max_norm(0.0, schedule).apply(params)", "high", "schedule", "step"
        ),
        of_value("spectral_cap(schedule).apply(params)", "bound", "schedule", "step"),
        of_value("box(schedule, 9.0).apply(params)", "low", "schedule", "step="),
        of_value(
            "violations(params, max_norm(schedule))", "radius", "schedule", "step="
        ),
        of_value(
            "tangent_cone(schedule).update(grads, None, params)",
            "radius",
            "schedule",
            "state",
        ),
    ],
    "logits": [  # Attention logits.
        of_value(
            "qk_clip(query='q').init(heads)",
            "query, key: no layer has both 'q' and 'key'",
            "leaf 'key/kernel' of shape",
        ),
        of_value(
            f"qk_clip().init({c.FLAT})",
            "kernels (in, heads, head_dim)",
            "leaf 'query' of shape (4, 4)",
        ),
        *[
            of_value(f"qk_clip().apply({{'a': heads}}, max_logits={logits})", word)
            for logits, word in (
                ("jnp.ones((2, 2))", "does not fit"),
                ("1.0", "does not fit"),
                ("{'b': jnp.ones(2)}", "'b' is not the whole path"),
                ("{}", "max_logits: {} names none of the layers: 'a'"),
            )
        ],
        of_value(
            "qk_clip().apply({**heads, 'key': {'kernel': jnp.ones((4, 3, 3))}}, "
            "max_logits=jnp.ones(2))",
            "the number of key heads divides that of query heads",
        ),
        of_value(  # nor the root
            f"qk_clip().apply({c.KERNELS} | {{'dec': heads}}, max_logits={{'dce': x}})",
            "'dce' is not the whole path of an attention layer, which are: 'dec', ''",
        ),
        of_value(  # logits of a batch: kernels are no stack of biases
            f"qk_clip().apply({c.KERNELS}, max_logits=jnp.ones((4, 2)))", "does not fit"
        ),
        *[
            of_value(
                f"qk_clip(rope={rope}).init({{'a': {{'query': jnp.ones((4, 3, 6)), "
                f"'key': jnp.ones({key})}}}})",
                "in the layer 'a'",
                "do not fit together",
                "shape (4, 3, 6)",
                f"got {rope}",
            )
            for key, rope in (
                ((4, 3, 12), 0),  # keys and values in one kernel
                ((4, 2, 3, 6), 0),
                ((2, 4, 3, 6), 0),  # the same with an axis for the two
                ((4, 18), 0),  # flat
                ((4, 3, 6), 6),
                ((4, 3, 6), 7),
                ((4, 3, 2), 3),  # too much left, or nothing
            )
        ],
        of_value("qk_clip(query='qk', key='qk').init(heads)", "query, key", "'qk'"),
        of_value("qk_clip().init(params)", "'query'", "'key'", "kernel"),
        of_value("qk_clip().apply(heads)", "max_logits", "largest logit"),
        of_value(
            "tx = qk_clip(); tx.update(heads, tx.init(heads), heads)",
            "max_logits",
            "tx.update",
        ),
        of_value(
            "qk_clip().apply(heads, max_logits=jnp.ones(3))",
            "max_logits",
            "(3,)",
            "'query/kernel'",
            "(4, 2, 3)",
        ),
        of_value(
            "qk_clip().apply({'a': heads}, max_logits={'layer': jnp.ones(2)})",
            "max_logits",
            "'layer'",
        ),
        of_type("qk_clip().apply(heads, max_logits='2.0')", "max_logits", "'2.0'"),
        of_value("violations(heads, qk_clip())", "max_logits"),
    ],
    "old states": [  # States of other chains.
        of_type("adopt(None, into=state_of(adam))", "old", "optimizer state", "None"),
        of_type("adopt(adam, into=state_of(adam))", "old", "tx.init", "function"),
        of_type("adopt(state_of(adam), into=adam)", "into", "tx.init", "function"),
        of_type(
            "adopt(x, into=jax.eval_shape(adam.init, x))", "into", "ShapeDtypeStruct"
        ),
        of_type("adopt(params, into=state_of(adam))", "old", "like=", "'kernel'"),
        of_type("adopt(state_of(adam), into=state_of(adam), drop=1)", "drop", "1"),
        of_type("adopt(state_of(adam), into=x, drop='adam')", "drop", "'adam'"),
        of_value(
            "adopt({'v': x}, into=state_of(adam), like={'w': x})",
            "only like has [w]",
            "only old has [v]",
        ),
        of_value(
            "adopt(adam.init(params), into=sgd.init(params))",
            "old",
            "ScaleByAdamState at '0'",
            "drop=('ScaleByAdamState',)",
        ),
        of_value(
            "adopt(adam.init(params), into=sgd.init(params), drop=['Adam'])",
            "ScaleByAdamState at '0'",
        ),
        of_value(
            "adopt(adam.init(x), into=adam.init(x), drop=['clip'])",
            "drop",
            "clip names nothing",
        ),
        of_value(
            "adopt(adam.init(params), into=adam.init(other_shape))",
            "'mu/kernel' of ScaleByAdamState at '0' is float32[4, 3]",
            "float32[3]",
        ),
        of_value(
            "adopt(adam.init({'a': x}), into=adam.init({'b': x}), drop=True)",
            "ScaleByAdamState at '0' has mu/a, nu/a",
            "has mu/b, nu/b",
        ),
        of_value(
            "adopt(adam.init(x), into=chain(adam, adam).init(x))",
            "old has 1",
            "into has 2",
            "ScaleByAdamState at '0/0', ScaleByAdamState at '1/0'",
        ),
        of_value(
            "adopt(x, into=adam.update(x, adam.init(x))[1], like=x)",
            "into",
            "'0/count' is 1",
        ),
    ],
    "metrics": [  # Metrics and logs.
        of_value("metrics(adam.init(params))", "opt_state", "no state", "tx.init"),
        of_value("metrics(None)", "opt_state", "None"),
        of_value("metrics(())", "opt_state", "no state with metrics"),
        of_value("metrics(max_norm(3.0).init(params))", "opt_state", "no state"),
        of_value("metrics(params)", "opt_state", "kernel"),
        of_value("metrics(clip)", "opt_state", "tx.init"),
        of_type("violations(params, 3.0)", "projection", "3.0"),
        of_type(
            "jax.jit(lambda p: violations(p, max_norm(3.0, axes=0)))(params)",
            "params",
            "traced",
            "jit",
        ),
        of_type("violations(params, adam)", "projection", "last one"),
        of_type(
            "violations(params, chain(adam, max_norm(1.0)))", "last one of a chain"
        ),
        of_type("jax.jit(lambda b: violations(params, max_norm(b)))(1.0)", "traced"),
        of_type("series(state_of(clip), 'a')", "history", "clipjax.metrics"),
        of_type("series([{'a': 1.0}, {'b': 1.0}], 'a')", "history", "'b'"),
        of_type("series([1.0, 2.0], 'a')", "history", "[1.0, 2.0]"),
        of_type("series({1: x}, 'a')", "history", "{1: "),
        of_value("series([], 'zclip')", "name", "'zclip'", "none"),
        of_value("series({'a/norm': x}, ['a'])", "name", "['a']", "a/norm"),
        of_value(
            "series({'a/norm': x, 'a/steps': x[:2]}, 'a')",
            "history['a/steps']",
            "3 steps",
            "got 2",
        ),
        of_value("series({'a/norm': x}, 'zclip')", "name", "'zclip'", "a/norm"),
        of_value("series({'a/norm': 1.0}, 'a')", "history['a/norm']", "(steps,)", "()"),
        of_type("series({'a': ['1.0']}, 'a')", "history['a']", "'1.0'"),
        of_type("series({'a': [None]}, 'a')", "history['a']", "None"),
        of_type("jax.jit(lambda x: series({'a': x}, 'a'))(x)", "history['a']", "known"),
        of_type("suggest('1.0')", "norms", "'1.0'"),
        of_value("suggest(1.0)", "norms", "(steps,)", "()"),
        of_value("suggest([jnp.nan])", "norms", "none is finite, of 1"),
        of_value("suggest(x, {'clip': clip})", "rules['clip']", "np.mean(norms > "),
        of_value("suggest(x, {'adam': adam})", "rules['adam']", "threshold"),
        of_type("suggest(x, {'zclip': zclip})", "rules['zclip']", "call a function"),
        of_type("suggest(x, [zclip()])", "rules", "mapping"),
    ],
    "layers": [  # Layers for the backward pass.
        of_type("clip_gradient_by_norm(x, 1.0, tap=x)", "tap", "clipjax.tap()"),
        of_type("clip_gradient_by_value(x, -1.0, 1.0, tap=tap)", "tap", "function"),
        of_value("tapped(x)", "gradient", "(..., 4)"),
        of_type("probe(x, tap())", "tap", "probe=True"),
        of_type("named('a/b', clip)", "name", "'a/b'"),
        of_type("named('a', 1.0)", "tx", "1.0"),
        of_value("named('a', sgd).update(grads, None)", "state", "named('a')"),
        of_value(
            "named('a', sgd).update(grads, state_of(named('b', sgd)))", "name", "b"
        ),
        of_value(
            "unless_skipped(state_of(clip), new=x, old=x)", "opt_state", "no skip"
        ),
        of_value(
            "unless_skipped(state_of(skip_nonfinite(sgd)), new=x, old=x[1:])",
            "new and old",
            "[(3,)] and [(2,)]",
        ),
        of_value(
            "unless_skipped(state_of(skip_nonfinite(sgd)), new=x, old={})",
            "new and old",
            "structure",
        ),
        of_type("clip_gradient_by_value(x)", "one bound", "nothing"),
        of_type("replace_gradient(jnp.round, None)", "backward", "None"),
        of_type("replace_gradient(1.0, jnp.round)", "forward", "1.0"),
        of_type(
            "replace_gradient(jnp.round, jnp.sum)(x)",
            "forward and backward",
            "float32[3]",
            "float32[]",
        ),
        of_type(
            "replace_gradient(lambda x: {'a': x}, lambda x: {'b': x})(x)",
            "forward and backward",
            "'a ",
            "'b ",
        ),
        of_type(
            "replace_gradient(lambda x: x > 0, lambda x: x)(x)",
            "forward and backward",
            "bool[3]",
        ),
        of_type(
            "jax.jvp(lambda x: clip_gradient_by_norm(x, 1.0), (x,), (x,))",
            "forward-mode",
        ),
    ],
    "names": [  # Python's own words.
        of_type(
            "clip_by_global_norm(clip_norm=1.0)", "clip_by_global_norm", "'clip_norm'"
        ),
        of_type("max_norm(3.0, axis=0)", "max_norm", "'axis'"),
        of_type("max_norm()", "max_norm", "radius"),
        of_type(
            "functional.clip_by_global_norm(grads, 1.0, use_norm=5.0)",
            "clip_by_global_norm",
            "'use_norm'",
        ),
        of_type("bounded(adam, clip)", "bounded", "positional", "clip="),
        of_type("bounded(adam, 1.0)", "clip=", "got 1.0"),
        of_type("clip.update({'e': sparse}, None)", "leaf 'e'", "optax.masked"),
        of_type(
            "clip.init({'e': jnp.ones(2, 'float8_e4m3fn')})",
            "leaf 'e' is float8_e4m3fn",
            "optax.masked",
        ),
        of_type("clip.update(x, state_of(clip), x, 1.0)", "loss=loss", "1.0"),
        of_value("clip.update({'a': x}, None, {'b': x})", "params", "no leaf at a"),
        of_type("bounded(adam, clipping=clip)", "bounded", "'clipping'"),
    ],
}
