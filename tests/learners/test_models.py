import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.data import Dataset
from dovetail.features import Features
from dovetail.learners import models
from dovetail.learners.models import _attention

KEY = jax.random.key(0)


def records(*shape, classes=10, num=6, seed=0):
    rng = np.random.default_rng(seed)
    inputs = rng.random((num, *shape), dtype=np.float32)
    labels = rng.integers(0, classes, num).astype(np.int32)
    return Dataset(inputs=inputs, labels=labels, test_inputs=inputs, test_labels=labels, num_classes=classes)


def num_params(model) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)))


def small_random(model, seed=1):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, KEY)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.1).astype(np.float32), shapes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("logistic", 7850),
        ("mlp", 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
        ("cnn", 113_674),
        ("transformer", 71_946),
    ],
)
def test_parameter_counts_at_28_by_28(name, expected):
    data, model = models.build(name, records(28, 28))
    assert num_params(model) == expected
    assert model.name == name
    assert data.inputs.shape == (6, 28, 28)


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "transformer"])
@pytest.mark.parametrize(
    ("shape", "classes"), [((28, 28), 10), ((8, 8), 10), ((16, 20), 3), ((32, 32, 3), 10), ((6, 7), 2)]
)
def test_logits_have_the_classes_of_the_data(name, shape, classes):
    data, model = models.build(name, records(*shape, classes=classes))
    params = jax.eval_shape(model.init, KEY)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    for inputs in (data.inputs, data.inputs.reshape(6, -1)):
        logits = jax.eval_shape(model.apply, params, inputs)
        assert (logits.shape, logits.dtype) == ((6, classes), jnp.float32)


@pytest.mark.parametrize(("shape", "kernel", "hidden"), [((16, 16), 5, 192), ((16, 15), 3, 64), ((15, 16), 3, 64)])
def test_images_of_sixteen_by_sixteen_and_more_have_the_larger_network(shape, kernel, hidden):
    _, model = models.build("cnn", records(*shape))
    params = jax.eval_shape(model.init, KEY)
    assert params[0]["kernel"].size == kernel**2 * 16
    assert params[-2]["kernel"].shape[1] == hidden


def test_a_linear_model_is_what_its_constant_promises():
    data = records(28, 28)
    model = models.linear("linear", data, constant=0.3)
    assert not np.asarray(model.init(KEY)).any()
    params = np.random.default_rng(0).normal(size=(785, 10)).astype(np.float32)
    inputs = data.inputs.reshape(6, -1)
    expected = inputs.astype(np.float64) @ params[:-1] + 0.3 * params[-1]
    np.testing.assert_allclose(model.apply(params, data.inputs), expected, rtol=1e-4, atol=1e-4)
    assert model.constant == 0.3
    assert models.build("logistic", data)[1].constant == 1.0
    assert models.build("mlp", data)[1].constant is None


def reference_cnn(params, images, *, pools):
    """The same network with XLA's convolution and window reduction, ReLU before pooling."""
    x = images
    for layer, pool in zip(params[:2], pools, strict=True):
        fan_in, channels = layer["kernel"].shape
        size = round((fan_in / x.shape[-1]) ** 0.5)
        kernel = layer["kernel"].reshape(size, size, x.shape[-1], channels)
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + layer["bias"])
        window = (1, pool, pool, 1)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ params[2]["kernel"] + params[2]["bias"])
    return x @ params[3]["kernel"] + params[3]["bias"]


@pytest.mark.parametrize(
    ("shape", "pools"), [((28, 28, 1), (2, 2)), ((21, 18, 3), (2, 2)), ((8, 8, 1), (1, 2))], ids=str
)
def test_the_cnn_equals_the_convolutional_reference(shape, pools):
    data = records(*shape)
    model = models.cnn(data)
    params = small_random(model)

    def ours(params):
        return model.apply(params, jnp.asarray(data.inputs))

    def reference(params):
        return reference_cnn(params, jnp.asarray(data.inputs.reshape(6, *shape)), pools=pools)

    def with_gradient(apply):
        return jax.jit(lambda params: (apply(params), jax.grad(lambda p: jax.nn.logsumexp(apply(p)))(params)))

    (got, got_gradient), (expected, gradient) = with_gradient(ours)(params), with_gradient(reference)(params)
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, atol=1e-5, rtol=1e-4), got_gradient, gradient)


def test_records_alone_and_in_a_batch_have_the_same_outputs_and_gradients():
    data = records(8, 8)
    model = models.cnn(data)
    params, weights = small_random(model), np.random.default_rng(2).normal(size=(6, 10)).astype(np.float32)

    def batch(params):
        return jnp.vdot(model.apply(params, data.inputs), weights)

    def alone(params):
        return jnp.vdot(jax.vmap(lambda x: model.apply(params, x[None])[0])(data.inputs), weights)

    got, expected = (jax.jit(jax.value_and_grad(function))(params) for function in (batch, alone))
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, atol=1e-5, rtol=1e-4), got, expected)


