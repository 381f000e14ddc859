"""A trained model that answers: rows in, answers out, by the recipe of the data that it was trained on."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dovetail import features as fixed
from dovetail.data import Dataset, Model
from dovetail.data.own_code import RecordSpec
from dovetail.data.readers.recipes import Recipe
from dovetail.data.readers.tables import import_optional
from dovetail.features import Features
from dovetail.learners import isolation, models, modules, trees

__all__ = ["Predictor", "model_from_recipe", "own_model_from_recipe"]

_BATCH_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Predictor:
    """A model, its parameters by name, and what it reads: a recipe, and features of what that makes."""

    model: Model
    parameters: Mapping[str, np.ndarray]
    recipe: Recipe
    features: Features

    def predict(self, rows: Any) -> np.ndarray:
        """One answer per row: a class, a number, or zeros and ones for labels."""
        return self.recipe.answer.decode(self.logits(rows))

    def predict_proba(self, rows: Any) -> np.ndarray:
        """The probability of every class, (rows, classes), or of every label, by the model."""
        return self.recipe.answer.probabilities(self.logits(rows))

    def logits(self, rows: Any) -> np.ndarray:
        """The model's outputs, (rows, outputs), for a table or an array as `Recipe.inputs` takes it."""
        inputs = self.recipe.read_inputs(rows)
        batch = max(1, _BATCH_BYTES // max(1, 4 * math.prod(inputs.shape[1:])))
        parts = [self._apply(inputs[low : low + batch]) for low in range(0, len(inputs), batch)]
        return np.concatenate(parts) if parts else np.zeros((0, self.recipe.answer.size), np.float32)

    def state_dict(self) -> Any:
        """The parameters in the form that the model's library loads: see `Result.state_dict`."""
        if not self._is_torch:
            return jax.tree.map(np.array, self._model_parameters)
        torch = import_optional("torch", needed_by="the parameters of a PyTorch module", install="torch")
        return {name: torch.from_numpy(np.array(value)) for name, value in self.parameters.items()}

    @property
    def _is_torch(self) -> bool:
        """Whether the model is a PyTorch module, whose library is then imported."""
        module = sys.modules.get("dovetail.learners.torch")
        return module is not None and isinstance(self.model.learner, module.TorchLearner)

    def check_parameters(self) -> None:
        """Refuse parameters whose names or shapes are not the model's."""
        _ = self._model_parameters

    def _apply(self, inputs: np.ndarray) -> np.ndarray:
        """The model's outputs for a batch of inputs as the recipe makes them."""
        floats = fixed.as_floats(inputs)
        if self.features.kind != "none":
            floats = self._pipeline.apply(floats)
        if self.model.learner is not None:
            return np.asarray(self.model.learner.outputs(self._model_parameters, floats))
        return np.asarray(self._compiled_apply(self._model_parameters, floats))

    @functools.cached_property
    def _pipeline(self) -> fixed.Pipeline:
        """The function from records to the features that the model reads."""
        return fixed.build_pipeline(self.features, self.recipe.shape)

    @functools.cached_property
    def _compiled_apply(self) -> Callable[[Any, np.ndarray], jax.Array]:
        return jax.jit(self.model.apply)

    @functools.cached_property
    def _model_parameters(self) -> Any:
        """The parameters in the shape that the model takes; refuses names and shapes that are not its own."""
        return trees.fill_tree(jax.eval_shape(self.model.init, jax.random.key(0)), self.parameters)


def model_from_recipe(name: str, recipe: Recipe, features: Features) -> Model:
    """The model of this name for data of this recipe, without the data.

    Arguments:
        name: one of `models.MODELS`.
        features: what the model reads in place of what the recipe makes.
    """
    return models.model_for(name, _blank_dataset(recipe, features), features=features)


def own_model_from_recipe(source: Any, recipe: Recipe, features: Features) -> Model:
    """The model of what a user brings, as `train` made it for data of this recipe, without the data.

    In JAX it is applied to one record at a time, as it was when it was trained.

    Arguments:
        source: what `modules.model_of` takes.
        features: what the model reads in place of what the recipe makes.
    """
    model = modules.model_of(source, RecordSpec.of(_blank_dataset(recipe, features)))
    return model if model.learner is not None else isolation.map_over_records(model)


def _blank_dataset(recipe: Recipe, features: Features) -> Dataset:
    """A dataset with the shapes and types of those that this recipe and these features make, and one blank record."""
    shape, dtype = recipe.shape, recipe.dtype
    if features.kind != "none":
        shape, dtype = fixed.build_pipeline(features, shape).row_shape, "float32"
    blank = np.zeros((1, *shape), dtype)
    answer = recipe.answer
    label = np.zeros((1, answer.size) if answer.kind == "labels" else 1, np.float32)
    return Dataset(
        inputs=blank, labels=label, test_inputs=blank, test_labels=label, num_classes=answer.size, target=answer.kind
    )
