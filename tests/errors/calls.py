"""Calls with a wrong argument in the place of $, many with its name: the rows and
columns of `table.py`.

Most follow from the signatures of the public functions and from the contract's rows: a
parameter of one name has one rule, and a new member is called wrongly like the others.
"""

import inspect

import clipjax
from tests.contract.members import FIRST, USERS_OWN, Row

# Parameters by their rules. A bound is at least 0, unless it is one of entries.
BOUND_NAMES = {
    *("max_norm", "max_norms", "bound", "threshold", "clipping"),
    *("relative_bound", "z_threshold", "rate", "low", "high"),
}
NUMBER_NAMES = {  # finite
    *("eps", "decay", "clip_factor", "quantile", "percentile"),
    *("learning_rate", "initial_max_norm", "factor"),
}
COUNT_NAMES = {"window", "warmup_steps", "max_consecutive", "accumulate", "rope"}

# What stands for arguments that have to be there, and members that need more.
GIVEN = {
    "optimizer": "sgd",
    "function": "lambda w: w",
    "low": "0.0",
    "high": "9.0",
    "max_norms": "{'*': 1.0}",
    "axes": "None",
    "x": "x",
    "tree": "x",
}
WHOLE = {
    "bounded": "bounded(sgd, clip=clip, nonfinite='skip')",
}

SIGNATURES = {
    prefix + name: dict(inspect.signature(getattr(room, name)).parameters)
    for prefix, room in (("", clipjax), ("functional.", clipjax.functional))
    for name in room.__all__
    if inspect.isfunction(getattr(room, name))
}


def call_of(name: str, tree: str = "x", **given: str) -> str:
    """Write a call with these arguments, and what has to be there beside them."""
    needed = {
        k: {**GIVEN, "x": tree, "tree": tree}.get(k, "1.0")
        for k, x in SIGNATURES[name].items()
        if x.default is x.empty and x.kind != x.VAR_POSITIONAL
    }
    if name.endswith("by_value"):  # one bound, or two limits
        two = given.keys() & {"low", "high"}
        needed |= {"low": "0.0", "high": "9.0"} if two else {"bound": "1.0"}
    both = ", ".join(f"{k}={x}" for k, x in (needed | given).items())
    return f"{name}({both})"


def calls_with(names: set[str]) -> list[tuple[str, str, str]]:
    """Return `(function, parameter, call)` for the parameters with these names."""
    return [
        (name, k, call_of(name, **{k: "{'*': $}" if k == "max_norms" else "$"}))
        for name, signature in SIGNATURES.items()
        for k in signature
        if k in names
    ]


def forms_of(name: str, argument: str) -> str:
    """Say which forms a number has: "scalar" is no array, "constant" no schedule,
    "optional" may be None, "signed" below 0.
    """
    row, number = FIRST[name], argument in NUMBER_NAMES
    # `adagc` clips all leaves together while it warms up.
    of_tree = row.shares in ("tree", "group") or row.skips or name == "adagc"
    forms = {
        "scalar": of_tree and not number,
        "constant": number or row.kind in ("function", "layer"),
        "optional": SIGNATURES[name][argument].default is None,
        "signed": argument == "factor"
        or (argument in ("low", "high") and row.shares == "entry"),
    }
    return " ".join(form for form, has in forms.items() if has)


# Names of numbers, calls that have one in the place of $, and its forms.
NUMBERS = [
    ("max_norms['*']" if k == "max_norms" else k, call, forms_of(name, k))
    for name, k, call in calls_with(BOUND_NAMES | NUMBER_NAMES)
]
NUMBERS += [("low['kernel']", "box({'kernel': $}, 9.0)", "signed")]
FINITE = [(k, call) for _, k, call in calls_with(NUMBER_NAMES)]
COUNTS = [(k, call) for _, k, call in calls_with(COUNT_NAMES)]
AT_LEAST_1 = [each for each in COUNTS if each[0] not in ("warmup_steps", "rope")]
DECAYS = [each for each in FINITE if each[0] == "decay"]
RATES = [(k, call) for _, k, call in calls_with({"rate"})]
ORDERS = [call for _, _, call in calls_with({"ord"})]
TRANSFORMATIONS = [(k, call) for _, k, call in calls_with({"optimizer"})]
TRANSFORMATIONS += [("clip", "bounded(adam, clip=$)")]
IN_ORDER = [
    call_of(name, low="$", high="1.0")
    for name, signature in SIGNATURES.items()
    if {"low", "high"} <= signature.keys()
]


def of_kinds(*kinds: str) -> dict[str, Row]:
    return {name: row for name, row in FIRST.items() if row.kind in kinds}


