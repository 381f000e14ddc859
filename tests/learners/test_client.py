import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.learners.client import ClientUpdate, local_update, visiting_order
from dovetail.learners.server import ServerSettings

FEATURES, CLASSES, RECORDS = 5, 3, 7


def logits(params, inputs):
    return inputs @ params.reshape(FEATURES, CLASSES)


def problem():
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=FEATURES * CLASSES).astype(np.float32),
        rng.normal(size=(RECORDS, FEATURES)).astype(np.float32),
        rng.integers(0, CLASSES, RECORDS).astype(np.int32),
    )


def gradient(params, x, y):
    w = params.reshape(FEATURES, CLASSES)
    z = x @ w
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return (x.T @ (p - np.eye(CLASSES)[y]) / len(x)).ravel()


def by_hand(settings, params, x, y):
    """The plain loop that the vectorised update must equal."""
    if settings.update == "fedsgd":
        return -gradient(params, x, y)
    w = params.astype(np.float64)
    for _ in range(settings.epochs):
        for low in range(0, len(x), settings.batch):
            step = gradient(w, x[low : low + settings.batch], y[low : low + settings.batch])
            w = w - settings.learning_rate * (step + settings.mu * (w - params))
    return w - params


SETTINGS = [
    ClientUpdate(),
    ClientUpdate(update="fedavg", epochs=2, batch=3, learning_rate=0.5),
    ClientUpdate(update="fedavg", epochs=1, batch=10, learning_rate=0.5),
    ClientUpdate(update="fedprox", epochs=3, batch=2, learning_rate=0.3, mu=0.7),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.update}-{s.epochs}x{s.batch}")
@pytest.mark.parametrize("count", [RECORDS, 4, 1])
def test_update_equals_the_plain_loop_and_ignores_padding(settings, count):
    params, x, y = problem()
    ours = local_update(settings, logits)(jnp.asarray(params), jnp.asarray(x), jnp.asarray(y), jnp.int32(count))
    np.testing.assert_allclose(ours, by_hand(settings, params, x[:count], y[:count]), atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.update}-{s.epochs}x{s.batch}")
def test_a_client_without_records_sends_zero(settings):
    params, x, y = problem()
    ours = local_update(settings, logits)(jnp.asarray(params), jnp.asarray(x), jnp.asarray(y), jnp.int32(0))
    np.testing.assert_array_equal(ours, np.zeros_like(params))


def test_visiting_order_permutes_the_real_records_and_leaves_the_rest_behind():
    orders = np.stack([visiting_order(jnp.int32(5), 8, key=jax.random.key(seed)) for seed in range(300)])
    assert (np.sort(orders, axis=1) == np.arange(8)).all()
    assert (np.sort(orders[:, :5], axis=1) == np.arange(5)).all()
    counts = np.bincount(orders[:, 0], minlength=5)
    assert np.abs(counts - 60).max() < 4.5 * np.sqrt(300 * 0.2 * 0.8)


def test_server_steps_along_the_estimate():
    params, estimate = jnp.ones(4), jnp.arange(4.0)
    server = ServerSettings(optimizer="sgd", learning_rate=0.5).build()
    moved, _ = server.step(params, server.init(params), estimate)
    np.testing.assert_allclose(moved, 1 + 0.5 * np.arange(4))
    heavy = ServerSettings(optimizer="sgd", learning_rate=0.5, options={"momentum": 0.9}).build()
    state = heavy.init(params)
    moved, state = heavy.step(params, state, estimate)
    moved, state = heavy.step(moved, state, estimate)
    np.testing.assert_allclose(moved, 1 + 0.5 * (1 + 1.9) * np.arange(4))


@pytest.mark.parametrize("name", ["adam", "yogi", "lion", "adagrad"])
def test_any_optax_optimizer_serves(name):
    server = ServerSettings(optimizer=name, learning_rate=0.1).build()
    params = jnp.ones(3)
    moved, _ = server.step(params, server.init(params), jnp.ones(3))
    assert (np.asarray(moved) > 1).all()


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: ServerSettings(optimizer="sdg", learning_rate=1.0).build(),
            "unknown optimizer 'sdg': did you mean 'sgd'",
        ),
        (
            lambda: ServerSettings(optimizer="sgd", learning_rate=1.0, options={"momentun": 0.9}).build(),
            "did you mean 'momentum'",
        ),
        (lambda: ServerSettings(optimizer="sgd", learning_rate=-1.0).build(), "expected learning_rate > 0"),
        (lambda: ClientUpdate(update="fedavg", mu=0.1), "expected mu = 0 unless"),
        (lambda: ClientUpdate(batch=0), "expected batch >= 1"),
        (lambda: ClientUpdate(update="sgd"), "expected update to be one of"),
    ],
)
def test_bad_settings_are_refused(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()
