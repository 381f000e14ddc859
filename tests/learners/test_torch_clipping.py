"""Clipped sums of PyTorch modules: those of gradients in float64, one by one, and never longer than the clip norm."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is no dependency: `make flower` has it")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.nn.utils import parametrizations  # noqa: E402

from dovetail.learners import _torch, _torch_clipping, _torch_ways  # noqa: E402
from dovetail.learners import torch as ours  # noqa: E402
from dovetail.learners._torch_clipping import FormedGradient, KernelGradient, TableGradient, add_clipped  # noqa: E402
from dovetail.learners._torch_uses import ParameterPart, find_uses  # noqa: E402

pytestmark = pytest.mark.torch

VOCABULARY = 9


class Direct(nn.Module):
    """Parameters that are used without their layer, twice, transposed, in slices, and where there is no rule."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(6, 8)
        self.last = nn.Parameter(0.3 * torch.randn(8, 3))
        self.scale, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x):
        y = self.first(x) - F.linear(x, self.first.weight.flip(0)) + self.shift[1]
        y = torch.tanh(y) * self.scale + x[:, :4] @ self.second.weight[:, :4].T + self.second(x)
        return y @ self.last - self.shift[0, :3]


class Sequence(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5, padding_idx=0)
        self.cell = kind(5, 4, batch_first=True, **settings)
        self.head = nn.Linear(8 if settings.get("bidirectional") else 4, 3)

    def forward(self, tokens):
        return self.head(self.cell(self.embedding(tokens.long()))[0][:, -1])


class Tied(nn.Module):
    """A table that is looked up, and multiplied by."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 5), nn.Linear(5, VOCABULARY)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.table(tokens.long())).mean(1))


class Attending(nn.Module):
    """Attention of a sequence to itself, in layers of PyTorch's, and to another one."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.position, self.other = nn.Parameter(torch.randn(5, 8)), nn.Linear(8, 8)
        self.cross, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        y = self.encoder(x + self.position)
        return self.head(self.cross(y, self.other(x), self.other(x))[0].mean(1))


def flat(*layers):
    return nn.Sequential(*layers, nn.Flatten())


def images():
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, (3, 1), groups=2, padding="same"), nn.InstanceNorm2d(6, affine=True), nn.Flatten()),
        *(nn.LayerNorm(24), nn.Linear(24, 3)),
    )


def signals():
    return nn.Sequential(
        *(nn.Conv1d(3, 4, 3, dilation=2, padding=2, padding_mode="circular"), nn.BatchNorm1d(4).eval()),
        *(nn.Conv1d(4, 4, 3), nn.PReLU(), nn.Flatten(), nn.Linear(24, 3)),
    )


TOKENS = (7,)
MODULES = {  # how to build it, the shape of a record, which parameters every client gets its own view of
    "dense": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (6,), set()),
    "images": (images, (3, 8, 8), set()),
    "signals": (signals, (3, 8), {"3.weight"}),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(54, 3)), (1, 4, 4, 4), set()),
    "direct": (Direct, (6,), {"first.weight"}),
    "lstm": (lambda: Sequence(nn.LSTM, num_layers=2, bidirectional=True), TOKENS, set()),
    "gru": (lambda: Sequence(nn.GRU, num_layers=2), TOKENS, set()),
    "rnn": (lambda: Sequence(nn.RNN, bias=False, nonlinearity="relu"), TOKENS, set()),
    "tied": (Tied, TOKENS, set()),
    "attention": (Attending, (5, 8), set()),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 3)),
        (6,),
        {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"},
    ),
}


def records(shape, clients, each, seed=0):
    rng = np.random.default_rng(seed)
    if shape == TOKENS:
        inputs = rng.integers(VOCABULARY, size=(clients, each, *shape)).astype(np.float32)
    else:
        inputs = rng.normal(size=(clients, each, *shape)).astype(np.float32)
    return inputs, rng.integers(0, 3, (clients, each))


