"""Every loss, in every way that the engine has of adding up updates, against gradients one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import diagonal
from jax.flatten_util import ravel_pytree

from dovetail.data import Model
from dovetail.engine import examples, linear
from dovetail.learners import losses
from dovetail.learners.client import ClientUpdate, local_update
from dovetail.mechanisms.gaussian import clip_factor

CLIENTS, RECORDS, FEATURES, CONSTANT = 5, 3, 4, 0.7
RNG = np.random.default_rng(3)
INPUTS = RNG.normal(size=(CLIENTS, RECORDS, FEATURES)).astype(np.float32)
COUNTS = np.array([3, 1, 2, 0, 3], np.int32)


def absolute(outputs, labels):
    return jnp.abs(outputs[:, 0] - labels) + 0.1 * outputs[:, 0] ** 2


CASES = {
    "binary": (losses.binary_cross_entropy, 1, RNG.integers(0, 2, (CLIENTS, RECORDS)).astype(np.int32)),
    "squared": (losses.squared_error, 1, RNG.normal(size=(CLIENTS, RECORDS)).astype(np.float32)),
    "huber": (losses.huber, 1, 3 * RNG.normal(size=(CLIENTS, RECORDS)).astype(np.float32)),
    "labels": (losses.sigmoid_cross_entropy, 3, (RNG.random((CLIENTS, RECORDS, 3)) < 0.4).astype(np.float32)),
    "own": (absolute, 1, RNG.normal(size=(CLIENTS, RECORDS)).astype(np.float32)),
}
UPDATES = {
    "fedsgd": ClientUpdate(),
    "fedavg": ClientUpdate(update="fedavg", epochs=2, batch=2, learning_rate=0.1),
    "fedprox": ClientUpdate(update="fedprox", epochs=2, batch=2, learning_rate=0.1, mu=0.5),
}


def weights(width):
    return np.random.default_rng(4).normal(size=(FEATURES + 1, width)).astype(np.float32)


def logits(width, params, inputs):
    w = params.reshape(FEATURES + 1, width)
    return inputs @ w[:-1] + CONSTANT * w[-1]


def one_by_one(case, update, clip_norm):
    loss, width, labels = CASES[case]
    step = jax.jit(local_update(update, functools.partial(logits, width), loss))
    total = np.zeros((FEATURES + 1) * width)
    for x, y, count in zip(INPUTS, labels, COUNTS, strict=True):
        found = np.asarray(step(jnp.asarray(weights(width)).ravel(), x, y, count), np.float64)
        total += found * min(1.0, clip_norm / max(np.linalg.norm(found), 1e-30))
    return total


@functools.partial(jax.jit, static_argnames=("update", "loss"))
def clipped(params, chunk, update, loss):
    return linear.scaled_sum(params, CONSTANT, chunk, update, functools.partial(clip_factor, clip_norm=0.5), loss)


@pytest.mark.parametrize(("case", "update"), diagonal(list(CASES), list(UPDATES)))
def test_linear_models_add_up_to_the_general_way(case, update):
    loss, width, labels = CASES[case]
    chunk = linear.Chunk(jnp.asarray(INPUTS), jnp.asarray(labels), jnp.asarray(COUNTS))
    ours = clipped(weights(width), chunk, UPDATES[update], loss)
    np.testing.assert_allclose(np.ravel(ours), one_by_one(case, UPDATES[update], 0.5), atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_gram_matrices_serve_every_loss(case):
    from dovetail.data import Clients

    loss, width, labels = CASES[case]
    table = Clients.from_rows(np.arange(CLIENTS * RECORDS).reshape(CLIENTS, RECORDS), COUNTS)
    products = linear.products_of_rows(INPUTS.reshape(-1, FEATURES), table, constant=CONSTANT)
    chunk = linear.Chunk(jnp.asarray(INPUTS), jnp.asarray(labels), jnp.asarray(COUNTS), products)
    ours = clipped(weights(width), chunk, ClientUpdate(), loss)
    np.testing.assert_allclose(np.ravel(ours), one_by_one(case, ClientUpdate(), 0.5), atol=2e-5)


@pytest.mark.parametrize(("case", "kind"), diagonal(list(CASES), ["linear", "factored", "formed"]))
def test_records_are_clipped_one_by_one_under_every_loss(case, kind):
    loss, width, labels = CASES[case]

    def apply(params, x):
        if kind == "linear":
            return x @ params[:-1] + CONSTANT * params[-1]
        hidden = jnp.tanh(x @ params["a"] + params["b"])
        return hidden @ params["c"] * (1 if kind == "factored" else jnp.sum(params["b"]))

    def init(key):
        first = {"a": weights(2)[:-1], "b": weights(2)[-1], "c": np.ones((2, width), np.float32)}
        return jax.tree.map(jnp.asarray, weights(width) if kind == "linear" else first)

    model = Model(name="own", init=init, apply=apply, constant=CONSTANT if kind == "linear" else None)
    params, unravel = ravel_pytree(init(None))
    x, y = INPUTS.reshape(-1, FEATURES), labels.reshape(CLIENTS * RECORDS, *labels.shape[2:])
    one = jax.jit(jax.grad(lambda params, x, y: loss(apply(unravel(params), x), y)[0]))
    gradients = np.stack([np.asarray(one(params, x[i : i + 1], y[i : i + 1])) for i in range(len(x))])
    norms = np.linalg.norm(gradients, axis=1)
    clip_norm = float(np.median(norms))
    expected = np.sum(gradients * np.minimum(1, clip_norm / np.maximum(norms, 1e-30))[:, None], axis=0)
    together = functools.partial(examples.clipped_sum, model, unravel, clip_norm=clip_norm, loss=loss)
    ours = jax.jit(together)(params, x, y, np.ones(len(x)))
    np.testing.assert_allclose(ours, expected, atol=1e-5 * max(1, np.abs(expected).max()))
