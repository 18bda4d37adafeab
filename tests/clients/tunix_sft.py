# /// script
# dependencies = ["google-tunix==0.1.7"]
# ///
"""Fine-tuning of a small Llama with Tunix, its accumulation and its checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from client import check_equal, compare, folder, log
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import clipjax
from clipjax.flax import unit_axes

CONFIG = ModelConfig(
    num_layers=2,
    vocab_size=64,
    embed_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_kv_heads=1,
    rope_theta=10_000,
    norm_eps=1e-5,
)
WORDS = np.random.default_rng(0).integers(64, size=(8, 4, 12))
DATA = [TrainingInput(words, np.ones_like(words, bool)) for words in WORDS]
MESH = jax.make_mesh((1, 1), ("fsdp", "tp"), (jax.sharding.AxisType.Auto,) * 2)


def to_input(batch):
    size, time = batch.input_tokens.shape
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(time), (size, time)),
        "attention_mask": jnp.broadcast_to(
            jnp.tri(time, dtype=bool), (size, time, time)
        ),
    }


def trainer(tx, **config):
    config = TrainingConfig(eval_every_n_steps=100, **config)
    made = PeftTrainer(Llama3(CONFIG, rngs=nnx.Rngs(0)), tx, config)
    return made.with_gen_model_input_fn(to_input)


def losses():
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5, 0.9))
    made = trainer(tx, max_steps=4, gradient_accumulation_steps=2)
    made.train(DATA)
    return made.metrics_logger.get_metric_history("", "loss", "train")


with MESH:
    compare("google-tunix", losses)
    # Tunix has layers of its own.
    other = {
        "input_embedding": 1,
        "*norm/w": clipjax.SKIP,
        "o_proj/w": (0, 1),
        "w": 0,
    }
    axes = unit_axes(Llama3(CONFIG, rngs=nnx.Rngs(0)), other=other)
    tx = clipjax.bounded(
        optax.adamw(0.01),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.max_norm(0.05, axes=axes),
        nonfinite="skip",
    )
    path = str(folder())
    every = ocp.CheckpointManagerOptions(save_interval_steps=1)
    saved = {"checkpoint_root_directory": path, "checkpointing_options": every}
    made = trainer(tx, max_steps=4, **saved)
    made.train(DATA)
    log(clipjax.metrics(made.optimizer))
    norms = jnp.linalg.norm(made.model.layers[0].attn.q_proj.w[...], axis=0)
    assert norms.max() <= 0.05

    again = trainer(tx, max_steps=8, **saved)
    check_equal(*(jax.tree.leaves(nnx.state(x.optimizer)) for x in (made, again)))
    again.train(DATA)
    assert clipjax.metrics(again.optimizer)["skip_nonfinite/steps"] == 8
