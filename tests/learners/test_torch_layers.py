"""Every class of `torch.nn`: one user's record leaves all other users' updates as they are, or the layer is refused."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is no dependency: `make flower` has it")
import torch_layers  # noqa: E402 - docs/_ext

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
CASES = {**torch_layers.CASES, **torch_layers.MISUSED}
REFUSED = (
    "Dropout",
    "RReLU",
    "Fractional",
    "BatchNorm",
    "Lazy",
    "spectral_norm",
    "track_running_stats=True",
    "dropout=0",
)


@pytest.fixture(scope="module")
def page():
    rows = [line.split(" | ") for line in torch_layers.PAGE.read_text().splitlines() if line.startswith("| `")]
    return {row[0].strip("| `"): tuple(cell.strip("| ") for cell in row[1:]) for row in rows}


def test_the_page_has_every_class_and_says_what_is_no_layer(page):
    assert set(page) == {*torch_layers.layers(), *torch_layers.MISUSED}
    assert {name for name in torch_layers.layers() if torch_layers.kind_of(name) is None} == set(torch_layers.CASES)
    for name in torch_layers.layers():
        if (kind := torch_layers.kind_of(name)) is not None:
            assert page[name] == (kind, "")


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_isolated_or_refused_as_the_page_says(name, page):
    """`outcome` raises where an update changes with another user's records."""
    found = torch_layers.outcome(CASES[name])
    assert (found.users, found.records) == page[name]
    refused = any(word in name for word in REFUSED) and not name.endswith("eval")
    assert found.users.startswith("refused: ") if refused else found.users == "isolated"
    assert found.records == found.users or found.records.endswith("which mixes the records of a batch")


def test_the_check_finds_a_leak():
    """A layer that carries a sum from user to user, run without having been inspected and without being put back."""

    class Leak(torch.nn.Module):
        def forward(self, x):
            seen.append(x.detach().sum())
            return x * (1 + torch.stack(seen).sum())

    seen = []
    case = torch_layers.Case(Leak)
    learner = torch_layers.ours.model(torch_layers.OneLayer(case), vectorized=False).learner
    with pytest.raises(torch_layers.LeakError):
        torch_layers.check(learner, torch_layers.np.random.default_rng(0))
