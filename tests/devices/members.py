"""Every kind of member, for programs that apply all of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax
from tests.contract.members import FIRST, with_axes

CLIP = clipjax.clip_by_global_norm(1.0)


def growing(step: Any) -> Any:
    """A schedule."""
    return 1 + 0.1 * jnp.asarray(step, np.float32)


def members(axes: Any) -> dict[str, Any]:
    """Transformations by name; those that have units reduce `axes`."""
    plain = {
        name: with_axes(name, 1.0, axes)
        for name, row in FIRST.items()
        if row.kind in ("clip", "step", "projection") and row.tree == "main"
    }
    optimizer = optax.chain(CLIP, optax.sgd(0.1, momentum=0.9))
    return plain | {
        "clip_by_norm, infinity": clipjax.clip_by_norm(0.5, axes=axes, ord=jnp.inf),
        "min_max_norm": clipjax.min_max_norm(1.0, growing, axes=axes),
        "clip_by_global_norm": clipjax.clip_by_global_norm(growing),
        "clip_by_global_norm, 1": clipjax.clip_by_global_norm(1.0, ord=1),
        "clip_by_global_norm, infinity": clipjax.clip_by_global_norm(0.5, ord=jnp.inf),
        "clip_by_group_norm": clipjax.clip_by_group_norm({"both": 1.0, "*": 0.5}),
        "record_norms": clipjax.record_norms("leaf", of=("updates", "params")),
        "skip_nonfinite": clipjax.skip_nonfinite(optimizer),
        "skip_spikes": clipjax.skip_spikes(optimizer, window=4),
        "project": clipjax.project(clipjax.box(-0.5, 0.5)),
        "bounded": clipjax.bounded(
            optimizer, project=plain["max_norm"], nonfinite="skip", accumulate=2
        ),
    }


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
    """Draw float32 leaves of these shapes, the same in every process."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


TAKE_LOSS = ("skip_nonfinite", "skip_spikes", "bounded")


def init(table: dict[str, Any], params: Any) -> dict[str, Any]:
    return {name: tx.init(params) for name, tx in table.items()}


def step(
    table: dict[str, Any], states: Any, grads: Any, params: Any, loss: Any = None
) -> tuple[Any, Any]:
    """The states and the updates of every member after a step."""
    results = {}
    for name, tx in table.items():
        extra = {"loss": loss} if loss is not None and name in TAKE_LOSS else {}
        results[name] = tx.update(grads, states[name], params, **extra)
    states, updates = (
        {name: result[i] for name, result in results.items()} for i in (1, 0)
    )
    return states, updates


def assert_same(found: Any, expected: Any) -> None:
    """A program adds float32 in another order than another, and statistics are small
    differences of such sums.
    """
    for name in expected:
        for x, y in zip(
            jax.tree.leaves(found[name]), jax.tree.leaves(expected[name]), strict=True
        ):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=name)
