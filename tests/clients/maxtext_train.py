# /// script
# dependencies = [
#   "maxtext==0.2.5",
#   # Its own lists are those of a TPU or GPU.
#   "aqtp", "drjax", "grain", "jinja2", "ml-collections", "omegaconf",
#   "pathwaysutils", "pillow", "sentencepiece", "sympy", "tiktoken", "tokamax",
#   "transformers",
# ]
# ///
"""MaxText's trainer on a small decoder, and its checkpoints."""

import json
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import maxtext
import optax
from client import check_equal, compare, folder, log
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train

import clipjax
from clipjax.flax import unit_axes

SETTINGS = {
    "run_name": "run",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "attention": "dot_product",
    "base_emb_dim": 16,
    "base_mlp_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "base_num_decoder_layers": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_target_length": 16,
    "per_device_batch_size": 2,
    "learning_rate": 0.01,
    "learning_rate_schedule_steps": 6,
    "enable_goodput_recording": False,
    "log_config": False,
}
# MaxText stacks layers along axis 1.
AXES = {
    "*norm/scale": clipjax.SKIP,
    "*attention/out/kernel": (0, 2),
    "*kernel": 0,
    "*embedding": 1,
}


def run(path, **settings):
    """Train; return the losses and the last state."""
    path.mkdir(exist_ok=True)
    own = {"base_output_directory": path, "metrics_file": path / "metrics"}
    pairs = (SETTINGS | own | settings).items()
    base = str(Path(maxtext.__path__[0], "configs", "base.yml"))
    config, recorder = train.initialize(["", base, *[f"{k}={v}" for k, v in pairs]])
    state = train.train_loop(config, recorder)
    rows = map(json.loads, (path / "metrics").read_text().splitlines())
    return [row["learning/loss"] for row in rows], state


def losses():
    clip = {"gradient_clipping_threshold": 0.1}
    return run(folder(), steps=6, enable_checkpointing=False, **clip)[0]


compare("maxtext", losses)


def make(config, schedule, model, mesh=None):
    return clipjax.bounded(
        optax.adamw(schedule),
        clip=clipjax.clip_by_global_norm(0.1),
        project=clipjax.max_norm(0.1, axes=unit_axes(model, other=AXES)),
        nonfinite="skip",
    )


with mock.patch.object(optimizers, "get_optimizer", make):
    every = {"gradient_clipping_threshold": 0, "checkpoint_period": 1}
    _, wanted = run(folder(), steps=6, **every)
    path = folder()
    run(path, steps=3, **every)
    _, state = run(path, steps=6, **every)

log(clipjax.metrics(state))
check_equal(state["optimizer"], wanted["optimizer"])
kernel = state["model"]["decoder"]["layers"]["self_attention"]["out"]["kernel"]
norms = jnp.sqrt(jnp.sum(kernel[...] ** 2, axis=(0, 2)))
assert norms.max() <= 0.1
