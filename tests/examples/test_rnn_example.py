"""The example examples/rnn.py: its task, its start, its clip within the network, and its errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

for module in ("flax", "sklearn", "matplotlib", "rich", "tyro"):
    pytest.importorskip(module)


import rnn  # noqa: E402
import rnn_cli  # noqa: E402

from tests.support.scripts import ran, refused  # noqa: E402

pytestmark = pytest.mark.usefixtures("unoptimized")
sequences = jax.jit(rnn.sequences, static_argnums=(1, 2))


@pytest.fixture
def run(tmp_path, capsys):
    """Run the script in this process; returns its status, output and errors."""

    def run(*arguments):
        return ran(rnn.main, ["--plot", tmp_path / "figure.png", *arguments], capsys)

    return run


@pytest.mark.parametrize("length", [10, 30, 57])
def test_a_sequence_has_two_symbols_and_their_order_is_its_class(length):
    x, y = map(np.asarray, sequences(jax.random.key(0), 2000, length))
    assert x.shape == (2000, length)
    assert set(x.ravel()) == set(range(6))
    row, place = np.nonzero(x < 2)
    assert list(row) == [i // 2 for i in range(4000)]
    first, second = place.reshape(-1, 2).T
    tenth = length // 10
    assert set(first) == set(range(tenth, 2 * tenth))
    assert set(second) == set(range(length // 2, length // 2 + tenth))
    np.testing.assert_array_equal(y, 2 * x[np.arange(2000), first] + x[np.arange(2000), second])
    assert set(y) == {0, 1, 2, 3}


def test_the_recurrent_weights_are_sparse_and_almost_preserve_their_largest_mode():
    draw = jax.jit(lambda seed: rnn.smart_tanh(jax.random.key(seed), (50, 50)))
    for seed in range(3):
        weights = np.asarray(draw(seed), np.float64)
        np.testing.assert_array_equal(np.count_nonzero(weights, axis=1), 15)
        np.testing.assert_allclose(np.abs(np.linalg.eigvals(weights)).max(), 0.95, rtol=1e-5)


def gradient_through_time(params, x, y, bound):
    """The loss' gradient by hand, in float64, clipped to `bound` where a time step hands it back."""
    leaves = jax.tree.map(lambda a: np.asarray(a, np.float64), params)["params"]
    cell, head = leaves["Cell_0"], leaves["Dense_0"]
    w, b, u = cell["i"]["kernel"], cell["i"]["bias"], cell["h"]["kernel"]
    inputs = np.eye(6)[x]
    states = [np.zeros((len(x), len(u)))]
    for t in range(x.shape[1]):
        states.append(np.tanh(inputs[:, t] @ w + b + states[-1] @ u))
    logits = states[-1] @ head["kernel"] + head["bias"]
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wrong = (chances - np.eye(4)[y]) / len(x)
    grads = {"w": 0 * w, "b": 0 * b, "u": 0 * u, "head": states[-1].T @ wrong}
    back = wrong @ head["kernel"].T
    clipped = 0
    for t in range(x.shape[1], 0, -1):
        inner = back * (1 - states[t] ** 2)
        grads["w"] += inputs[:, t - 1].T @ inner
        grads["b"] += inner.sum(axis=0)
        grads["u"] += states[t - 1].T @ inner
        back = inner @ u.T
        norm = np.linalg.norm(back)
        if bound is not None and norm > bound:
            back, clipped = back * bound / norm, clipped + 1
    return grads, clipped


@jax.jit
def gradients(params, x, y, bound):
    """Of the loss, without a clip and with one."""

    def loss_of(params, network):
        logits = network.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return [jax.grad(loss_of)(params, rnn.Network(limit)) for limit in (None, bound)]


