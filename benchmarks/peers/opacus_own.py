"""Clipped sums by Opacus's ghost clipping, for `dovetail bench own`."""

import time
import warnings

import opacus
import own_modules
import own_workload
import torch
import torch.nn.functional as F  # noqa: N812
import workload


def main() -> None:
    arguments = own_workload.options(__doc__, variants=("ghost", "hooks"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.workers)
    chosen = own_workload.chosen(arguments)
    inputs, labels = map(torch.from_numpy, own_workload.data(chosen, own_workload.sizes(chosen)))
    model = own_modules.network(arguments.workload)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=len(labels))
    made = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=torch.nn.CrossEntropyLoss(reduction="sum"),
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=own_workload.CLIP,
        poisson_sampling=False,
        loss_reduction="sum",
        grad_sample_mode=arguments.method,
    )
    model, optimizer = made[0], made[1]

    def ghost() -> list[torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        made[2](model(inputs), labels).backward()
        return [parameter.grad for parameter in model.parameters()]

    def hooks() -> list[torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(inputs), labels, reduction="sum").backward()
        optimizer.clip_and_accumulate()
        return [parameter.summed_grad for parameter in model.parameters()]

    step = ghost if arguments.method == "ghost" else hooks
    seconds = []
    for _ in range(arguments.warmup + arguments.rounds):
        began = time.perf_counter()
        sums = step()
        seconds.append(time.perf_counter() - began)
    own_workload.report(
        arguments,
        engine=f"opacus {opacus.__version__}",
        seconds=seconds[arguments.warmup :],
        records=len(labels),
        peak_mb=workload.peak_rss_mb(),
        sums=[part.double().norm().item() for part in sums],
    )


if __name__ == "__main__":
    main()
