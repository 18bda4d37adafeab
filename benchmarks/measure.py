"""Timing donated train steps, interleaved, so that what disturbs one disturbs all."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.steps import Recipe, start
from benchmarks.trees import Problem

# Seconds. A step that takes less is sampled as several in a row: memory that is shared with others is
# now fast and now slow, for some tens of milliseconds, and a median of single steps is off by a tenth.
_SHORTEST_SAMPLE = 0.1


class Result(NamedTuple):
    """What one contestant took."""

    seconds: float  # one step: the median over rounds
    ratio: float  # to the reference: the median over rounds of the ratio to its run right before
    error: float  # of that ratio: the standard error of the median, from its quartiles
    scratch: float  # bytes of scratch memory, as a share of the parameters' bytes
    compile_seconds: float  # CPU time of lowering and compiling: the least of the repetitions

    def is_above(self, target: float) -> bool:
        """Whether the ratio is above a target by more than noise: twice its standard error."""
        return self.ratio - 2 * self.error > target


class _Contestant:
    """A compiled step and the arrays that are threaded through it."""

    def __init__(self, recipe: Recipe, problem: Problem, compile_repeats: int) -> None:
        self.params = jax.tree.map(jnp.copy, problem.params)
        self.state = start(recipe, problem.params)
        self.grads = problem.grads
        self.compile_seconds = float("inf")
        for _ in range(compile_repeats):
            jax.clear_caches()
            begin = time.process_time()  # of all threads: a busy machine does not change it much
            # A new function object each time: nothing that JAX keeps per function is found again.
            step = jax.jit(lambda *args: recipe.step(*args), donate_argnums=(0, 1))
            self.compiled: Any = step.lower(self.params, self.state, self.grads).compile()
            self.compile_seconds = min(self.compile_seconds, time.process_time() - begin)
        analysis = self.compiled.memory_analysis()
        # Not every backend tells.
        self.scratch = analysis.temp_size_in_bytes / problem.nbytes if analysis else float("nan")

    def run(self, steps: int) -> float:
        """Take some steps and return the seconds of one."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.params, self.state = self.compiled(self.params, self.state, self.grads)
        # The outputs of one program are ready together.
        jax.tree.leaves(self.params)[0].block_until_ready()
        return (time.perf_counter() - begin) / steps


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def race(
    recipes: Mapping[str, Recipe],
    problem: Problem,
    *,
    rounds: int,
    compile_repeats: int,
    reference: str,
) -> dict[str, Result]:
    """Let the recipes take turns.

    Args:
      recipes: the reference and at least one other.
      problem: what they train; every contestant has its own copy of the parameters.
      rounds: how often each is timed.
      compile_repeats: how often each is compiled.
      reference: the contestant that the others are compared with.
    """
    field = {name: _Contestant(recipe, problem, compile_repeats) for name, recipe in recipes.items()}
    for contestant in field.values():
        contestant.run(2)
    steps = max(1, round(_SHORTEST_SAMPLE / max(field[reference].run(3), 1e-7)))
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in field if name != reference}
    names, shuffle = list(pairs), random.Random(0)

    def sample(name: str) -> float:
        field[name].run(1)  # does not count: the cache is as whoever came before left it
        return field[name].run(steps)

    with _no_collection():
        for _ in range(rounds):
            # The reference runs right before each: what else the machine does changes within a second.
            for name in shuffle.sample(names, len(names)):
                before = sample(reference)
                pairs[name].append((sample(name), before))
    pairs[reference] = [(before, before) for taken in pairs.values() for _, before in taken]
    return {name: _result(pairs[name], contestant) for name, contestant in field.items()}


def _result(pairs: list[tuple[float, float]], contestant: _Contestant) -> Result:
    ratios = [own / before for own, before in pairs]
    # From one sample no error can be told.
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [math.nan] * 3
    return Result(
        seconds=statistics.median(own for own, _ in pairs),
        ratio=statistics.median(ratios),
        error=0.93 * (high - low) / math.sqrt(len(ratios)),
        scratch=contestant.scratch,
        compile_seconds=contestant.compile_seconds,
    )


def race_in_groups(
    families: Sequence[Mapping[str, Recipe]],
    problem: Problem,
    *,
    memory: float,
    reference: tuple[str, Recipe],
    **options: Any,
) -> dict[str, Result]:
    """Let as many families of recipes take turns at once as fit into `memory` bytes.

    The reference is in every group, and a family, whose results are to be compared, in one.
    """
    # Parameters, two float32 moments, and the scratch memory of a careless step.
    each = 2 * problem.nbytes + 8 * problem.size
    room = int(memory / each) - 1
    groups: list[dict[str, Recipe]] = [{}]
    for family in families:
        if groups[-1] and len(groups[-1]) + len(family) > room:
            groups.append({})
        groups[-1] |= family
    name, recipe = reference
    results: dict[str, Result] = {}
    for group in groups:
        results = race({name: recipe, **group}, problem, reference=name, **options) | results
        gc.collect()
    return results
