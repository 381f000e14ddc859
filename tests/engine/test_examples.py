"""Clipped sums of per-example gradients equal the slow, obvious way, and keep their bound on any data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import later
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec
from products import products

from dovetail.data._base import Dataset, Model
from dovetail.engine import examples
from dovetail.engine.devices import AXIS, make_mesh
from dovetail.engine.uses import program_of
from dovetail.learners import models, trees
from dovetail.learners.client import cross_entropy

COUNT, CLASSES = 13, 3


def dataset():
    rng = np.random.default_rng(0)
    inputs = (rng.random((COUNT, 6, 6)) * rng.lognormal(0, 1, (COUNT, 1, 1))).astype(np.float32)
    labels = rng.integers(0, CLASSES, COUNT).astype(np.int32)
    return Dataset(inputs=inputs, labels=labels, test_inputs=inputs, test_labels=labels, num_classes=CLASSES)


def normal(key, **shapes):
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shape) / 4 for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def flat(x):
    return x.reshape(len(x), -1)


def tied(params, x):
    return jax.nn.relu(flat(x) @ params["a"]) @ params["a"].T @ params["b"]


def used_twice(params, x):
    return jnp.tanh(flat(x) @ params["a"] @ params["c"] + params["d"]) @ params["c"] @ params["b"] + params["e"]


def unused(params, x):
    return flat(x) @ params["a"] @ params["b"]


def under_jit(params, x):
    return jax.jit(lambda y: y @ params["a"] @ params["b"])(flat(x))


MODELS = {
    "logistic": lambda: models.linear("logistic", dataset(), constant=1.5),
    "mlp": lambda: models.mlp(dataset(), hidden=(7, 5)),
    "cnn": lambda: models.cnn(dataset()),
    "tied": lambda: Model(name="tied", init=lambda key: normal(key, a=(36, 4), b=(36, CLASSES)), apply=tied),
    "used_twice": lambda: Model(
        name="used_twice",
        init=lambda key: normal(key, a=(36, 4), b=(4, CLASSES), c=(4, 4), d=(4,), e=(CLASSES,)),
        apply=used_twice,
    ),
    "unused": lambda: Model(
        name="unused", init=lambda key: normal(key, a=(36, 4), b=(4, CLASSES), c=(4, 4)), apply=unused
    ),
    "under_jit": lambda: Model(
        name="under_jit", init=lambda key: normal(key, a=(36, 4), b=(4, CLASSES)), apply=under_jit
    ),
}
FACTORED = ("mlp", "cnn")


@functools.cache
def built(name):
    """The model, its flat parameters, and the way back; never zero, so that every layer has a gradient."""
    model = MODELS[name]()
    params, unravel = ravel_pytree(model.init(jax.random.key(1)))
    return model, params + 0.05 * jax.random.normal(jax.random.key(2), params.shape), unravel


@functools.cache
def gradient(name):
    model, _, unravel = built(name)
    return jax.jit(jax.grad(lambda params, x, y: cross_entropy(model.apply(unravel(params), x), y)[0]))


def one_by_one(name, params, data, present, clip_norm):
    """The slow, obvious way; with the norms."""
    total, norms = np.zeros(len(params)), []
    for x, y, counts in zip(data.inputs, data.labels, present, strict=True):
        found = np.asarray(gradient(name)(params, x[None], y[None]), np.float64)
        norms.append(np.linalg.norm(found))
        total += counts * found * min(1.0, clip_norm / norms[-1])
    return total, np.array(norms)


@functools.cache
def compiled(name):
    model, _, unravel = built(name)
    return jax.jit(functools.partial(examples.clipped_sum, model, unravel))


def summed(name, inputs, labels, present, clip_norm, params=None):
    params = built(name)[1] if params is None else params
    return np.asarray(compiled(name)(params, inputs, labels, present, clip_norm=clip_norm))


@pytest.mark.parametrize("name", ["logistic", *FACTORED, "tied", "under_jit"])
def test_the_sum_is_that_of_gradients_clipped_one_by_one(name):
    data, present = dataset(), np.arange(COUNT) % 4 != 1
    _, params, _ = built(name)
    _, norms = one_by_one(name, params, data, present, 1.0)
    clip_norm = float(np.median(norms))
    assert norms.min() < 0.9 * clip_norm < 1.1 * clip_norm < norms.max()
    slow, _ = one_by_one(name, params, data, present, clip_norm)
    fast = summed(name, data.inputs, data.labels, present, clip_norm)
    np.testing.assert_allclose(fast, slow, atol=2e-5 * np.abs(slow).max())


FORMED = {"tied": ["a"], "used_twice": ["c"], "unused": ["c"]}  # parameters whose gradients are formed by themselves


@pytest.mark.parametrize("name", [name for name in MODELS if name != "logistic"])
def test_a_parameter_is_followed_where_it_enters_once_and_only_there(name):
    model, params, unravel = built(name)
    uses = program_of(model.apply, unravel(params), jax.ShapeDtypeStruct((1, 6, 6), np.float32)).uses
    names = trees.arrays_by_name(unravel(params))
    assert [own for own, use in zip(names, uses, strict=True) if use.kind == "none"] == FORMED.get(name, [])
    assert all(bool(use.reason) == (use.kind == "none") for use in uses)


def test_steps_over_two_devices_equal_steps_one_by_one(monkeypatch):
    """Chunks of as many examples as the model has numbers for, the last one padded, under scan under shard_map."""
    monkeypatch.setattr(examples, "chunk_bytes", lambda platform: 4 * 80)
    data, present, clip_norm = dataset(), np.ones(14) * (np.arange(14) < COUNT), 2.0
    model, params, unravel = built("mlp")
    inputs, labels = np.pad(data.inputs, [(0, 1), (0, 0), (0, 0)]), np.pad(data.labels, (0, 1))

    def steps(params, *batch):
        def step(params, _):
            total = examples.clipped_sum(model, unravel, params, *batch, clip_norm=clip_norm)
            return params - 0.02 * jax.lax.psum(total, AXIS), None

        return jax.lax.scan(step, params, None, length=2)[0]

    split, same = PartitionSpec(AXIS), PartitionSpec()
    sharded = jax.shard_map(
        steps, mesh=make_mesh(2), in_specs=(same, split, split, split), out_specs=same, check_vma=False
    )
    text = str(jax.make_jaxpr(sharded)(params, inputs, labels, present))
    assert "f32[2,4,1,6,6]" in text, "seven examples a device are two chunks of four"
    fast, slow = jax.jit(sharded)(params, inputs, labels, present), params
    for _ in range(2):
        slow = slow - 0.02 * one_by_one("mlp", slow, data, present[:COUNT], clip_norm)[0]
    np.testing.assert_allclose(fast, slow, atol=1e-5)
    assert np.abs(slow - params).max() > 0.01


@pytest.mark.parametrize("records", [1, 2])
def test_a_product_of_a_huge_and_a_tiny_factor_is_clipped(records):
    """The tiny one over the clip norm would be flushed to zero; their product is what is long."""
    left, right = jnp.full((1, records, 4), 1.6e38), jnp.full((1, records, 3), 2e-38)
    gradient, clip_norm = examples.Outer(left, right), 5.0
    factor, _ = examples.clip_factors([gradient], jnp.ones(1, bool), clip_norm, records=records)
    length = np.linalg.norm(np.asarray(gradient.scaled_sum(factor), np.float64))
    assert length <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "tied"])
def test_an_example_that_is_absent_or_not_finite_adds_exactly_nothing(name):
    data = dataset()
    _, params, _ = built(name)
    everyone, nobody = np.ones(COUNT, bool), np.zeros(COUNT, bool)
    inputs = data.inputs.copy()
    inputs[2], inputs[5, 0, 0], inputs[7], inputs[9] = np.nan, np.inf, 3e38, 0
    assert not summed(name, inputs, data.labels, nobody, 1.0).any()
    bad = np.isin(np.arange(COUNT), (2, 5, 7))
    clean = np.where(bad[:, None, None], 0, inputs)
    some = summed(name, inputs, data.labels, everyone, 1.0)
    assert some.any()
    np.testing.assert_array_equal(some, summed(name, clean, data.labels, ~bad, 1.0))
    assert not summed(name, data.inputs, data.labels, everyone, 1.0, params=params.at[-1].set(jnp.nan)).any()


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0])
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn", "tied"])
def test_no_example_adds_more_than_the_clip_norm(name, clip_norm):
    """From tiny to overflowing inputs, all positions alike (where a Gram matrix is singular) or nearly so."""
    data = dataset()
    rng = np.random.default_rng(3)
    largest = 0.0
    for size in (1e-20, 1.0, 1e4, 1e9, 1e15, 1e18, 1e19, 1e30):
        image = np.float32(size) * (1 + 1e-6 * rng.normal(size=(6, 6))).astype(np.float32)
        inputs = np.where(np.arange(COUNT)[:, None, None] == 4, image, data.inputs)
        for label in range(CLASSES):
            labels = np.where(np.arange(COUNT) == 4, label, data.labels).astype(np.int32)
            found = summed(name, inputs, labels, np.arange(COUNT) == 4, clip_norm).astype(np.float64)
            assert np.isfinite(found).all()
            assert np.linalg.norm(found) <= clip_norm * (1 + 1e-5)
            largest = max(largest, np.linalg.norm(found))
    assert largest > 0.99 * clip_norm


def test_the_norm_of_a_product_survives_factors_whose_squares_do_not():
    """|a| = 1e19 and |d| = 1e-20, as an all but certain prediction gives: the gradient is 0.1 long."""
    gradient = examples.Outer(jnp.array([[[1e19, 0.0]], [[0.0, 0.0]]]), jnp.array([[[0.0, 1e-20]], [[1.0, 1.0]]]))
    np.testing.assert_allclose(gradient.squared_norms(0.01), [100.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_memory_does_not_grow_with_examples_times_parameters(name, monkeypatch):
    monkeypatch.setattr(examples, "chunk_bytes", lambda platform: 2**13)
    model, params, unravel = built(name)
    count = 4096
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((count, 6, 6), "f4"), ((count,), "i4"))]
    function = functools.partial(examples.clipped_sum, model, unravel, clip_norm=1.0)
    lowered = jax.jit(function).lower(params, *shapes, jax.ShapeDtypeStruct((count,), "i4"))
    held = lowered.compile().memory_analysis().temp_size_in_bytes
    assert held < 4 * (4 * count * 36) < 4 * count * len(params)


@pytest.mark.parametrize("name", ["logistic", *FACTORED, "tied"])
def test_sums_over_examples_are_in_full_precision(name):
    """Products over examples; those that make a gradient may be coarser, for its norm is taken of what they give."""
    model, params, unravel = built(name)
    data = dataset()
    found = products(
        lambda x: examples.clipped_sum(model, unravel, x, data.inputs, data.labels, jnp.ones(COUNT), clip_norm=1.0),
        params,
    )
    over_examples = [full for terms, full in found if terms == COUNT]
    assert all(over_examples)
    assert over_examples


RECORDS = np.array([3, 1, 4, 2, 0, 4])  # of clients whose examples are held in rows of four


def federated():
    """The same examples as clients hold them: inputs and labels with padding, and how many count."""
    data, ends = dataset(), np.cumsum(RECORDS)
    rows = [np.arange(4) % max(count, 1) + end - count for count, end in zip(RECORDS, ends, strict=True)]
    at = np.minimum(rows, COUNT - 1)
    return data.inputs[at], data.labels[at], RECORDS


def client_by_client(name, held, clip_norm):
    """The slow, obvious way; with the norms."""
    _, params, _ = built(name)
    total, norms = np.zeros(len(params)), []
    for x, y, count in zip(*held, strict=True):
        if count:
            own = [gradient(name)(params, x[k : k + 1], y[k : k + 1]) for k in range(count)]
            found = np.mean(np.asarray(own, np.float64), axis=0)
            norms.append(np.linalg.norm(found))
            total += found * min(1.0, clip_norm / norms[-1])
    return total, np.array(norms)


@functools.cache
def compiled_for_clients(name):
    model, _, unravel = built(name)
    return jax.jit(functools.partial(examples.clipped_client_sum, model, unravel))


def summed_over_clients(name, held, clip_norm):
    return np.asarray(compiled_for_clients(name)(built(name)[1], *held, clip_norm=clip_norm), np.float64)


@pytest.mark.parametrize("name", [later("logistic"), "mlp", later("cnn"), "tied"])
def test_the_sum_is_that_of_clients_gradients_clipped_one_by_one(name, monkeypatch):
    monkeypatch.setattr(examples, "_BLOCK", 64)  # nine rows of the first layer, and all of the others, at a time
    held = federated()
    clip_norm = float(np.median(client_by_client(name, held, 1.0)[1]))
    slow, norms = client_by_client(name, held, clip_norm)
    assert norms.min() < 0.9 * clip_norm < 1.1 * clip_norm < norms.max()
    np.testing.assert_allclose(summed_over_clients(name, held, clip_norm), slow, atol=2e-5 * np.abs(slow).max())


def test_a_client_that_is_not_finite_adds_exactly_nothing():
    inputs, labels, counts = federated()
    bad = inputs.copy()
    bad[2, 1], bad[5] = np.nan, 3e38
    without = summed_over_clients("mlp", (inputs, labels, np.where(np.isin(np.arange(6), (2, 5)), 0, counts)), 1.0)
    np.testing.assert_array_equal(summed_over_clients("mlp", (bad, labels, counts), 1.0), without)
    assert without.any()


@pytest.mark.parametrize("apart", [0.0, 1e-7, 1e-6, 1e-3])
@pytest.mark.parametrize("size", [1e-10, 1e6, 1e10])
def test_records_that_cancel_add_no_more_than_the_clip_norm(size, apart):
    """Products of length `size` cancel but for a part: what is left of two roundings differs by more than it has."""
    rng, clip_norm = np.random.default_rng(8), 1.0
    left, right = rng.normal(size=(2, 1, 50)), size * rng.normal(size=(2, 1, 60))
    both = np.concatenate([left, left * (1 + apart * rng.normal(size=left.shape))], axis=1).astype(np.float32)
    gradient = examples.Outer(jnp.asarray(both), jnp.asarray(np.concatenate([right, -right], axis=1), jnp.float32))
    factor, _ = examples.clip_factors([gradient], jnp.ones(2, bool), clip_norm, records=2)
    for number in range(2):
        alone = examples.Outer(*(side[number : number + 1] for side in gradient))
        added = np.asarray(alone.scaled_sum(factor[number : number + 1]), np.float64)
        assert np.linalg.norm(added) <= clip_norm * (1 + 1e-5)


def test_a_client_whose_records_cancel_does_not_move_what_others_add():
    """Its records may fall into different blocks of one product, each of which is then as coarse as they are large."""
    clients, records, right = 350, 6, np.full(10, 10**-0.5, np.float32)
    lefts = np.full((clients, records, 64), 64**-0.5, np.float32)
    usual = np.broadcast_to(np.float32(0.03) * right, (clients, records, 10))

    @jax.jit
    def total(rights):
        gradient = examples.Outer(lefts, rights)
        return gradient.scaled_sum(examples.clip_factors([gradient], jnp.ones(clients, bool), 1.0, records=records)[0])

    others = np.asarray(total(usual), np.float64) * (clients - 1) / clients
    moved = []
    for attacker in range(clients):
        rights = usual.copy()
        rights[attacker] = np.float32(1e6) * right * np.array([[1], [0], [0], [0], [0], [-1]], np.float32)
        moved.append(np.linalg.norm(np.asarray(total(rights), np.float64) - others))
    assert max(moved) < 0.01


@pytest.mark.parametrize(("clip_norm", "more"), [(1e-3, 2e-3), (1e-3, 0.1), (1.0, 2.0)])
def test_what_is_flushed_to_zero_leaves_nothing_uncancelled(clip_norm, more):
    """Two records that cancel, of which one is so small beside its huge input that scaling makes it zero."""
    left, right = np.zeros((1, 3, 64)), np.zeros((1, 3, 64))
    left[0, 0, :-1], right[0, 0, :-1] = 2.0**120, 1.25 * 2.0**-126
    left[0, 1, :-1], right[0, 1, :-1] = -1, 1.25 * 2.0**-6
    left[0, 2, -1], right[0, 2, -1] = 1, more
    gradient = examples.Outer(jnp.asarray(left, jnp.float32), jnp.asarray(right, jnp.float32))
    factor, _ = examples.clip_factors([gradient], jnp.ones(1, bool), clip_norm, records=3)
    assert np.linalg.norm(np.asarray(gradient.scaled_sum(factor), np.float64)) <= clip_norm * (1 + 1e-5)
