"""Wrong calls, by theme: what is written, the exception, and words it has.

Calls that follow from signatures are made from `calls.py`. The others are written out,
one for each message.
"""

import builtins
import re
from typing import Any, NamedTuple

from tests.errors import calls as c


class Row(NamedTuple):
    """A wrong call, in the names of `test_errors.py`, and what comes of it."""

    call: str
    error: Any  # the exception, or several of which it is one
    words: tuple[str, ...]  # the argument, the value and the leaf, as far as there are


ANY = (TypeError, ValueError)


def written(text: str) -> list[Row]:
    """Read calls, each followed by `Exception: words | words` on a line of its own."""
    rows = []
    for block in re.split(r"\n(?=\S)", text.strip()):
        *call, outcome = map(str.strip, block.splitlines())
        error, _, words = outcome.partition(": ")
        row = Row(" ".join(call), getattr(builtins, error), tuple(words.split(" | ")))
        rows.append(row)
    return rows


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


def steps(calls: list[Any], call: str, error: Any, *words: str) -> list[Row]:
    """Return a row for each transformation, in the place of $, with its name."""
    return [Row(call.replace("$", f"({tx})"), error, (*words, x)) for x, tx in calls]


NUMBERS = [
    *crossed(
        c.NUMBERS,
        *each(TypeError, "True", "'1.0'", "[1.0]", "1j"),
        ("jnp.nan", ValueError, "got nan"),
    ),
    *crossed(
        with_form("signed", have=False),
        ("-1.0", ValueError, "-1.0"),
        ("jnp.array([1.0, -2.0])", ANY),
    ),
    *crossed(with_form("optional", have=False), *each(TypeError, "None")),
    *crossed(with_form("constant"), ("schedule", TypeError, "a number")),
    *crossed(with_form("scalar"), ("jnp.ones(3)", TypeError, "a number", "[1., 1.,")),
    *crossed(c.FINITE, ("jnp.inf", ValueError, "inf")),
    *crossed(
        c.COUNTS,
        *each(TypeError, "1.5", "'1'", "True"),
        *each(ValueError, "-1", str(2**31)),
    ),
    *crossed(c.AT_LEAST_1, ("0", ValueError, "[1, ", "got 0")),
    *crossed(c.DECAYS, *each(ValueError, "1.0", "-0.1")),
    *crossed(c.RATES, *each(ValueError, "2.0")),
    *all_of(
        "ord",
        c.ORDERS,
        *each(ValueError, "0.5", "-1", "0"),
        *each(TypeError, "'fro'", "True", "[2]"),
    ),
    *all_of("low=2.0", c.IN_ORDER, ("2.0", ValueError, "high=1.0")),
    *written("""
clip_by_value()
    TypeError: one bound | nothing
clip_by_value(low=0.0)
    TypeError: low=0.0 | low and high
clip_by_value(1.0, low=0.0, high=1.0)
    TypeError: bound=1.0 | low and high
clip_by_global_norm(params)
    TypeError: max_norm | kernel
max_norm({'layer': params})
    TypeError: bound['layer'] | kernel
box({'kernel': 2.0, '*': schedule}, 1.0).apply(params, step=0)
    ValueError: low=2.0 | high=1.0 | 'kernel'
min_max_norm(jnp.inf, jnp.inf)
    ValueError: low | [0, inf) | got inf
box(jnp.zeros(3), jnp.ones(2))
    ValueError: low and high | (3,) | (2,)
autoclip(0.1)
    ValueError: percentile | 0.1 | clip_by_quantile
autoclip(101)
    ValueError: percentile | [0, 100] | 101
clip_by_quantile(50)
    ValueError: quantile | (0, 1) | got 50
clip_by_quantile(learning_rate=0.0)
    ValueError: learning_rate | got 0.0
clip_by_quantile(initial_max_norm=0.0)
    ValueError: initial_max_norm | got 0.0
clip_by_lognormal(eps=0.0)
    ValueError: eps | got 0.0
skip_spikes(sgd, window=10, warmup_steps=20)
    ValueError: warmup_steps | window=10 | got 20
clip_by_group_norm(1.0)
    TypeError: max_norms | 1.0
clip_by_group_norm({0: 1.0})
    TypeError: max_norms | strings, got (0,)
functional.clip_by_global_norm(x, 1.0, norm=-5.0)
    ValueError: norm | -5.0
skip_spikes(sgd, max_norm=unit_norm())
    TypeError: max_norm | clipjax.unit_norm
zclip(mode='clip')
    ValueError: mode | 'adaptive' | 'clip'
zclip(mode=jax.device_get(x))
    ValueError: mode | array([1., 1., 1.]
adagc(warmup_norms='during')
    ValueError: warmup_norms | 'before' | 'during'
bounded(adam, nonfinite=None)
    ValueError: nonfinite | 'skip' | None
zclip(update_on_spike=1)
    TypeError: update_on_spike | bool | got 1
skip_nonfinite(adam, check_updates='False')
    TypeError: check_updates | bool | 'False'
clipjax.functional.unitwise_norms(params, axes=0, keepdims=1)
    TypeError: keepdims | bool | got 1
tap(probe='no')
    TypeError: probe | bool | 'no'

clip_by_global_norm(lambda step: 1j).init(params)
    TypeError: max_norm | schedule | returned 1j
clip_by_group_norm({'*': lambda step: x}).init(params)
    TypeError: max_norms['*'] | returned | [1., 1., 1.]
clip_by_norm(lambda step: step >= 0).init(params)
    TypeError: max_norm | schedule | returned
clip_by_global_norm(optax.adam).init(params)
    TypeError: max_norm | schedule | returned
jax.jit(lambda b: functional.clip_by_norm(x, b))(1j)
    TypeError: max_norm | a number | complex64
jax.jit(lambda b: clip_by_global_norm(b).init(params))(x)
    TypeError: max_norm | a number | float32[3]

jax.jit(lambda a: max_norm(1.0, axes=a).init(params))(0)
    TypeError: axes | static_args
jax.jit(lambda p: clip_by_norm(1.0, ord=p).init(params))(2.0)
    TypeError: ord | static_args
jax.jit(lambda n: skip_spikes(sgd, window=n).init(params))(10)
    TypeError: window | static_args
jax.jit(lambda n: record_norms(keep=n).init(params))(10)
    TypeError: keep | static_args
optax.inject_hyperparams(record_norms)(groups=1).init(params)
    TypeError: groups | static_args
bounded(adam, accumulate=jnp.array(2))
    TypeError: accumulate | static_args
"""),
]

