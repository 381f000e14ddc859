"""Scores of a model on test records, and of a constant guess beside them.

Test records are held to be public, or nobody's, as they are wherever an accuracy is reported: scores and baselines are
computed on them alone, without noise, and never on what anybody trains with. The constant guess is the best one for the
test records themselves (their commonest class, their mean), which is the hardest to beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dovetail.data._base import Dataset, Loss, Metric, Model
from dovetail.engine.chunks import as_float
from dovetail.learners import losses

__all__ = ["Scores", "auc", "baseline_scores", "predict_classes", "ranking_score", "score_names"]

_BUILT_IN = ("loss", "accuracy", "auc", "macro_f1", "recall", "r2", "rmse", "mae")


class Scores:
    """The scores of models of one shape on the test records of a dataset.

    Arguments:
        unravel: from flat parameters to the model's own.
        loss: what the model is trained with.
        own: the user's own metrics by name.

    Guarantees:
        Own metrics get the model's outputs and the labels of all test records; none has the name of a built-in one.
    """

    def __init__(
        self,
        model: Model,
        unravel: Callable[[jax.Array], Any],
        dataset: Dataset,
        loss: str | Loss,
        own: Mapping[str, Metric],
    ) -> None:
        for name in own:
            if name in _BUILT_IN:
                raise ValueError(f"{name!r} is the name of a built-in metric: give your own metric another name")
        self._model = model
        self._unravel = unravel
        self._dataset = dataset
        self._loss = loss
        self._own = own
        self._compiled_apply = jax.jit(self._apply)

    def outputs(self, params: jax.Array) -> np.ndarray:
        """The outputs (records, ...) of the model with these flat parameters for all test records, some at a time."""
        inputs = self._dataset.test_inputs
        batch = max(1, 2**26 // max(1, math.prod(inputs.shape[1:]) * 4))
        batches = [inputs[low : low + batch] for low in range(0, len(inputs), batch)]
        if (learner := self._model.learner) is not None:
            parameters = self._unravel(params)
            return np.concatenate(
                [learner.outputs(parameters, np.asarray(as_float(jax.numpy.asarray(part)))) for part in batches]
            )
        return np.concatenate([np.asarray(self._compiled_apply(params, part)) for part in batches])

    def _apply(self, params: jax.Array, inputs: jax.Array) -> jax.Array:
        """The outputs of a JAX model with flat parameters, for some records as they are stored."""
        return self._model.apply(self._unravel(params), as_float(inputs))

    def compute(self, outputs: np.ndarray) -> dict[str, Any]:
        """Scores by name, from the outputs for all test records.

        "recall" is a list with one number per class, None for a class without test records.
        """
        data = self._dataset
        labels = data.test_labels
        scores: dict[str, Any] = {"loss": float(np.mean(self._losses(outputs)))}
        if data.target == "number":
            scores |= _scores_of_numbers(outputs.reshape(len(labels), -1)[:, 0], labels)
        elif data.target == "labels":
            scores |= _scores_of_labels(outputs, labels) if outputs.shape == labels.shape else {}
        else:
            scores |= _scores_of_classes(outputs, labels, data.num_classes)
        return scores | {name: float(metric(outputs, labels)) for name, metric in self._own.items()}

    def _losses(self, outputs: np.ndarray) -> np.ndarray:
        """The loss of every test record."""
        labels = self._dataset.test_labels
        if (learner := self._model.learner) is not None:
            return learner.losses(self._loss, outputs, labels)
        return np.asarray(losses.loss_function(self._loss)(jax.numpy.asarray(outputs), jax.numpy.asarray(labels)))


def auc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """The area under the ROC curve: how many pairs of a record of class 1 and one of class 0 the scores put in order.

    It is a fraction of all such pairs; ties count half.

    Guarantees:
        Invariant under increasing maps of the scores; 1/2 for equal ones. None where a class is missing.
    """
    positive = labels == 1
    high, low = int(positive.sum()), int((~positive).sum())
    if high == 0 or low == 0:
        return None
    from scipy.stats import rankdata  # a second to import, which only this score needs

    return float((rankdata(scores)[positive].sum() - high * (high + 1) / 2) / (high * low))


def score_names(dataset: Dataset) -> tuple[str, ...]:
    """The names of the built-in scores that are one number each, for a model of this dataset."""
    if dataset.target == "number":
        return ("r2", "rmse", "mae", "loss")
    two = dataset.target == "classes" and dataset.num_classes == 2
    return ("accuracy", *(("auc",) if two else ()), "macro_f1", "loss")


def baseline_scores(dataset: Dataset) -> dict[str, Any]:
    """The scores of the best constant guess on the test records, and what that guess is ("rule")."""
    labels = dataset.test_labels
    if dataset.target == "classes":
        return {"rule": "majority-class baseline", "accuracy": float(np.bincount(labels).max() / len(labels))}
    if dataset.target == "labels":
        frequency = labels.mean(axis=0, dtype=np.float64)  # how often each label applies
        return {
            "rule": "majority-value baseline",
            "accuracy": float(np.maximum(frequency, 1 - frequency).mean()),
        }
    errors = labels - labels.mean(dtype=np.float64)
    rmse = float(np.sqrt(np.mean(errors**2)))
    mae = float(np.mean(np.abs(errors)))
    return {"rule": "mean baseline", "r2": 0.0, "rmse": rmse, "mae": mae}


def _scores_of_numbers(predicted: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """R^2 (None where all labels are equal), root mean square error and mean absolute error."""
    errors = predicted.astype(np.float64) - labels
    spread = float(np.mean((labels - labels.mean(dtype=np.float64)) ** 2))
    square = float(np.mean(errors**2))
    return {
        "r2": None if spread == 0 else 1 - square / spread,
        "rmse": math.sqrt(square),
        "mae": float(np.mean(np.abs(errors))),
    }


def _scores_of_labels(outputs: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Scores where several labels may apply, both (records, labels): one applies where its output is above 0."""
    predicted = outputs > 0
    right = [_count_of_class(predicted[:, i], labels[:, i] == 1) for i in range(labels.shape[1])]
    return {"accuracy": float(np.mean(predicted == labels)), **_recall_and_f1(right)}


