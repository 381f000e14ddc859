"""Code of one's own sees one user, or the verdict says so: models, losses, views and features, by `dovetail.train`.

A neighbour differs in one record of one user. Both runs have the same seeded noise, so what the models differ by is
what the record moved the clipped sum by, which may be two clip norms and no more.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import dovetail
from dovetail.data import Dataset, Model, RecordSpec
from dovetail.engine.chunks import Keys
from dovetail.engine.rounds import first_parameters
from dovetail.experiment.config import parse
from dovetail.experiment.preparation import prepare
from dovetail.learners import models
from dovetail.statements import Verdict

RNG = np.random.default_rng(0)
CLIP, USERS = 0.1, 40
SETTINGS = {
    "cohort.kind": "everyone",
    "cohort.rounds": 1,
    "noise": "seeded",
    "protocol.clip_norm": CLIP,
    "protocol.noise_multiplier": 1.0,
    "server.learning_rate": 1.0,
}


def dataset(*, far=False, shape=(6,)):
    """One record a user; that of the first is far away, and with `far` on the other side."""
    inputs = np.random.default_rng(1).normal(size=(USERS + 20, *shape)).astype(np.float32)
    labels = np.where(np.arange(USERS + 20) % 5 == 4, np.arange(USERS + 20) % 3, 0)  # mostly of one class
    labels[USERS - 1] = labels[0]
    inputs[0] = (50 if far else -50) * np.random.default_rng(3).normal(size=shape)
    return Dataset(
        inputs=inputs[:USERS],
        labels=labels[:USERS],
        test_inputs=inputs[USERS:],
        test_labels=labels[USERS:],
        num_classes=3,
    )


def flat(result):
    return np.concatenate([np.ravel(value) for _, value in sorted(result.parameters.items())])


def moved(*, shape=(6,), settings=None, **given):
    """How many clip norms one record moves the sum by, and what is stated."""
    runs = [
        dovetail.train(
            dataset(far=far, shape=shape), protocol="dp_fl", settings={**SETTINGS, **(settings or {})}, **given
        )
        for far in (False, True)
    ]
    distance = np.linalg.norm(flat(runs[0]) - flat(runs[1])) * USERS / CLIP
    return float(distance), runs[0].statement


# views and features


def mixup(images):
    return (images + images[::-1]) / 2


def summed(images):
    return images * 0 + images.sum(axis=0, keepdims=True)


def standardised(images):
    rows = jnp.asarray(images).reshape(len(images), -1)
    return (rows - rows.mean(axis=0)) / (rows.std(axis=0) + 1e-3)


def negative_in_numpy(images):
    return 1 - np.array(images)


def tanh_by_callback(images):
    return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(images.shape, images.dtype), images)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("view", [mixup, summed], ids=lambda view: view.__name__)
def test_views_of_ones_own_see_one_record(view):
    distance, statement = moved(settings={"client.views": [f"{__name__}:{view.__name__}"]})
    assert 0 < distance <= 2.001
    assert statement.verdict is Verdict.REPRODUCIBLE


def test_features_of_ones_own_see_one_record(cache):
    distance, statement = moved(settings={"task.features": f"{__name__}:standardised"})
    assert distance <= 2.001
    assert statement.verdict is Verdict.REPRODUCIBLE
    assert f"the features '{__name__}:standardised' were made without the private data" in statement.assumptions


@pytest.mark.parametrize("name", ["negative_in_numpy", "tanh_by_callback"])
def test_what_jax_cannot_compile_is_declared(name, cache):
    """In NumPy, or by a callback: it gets one record at a time, and could keep it."""
    for settings, line in (
        ({"client.views": [f"{__name__}:{name}"]}, f"the view '{__name__}:{name}' of a record depends on that"),
        ({"task.features": f"{__name__}:{name}"}, f"the features '{__name__}:{name}' of a record depend on that"),
    ):
        distance, statement = moved(settings=settings)
        assert 0 < distance <= 2.001
        assert statement.verdict is Verdict.DECLARED_REPRODUCIBLE
        assert any(said.startswith(line) for said in statement.assumptions)


# models


def test_a_function_that_builds_a_model_gets_no_record():
    seen = []

    def build(spec):
        seen.append(spec)
        return linear(spec)

    dovetail.train(dataset(), model=build, protocol="fedavg", settings={"cohort.rounds": 1, "cohort.kind": "everyone"})
    assert seen == [
        RecordSpec(
            input_shape=(6,),
            input_dtype="float32",
            label_shape=(),
            label_dtype="int32",
            target="classes",
            num_classes=3,
        )
    ]
    assert all(isinstance(value, int | str | tuple) for value in dataclasses.astuple(seen[0]))
    for name in ("inputs", "labels", "test_inputs", "users", "recipe"):
        with pytest.raises(AttributeError, match="gets the shapes of records, not the records"):
            getattr(seen[0], name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen[0].num_classes = 4


def linear(spec, apply=None):
    size = spec.input_shape[0], spec.num_classes
    return Model(name="own", init=lambda key: jnp.zeros(size), apply=apply or (lambda w, x: x @ w))


def through_python(weights, x):
    made = jax.pure_callback(
        lambda x: np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims"
    )
    return jax.lax.stop_gradient(made) @ weights


@jax.custom_batching.custom_vmap
def _centred(x):
    return x


@_centred.def_vmap
def _centred_in_batches(size, batched, x):
    return x - x.mean(axis=0), True


def by_its_own_rule(weights, x):
    """What a rule for batches of one's own sees: all users of a chunk."""
    return jax.lax.stop_gradient(_centred(x)) @ weights


