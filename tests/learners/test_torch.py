"""PyTorch modules in simulation, against the same network in JAX. Skipped without PyTorch; run by `make flower`."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import dovetail
from dovetail import experiment
from dovetail.data import Dataset, Model, resolve
from dovetail.experiment.config import parse
from dovetail.learners import losses
from dovetail.learners.client import ClientUpdate, local_update
from dovetail.protocols import PROTOCOLS

torch = pytest.importorskip("torch", reason="PyTorch is no dependency: `make flower` has it")
from torch import nn  # noqa: E402

from dovetail.learners import _torch  # noqa: E402
from dovetail.learners import torch as ours  # noqa: E402

pytestmark = pytest.mark.torch


def network(outputs=10):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, outputs),
    )


def in_jax(module):
    """The same network, with the module's weights."""
    first = {name: jnp.asarray(value.detach().numpy()) for name, value in module.named_parameters()}

    def apply(params, inputs):
        x = jax.lax.conv_general_dilated(inputs[:, None], params["1.weight"], (1, 1), "VALID")
        x = jax.nn.relu(x + params["1.bias"][:, None, None]).reshape(len(inputs), -1)
        return x @ params["4.weight"].T + params["4.bias"]

    return Model(name="twin", init=lambda key: first, apply=apply)


def labelled(kind, rng, shape):
    if kind == "cross_entropy":
        return rng.integers(0, 10, shape).astype(np.int32), 10
    if kind == "binary_cross_entropy":
        return rng.integers(0, 2, shape).astype(np.int32), 1
    if kind == "sigmoid_cross_entropy":
        return (rng.random((*shape, 3)) < 0.5).astype(np.float32), 3
    return rng.normal(size=shape).astype(np.float32), 1


@pytest.mark.parametrize("vectorized", [True, False])
@pytest.mark.parametrize("kind", losses.LOSSES)
@pytest.mark.parametrize(
    "settings",
    [
        ClientUpdate(),
        ClientUpdate(update="fedavg", epochs=2, batch=2, learning_rate=0.1),
        ClientUpdate(update="fedprox", epochs=1, batch=4, learning_rate=0.1, mu=0.5),
    ],
    ids=lambda one: one.update,
)
def test_an_update_is_that_of_jax(settings, kind, vectorized):
    rng = np.random.default_rng(0)
    inputs = rng.random((4, 5, 8, 8)).astype(np.float32)
    labels, width = labelled(kind, rng, (4, 5))
    counts = np.array([5, 3, 0, 1], np.int32)
    module = network(width)
    model, twin = ours.model(module, vectorized=vectorized), in_jax(module)
    flat, unravel = ravel_pytree(twin.init(None))
    mine, _ = ravel_pytree(model.init(None))
    np.testing.assert_array_equal(flat, mine)
    found = model.learner.updates(settings, kind, np.asarray(flat), inputs, labels, counts)
    step = local_update(settings, lambda p, x: twin.apply(unravel(p), x), losses.LOSSES[kind])
    expected = jax.vmap(step, (None, 0, 0, 0))(flat, inputs, labels, counts)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not found[2].any()
    np.testing.assert_allclose(
        model.learner.outputs(model.init(None), inputs[0]), twin.apply(twin.init(None), inputs[0]), atol=1e-5
    )


@pytest.mark.parametrize("vectorized", [True, False])
def test_arrays_of_jax_are_taken_and_given_where_they_are(vectorized):
    rng = np.random.default_rng(1)
    held = rng.random((4, 5, 8, 8)).astype(np.float32), rng.integers(0, 10, (4, 5)), np.array([5, 3, 0, 1], np.int32)
    model, settings = ours.model(network(), vectorized=vectorized), ClientUpdate(update="fedavg", batch=2)
    start = np.asarray(ravel_pytree(model.init(None))[0])
    by_host = model.learner.updates(settings, "cross_entropy", start, *held)
    by_device = model.learner.updates(settings, "cross_entropy", start, *map(jnp.asarray, held))
    assert isinstance(by_host, np.ndarray) and isinstance(by_device, jax.Array)
    np.testing.assert_array_equal(by_host, by_device)


