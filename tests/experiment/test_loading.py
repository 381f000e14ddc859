"""A run of a model of one's own, loaded and asked again: `load`, `state_dict`, `dovetail predict --model`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import dovetail
from dovetail.data import Model
from dovetail.learners import functions

QUICK = {"cohort.rounds": 2, "cohort.kind": "everyone"}
DATA = tiny.load()
NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, inputs=3, outputs=3):
        super().__init__()
        self.first = nn.Linear(inputs, 4)
        self.last = nn.Linear(4, outputs)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

torch.manual_seed(0)
net = Net()

def for_spec(spec):
    return Net(*spec.input_shape, spec.num_classes)
"""


def two_layers():
    return Model(
        name="two layers",
        init=lambda key: {"in": {"kernel": jax.random.normal(key, (3, 4))}, "out": jnp.ones((4, 3))},
        apply=lambda params, inputs: jnp.tanh(inputs @ params["in"]["kernel"]) @ params["out"],
    )


def by_function():
    return functions.model(
        {"weights": np.zeros((3, 3))},
        update=lambda parameters, records: {"weights": parameters["weights"] + records.inputs.sum() / 9},
        predict=lambda parameters, inputs: inputs @ parameters["weights"],
    )


def linen():
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.tanh(nn.Dense(4)(x)))

    return Net()


def nnx():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    return Net(nnx.Rngs(0))


def equinox():
    import equinox

    return equinox.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))


def torch():
    from nets import Net

    return Net()


