"""Copies of a module compute what the module computes, bit by bit, however they are arranged."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is no dependency: `make flower` has it")
from torch import nn  # noqa: E402

from dovetail.learners._torch import Copy, trained_parameters  # noqa: E402

pytestmark = pytest.mark.torch


class Own(nn.Sequential):
    """Something else than its layers one after the other."""

    def forward(self, x):
        return super().forward(x) + 1


RELU = nn.ReLU()
MODULES = {
    "plain": lambda: [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 3)],
    "overlapping": lambda: [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(3, stride=1, padding=1), nn.Flatten()],
    "ceil": lambda: [nn.Conv2d(1, 4, 4), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), nn.Flatten()],
    "dilated": lambda: [nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2, dilation=2), nn.Flatten()],
    "twice": lambda: [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(2), nn.Flatten()],
    "in place": lambda: [nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()],
    "shared": lambda: [nn.Conv2d(1, 4, 3), RELU, nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), RELU, nn.MaxPool2d(2)],
    "nested": lambda: [nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), nn.Sequential(nn.MaxPool2d(2)), nn.Flatten()],
    "reflecting": lambda: [nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.GELU(), nn.GroupNorm(2, 4)],
    "grouped": lambda: [nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, dilation=2)],
    "own": lambda: [Own(nn.Conv2d(1, 4, 3), nn.ReLU()), nn.MaxPool2d(2), nn.Flatten()],
    "empty": lambda: [nn.Sequential(), nn.Conv2d(1, 4, 3)],
}


def slopes(outputs, weights):
    return torch.autograd.grad((outputs**2).sum() + outputs.sum(), weights)


@pytest.mark.parametrize("name", MODULES)
def test_outputs_and_gradients_are_the_modules(name):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Unflatten(1, (1, 14)), *MODULES[name]())
    own = Copy(module)
    assert own.outputs is not own.module
    like = copy.deepcopy(module).to(memory_format=torch.channels_last)
    weights = [value for _, value in trained_parameters(like)]
    for _ in range(3):
        x = torch.randn(7, 14, 14) - 0.5  # in many windows nothing is above zero
        found, expected = own.outputs(x), like(x)
        assert torch.equal(found, expected)
        for one, other in zip(slopes(found, own.weights), slopes(expected, weights), strict=True):
            assert torch.equal(one, other) and other.any()


def test_what_may_be_more_than_its_layers_runs_as_it_is():
    seen = []
    hooked = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    hooked[1].register_forward_hook(lambda module, given, found: seen.append(found.shape))
    hooked = Copy(hooked)
    assert hooked.outputs is hooked.module
    hooked.outputs(torch.randn(2, 1, 6, 6))
    assert seen == [(2, 4, 4, 4)]
    for module in (Own(nn.Conv2d(1, 4, 3)), nn.Conv2d(1, 4, 3)):
        plain = Copy(module)
        assert plain.outputs is plain.module
    indices = Copy(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True)))
    assert len(indices.outputs(torch.randn(2, 1, 6, 6))) == 2


def test_a_copy_leaves_the_module_alone():
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    before = copy.deepcopy(module.state_dict())
    own = Copy(module)
    with torch.no_grad():
        own.weights[0].add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [type(layer) for layer in module] == [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    x = torch.randn(2, 1, 6, 6)
    assert torch.equal(own.outputs(x), own.module(x)) and not torch.equal(own.outputs(x), module(x))