def one_by_one(module, inputs, labels, counts):
    """The gradient of each client's mean loss, in float64."""
    own = copy.deepcopy(module).double()
    weights = [value for _, value in _torch.trained_parameters(own)]
    rows = []
    for x, y, count in zip(inputs, labels, counts, strict=True):
        losses = F.cross_entropy(own(torch.from_numpy(x[:count]).double()), torch.from_numpy(y[:count]))
        slopes = torch.autograd.grad(losses, weights, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([slope.reshape(-1) for slope in slopes]).numpy())
    return np.stack(rows)


def clipped(gradients, clip_norm):
    norms = np.linalg.norm(gradients, axis=1)
    return (gradients * np.minimum(1, clip_norm / np.maximum(norms, 1e-300))[:, None]).sum(axis=0)


def learner_of(module, shape):
    """The learner of a module as it trains, and its flat vector of parameters."""
    learner, declared = ours.model(module, device="cpu").learner.inspect(
        "cross_entropy", *(array[:, 0] for array in records(shape, 4, 1, seed=5))
    )
    weights = [value.detach().numpy().ravel() for _, value in learner.trained_parameters]
    return learner, np.concatenate(weights), declared


def way_of(learner):
    (sums,) = learner._sums.values()
    return {chosen.way for chosen in sums._chosen.values()}


@pytest.mark.parametrize("name", MODULES)
def test_a_clipped_sum_is_that_of_gradients_one_by_one(name):
    build, shape, mapped = MODULES[name]
    torch.manual_seed(0)
    module = build()
    learner, start, _ = learner_of(module, shape)
    for each in (1, 3):
        inputs, labels = records(shape, 7, each)
        counts = np.array([each, 1, each, 1, each, each, 1], np.int32)
        expected = one_by_one(module, inputs, labels, counts)
        clip_norm = float(np.median(np.linalg.norm(expected, axis=1)))
        found = learner.clipped_sum("cross_entropy", start, inputs, labels, counts, clip_norm=clip_norm)
        np.testing.assert_allclose(found, clipped(expected, clip_norm), atol=2e-5 * clip_norm)
        nobody = learner.clipped_sum("cross_entropy", start, inputs, labels, 0 * counts, clip_norm=clip_norm)
        assert not nobody.any()
    (sums,) = learner._sums.values()
    assert way_of(learner) == {"products"}
    assert {frozenset(chosen.uses.mapped) for chosen in sums._chosen.values()} == {frozenset(mapped)}


class Copied(torch.autograd.Function):
    """A copy of a tensor, which no function of PyTorch's in Python makes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, slope):
        return slope


class Hidden(nn.Module):
    """A use of a weight that is not seen, and adds nothing on most records."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) + torch.relu(x @ Copied.apply(self.layer.weight).T - 1e4)


def test_a_use_that_is_not_seen_is_found_in_the_graph():
    torch.manual_seed(0)
    module = Hidden()
    weights = {name: value.detach() for name, value in module.named_parameters()}
    x, y = (torch.from_numpy(array) for array in records((6,), 2, 1))
    assert find_uses(module, _torch.LOSSES["cross_entropy"], weights, x, y).mapped == {"layer.weight"}
    learner, start, _ = learner_of(module, (6,))
    inputs, labels = records((6,), 5, 1)
    counts = np.ones(5, np.int32)
    for size in (1, 1e5):
        expected = one_by_one(module, size * inputs, labels, counts)
        found = learner.clipped_sum("cross_entropy", start, size * inputs, labels, counts, clip_norm=0.5)
        np.testing.assert_allclose(found, clipped(expected, 0.5), atol=1e-5)


class Counting(nn.Module):
    """What cannot be run side by side."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) * float(x.sum() * 0 + 1)


def test_what_cannot_be_mapped_trains_alone():
    module = Counting()
    learner, start, declared = learner_of(module, (6,))
    inputs, labels = records((6,), 7, 3)
    counts = np.array([3, 1, 0, 2, 3, 3, 1], np.int32)
    expected = one_by_one(module, inputs, labels, np.maximum(counts, 1)) * (counts > 0)[:, None]
    found = learner.clipped_sum("cross_entropy", start, inputs, labels, counts, clip_norm=0.5)
    np.testing.assert_allclose(found, clipped(expected, 0.5), atol=1e-5)
    assert way_of(learner) == {"alone"} and declared


class Changing(nn.Module):
    """Does something else once it is told to."""

    others = False

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        y = (self.other if Changing.others else self.layer)(x)
        return y + Fixed.apply(y)


class Fixed(torch.autograd.Function):
    """Zeros; with a function of its own a module is not traced."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 0 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, slope):
        return 0 * slope


