"""Train a small transformer that adds two-digit numbers, with its weights split over all devices.

It reads lines such as `47+85=132`, which the script makes, and has every part of the usual setup at scale:
weights and moments fully sharded over a mesh with an axis for data and one for tensor parallelism, gradients
accumulated over several batches, weights in bfloat16 with moments in float32, clipping by the global norm,
`clipjax.flax.unit_axes` for a bound on the weights of every unit, and checkpoints. By default it runs on
eight virtual devices of the CPU; on a host with GPUs or TPUs it uses those, and with `--coordinator` the
devices of several hosts.

    python examples/sharded.py
    python examples/sharded.py --devices 1 --checkpoint out/run
    python examples/sharded.py --coordinator localhost:9876 --processes 2 --process-id 0  # and 1
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import absl.logging
import command_line
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from command_line import UserError, check_plot
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mnist import open_checkpoints, restore, save
from rich.console import Console
from sharded_cli import Outcome, Record, Settings, draw, progress_bar, summary, unit_norms
from sharded_model import ANSWER, VOCABULARY, Model, sums

import clipjax
from clipjax.flax import unit_axes

HELD_OUT = 1000  # sums, of 10,000, that are never trained on
REPORT_EVERY = 10  # updates between two reports, each of which waits for the devices


class State(NamedTuple):
    """Everything that a step changes."""

    params: nnx.State
    opt_state: Any


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Give an optimizer float32 weights and gradients, and so float32 moments.

    Adam's `mu_dtype` sets the dtype of its first moment only. In bfloat16 the second moment would never
    change: 0.999 times a number rounds to that number again.
    """

    def init(params: Any) -> Any:
        return optimizer.init(optax.tree.cast(params, jnp.float32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return optimizer.update(
            optax.tree.cast(updates, jnp.float32), state, optax.tree.cast(params, jnp.float32)
        )

    return optax.GradientTransformation(init, update)


class Rounded(NamedTuple):
    """How many updates were rounded."""

    count: jax.Array


def round_stochastically(seed: int) -> optax.GradientTransformation:
    """Round new bfloat16 weights up or down at random, so that small updates count as often as they should.

    bfloat16 has 8 bits: with rounding to the nearest number, an update of less than 1/512 of its weight is
    always lost, and the loss ends three times as high (`--rounding nearest`). This is the last link before
    the projection, which thus sees the rounded weights.
    """

    def update(updates: Any, state: Rounded, params: Any = None) -> tuple[Any, Rounded]:
        key = jax.random.fold_in(jax.random.key(seed), state.count)

        def rounded(update: jax.Array, weight: jax.Array) -> jax.Array:
            if weight.dtype != jnp.bfloat16:
                return update
            weight = weight.astype(jnp.float32)
            # bfloat16 is the upper half of float32. One key serves all weights: the noise has to be right for
            # each of them, but not independent between them, and leaves of one shape share its computation.
            noise = jax.random.bits(key, weight.shape) >> 16
            bits = jax.lax.bitcast_convert_type(weight + update, jnp.uint32) + noise
            return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32) - weight

        return jax.tree.map(rounded, updates, params), Rounded(state.count + 1)

    return optax.GradientTransformation(lambda _: Rounded(jnp.zeros((), jnp.int32)), update)


def make_optimizer(args: Settings, project: clipjax.Projection) -> optax.GradientTransformation:
    """Clip the mean of the accumulated gradients, take a step of Adam, and project the weights."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, args.updates // 20, args.updates, args.learning_rate / 20
    )
    inner = in_float32(optax.adam(rate))
    if args.rounding == "stochastic":
        inner = optax.chain(inner, round_stochastically(args.seed))
    bounded = clipjax.bounded(inner, clip=clipjax.clip_by_global_norm(args.clip), project=project)
    # For each batch this computes an update with its collectives, and applies only that of the last batch.
    # Non-finite gradients would stay in the accumulator forever, so they are skipped.
    several = optax.MultiSteps(bounded, args.accumulate, should_skip_update_fn=optax.skip_not_finite)
    return several.gradient_transformation()


def make_mesh(args: Settings) -> jax.sharding.Mesh:
    """Arrange all devices by data and tensor parallelism, and check that the model splits over them."""
    devices = len(jax.devices())
    model = args.tensor or (2 if devices % 2 == 0 else 1)
    for what, value, name, parts in (
        ("the number of devices", devices, "--tensor", model),
        ("--heads", args.heads, "the tensor axis", model),
        ("the vocabulary", VOCABULARY, "the tensor axis", model),
        ("--width", args.width, "--heads", args.heads),
        ("--width", args.width, "the data axis", devices // model),
        ("--batch-size", args.batch_size, "the data axis", devices // model),
    ):
        if value % parts:
            raise UserError(
                f"{what}, {value}, must be divisible by {name}, which is {parts} ({devices} devices)"
            )
    # With automatic axes, the compiler splits the activations between the layers, and places the collectives.
    # With explicit axes, the default, each product that could be split in two ways would have to say how.
    return jax.make_mesh((devices // model, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def make_state(tx: optax.GradientTransformation, model_of: Callable[[], Model], mesh: Any) -> State:
    """Draw the initial weights in parts on each device; moments and accumulators are split like them."""

    def init() -> State:
        params = nnx.state(model_of(), nnx.Param)
        return State(params, tx.init(params))

    return jax.jit(init, out_shardings=nnx.get_named_sharding(jax.eval_shape(init), mesh))()


def loss_of(graph: Any, params: nnx.State, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of the answers' characters, and the fraction of fully right answers."""
    logits, wanted = nnx.merge(graph, params)(rows[:, :-1])[:, ANSWER - 1 :], rows[:, ANSWER:]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()
    return loss, jnp.mean(jnp.all(logits.argmax(-1) == wanted, axis=1))


def compile_step(graph: Any, tx: optax.GradientTransformation, state: State, rows: jax.Array) -> Any:
    """Compile one training step for one batch."""

    def step(state: State, rows: jax.Array) -> tuple[State, Record]:
        (loss, right), grads = jax.value_and_grad(loss_of, argnums=1, has_aux=True)(graph, state.params, rows)
        # Accumulated, clipped and given to Adam in float32.
        updates, opt_state = tx.update(optax.tree.cast(grads, jnp.float32), state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        seen = clipjax.metrics(opt_state)  # of the last update: other batches do not change them
        before, after = (seen[f"clip_by_global_norm/{name}"] for name in ("norm", "norm_after"))
        fractions = (seen[f"{name}/clipped_fraction"] for name in ("clip_by_global_norm", "max_norm"))
        record = Record(loss, right, before, after, *fractions, seen["max_norm/violation"])
        return State(params, opt_state), record

    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)).lower(state, rows).compile()


