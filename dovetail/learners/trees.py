"""Names for the arrays of a model: "params/Dense_0/bias" for what a tree holds there; a single array is "params"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

__all__ = ["arrays_by_name", "fill_tree", "flatten_into", "names_of_leaves"]


def arrays_by_name(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a tree by name.

    Guarantees:
        `fill_tree(tree, arrays_by_name(tree))` is the tree.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    arrays = {_name_of_path(path): np.asarray(leaf) for path, leaf in leaves}
    if len(arrays) != len(leaves):
        raise ValueError(f"expected different names for the {len(leaves)} arrays of a model, got {len(arrays)}")
    return arrays


def names_of_leaves(tree: Any) -> list[str]:
    """The names of a tree's arrays, or of their shapes, in the order of its leaves."""
    return [_name_of_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def fill_tree(like: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The tree of this form (of arrays, or of their shapes) that holds these arrays; refuses what does not fit."""
    leaves, form = jax.tree_util.tree_flatten_with_path(like)
    wanted = {_name_of_path(path): tuple(leaf.shape) for path, leaf in leaves}
    shapes = {name: array.shape for name, array in arrays.items()}
    if wanted != shapes:
        raise ValueError(f"expected the parameters {_describe_shapes(wanted)}, got {_describe_shapes(shapes)}")
    return jax.tree_util.tree_unflatten(form, [arrays[name] for name in wanted])


def _name_of_path(path: tuple[Any, ...]) -> str:
    """The name of the array at a path of JAX's: its keys with slashes between them."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "params"


def _describe_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def flatten_into(row: jax.Array, tree: Any) -> jax.Array:
    """`row` filled with the arrays of a tree, in the order of `ravel_pytree`, each copied to its place.

    `row` is flat and as long as all arrays together. Where XLA joins them in one pass instead, that pass takes fifteen
    times as long in about every other run.
    """
    begin = 0
    for leaf in jax.tree.leaves(tree):
        row = jax.lax.dynamic_update_slice(row, leaf.ravel().astype(row.dtype), (begin,))
        begin += leaf.size
    return row