_largest = Primitive("largest")
_largest.def_abstract_eval(lambda x: x)
mlir.register_lowering(_largest, mlir.lower_fun(lambda x: x, multiple_results=False))
batching.primitive_batchers[_largest] = lambda given, axes: (jnp.full_like(given[0], given[0].max()), axes[0])


def by_a_primitive_of_its_own(weights, x):
    """As Equinox's unvmap_max: the largest number of all users of a chunk."""
    return x / jax.lax.stop_gradient(1 + _largest.bind(jnp.abs(x).max())) @ weights


def shared_loss(outputs, labels):
    jax.debug.callback(lambda outputs: None, outputs)
    return jnp.sum(outputs**2, axis=1)


@pytest.mark.parametrize(
    "apply", [through_python, by_its_own_rule, by_a_primitive_of_its_own], ids=lambda apply: apply.__name__
)
def test_a_model_that_leaves_compiled_code_is_declared(apply):
    settings = {**SETTINGS, "noise": "os"}
    result = dovetail.train(dataset(), model=lambda spec: linear(spec, apply), protocol="dp_fl", settings=settings)
    assert result.statement.verdict is Verdict.DECLARED
    assert any(
        said.startswith("the model own or its loss, which leaves compiled") for said in result.statement.assumptions
    )
    assert str(result.statement).splitlines()[0].endswith("as declared")


def test_so_is_a_loss_and_a_plain_model_is_certified():
    settings = {**SETTINGS, "noise": "os"}
    declared = dovetail.train(dataset(), loss=shared_loss, protocol="dp_fl", settings=settings)
    assert declared.statement.verdict is Verdict.DECLARED
    for given in (
        {"model": linear},
        {"model": lambda spec: linear(spec, lambda w, x: jnp.einsum("nd,dc->nc", x, w))},
        {"loss": lambda outputs, labels: jnp.sum(outputs**2, axis=1)},
    ):
        result = dovetail.train(dataset(), protocol="dp_fl", settings=settings, **given)
        assert result.statement.verdict is Verdict.CERTIFIED


def test_a_learner_of_ones_own_is_declared_whatever_it_says_of_itself():
    class Mine:
        gradients, ignores_settings, platform, notes, code = True, False, "host", (), ()
        declared: ClassVar = ()

        def updates(self, settings, loss, parameters, inputs, labels, counts):
            return np.zeros((len(counts), len(parameters)), np.float32)

        def outputs(self, parameters, inputs):
            return np.zeros((len(inputs), 3), np.float32)

        def losses(self, loss, outputs, labels):
            return np.zeros(len(labels))

    learner = Mine()
    model = Model(name="mine", init=lambda key: jnp.zeros(4), apply=learner.outputs, learner=learner)
    result = dovetail.train(dataset(), model=model, protocol="dp_fl", settings={**SETTINGS, "noise": "os"})
    line = "the learner Mine computes each user's update from that user's records alone"
    assert result.statement.verdict is Verdict.DECLARED
    assert line in result.statement.assumptions
    assert all(line in statement.assumptions for statement in result.units.values())


