"""explain names the operation, the line, the pass and the iteration."""

import functools
import importlib
import inspect
import linecache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import clipjax
from clipjax.explaining.watch import Watch
from tests.contract.members import FIRST
from tests.support.programs import apply, start, tree_of, weights_of

X = jax.random.normal(jax.random.key(0), (8, 4))
SQUARE = jnp.eye(4) + 0.1
LAYERS = jnp.stack([SQUARE / 2] * 6)


# Each function breaks in the line that ends in "# here".
def overflow_in_a_scan(params: Any, x: Any) -> Any:
    def block(x: Any, w: Any) -> Any:
        h = x @ w  # here
        return h - h.mean(), None

    x, _ = lax.scan(jax.checkpoint(block), jnp.float16(x), jnp.float16(params))
    return jnp.mean(x**2)


def root_behind_where(w: Any, x: Any) -> Any:
    h = jnp.maximum(x @ w, 0)
    return jnp.where(h > 0, jnp.sqrt(h), 0).sum()  # here


def norm_at_0(w: Any) -> Any:
    return jnp.linalg.norm(w * 0)  # here


def logarithm(w: Any, x: Any) -> Any:
    return jnp.log(x @ w - 10).sum()  # here


def slope_of_logarithm(w: Any) -> Any:
    return jnp.where(w > 5, jnp.log(w - w), 0).sum()  # here


def all_masked(w: Any, x: Any) -> Any:
    scores = x @ w @ x.T
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool), -1), scores, -jnp.inf)
    return (jax.nn.softmax(scores) @ x).sum()  # here


def two_infinities(x: Any) -> Any:
    return (jnp.log(0 * x) - jnp.log(0 * x)).sum()


def masked_mean(x: Any, mask: Any) -> Any:
    return (x * mask).sum() / mask.sum()  # here


def not_definite(a: Any) -> Any:
    return jnp.linalg.cholesky(a)[0, 0]  # here


def exponential(w: Any, x: Any) -> Any:
    return jnp.exp(100 * x @ w).sum()  # here


def one_element(x: Any) -> Any:
    return jnp.var(x, ddof=1)  # here


def logit(q: Any, k: Any) -> Any:
    scores = jnp.float16(q) @ jnp.float16(k).T  # here
    return jax.nn.softmax(scores).sum()


def nested_scans(x: Any) -> Any:
    def inner(h: Any, i: Any) -> Any:
        h = h + jnp.where(i == 13, jnp.log(-h * h), 0)  # here
        return h, h.sum()

    def outer(h: Any, i: Any) -> Any:
        return lax.scan(inner, h, 4 * i + jnp.arange(4))

    return lax.scan(outer, x, jnp.arange(5))[1]


def doubled(x: Any) -> Any:
    def step(c: Any) -> Any:
        return c[0] + 1, c[1] * 2  # here

    return lax.while_loop(lambda c: c[0] < 200, step, (0, x))[1]


def branch(x: Any) -> Any:
    def bad(x: Any) -> Any:
        return jnp.sqrt(x - 100)  # here

    return lax.cond(x.sum() > 1e9, lambda x: x, bad, x)


@jax.custom_vjp
def lame(x: Any) -> Any:
    return x


lame.defvjp(lambda x: (x, None), lambda _, g: (jnp.log(g * 0 - 1),))


def rule(x: Any) -> Any:
    return lame(x).sum()  # here


def in_vmap(w: Any, x: Any) -> Any:
    return jax.vmap(lambda row: jnp.sqrt(row @ w - 50))(x).sum()  # here


def own_division(w: Any, mean: Any) -> Any:
    gradient = jax.grad(lambda w: (w**2).sum())(w)
    return w - gradient / jnp.sqrt(mean)  # here


def calls_jit(w: Any, x: Any) -> Any:
    @jax.jit
    def inner(h: Any) -> Any:
        return jnp.arctanh(h * 9)  # here

    return inner(x @ w).sum()


