import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import later

from dovetail import _jax
from dovetail.mechanisms import privunit
from dovetail.mechanisms.privunit import PrivUnitRandomizer
from dovetail.mechanisms.skellam import Encoding


@pytest.mark.parametrize("length", [1, 7, 8, 64, 69])
def test_blocks_are_the_whole(monkeypatch, length):
    monkeypatch.setattr(_jax, "_BLOCK", 8)
    left, right = np.random.default_rng(0).integers(0, 100, (2, length)).astype(np.int32)
    found, total = jax.jit(lambda a, b: _jax.map_blocks(lambda a, b: (a + 2 * b, jnp.sum(b)), a, b))(left, right)
    np.testing.assert_array_equal(found, left + 2 * right)
    assert total == right.sum()


def test_what_is_written_keeps_what_was_there():
    row = _jax.materialize_into(jnp.arange(5.0), lambda row: row.at[1].set(9))
    np.testing.assert_array_equal(row, [0, 9, 2, 3, 4])


def test_an_encoding_by_blocks_is_the_same(monkeypatch):
    encode = Encoding(clip_norm=1.0, scale=50.0, dim=1003)
    x = np.random.default_rng(1).normal(size=1003).astype(np.float32)
    whole = encode(jnp.asarray(x), key=jax.random.key(2))
    monkeypatch.setattr(_jax, "_BLOCK", 96)
    np.testing.assert_array_equal(encode(jnp.asarray(x), key=jax.random.key(2)), whole)


@pytest.mark.parametrize("longest", [2**17, later(2**22)])
def test_reports_add_up_onto_a_sum(monkeypatch, longest):
    monkeypatch.setattr(privunit, "_LONGEST", longest)
    local = PrivUnitRandomizer(8.0, 1.0, 2**17 + 1)
    xs = np.random.default_rng(3).normal(size=(2, local.dim)).astype(np.float32)
    keys, present, onto = jax.random.split(jax.random.key(4), 2), np.array([True, True]), jnp.ones(local.dim)
    apart = local(xs[0], key=keys[0]) + local(xs[1], key=keys[1])
    np.testing.assert_allclose(local.sum_reports(xs, present, keys=keys, onto=onto), onto + apart, atol=1e-6)
    alone = local.sum_reports(xs[:1], present[:1], keys=keys[:1], onto=onto)
    np.testing.assert_allclose(alone, onto + local(xs[0], key=keys[0]), atol=1e-6)