def test_a_module_that_changes_its_mind_trains_alone_from_then_on(monkeypatch):
    module = Changing()
    learner, start, _ = learner_of(module, (6,))
    inputs, labels = records((6,), 5, 1)
    counts = np.ones(5, np.int32)
    for others in (False, True):
        monkeypatch.setattr(Changing, "others", others)
        found = learner.clipped_sum("cross_entropy", start, inputs, labels, counts, clip_norm=0.5)
        np.testing.assert_allclose(found, clipped(one_by_one(module, inputs, labels, counts), 0.5), atol=1e-5)
        assert way_of(learner) == ({"alone"} if others else {"products"})


@pytest.mark.parametrize("name", ["dense", "images", "lstm"])
def test_records_that_are_no_numbers_add_zero_and_leave_the_others_alone(name):
    build, shape, _ = MODULES[name]
    torch.manual_seed(0)
    learner, start, _ = learner_of(build(), shape)
    start = start.copy()
    for each in (1, 2):
        inputs, labels = records(shape, 6, each)
        counts = np.full(6, each, np.int32)
        without = learner.clipped_sum("cross_entropy", start, inputs[:4], labels[:4], counts[:4], clip_norm=0.1)
        if shape == TOKENS:
            continue
        for value in (np.nan, np.inf, -np.inf, 3e38):
            inputs[4:, 0] = value
            found = learner.clipped_sum("cross_entropy", start, inputs, labels, counts, clip_norm=0.1)
            assert np.isfinite(found).all()
            added = np.linalg.norm((found - without).astype(np.float64))
            assert added <= 0.2 + 1e-6 and (value == 3e38 or added < 1e-6)
    broken = start.copy()
    broken[0] = np.nan
    assert not learner.clipped_sum("cross_entropy", broken, inputs[:4], labels[:4], counts[:4], clip_norm=0.1).any()


def part_of(gradient):
    values = gradient.form().values if not isinstance(gradient, FormedGradient) else gradient.values
    shape = values.shape[1:]
    return ParameterPart("w", shape, torch.empty(shape, device="meta").stride(), 0)


def added(gradient, clip_norm, own=None):
    """What clients add, float32."""
    part = part_of(gradient)
    totals = {"w": torch.zeros(int(np.prod(part.shape)))}
    count = len(gradient.left) if isinstance(gradient, KernelGradient) else len(gradient.values)
    count = gradient.clients if isinstance(gradient, TableGradient) else count
    add_clipped(totals, [(part, gradient)], clip_norm, torch.ones(count) if own is None else own)
    return totals["w"].double().numpy()


