"""Everything that the parties of the example have before they meet, for a trial on one machine.

On a real fleet every party makes its own keys (`dovetail keys`) and hands out the public halves; the owner of the task
writes and signs it; and everybody who runs a node writes the node's policy, with the ids of keys that it has learned of
in some way of its own, and ceilings that it is happy with.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import numpy as np
from flower_mnist import task as example
from torch.nn.utils import parameters_to_vector

from dovetail.parties.common.certificates import make_authority, make_certificate
from dovetail.parties.common.keys import KeyPair, KeyRing
from dovetail.parties.common.policy import Policy
from dovetail.parties.common.task import TrainingTask, sign

HOST = "127.0.0.1"


def prepare(
    folder: Path, *, dataset: str, nodes: int, least: int, rounds: int, eps_local: float, round_seconds: float
) -> str:
    """Keys, certificates, first model, signed task, policies; the id of the key that signed the task."""
    if Path(__file__).resolve().parent in folder.resolve().parents:
        raise ValueError(f"expected a folder outside of the app, which is shipped to nodes, got {str(folder)!r}")
    model = parameters_to_vector(example.model_for(example.load(dataset)).parameters()).detach().numpy()
    for name in (".", "analyzer", "shuffler", "simulation"):
        (folder / name).mkdir(mode=0o700, parents=True)
    signer = KeyRing(folder / "signer", "sign").add()
    analyzer = KeyRing(folder / "analyzer" / "keys", "seal").add()
    shuffler = KeyRing(folder / "shuffler" / "keys", "sign").add()
    make_certificate(folder, make_authority(folder), host=HOST)
    np.save(folder / "first-model.npy", model)
    task = TrainingTask(
        name=f"{dataset} on Flower",
        protocol="privunit",
        settings={"clip_norm": 2.0, "eps_local": eps_local},
        dim=len(model),
        rounds=rounds,
        min_clients=least,
        max_clients=nodes,
        round_seconds=round_seconds,
        eps=rounds * eps_local,
        delta=1e-5,
        analyzer=analyzer.public,
        shufflers=(shuffler.public,),
    )
    (folder / "task.json").write_bytes(msgspec.json.encode(sign(task, signer)))
    policy = Policy(
        signer=signer.public.key_id,
        analyzer=analyzer.public.key_id,
        min_clients=least,
        eps_round=eps_local,
        eps_task=rounds * eps_local,
        eps_lifetime=rounds * eps_local,
        delta_lifetime=1e-5,
    )
    for node in range(nodes):
        home = folder / f"node-{node}"
        home.mkdir(mode=0o700)
        KeyPair.generate("sign").save(home / "key.json")
        (home / "policy.json").write_bytes(msgspec.json.encode(policy))
    (folder / "simulation" / "policy.json").write_bytes(msgspec.json.encode(policy))
    return signer.public.key_id.hex()


def main() -> None:
    """Prepare a folder, and print the id that goes into run and policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--least", type=int, help="the fewest nodes in a round; as many as there are, if not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eps-local", type=float, default=10.0)
    parser.add_argument("--round-seconds", type=float, default=180.0)
    given = parser.parse_args()
    given.least = given.least or given.nodes
    print(prepare(**vars(given)))  # noqa: T201 - a command


if __name__ == "__main__":
    main()