@functools.cache
def digits():
    return resolve("digits").load(folder=None)


def trained(model, protocol, **changes):
    data = {
        "task": {"name": "digits", "partition": "iid", "users": 60},
        "noise": "seeded",
        "cohort": {"kind": "everyone", "rounds": 2},
        "protocol": {"name": protocol},
        "privacy": {"eps": 8.0} if protocol not in ("fedavg",) else {},
    }
    if protocol in ("central_sub", "local_sub"):
        data["task"] = {"name": "digits", "partition": "iid", "users": 20, "records": len(digits().labels)}
        data["privacy"] |= {"unit": "item", "neighbors": "add-remove"}
    task = dovetail.Task(name="digits", load=lambda *, folder: digits(), model=model, published=True)
    return experiment.run(experiment.prepare(parse(data, changes.items()), task=task))


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name not in ("binary_sum", "real_sum")])
def test_every_protocol_states_of_a_module_what_it_states_of_the_same_jax_model(protocol):
    module = network()
    found, twin = (trained(model, protocol, **{"performance.chunk": 7}) for model in (module, in_jax(module)))
    assert found.statement.to_json() == twin.statement.to_json()
    assert found.rounds == twin.rounds == 2
    assert found.metrics["loss"] == pytest.approx(twin.metrics["loss"], rel=1e-2)
    assert sorted(found.parameters) == sorted(dict(module.named_parameters()))


def test_threads_are_shared_out_for_the_work_alone():
    """Also when it fails: whoever trains in this process finds threads and Python's lock as they were."""

    def state():
        return torch.get_num_threads(), sys.getswitchinterval()

    before, during = state(), []
    _torch.run_in_threads(lambda part: during.append(state()), range(3))
    assert during and all(one[0] == 1 and one[1] < before[1] for one in during)
    with pytest.raises(ZeroDivisionError):
        _torch.run_in_threads(lambda part: 1 / part, [0])
    assert state() == before


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "got BatchNorm1d '1': use GroupNorm, or module.eval"),
        (nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)).eval(), "expected no statistics that training"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), r"expected no dropout, got Dropout '1' with p=0\.5"),
        (nn.Linear(4, 4).double(), "expected float32 parameters, got torch.float64 in 'weight'"),
        (nn.Linear(4, 4).requires_grad_(False), "expected a module with parameters to train, got Linear"),
    ],
)
def test_modules_that_would_not_train_as_they_seem_are_refused(module, sentence):
    with pytest.raises(ValueError, match=sentence):
        ours.model(module)
    if not sentence.startswith("expected"):
        ours.model(module.eval())