grad = jax.value_and_grad
ONE = jnp.ones(1)
TABLE = [
    (
        overflow_in_a_scan,
        grad,
        (LAYERS.at[3].mul(3e4), 30 * X),
        "dot_general",
        "forward",
        ((3, 6),),
    ),
    (root_behind_where, grad, (SQUARE * 0, X), "div", "backward", ()),
    (norm_at_0, grad, (X,), "div", "backward", ()),
    (logarithm, grad, (SQUARE, X), "log", "forward", ()),
    (slope_of_logarithm, grad, (X,), "div", "backward", ()),
    (all_masked, grad, (SQUARE, X), "sub", "forward", ()),
    (masked_mean, grad, (X, 0 * X), "div", "forward", ()),
    (not_definite, jax.jit, (-SQUARE,), "cholesky", "forward", ()),
    (exponential, grad, (SQUARE, X), "exp", "forward", ()),
    (one_element, jax.jit, (ONE,), "", "", ()),
    (logit, jax.jit, (400 * X, 400 * X), "dot_general", "forward", ()),
    (nested_scans, jax.jit, (X,), "log", "forward", ((3, 5), (1, 4))),
    (doubled, jax.jit, (ONE,), "mul", "forward", ((127, None),)),
    (branch, jax.jit, (X,), "sqrt", "forward", ()),
    (rule, grad, (X,), "log", "backward", ()),
    (in_vmap, grad, (SQUARE, X), "sqrt", "forward", ()),
    (own_division, jax.jit, (X * 0, 0 * X), "div", "after", ()),
    (calls_jit, grad, (SQUARE, X), "atanh", "forward", ()),
]


def line_of(function: Any) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(k for k, text in enumerate(lines) if text.endswith("# here\n"))


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case[0].__name__)
def test_names_the_operation_its_line_pass_and_iteration(case: Any) -> None:
    function, transformed, args, operation, began_in, iterations = case
    cause = clipjax.explain(transformed(function), *args)[0]
    assert cause.line == line_of(function), str(cause)
    assert cause.operation == operation, str(cause)
    assert cause.began_in == began_in, str(cause)
    assert cause.iterations == iterations, str(cause)
    assert cause.file == __file__
    assert f"{cause.function})" in str(cause)


def told(function: Any, *args: Any, **more: Any) -> list[str]:
    return [str(cause) for cause in clipjax.explain(function, *args, **more)]


def test_the_text_has_operands_limit_and_where_it_became_nan() -> None:
    (text,) = told(grad(overflow_in_a_scan), LAYERS.at[3].mul(3e4), 30 * X)
    assert "inf in the forward pass, iteration 3 of 6, at test_explain.py:" in text
    assert "dot_general of float16[8, 4] up to" in text
    assert "params[3] up to 1.65e+04, in 22 of 32 elements, first at [0, " in text
    assert "]; float16 ends at 65504; it became nan" in text
    assert text.count("became nan") == 1
    (text,) = told(grad(root_behind_where), SQUARE * 0, X)
    assert "the slope of sqrt at 0 (div of 0.5 and" in text
    assert text.endswith("it became nan there (0 · inf)")
    (text,) = told(grad(norm_at_0), X)
    assert "by jax norm: the slope of sqrt at 0" in text
    (text,) = told(grad(all_masked), SQUARE, X)
    assert ": -inf - -inf; a whole row of the softmax is -inf, in 8 of 64" in text
    (text,) = told(two_infinities, X)
    assert text.endswith("it became nan there (-inf - -inf) (and once more)")
    assert "0 / 0 (div of" in told(masked_mean, X, 0 * X)[0]
    assert "a division by 0" in told(lambda z: (1 / z).sum(), jnp.zeros(2, complex))[0]
    assert "which is not positive definite" in told(not_definite, -SQUARE)[0]
    assert "nan from a constant, at " in told(one_element, ONE)[0]
    assert "by jax var" in told(one_element, ONE)[0]
    assert "least " in told(logarithm, SQUARE, X)[0]
    assert "float16 ends at 65504" in told(logit, 400 * X, 400 * X)[0]
    assert told(jnp.float16, jnp.float32(1e6))[0].endswith("float16 ends at 65504")


