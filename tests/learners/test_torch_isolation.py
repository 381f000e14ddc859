"""PyTorch modules carry nothing from one user to another: refused by name, put back, or traced; otherwise declared."""

import itertools
import random

import numpy as np
import pytest

import dovetail
from dovetail.data import Dataset
from dovetail.learners.client import ClientUpdate
from dovetail.statements import Verdict

torch = pytest.importorskip("torch", reason="PyTorch is no dependency: `make flower` has it")
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

from dovetail.learners import torch as ours  # noqa: E402
from dovetail.learners._torch_isolation import Snapshot, mixes_records, pytorch_only  # noqa: E402

pytestmark = pytest.mark.torch

USERS, CLIP = 40, 0.1
SETTINGS = {
    "cohort.kind": "everyone",
    "cohort.rounds": 1,
    "protocol.clip_norm": CLIP,
    "protocol.noise_multiplier": 1.0,
    "server.learning_rate": 1.0,
}


def dataset(far=False):
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(USERS + 20, 6)).astype(np.float32), rng.integers(0, 3, USERS + 20)
    inputs[0] = 2000 if far else -2000
    return Dataset(
        inputs=inputs[:USERS],
        labels=labels[:USERS],
        test_inputs=inputs[USERS:],
        test_labels=labels[USERS:],
        num_classes=3,
    )


def trained(module, *, far=False, noise="os", loss=None, vectorized=None, **settings):
    model = ours.model(module, vectorized=vectorized)
    return dovetail.train(
        dataset(far), model=model, loss=loss, protocol="dp_fl", settings={**SETTINGS, "noise": noise, **settings}
    )


def moved(module, **given):
    """How many clip norms another record of the first user moves the sum by."""
    flat = [
        np.concatenate([np.ravel(value) for _, value in sorted(result.parameters.items())])
        for result in (trained(module, far=far, noise="seeded", **given) for far in (False, True))
    ]
    return float(np.linalg.norm(flat[0] - flat[1]) * USERS / CLIP)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.unused = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x.view(x.size(0), -1))))


class RunningMean(Net):
    """Centred by a running mean, which is a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(dim=0))
        return super().forward(x - self.mean)


class Rebound(RunningMean):
    """The same, with another tensor in the buffer's place."""

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        return Net.forward(self, x - self.mean)


class Attribute(Net):
    def forward(self, x):
        self.previous = x.detach()
        return super().forward(x)