def cancelling(rng, positions, rows, columns, size, rest):
    """KernelGradient that cancel but for `rest` of their length."""
    left, right = rng.normal(size=(1, positions, columns)), rng.normal(size=(1, positions, rows))
    left[:, 1::2] = left[:, : positions // 2 * 2 : 2] * (1 + rest * rng.normal(size=left[:, 1::2].shape))
    right[:, 1::2] = -right[:, : positions // 2 * 2 : 2]
    return KernelGradient(*(torch.from_numpy((side * size).astype(np.float32)) for side in (left, right)))


@pytest.mark.parametrize("rest", [0.0, 1e-7, 1e-4, 0.03, 0.1, 1.0])
@pytest.mark.parametrize("size", [1e-18, 1e-6, 1.0, 1e8])
def test_what_a_client_adds_is_never_longer_than_the_clip_norm(rest, size):
    """Whatever cancels: against float64, one client at a time, and side by side with another."""
    rng = np.random.default_rng(0)
    for positions in (2, 5, 16, 40):
        given = cancelling(rng, positions, 30, 50, size, rest)
        left, right = (side[0].double().numpy() for side in given)
        exact = right.T @ left
        length = np.linalg.norm(exact)
        spread = (2 * positions + 6) * 2.0**-24 * (np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)).sum()
        for clip_norm in (float(np.float32(length)) / 3 or 1e-9, length + 1e-9, 1e6):
            for gradient in (given, given.form()):
                found = added(gradient, clip_norm)
                assert np.linalg.norm(found) <= clip_norm
                wanted = exact * min(1, clip_norm / max(length, 1e-300))
                shortened = min(1.0, clip_norm / max(length, 1e-300)) * spread
                assert np.linalg.norm(found - wanted.ravel()) <= 2 * shortened + 1e-6 * np.linalg.norm(wanted) + 1e-44


def test_lengths_of_huge_and_tiny_gradients():
    """A squared norm beyond float32 counts as zero, and one below it is no zero."""
    for scale, expected in ((1e-30, 1.0), (1e-12, 1.0), (1e18, 1e-18), (1e20, 0.0), (np.nan, 0.0), (np.inf, 0.0)):
        values = torch.full((1, 1, 4), 0.5) * scale
        for gradient in (
            FormedGradient(values),
            KernelGradient(values, torch.ones(1, 1, 1)),
            TableGradient(values[0], torch.zeros(1, dtype=torch.long), torch.tensor([1]), 1, torch.Size([3, 4])),
        ):
            length = np.linalg.norm(added(gradient, 1.0))
            assert length <= 1.0
            assert length == pytest.approx(scale * expected if expected else 0.0, rel=1e-5)


def test_a_client_that_cancels_among_others_moves_no_one_else():
    rng = np.random.default_rng(1)
    calm = KernelGradient(*(torch.from_numpy(rng.normal(size=(3, 4, n)).astype(np.float32)) for n in (30, 20)))
    wild = cancelling(rng, 4, 20, 30, 1e9, 1e-6)
    both = KernelGradient(*(torch.cat([one, other]) for one, other in zip(calm, wild, strict=True)))
    difference = added(both, 1.0) - added(calm, 1.0)
    assert np.linalg.norm(difference) <= 1.0 + 1e-6
    np.testing.assert_allclose(difference, added(wild, 1.0), atol=1e-6)


@pytest.mark.soak
def test_fuzzed_products_against_float64():
    rng = np.random.default_rng(2)
    for _ in range(2000):
        positions, rows, columns = (int(n) for n in rng.integers(1, 40, 3))
        size, rest = 10.0 ** rng.uniform(-15, 12), 10.0 ** rng.uniform(-9, 0)
        given = cancelling(rng, positions, rows, columns, size, rest)
        length = np.linalg.norm(given.form().values.double().numpy())
        clip_norm = float(length * 10.0 ** rng.uniform(-3, 1)) or 1e-9
        assert np.linalg.norm(added(given, clip_norm)) <= clip_norm


def test_chunks_and_threads_add_up_to_the_same(monkeypatch):
    build, shape, _ = MODULES["images"]
    torch.manual_seed(0)
    learner, start, _ = learner_of(build(), shape)
    inputs, labels = records(shape, 30, 2)
    counts = np.full(30, 2, np.int32)
    whole = learner.clipped_sum("cross_entropy", start, inputs, labels, counts, clip_norm=0.3)
    monkeypatch.setattr(_torch_ways, "_CHUNK_BYTES", 1)
    found = learner.clipped_sum("cross_entropy", start, inputs, labels, counts, clip_norm=0.3)
    np.testing.assert_allclose(found, whole, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "said"),
    [(Direct, "by products; formed for first.weight"), (Counting, "each formed, one client after the other")],
)
def test_the_way_is_told(build, said):
    learner, start, _ = learner_of(build(), (6,))
    assert learner.describe_clipping("cross_entropy", start, 1) == [f"gradients of {build.__name__}: {said}"]
    inputs, labels = records((6,), 3, 1)
    learner.clipped_sum("cross_entropy", start, inputs, labels, np.ones(3, np.int32), clip_norm=1.0)
    (sums,) = learner._sums.values()
    assert len(sums._chosen) == 1


def test_products_are_formed_where_that_is_shorter():
    assert KernelGradient(torch.zeros(1, 4, 784), torch.zeros(1, 4, 256)).is_shorter
    assert not KernelGradient(torch.zeros(1, 576, 25), torch.zeros(1, 576, 16)).is_shorter
    assert _torch_clipping._CANCELLED == 16
