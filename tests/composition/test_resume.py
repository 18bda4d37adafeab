"""Saving and resuming: in a new process a run goes on bit for bit, whatever a transformation remembers.

This file is also the script that the new process runs: it restores every state and goes on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import ROOT
from tests.support.trees import avals, random_tree
from tests.support.walk import Case, build, cases, parameters

# Steps are run in chunks of as many, in one scan each: what is compiled once serves all of them.
CHUNK = 15
# Where it is saved, in chunks: in the middle of every warm-up, and after all of them.
CUTS = (1, 8)
FORMATS = ("orbax", "flax")


def resumed() -> list[Case]:
    """Every transformation; a window is not full at the first cut, and is being overwritten at the second."""
    return [Case(case.name, {"window": 32} if "window" in parameters(case.name) else {}) for case in cases()]


@functools.cache
def stateful() -> dict[str, tuple[Any, Any]]:
    """By case, each transformation that has a state, and that state before the first step."""
    found = {}
    for case in resumed():
        tx = build(case)
        state = tx.init(random_tree(7))
        if jax.tree.leaves(state):
            found[str(case)] = tx, state
    return found


@functools.cache
def gradients(chunk: int) -> Any:
    """Gradients that vary by factors, with a spike now and then, and a bad one in the first chunk."""
    rng = np.random.default_rng(chunk)
    sizes = np.exp(0.5 * rng.standard_normal(CHUNK)) * np.where(rng.random(CHUNK) < 0.1, 30, 1)
    if chunk == 0:
        sizes[3] = np.nan
    return jax.tree.map(
        lambda x: (rng.standard_normal((CHUNK, *x.shape)) * sizes.reshape(-1, *[1] * x.ndim)).astype(x.dtype),
        random_tree(),
    )


@functools.partial(jax.jit, static_argnums=0)
def advance(tx: Any, state: Any, grads: Any) -> Any:
    def one(state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, random_tree(7))
        return state, updates

    return jax.lax.scan(one, state, grads)


def digest(tree: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        found.update(f"{array.shape} {array.dtype}".encode() + array.tobytes())
    return found.hexdigest()


def save(how: str, path: Path, states: Any) -> None:
    if how == "flax":
        from flax import serialization

        path.write_bytes(serialization.to_bytes(states))
    else:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path.absolute(), states)


def restore(how: str, path: Path, like: Any) -> Any:
    if how == "flax":
        from flax import serialization

        states = serialization.from_bytes(like, path.read_bytes())
    else:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            states = checkpointer.restore(
                path.absolute(), jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            )
    # Not committed to a device, as Orbax' arrays are: what the first process has compiled serves all.
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), states)


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """What this process computes after each cut, by case and cut; and what a new one does, by format, too."""
    pytest.importorskip("flax")
    pytest.importorskip("orbax.checkpoint")
    folder = tmp_path_factory.mktemp("states")
    uncut = {}
    states = {case: state for case, (_, state) in stateful().items()}
    for chunk in range(max(CUTS) + 1):
        if chunk in CUTS:
            for how in FORMATS:
                save(how, folder / f"{chunk}-{how}", states)
        results = {case: advance(tx, states[case], gradients(chunk)) for case, (tx, _) in stateful().items()}
        uncut |= {f"{case}/{chunk}": digest(result) for case, result in results.items()}
        states = {case: state for case, (state, _) in results.items()}
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return uncut, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("case", [str(case) for case in resumed()])
def test_a_run_goes_on_bit_for_bit_in_a_new_process(digests: Any, case: str, cut: int, how: str) -> None:
    uncut, again = digests
    if case not in stateful():
        pytest.skip("has no state")
    assert again[f"{case}/{cut}/{how}"] == uncut[f"{case}/{cut}"]


def test_the_state_says_where_it_is() -> None:
    """Guards the other: the runs differ by what was before the cut."""
    tx, fresh = stateful()["autoclip(window=32)"]
    used = advance(tx, fresh, gradients(0))[0]
    assert avals(used) == avals(fresh)
    assert digest(advance(tx, used, gradients(1))[1]) != digest(advance(tx, fresh, gradients(1))[1])


def main(folder: Path) -> None:
    found = {}
    like = {case: state for case, (_, state) in stateful().items()}
    for cut in CUTS:
        for how in FORMATS:
            states = restore(how, folder / f"{cut}-{how}", like)
            for case, (tx, fresh) in stateful().items():
                assert avals(states[case]) == avals(fresh), (case, cut, how)
                found[f"{case}/{cut}/{how}"] = digest(advance(tx, states[case], gradients(cut)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