def put(rows: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    """Split rows over the data axis; each process gives its devices their rows."""
    return jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P("data")), lambda part: rows[part])


def batches(rows: np.ndarray, args: Settings, mesh: Any, update: int) -> Iterator[jax.Array]:
    """Yield the batches of an update, which depend only on the seed and its number, also when resumed."""
    chosen = np.random.default_rng([args.seed, update]).integers(
        len(rows), size=(args.accumulate, args.batch_size)
    )
    for batch in chosen:
        yield put(rows[batch], mesh)


def train(
    state: State, step: Any, batches_of: Callable[[int], Iterator[jax.Array]], args: Any, manager: Any
) -> tuple[State, np.ndarray]:
    """Train, or continue where the latest checkpoint stopped, possibly on other devices.

    Returns:
      The last state and the history: a row of `Record` for each update since the very first.
    """
    done = manager and manager.latest_step()
    history = np.zeros((done or 0, len(Record._fields)), np.float32)
    if done:
        like = ocp.args.StandardRestore({"state": state, "history": history})
        state, history = itemgetter("state", "history")(restore(manager, content=like)["content"])
    with progress_bar(args.updates, done, jax.process_index() == 0) as show:
        while (start := len(history)) < args.updates:
            stop = min(args.updates, *((start // n + 1) * n for n in (args.save_every, REPORT_EVERY)))
            records = []
            for update in range(start, stop):
                for batch in batches_of(update):
                    state, record = step(state, batch)
                records.append(record)
            history = np.concatenate([history, np.asarray(jax.device_get(records), np.float32)])
            show(history, start)
            if manager is not None and (stop % args.save_every == 0 or stop == args.updates):
                save(manager, state, history, settings_of(args))
    return state, history


def settings_of(args: Settings) -> dict[str, Any]:
    """List all settings that a resumed run must share with the original run, which excludes the devices."""
    names = ("width", "heads", "layers", "dtype", "rounding", "updates", "accumulate", "batch_size")
    names += ("learning_rate", "clip", "radius", "seed")
    return {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}


def run(args: Settings) -> None:
    """Train, and show the results."""
    check_plot(args.plot)
    mesh, text = make_mesh(args), sums()
    unseen, rows = text[: HELD_OUT // mesh.shape["data"] * mesh.shape["data"]], text[HELD_OUT:]

    def model_of() -> Model:
        return Model(args.width, args.heads, args.layers, jnp.dtype(args.dtype), nnx.Rngs(args.seed))

    with jax.set_mesh(mesh), open_checkpoints(args.checkpoint, settings_of(args)) as manager:
        abstract = nnx.eval_shape(model_of)  # shapes, without the weights
        graph, axes = nnx.graphdef(abstract), unit_axes(abstract)
        project = clipjax.max_norm(args.radius, axes=axes)
        tx = make_optimizer(args, project)
        state = make_state(tx, model_of, mesh)
        step = compile_step(graph, tx, state, put(rows[: args.batch_size], mesh))
        batches_of = functools.partial(batches, rows, args, mesh)
        state, history = train(state, step, batches_of, args, manager)
        scores = jax.jit(functools.partial(loss_of, graph))(state.params, put(unseen, mesh))
        # Replicate the weights, so that one process can read them; a large model would stay sharded.
        params = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(state.params)
    if jax.process_index() == 0:
        devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
        norms, violations = unit_norms(params, axes), clipjax.verify(params, project)
        outcome = Outcome(devices, mesh.shape, history, params, norms, violations, *map(float, scores), step)
        Console().print(summary(outcome, args.radius))
        draw(args.plot, outcome, args.clip, project)
        print(f"figure: {args.plot}")


def start(args: Settings) -> None:
    """Configure JAX's devices and processes before it initializes them."""
    jax.config.update("jax_num_cpu_devices", args.devices)  # used if there is no accelerator
    if args.coordinator is None:
        return
    try:
        if args.coordinator == "auto":
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(args.coordinator, args.processes, args.process_id)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--coordinator: {args.coordinator}: {str(error).splitlines()[0]}") from error


def start_and_run(args: Settings) -> None:
    """Train on all devices."""
    start(args)
    run(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return its exit status."""
    absl.logging.set_verbosity(absl.logging.ERROR)
    return command_line.main("sharded.py", Settings, start_and_run, argv)


if __name__ == "__main__":
    sys.exit(main())