def test_the_short_way_trains_a_module_and_gives_it_back():
    """Frozen parameters and running statistics in eval mode stay; the module that was given is not changed."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)).eval()
    module[1].requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    data = digits()
    result = dovetail.train(
        data,
        model=module,
        protocol="fedavg",
        settings={
            "task.partition": "iid",
            "task.users": 30,
            "cohort.kind": "everyone",
            "cohort.rounds": 20,
            "client.update": "fedavg",
            "client.epochs": 2,
            "client.learning_rate": 1.0,
        },
    )
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert result.accuracy > 0.6 > result.baseline["accuracy"]
    assert set(result.state_dict()) == {"2.weight", "2.bias", "4.weight", "4.bias"}
    module.load_state_dict(result.state_dict(), strict=False)
    with torch.no_grad():
        named = module(torch.from_numpy(data.test_inputs)).argmax(dim=1).numpy()
    assert np.mean(named == data.test_labels) == pytest.approx(result.accuracy)


def test_a_loss_in_pytorch_must_give_one_number_per_record():
    data = digits()
    with pytest.raises(ValueError, match=r"one number per record, got shape \(\) for"):
        dovetail.train(
            data,
            model=network(),
            loss=lambda z, y: nn.functional.cross_entropy(z, y.long()),
            protocol="fedavg",
            settings={"task.partition": "iid", "task.users": 30, "cohort.kind": "everyone", "cohort.rounds": 1},
        )


def test_regression_in_pytorch_with_a_loss_of_its_own():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(600, 5)).astype(np.float32)
    numbers = inputs @ np.array([1, -2, 0.5, 0, 3], np.float32)
    data = Dataset(
        inputs=inputs[:500],
        labels=numbers[:500],
        test_inputs=inputs[500:],
        test_labels=numbers[500:],
        num_classes=1,
        target="number",
    )
    result = dovetail.train(
        data,
        model=nn.Linear(5, 1),
        loss=lambda z, y: (z[:, 0] - y).abs(),
        protocol="fedavg",
        settings={"cohort.kind": "everyone", "cohort.rounds": 60, "server.learning_rate": 0.3},
    )
    assert result.metrics["r2"] > 0.9
    assert result.accuracy is None


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_flax_and_equinox_modules_train_as_they_are(kind):
    package = pytest.importorskip("equinox" if kind == "equinox" else "flax", reason="`make flower` has it")
    if kind == "linen":
        import flax.linen

        class Net(flax.linen.Module):
            @flax.linen.compact
            def __call__(self, x):
                return flax.linen.Dense(10)(flax.linen.relu(flax.linen.Dense(16)(x.reshape(len(x), -1))))

        module = Net()
    elif kind == "nnx":
        import flax.nnx

        module = flax.nnx.Sequential(
            lambda x: x.reshape(len(x), -1),
            flax.nnx.Linear(64, 16, rngs=flax.nnx.Rngs(0)),
            flax.nnx.relu,
            flax.nnx.Linear(16, 10, rngs=flax.nnx.Rngs(1)),
        )
    else:
        module = package.nn.Sequential(
            [package.nn.Lambda(jnp.ravel), package.nn.MLP(64, 10, 16, 1, key=jax.random.key(0))]
        )
    result = dovetail.train(
        digits(),
        model=module,
        protocol="fedavg",
        settings={
            "task.partition": "iid",
            "task.users": 30,
            "cohort.kind": "everyone",
            "cohort.rounds": 20,
            "client.update": "fedavg",
            "client.learning_rate": 0.3,
        },
    )
    assert result.accuracy > 0.6


@pytest.mark.parametrize("update", ["fedavg", "fedprox"])
def test_clients_of_any_sizes_train_side_by_side_in_their_own_steps(update, monkeypatch):
    """Sorted by size and shared among threads: each has the update that it has alone, also without records."""
    monkeypatch.setattr(_torch, "num_threads", lambda: 3)
    rng = np.random.default_rng(3)
    counts = rng.permutation(np.array([0, 1, 2, 3, 5, 8, 9, 0, 9], np.int32))
    inputs, labels = rng.normal(size=(9, 9, 6)).astype(np.float32), rng.integers(0, 3, (9, 9))
    settings = ClientUpdate(update=update, batch=2, epochs=2, learning_rate=0.1, mu=0.3 if update == "fedprox" else 0)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 90), nn.ReLU(), nn.Linear(90, 90), nn.Tanh(), nn.Linear(90, 3))
    learner, slow = (ours.model(module, device="cpu", vectorized=way).learner for way in (None, False))
    start = np.concatenate([value.detach().numpy().ravel() for _, value in learner.trained_parameters])
    assert len(start) > 2**13 and learner._is_small
    found, expected = (one.updates(settings, "cross_entropy", start, inputs, labels, counts) for one in (learner, slow))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert not found[counts == 0].any()
    conv = ours.model(nn.Sequential(nn.Conv1d(1, 30, 3), nn.Flatten(), nn.Linear(120, 90)), device="cpu").learner
    assert not conv._is_small
