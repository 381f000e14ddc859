"""Rows of C^-1 Z as they are drawn, one round after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.mechanisms.correlated import NoiseRows, draw_row, share_kept, square_root, start_rows
from dovetail.mechanisms.gaussian import normal

DIM = 5


def keys(rounds):
    return [jax.random.fold_in(jax.random.key(3), index) for index in range(rounds)]


def draw(coefficients, rounds):
    state, noise = start_rows(coefficients, DIM), []
    for key in keys(rounds):
        row, state = draw_row(state, coefficients, key=key)
        noise.append(row)
    return np.stack(noise), state


@pytest.mark.parametrize("coefficients", [(1.0,), (0.7, -0.2), square_root(4), square_root(12)])
def test_every_round_has_the_rows_of_c_inverse_z(coefficients):
    """By the dense product with the rows that the same keys draw; the ring is passed several times."""
    rounds = 11
    rows = np.stack([normal(key, (DIM,), jnp.float32) for key in keys(rounds)])
    wanted = [
        sum(coefficients[age] * rows[index - age] for age in range(min(index + 1, len(coefficients))))
        for index in range(rounds)
    ]
    noise, state = draw(coefficients, rounds)
    np.testing.assert_allclose(noise, wanted, rtol=1e-5, atol=1e-5)
    assert state.rows.shape == (len(coefficients) - 1, DIM)
    assert int(state.drawn) == rounds


def test_rows_that_nothing_takes_back_any_more_are_forgotten():
    coefficients = (1.0, -0.5, -0.25)
    _, state = draw(coefficients, 6)
    kept = {tuple(row) for row in np.asarray(state.rows).tolist()}
    last = {tuple(np.asarray(normal(key, (DIM,), jnp.float32)).tolist()) for key in keys(6)[-2:]}
    assert kept == last


def test_the_sum_of_all_rounds_keeps_what_is_said():
    coefficients, rounds = square_root(8), 24
    state = NoiseRows(jnp.zeros((7, 40_000)), jnp.zeros((), jnp.int32))
    total = np.zeros(40_000)
    for key in keys(rounds):
        row, state = draw_row(state, coefficients, key=key)
        total += np.asarray(row)
    kept = total.std() / np.sqrt(rounds)
    assert kept == pytest.approx(share_kept(coefficients, rounds), rel=4 / np.sqrt(2 * 40_000))
    assert share_kept((2.0,), rounds) == pytest.approx(1.0)
