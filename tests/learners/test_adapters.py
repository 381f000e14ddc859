import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dovetail
from dovetail.data import Dataset, Model
from dovetail.learners.adapters import adapt, merge

KEY = jax.random.key(0)


def public():
    """A stand-in for an encoder with a new last layer, and its weights."""
    rng = np.random.default_rng(0)
    weights = {
        "encoder": {"kernel": rng.normal(size=(2, 3, 8)).astype(np.float32), "bias": np.zeros(8, np.float32)},
        "classes": {"kernel": np.zeros((8, 3), np.float32), "bias": np.zeros(3, np.float32)},
    }

    def apply(params, inputs):
        kernel = params["encoder"]["kernel"].reshape(6, 8)
        hidden = jnp.tanh(inputs.reshape(len(inputs), -1) @ kernel + params["encoder"]["bias"])
        return hidden @ params["classes"]["kernel"] + params["classes"]["bias"]

    return Model(name="stand-in", init=lambda key: weights, apply=apply), weights


def sizes(model):
    return sum(leaf.size for leaf in jax.tree.leaves(model.init(KEY)))


def test_only_adapters_and_whole_arrays_are_parameters_and_the_first_model_is_the_public_one():
    model, weights = public()
    both = adapt(model, weights, rank=2, on=["encoder/kernel"], whole=["classes/*"])
    assert sizes(both) == 2 * (6 + 8) + 8 * 3 + 3
    assert sizes(adapt(model, weights, whole=["classes/*"])) == 27  # a linear probe
    inputs = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
    np.testing.assert_array_equal(both.apply(both.init(KEY), inputs), model.apply(weights, inputs))


def test_merged_weights_are_the_public_model_with_a_low_rank_change():
    model, weights = public()
    both = adapt(model, weights, rank=2, on=["encoder/kernel"], whole=["classes/bias"], scale=0.5)
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), both.init(KEY))
    whole = merge(weights, params, scale=0.5)
    change = np.asarray(whole["encoder"]["kernel"] - weights["encoder"]["kernel"]).reshape(6, 8)
    adapter = params["encoder/kernel"]
    np.testing.assert_allclose(change, 0.5 * adapter["down"] @ adapter["up"], atol=1e-5)
    assert np.linalg.matrix_rank(change, tol=1e-4) == 2
    np.testing.assert_array_equal(whole["classes"]["kernel"], weights["classes"]["kernel"])
    inputs = rng.normal(size=(5, 6)).astype(np.float32)
    np.testing.assert_allclose(both.apply(params, inputs), model.apply(whole, inputs), atol=1e-5)


def test_users_train_adapters_under_privacy_and_publish_nothing_else():
    model, weights = public()
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(600, 6)).astype(np.float32)
    labels = np.argmax(inputs[:, :3], axis=1).astype(np.int32)
    data = Dataset(
        inputs=inputs[:500], labels=labels[:500], test_inputs=inputs[500:], test_labels=labels[500:], num_classes=3
    )
    result = dovetail.train(
        data,
        model=adapt(model, weights, rank=2, on=["encoder/kernel"], whole=["classes/*"]),
        protocol="dp_fl",
        eps=8.0,
        settings={"cohort.kind": "everyone", "cohort.rounds": 20, "server.learning_rate": 4.0},
    )
    assert result.accuracy > 0.6 > 0.45 > result.baseline["accuracy"]
    assert set(result.parameters) == {
        "classes/bias",
        "classes/kernel",
        "encoder/kernel/down",
        "encoder/kernel/up",
    }
    assert result.statement.eps <= 8.0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"on": ["decoder/*"]},
            "which fits none of classes/bias, classes/kernel, encoder/bias, encoder/kernel",
        ),
        ({}, "nothing would be trained with on="),
        ({"on": ["*/kernel"], "whole": ["classes/*"]}, "'classes/kernel' is named in on and in whole"),
        ({"on": ["encoder/bias"]}, r"expected matrices of rank=4 and more in on, got encoder/bias of \(8,\)"),
        ({"on": ["classes/kernel"]}, r"got classes/kernel of \(8, 3\)"),
        ({"on": ["encoder/kernel"], "rank": 0}, "rank"),
    ],
)
def test_what_cannot_be_adapted_is_refused(settings, sentence):
    model, weights = public()
    with pytest.raises(ValueError, match=sentence):
        adapt(model, weights, **settings)