def test_nan_is_followed_through_a_median() -> None:
    """Which selects a constant NaN if an element is NaN."""
    causes = clipjax.explain(lambda x: jnp.median(jnp.log(x - 99)), X)
    assert [cause.operation for cause in causes] == ["log"]
    (cause,) = clipjax.explain(jnp.median, X.at[0, 0].set(jnp.nan))
    assert cause.given == "a"


def test_a_constant_of_a_branch_comes_from_what_chose_it() -> None:
    def guarded(x: Any) -> Any:
        y = jnp.exp(200 * x)
        return lax.cond(jnp.isfinite(y).all(), jnp.sum, lambda y: jnp.inf, y)

    assert clipjax.explain(guarded, 0 * X) == []
    causes = clipjax.explain(guarded, jnp.ones(2))
    assert [cause.operation for cause in causes] == ["exp"]

    def flagged(x: Any) -> Any:
        return lax.cond(jnp.isfinite(x).all(), jnp.sum, lambda x: jnp.nan, x)

    (cause,) = clipjax.explain(flagged, jnp.array([jnp.inf, 1.0]))
    assert (cause.kind, cause.given) == ("nan", "a constant")


def test_checks_of_masks_and_skips_by_isnan() -> None:
    def guarded(x: Any) -> Any:
        scores = jnp.where(x > 0, x, -jnp.inf).at[:, 0].set(0)
        rows = jnp.isfinite(scores).any(-1)
        return jnp.where(rows, jax.nn.softmax(scores).sum(-1), 0).sum()

    assert clipjax.explain(jax.jit(guarded), X) == []

    def skipping(x: Any) -> Any:
        loss = jnp.log(x - 99).sum()
        return lax.cond(jnp.isnan(loss), lambda x: x * 0, lambda x: x, x)

    (cause,) = clipjax.explain(jax.jit(skipping), X)
    assert cause.handled
    assert cause.operation == "log"


def masked_softmax(x: Any, bias: Any) -> Any:
    e = jnp.exp(x + bias)
    return (e / e.sum(-1)).mean()


def missing_labels(x: Any, y: Any) -> Any:
    return jnp.where(jnp.isnan(y), 0.0, jnp.exp(x) - y).sum()


def discarded(x: Any) -> Any:
    return jnp.where(x >= 0, jnp.log(x), 0).sum()


def narrowed(x: Any, bias: Any) -> Any:
    return jax.nn.softmax((x + bias).astype(jnp.float16)).sum()


@pytest.mark.parametrize(
    ("function", "args", "operation", "first"),
    [
        (masked_softmax, ([90.0, 1.0, 90.0], [-np.inf, 0.0, 0.0]), "exp", 2),
        (missing_labels, ([1.0, 1.0, 90.0], [0.0, np.nan, 0.0]), "exp", 2),
        (discarded, ([-1.0, 1.0, 0.0],), "log", 2),
        (narrowed, ([1.0, 1.0, 1e6], [-np.inf, 0.0, 0.0]), "convert_element_type", 2),
    ],
)
def test_harmless_elements_do_not_hide_those_that_broke_beside_them(
    function: Any, args: Any, operation: str, first: int
) -> None:
    (cause,) = clipjax.explain(function, *map(jnp.float32, args))
    assert (cause.kind, cause.operation, cause.given) == ("inf", operation, "")
    assert (cause.bad.elements, cause.bad.first) == (1, (first,))
    assert "up to inf" not in str(cause)


def test_an_empty_row_is_told_beside_nan_and_where_nan_chose_the_mask() -> None:
    def attend(x: Any, mask: Any) -> Any:
        weights = jax.nn.softmax(jnp.where(mask, x, -jnp.inf))
        return jnp.where(jnp.isnan(x).all(-1), 0, weights.sum(-1)).sum()

    x = jnp.float32([[1, 2], [3, 4], [np.nan, np.nan]])
    causes = clipjax.explain(attend, x, jnp.arange(3)[:, None] != 1)
    assert [(cause.given, cause.operation) for cause in causes] == [
        ("x", ""),
        ("", "sub"),
    ]
    assert "a whole row of the softmax is -inf" in causes[1].what
    assert causes[1].bad.first == (1, 0)

    def pool(x: Any) -> Any:
        return jax.nn.softmax(jnp.where(jnp.isnan(x), -jnp.inf, 1.0)).sum()

    (text,) = told(pool, x)
    assert "a whole row of the softmax is -inf, in 2 of 6 elements, first at [2" in text