SHAPES = [  # of bounds, other than what they bound
    *crossed(c.BY_LEAF, ("jnp.ones(5)", ValueError, "(5,)", "'bias' of shape (3,)")),
    *crossed(
        c.BY_UNIT, ("jnp.ones(5)", ValueError, "(5,)", "'kernel' of shape (4, 3)")
    ),
    *written("""
functional.clip_by_global_norm(x, 1.0, norm=jnp.ones(3))
    ValueError: norm | scalar | (3,)
clip_gradient_by_norm(1.0, x)
    ValueError: max_norm | scalar | (3,)
max_norm(jnp.ones((4, 3))).init(params)
    ValueError: bound | (4, 3) | 'kernel' | (1, 3)
qk_clip(jnp.ones(5)).apply(heads, max_logits=jnp.ones(2))
    ValueError: threshold | (5,) | (2,)
"""),
]

AXES = [  # and patterns
    *all_of(
        "axes",
        c.AXES,
        *each(TypeError, "True", "'0'", "1.0", "[0, None]", "{0: 1}", "{}"),
        ("{'*': 'rows'}", TypeError, "axes['*']", "got 'rows'"),
        ("{'*': {'kernel': 0}}", TypeError, "'encoder/kernel'", "{'kernel': 0}"),
        ("lambda path, leaf: '0'", TypeError, "by the rule", "got '0'"),
        ("2", ValueError, "2 is out of range"),
        ("(0, -2)", ValueError, "(0, -2)"),
        ("{'kernal': 0}", ValueError, "'kernal' matches no leaf"),
    ),
    *all_of(
        "axes",
        c.OF_MATRICES,
        ("{'bias': 0}", ValueError, "apply to none of", "'bias' of shape (3,)"),
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
    *all_of(
        "flatten",
        ["spectral_cap(1.0, flatten=$)"],
        *[
            (x, TypeError)
            for x in ("0", "(1,)", "(0, 1.0)", "(0, '1')", "'ab'", "{}", "{0: (0, 1)}")
        ],
    ),
    *written("""
clip_by_norm(1.0, axes={'kernel': 0, 1: 0})
    TypeError: axes: a mapping must
max_norm(3.0, axes=(0, 0)).apply(params)
    ValueError: axes | (0, 0) | twice | 'kernel'
box({'*': 0.0, 'bias': 1.0}, 2.0).apply(params)
    ValueError: low | bias comes after
max_norm(3.0).apply({'bias': x})
    ValueError: axes | apply to none of | 'bias' of shape (3,)
keep_norm().init(attention)
    ValueError: axes | stack | axes={ | None | SKIP
adaptive_grad_clip().init({'blocks': {'kernel': jnp.ones((2, 4, 3))}})
    ValueError: axes | 'blocks/kernel' | a stack of layers
adaptive_grad_clip().init({'blocks': {'kernel': jnp.ones((2, 3, 3, 4, 3))}})
    ValueError: axes | 'blocks/kernel' | a stack of layers
spectral_cap(1.0).apply({'bias': x})
    ValueError: flatten | none of these is a matrix | 'bias'
spectral_cap(jnp.ones(3), flatten=None).init(conv)
    ValueError: flatten: leaf 'conv' of shape | Pass flatten={'conv'
spectral_cap(1.0, flatten=(0, 3)).init(conv)
    ValueError: ((0,), (3,)) is out of range for leaf 'conv'
spectral_cap(1.0, flatten=((0, 1), -2)).init(conv)
    ValueError: names an axis twice for leaf 'conv'
spectral_cap(jnp.ones(3), flatten=(1, 2)).init(conv)
    ValueError: bound must broadcast to shape (2, | of leaf 'conv'
spectral_cap(1.0, flatten={'layer': {'kernel': (0, 1)}})
    TypeError: flatten['layer'] | pair | got {'kernel': (0, 1)}
spectral_cap(1.0, flatten=lambda path, leaf: {'w': (0, 1)}).apply(params)
    TypeError: by the rule, must be a pair | got {'w': (0, 1)}
matching()
    TypeError: patterns | ()
matching(1)
    TypeError: patterns | (1,)
matching('enc')({'enc': params})
    ValueError: 'enc' matches no leaf; 'enc/*' matches some
matching('kernel', 'dec/*')(params)
    ValueError: patterns: the pattern 'dec/*' matches no leaf | kernel
non_negative(where=lambda path, leaf: False).apply(params)
    ValueError: where | 'bias'
record_norms(True)
    TypeError: groups | an int | True
record_norms(0)
    ValueError: groups | [1, | got 0
record_norms([])
    TypeError: groups | path patterns must be one or more
record_norms('leaves').init(params)
    ValueError: groups | 'leaves' | bias, kernel
record_norms(stacked='*').init(params)
    ValueError: stacked | 'bias' | 'kernel'
"""),
]

CHAINS = [  # wrappers, kinds, and what is no transformation
    *crossed(
        c.TRANSFORMATIONS,
        *each(TypeError, "'adam'", "{'a': 1}"),
        ("optax.adam", TypeError, "gradient transformation", "call it"),
        ("clip_by_norm", TypeError, "gradient transformation", "call it"),
    ),
    *written("""
bounded(None)
    TypeError: optimizer | None
bounded(adam, clip=1.0)
    TypeError: clip | clipjax.clip_by_global_norm(1.0)
bounded(adam, clip=[clip_by_norm])
    TypeError: clip | clip_by_norm
bounded(adam, clip=[clip, unit_norm()])
    ValueError: clip | clipjax.unit_norm | project=
bounded(adam, clip=skip_nonfinite(clip))
    ValueError: clip | skip | around bounded
bounded(skip_spikes(adam), clip=clip)
    ValueError: optimizer | skip | around bounded
bounded(named('a', skip_spikes(adam)), clip=clip)
    ValueError: optimizer | around bounded
bounded(adam, clip=record_norms(), nonfinite='skip')
    ValueError: clip | record_norms | in front
bounded(max_norm(3.0))
    ValueError: optimizer | clipjax.max_norm | project=
bounded(adam, project=clip)
    TypeError: project | a clip is no projection
bounded(adam, project=max_norm).init(params)
    TypeError: project | structure | called first: clipjax.max_norm(3.0)
bounded(optax.MultiSteps(adam, 4))
    TypeError: optimizer | .gradient_transformation()
skip_spikes(clip, adam)
    TypeError: one positional argument | optax.chain(clip, optimizer)
skip_nonfinite(record_norms(keep=2)).init(x)
    ValueError: keep | wrapped by skip_nonfinite
project(3)
    TypeError: function | got 3
project(clip)
    TypeError: function | gradient transformation
project(lambda w: None).apply(x)
    TypeError: function | structure | None
project(lambda w: w[:2]).apply(x)
    TypeError: function | float32[2] | (3,)
max_norm(1.0).apply(grads, step=params)
    TypeError: step | number | 'kernel'
max_norm(schedule).apply(params, 3)
    TypeError: takes params, and step=
keep_norm().apply(params, params, old=params)
    TypeError: takes params, old, and
max_norm(3.0).apply()
    TypeError: clipjax.max_norm.apply() | 'params'
named('a/b', clip)
    TypeError: name | 'a/b'
named('a', 1.0)
    TypeError: tx | 1.0
with_metrics('', lambda *args: args)
    TypeError: name | ''
with_metrics('a', 3)
    TypeError: act | got 3
with_metrics('a', lambda *args: args, 3)
    TypeError: remember | 3
with_metrics('a', lambda u, p, s, m, **_: u).init(x)
    TypeError: act of a | (updates, a dict of metrics, memory) | float32[3]
with_metrics('x', lambda u, p, s, m, **_: (u, {}, 1.0), lambda p: jnp.zeros(3))
    .init(params)
    TypeError: act of x | memory | float32[3] | got float32[]
with_metrics('a', lambda u, *_, **__: (u, {'steps': x[0]}, ())).init(x)
    ValueError: metrics | 'steps' | of a
with_metrics('a', lambda u, *_, **__: (u, {'b': x}, ())).init(x)
    TypeError: act | 'b' | scalar | (3,)
record_norms(name='')
    TypeError: name | ''
record_norms(name='gradients/raw')
    TypeError: name | without '/' | 'gradients/raw'
record_norms(name='steps')
    ValueError: name | 'steps'
record_norms(of='params', name='a')
    ValueError: name | 'a' | of='params'
record_norms(of='grads')
    ValueError: of | 'updates' | 'grads'
record_norms(of='params', keep=2)
    ValueError: keep | of='params'
record_norms(ord=1, keep=2)
    ValueError: ord | got 1 | keep=2
record_norms(probes=['blocks'])
    TypeError: probes | ['blocks']
"""),
]

TREES = [  # of parameters and gradients
    *steps(c.WITH_PARAMS, "$.update(grads, state_of($))", ValueError, "params"),
    *steps(
        c.WITH_PARAMS,
        "$.update(other_shape, state_of($), params)",
        ValueError,
        *("'kernel'", "(3,)", "(4, 3)"),
    ),
    *crossed(
        [
            ("params", f"({tx}).update(grads, state_of({tx}), $)")
            for _, tx in c.WITH_PARAMS
        ],
        ("[x]", ValueError, "bias"),
        ("{**params, 'bias': None}", ValueError, "bias"),
    ),
    *all_of(
        "leaf 'act'",
        c.TAKE_A_TREE,
        ("{'act': jnp.tanh}", TypeError, "eqx.filter"),
        ("{'act': 'ones'}", TypeError, "got str"),
    ),
    *all_of(
        "leaf 'z'",
        c.WITH_TWO_LIMITS,
        ("{'z': 1j * x}", TypeError, "complex", "no order"),
    ),
    *all_of("loss", c.WITH_LOSS, *each(TypeError, "True", "'1.0'", "1j")),
    *all_of(
        "loss",
        c.WITH_LOSS,
        ("x", TypeError, "scalar", "(3,)"),
        ("{'a': 1}", TypeError, "'a'"),
    ),
    *written("""
clip.update({'e': sparse}, None)
    TypeError: leaf 'e' | optax.masked
clip.init({'e': jnp.ones(2, 'float8_e4m3fn')})
    TypeError: leaf 'e' is float8_e4m3fn | optax.masked
clip.update(x, state_of(clip), x, 1.0)
    TypeError: loss=loss | 1.0
clip.update({'a': x}, None, {'b': x})
    ValueError: params | no leaf at a
adagc().update({'kernel': x}, state_of(adagc()))
    ValueError: adagc | [(), ()]
adagc(axes=0).update({'kernel': jnp.ones((4, 5))},
    state_of(adagc(axes={'kernel': 0})))
    ValueError: adagc | (1, 5) | (1, 3)
tx = bounded(sgd, accumulate=2); tx.update({'w': jnp.sin}, tx.init(x))
    TypeError: leaf 'w' | array of numbers
tx = bounded(sgd, project=max_norm(1.0)); tx.update(grads, tx.init(params))
    ValueError: params | clipjax.max_norm needs them, as in tx.update(updates,
keep_norm().apply(params)
    ValueError: old | weights before the update
violations(params, keep_norm())
    ValueError: old | old=old
keep_norm().apply(params, [params])
    ValueError: old | structure | kernel
keep_norm().apply({'w': jnp.ones((2, 3))}, {'w': jnp.ones((3, 2))})
    ValueError: old | 'w' | (2, 3)
"""),
]

STATES = [  # and steps
    *steps(
        c.STATES,
        "$.update(grads, adam.init(params), params)",
        TypeError,
        *("state", "tuple"),
    ),
    *[
        row
        for state in ("None", "optax.EmptyState()")
        for row in (
            *steps(c.REMEMBER, f"$.update(grads, {state})", ValueError, "state"),
            *steps(c.SKIP, f"$.update(grads, {state}, params)", ValueError, "state"),
        )
    ],
    *written("""
zclip().update(grads, state_of(autoclip()))
    TypeError: state | zclip | autoclip | like=, what init of the old chain returns
bounded(sgd, accumulate=2).update(grads, state_of(bounded(sgd)))
    TypeError: state | bounded with accumulate= needs the state
bounded(sgd, accumulate=2).update(grads, None)
    ValueError: state | bounded with accumulate= needs the state
autoclip(window=16).update(x, state_of(autoclip(window=8)))
    ValueError: window: the state was made with 8, got 16
skip_spikes(sgd, window=16).update(x, state_of(skip_spikes(sgd, window=8)), x)
    ValueError: window: the state was made with 8, got 16
record_norms(keep=2).update(x, state_of(record_norms(keep=3)))
    ValueError: keep | made with 3, got 2
record_norms('leaf', keep=2).update(x, record_norms('leaf', keep=2).init(params))
    ValueError: state | 2 norms
record_norms(probes={'a': 0}).update(grads, state_of(record_norms(probes={'a': 0})))
    ValueError: taps | probe=True | None
named('a', sgd).update(grads, state_of(named('b', sgd)))
    ValueError: name | b
clip_by_global_norm(schedule).update(grads, None)
    ValueError: max_norm | schedule | state
tangent_cone(schedule).update(grads, None, params)
    ValueError: bound | schedule | state
max_norm(schedule).apply(params)
    ValueError: bound | schedule | step=
violations(params, max_norm(schedule))
    ValueError: bound | schedule | step=
"""),
]

LOGITS = written("""
qk_clip(query='q').init(heads)
    ValueError: query, key: no layer has both 'q' and 'key' | leaf 'key/kernel' of shape
qk_clip().init(flat)
    ValueError: kernels (in, heads, head_dim) | leaf 'query' of shape (4, 4)
qk_clip(query='qk', key='qk').init(heads)
    ValueError: query, key | 'qk'
qk_clip().init(params)
    ValueError: 'query' | 'key' | kernel
qk_clip().apply(heads)
    ValueError: max_logits | largest logit
tx = qk_clip(); tx.update(heads, tx.init(heads), heads)
    ValueError: max_logits | tx.update
violations(heads, qk_clip())
    ValueError: max_logits
qk_clip().apply(heads, max_logits='2.0')
    TypeError: max_logits | '2.0'
qk_clip().apply(heads, max_logits=jnp.ones(3))
    ValueError: max_logits | (3,) | 'query/kernel' | (4, 2, 3)
qk_clip().apply(kernels, max_logits=jnp.ones((4, 2)))
    ValueError: does not fit
qk_clip().apply({'a': heads}, max_logits=1.0)
    ValueError: does not fit
qk_clip().apply({'a': heads}, max_logits={'b': jnp.ones(2)})
    ValueError: 'b' is not the whole path
qk_clip().apply({'a': heads}, max_logits={})
    ValueError: max_logits: {} names none of the layers: 'a'
qk_clip().apply(kernels | {'dec': heads}, max_logits={'dce': x})
    ValueError: 'dce' is not the whole path of an attention layer, which are: 'dec', ''
qk_clip().apply({**heads, 'key': {'kernel': jnp.ones((4, 3, 3))}},
    max_logits=jnp.ones(2))
    ValueError: the number of key heads divides that of query heads
""")
LOGITS += [  # keys and values in one kernel, flat keys, and too much or nothing left
    Row(
        f"qk_clip(rope={rope}).init({{'a': {{'query': jnp.ones((4, 3, 6)), "
        f"'key': jnp.ones({key})}}}})",
        ValueError,
        ("in the layer 'a'", "do not fit together", "(4, 3, 6)", f"got {rope}"),
    )
    for key, rope in (
        ((4, 3, 12), 0),
        ((4, 2, 3, 6), 0),
        ((4, 18), 0),
        ((4, 3, 6), 6),
        ((4, 3, 2), 3),
    )
]

OLD_STATES = written("""
adopt(None, into=state_of(adam))
    TypeError: old | optimizer state | None
adopt(state_of(adam), into=adam)
    TypeError: into | tx.init | function
adopt(x, into=jax.eval_shape(adam.init, x))
    TypeError: into | ShapeDtypeStruct
adopt(params, into=state_of(adam))
    TypeError: old | like= | 'kernel'
adopt(state_of(adam), into=state_of(adam), drop=1)
    TypeError: drop | 1
adopt({'v': x}, into=state_of(adam), like={'w': x})
    ValueError: only like has [w] | only old has [v]
adopt(adam.init(params), into=sgd.init(params))
    ValueError: old | ScaleByAdamState at '0' | drop=('ScaleByAdamState',)
adopt(adam.init(x), into=adam.init(x), drop=['clip'])
    ValueError: drop | clip names nothing
adopt(adam.init(params), into=adam.init(other_shape))
    ValueError: 'mu/kernel' of ScaleByAdamState at '0' is float32[4, 3] | float32[3]
adopt(adam.init({'a': x}), into=adam.init({'b': x}), drop=True)
    ValueError: ScaleByAdamState at '0' has mu/a, nu/a | has mu/b, nu/b
adopt(adam.init(x), into=optax.chain(adam, adam).init(x))
    ValueError: old has 1 | into has 2 | at '0/0', ScaleByAdamState at '1/0'
adopt(x, into=adam.update(x, adam.init(x))[1], like=x)
    ValueError: into | '0/count' is 1
""")

METRICS = written("""
metrics(adam.init(params))
    ValueError: opt_state | no state | tx.init
metrics(params)
    ValueError: opt_state | kernel
metrics(clip)
    ValueError: opt_state | tx.init
bad_steps(state_of(clip))
    ValueError: opt_state | record_norms('leaf', keep=16)
bad_steps(clip)
    ValueError: opt_state | tx.init
jax.jit(lambda s: len(bad_steps(s)))(record_norms(keep=2).init(x))
    TypeError: opt_state | outside jit
bad_steps(jax.vmap(record_norms(keep=2).init)(x))
    ValueError: opt_state | stacked | (3,) | x[0]
unless_skipped(state_of(clip), new=x, old=x)
    ValueError: opt_state | no skip
unless_skipped(state_of(skip_nonfinite(sgd)), new=x, old=x[1:])
    TypeError: same shapes | (3,) | (2,)
unless_skipped(state_of(skip_nonfinite(sgd)), new=x, old={})
    ValueError: new and old | structure
unless_skipped(jax.vmap(skip_nonfinite(sgd).init)(x), new=x, old=x)
    ValueError: opt_state | (3,) | jax.vmap
violations(params, adam)
    TypeError: projection | last one
jax.jit(lambda p: violations(p, max_norm(3.0, axes=0)))(params)
    TypeError: params | traced | jit
jax.jit(lambda b: violations(params, max_norm(b)))(1.0)
    TypeError: traced
series(state_of(clip), 'a')
    TypeError: history | clipjax.metrics
series([{'a': 1.0}, {2: 1.0}], 'a')
    TypeError: history | 2
series([], 'zclip')
    ValueError: name | 'zclip' | none
series({'a/norm': x}, 'zclip')
    ValueError: name | 'zclip' | a/norm
series({'a/norm': x, 'a/steps': x[:2]}, 'a')
    ValueError: history['a/steps'] | 3 steps | got 2
series({'a/norm': 1.0}, 'a')
    TypeError: history['a/norm'] | pass the list of what clipjax.metrics returned | 1.0
series({'a': [None]}, 'a')
    TypeError: history['a'] | None
jax.jit(lambda x: series({'a': x}, 'a'))(x)
    TypeError: history['a'] | known
suggest('1.0')
    TypeError: norms | '1.0'
suggest([jnp.nan])
    ValueError: norms | none is finite, of 1
suggest(x, {'clip': clip})
    ValueError: rules['clip'] | threshold | np.mean(norms >
suggest(x, {'zclip': zclip})
    TypeError: rules['zclip'] | call it
suggest(x, [zclip()])
    TypeError: rules | mapping
explain(jnp.sum, x, usual=(params,))
    ValueError: usual
jax.jit(lambda x: len(explain(jnp.sum, x)))(x)
    TypeError: x | outside jit
""")

LAYERS = written("""
clip_gradient_by_norm(x, 1.0, tap=x)
    TypeError: tap | clipjax.tap()
clip_gradient_by_value(x, -1.0, 1.0, tap=tap)
    TypeError: tap | function
tapped(x)
    ValueError: gradient | (..., 4)
probe(x, tap())
    TypeError: tap | probe=True
replace_gradient(jnp.round, None)
    TypeError: backward | None
replace_gradient(1.0, jnp.round)
    TypeError: forward | 1.0
replace_gradient(jnp.round, jnp.sum)(x)
    TypeError: forward and backward | float32[3] | float32[]
replace_gradient(lambda x: {'a': x}, lambda x: {'b': x})(x)
    TypeError: forward and backward | 'a  | 'b
jax.jvp(lambda x: clip_gradient_by_norm(x, 1.0), (x,), (x,))
    TypeError: forward-mode
""")

NAMES = written("""
clip_by_global_norm(clip_norm=1.0)
    TypeError: clip_by_global_norm | 'clip_norm'
max_norm()
    TypeError: max_norm | bound
bounded(adam, clip)
    TypeError: bounded | positional
bounded(adam, clipping=clip)
    TypeError: bounded | 'clipping'
""")  # in Python's own words

CALLS = [
    *(*NUMBERS, *SHAPES, *AXES, *CHAINS, *TREES, *STATES),
    *(*LOGITS, *OLD_STATES, *METRICS, *LAYERS, *NAMES),
]
