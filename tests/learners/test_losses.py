import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.data import Dataset, Model
from dovetail.learners import losses, models

RNG = np.random.default_rng(0)
OUTPUTS = RNG.normal(size=(6, 3)).astype(np.float32)
CLASSES = np.array([0, 2, 1, 1, 0, 2], np.int32)
NUMBERS = RNG.normal(size=6).astype(np.float32)
LABELS = (RNG.random((6, 3)) < 0.5).astype(np.float32)


def probability(logits):
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def dataset(target="classes", num_classes=3):
    labels = {"classes": CLASSES % num_classes, "number": NUMBERS, "labels": LABELS[:, :num_classes]}[target]
    inputs = np.ones((6, 4), np.float32)
    return Dataset(
        inputs=inputs,
        labels=labels,
        test_inputs=inputs,
        test_labels=labels,
        num_classes=1 if target == "number" else num_classes,
        target=target,
    )


def model(width, loss=None):
    shape = (4,) if width is None else (4, width)
    return Model(name="own", init=lambda key: jnp.zeros(shape), apply=lambda w, x: x @ w, loss=loss)


def test_each_loss_is_what_its_formula_says():
    p = np.exp(OUTPUTS) / np.exp(OUTPUTS).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(losses.cross_entropy(OUTPUTS, CLASSES), -np.log(p[np.arange(6), CLASSES]), rtol=1e-5)
    q, y = probability(OUTPUTS), LABELS
    each = -(y * np.log(q) + (1 - y) * np.log(1 - q))
    np.testing.assert_allclose(losses.sigmoid_cross_entropy(OUTPUTS, LABELS), each.sum(axis=1), rtol=1e-5)
    for outputs in (OUTPUTS[:, :1], OUTPUTS[:, 0]):
        binary = losses.binary_cross_entropy(jnp.asarray(outputs), jnp.asarray(CLASSES % 2))
        right = np.where(CLASSES % 2 == 1, q[:, 0], 1 - q[:, 0])
        np.testing.assert_allclose(binary, -np.log(right), rtol=1e-5)
        away = OUTPUTS[:, 0] - NUMBERS
        np.testing.assert_allclose(losses.squared_error(outputs, NUMBERS), away**2, rtol=1e-5)
        bent = np.where(np.abs(away) <= 1, away**2 / 2, np.abs(away) - 0.5)
        np.testing.assert_allclose(losses.huber(outputs, NUMBERS), bent, rtol=1e-5)


def test_huber_has_a_slope_of_at_most_one():
    slope = jax.grad(lambda z: losses.huber(z, jnp.zeros(1))[0])
    assert [float(slope(jnp.array([z]))[0]) for z in (-50.0, -0.5, 0.25, 7.0)] == [-1.0, -0.5, 0.25, 1.0]


@pytest.mark.parametrize(
    ("data", "width", "expected"),
    [
        (dataset(), 3, "cross_entropy"),
        (dataset(num_classes=2), 2, "cross_entropy"),
        (dataset(num_classes=2), 1, "binary_cross_entropy"),
        (dataset(num_classes=2), None, "binary_cross_entropy"),
        (dataset("number"), 1, "squared_error"),
        (dataset("number"), None, "squared_error"),
        (dataset("labels"), 3, "sigmoid_cross_entropy"),
    ],
)
def test_the_loss_follows_from_the_target(data, width, expected):
    assert losses.loss_for(model(width), data) == expected


@pytest.mark.parametrize("target", ["classes", "number", "labels"])
@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_bundled_models_have_outputs_for_every_target(target, name):
    data = dataset(target)
    _, built = models.build(name, data)
    assert losses.loss_for(built, data) == losses.loss_for(model(data.num_classes), data)


@pytest.mark.parametrize(
    ("data", "width", "loss", "sentence"),
    [
        (
            dataset(),
            2,
            None,
            r"to have 3 outputs for a record, one for each class, for loss 'cross_entropy', got 2: make its last layer",
        ),
        (dataset(), 1, None, "to have 3 outputs for a record, one for each class, .* got 1: make"),
        (dataset(), 4, None, "to have 3 outputs for a record, one for each class, .* got 4: make"),
        (dataset("number"), 2, None, "to have one output for a record, for loss 'squared_error', got 2: make"),
        (dataset("labels"), 4, None, "to have 3 outputs for a record, one for each label, for loss .* got 4: make"),
        (dataset(), 3, "huber", "expected a loss for labels of target 'classes', such as 'cross_entropy', got .*huber"),
        (dataset("number"), 1, "cross_entropy", "expected a loss for labels of target 'number'"),
        (dataset(), 3, "cross_entropie", "unknown loss 'cross_entropie': did you mean 'cross_entropy'"),
        (dataset(), 3, lambda z, y: jnp.mean(z), r"to return one number per record, got shape \(\) for two"),
        (dataset(), 3, lambda z, y: z, r"to return one number per record, got shape \(2, 3\) for two"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(data, width, loss, sentence):
    with pytest.raises(ValueError, match=sentence):
        losses.loss_for(model(width, loss), data)


def test_own_losses_are_taken_as_they_are():
    def own(outputs, labels):
        return jnp.abs(outputs[:, 0] - labels)

    assert losses.loss_for(model(1, own), dataset("number")) is own
    assert losses.loss_for(model(1, "huber"), dataset("number")) == "huber"
    assert losses.loss_function("huber") is losses.huber


def test_cross_entropy_refuses_numbers_as_labels():
    with pytest.raises(ValueError, match="expected classes as labels for cross_entropy, got float32"):
        losses.cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2))


def test_the_target_survives_a_copy_of_the_dataset():
    assert dataclasses.replace(dataset("labels"), inputs=np.zeros((6, 2), np.float32)).target == "labels"