def test_verify_finds_what_was_declared_in_the_ledger(tmp_path):
    from dovetail.experiment.verify import verify

    run = tmp_path / "run"
    dovetail.train(dataset(), loss=shared_loss, protocol="dp_fl", settings={**SETTINGS, "noise": "os"}, out=run)
    assert verify(run).agrees


@pytest.mark.parametrize("protocol", ["central_sub", "local_sub"])
def test_models_that_mix_records_are_refused_where_records_are_protected(protocol):
    def centred(weights, x):
        return (x - x.mean(axis=0)) @ weights

    settings = {
        "task.users": 40,
        "task.records": 40,
        "cohort.kind": "everyone",
        "cohort.rounds": 1,
        "privacy.unit": "item",
        "privacy.neighbors": "add-remove",
    }
    given = {"protocol": protocol, "eps": 8.0, "settings": settings, "force": True}
    with pytest.raises(
        ValueError, match="the output of model 'own' for a record depends on the other records of a batch"
    ):
        dovetail.train(dataset(), model=lambda spec: linear(spec, centred), **given)
    assert dovetail.train(dataset(), model=linear, **given).statement.verdict is Verdict.CERTIFIED


# how many records others have: batches are filled up to the number of the largest user

HELD = 11


def uneven(*, larger, number=False):
    """Twenty users with eleven records each; with `larger`, the last one has twenty."""
    users = np.concatenate([np.repeat(np.arange(19), HELD), np.full(20 if larger else HELD, 19)]).astype(np.int32)
    inputs = np.random.default_rng(2).normal(size=(len(users) + 50, 3)).astype(np.float32)
    labels = np.exp(inputs[:, 0]) if number else (inputs[:, 0] > 0).astype(np.int32)
    return Dataset(
        inputs=inputs[: len(users)],
        labels=labels[: len(users)],
        test_inputs=inputs[-50:],
        test_labels=labels[-50:],
        num_classes=1 if number else 2,
        target="number" if number else "classes",
        users=users,
    )


def moved_by_a_larger_user(*, number=False, settings=None, **given):
    runs = [
        dovetail.train(
            uneven(larger=larger, number=number),
            protocol="dp_fl",
            settings={**SETTINGS, "protocol.noise_multiplier": 1e-6, "protocol.clip_norm": 1e-3, **(settings or {})},
            **given,
        )
        for larger in (False, True)
    ]
    return float(np.linalg.norm(flat(runs[0]) - flat(runs[1])) * 20 / 1e-3)


