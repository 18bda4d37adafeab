"""Timing donated steps: ours and theirs take turns, and are disturbed alike."""

import gc
import statistics
import time
from typing import Any

import jax

from benchmarks.steps import Recipe, Step, WholeStep, on
from benchmarks.tables import Figure, Row
from benchmarks.trees import values_of

# Seconds. Shorter steps are timed as several in a row, so that the clock and the
# dispatch do not count.
_SHORTEST_SAMPLE = 0.02


class _Contestant:
    """A compiled step, and the arrays that it updates."""

    def __init__(self, recipe: Recipe | WholeStep, params: Any, grads: Any) -> None:
        self.recipe, self.grads = recipe, grads
        self.params = jax.tree.map(jax.numpy.copy, params)
        self.state = recipe.init(params)
        self.compile_seconds: list[float] = []
        self.compiled: Any = None

    def compile(self) -> None:
        """Trace, lower and compile.

        The processor time of all threads depends least on what else runs.
        """
        jax.clear_caches()
        begin = time.process_time()
        step = jax.jit(lambda *args: self.recipe.step(*args), donate_argnums=(0, 1))
        self.compiled = step.lower(self.params, self.state, self.grads).compile()
        self.compile_seconds.append(time.process_time() - begin)

    def run(self, steps: int) -> float:
        """Take some steps, and return the seconds of one."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.params, self.state = self.compiled(self.params, self.state, self.grads)
        jax.block_until_ready(self.params)
        return (time.perf_counter() - begin) / steps


def race(step: Step, tree: str, dtype: str, *, rounds: int, compiles: int) -> Row:
    """Time both versions of a step in turns.

    Args:
      step: ours and theirs.
      tree: the name of the tree.
      dtype: that of parameters and gradients.
      rounds: how many ratios there are.
      compiles: how often each is compiled.
    """
    params, grads = values_of(tree, dtype)
    both = [on(tree, recipe) for recipe in (step.ours, step.theirs)]
    # What the first trace imports.
    jax.jit(both[1].step).lower(params, both[1].init(params), grads)
    field = [_Contestant(recipe, params, grads) for recipe in both]
    del params
    for _ in range(compiles):
        for each in field:
            each.compile()
    for each in field:
        each.run(2)
    steps = max(1, round(_SHORTEST_SAMPLE / field[1].run(3)))
    pairs = []
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            order = field if i % 2 else field[::-1]
            seconds = {id(each): each.run(steps) for each in order}
            pairs.append([seconds[id(each)] for each in field])
    finally:
        gc.enable()
    ratios = [ours / theirs for ours, theirs in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    compiling = [statistics.median(each.compile_seconds) for each in field]
    scratch = [
        each.compiled.memory_analysis().temp_size_in_bytes / 1e6 for each in field
    ]
    times = [statistics.median(column) * 1e3 for column in zip(*pairs, strict=True)]
    return Row(
        (step.label, step.peer, tree, dtype),
        {
            "time": Figure(statistics.median(ratios), step.time_goal(tree), low, high),
            "ms": f"{times[0]:.3g} / {times[1]:.3g}",
            "compile time": Figure(compiling[0] / compiling[1], step.goals.compile),
            "CPU s": f"{compiling[0]:.2g} / {compiling[1]:.2g}",
            "scratch MB": f"{scratch[0]:.1f} / {scratch[1]:.1f}",
        },
    )
