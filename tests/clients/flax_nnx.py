"""A convolutional network on images of digits, as in Flax's first tutorial (NNX)."""

import jax.numpy as jnp
import numpy as np
import optax
from client import compare, log, restored
from flax import nnx

import clipjax
from clipjax.flax import unit_axes

rng = np.random.default_rng(0)
IMAGES = rng.normal(size=(8, 32, 28, 28, 1)).astype(np.float32)
LABELS = rng.integers(10, size=(8, 32))


class Digits(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.hidden = nnx.Linear(8 * 7 * 7, 32, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        x = self.drop(x.reshape(x.shape[0], -1))
        return self.out(nnx.relu(self.hidden(x)))


@nnx.jit
def step(model, optimizer, images, labels):
    def loss_fn(model):
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        return cross_entropy(model(images), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def losses(tx):
    model = Digits(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return [step(model, optimizer, *each) for each in zip(IMAGES, LABELS, strict=True)]


compare(
    "flax",
    lambda: losses(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, 0.9))),
)

model = Digits(nnx.Rngs(0))
tx = clipjax.bounded(
    optax.adamw(1e-2),
    clip=clipjax.clip_by_global_norm(1.0),
    project=clipjax.max_norm(0.5, axes=unit_axes(model)),
    nonfinite="skip",
)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
for i in range(4):
    step(model, optimizer, IMAGES[i], LABELS[i])
kernel = model.conv.kernel[...]
step(model, optimizer, np.full_like(IMAGES[4], np.nan), LABELS[4])
assert (model.conv.kernel[...] == kernel).all()
seen = clipjax.metrics(optimizer)
log(seen)
assert seen["skip_nonfinite/skipped"] == 1
norms = jnp.linalg.norm(model.conv.kernel[...].reshape(-1, 8), axis=0)
assert norms.max() <= 0.5, norms

again = Digits(nnx.Rngs(1))
other = nnx.Optimizer(again, tx, wrt=nnx.Param)
nnx.update((again, other), restored(nnx.state((model, optimizer))))
theirs = step(again, other, IMAGES[5], LABELS[5])
assert theirs == step(model, optimizer, IMAGES[5], LABELS[5])