def test_missing_values_that_are_masked_or_counted_are_no_skip() -> None:
    def loss(w: Any, y: Any) -> Any:
        known = ~jnp.isnan(y)
        squares = jnp.where(known, (w - jnp.where(known, y, 0)) ** 2, 0)
        return squares.sum() / known.sum(), jnp.isnan(y).mean()

    args = jnp.ones(3), jnp.float32([1, np.nan, 2])
    watched = jax.value_and_grad(loss, has_aux=True)
    assert clipjax.explain(watched, *args) == []
    outlier = args[0].at[0].set(100)
    (first, *_) = clipjax.explain(watched, outlier, args[1], usual=args)
    assert (first.given, first.times) == ("w", 100)


def test_parts_of_arguments_have_their_own_index_or_none() -> None:
    def later(x: Any) -> Any:
        return lax.scan(lambda c, x: (c + jnp.log(x).sum(), None), 0.0, x[1:])[0]

    def shaped(x: Any) -> Any:
        x = x.reshape(2, 2, 2)
        return lax.scan(lambda c, x: (c + jnp.log(x).sum(), None), 0.0, x)[0]

    x = jnp.ones((4, 2)).at[2, 1].set(0)
    places = {
        later: "log of x[2], least 0, in 1 of 2 elements, at [1]",
        shaped: "log of x as float32[2, 2], least 0, in 1 of 4 elements, at [0, 1]",
        lambda x: jnp.log(x[2]).sum(): "log of x[2], least 0, in 1 of 2 elements, at",
        lambda x: jnp.log(x[::-1]).sum(): "log of x as float32[4, 2], least 0",
        lambda x: jnp.log(x.T[1]).sum(): "log of x as float32[4], least 0",
        lambda x: later(x[None][0]): "log of x as float32[2], least 0",
        lambda x: 1 / x.sum(1)[2]: "div of 1 and the sum of x, least 0",
    }
    for function, place in places.items():
        given = x.at[2, 0].set(0) if "sum of" in place else x
        assert place in told(function, given)[0]


def test_strict_promotion_and_meshes_of_auto_axes() -> None:
    with jax.numpy_dtype_promotion("strict"):
        assert "log of" in told(discarded, jnp.zeros(2))[0]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec("d")
    with jax.set_mesh(mesh):
        roots = jax.sharding.auto_axes(jnp.sqrt, out_sharding=spec)
        x = jax.device_put(-jnp.ones(4), jax.sharding.NamedSharding(mesh, spec))
        assert "sqrt of" in told(jax.jit(lambda x: roots(x).sum()), x)[0]


def test_what_breaks_behind_a_fault_is_not_told_beside_it() -> None:
    """As masks do in NaN, whose maximum XLA on a CPU may lose; in many layers."""

    def net(weights: Any, x: Any) -> Any:
        for w in weights:
            scores = jnp.where(jnp.tri(4) > 0, x @ w @ x.T, -jnp.inf)
            x = x + jax.nn.gelu(jax.nn.softmax(scores) @ x)
        return x.sum()

    weights = [SQUARE] * 12
    weights[2] = weights[2].at[0, 0].set(jnp.inf)
    (cause,) = clipjax.explain(jax.value_and_grad(net), weights, X[:4])
    assert cause.given == "weights/2"

    def recursion(emit: Any, seen: Any) -> Any:
        def step(a: Any, k: Any) -> Any:
            return jax.nn.logsumexp(a[:, None] - 1, 0) + jnp.log(emit[:, k]), None

        return lax.scan(step, jnp.zeros(2), seen)[0]

    emit = jnp.float32([[0.5, 0], [0.4, 0]])
    (cause,) = clipjax.explain(recursion, emit, jnp.array([0, 1, 0, 0, 1]))
    assert cause.iterations == ((1, 5),)
    stacked = lambda weights, x: net(list(jnp.stack(weights)), x)  # noqa: E731
    (cause,) = clipjax.explain(stacked, weights, X[:4])
    assert cause.given == "weights/2"


