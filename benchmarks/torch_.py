"""Modules of PyTorch on one machine: seconds per round for Dovetail's torch learner, pfl and Flower, in one run.

The rounds of `dovetail bench clients`: 10 clients x 600 samples of the CNN (113,674 parameters), and 1000 clients x 60
samples of one linear layer (7,850), both with one local epoch of SGD in batches of 10, clip, noise, average. All
engines train the same module, two workers each. The environment needs PyTorch; the peers have environments of their
own. Engines take turns, twice, and each one's faster turn counts (the median of its rounds).

The file is not called torch.py: scripts in this folder would import it in place of PyTorch.
"""

import argparse
import importlib.util

import clients
from rich.console import Console

PEERS = {
    "cnn": (("pfl", {"rounds": 10, "warmup": 1}), ("flower", {"rounds": 10, "warmup": 1})),
    "logistic": (("pfl", {"rounds": 3, "warmup": 1}),),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--workloads", nargs="+", choices=PEERS, default=list(PEERS))
    arguments = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("expected PyTorch in this environment: pip install torch")
    chosen = {name: PEERS[name] for name in arguments.workloads}
    results = clients.rows(Console(stderr=True), chosen, script="dovetail_torch.py")
    clients.show("torch", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
