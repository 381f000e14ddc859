"""The workloads on Dovetail's engine with modules of PyTorch: the same command line and result line as the peers."""

import dovetail_clients
import modules
import torch
import workload

from dovetail.learners import torch as learner


def main() -> None:
    arguments = workload.options(__doc__, workloads=workload.SIZES)
    name = arguments.workload
    torch.manual_seed(workload.SEED)
    first = torch.nn.Flatten() if name == "logistic" else torch.nn.Unflatten(1, (1, 28))
    module = modules.check_parameters(name, torch.nn.Sequential(first, *modules.layers(name)))
    built = dovetail_clients.engine(
        name,
        count=arguments.clients,
        samples=arguments.samples,
        batch=arguments.batch,
        model=learner.model(module, device="cpu", processes=True),  # as in a run of more than a few rounds
    )
    dovetail_clients.measure(built, arguments, name="dovetail, torch learner", workers=torch.get_num_threads())


if __name__ == "__main__":
    main()
