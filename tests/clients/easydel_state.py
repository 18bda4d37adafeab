# /// script
# dependencies = ["easydel==0.3.0", "pillow", "torch"]
# ///
"""Steps of a small Llama in EasyDeL's training state, with its optimizer factory."""

import easydel as ed
import jax
import jax.numpy as jnp
import numpy as np
import optax
from client import check_equal, compare, log, restored
from eformer.optimizers import AdamWConfig, OptimizerFactory, SchedulerConfig
from flax import nnx

import clipjax

WORDS = np.random.default_rng(0).integers(64, size=(4, 12))


def make(tx):
    config = ed.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    # By default they are bfloat16, in which Optax adds up the norm.
    dtypes = dict.fromkeys(("dtype", "param_dtype"), jnp.float32)
    model = ed.LlamaForCausalLM(config, **dtypes, rngs=nnx.Rngs(0))
    return ed.EasyDeLState.create(model=model, tx=tx, init_opt_state=True)


@jax.jit
def step(state):
    def loss_fn(graphstate):
        model = state.merge(graphstate)
        logits = model(input_ids=WORDS).logits[:, :-1].astype(jnp.float32)
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        return cross_entropy(logits, WORDS[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.graphstate)
    return state.apply_gradients(grads=grads), loss


def train(tx, steps=5):
    state, losses = make(tx), []
    with state.model.mesh:
        for _ in range(steps):
            state, loss = step(state)
            losses.append(loss)
    return state, losses


def losses():
    tx, _ = OptimizerFactory.create(
        "adamw",
        SchedulerConfig(learning_rate=0.01, steps=10),
        AdamWConfig(),
        clip_grad=0.1,
    )
    return train(tx)[1]


compare("easydel", losses)

tx = clipjax.bounded(
    optax.adam(0.01),
    clip=clipjax.clip_by_global_norm(0.1),
    project=clipjax.max_norm(0.05, axes={"*_proj/kernel": 0}),
    nonfinite="skip",
)
state, _ = train(tx)
log(clipjax.metrics(state.opt_state))
kernel = state.model.model.layers[0].self_attn.q_proj.kernel[...]
assert jnp.linalg.norm(kernel, axis=0).max() <= 0.05
check_equal(state.opt_state, restored(state.opt_state))