def applied(name: str, tree: str, **given: str) -> str:
    """Write a call that also meets a tree."""
    call = WHOLE.get(name) or call_of(name, tree, **given)
    if name in of_kinds("clip", "step"):
        return f"{call}.init({tree})"
    if name in of_kinds("projection"):
        old = f", {tree}" if FIRST[name].params else ""
        return f"{call}.apply({tree}{old})"
    return call


# Calls with axes, and those of them that reduce an int of matrices only.
AXES = [applied(name, "params", axes="$") for name, _, _ in calls_with({"axes"})]
OF_MATRICES = [
    applied(name, "params", axes="$")
    for name, _, _ in calls_with({"axes"})
    if name in of_kinds("clip", "step", "projection")
]
WITH_PARAMS = [("record_norms", "record_norms(of='params')")]
WITH_PARAMS += [
    (name, call_of(name))
    for name, row in FIRST.items()
    if row.params or (row.kind == "projection" and row.tree != "heads")
]
TAKE_A_TREE = [
    applied(name, "$", **{k: "None" for k in ("axes",) if k in SIGNATURES[name]})
    for name, row in FIRST.items()
    if name not in USERS_OWN
]
TAKE_A_TREE += [
    "clip.update($, None)",
    "clip_by_value(1.0).update($, None)",
    "violations($, max_norm(3.0, axes=None))",
    "functional.global_norm($)",
    "functional.leaf_norms($)",
    "functional.unitwise_norms($, axes=None)",
]
WITH_TWO_LIMITS = [
    "clip_by_value(-1.0, 1.0).init($)",
    "box(-1.0, 1.0).apply($)",
    "non_negative().init($)",
    "functional.clip_by_value($, -1.0, 1.0)",
    "clip_gradient_by_value($, -1.0, 1.0)",
]
WITH_LOSS = [
    f"tx = {name}(sgd); tx.update(grads, tx.init(params), params, loss=$)"
    for name in ("skip_nonfinite", "skip_spikes")
]
STATES = [
    (name, WHOLE.get(name) or call_of(name))
    for name in of_kinds("clip", "step")
    if name != "bounded"  # whose states are those of others
]
REMEMBER = [each for each in STATES if FIRST[each[0]].remembers]
SKIP = [each for each in STATES if FIRST[each[0]].skips]
SKIP += [("max_norm", "max_norm(schedule)")]
STATES += [("max_norm", "max_norm(schedule)")]
BY_LEAF = [
    ("threshold", "clip_by_rms($).init(params)"),
    ("bound", "clip_by_value($).init(params)"),
    ("low", "clip_by_value(low=-$, high=1.0).init(params)"),
    ("clipping", "adaptive_grad_clip($).init(params)"),
    ("low", "box(-$, 1.0).apply(params)"),
    ("high", "box(-1.0, $).init(params)"),
    ("low", "functional.clip_by_value(params, -$, 1.0)"),
    ("max_norm", "functional.clip_by_norm(params, $, axes=0)"),
    ("factor", "scale_gradient(params, $)"),
    ("max_norm", "clip_gradient_by_norm(params, $, axes=0)"),
    ("high", "clip_gradient_by_value(params, -1.0, $)"),
]
BY_UNIT = [
    ("max_norm", "clip_by_norm($, axes=0).init(params)"),
    ("bound", "tangent_cone($).init(params)"),
    ("bound", "max_norm($).apply(params)"),
    ("high", "min_max_norm(0.5, $).apply(params)"),
    ("rate", "min_max_norm(0.5, 1.0, rate=$).init(params)"),
    ("rate", "keep_norm(rate=$, axes=0).init(params)"),
    ("bound", "spectral_cap($).apply(params)"),
]
ATTENTION = [
    "max_norm(3.0).apply(attention)",
    "unit_norm().init(attention)",
    "tangent_cone(3.0).init(attention)",
    "optax.chain(adam, min_max_norm(0.0, 3.0)).init(attention)",
    "spectral_cap(1.0).apply(attention)",
]
PATTERNS = [
    ("max_norms", "clip_by_group_norm({$: 1.0}).init(params)"),
    ("groups", "record_norms([$]).init(params)"),
    ("low", "box({$: 0.0}, 1.0).apply(params)"),
    ("where", "non_negative(where=$).apply(params)"),
    ("patterns", "optax.masked(clip, matching($)).init(params)"),
    ("axes", "max_norm(3.0, axes={$: 0}).apply(params)"),
    ("flatten", "spectral_cap(1.0, flatten={$: (0, 1)}).apply(params)"),
    ("bound", "max_norm({$: 1.0}).apply(params)"),
    ("low", "min_max_norm({$: 1.0}, 2.0).apply(params)"),
]
