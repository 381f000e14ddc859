"""Clipped sums by Opacus (ghost clipping; per-example gradients from hooks) and by torch.func (vmap of grad)."""

import argparse
import warnings
from collections.abc import Callable

import batch_examples
import modules
import opacus
import torch
import torch.nn.functional as F  # noqa: N812

CHUNK = 64  # torch.func: the fastest of 1, 16, 32, 64 and all at once

Step = Callable[[], list[torch.Tensor]]


def network() -> torch.nn.Sequential:
    model = torch.nn.Sequential(*modules.layers("cnn"))
    with torch.no_grad():
        for index, (kernel, bias) in zip((0, 3, 7, 9), batch_examples.layers(), strict=True):
            if index == 7:  # torch flattens images channel by channel
                kernel = kernel.reshape(4, 4, 32, 192).transpose(2, 0, 1, 3).reshape(512, 192)
            order = (3, 2, 0, 1) if kernel.ndim == 4 else (1, 0)
            model[index].weight.copy_(torch.from_numpy(kernel.transpose(order).copy()))
            model[index].bias.copy_(torch.from_numpy(bias))
    return model


def private(mode: str, images: torch.Tensor, labels: torch.Tensor) -> Step:
    model = network()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=len(labels))
    made = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=torch.nn.CrossEntropyLoss(reduction="sum"),
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=batch_examples.CLIP,
        poisson_sampling=False,
        loss_reduction="sum",
        grad_sample_mode=mode,
    )
    model, optimizer, criterion = made[0], made[1], (made[2] if mode == "ghost" else F.cross_entropy)

    def ghost() -> list[torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        criterion(model(images), labels).backward()
        return [parameter.grad for parameter in model.parameters()]

    def hooks() -> list[torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        criterion(model(images), labels, reduction="sum").backward()
        optimizer.clip_and_accumulate()
        return [parameter.summed_grad for parameter in model.parameters()]

    return ghost if mode == "ghost" else hooks


def functional(images: torch.Tensor, labels: torch.Tensor) -> Step:
    model = network()
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (image[None],)), label[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), chunk_size=CHUNK)

    def step() -> list[torch.Tensor]:
        found = gradients(parameters, images, labels).values()
        norms = torch.stack([part.flatten(1).norm(dim=1) for part in found]).norm(dim=0)
        factor = (batch_examples.CLIP / norms).clamp(max=1.0)
        return [torch.einsum("i,i...->...", factor, part) for part in found]

    return step


def prepare(arguments: argparse.Namespace) -> tuple[str, Step]:
    images, labels = (torch.from_numpy(array) for array in batch_examples.batch())
    if arguments.method == "vmap":
        return f"torch.func {torch.__version__}", functional(images[:, None], labels)
    return f"opacus {opacus.__version__}", private(arguments.method, images[:, None], labels)


def main() -> None:
    arguments = batch_examples.options(__doc__, methods=("ghost", "hooks", "vmap"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(batch_examples.THREADS)
    batch_examples.measure(*prepare(arguments), list, arguments)


if __name__ == "__main__":
    main()
