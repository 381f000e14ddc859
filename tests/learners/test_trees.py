"""Names of a model's arrays."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from dovetail.learners.trees import arrays_by_name, fill_tree, flatten_into


class Pair(NamedTuple):
    left: np.ndarray
    right: np.ndarray


A, B, C = np.zeros(2), np.ones((2, 3)), np.arange(4.0)
TREES = {
    "one array": (A, ["params"]),
    "flat": ({"in": A, "out": B}, ["in", "out"]),
    "nested": ({"params": {"Dense_0": {"bias": A, "kernel": B}}}, ["params/Dense_0/bias", "params/Dense_0/kernel"]),
    "a list": ([{"bias": A}, {"bias": C}], ["0/bias", "1/bias"]),
    "attributes": ({"pair": Pair(A, B)}, ["pair/left", "pair/right"]),
}


@pytest.mark.parametrize("name", TREES)
def test_names_are_paths_and_lead_back(name):
    tree, names = TREES[name]
    arrays = arrays_by_name(tree)
    assert list(arrays) == names
    again = fill_tree(jax.eval_shape(lambda: jax.tree.map(np.asarray, tree)), arrays)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_has_no_name_of_its_own_or_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="expected different names for the 2 arrays of a model, got 1"):
        arrays_by_name({"a": {"b": A}, "a/b": B})
    for arrays in ({"in": A}, {"in": A, "out": C}, {"in": A, "out": B, "more": C}):
        with pytest.raises(ValueError, match=r"expected the parameters in \(2,\), out \(2, 3\), got in \(2,\)"):
            fill_tree({"in": A, "out": B}, arrays)


def test_a_tree_is_laid_out_as_jax_ravels_it():
    tree = {"b": jnp.arange(6.0).reshape(2, 3), "a": [jnp.float32(7), jnp.ones((2, 1, 2))]}
    flat, _ = ravel_pytree(tree)
    np.testing.assert_array_equal(flatten_into(jnp.zeros(11), tree), flat)