MODELS = {
    "two layers": (two_layers, None),
    "a function of the shapes": (lambda: lambda spec: two_layers(), None),
    "by a function": (by_function, None),
    **{make.__name__: (make, make.__name__) for make in (torch, linen, nnx, equinox)},
}
PACKAGES = {"linen": "flax", "nnx": "flax"}


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A folder with the module `nets` in it, which is the working directory."""
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("nets", None)


@pytest.mark.parametrize(
    "name", [pytest.param(key, marks=[pytest.mark.torch] if package else []) for key, (_, package) in MODELS.items()]
)
def test_whatever_was_trained_is_loaded_as_it_is(name, nets):
    make, package = MODELS[name]
    if package is not None:
        pytest.importorskip(PACKAGES.get(package, package), reason="`make flower` has it")
    result = dovetail.train(DATA, model=make(), eps=5.0, settings=QUICK, out="run")
    run = dovetail.load("run", model=make())
    np.testing.assert_array_equal(run.predict(DATA.test_inputs), result.predict(DATA.test_inputs))
    np.testing.assert_array_equal(run.predict_proba(DATA.test_inputs), result.predict_proba(DATA.test_inputs))
    told = np.mean(run.predict(DATA.test_inputs) == DATA.test_labels)
    assert told == pytest.approx(result.accuracy)
    ours, theirs = (jax.tree.leaves(one.state_dict()) for one in (result, run))
    assert len(ours) == len(result.parameters)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    with pytest.raises(ValueError, match=r"and its folder holds parameters but no code: pass the same model again"):
        dovetail.load("run")


def test_parameters_come_nested_as_the_model_nests_them():
    state = dovetail.train(DATA, model=two_layers(), eps=5.0, settings=QUICK).state_dict()
    assert {name: jax.tree.map(np.shape, value) for name, value in state.items()} == {
        "in": {"kernel": (3, 4)},
        "out": (4, 3),
    }


def test_a_model_with_other_parameters_is_refused(tmp_path):
    dovetail.train(DATA, model=two_layers(), eps=5.0, settings=QUICK, out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"model 'own' does not fit the parameters in '.*': expected the parameters w"):
        dovetail.load(tmp_path / "run", model=by_function())


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ((), "pass the same model again, model=... (--model module:object)"),
        (("--model", "nets"), "expected --model module:object, such as --model mynet:net, got 'nets'"),
        (("--model", "nothing:net"), "expected a model 'module:name' that imports, got 'nothing:net'"),
        (("--model", "jaxnets:LAYERS"), "got no such name"),
        (("--model", "jaxnets:WIDE"), "does not fit the parameters in"),
        (("--model", "jaxnets:SIZES"), "to be a model, a module or a function that makes one, got a tuple"),
    ],
)
def test_the_command_asks_for_the_model_in_one_sentence(option, sentence, nets, command):
    (nets / "jaxnets.py").write_text(
        "import jax.numpy as jnp\nfrom dovetail import Model\nSIZES = (3, 4)\n"
        'WIDE = Model(name="wide", init=lambda key: jnp.zeros((9, 9)), apply=lambda w, x: x @ w)\n'
    )
    dovetail.train(DATA, model=two_layers(), eps=5.0, settings=QUICK, out="run")
    (nets / "rows.csv").write_text("a,b,c\n1,0,0\n0,0,1\n")
    status, _, err = command("predict", "run", "rows.csv", *option)
    assert status == 2
    assert sentence in " ".join(err.split())
    sys.modules.pop("jaxnets", None)


def test_the_command_predicts_by_a_model_of_ones_own(nets, command):
    (nets / "loading_net.py").write_text("from test_loading import two_layers\nnet = two_layers()\n")
    result = dovetail.train(DATA, model=two_layers(), eps=5.0, settings=QUICK, out="run")
    (nets / "rows.csv").write_text("a,b,c\n1,0,0\n0,0,1\n")
    rows = np.array([[1, 0, 0], [0, 0, 1]], np.float32)
    for name in ("net", "two_layers"):
        module = "loading_net" if name == "net" else None
        if module is None:
            (nets / "loading_maker.py").write_text(
                "from test_loading import two_layers as make\ndef two_layers(spec):\n    return make()\n"
            )
            module = "loading_maker"
        status, out, err = command("predict", "run", "rows.csv", "--model", f"{module}:{name}")
        assert status == 0, err
        assert [int(line.split(",")[0]) for line in out.splitlines()[1:]] == result.predict(rows).tolist()


@pytest.mark.torch
def test_the_command_predicts_by_a_module_of_pytorch(nets, command):
    pytest.importorskip("torch", reason="`make flower` has it")
    import nets as own

    result = dovetail.train(DATA, model=own.net, eps=5.0, settings=QUICK, out="run")
    np.save("rows.npy", DATA.test_inputs)
    for name in ("net", "for_spec"):
        status, out, err = command("predict", "run", "rows.npy", "--model", f"nets:{name}")
        assert status == 0, err
        told = [int(line.split(",")[0]) for line in out.splitlines()[1:]]
        assert told == result.predict(DATA.test_inputs).tolist()
    status, _, err = command("predict", "run", "rows.npy", "--model", "nets:Net")
    assert status == 2
    assert "got the class Net itself: pass an instance, model=Net(...)" in " ".join(err.split())
    again = own.Net()
    again.load_state_dict(dovetail.load("run", model=again).state_dict())
    with own.torch.no_grad():
        told = again(own.torch.from_numpy(DATA.test_inputs)).argmax(dim=1).numpy()
    np.testing.assert_array_equal(told, result.predict(DATA.test_inputs))


# a model that does not fit the data


def linear(inputs, outputs):
    return Model(name="mine", init=lambda key: jnp.zeros((inputs, outputs)), apply=lambda w, x: x @ w)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            linear(8, 3),
            r"model 'mine' cannot read a batch of these data, of shape \(records, 3\): build it for records",
        ),
        (linear(3, 4), "expected model 'mine' to have 3 outputs for a record, one for each class, .* got 4: make its"),
        (linear(3, 2), "expected model 'mine' to have 3 outputs for a record, one for each class, .* got 2"),
        (
            Model(name="mine", init=lambda key: jnp.zeros((3, 3)), apply=lambda w, x: (x @ w).mean(axis=0)),
            r"expected model 'mine' to return an array with one row for each record, got shape \(3,\) for two records",
        ),
        (Model, r"got the class Model itself: pass an instance, model=Model\(...\)"),
        (lambda: linear(3, 3), r"expected a function of one argument, the RecordSpec .*, got <lambda>\(\)"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_before_training(model, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        dovetail.train(DATA, model=model, eps=5.0, settings=QUICK)
    assert "\n" not in str(refused.value)


@pytest.mark.torch
def test_a_module_that_does_not_fit_the_data_is_refused_before_training():
    torch = pytest.importorskip("torch", reason="`make flower` has it")
    for module, sentence in (
        (
            torch.nn.Linear(8, 3),
            r"'Linear' cannot read a batch of these data, of shape \(records, 3\).*RuntimeError: mat1",
        ),
        (torch.nn.Linear(3, 2), "model 'Linear' to have 3 outputs for a record"),
        (torch.nn.Linear, "got the class Linear itself"),
    ):
        with pytest.raises(ValueError, match=sentence):
            dovetail.train(DATA, model=module, eps=5.0, settings=QUICK)
