"""Sums over chunks move with one user as exact ones do, whatever the others hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.engine import sums

CHUNKS, CLIENTS = 2_000, 1_000


@jax.jit
def summed(parts):
    none = sums.begin(jax.eval_shape(lambda: parts[0]))
    return jax.lax.fori_loop(0, len(parts), lambda i, total: sums.add(total, parts[i]), none)


@jax.jit
def plainly(parts):
    return jax.lax.fori_loop(0, len(parts), lambda i, total: total + parts[i], jnp.zeros_like(parts[0]))


def exactly(total) -> np.ndarray:
    return np.asarray(total.sums, np.float64) + np.asarray(total.rest, np.float64)


def replaced(rng, size=64):
    """Sums of chunks of aligned clients, two million in all, before and after one of them is replaced."""
    unit = rng.uniform(0.5, 1.0, size) / np.sqrt(size)
    parts = np.tile((CLIENTS * unit).astype(np.float32), (CHUNKS, 1))
    after = parts.copy()
    after[0] = ((CLIENTS - 2) * unit).astype(np.float32)
    return parts, after


def test_one_of_two_million_aligned_users_moves_the_sum_by_its_own_length():
    before, after = replaced(np.random.default_rng(0))
    exact = np.linalg.norm(before[0].astype(np.float64) - after[0])
    moved = np.linalg.norm(exactly(summed(before)) - exactly(summed(after)))
    assert moved == pytest.approx(exact, rel=1e-6)
    loosely = np.linalg.norm(np.asarray(plainly(before), np.float64) - np.asarray(plainly(after), np.float64))
    assert abs(loosely - exact) > 0.003 * exact, "a plain sum must be off for this test to say anything"


@pytest.mark.parametrize("seed", range(20))
def test_the_pair_is_the_exact_sum(seed):
    rng = np.random.default_rng(seed)
    parts = (rng.normal(size=(500, 32)) * 10.0 ** rng.uniform(-3, 3, (500, 1))).astype(np.float32)
    exact = parts.astype(np.float64).sum(axis=0)
    total = summed(parts)
    reach = np.abs(np.cumsum(parts.astype(np.float64), axis=0)).max(axis=0) + np.abs(parts).max(axis=0)
    assert (np.abs(exactly(total) - exact) <= 500 * 2.0**-46 * reach).all()
    once = np.asarray(sums.finish(total), np.float64)
    assert (np.abs(once - exact) <= 2.0**-24 * np.abs(exact) + 500 * 2.0**-46 * reach).all()


def test_whole_numbers_are_added_as_they_are():
    parts = np.arange(40, dtype=np.uint32).reshape(8, 5) + np.uint32(2**31)
    total = summed(parts)
    assert (np.asarray(sums.finish(total)) == parts.sum(axis=0, dtype=np.uint32)).all()
    assert not np.asarray(total.rest).any()
