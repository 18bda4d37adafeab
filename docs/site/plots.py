"""Draw the pictures of the plots in the reference, of one run that breaks.

python docs/site/plots.py
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import clipjax
from clipjax import plots

IMAGES = Path(__file__).parents[1] / "images"
LAYERS = ("embed", "blocks/0", "blocks/1", "blocks/2", "head")
STEPS, BROKE = 120, {60: 400.0, 90: np.nan}  # what the gradient of a layer is times


def run():
    """Return the history of a run, and its last state."""
    rng = np.random.default_rng(0)
    tx = optax.chain(
        clipjax.record_norms("leaf", keep=8),
        clipjax.skip_spikes(
            clipjax.bounded(
                optax.adam(1e-3),
                clip=clipjax.clip_by_quantile(0.9, initial_max_norm=80.0),
            )
        ),
    )
    params = {name: jnp.zeros(4) for name in LAYERS}
    state, history, update = tx.init(params), [], jax.jit(tx.update)
    for step in range(STEPS):
        fall = 1 + 4 * np.exp(-step / 15)
        grads = {
            name: fall * (1 + k) * np.exp(0.15 * rng.normal()) * np.ones(4)
            for k, name in enumerate(LAYERS)
        }
        grads["blocks/1"] *= BROKE.get(step, 1.0)
        _, state = update(jax.tree.map(jnp.float32, grads), state, params)
        history.append(clipjax.metrics(state))
    return history, state


def main():
    """Draw each plot, light and dark."""
    history, state = run()
    order = [f"*/{name}" for name in LAYERS]
    bad = clipjax.bad_steps(state)
    drawings = {
        "norms": lambda ax: plots.norms(history, name="clip_by_quantile", ax=ax),
        "group_norms": lambda ax: plots.group_norms(history, ax=ax),
        "heat_map": lambda ax: plots.heat_map(history, only=order, bad=bad, ax=ax),
        "bad_steps": lambda ax: plots.bad_steps(state, ax=ax),
    }
    for name, draw in drawings.items():
        for suffix, styles in (("", []), ("-dark", ["dark_background"])):
            with plt.style.context([*styles, {"font.size": 12}]):
                figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
                draw(ax)
                figure.savefig(IMAGES / f"plots-{name}{suffix}.png", dpi=140)
                plt.close(figure)


if __name__ == "__main__":
    main()