def test_constants_that_meet_are_told() -> None:
    def best(x: Any) -> Any:
        each = jnp.max(x, axis=1, where=x > 99, initial=-jnp.inf)  # no element
        return (2 * each).sum()

    (cause,) = clipjax.explain(best, X)
    assert cause.given == "a constant"


def test_the_iteration_is_the_one_that_reached_the_result() -> None:
    def last(xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            return h, jnp.log(x)

        return lax.scan(step, 0.0, xs)[1][-1]

    (cause,) = clipjax.explain(last, jnp.array([-1.0, 1.0, -2.0]))
    assert cause.iterations == ((2, 3),)


def test_numbers_of_numpy_may_be_static_and_transfers_forbidden() -> None:
    power = jax.jit(lambda x, n: jnp.log(x**n).sum(), static_argnames="n")
    x = -jnp.ones(3)
    with jax.transfer_guard("disallow"):
        (cause,) = clipjax.explain(power, x, np.int64(3))
    assert cause.operation == "log"


def test_magnitudes_of_float64_are_those_of_float64() -> None:
    with jax.enable_x64(True):
        x = jnp.float64([1e200, 1.0])
        (cause,) = clipjax.explain(lambda x: (x * 1e200).sum(), x)
    assert cause.inputs[0].greatest == pytest.approx(1e200, rel=1e-5)
    assert "float64 ends at 1.79769e+308" in str(cause)


def test_a_slope_is_told_by_the_end_at_which_it_is_infinite() -> None:
    ends = [(jnp.sqrt, 0), (jnp.log, 0), (jnp.arccos, 1), (jnp.log1p, -1)]
    for function, x in ends:
        guarded = lambda x, f=function: jnp.where(x > 9, f(x), 0).sum()  # noqa: E731
        (cause,) = clipjax.explain(grad(guarded), jnp.full(2, float(x)))
        end = "at 0 (" if x == 0 else "at an end of its domain ("
        assert end in cause.what, str(cause)

    @jax.custom_vjp
    def own(x: Any) -> Any:
        return x

    own.defvjp(lambda x: (x, x), lambda x, g: (g / (x - 1),))
    (cause,) = clipjax.explain(jax.grad(lambda x: (own(x) ** 2).sum()), jnp.ones(2))
    assert cause.what.startswith("a division by 0")
    (text,) = told(jnp.arctanh, jnp.ones(2))
    assert "ends at" not in text


def test_arguments_are_named_by_parameter_and_path() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return ((batch["x"] @ params["w"]["kernel"]) ** 2).mean()

    params, batch = {"w": {"kernel": SQUARE}}, {"x": X}
    (cause,) = clipjax.explain(grad(loss), params, {"x": X.at[3, 2].set(jnp.nan)})
    assert str(cause).startswith("nan in batch/x: 1 of 32 elements, at [3, 2]")
    (cause,) = clipjax.explain(
        grad(loss), {"w": {"kernel": SQUARE.at[0, 1].set(jnp.inf)}}, batch
    )
    assert cause.given == "params/w/kernel"
    assert cause.line == inspect.getsourcelines(loss)[1] + 1
    assert set(cause.results) >= {"0", "1/w/kernel"}
    (cause,) = clipjax.explain(functools.partial(loss, params), {"x": jnp.nan * X})
    assert cause.given == "batch/x"


def best_of(x: Any) -> Any:
    def step(best: Any, row: Any) -> Any:
        return jnp.minimum(best, (row**2).sum()), best

    return lax.scan(step, jnp.inf, x)


HARMLESS = {
    "mask of -inf": lambda x: jax.nn.softmax(
        jnp.where(x > 0, x, -jnp.inf).at[:, 0].set(0)
    ).sum(),
    "mask of the least": lambda x: jax.nn.softmax(
        x + jnp.eye(8, 4, -4) * jnp.finfo(x.dtype).min * jnp.full(4, 2.0)
    ).sum(),
    "unused side": lambda x: jnp.where(
        x > 0, jnp.log(lax.stop_gradient(jnp.abs(x))), 0
    ).sum(),
    "empty maximum": lambda x: x.sum() + jnp.max(x[:0], initial=-jnp.inf).clip(0),
    "clip to infinity": lambda x: jnp.clip(x, -jnp.inf, jnp.inf).sum(),
    "exp of -inf": lambda x: jnp.exp(-jnp.exp(x + 200)).sum(),
    "logsumexp of -inf": lambda x: (
        jax.nn.logsumexp(jnp.array([-jnp.inf] * 3)).clip(0) + x.sum()
    ),
    "elements that are replaced": lambda x: jnp.nan_to_num(jnp.log(x - 99)).sum(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_infinities_that_reach_no_result_accuse_nobody(name: str) -> None:
    assert clipjax.explain(jax.jit(HARMLESS[name]), X) == []


def test_a_state_that_keeps_infinities_accuses_nobody() -> None:
    def remember(window: Any, x: Any) -> Any:
        return jnp.concatenate([window[1:], x.sum()[None]]), x.mean()

    window = jnp.full(8, jnp.inf)
    assert clipjax.explain(jax.jit(remember), window, X) == []
    causes = clipjax.explain(
        jax.jit(lambda w, x: remember(w, jnp.log(x - 99))), window, X
    )
    assert [cause.operation for cause in causes] == ["log"]


SKIPS = {
    "Optax": optax.apply_if_finite(optax.sgd(0.1), 5),
    "skip_nonfinite": clipjax.skip_nonfinite(optax.sgd(0.1)),
    "bounded": optax.chain(
        clipjax.record_norms(keep=3),
        clipjax.bounded(
            optax.sgd(0.1),
            clip=clipjax.clip_by_global_norm(1.0),
            nonfinite="skip",
        ),
    ),
}


@pytest.mark.parametrize("name", SKIPS)
def test_a_skipped_step_is_told_as_handled(name: str) -> None:
    """Although clipjax's states keep the norm of the step that was skipped."""
    skip = SKIPS[name]

    def step(params: Any, state: Any, x: Any, scale: Any) -> Any:
        gradient = jax.grad(lambda w: (x @ w * scale).sum() * scale)(params)
        updates, state = skip.update(gradient, state, params)
        metrics = {} if name == "Optax" else clipjax.metrics(state)
        return optax.apply_updates(params, updates), state, metrics

    state, fine, large = skip.init(SQUARE), jnp.ones(()), jnp.full((), 1e30)
    (cause, *_) = clipjax.explain(jax.jit(step), SQUARE, state, X, large)
    assert cause.handled
    assert cause.operation == "mul"
    assert str(cause).startswith(
        "the result is finite; a check of finiteness caught: inf"
    )
    assert clipjax.explain(jax.jit(step), SQUARE, state, X, fine) == []


@pytest.fixture
def models(tmp_path: Path, monkeypatch: Any) -> Any:
    """A library, and a user's package that calls it within wrappers of Flax."""
    for folder, package in (("site-packages", "layers"), ("dist-packages", "models")):
        (tmp_path / folder / package).mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / folder)
    library, users = (
        tmp_path / "site-packages/layers",
        tmp_path / "dist-packages/models",
    )
    (library / "__init__.py").write_text(
        "import jax.numpy as jnp\n\ndef root(x):\n    return jnp.sqrt(x)\n"
    )
    (users / "__init__.py").write_text(
        "import jax.numpy as jnp, layers\nfrom flax import nnx\n\n"
        "def loss(x):\n    return jnp.sum(layers.root(x))\n\n"
        "gradient = nnx.jit(nnx.grad(loss))\n"
    )
    return importlib.import_module("models")


def test_the_line_is_not_in_a_library(models: Any) -> None:
    """Wherever it is installed. If the user's own package is, the line is there."""

    def mine(x: Any) -> Any:
        return jnp.sum(models.layers.root(x))

    calls = [(mine, __file__), (models.loss, models.__file__)]
    calls += [(functools.partial(models.gradient), models.__file__)]
    # JAX keeps the user's line of a remat in the backward pass alone.
    calls += [(jax.value_and_grad(jax.checkpoint(mine)), __file__)]
    for function, file in calls:
        (cause,) = clipjax.explain(function, jnp.float32([-1.0, 4.0]))
        assert cause.file == file
        assert "layers.root(x)" in linecache.getline(file, cause.line)
        assert cause.library == "layers root"


def test_a_function_without_a_line_of_its_own_gets_none() -> None:
    (cause,) = clipjax.explain(jnp.log, jnp.zeros(2))
    assert (cause.file, cause.line) == ("", 0)
    assert str(cause) == "inf in the forward pass: log of x, least 0, in all 2 elements"


def test_one_fault_is_one_cause() -> None:
    """Where a function has no value, its slope is infinite as well."""

    def unit(x: Any) -> Any:
        length = jnp.sqrt((x**2).sum())
        return (x / length).sum()

    for function in (unit, lambda x: jnp.log(x).sum(), lambda x: (1 / x).sum()):
        (cause,) = clipjax.explain(grad(function), jnp.zeros(2))
        assert cause.began_in == "forward"

    def guarded(x: Any) -> Any:
        return jnp.where(x > 0, x / jnp.sqrt(x), 0).sum()

    (cause,) = clipjax.explain(grad(guarded), jnp.zeros(2))
    assert "the slope of div at 0" in cause.what


def test_at_most_three_operands_are_told() -> None:
    (text,) = told(lambda a: jnp.linalg.solve(a, X.T), 0 * SQUARE)
    assert "custom_linear_solve of a up to 0 and" in text
    assert text.endswith(" and 4 more, in 24 of 32 elements, first at [0, 0]")


def test_donated_arguments_are_copied_and_deleted_ones_an_error() -> None:
    step = jax.jit(lambda w, x: (w * 2, jnp.log(x @ w - 99)), donate_argnums=0)
    w = SQUARE + 0
    assert clipjax.explain(step, w, X)[0].operation == "log"
    step(w, X)
    with pytest.raises(
        ValueError, match="w: the array is deleted, since it was donated"
    ):
        clipjax.explain(step, w, X)


def test_a_call_under_jit_is_an_error() -> None:
    with pytest.raises(TypeError, match="x: explain needs known arrays"):
        jax.jit(lambda x: clipjax.explain(jnp.log, x))(X)


def test_what_is_not_an_array_is_closed_over() -> None:
    def loss(w: Any, activation: Any, power: int, name: str) -> Any:
        return (activation(w - 9) ** power).sum() if name == "log" else w.sum()

    assert clipjax.explain(loss, X, jnp.log, 2, "log")[0].operation == "log"


def test_the_host_is_not_called_again(capfd: Any) -> None:
    seen: list[int] = []

    def loss(x: Any) -> Any:
        jax.debug.callback(seen.append, 1)
        return jnp.log(x - 99).sum()

    assert clipjax.explain(jax.jit(loss), X)[0].operation == "log"
    jax.effects_barrier()
    assert seen == []


def test_unknown_primitives_are_named_whole() -> None:
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("d",), axis_types=(auto,))
    spec = jax.sharding.PartitionSpec("d")

    def loss(x: Any) -> Any:
        apart = jax.shard_map(
            lambda x: jnp.log(x - 99), mesh=mesh, in_specs=spec, out_specs=spec
        )
        return apart(x).sum()

    (cause,) = clipjax.explain(loss, X)
    assert cause.operation == "shard_map"


def test_usual_arguments_show_what_is_larger_and_where_it_grows() -> None:
    def loss(w: Any, x: Any, tap: Any) -> Any:
        def block(x: Any, w: Any) -> Any:
            h = jnp.sinh(x @ w)
            return jnp.tanh(h) + 0.1 * h, None

        x = clipjax.probe(x[jnp.arange(8)], tap)
        return (lax.scan(block, x, w)[0] ** 2).mean()

    tap = clipjax.tap(probe=True)
    watched = jax.value_and_grad(loss, (0, 2))
    usual = LAYERS, X, tap
    first, *rest = clipjax.explain(watched, LAYERS.at[4].mul(9), X, tap, usual=usual)
    assert (first.kind, first.given) == ("large", "w")
    assert first.times == pytest.approx(9)
    assert rest[0].line == inspect.getsourcelines(loss)[1] + 2
    assert rest[0].iterations[0][0] >= 4
    causes = clipjax.explain(watched, LAYERS, 4 * X, tap, usual=usual)
    assert causes[0].given == "x"
    assert not any(cause.library.startswith("clipjax") for cause in causes)
    assert clipjax.explain(watched, *usual, usual=usual) == []
    nothing = LAYERS, 0 * X, tap
    assert clipjax.explain(watched, *usual, usual=nothing)[0].times == np.inf
    with pytest.raises(ValueError, match="usual must be a tuple of arguments"):
        clipjax.explain(watched, *usual, usual=(LAYERS, X[:2], tap))


def test_the_watched_program_does_what_the_function_does() -> None:
    """Values and gradients, through scans, loops, branches, remat and custom rules."""

    def loss(w: Any, x: Any) -> Any:
        x = lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), x.sum())), x, w)[0]
        x = lax.fori_loop(0, 3, lambda i, x: x * 0.9 + i, x)
        x = lax.cond(x.sum() > 0, jax.nn.softmax, jnp.sin, x)
        x = jax.nn.relu(x - jnp.linalg.norm(x)) + jax.vmap(jnp.cumsum)(x)
        return jnp.mean(jax.jit(jnp.var)(x) + x**2)

    for ours, theirs in watched_and_not(grad(loss), LAYERS, X):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-7)


