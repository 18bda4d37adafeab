"""What a bound costs, read off the compiled step without a clock: temporaries, and passes over memory.

A pass is one array of the parameters' size read or written by one operation of the optimized program.
Adam alone takes ten in float32 on XLA's CPU backend; what a bound adds to them is what it costs.
"""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests import versions
from tests.support import ROOT
from tests.support.programs import (
    LEAVES,
    WIDTH,
    adam,
    adam_alone,
    chain,
    compiled,
    cost,
    cost_of,
)

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the counts are those of XLA on CPU"),
    pytest.mark.skipif(versions.jaxlib() < (0, 10, 2), reason="older versions of XLA fuse less"),
]

STEPS = {
    "global_norm": chain(clipjax.clip_by_global_norm(1.0), adam()),
    "value": chain(clipjax.clip_by_value(1.0), adam()),
    "rms": chain(clipjax.clip_by_rms(1.0), adam()),
    "norm": chain(clipjax.clip_by_norm(1.0), adam()),
    "max_norm": (adam(), clipjax.max_norm(1.0)),
    "box": (adam(), clipjax.box(-1.0, 1.0)),
    "clip_max_norm": (optax.chain(clipjax.clip_by_global_norm(1.0), adam()), clipjax.max_norm(1.0)),
    "link": (clipjax.chain(adam(), clipjax.max_norm(1.0)), lambda params: params),
    "hyperball": chain(clipjax.chain(optax.scale_by_adam(), clipjax.hyperball(1e-3))),
    "bounded": chain(
        clipjax.bounded(
            adam(),
            clip=clipjax.clip_by_global_norm(1.0),
            project=clipjax.max_norm(1.0),
            nonfinite="skip",
        )
    ),
}

# The most that each may cost: temporaries, and passes added to Adam's. What must be, in float32:
# - a clip by a norm reads the gradients once more, for the norm; the rescaling is part of Adam's own
#   passes. Its temporaries are the partial sums that keep a float64 sum at the speed of memory.
# - a clip by value reads them once more for its metrics.
# - a projection by a direct call reads the new weights for their norms, and reads and writes them; one of
#   entries is part of Adam's own passes.
# - a link must return an update: Adam's update exists next to the weights, leaf after leaf; it is written,
#   read with them for their norms, and read once more for the new weights.
# - hyperball reads Adam's update once more than a link, for its norm, and stores the step made of it.
# - skipping reads the gradients first for non-finite entries, and chooses between two branches,
#   whose results XLA copies where a link's temporaries already are.
# An added pass is half as large in bfloat16. A link's update is float32 there, and so is Adam's.
# One more read is allowed where newer versions of XLA make it.
LIMITS = {
    "float32": {
        "global_norm": (0.02, 1),
        "value": (0.01, 1),
        "rms": (0.02, 1),
        "norm": (0.02, 1),
        "max_norm": (0.02, 3),
        "box": (0.01, 0),
        "clip_max_norm": (0.02, 4),
        # XLA counts all of a leaf where its first entry is read, for the turn of the next: one more pass.
        "link": (0.3, 5),
        "hyperball": (0.3, 9),
        "bounded": (1.3, 9),
    },
    "bfloat16": {
        "global_norm": (0.01, 1),
        "value": (0.01, 1),
        "rms": (0.01, 1),
        "norm": (0.01, 1),
        "max_norm": (0.01, 1.5),
        "box": (0.01, 0),
        "clip_max_norm": (0.01, 2.5),
        "link": (0.8, 5),
        "hyperball": (0.8, 7),
        "bounded": (2.6, 8.5),
    },
}
# Every step in one dtype; in both, what others are made of.
COVERING = {
    "float32": ["value", "norm", "max_norm", "box", "clip_max_norm", "link", "hyperball"],
    "bfloat16": ["value", "global_norm", "rms", "clip_max_norm", "link", "bounded"],
}


@functools.cache
def program(name, dtype):
    return compiled(*STEPS[name], dtype=dtype)


@functools.cache
def measured(name, dtype):
    return cost_of(program(name, dtype), dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.full] * (name not in covering))
        for dtype, covering in COVERING.items()
        for name in STEPS
    ],
)
def test_a_step_costs_no_more_than_it_did(name, dtype):
    temporary, passes = LIMITS[dtype][name]
    assert measured(name, dtype).temporary <= temporary
    assert measured(name, dtype).passes - adam_alone(dtype).passes <= passes


