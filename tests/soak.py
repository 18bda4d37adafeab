"""Random trees, scales, bounds and wrappers against NumPy in float64: `python -m tests.soak --seconds 60`.

Each structure of trees is one compiled program of all cases; a trial is one case on one draw of values and bounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax
from tests.support import oracles as o
from tests.support.tolerances import below, tolerance
from tests.support.trees import bits, exact

STRUCTURES = 4
SHAPES = [(), (1,), (7,), (0,), (3, 0), (5, 3), (2, 3, 4), (2, 1, 3, 4), (500, 8), (4000,), (10, 20, 20), (1, 1, 1, 1)]
SHARES = np.float32([1, 0.5, 2, 0.25, 1, 8, 3, 1])  # the bounds of the columns of "m", as multiples of the drawn one


class Case(NamedTuple):
    """A member: what it makes of gradients or weights, and the norms that decide it."""

    run: Callable[..., Any]  # from (tree, weights, bound) to (tree, state)
    norms: Callable[..., dict[str, Any]]  # from (tree, weights): of the leaves that change, broadcasting to them
    norm: str = ""  # the metric that is the largest norm
    threshold: str = ""  # the metric that is the bound, where that is not the argument
    bad: str = "propagate"  # what happens to what is not finite
    scale: float = 12  # the largest exponent of the entries, in base 10
    oracle: Any = None  # instead of the formula


def of_tree(ord: float = 2) -> Any:
    return lambda tree, w: dict.fromkeys(tree, o.tree_norm(tree, ord))


def of_leaves(ord: float = 2, *, rms: bool = False) -> Any:
    return lambda tree, w: {k: o.norm(x, None, ord) / (max(x.size, 1) ** 0.5 if rms else 1) for k, x in tree.items()}


def of_units(tree: o.Tree, w: Any) -> Any:
    return {k: o.norm(x, o.fan_in(x)) for k, x in tree.items() if x.ndim >= 2}


def of_columns(tree: o.Tree, w: Any) -> Any:
    return {"m": o.norm(tree["m"], (0,)) / SHARES}


def of_groups(tree: o.Tree, w: Any) -> Any:
    inner, outer = ({k: x for k, x in tree.items() if (k == "m") == yes} for yes in (True, False))
    return of_tree()(inner, w) | of_tree()(outer, w)


def relative(tree: o.Tree, w: Any) -> Any:
    return {k: o.norm(x, o.fan_in(x)) / np.maximum(o.norm(w[k], o.fan_in(x)), 1e-3) for k, x in tree.items()}


def entries(tree: o.Tree, w: Any) -> Any:
    return {k: np.abs(x) for k, x in tree.items()}


def stepped(make: Callable[[Any], Any], before: int = 0, *, past: bool = False) -> Any:
    def run(tree: Any, weights: Any, bound: Any) -> Any:
        tx = make(bound)
        state = tx.init(weights)
        for _ in range(before):
            _, state = tx.update(weights if past else tree, state, weights)
        return tx.update(tree, state, weights)

    return run


def called(make: Callable[[Any], Any]) -> Any:
    return lambda tree, weights, bound: (make(bound)(tree), None)


def columns(tree: Any, weights: Any, bound: Any) -> Any:
    return tree | {"m": clipjax.max_norm(bound * SHARES)(tree["m"])}, None


def back(layer: Callable[..., Any]) -> Any:
    def run(tree: Any, weights: Any, bound: Any) -> Any:
        floats = {k: x for k, x in tree.items() if k != "n"}
        _, change = jax.vjp(lambda x: {k: v for k, v in layer({**tree, **x}, bound).items() if k != "n"}, floats)
        return tree | change(floats)[0], None

    return run


CLIP, UNITS, one_tree = clipjax.clip_by_global_norm, {"axes": clipjax.fan_in}, of_tree()
GLOBAL, WRAPPED = "clip_by_global_norm/norm", {"norms": one_tree, "norm": "clip_by_global_norm/norm"}


def bounded(policy: Any) -> Any:
    return stepped(lambda b: clipjax.bounded(optax.identity(), clip=CLIP(b), nonfinite=policy))


def following(name: str, make: Callable[[Any], Any]) -> Case:
    return Case(stepped(make, 2, past=True), one_tree, f"{name}/norm", f"{name}/threshold")


CASES = {
    "global": Case(stepped(CLIP), one_tree, GLOBAL),
    "global 1": Case(stepped(lambda b: CLIP(b, ord=1)), of_tree(1), GLOBAL),
    "global inf": Case(stepped(lambda b: CLIP(b, ord=jnp.inf)), of_tree(np.inf), GLOBAL),
    "norm": Case(stepped(clipjax.clip_by_norm), of_leaves(), "clip_by_norm/norm"),
    "norm 3": Case(stepped(lambda b: clipjax.clip_by_norm(b, ord=3)), of_leaves(3), "clip_by_norm/norm", scale=8),
    "norm of units": Case(stepped(lambda b: clipjax.clip_by_norm(b, **UNITS)), of_units, "clip_by_norm/norm"),
    "rms": Case(stepped(clipjax.clip_by_rms), of_leaves(rms=True), "clip_by_rms/norm"),
    "value": Case(stepped(clipjax.clip_by_value), entries, "clip_by_value/norm", bad="entries"),
    "groups": Case(stepped(lambda b: clipjax.clip_by_group_norm({"m": b, "*": b})), of_groups,
                   "clip_by_group_norm/norm"),
    "agc": Case(stepped(clipjax.adaptive_grad_clip), relative, "adaptive_grad_clip/norm"),
    "cone": Case(stepped(lambda b: clipjax.tangent_cone(b, **UNITS)), of_units, oracle=o.of_cone),
    "autoclip": following("autoclip", lambda b: clipjax.autoclip(window=4)),
    "quantile": following("clip_by_quantile", lambda b: clipjax.clip_by_quantile()),
    "zclip": following("zclip", lambda b: clipjax.zclip(max_norm=b, warmup_steps=2)),
    "lognormal": following("clip_by_lognormal", lambda b: clipjax.clip_by_lognormal(max_norm=b)),
    "adagc": Case(stepped(lambda b: clipjax.adagc(max_norm=b)), one_tree, "adagc/norm"),
    "max_norm": Case(called(lambda b: clipjax.max_norm(b, **UNITS)), of_units),
    "min_max_norm": Case(called(lambda b: clipjax.min_max_norm(0.0, b, **UNITS)), of_units),
    "columns": Case(columns, of_columns),
    "box": Case(called(lambda b: clipjax.box(-b, b)), entries, bad="entries"),
    "link": Case(stepped(lambda b: clipjax.max_norm(b, **UNITS)), of_units),
    "layer global": Case(back(clipjax.clip_gradient_by_global_norm), one_tree),
    "layer norm": Case(back(clipjax.clip_gradient_by_norm), of_leaves()),
    "layer value": Case(back(lambda x, b: clipjax.clip_gradient_by_value(x, -b, b)), entries, bad="entries"),
    "propagate": Case(bounded("propagate"), **WRAPPED),
    "zero": Case(bounded("zero"), **WRAPPED, bad="zero"),
    "skip": Case(bounded("skip"), **WRAPPED, bad="skip"),
    "masked": Case(stepped(lambda b: optax.masked(CLIP(b), clipjax.matching("m"))),
                   lambda tree, w: one_tree({"m": tree["m"]}, w), GLOBAL),
    "MultiSteps": Case(stepped(lambda b: optax.MultiSteps(CLIP(b), 2).gradient_transformation(), 1), **WRAPPED),
    "inject": Case(stepped(lambda b: optax.inject_hyperparams(CLIP)(max_norm=b)), **WRAPPED),
}  # fmt: skip


def structure(place: int) -> dict[str, Any]:
    """Draw shapes and dtypes; "m" is a matrix."""
    rng = np.random.default_rng(place)
    chosen = [SHAPES[i] for i in rng.permutation(len(SHAPES))[: rng.integers(2, 7)]]
    shapes = dict(zip("abcdef", chosen, strict=False)) | {"m": (int(rng.integers(1, 300)), 8)}
    return {k: (shape, rng.choice(["float32", "float32", "bfloat16", "float16"])) for k, shape in shapes.items()}


def compiled(program: Any) -> Any:
    """Compile all cases for one structure."""

    def run(tree: Any, weights: Any, bounds: Any) -> Any:
        each = {name: case.run(tree, weights, bounds[name]) for name, case in program.items()}
        return {k: (x, clipjax.metrics(s) if program[k].norm else {}) for k, (x, s) in each.items()}

    return jax.jit(run)


def drawn(rng: np.random.Generator, kinds: dict[str, Any], exponent: float) -> dict[str, Any]:
    """Draw a tree with entries of one size; in float16 that size is one which it has."""
    tree: dict[str, Any] = {"n": np.arange(3, dtype=np.int32)}
    for name, (shape, dtype) in kinds.items():
        x = rng.normal(size=shape) * rng.choice([1, 1, 1, 0, 1e-3]) * (rng.random(shape) < 0.9)
        tree[name] = np.asarray(x * 10.0 ** (np.clip(exponent, -1, 3) if dtype == "float16" else exponent)).astype(
            dtype
        )
    return tree


def faults(name: str, tree: Any, weights: Any, bound: float, result: Any, found: Any) -> list[str]:
    """Compare a result with the formula; return what is wrong."""
    case = CASES[name]
    before, after, w = ({k: x for k, x in exact(t).items() if k != "n"} for t in (tree, result, weights))
    finite = all(np.isfinite(x).all() for x in before.values())
    if case.bad == "skip" and not finite:
        return [f"{k} is not skipped" for k, x in after.items() if x.any()]
    wrong = [f"{k} has another dtype" for k in tree if result[k].dtype != tree[k].dtype]
    if case.bad == "zero":
        before = {k: np.where(np.isfinite(x), x, 0) for k, x in before.items()}
    if name == "link":
        before, after = ({k: x + w[k] for k, x in t.items()} for t in (before, after))
    norms, slack = case.norms(before, w), tolerance(np.float32, 4000)
    bound = float(found[case.threshold]) if case.threshold else bound
    if case.norm and finite:
        most = max((np.max(x, initial=0) for x in norms.values()), default=0)
        if not np.isclose(float(found[case.norm]), most, rtol=slack, atol=1e-30):
            wrong.append(f"the norm is {float(found[case.norm])}, not {most}")
    want = case.oracle(before, w, bound) if case.oracle else {}
    for k, x in before.items():
        size, info = np.asarray(norms.get(k, 0.0)), jnp.finfo(tree[k].dtype)
        if not case.oracle:
            scaled = x * np.where(size > bound, bound / size, 1)
            want[k] = np.where(np.isinf(x) & (size > bound), np.sign(x) * min(bound, float(info.max)), scaled)
            want[k] = np.where(np.isfinite(size) | (case.bad == "entries"), want[k], np.nan)
        rounding = float(info.eps) * (np.abs(x) + 2 * np.abs(w[k])) if name == "link" else 0
        scale = np.abs(x).max(initial=0) if case.oracle else np.abs(want[k])
        least = float(info.smallest_subnormal if info.nexp == 5 else info.tiny)
        error = tolerance(tree[k].dtype, 4000) * scale + rounding + 2 * least
        compared = np.isfinite(want[k])
        if case.oracle:  # units near the sphere count as on it
            compared &= finite & ~np.isclose(o.norm(w[k], o.fan_in(x)), bound, rtol=0.02, atol=0)
        if (np.abs(after[k] - want[k]) > error)[compared].any() or np.isfinite(after[k])[np.isnan(want[k])].any():
            wrong.append(f"{k} is not what the formula says")
        inside = finite and not case.oracle and name != "link" and (size * (1 + slack) <= bound).all()
        zero = 0.0 if name == "MultiSteps" else -0.0  # whose mean of -0 and -0 is 0
        if inside and bits(after[k] + zero) != bits(x + zero):
            wrong.append(f"{k} is inside and changed")
    if finite and not case.oracle and name != "link":
        room = 1e-38 + sum(6e-8 * x.size**0.5 for k, x in before.items() if tree[k].dtype == np.float16)
        room *= 1e3 if name == "agc" else 1  # a share of norms of at least 1e-3
        share = max(below(tree[k].dtype) for k in before) + slack
        for k, size in case.norms(after, w).items():
            ended = np.where(norms[k] > bound * (1 + slack), size, np.nan)
            if (ended > bound + room).any() or (ended < bound * (1 - share) - room).any():
                wrong.append(f"{k} ends at {ended}")
    return wrong


def draw(seed: int, place: int, number: int, program: Any, cases: Any) -> None:
    """Draw values and bounds, run the cases, and check them."""
    rng = np.random.default_rng([seed, place, number])
    exponent, kinds = rng.uniform(-12, 12), structure(place)
    tree, weights = drawn(rng, kinds, exponent), drawn(rng, kinds, exponent)
    bounds = {}
    for name, case in CASES.items():
        norms = case.norms(*({k: x for k, x in exact(t).items() if k != "n"} for t in (tree, weights)))
        around = rng.choice([float(np.max(x, initial=0)) for x in norms.values()])
        factor = rng.choice([0, 1e-6, 1 - 1e-5, 1, 10 ** rng.uniform(-2, 2), np.inf])
        bounds[name] = np.float32(around * factor if around else factor)
    if rng.random() < 0.15:
        tree["m"][rng.integers(len(tree["m"])), 0] = rng.choice([np.nan, np.inf, -np.inf])
    results = jax.device_get(program(tree, weights, {name: bounds[name] for name in cases}))
    for name, (result, found) in results.items():
        if abs(exponent) <= CASES[name].scale:
            wrong = faults(name, tree, weights, float(bounds[name]), result, found)
            if wrong:
                print(f"{name} with bound {bounds[name]} and entries of 1e{exponent:.1f}: {'; '.join(wrong)}")
                again = f"--seed {seed} --structure {place} --draw {number} --case {name!r}"
                sys.exit(f"again: python -m tests.soak {again}")


def main() -> None:
    """Run trials for a time, or a number of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    kinds = {"seconds": float, "trials": int, "seed": int, "structure": int, "draw": int, "case": str}
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind)
    given = parser.parse_args()
    np.seterr(all="ignore")
    seed, start, done = given.seed or 0, time.monotonic(), 0
    cases = CASES if given.case is None else {given.case: CASES[given.case]}
    places = range(STRUCTURES) if given.structure is None else [given.structure]
    seconds = np.inf if given.trials or given.seconds is None else given.seconds
    trials = given.trials or (20_000 if given.seconds is None else np.inf)
    for i, place in enumerate(places, 1):
        program, number = compiled(cases), given.draw or 0
        while done < trials * i / len(places) and time.monotonic() - start < seconds * i / len(places):
            draw(seed, place, number, program, cases)
            done, number = done + len(cases), number + 1
            if given.draw is not None:
                break
    print(f"{done} trials agree, in {time.monotonic() - start:.0f} s, with seed {seed}")


if __name__ == "__main__":
    main()
