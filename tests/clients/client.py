"""What the scripts of this folder share."""

import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax

import clipjax

OURS = {
    "clip": clipjax.clip_by_value,
    "clip_by_global_norm": clipjax.clip_by_global_norm,
    "clip_by_block_rms": clipjax.clip_by_rms,
    "adaptive_grad_clip": clipjax.adaptive_grad_clip,
}


def compare(client, train, rtol=1e-6):
    """Train with Optax's clips, and with clipjax's in their place: equal losses."""
    theirs = train()
    with mock.patch.multiple(optax, **OURS):
        check(client, theirs, train(), rtol)


def check(client, theirs, ours, rtol=1e-6):
    """Print how far apart two histories of losses are, and raise if that is much."""
    theirs, ours = np.asarray(theirs, float), np.asarray(ours, float)
    apart = np.max(np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1))
    print(f"{client} {version(client)}, JAX {jax.__version__}: {len(theirs)} losses,")
    print(f"  from {theirs[0]:.4g} to {theirs[-1]:.4g}, apart by {apart:.1e}")
    assert len(theirs) > 1
    assert theirs[0] != theirs[-1]
    assert apart <= rtol, (theirs, ours)


def log(seen):
    """Print some metrics as a row of a log."""
    kept = ("norm", "clipped_fraction", "skipped", "steps")
    row = {name: f"{x:.4g}" for name, x in seen.items() if name.split("/")[-1] in kept}
    print(" ", row)


def folder():
    """Return a path for a checkpoint."""
    return Path(tempfile.mkdtemp(), "checkpoint")


def restored(tree):
    """Save a tree with Orbax, and return what is read."""
    import orbax.checkpoint as ocp

    path = folder()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, tree)


def check_equal(tree, other):
    """Raise if two trees differ in structure or in any bit."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, tree, other)
