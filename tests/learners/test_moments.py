"""Moments as a vector, and the linear model that ridge regression makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TASK

from dovetail.learners.client import ClientUpdate
from dovetail.learners.models import linear
from dovetail.learners.moments import Moments, moments_of
from dovetail.learners.server import Ridge, Server, ServerSettings

LAYOUT = Moments(features=4, classes=3, constant=0.5, weight=2.0)


def records(count=50, features=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, features)).astype(np.float32), rng.integers(0, 3, count)


def with_constant(inputs, constant=0.5):
    return np.column_stack([inputs, np.full(len(inputs), constant)]).astype(np.float64)


def test_the_layout_gives_back_what_it_took_and_keeps_the_norm():
    rng = np.random.default_rng(1)
    square, cross = rng.normal(size=(5, 5)), rng.normal(size=(5, 3))
    gram = square + square.T
    vector = np.asarray(LAYOUT.pack(jnp.asarray(gram), jnp.asarray(cross)))
    assert vector.shape == (LAYOUT.dim,) == (15 + 15,)
    np.testing.assert_allclose(np.linalg.norm(vector), np.hypot(np.linalg.norm(gram), np.linalg.norm(cross)), rtol=1e-6)
    back = LAYOUT.unpack(vector)
    np.testing.assert_allclose(back[0], gram, rtol=1e-6)
    np.testing.assert_allclose(back[1], cross, rtol=1e-6)


def test_a_vector_is_the_mean_over_the_records_that_count():
    inputs, labels = records(3)
    of = [np.asarray(LAYOUT(inputs[i : i + 1], labels[i : i + 1], 1)) for i in range(2)]
    np.testing.assert_allclose(LAYOUT(inputs, labels, 2), np.mean(of, axis=0), rtol=1e-5, atol=1e-6)
    assert not np.any(LAYOUT(inputs, labels, 0))


def test_the_norm_of_one_record_follows_from_that_of_its_features():
    inputs, labels = records(8)
    formed = jax.vmap(lambda x, y: LAYOUT(x[None], y[None], 1))(jnp.asarray(inputs), jnp.asarray(labels))
    reach = np.linalg.norm(with_constant(inputs), axis=1)
    np.testing.assert_allclose(LAYOUT.norm_of_vector(jnp.asarray(reach)), np.linalg.norm(formed, axis=1), rtol=1e-5)


@pytest.mark.parametrize("project", [None, 2])
def test_without_noise_the_model_is_that_of_ridge_regression(project):
    layout = Moments(features=4, classes=3, constant=0.5, weight=2.0, project=project)
    inputs, labels = records()
    flat = layout.solve_model(np.asarray(layout(inputs, labels, len(labels))), ridge=0.1, relative_ridge=0.0)
    seen = np.asarray(layout.augmented_features(jnp.asarray(inputs)), np.float64)
    assert seen.shape == (50, layout.size)
    targets = np.eye(3)[labels] - 1 / 3
    weights = np.linalg.solve(seen.T @ seen / 50 + 0.1 * np.eye(layout.size), seen.T @ targets / 50)
    fitted = with_constant(inputs) @ flat.reshape(5, 3)
    np.testing.assert_allclose(fitted, seen @ weights, rtol=1e-3, atol=1e-5)


def test_negative_eigenvalues_count_as_zero_and_the_share_is_of_their_mean():
    layout = Moments(features=1, classes=2, constant=1.0)
    vector = np.asarray(layout.pack(jnp.diag(jnp.array([-3.0, 2.0])), jnp.ones((2, 2))))
    np.testing.assert_allclose(
        layout.solve_model(vector, ridge=0.5, relative_ridge=0.25), [1 / 0.75, 1 / 0.75, 1 / 2.75, 1 / 2.75]
    )
    assert not np.any(layout.solve_model(np.zeros(layout.dim), ridge=0.0, relative_ridge=0.0))


def test_the_noise_of_a_gram_matrix_has_the_norm_that_is_said():
    layout = Moments(features=99, classes=2, constant=1.0)
    noise = np.random.default_rng(2).normal(scale=0.3, size=layout.dim)
    found = np.linalg.norm(layout.unpack(noise)[0], ord=2)
    assert found == pytest.approx(layout.noise_norm(0.3), rel=0.1)


def test_the_ridge_follows_from_the_noise_and_the_options():
    inputs, labels = records()
    mean = LAYOUT(inputs, labels, 50)
    server = (
        ServerSettings(optimizer="ridge", learning_rate=1.0, options={"ridge": 2.0, "share": 0.0})
        .build()
        .for_rounds(1, moments=LAYOUT, noise_std=0.1)
    )
    params, state = server.step(jnp.zeros(LAYOUT.dim), server.init(jnp.zeros(LAYOUT.dim)), mean)
    expected = LAYOUT.solve_model(np.asarray(mean), ridge=2 * 0.1 * np.sqrt(10), relative_ridge=0.0)
    np.testing.assert_allclose(server.model_to_publish(params, state), expected, rtol=1e-6)
    assert "uploads once" in server.notes[0]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="rounds = 1"):
        Ridge().for_rounds(2, moments=LAYOUT)
    with pytest.raises(ValueError, match=r"client\.update = 'moments'"):
        Ridge().for_rounds(1)
    with pytest.raises(ValueError, match=r"server\.optimizer = 'ridge'"):
        Server().for_rounds(1, moments=LAYOUT)
    with pytest.raises(ValueError, match="average"):
        Ridge(average=0.5)
    with pytest.raises(ValueError, match="momentum"):
        ServerSettings(optimizer="ridge", learning_rate=1.0, options={"momentum": 0.9}).build()
    with pytest.raises(ValueError, match="layout"):
        Ridge().model_to_publish(jnp.zeros(1), ())
    with pytest.raises(ValueError, match="'moments' only"):
        ClientUpdate(project=3)
    with pytest.raises(ValueError, match="project=4"):
        Moments(features=4, classes=3, constant=0.5, project=4)


def test_moments_are_of_linear_models():
    model = linear("logistic", TASK.load(), constant=1.0)
    assert moments_of(ClientUpdate(), model) is None
    found = moments_of(ClientUpdate(update="moments", weight=3.0), model)
    assert found is not None
    assert found.weight == 3.0