def _scores_of_classes(outputs: np.ndarray, labels: np.ndarray, num_classes: int) -> dict[str, Any]:
    """Scores of outputs (records, classes), or (records,) or (records, 1) for two classes, which also have an AUC."""
    predicted = predict_classes(outputs)
    right = [_count_of_class(predicted == i, labels == i) for i in range(num_classes)]
    scores: dict[str, Any] = {"accuracy": float(np.mean(predicted == labels)), **_recall_and_f1(right)}
    if num_classes == 2:
        scores["auc"] = auc(ranking_score(outputs), labels)
    return scores


def _count_of_class(predicted: np.ndarray, true: np.ndarray) -> tuple[int, int, int]:
    """How many records of a class are predicted and true, how many predicted, and how many true."""
    return int(np.sum(predicted & true)), int(predicted.sum()), int(true.sum())


def _recall_and_f1(counts: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Recall of each class, and the mean of F1 over those that occur or were predicted, from each `_count_of_class`."""
    f1 = [2 * both / (predicted + true) for both, predicted, true in counts if predicted + true]
    recall = [None if true == 0 else both / true for both, _, true in counts]
    return {"macro_f1": float(np.mean(f1)) if f1 else None, "recall": recall}


def predict_classes(outputs: np.ndarray) -> np.ndarray:
    """The class of each record: the largest output; of one output, 1 where it is above 0."""
    return np.argmax(outputs, axis=1) if _has_class_outputs(outputs) else (outputs.ravel() > 0).astype(np.int32)


def ranking_score(outputs: np.ndarray) -> np.ndarray:
    """A number for each record that is larger the more the model is for class 1, of two classes."""
    return outputs[:, 1] - outputs[:, 0] if _has_class_outputs(outputs) else outputs.ravel()


def _has_class_outputs(outputs: np.ndarray) -> bool:
    """Whether there is an output for each class, and not one for two classes."""
    return outputs.ndim == 2 and outputs.shape[1] > 1
