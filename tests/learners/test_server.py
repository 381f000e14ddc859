"""The model that is published: the last one, or the mean of the last ones."""

import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.learners.server import AveragingState, Server


def walked(server, rounds):
    """The models after each step, and what would be published then."""
    params = jnp.zeros(2)
    state, models, published = server.init(params), [], []
    for number in range(rounds):
        params, state = server.step(params, state, jnp.array([1.0, number]))
        models.append(np.asarray(params))
        published.append(np.asarray(server.model_to_publish(params, state)))
    return np.array(models), np.array(published)


@pytest.mark.parametrize(("average", "last"), [(0.5, 4), (0.4, 3), (1.0, 7), (0.01, 1)])
def test_the_mean_is_that_of_the_last_models(average, last):
    models, published = walked(Server(average=average, options={"momentum": 0.9}).for_rounds(7), 7)
    start = 7 - last
    np.testing.assert_array_equal(published[:start], models[:start])
    for end in range(start, 7):
        np.testing.assert_allclose(published[end], models[start : end + 1].mean(axis=0), rtol=1e-6)


def test_without_an_average_the_last_model_is_published_and_nothing_else_is_kept():
    server = Server().for_rounds(7)
    models, published = walked(server, 3)
    np.testing.assert_array_equal(models, published)
    assert not isinstance(server.init(jnp.zeros(2)), AveragingState)
    assert server.notes == ()


def test_an_average_changes_no_step_and_is_told():
    server = Server(average=0.5).for_rounds(7)
    np.testing.assert_array_equal(walked(server, 7)[0], walked(Server(), 7)[0])
    assert "the last 4 of 7 rounds" in server.notes[0]


def test_an_average_that_is_none_is_refused():
    with pytest.raises(ValueError, match="average"):
        Server(average=1.5)
    with pytest.raises(ValueError, match="of the rounds needs their number"):
        Server(average=0.5).init(jnp.zeros(2))