def of_unit_length(weights, x):
    """No number for a record of zeros."""
    return (x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ weights


def by_size(weights, x):
    return (x if x.shape[0] <= HELD else -x) @ weights


def calls_python_in(*sizes):
    def apply(weights, x):
        if x.shape[0] in sizes:
            x = jax.lax.stop_gradient(jax.pure_callback(np.asarray, x, x, vmap_method="expand_dims"))
        return x @ weights

    return apply


def logarithm(outputs, labels):
    """No number for a label of zero."""
    return (outputs[:, 0] - jnp.log(labels)) ** 2


LOCAL = {"client.update": "fedavg", "client.batch": 10, "client.learning_rate": 0.01}


@pytest.mark.parametrize(
    ("apply", "settings"), [(by_size, {}), (of_unit_length, LOCAL)], ids=["what goes by a batch's size", "zeros"]
)
def test_a_user_with_more_records_moves_nobody_elses_update(apply, settings):
    """It moved the sum by 37 and by 16 clip norms, where two are certified."""
    assert moved_by_a_larger_user(model=lambda spec: linear(spec, apply), settings=settings) < 2.001


@pytest.mark.parametrize("epochs", [1, 40])
def test_nor_does_it_under_a_loss_that_is_no_number_at_zero(epochs):
    """Forty epochs are a loop of the linear path; there it moved the sum by 19 clip norms."""
    assert moved_by_a_larger_user(number=True, loss=logarithm, settings={**LOCAL, "client.epochs": epochs}) < 2.001


def cancelling(held, record, users=100):
    """Users with two records, nearly this one twice under two labels; the last user has `held` of them."""
    owners = np.concatenate([np.repeat(np.arange(users - 1), 2), np.full(held, users - 1)]).astype(np.int32)
    labels = np.arange(len(owners), dtype=np.int32) % 2
    inputs = (record * np.where(labels, 1 - 1 / 150, 1)[:, None]).astype(np.float32)
    return Dataset(
        inputs=inputs, labels=labels, test_inputs=inputs[:20], test_labels=labels[:20], num_classes=2, users=owners
    )


def undecided(features):
    """A long record between whose two classes the first MLP is undecided: its gradients under both cancel."""
    data = cancelling(2, np.ones(features))
    model = models.mlp(data)
    first, unravel = first_parameters(model, 0)
    ends = 100 * np.random.default_rng(0).normal(size=(20, features)).astype(np.float32)
    margin = lambda x: np.diff(np.asarray(model.apply(unravel(first), jnp.asarray(x)[None]))[0])[0]  # noqa: E731
    low = next(x for x in ends if margin(x) < 0)
    high = next(x for x in ends if margin(x) > 0)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if margin(middle) < 0 else (low, middle)
    return low


@pytest.mark.parametrize("held", [3, 8, 9, 16, 17])
@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_nor_does_it_where_records_cancel(model, held):
    """How norms were computed, and how far they were raised for rounding, went by the largest user: 97 clip norms."""
    record = np.array([100.0, 0, 0, 0]) if model == "logistic" else undecided(200)
    settings = {**SETTINGS, "protocol.noise_multiplier": 1e-6, "protocol.clip_norm": 1e-3}
    runs = [
        dovetail.train(cancelling(count, record), model=model, protocol="dp_fl", settings=settings)
        for count in (2, held)
    ]
    assert np.linalg.norm(flat(runs[0]) - flat(runs[1])) * 100 / 1e-3 < 2.001


def centred_loss(outputs, labels):
    losses = jnp.sum(outputs**2, axis=1) + labels
    return losses * (1 + losses - losses.mean())


def shared_out(outputs, labels):
    return jnp.sum(outputs**2, axis=1) / len(labels)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"model": lambda spec: linear(spec, lambda w, x: (x - x.mean(axis=0)) @ w)},
            "the output of model 'own' for a record depends on the other records",
        ),
        ({"model": lambda spec: linear(spec, lambda w, x: x @ w / len(x))}, "or on how many there are"),
        ({"model": "mlp", "loss": centred_loss}, "the loss of a record depends on the other records of a batch"),
        ({"model": linear, "loss": shared_out}, "the loss of a record depends on the other records of a batch"),
    ],
)
def test_what_mixes_the_records_of_a_batch_is_refused(given, said):
    """One user's 60 records in place of three moved the sum of twenty users by 2.5 to 9.7 clip norms."""
    with pytest.raises(ValueError, match=said):
        dovetail.train(uneven(larger=True), protocol="dp_fl", settings=SETTINGS, **given)


def test_what_is_traced_is_what_runs_whatever_the_size_of_a_batch():
    """It was traced for two records, and ran for eleven."""
    settings = {**SETTINGS, "noise": "os"}
    for sizes, verdict in (((1,), Verdict.DECLARED), ((HELD, 20), Verdict.CERTIFIED)):
        called = dovetail.train(
            uneven(larger=True),
            model=lambda spec, sizes=sizes: linear(spec, calls_python_in(*sizes)),
            protocol="dp_fl",
            settings=settings,
        )
        assert called.statement.verdict is verdict


def test_models_and_losses_of_ones_own_get_one_record_at_a_time():
    sizes = []

    def noted(weights, x):
        sizes.append(len(x))
        return x @ weights

    settings = {**SETTINGS, **LOCAL}
    prepared = prepare(
        parse({"task": {"name": "uneven"}, "protocol": {"name": "dp_fl"}}, settings.items()),
        task=dovetail.Task(
            name="uneven", load=lambda *, folder: uneven(larger=True), model=lambda spec: linear(spec, noted)
        ),
    )
    sizes.clear()
    dovetail.experiment.run(prepared)
    assert set(sizes) == {1}