class Listing(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(float(x.detach().sum()))
        return super().forward(x)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(0.5)
        return super().forward(x * self.scale)


class Noisy(Net):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return super().forward(x) * (1 + self.draw())


class Hooked(nn.Sequential):
    """A hook that counts."""

    def __init__(self):
        super().__init__(nn.Linear(6, 3))
        self.count = 0
        self[0].register_forward_hook(self._note)

    def _note(self, *_):
        self.count += 1


REFUSED = {
    "a running mean": (RunningMean, "got RunningMean, whose buffer 'mean' changes when it runs: use GroupNorm"),
    "a rebound buffer": (Rebound, "got Rebound, whose buffer 'mean' changes when it runs"),
    "an attribute": (Attribute, "got Attribute, whose attribute 'previous' changes when it runs"),
    "a list": (Listing, "got Listing, whose attribute 'seen' changes when it runs"),
    "a frozen parameter": (Frozen, "got Frozen, whose frozen parameter 'scale' changes when it runs"),
    "a hook": (Hooked, "got Hooked, whose attribute 'count' changes when it runs"),
    "spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 3))),
        "got _SpectralNorm '0.parametrizations.weight.0', whose buffer '_u' changes when it runs",
    ),
    "the old spectral norm": (
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 3))),
        "got Linear '0', whose .* changes when it runs",
    ),
    "instance norm": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.InstanceNorm1d(6, track_running_stats=True)),
        "use Gro",
    ),
    "PyTorch's noise": (lambda: Noisy(lambda: torch.rand(())), "got Noisy, which draws random numbers"),
    "Python's noise": (lambda: Noisy(random.random), "got Noisy, which draws random numbers"),
    "NumPy's noise": (lambda: Noisy(lambda: float(np.random.rand())), "got Noisy, which draws random numbers"),  # noqa: NPY002
    "a layer's noise": (
        lambda: nn.Sequential(nn.Linear(6, 3), nn.RReLU()),
        r"got RReLU '1', which draws random numbers",
    ),
    "a lazy layer": (lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "got LazyLinear '0': run the module on"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vectorized", [None, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_keeps_anything_or_draws_numbers_is_refused_by_name(name, vectorized):
    build, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        trained(build(), vectorized=vectorized)


class Triggered(Net):
    """Keeps something once it has seen a large number, which public records do not have."""

    def __init__(self):
        super().__init__()
        self.kept = {"largest": 0.0}
        self.register_buffer("sum", torch.zeros(()))
        self.register_buffer("recent", torch.zeros(6))

    def forward(self, x):
        if float(x.abs().max()) > 1000:
            self.kept["largest"] = float(x.max())
            self.sum += x.detach().max()
            self.recent = x.detach()[0]
            self.extra = x.detach()
        with_extra = self.extra.sum() if hasattr(self, "extra") else 0
        return super().forward(x + self.recent + self.kept["largest"] + self.sum + with_extra)


def test_what_a_probe_cannot_see_is_put_back_and_declared():
    """State that only a private record sets: it is gone before the next batch, and the author has to vouch for it."""
    assert 0 < moved(Triggered(), vectorized=False) <= 2.001
    statement = trained(Triggered(), vectorized=False).statement
    assert statement.verdict is Verdict.DECLARED
    assert "the module Triggered computes each user's update from that user's records alone" in statement.assumptions


def test_what_cannot_be_put_back_is_refused_where_a_probe_sees_it():
    total = []

    class Global(Net):
        def forward(self, x):
            total.append(float(x.detach().sum()))
            return super().forward(x * (1 + sum(total)))

    with pytest.raises(
        ValueError, match="got the module Global, whose update for one user changes with the records of"
    ):
        trained(Global(), vectorized=False)


def test_a_side_effect_is_not_in_the_graph_that_is_run():
    """Traced once, with no records: what is run is certified, whatever the code does beside it."""
    seen = []

    class Beside(Net):
        def forward(self, x):
            seen.append(x)
            return super().forward(x)

    result = trained(Beside(), vectorized=False)
    assert result.statement.verdict is Verdict.CERTIFIED
    before = len(seen)
    learner, declared = ours.model(Beside()).learner.inspect("cross_entropy", *probes())
    counted = len(seen) - before
    learner.updates(ClientUpdate(), "cross_entropy", flat(learner), *clients())
    assert not declared and counted > 0 and len(seen) == before + counted


def probes():
    rng = np.random.default_rng(1)
    return rng.normal(size=(4, 6)).astype(np.float32), np.array([0, 1, 2, 1])


def clients():
    rng = np.random.default_rng(2)
    return rng.normal(size=(3, 2, 6)).astype(np.float32), rng.integers(0, 3, (3, 2)), np.array([2, 1, 2], np.int32)


def flat(learner):
    return np.concatenate([value.detach().numpy().ravel() for _, value in learner.trained_parameters])


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, slope):
        return slope


class OwnGradient(Net):
    def forward(self, x):
        return super().forward(Straight.apply(self.first.weight.sum() + x))


class NoGradient(Net):
    def forward(self, x):
        with torch.no_grad():
            x = self.first(x)
        return self.last(torch.relu(x))


class Branching(Net):
    def forward(self, x):
        return super().forward(x) if isinstance(x, torch.Tensor) else super().forward(x) * 2


@pytest.mark.parametrize("kind", [OwnGradient, NoGradient, Branching])
def test_what_a_graph_would_not_repeat_is_run_as_it_is_and_declared(kind):
    learner, declared = ours.model(kind(), vectorized=False).learner.inspect("cross_entropy", *probes())
    assert declared == (f"the module {kind.__name__} computes each user's update from that user's records alone",)
    plain = ours.model(kind(), vectorized=False).learner
    settings = ClientUpdate(update="fedavg", batch=1)
    for one in (learner, plain):
        found = one.updates(settings, "cross_entropy", flat(one), *clients())
        np.testing.assert_array_equal(found, plain.updates(settings, "cross_entropy", flat(plain), *clients()))


@pytest.mark.parametrize(("vectorized", "processes"), [(True, False), (False, False), (False, True)])
def test_a_traced_module_trains_as_the_module_does(vectorized, processes):
    """Bit by bit, with a parameter that it does not use; processes load it too."""
    model = ours.model(Net(), vectorized=vectorized, processes=processes)
    learner, declared = model.learner.inspect("cross_entropy", *probes())
    assert not declared and learner.module is not model.learner.module and learner.code == (Net,)
    assert [name for name, _ in learner.trained_parameters] == [name for name, _ in model.learner.trained_parameters]
    for settings in (ClientUpdate(), ClientUpdate(update="fedprox", batch=1, epochs=2, mu=0.1)):
        one, other = (
            way.updates(settings, "cross_entropy", flat(learner), *clients()) for way in (learner, model.learner)
        )
        np.testing.assert_array_equal(one, other)