def test_the_cnn_never_calls_a_convolution_under_vmap_and_grad():
    model = models.cnn(records(28, 28))
    params = jax.eval_shape(jax.vmap(model.init), jax.random.split(KEY, 3))
    inputs = jax.ShapeDtypeStruct((3, 10, 28, 28), jnp.float32)

    def loss(params, inputs):
        return model.apply(params, inputs).sum()

    program = jax.jit(jax.vmap(jax.grad(loss))).lower(params, inputs).as_text()
    assert "dot_general" in program
    for slow in ("convolution", "gather", "scatter", "reduce_window", "select_and_scatter"):
        assert slow not in program


def test_initial_weights_follow_he_and_their_key():
    model = models.mlp(records(28, 28))
    init = jax.jit(model.init)
    first, second, _ = params = jax.tree.map(np.asarray, init(KEY))
    np.testing.assert_allclose(first["kernel"].std(), (2 / 784) ** 0.5, rtol=0.02)
    np.testing.assert_allclose(second["kernel"].std(), (2 / 200) ** 0.5, rtol=0.02)
    assert not any(layer["bias"].any() for layer in params)
    assert (np.asarray(init(jax.random.key(1))[0]["kernel"]) != first["kernel"]).any()
    np.testing.assert_array_equal(init(KEY)[0]["kernel"], first["kernel"])


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_model_can_learn_a_few_records_by_heart(name):
    data, model = models.build(name, records(8, 8, num=12))

    def loss(params):
        logits = jax.nn.log_softmax(model.apply(params, data.inputs))
        return -logits[jnp.arange(12), data.labels].mean()

    step = jax.jit(lambda params: jax.tree.map(lambda p, g: p - 0.2 * g, params, jax.grad(loss)(params)))
    params = jax.jit(model.init)(KEY)
    for _ in range(300):
        params = step(params)
    assert jax.jit(loss)(params) < 0.1


@pytest.mark.parametrize("shape", [(784,), (5, 28), (28, 28, 3, 2)])
def test_the_cnn_refuses_what_is_not_an_image(shape):
    with pytest.raises(ValueError, match=r"expected images \(height, width\[, channels\]\) of at least 6 x 6 for cnn"):
        models.build("cnn", records(*shape))


def test_scatter_changes_the_data_and_is_linear_with_its_constant():
    data, model = models.build("scatter", records(28, 28))
    assert data.inputs.shape == (6, 5184)
    assert model.constant == 0.3
    assert num_params(model) == 51_850
    long, same = models.build("logistic", records(28, 28), features=Features(kind="scatter"))
    np.testing.assert_array_equal(long.inputs, data.inputs)
    assert (same.constant, num_params(same)) == (0.3, 51_850)


def test_scatter_is_short_for_no_other_features():
    with pytest.raises(ValueError, match="model = 'scatter' has features of its own: with features="):
        models.build("scatter", records(28, 28), features=Features(kind="patches"))


def test_an_unknown_model_is_corrected():
    with pytest.raises(ValueError, match="unknown model 'logistics': did you mean 'logistic'"):
        models.build("logistics", records(28, 28))


def test_records_of_a_batch_do_not_meet_in_a_transformer():
    data = records(8, 8)
    _, model = models.build("transformer", data)
    params = small_random(model)
    alone = np.concatenate([model.apply(params, data.inputs[i : i + 1]) for i in range(6)])
    np.testing.assert_allclose(model.apply(params, data.inputs), alone, atol=1e-5)


def test_a_transformer_sees_which_patch_is_where():
    data = records(8, 8)
    _, model = models.build("transformer", data)
    params = small_random(model)
    moved = np.roll(data.inputs, 2, axis=1)  # whole patches of 2 x 2: the same tokens, in other places
    assert np.abs(model.apply(params, data.inputs) - model.apply(params, moved)).max() > 1e-3
    params["place"] = np.zeros_like(params["place"])
    np.testing.assert_allclose(model.apply(params, data.inputs), model.apply(params, moved), atol=1e-5)


def test_attention_weighs_values_by_the_softmax_of_products():
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 2, 5, 2, 4)).astype(np.float32)  # records, tokens, heads, numbers
    joined = np.stack([query, key, value], axis=2).reshape(2, 5, 24)
    expected = np.zeros((2, 5, 2, 4))
    for n, h in np.ndindex(2, 2):
        scores = np.exp(query[n, :, h] @ key[n, :, h].T / 2)
        expected[n, :, h] = scores / scores.sum(axis=1, keepdims=True) @ value[n, :, h]
    np.testing.assert_allclose(_attention(joined, 2), expected.reshape(2, 5, 8), atol=1e-5)


def test_a_transformer_refuses_records_that_are_no_images():
    with pytest.raises(ValueError, match="expected images"):
        models.build("transformer", records(40))