def watched_and_not(function: Any, *args: Any) -> Any:
    """Return pairs of each result with the same one of a watched program."""
    program = jax.make_jaxpr(function)(*args)
    run = jax.jit(lambda *xs: Watch({}).run(program.jaxpr, program.consts, xs)[0])
    watched = run(*jax.tree.leaves(args))
    return zip(watched, jax.tree.leaves(jax.jit(function)(*args)), strict=True)


@pytest.mark.slow
def test_the_watched_program_does_what_every_member_does() -> None:
    """And the same derivatives."""
    rows = list(FIRST.values())
    trees = [tree_of(row, seed=2) for row in rows]
    params = [weights_of(row) for row in rows]
    states = list(map(start, rows, trees, params, [0.5] * len(rows)))

    def results(trees: Any) -> Any:
        args = zip(rows, trees, states, params, strict=True)
        return [apply(row, *each, 0.5)[0] for row, *each in args]

    def results_and_slopes(trees: Any) -> Any:
        outs, transposed = jax.vjp(results, trees)
        return outs, transposed(outs)

    for ours, theirs in watched_and_not(results_and_slopes, trees):
        rounding = float(jnp.finfo(theirs.dtype).eps) * np.abs(theirs).max()
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=4 * rounding)


def test_an_answer_that_watching_cannot_give_is_no_empty_list() -> None:
    class Eager:  # bad where it is called, finite where it is traced
        def __call__(self, x: Any) -> Any:
            return x.sum() if isinstance(x, jax.core.Tracer) else x.sum() * jnp.nan

    (cause,) = clipjax.explain(Eager(), X)
    assert cause.kind == "unseen"
    assert "the result: bad in the call, but finite when" in str(cause)


def test_modules_that_change_in_place_are_results() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3, eps=0.0), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda m: (0 * m(x)).mean())(model)
        optimizer.update(model, gradient)
        return loss

    causes = clipjax.explain(step, model, optimizer, X)
    assert causes[0].operation == "div"
    assert causes[0].began_in == "update"
    assert causes[0].library == "optax scale_by_adam"
    assert any(name.startswith("model/") for name in causes[0].results)
    assert np.isfinite(np.asarray(model.kernel[...])).all()