def test_losses_of_ones_own_are_traced_or_declared():
    weights = torch.tensor([1.0, 2.0, 3.0])

    def weighted(outputs, labels):
        return nn.functional.cross_entropy(outputs, labels.long(), weight=weights, reduction="none")

    seen = []

    def keeping(outputs, labels):
        seen.append(float(outputs.detach().sum()))
        return weighted(outputs, labels)

    assert trained(Net(), loss=weighted, vectorized=False).statement.verdict is Verdict.CERTIFIED
    statement = trained(Net(), loss=keeping, vectorized=False).statement
    assert statement.verdict is Verdict.DECLARED
    assert any("the loss" in said and "keeping" in said for said in statement.assumptions)


class ByLargest(nn.Module):
    """Losses over the largest loss so far, which is a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("top", torch.tensor(20.0))

    def forward(self, outputs, labels):
        losses = nn.functional.cross_entropy(outputs, labels.long(), reduction="none")
        return losses / self.top.copy_(torch.maximum(self.top, losses.detach().max())).clone()


@pytest.mark.parametrize("vectorized", [False, True])
def test_a_loss_that_writes_to_its_own_tensors_is_refused(vectorized):
    most = torch.tensor(20.0)

    def by_largest_of_all(outputs, labels):
        losses = nn.functional.cross_entropy(outputs, labels.long(), reduction="none")
        return losses / most.copy_(torch.maximum(most, losses.detach().max())).clone()

    for loss, name in ((ByLargest(), "'top'"), (by_largest_of_all, "'_tensor_constant0'")):
        with pytest.raises(ValueError, match=f"expected a loss that keeps nothing .* tensor {name} changes"):
            trained(Net(), loss=loss, vectorized=vectorized)


def test_a_loss_of_pytorchs_with_weights_is_pytorchs():
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), reduction="none")
    assert ours.isolation.pytorch_only_loss(weighted, torch.zeros(4, 3), torch.arange(4) % 3) is not None


def test_layers_of_pytorch_alone_and_parametrizations_without_state_are_certified():
    for module in (
        nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, 3)),
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 3))).eval(),
        Net(),
    ):
        assert trained(module).statement.verdict is Verdict.CERTIFIED


class Own(nn.TransformerEncoderLayer):
    pass


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.0, activation=lambda x: x.abs().tanh())),
        nn.Sequential(nn.Linear(6, 8), Own(8, 2, 8, 0.0)),
    ],
    ids=["activation", "subclass"],
)
def test_a_function_of_ones_own_in_a_layer_of_pytorch_is_code_of_ones_own(module):
    from dovetail.learners import _torch_isolation as isolation

    assert isolation._is_known(module[0])
    assert not isolation._is_known(module[1])


def by_largest(x, top):
    """Numbers over the largest one so far, at least twenty; no probe is larger, and a private record is."""
    top[0] = max(top[0], float(x.detach().abs().max()))
    return x * 20 / top[0]


def test_a_layer_of_pytorch_with_code_of_ones_own_inside_is_not_taken_for_pytorchs():
    top = [20.0]

    class Largest(nn.TransformerEncoderLayer):
        def forward(self, x, *_, **__):
            return by_largest(x + super().forward(x), top)

    class Encoded(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(Largest(6, 1, 8, 0.0, batch_first=True), 1, enable_nested_tensor=False)
            self.last = nn.Linear(6, 3)

        def forward(self, x):
            return self.last(self.encoder(x.unsqueeze(1)).squeeze(1))

    assert trained(Encoded(), vectorized=False).statement.verdict is Verdict.DECLARED


def test_hooks_of_all_modules_are_code_of_ones_own():
    top = [20.0]

    def hook(part, given, made):
        return by_largest(made, top) if isinstance(part, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        assert trained(Net(), vectorized=False).statement.verdict is Verdict.DECLARED
    finally:
        handle.remove()
    assert trained(Net(), vectorized=False).statement.verdict is Verdict.CERTIFIED


def test_modules_that_mix_records_are_refused_where_records_are_protected():
    settings = {
        "task.users": 40,
        "task.records": 40,
        "cohort.kind": "everyone",
        "cohort.rounds": 1,
        "privacy.unit": "item",
        "privacy.neighbors": "add-remove",
    }
    given = {"protocol": "central_sub", "eps": 8.0, "settings": settings}
    mixing = nn.Sequential(nn.Linear(6, 3), nn.Softmax(dim=0))
    with pytest.raises(ValueError, match="got Softmax '1', which mixes the records of a batch"):
        dovetail.train(dataset(), model=mixing, **given)
    assert dovetail.train(dataset(), model=Net(), **given).statement.verdict is Verdict.CERTIFIED


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x):
        return self.layer(x - x.mean(0))


class BySize(Centred):
    def forward(self, x):
        return self.layer(x * (1 - 2 * (x.shape[0] > 10)))


class Reshaped(Centred):
    def forward(self, x):
        return self.layer(x.reshape(x.shape[0], 2, 3).flatten(1))


def weighed(outputs, labels):
    losses = nn.functional.cross_entropy(outputs, labels.long(), reduction="none")
    return losses * torch.softmax(labels.float(), 0)


def uneven(larger):
    """Twenty users with three records each; with `larger`, the last one has sixty."""
    users = np.concatenate([np.repeat(np.arange(19), 3), np.full(60 if larger else 3, 19)]).astype(np.int32)
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(140, 6)).astype(np.float32), rng.integers(0, 3, 140)
    some = slice(0, len(users))
    return Dataset(
        inputs=inputs[some],
        labels=labels[some],
        test_inputs=inputs[-20:],
        test_labels=labels[-20:],
        num_classes=3,
        users=users,
    )


@pytest.mark.parametrize("update", ["fedsgd", "fedavg"])
@pytest.mark.parametrize(("kind", "loss"), [(Centred, None), (BySize, None), (Reshaped, weighed), (Reshaped, None)])
def test_a_user_with_more_records_moves_nobody_elses_update(kind, loss, update):
    """Side by side, users are filled up to the largest, and what mixes a batch sees how far: 2.3 to 8.4 clip norms."""
    settings = {
        **SETTINGS,
        "noise": "seeded",
        "protocol.clip_norm": 1e-3,
        "protocol.noise_multiplier": 1e-6,
        "client.update": update,
    }
    flat = []
    for larger in (False, True):
        model = ours.model(kind(), vectorized=True)
        result = dovetail.train(uneven(larger), model=model, loss=loss, protocol="dp_fl", settings=settings)
        flat.append(np.concatenate([np.ravel(value) for _, value in sorted(result.parameters.items())]))
    assert np.linalg.norm(flat[0] - flat[1]) * 20 / 1e-3 < 2.001


def test_what_does_not_mix_the_records_of_a_batch_trains_side_by_side():
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    plain = nn.functional.cross_entropy

    def loss(outputs, labels):
        return plain(outputs, labels, reduction="none")

    assert [mixes_records(pytorch_only(kind(), x, y, plain), loss, x, y) for kind in (Reshaped, Centred, BySize)] == [
        False,
        True,
        True,
    ]
    assert mixes_records(pytorch_only(Reshaped(), x, y, plain), weighed, x, y)
    assert not mixes_records(nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 3)), loss, x, y)


def test_everything_is_put_back():
    module = Triggered()
    state = Snapshot(module)
    assert state.first_change() is None
    module(torch.full((1, 6), 2000.0))
    assert state.first_change() is not None
    state.restore()
    assert state.first_change() is None and not hasattr(module, "extra")
    assert module.kept == {"largest": 0.0} and not module.sum.any() and not module.recent.any()
    module.kept["largest"] = 1.0
    state.restore()
    assert module.kept == {"largest": 0.0}


def test_clients_in_any_order_and_company_have_the_same_updates():
    """One after the other on shared copies, in every order of three clients."""
    learner, _ = ours.model(Triggered(), vectorized=False).learner.inspect("cross_entropy", *probes())
    x, y, counts = clients()
    x[0] *= 1e4
    alone = [
        learner.updates(ClientUpdate(), "cross_entropy", flat(learner), x[[i]], y[[i]], counts[[i]])[0]
        for i in range(3)
    ]
    for order in itertools.permutations(range(3)):
        at = list(order)
        found = learner.updates(ClientUpdate(), "cross_entropy", flat(learner), x[at], y[at], counts[at])
        np.testing.assert_array_equal(found, np.stack([alone[i] for i in at]))