@pytest.mark.parametrize("name", ["max_norm", "clip_max_norm"])
def test_rescaled_units_are_stored_whole(name):
    """A choice between an entry and its product, in the place of the entry, is a masked store."""
    text = program(name, "float32").as_text()
    ends = re.findall(rf"ROOT \S+ = f32\[{WIDTH},{WIDTH}\]\S* ([\w-]+)\(", text)
    assert "add" in ends  # Adam's
    assert "select" not in ends


def divide_by_norms(params):
    norms = clipjax.functional.leaf_norms(params)
    return jax.tree.map(lambda w, norm: w / (1 + norm), params, norms)


# What reads the new weights, which are then overwritten; how many leaves of temporaries it may take; and
# the shapes to look at by default, which the others are like.
READERS = {
    "max_norm": (*STEPS["max_norm"], 0.4, [(60_000, 17)]),
    "leaf_norms": (adam(), divide_by_norms, 1.1, [(512, 1024)]),  # partial sums of all leaves, side by side
    "clip ord=inf": (
        adam(),
        lambda p: clipjax.functional.clip_by_norm(p, 1.0, ord=jnp.inf),
        0.4,
        [(60_000, 17)],
    ),
    "clip_by_global_norm": (
        adam(),
        lambda p: clipjax.functional.clip_by_global_norm(p, 1.0)[0],
        0.4,
        [(512, 1024)],
    ),
    # Adam's updates are kept for their norm.
    "adam, clip_by_global_norm": (
        *chain(adam(), clipjax.clip_by_global_norm(1.0)),
        LEAVES + 0.4,
        [(9, 512, 512)],
    ),
    "adam, clip_by_rms": (*chain(adam(), clipjax.clip_by_rms(1.0)), LEAVES + 0.4, [(2048, 2048)]),
}
SHAPES = [(512, 1024), (2048, 2048), (60_000, 17), (9, 512, 512)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[pytest.mark.full] * (shape not in covering))
        for name, (*_, covering) in READERS.items()
        for shape in SHAPES
    ],
    ids=str,
)
def test_what_is_measured_is_not_copied(name, shape):
    tx, project, leaves, _ = READERS[name]
    temporary = compiled(tx, project, shape=shape).memory_analysis().temp_size_in_bytes
    assert temporary < leaves * 4 * np.prod(shape)


def test_either_scheduler_keeps_one_update_of_a_link():
    # XLA reads its flags once: in a process of its own.
    code = "import tests.core.test_cost as t; print(t.cost(*t.STEPS['link']).temporary)"
    flags = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= LIMITS["float32"]["link"][0]


@pytest.mark.parametrize("name", ["global_norm", "value"])
def test_small_leaves_of_one_shape_are_measured_together(name):
    tx, _ = STEPS[name]
    grads = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 32
    text = jax.jit(tx.update).lower(grads, jax.eval_shape(tx.init, grads)).compile().as_text()
    entry = text[text.index("ENTRY ") :]
    # Adam's three operations for each leaf, of which two rescale it, and few for all.
    assert entry.count(" fusion(") <= 3 * len(grads) + 16


def test_clips_of_many_examples_widen_none():
    # Under vmap a leaf has the size of one example, and the program that of all.
    examples = jax.ShapeDtypeStruct((2000, 1000), jnp.float32)
    clip = jax.jit(jax.vmap(lambda g: clipjax.functional.clip_by_norm(g, 1.0)))
    analysis = clip.lower(examples).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 0.01 * 4 * examples.size


@pytest.mark.parametrize(
    ("dtype", "one_pass"), [pytest.param("float32", 1, marks=pytest.mark.full), ("bfloat16", 0.5)]
)
def test_a_link_whose_place_is_not_checked_reads_the_weights_once_more(dtype, one_pass):
    unchecked = cost(*chain(adam(), clipjax.max_norm(1.0)), dtype=dtype)
    assert unchecked.passes - measured("link", dtype).passes == one_pass


def test_the_count_of_passes_counts():
    # 40 bytes per parameter in float32: three fusions, each of which reads what it needs.
    assert adam_alone("float32").passes == 10
    # Optax's clip divides, and XLA keeps the quotients: a temporary, written and read by two.
    assert cost(optax.chain(optax.clip_by_global_norm(1.0), adam())).passes > 12
