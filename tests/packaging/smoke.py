"""A step with an installed clipjax, away from the repository: run by `python -m tests.packaging`."""

import importlib.metadata
import importlib.resources
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import clipjax


def main() -> None:
    """Look at what was installed, and use it."""
    assert "site-packages" in clipjax.__file__, clipjax.__file__
    assert importlib.metadata.version("clipjax") == clipjax.__version__
    assert importlib.resources.files("clipjax").joinpath("py.typed").is_file()

    params, grads = {"kernel": jnp.full((4, 3), 2.0)}, {"kernel": jnp.full((4, 3), 5.0)}
    tx = clipjax.bounded(
        optax.adam(1e-3), clip=clipjax.clip_by_global_norm(1.0), project=clipjax.max_norm(3.0)
    )
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    assert not clipjax.verify(params, clipjax.max_norm(3.0))
    assert clipjax.metrics(state)["clip_by_global_norm/clipped_fraction"] == 1
    print(f"clipjax {clipjax.__version__} of {Path(clipjax.__file__).parent}: a step, its metrics, its types")


if __name__ == "__main__":
    main()
