"""One step exported for several platforms at once; and what is lowered for a TPU holds no float64 per entry.

Neither needs a compiler for these platforms.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.platforms import DTYPES, MEMBERS, SPECTRAL, parts, shapes_of
from tests.support.trees import same_bits

PLATFORMS = ("cpu", "cuda", "tpu")
SHAPES = {"dense": {"kernel": (300, 200), "bias": (200,)}, "head": {"kernel": (200, 10)}}


def adam() -> Any:
    return optax.adam(1e-2)


STEPS = {
    "clip_by_global_norm": lambda: optax.chain(clipjax.clip_by_global_norm(1.0), adam()),
    "clip_by_norm of units": lambda: optax.chain(clipjax.clip_by_norm(0.1, axes=clipjax.fan_in), adam()),
    "clip_by_rms": lambda: optax.chain(clipjax.clip_by_rms(0.5), adam()),
    "adaptive_grad_clip": lambda: optax.chain(clipjax.adaptive_grad_clip(0.01), adam()),
    "zclip": lambda: optax.chain(clipjax.zclip(warmup_steps=2), adam()),
    "max_norm": lambda: clipjax.chain(adam(), clipjax.max_norm(0.5)),
    "unit_norm": lambda: clipjax.chain(adam(), clipjax.unit_norm()),
    "tangent_cone": lambda: clipjax.chain(clipjax.tangent_cone(0.5), optax.sgd(1e-2), clipjax.max_norm(0.5)),
    "bounded": lambda: clipjax.bounded(
        adam(),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.max_norm(0.5),
        nonfinite="skip",
    ),
}


# What has a part of every other one.
COVERING = {("bounded", "float32"), ("max_norm", "bfloat16"), ("adaptive_grad_clip", "float32")}


def tree(seed: int, dtype: Any) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.standard_normal(shape).astype(dtype), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name, dtype, id=f"{name}-{kind}", marks=[] if (name, kind) in COVERING else [pytest.mark.full]
        )
        for name in STEPS
        for kind, dtype in DTYPES.items()
    ],
)
def test_an_exported_step_has_the_same_bits_as_the_direct_one(name: str, dtype: Any) -> None:
    tx = STEPS[name]()
    params = tree(0, dtype)
    structure = jax.tree.structure((params, tx.init(params), params))

    # Of leaves: a state of NamedTuples would have to be registered to be serialized.
    @jax.jit
    def step(*leaves: Any) -> Any:
        params, state, grads = jax.tree.unflatten(structure, leaves)
        updates, state = tx.update(grads, state, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), state))

    leaves = jax.tree.leaves((params, tx.init(params), params))
    shapes = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in leaves]
    stored = jax.export.export(step, platforms=PLATFORMS)(*shapes).serialize()
    loaded = jax.export.deserialize(stored)
    assert loaded.platforms == PLATFORMS
    exported = jax.jit(loaded.call)
    ours, theirs = leaves, leaves
    for seed in (1, 2):
        grads = jax.tree.leaves(tree(seed, dtype))
        ours = [*step(*ours[: -len(grads)], *grads), *grads]
        theirs = [*exported(*theirs[: -len(grads)], *grads), *grads]
        assert same_bits(ours, theirs)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", MEMBERS)
def test_no_float64_for_each_entry_on_a_tpu(name: str) -> None:
    """A TPU emulates float64, by some hundred operations: no more than an eighth of a leaf may be widened.

    But for norms of other orders than 1, 2 and infinity, and for matrices, whose algorithm is their own.
    """
    if name in SPECTRAL:
        pytest.skip("an algorithm of its own, whose proof combines integers of 64 bits")
    for dtype in DTYPES.values():
        shapes = shapes_of(name, dtype)
        largest = max(x.size for x in jax.tree.leaves(shapes))
        for label, part in parts(name).items():
            if "ord=3" in label:
                continue
            state = jax.eval_shape(part.init, shapes)
            traced = jax.jit(part.run).trace(state, shapes, shapes)
            text = traced.lower(lowering_platforms=("tpu",)).as_text()
            found = {m for m in re.findall(r"tensor<((?:\d+x)*)f64>", text) if entries(m) > largest / 8}
            assert not found, f"{label}, {jnp.dtype(dtype).name}: float64 arrays of {sorted(found)}"


def entries(dims: str) -> int:
    return math.prod(int(n) for n in dims.split("x") if n)
