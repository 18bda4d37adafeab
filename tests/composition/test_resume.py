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
    """Every transformation, and those with a window with one that is overwritten in the middle."""
    windows = [Case(case.name, {"window": 8}) for case in cases() if "window" in parameters(case.name)]
    return cases() + windows


def stateful(tx: Any) -> bool:
    return bool(jax.tree.leaves(tx.init(random_tree())))


def gradients(chunk: int) -> Any:
    """Gradients that vary by factors, with a spike now and then, and a bad one in the first chunk."""
    rng = np.random.default_rng(chunk)
    sizes = np.exp(0.5 * rng.standard_normal(CHUNK)) * np.where(rng.random(CHUNK) < 0.1, 30, 1)
    if chunk == 0:
        sizes[3] = np.nan
    return jax.tree.map(
        lambda x: jnp.asarray(
            rng.standard_normal((CHUNK, *x.shape)) * sizes.reshape(-1, *[1] * x.ndim), x.dtype
        ),
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


def save(how: str, path: Path, state: Any) -> None:
    if how == "flax":
        from flax import serialization

        path.write_bytes(serialization.to_bytes(state))
    else:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path.absolute(), state)


def restore(how: str, path: Path, like: Any) -> Any:
    if how == "flax":
        from flax import serialization

        return jax.tree.map(jnp.asarray, serialization.from_bytes(like, path.read_bytes()))
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path.absolute(), jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


def place(folder: Path, case: Case, cut: int, how: str) -> Path:
    return folder / f"{list(map(str, resumed())).index(str(case))}-{cut}-{how}"


def keys(case: Case) -> list[tuple[str, int, str]]:
    return [(f"{case}/{cut}/{how}", cut, how) for cut in CUTS for how in FORMATS]


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """By case, cut and format: what this process computes after the cut, and what a new one does."""
    pytest.importorskip("flax")
    pytest.importorskip("orbax.checkpoint")
    folder = tmp_path_factory.mktemp("states")
    uncut = {}
    for case in resumed():
        tx = build(case)
        if not stateful(tx):
            continue
        state = tx.init(random_tree(7))
        for chunk in range(max(CUTS) + 1):
            if chunk in CUTS:
                for how in FORMATS:
                    save(how, place(folder, case, chunk, how), state)
            result = advance(tx, state, gradients(chunk))
            uncut |= {key: digest(result) for key, cut, _ in keys(case) if cut == chunk}
            state = result[0]
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
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in resumed()])
def test_a_run_goes_on_bit_for_bit_in_a_new_process(digests: Any, case: Case, cut: int, how: str) -> None:
    uncut, again = digests
    if not stateful(build(case)):
        pytest.skip("has no state")
    key = f"{case}/{cut}/{how}"
    assert again[key] == uncut[key]


def test_the_state_says_where_it_is() -> None:
    """Guards the other: the runs differ by what was before the cut."""
    tx = build(Case("autoclip", {"window": 8}))
    fresh = tx.init(random_tree(7))
    used = advance(tx, fresh, gradients(0))[0]
    assert avals(used) == avals(fresh)
    assert digest(advance(tx, used, gradients(1))[1]) != digest(advance(tx, fresh, gradients(1))[1])


def main(folder: Path) -> None:
    found = {}
    for case in resumed():
        tx = build(case)
        if not stateful(tx):
            continue
        like = tx.init(random_tree(7))
        for key, cut, how in keys(case):
            state = restore(how, place(folder, case, cut, how), like)
            assert avals(state) == avals(like), key
            found[key] = digest(advance(tx, state, gradients(cut)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
