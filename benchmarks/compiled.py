"""`python -m benchmarks --compiled`: steps as XLA compiles them for TPUs and GPUs, without having one.

pip install -e '.[platforms]'
python -m benchmarks --compiled --platforms v5e h100 --steps global_norm --trees big
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from benchmarks import trees
from benchmarks.platforms import PLATFORMS, Cost, compile_for
from benchmarks.steps import STEPS, Recipe, start


def shapes_of(tree: str, dtype: str) -> dict[str, Any]:
    """The parameters of a tree, without their values."""
    shapes = trees.square(200, 64) if tree == "leaves" else trees.TREES[tree]()
    return {key: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for key, shape in shapes.items()}


def compile_step(platform: str, recipe: Recipe, params: Any) -> Cost:
    """Compile a train step whose parameters and state are donated."""
    state = jax.eval_shape(lambda p: start(recipe, p), params)
    return compile_for(platform, recipe.step, params, state, params, donate=(0, 1))


LIMITS = trees.Limits(value=0.5, rms=0.5, leaf_norm=1.0, global_norm=1.0, radius=0.5)


def line(cost: Cost) -> str:
    """All figures on one line."""
    return (
        f"{cost.bytes / 1e6:8.0f} MB, usual {cost.usual.bytes / 1e6:.0f}, most {cost.most.bytes / 1e6:.0f}, "
        f"{cost.operations / 1e6:.0f} M flop, usual {cost.usual.operations / 1e6:.0f}, "
        f"most {cost.most.operations / 1e6:.0f}, float64 {cost.most.float64 / 1e6:.0f}, "
        f"{cost.kernels} kernels, "
        f"{cost.most.conditions} conditions, {cost.copies} copies, {cost.temporaries / 1e6:.1f} MB scratch, "
        f"{cost.compile_seconds:.2f} s"
    )


def main(argv: list[str]) -> None:
    """Compile what was asked for, and show it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks --compiled", description=__doc__)
    names = [step.name for step in STEPS]
    parser.add_argument("--platforms", nargs="+", choices=list(PLATFORMS), default=["v5e", "h100"])
    parser.add_argument("--trees", nargs="+", choices=[*trees.TREES, "leaves"], default=["big"])
    parser.add_argument("--dtypes", nargs="+", choices=["f32", "bf16"], default=["f32"])
    parser.add_argument("--steps", nargs="+", choices=names, default=names)
    args = parser.parse_args(argv)
    console = Console()
    for platform in args.platforms:
        for tree in args.trees:
            for dtype in args.dtypes:
                params = shapes_of(tree, {"f32": "float32", "bf16": "bfloat16"}[dtype])
                for step in (step for step in STEPS if step.name in args.steps):
                    for label, recipe in (("ours", step.ours), ("peer", step.peer)):
                        try:
                            told = line(compile_step(platform, recipe(LIMITS), params))
                        except Exception as error:
                            told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                        console.print(f"{platform} {tree} {dtype} {step.name} {label} {told}", soft_wrap=True)
