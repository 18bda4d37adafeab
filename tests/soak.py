"""Random trees, scales, bounds and wrappers against NumPy in float64: `python -m
tests.soak --seconds 60`.

Each structure of trees is one compiled program of all cases; a trial is one case on one
draw of values and bounds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax
from tests.contract.members import FIRST, Row
from tests.support import oracles as o
from tests.support.tolerances import tolerance
from tests.support.trees import bits, exact, fan_in_or_all

STRUCTURES = 4
SHAPES = [
    (),
    (1,),
    (7,),
    (0,),
    (3, 0),
    (5, 3),
    (2, 3, 4),
    (2, 1, 3, 4),
    (500, 8),
    (4000,),
    (10, 20, 20),
    (1, 1, 1, 1),
]
# The bounds of the columns of "m", as multiples of the drawn one.
SHARES = np.float32([1, 0.5, 2, 0.25, 1, 8, 3, 1])


class Case(NamedTuple):
    """A member: what it makes of gradients or weights, and the norms that decide it."""

    run: Callable[..., Any]  # from (tree, weights, bound) to (tree, state)
    shares: str = "tree"  # which entries share a norm
    name: str = ""  # the transformation whose metric is the largest norm
    ord: float = 2
    bad: str = "propagate"  # what happens to what is not finite
    oracle: Any = None  # instead of the formula


def norms_of(case: Case, tree: o.Tree, w: o.Tree) -> dict[str, Any]:
    """Return the norms of the leaves that may change, which broadcast to them."""
    groups = {
        "tree": [list(tree)],
        "masked": [["m"]],
        "group": [["m"], [k for k in tree if k != "m"]],
    }
    if case.shares in groups:
        return {
            k: o.tree_norm({j: tree[j] for j in g}, case.ord)
            for g in groups[case.shares]
            for k in g
        }
    return {
        "column": lambda: {"m": o.norm(tree["m"], (0,)) / SHARES},
        "entry": lambda: {k: np.abs(x) for k, x in tree.items()},
        "unit": lambda: {
            k: o.norm(x, o.fan_in(x)) for k, x in tree.items() if x.ndim >= 2
        },
        "leaf": lambda: {k: o.norm(x, None, case.ord) for k, x in tree.items()},
        "none": dict,
        "rms": lambda: {k: o.norm(x) / max(x.size, 1) ** 0.5 for k, x in tree.items()},
        "ratio": lambda: {
            k: o.norm(x, o.fan_in(x)) / o.norm(w[k], o.fan_in(x)).clip(1e-3)
            for k, x in tree.items()
        },
    }[case.shares]()


def stepped(make: Callable[[Any], Any], *, past: int = 0, before: int = 0) -> Any:
    """Make an update, after some of the weights, and some of the same gradients."""

    def run(tree: Any, weights: Any, bound: Any) -> Any:
        tx = make(bound)
        state = tx.init(weights)
        for each in [weights] * past + [tree] * before:
            _, state = tx.update(each, state, weights)
        return tx.update(tree, state, weights)

    return run


def back(layer: Callable[..., Any]) -> Any:
    def run(tree: Any, weights: Any, bound: Any) -> Any:
        floats = {k: x for k, x in tree.items() if k != "n"}
        _, change = jax.vjp(
            lambda x: {
                k: v for k, v in layer({**tree, **x}, bound).items() if k != "n"
            },
            floats,
        )
        return tree | change(floats)[0], None

    return run


def case_of(row: Row) -> Case:
    """Make the case of a clip from its row; one that remembers has a past of two steps,
    and its threshold is a metric.
    """
    # The metric of `clip_by_rms` is no norm.
    known = row.shares in ("tree", "leaf", "entry") and row.name != "clip_by_rms"
    return Case(
        stepped(row.make, past=2 if row.remembers else 0),
        row.shares,
        row.name if known else "",
        row.ord,
        bad="entry" if row.shares == "entry" else "propagate",
        oracle=None if known else row.oracle,
    )


CLIP, GLOBAL = clipjax.clip_by_global_norm, "clip_by_global_norm"
UNITS = {"axes": clipjax.fan_in}
# Every clip as its row says, then those with other forms, and the other rooms.
CASES = {row.name: case_of(row) for row in FIRST.values() if row.kind == "clip"} | {
    "global 1": Case(stepped(lambda b: CLIP(b, ord=1)), name=GLOBAL, ord=1),
    "global inf": Case(
        stepped(lambda b: CLIP(b, ord=jnp.inf)), name=GLOBAL, ord=np.inf
    ),
    "norm 3": Case(
        stepped(lambda b: clipjax.clip_by_norm(b, ord=3)), "leaf", "clip_by_norm", ord=3
    ),
    "norm of units": Case(
        stepped(lambda b: clipjax.clip_by_norm(b, **UNITS)), "unit", "clip_by_norm"
    ),
    "clip_by_rms": Case(stepped(clipjax.clip_by_rms), "rms", "clip_by_rms"),
    "clip_by_group_norm": Case(
        stepped(lambda b: clipjax.clip_by_group_norm({"m": b, "*": b})),
        "group",
        "clip_by_group_norm",
    ),
    "adaptive_grad_clip": Case(
        stepped(lambda b: clipjax.adaptive_grad_clip(b, axes=fan_in_or_all)),
        "ratio",
        "adaptive_grad_clip",
    ),
    "cone": Case(
        stepped(lambda b: clipjax.tangent_cone(b, **UNITS)), "unit", oracle=o.of_cone
    ),
    "adagc": Case(stepped(lambda b: clipjax.adagc(warmup_max_norm=b)), name="adagc"),
    "max_norm": Case(
        lambda t, w, b: (clipjax.max_norm(b, **UNITS).apply(t), None), "unit"
    ),
    "columns": Case(
        lambda t, w, b: (t | {"m": clipjax.max_norm(b * SHARES).apply(t["m"])}, None),
        "column",
    ),
    "box": Case(
        lambda t, w, b: (clipjax.box(-b, b).apply(t), None), "entry", bad="entry"
    ),
    "link": Case(stepped(lambda b: clipjax.max_norm(b, **UNITS)), "unit"),
    "layer global": Case(back(clipjax.clip_gradient_by_global_norm)),
    "layer norm": Case(back(clipjax.clip_gradient_by_norm), "leaf"),
    "layer value": Case(
        back(lambda x, b: clipjax.clip_gradient_by_value(x, -b, b)),
        "entry",
        bad="entry",
    ),
    "masked": Case(
        stepped(lambda b: optax.masked(CLIP(b), clipjax.matching("m"))),
        "masked",
        GLOBAL,
    ),
    "MultiSteps": Case(
        stepped(
            lambda b: optax.MultiSteps(CLIP(b), 2).gradient_transformation(), before=1
        ),
        name=GLOBAL,
    ),
    "inject": Case(
        stepped(lambda b: optax.inject_hyperparams(CLIP)(max_norm=b)), name=GLOBAL
    ),
}
for policy in ("propagate", "zero", "skip"):
    bound_by = partial(clipjax.bounded, optax.identity(), nonfinite=policy)
    run = stepped(lambda b, bound_by=bound_by: bound_by(clip=CLIP(b)))
    CASES[policy] = Case(run, name=GLOBAL, bad=policy)


def drawn(place: int, rng: np.random.Generator, exponent: float) -> dict[str, Any]:
    """Draw a tree with entries of one size, in float16 of one that it has."""
    of = np.random.default_rng(place)  # "m" is a matrix
    order = of.permutation(len(SHAPES))[: of.integers(2, 7)]
    shapes = {k: SHAPES[i] for k, i in zip("abcdef", order, strict=False)}
    tree: dict[str, Any] = {"n": np.arange(3, dtype=np.int32)}
    for name, shape in (shapes | {"m": (int(of.integers(1, 300)), 8)}).items():
        dtype = of.choice(["float32", "float32", "bfloat16", "float16"])
        x = rng.normal(size=shape) * rng.choice([1, 1, 1, 0, 1e-3])
        x = x * (rng.random(shape) < 0.9)
        size = np.clip(exponent, -1, 3) if dtype == "float16" else exponent
        tree[name] = np.asarray(x * 10**size).astype(dtype)
    return tree


def faults(
    name: str, tree: Any, weights: Any, bound: float, result: Any, found: Any
) -> list[str]:
    """Compare a result with the formula; return what is wrong."""
    case, link = CASES[name], name == "link"
    before, after, w = (
        {k: x for k, x in exact(t).items() if k != "n"} for t in (tree, result, weights)
    )
    finite = all(np.isfinite(x).all() for x in before.values())
    if case.bad == "skip" and not finite:
        return [f"{k} is not skipped" for k, x in after.items() if x.any()]
    # What a link changes in 16 bits is float32, which keeps the direction of a step.
    kinds = {k: {x.dtype} for k, x in tree.items()}
    if link:
        kinds |= {k: {*kinds[k], np.dtype(np.float32)} for k in before}
    wrong = [f"{k} has another dtype" for k in tree if result[k].dtype not in kinds[k]]
    before = {
        k: np.where(np.isfinite(x) | (case.bad != "zero"), x, 0)
        for k, x in before.items()
    }
    before, after = (
        {k: x + w[k] if link else x for k, x in t.items()} for t in (before, after)
    )
    norms, slack = norms_of(case, before, w), tolerance(np.float32, 4000)
    # Of those that follow the past.
    bound = float(found.get(f"{case.name}/threshold", bound))
    if case.name and finite:
        size = float(found[f"{case.name}/norm"])
        most = max((np.max(x, initial=0) for x in norms.values()), default=0)
        if not np.isclose(size, most, rtol=slack, atol=1e-30):
            wrong.append(f"the norm is {size}, not {most}")
    want = case.oracle(before, w, bound) if case.oracle else {}
    for k, x in before.items():
        size, info = np.asarray(norms.get(k, 0.0)), jnp.finfo(tree[k].dtype)
        if not case.oracle:
            want[k] = x * np.where(size > bound, bound / size, 1)
            want[k] = np.where(
                np.isinf(x) & (size > bound),
                np.sign(x) * min(bound, float(info.max)),
                want[k],
            )
            want[k] = np.where(
                np.isfinite(size) | (case.bad == "entry"), want[k], np.nan
            )
        scale = np.abs(x).max(initial=0) if case.oracle else np.abs(want[k])
        error = tolerance(info.dtype, 4000) * scale + 2 * float(
            info.tiny * (info.eps if info.nexp == 5 else 1)
        )
        error += float(info.eps) * (np.abs(x) + 2 * np.abs(w[k])) if link else 0
        compared = np.isfinite(want[k])
        if case.oracle:  # units near the sphere count as on it
            compared &= finite & ~np.isclose(
                o.norm(w[k], o.fan_in(x)), bound, rtol=0.02, atol=0
            )
        if (np.abs(after[k] - want[k]) > error)[compared].any() or np.isfinite(
            after[k]
        )[np.isnan(want[k])].any():
            wrong.append(f"{k} is not what the formula says")
        inside = (
            finite
            and not case.oracle
            and not link
            and (size * (1 + slack) <= bound).all()
        )
        zero = 0.0 if name == "MultiSteps" else -0.0  # whose mean of -0 and -0 is 0
        if inside and bits(after[k] + zero) != bits(x + zero):
            wrong.append(f"{k} is inside and changed")
    if finite and not case.oracle and not link:
        room = 1e-38 + sum(
            6e-8 * x.size ** (1 / case.ord)
            for k, x in before.items()
            if tree[k].dtype == np.float16
        )
        # A share of norms of at least 1e-3.
        room *= 1e3 if case.shares == "ratio" else 1
        for k, size in norms_of(case, after, w).items():
            if np.any((norms[k] > bound * (1 + slack)) & (size > bound + room)):
                wrong.append(f"{k} ends at {np.max(size)}, above {bound}")
    return wrong


def draw(seed: int, place: int, number: int, program: Any, cases: Any) -> None:
    """Draw values and bounds, run the cases, and check them."""
    rng = np.random.default_rng([seed, place, number])
    exponent, bounds = rng.uniform(-12, 12), {}
    tree, weights = drawn(place, rng, exponent), drawn(place, rng, exponent)
    for name, case in CASES.items():
        norms = norms_of(
            case,
            *({k: x for k, x in exact(t).items() if k != "n"} for t in (tree, weights)),
        )
        around = rng.choice([float(np.max(x, initial=0)) for x in norms.values()])
        factor = rng.choice([0, 1e-6, 1 - 1e-5, 1, 10 ** rng.uniform(-2, 2), np.inf])
        bounds[name] = np.float32(around * factor if around else factor)
    if rng.random() < 0.15:
        tree["m"][rng.integers(len(tree["m"])), 0] = rng.choice(
            [np.nan, np.inf, -np.inf]
        )
    results = jax.device_get(
        program(tree, weights, {name: bounds[name] for name in cases})
    )
    for name, (result, found) in results.items():
        wrong = faults(name, tree, weights, float(bounds[name]), result, found)
        # Cubes of more have no float32.
        if wrong and (CASES[name].ord != 3 or abs(exponent) < 8):
            print(
                f"{name} with bound {bounds[name]} and entries of 1e{exponent:.1f}: "
                f"{'; '.join(wrong)}"
            )
            sys.exit(
                f"python -m tests.soak --seed {seed} --structure {place} --draw "
                f"{number} --case {name!r}"
            )


def main() -> None:
    """Run trials for a time, or a number of them: 20,000 unless told otherwise."""
    np.seterr(all="ignore")
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    for name, kind in (
        ("seconds", float),
        ("trials", int),
        ("structure", int),
        ("draw", int),
        ("case", str),
    ):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--seed", type=int, default=0)
    given, start, done = parser.parse_args(), time.monotonic(), 0
    cases = CASES if given.case is None else {given.case: CASES[given.case]}
    places = range(STRUCTURES) if given.structure is None else [given.structure]
    seconds = given.seconds or np.inf
    trials = given.trials or (np.inf if given.seconds else 20_000)

    def run(tree: Any, weights: Any, bounds: Any) -> Any:
        each = {
            name: case.run(tree, weights, bounds[name]) for name, case in cases.items()
        }
        return {
            k: (x, clipjax.metrics(state) if cases[k].name else {})
            for k, (x, state) in each.items()
        }

    for i, place in enumerate(places, 1):
        program, number = jax.jit(run), given.draw or 0
        while done < trials * i / len(
            places
        ) and time.monotonic() - start < seconds * i / len(places):
            draw(given.seed, place, number, program, cases)
            done, number = done + len(cases), number + 1
            if given.draw is not None:
                break
    print(
        f"{done} trials agree, in {time.monotonic() - start:.0f} s, with seed "
        f"{given.seed}"
    )


if __name__ == "__main__":
    main()
