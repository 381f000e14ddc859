"""Regression with a loss and a metric of your own, and a client that trains by a plain function.

python examples/own_loss.py
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from rich.console import Console

import dovetail
from dovetail.experiment.result import headline
from dovetail.learners import functions


def table() -> dovetail.Dataset:
    """A number to predict from five, for 2,000 users with one record each; 400 records to test with are public."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(2400, 5)).astype(np.float32)
    numbers = inputs @ np.array([1, -2, 0.5, 0, 1.5]) + 2 + 0.3 * rng.normal(size=2400)
    return dovetail.Dataset(
        inputs=inputs[:2000],
        labels=numbers[:2000],
        test_inputs=inputs[2000:],
        test_labels=numbers[2000:],
        num_classes=1,
        target="number",
    )


# [loss]
def absolute(outputs, labels):
    """One loss per record."""
    return jnp.abs(outputs[:, 0] - labels)


def within_one(outputs, labels):
    """A number from the outputs and labels of all test records."""
    return np.mean(np.abs(outputs[:, 0] - labels) < 1)


def regression() -> dovetail.Result:
    """The bundled linear model with this loss; without `loss` it is the squared error."""
    return dovetail.train(
        table(),
        loss=absolute,
        metrics={"within_one": within_one},
        protocol="dp_fl",
        eps=4.0,
        settings={"cohort.kind": "everyone", "cohort.rounds": 40},
    )


# [function]
def least_squares(parameters, records):
    """Halfway from the current parameters to a client's own fit."""
    rows = np.column_stack([records.inputs, np.ones(len(records.inputs))])
    fit, *_ = np.linalg.lstsq(rows, records.labels, rcond=None)
    return {"bias": (parameters["bias"] + fit[-1]) / 2, "slope": (parameters["slope"] + fit[:-1]) / 2}


def by_function() -> dovetail.Result:
    """Fifty clients of forty records, each of which fits by itself."""
    model = functions.model(
        {"slope": np.zeros(5), "bias": np.zeros(())},
        update=least_squares,
        predict=lambda parameters, inputs: inputs @ parameters["slope"] + parameters["bias"],
    )
    shared = {"task.partition": "iid", "task.users": 50, "cohort.kind": "everyone", "cohort.rounds": 4}
    return dovetail.train(table(), model=model, protocol="dp_fl", eps=8.0, settings=shared)


# [end]
def main() -> None:
    """Train both, and say how good they are beside the best constant guess."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for result in (regression(), by_function()):
        console.print(headline(result.metrics, result.baseline))
        console.print(result.statement.headline())


if __name__ == "__main__":
    main()