# bundled models


def updates_of(plan, *, users):
    engine, key = plan.engine, jax.random.key(0)

    def updates(ids):
        return engine._classes[0].updates(jnp.asarray(engine.first), engine._data, (ids, None), Keys(key, key))

    return jax.jit(updates)(jnp.arange(users))


SHAPES = {"logistic": (8, 8), "mlp": (8, 8), "cnn": (28, 28), "scatter": (28, 28), "transformer": (8, 8)}


@pytest.mark.parametrize("update", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_one_users_record_leaves_the_updates_of_others_as_they_are_bit_by_bit(name, update):
    found = []
    for far in (False, True):
        data = dataset(far=far, shape=SHAPES[name])
        inputs = data.inputs[:8] % 1 * 255
        some = dataclasses.replace(data, inputs=inputs.astype(np.uint8), labels=data.labels[:8])
        config = {
            "task": {"name": "own", "model": name, "partition": "iid", "users": 4},
            "client": {"update": update, "batch": 1},
            "protocol": {"name": "fedavg"},
            "cohort": {"kind": "everyone", "rounds": 1},
            "performance": {"chunk": 4},
        }
        plan = prepare(parse(config), task=dovetail.Task(name="own", load=lambda *, folder, some=some: some))
        found.append(np.asarray(updates_of(plan, users=4)))
    changed = [user for user in range(4) if found[0][user].tobytes() != found[1][user].tobytes()]
    assert len(changed) == 1


def test_how_many_records_one_user_has_leaves_the_order_of_others_records_as_it_is():
    """A thousand records each: ties in what sorts them are common enough to show how they are broken."""
    users, each, found = 40, 1000, []
    for more in (1024, 1025, 70_000):
        owners = np.repeat(np.arange(users, dtype=np.int32), [more] + [each] * (users - 1))
        numbers = np.arange(len(owners), dtype=np.float32) - more
        data = Dataset(
            inputs=np.maximum(numbers, -1)[:, None],
            labels=np.zeros(len(owners), np.int32),
            test_inputs=np.zeros((1, 1), np.float32),
            test_labels=np.zeros(1, np.int32),
            num_classes=2,
            users=owners,
        )
        config = {
            "task": {"name": "own", "model": "logistic"},
            "client": {"update": "fedavg"},
            "protocol": {"name": "fedavg"},
            "cohort": {"kind": "everyone", "rounds": 1},
            "performance": {"size_classes": 1},
        }
        plan = prepare(parse(config), task=dovetail.Task(name="own", load=lambda *, folder, data=data: data))
        inputs, _, _ = plan.engine._classes[0].gather(plan.engine._data, jnp.arange(1, users), jax.random.key(0))
        found.append(np.asarray(inputs[:, :each]))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


def test_a_user_that_is_not_there_leaves_the_order_of_others_records_as_it_is():
    """Without a roster the others move up by one place, which says nothing about them."""
    found = []
    for there in (slice(None), slice(10, None)):
        owners = np.repeat(np.arange(9, dtype=np.int32), 10)[there]
        data = Dataset(
            inputs=np.arange(90, dtype=np.float32)[there, None],
            labels=np.zeros(len(owners), np.int32),
            test_inputs=np.zeros((1, 1), np.float32),
            test_labels=np.zeros(1, np.int32),
            num_classes=2,
            users=owners,
        )
        config = {
            "task": {"name": "own", "model": "logistic", "users": 20},
            "client": {"update": "fedavg"},
            "protocol": {"name": "fedavg"},
            "cohort": {"kind": "everyone", "rounds": 1},
        }
        plan = prepare(parse(config), task=dovetail.Task(name="own", load=lambda *, folder, data=data: data))
        inputs, _, _ = plan.engine._classes[0].gather(plan.engine._data, jnp.arange(9), jax.random.key(0))
        found.append(np.asarray(inputs))
    np.testing.assert_array_equal(found[0][1:], found[1][:8])
