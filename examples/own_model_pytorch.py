"""Your own model in PyTorch: users, shuffler and analyzer as separate parties on this machine.

A user is a function from the current model to an update, both flat NumPy vectors; you write that function. The analyzer
starts from any flat vector. Here both come from PyTorch: 40 users share the bundled digits, each
with its own records and its own ledger, and the two services run as processes with TLS.

    python examples/own_model_pytorch.py
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dovetail.data import resolve
from dovetail.parties.common.http_clients import IntermediaryClient
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.fleet import Fleet, lenient_policy, make_deployment
from dovetail.parties.user.client import Client
from dovetail.parties.user.participation import Train, take_part
from dovetail.statements import Statement

USERS, ROUNDS = 40, 4


# [model]
def new_model() -> nn.Module:
    """Any module whose state is its parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def flat(model: nn.Module) -> np.ndarray:
    """All parameters in one vector."""
    return parameters_to_vector(model.parameters()).detach().numpy().astype(np.float32)


def loaded(weights: np.ndarray) -> nn.Module:
    """The model with these parameters."""
    model = new_model()
    vector_to_parameters(torch.tensor(weights), model.parameters())
    return model


# [train]
def trainer(inputs: np.ndarray, labels: np.ndarray) -> Train:
    """How one user trains on its own records: plain PyTorch, with nothing about privacy."""
    images, names = torch.tensor(inputs), torch.tensor(labels, dtype=torch.long)

    def train(weights: np.ndarray) -> np.ndarray:
        model = loaded(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), names).backward()
            optimizer.step()
        return flat(model) - weights

    return train


# [task]
def task_fields() -> dict[str, Any]:
    """What everybody agrees on and the owner signs: protocol, noise, the least company, the number of rounds."""
    return {
        "name": "digits in PyTorch",
        "protocol": "privunit",
        "settings": {"clip_norm": 2.0, "eps_local": 8.0},
        "dim": len(flat(new_model())),
        "rounds": ROUNDS,
        "min_clients": USERS,
        "max_clients": USERS,
        "round_seconds": 120.0,
        "eps": None,
        "delta": 1e-5,
    }


# [run]
def run(folder: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Set up the parties, start the services, let every user take part; the last model, and what the analyzer says."""
    data = resolve("digits").load(folder=None)
    keys = [KeyPair.generate("sign") for _ in range(USERS)]
    deployment = make_deployment(folder, task_fields(), shufflers=1, enrolled=[key.public for key in keys])
    np.save(folder / "model.npy", flat(new_model()))
    policy = lenient_policy(deployment.signed)  # for a trial; a user who cares sets ceilings of its own

    def user(index: int) -> None:
        mine = slice(index, None, USERS)
        link = IntermediaryClient(deployment.service_urls[0], ca=deployment.authority)
        client = Client(folder / f"user-{index}", policy=policy, key=keys[index])
        take_part(client, [link], trainer(data.inputs[mine], data.labels[mine]))

    with Fleet(deployment) as fleet:
        fleet.start_analyzer()
        fleet.start_service(0)
        users = [threading.Thread(target=user, args=(index,)) for index in range(USERS)]
        for thread in users:
            thread.start()
        facts = fleet.wait_until_over(seconds=300)
        for thread in users:
            thread.join()
        return fleet.analyzer().model(ROUNDS), facts


# [end]
def accuracy(weights: np.ndarray) -> float:
    """On the public test records."""
    data = resolve("digits").load(folder=None)
    with torch.no_grad():
        named = loaded(weights)(torch.tensor(data.test_inputs)).argmax(dim=1).numpy()
    return float(np.mean(named == data.test_labels))


def main() -> None:
    """Train, and say what was learned and what it cost."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    torch.set_num_threads(1)  # of each user: they are many
    with tempfile.TemporaryDirectory() as folder:
        weights, facts = run(Path(folder))
    console.print(f"test accuracy {accuracy(weights):.1%} after {ROUNDS} rounds")
    console.print(str(Statement.from_json(facts["statement"])))


if __name__ == "__main__":
    main()
