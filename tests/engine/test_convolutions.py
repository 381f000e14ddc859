"""Convolutions with their axes in another order are the same, and no loop has one that Eigen cannot run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.engine.convolutions import in_eigen_order

CASES = {
    "strided": {"window_strides": (2, 1), "padding": ((1, 0), (2, 1)), "rhs_dilation": (1, 2)},
    "same": {"window_strides": (1, 1), "padding": "SAME"},
    "transposed": {"window_strides": (1, 1), "padding": ((0, 1), (1, 1)), "lhs_dilation": (2, 1)},
    "everything": {
        "window_strides": (2, 3),
        "padding": ((-1, 1), (1, 1)),
        "lhs_dilation": (2, 3),
        "rhs_dilation": (2, 1),
    },
}


def convolve(kernel, x, **settings):
    return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=("NCHW", "OIHW", "NCHW"), **settings)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_same(name, alone):
    def apply(kernel, x):
        return jax.jit(lambda kernel, x: jnp.sin(convolve(kernel, jnp.cos(x), **CASES[name])))(kernel, x)

    rng = np.random.default_rng(0)
    kernel, x = rng.normal(size=(4, 3, 3, 2)).astype(np.float32), rng.normal(size=(2, 3, 9, 11)).astype(np.float32)
    along = jax.random.normal(jax.random.key(0), jax.eval_shape(apply, kernel, x).shape)

    def values(apply):
        return jax.jit(jax.value_and_grad(lambda kernel, x: jnp.sum(apply(kernel, x) * along), (0, 1)))(kernel, x)

    for found, expected in zip(
        *map(jax.tree.leaves, map(values, (in_eigen_order(apply, alone=alone), apply))), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=3e-5)


def test_programs_without_convolutions_stay_as_they_are():
    def apply(kernel, x):
        return jnp.sin(x @ kernel)

    shapes = np.ones((3, 2), np.float32), np.ones((1, 3), np.float32)
    assert str(jax.make_jaxpr(in_eigen_order(apply))(*shapes)) == str(jax.make_jaxpr(apply)(*shapes))


def test_no_convolution_of_a_training_loop_is_left_to_slow_code():
    """What the compiler hands to Eigen has axes in the order b01f_01io->b01f, wherever it is."""
    apply = in_eigen_order(lambda kernel, x: convolve(kernel, x, window_strides=(2, 2), padding="SAME"), alone=True)

    def train(kernel, x):
        def step(kernel, x):
            return kernel - 0.1 * jax.grad(lambda kernel: jnp.sum(jnp.tanh(apply(kernel, x)) ** 2))(kernel), None

        return jax.lax.scan(step, kernel, x)[0]

    text = jax.jit(train).lower(np.ones((4, 3, 3, 3), np.float32), np.ones((5, 2, 3, 8, 8), np.float32)).as_text("hlo")
    orders = re.findall(r"dim_labels=(\S+?)[,\s]", text)
    assert orders
    assert set(orders) == {"b01f_01io->b01f"}