def test_the_network_clips_what_each_time_step_hands_back():
    params = jax.jit(rnn.Network(1.0).init)(jax.random.key(1), jnp.zeros((1, 1), int))
    # Larger weights than at the start: the gradient must explode for the clip to matter.
    params = jax.tree.map(lambda a: np.float32(1.5 if a.shape == (50, 50) else 20) * np.asarray(a), params)
    x, y = sequences(jax.random.key(2), 20, 20)
    plain, tight = gradients(params, x, y, 0.005)
    loose = gradients(params, x, y, 100.0)[1]
    for bound, found in ((None, plain), (0.005, tight), (100.0, loose)):
        wanted, clipped = gradient_through_time(params, np.asarray(x), np.asarray(y), bound)
        assert (clipped > 5) == (bound == 0.005)
        found = found["params"]
        close = {"rtol": 1e-3, "atol": 1e-5}  # float32 through 20 time steps
        np.testing.assert_allclose(found["Cell_0"]["i"]["kernel"], wanted["w"], **close)
        np.testing.assert_allclose(found["Cell_0"]["i"]["bias"], wanted["b"], **close)
        np.testing.assert_allclose(found["Cell_0"]["h"]["kernel"], wanted["u"], **close)
        np.testing.assert_allclose(found["Dense_0"]["kernel"], wanted["head"], **close)


def test_quick_shows_a_table_and_a_figure_and_records_gradients_as_they_are_used(run, tmp_path, monkeypatch):
    outcomes, said = {}, {}
    train = rnn.train

    def watched(method, length, args, show):
        def listen(*shown):
            said.setdefault(method, []).append(shown)
            show(*shown)

        outcomes[method] = train(method, length, args, listen)
        return outcomes[method]

    monkeypatch.setattr(rnn, "train", watched)
    status, out, err = run("--quick", "--clip", 0.05)
    assert (status, err) == (0, "")
    for label in rnn_cli.METHODS.values():
        assert re.search(rf"20 +│ {label} +│ [0-2]/2 ", out)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")

    outcome = outcomes["global"]
    assert outcome.before.shape == outcome.after.shape == (2, 500)
    assert np.sum(outcome.before > 0.05) > 50
    np.testing.assert_allclose(outcome.after, np.minimum(outcome.before, 0.05), rtol=1e-5)
    assert [step for step, _, _ in said["global"]] == [250, 500]
    plain = outcomes["none"]
    np.testing.assert_array_equal(plain.after, plain.before)
    assert plain.before[0, 0] == pytest.approx(outcome.before[0, 0], rel=1e-5)  # the same start


def test_quick_is_short():
    args = rnn_cli.Settings(quick=True)
    assert (args.lengths, args.seeds, args.steps) == ((20,), 2, 500)


@pytest.mark.slow
def test_by_default_only_clipped_networks_learn_the_longer_sequences():
    args = rnn_cli.Settings()
    learnt = {(o.length, o.method): np.count_nonzero(o.solved) for o in rnn.run(args)}
    assert learnt[10, "none"] == learnt[10, "global"] == args.seeds == 4
    assert learnt[30, "none"] == 0
    assert learnt[30, "global"] == 4
    assert learnt[30, "step"] >= 2


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (["--lengths", "9"], "--lengths: must be a whole number of at least 10, got 9"),
        (["--seeds", "0"], "--seeds"),
        (["--steps", "1.5"], "--steps"),
        (["--clip", "nan"], "--clip: must be a number above 0, got nan"),
        (["--step-clip", "-1"], "--step-clip"),
        (["--learning-rate", "0"], "--learning-rate"),
        (["--quick", "--full"], "not allowed together"),
        (["--method", "none"], "Unrecognized options: --method"),
        (["--plot", "{tmp}/figure.pdf"], "must end in .png"),
        (["--plot", "{tmp}/file/below.png"], "file is not a directory"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(run, tmp_path, arguments, mention):
    (tmp_path / "file").write_text("mine")
    assert mention in refused("rnn.py", run(*(text.format(tmp=tmp_path) for text in arguments)))


def test_the_help_names_every_flag(run):
    status, shown, err = run("--help")
    assert (status, err) == (0, "")
    for flag in ("lengths", "seeds", "steps", "clip", "step-clip", "learning-rate", "plot", "quick", "full"):
        assert f"--{flag}" in shown
