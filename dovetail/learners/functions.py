"""A model that trains by a function of one's own, in NumPy or anything else: `update(parameters, records)`.

The function gets the current parameters, in the shape they were given in, and one client's records, and returns the
parameters that the client would like. Their difference is the client's update, which the protocol clips and randomizes
like any other: the guarantee does not depend on what the function does with these records, as long as it keeps nothing
of one client for another. That is its author's word, and statements read *as declared*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.data._base import Loss, Model
from dovetail.learners import losses

__all__ = ["FunctionLearner", "Records", "model"]


class Records(NamedTuple):
    """One client's records: inputs as float32 and labels, first axis the record."""

    inputs: np.ndarray
    labels: np.ndarray


def model(
    parameters: Any,
    *,
    update: Callable[[Any, Records], Any],
    predict: Callable[[Any, np.ndarray], Any],
    loss: str | Loss | None = None,
    name: str = "own",
) -> Model:
    """The model that starts at these parameters and trains by a function.

    Arguments:
        parameters: arrays in any nesting of lists and dictionaries.
        update: from parameters and one client's records to the parameters that the client would like, nested alike.
        predict: from parameters and inputs to the model's outputs.
        loss: used for the score of that name only: the function trains as it likes.
        name: what the model is called.
    """
    first = jax.tree.map(lambda leaf: np.array(leaf, np.float32), parameters)
    learner = FunctionLearner(first=first, update=update, predict=predict)
    return Model(
        name=name,
        init=lambda key: jax.tree.map(jnp.asarray, first),
        apply=learner.outputs,
        loss=loss,
        learner=learner,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FunctionLearner:
    """Clients that train by a function, one after the other.

    Guarantees:
        The function sees one client's own records, all of them, and nothing else that is private.
    """

    first: Any
    update: Callable[[Any, Records], Any]
    predict: Callable[[Any, np.ndarray], Any]
    gradients = False
    ignores_settings = True
    platform = "host"
    notes = ()

    @property
    def declarations(self) -> tuple[str, ...]:
        """What the author of the function has to vouch for: Python code can keep what it has seen."""
        name = getattr(self.update, "__qualname__", type(self.update).__name__)
        return (f"the function {name} computes each user's update from that user's records alone",)

    @property
    def code(self) -> tuple[Any, ...]:
        """The user's functions: a resumed run must have the same source."""
        return (self.update, self.predict)

    def updates(
        self,
        settings: Any,
        loss: str | Loss,
        parameters: np.ndarray,
        inputs: np.ndarray,
        labels: np.ndarray,
        counts: np.ndarray,
    ) -> np.ndarray:
        """Updates (clients, dim): where the function leads every client from the flat vector `parameters`.

        A client without records has the update zero. `settings` and `loss` are not used: the function trains as it
        likes. Arguments otherwise as of `HostLearner.updates`.
        """
        moves = np.zeros((len(counts), len(parameters)), np.float32)
        for i, count in enumerate(counts):
            if count:
                records = Records(inputs[i, :count].copy(), labels[i, :count].copy())
                moves[i] = self._flatten(self.update(self._unflatten(parameters), records)) - parameters
        return moves

    def outputs(self, parameters: Any, inputs: np.ndarray) -> np.ndarray:
        """What `predict` returns for these inputs, as float32."""
        return np.asarray(self.predict(jax.tree.map(np.asarray, parameters), inputs), np.float32)

    def losses(self, loss: str | Loss, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The loss of each record, (records,), from the model's outputs for it."""
        return np.asarray(losses.loss_function(loss)(jnp.asarray(outputs), jnp.asarray(labels)))

    def _unflatten(self, flat: np.ndarray) -> Any:
        """The parameters in their own shape, from a flat vector."""
        leaves, structure = jax.tree.flatten(self.first)
        ends = np.cumsum([leaf.size for leaf in leaves])
        parts = np.split(np.array(flat), ends[:-1])
        return jax.tree.unflatten(
            structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
        )

    def _flatten(self, parameters: Any) -> np.ndarray:
        """The flat vector of parameters; refuses any that are not like the first ones."""
        shapes = [
            (jax.tree.structure(tree), [np.shape(leaf) for leaf in jax.tree.leaves(tree)])
            for tree in (parameters, self.first)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"expected update(parameters, records) to return parameters like those given, got {shapes[0]}"
            )
        return np.concatenate([np.ravel(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(parameters)])
