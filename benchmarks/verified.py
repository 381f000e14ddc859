"""Verified sums: what proofs of norm cost per user, and what hostile users do without and with them.

Costs, by dimension: bytes of a user's upload, beside the same vector shared in the same field without proof and in
integers modulo 2^b as unverified tasks share it; milliseconds of a user and of both aggregators, one report at a time,
the best of several turns. Robustness: logistic regression on digits or MNIST, or mnist-untrusted's model, with users'
updates shared between two aggregators who add the noise, all as deployed but for network and files. Hostile users among
them send random shares, a thousand times their update, its opposite, or one that a target class is to gain from: as
long as they like where nobody checks, and as long as the clip norm where proofs are asked for.
"""

import argparse
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.experiment.config import parse_override, read
from dovetail.mechanisms import ExactSampler
from dovetail.parties.common.sharing import VerifiedSharing, sharing_of
from dovetail.parties.common.task import cohort_of
from dovetail.parties.demo import demo_config
from dovetail.parties.federation import load_federation
from dovetail.parties.user.hostile import make_lying
from dovetail.protocols import build

DIMS = (6_010, 100_000, 1_000_000)
TARGET = 0  # the class that targeted updates push
ATTACKS = ("random shares", "scaled", "sign-flipped", "targeted")
SETTINGS = {"clip_norm": 1.0, "noise": "aggregators", "noise_multiplier": 2.0}


def best(times: int, call: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of the fastest of several calls, and what it gave."""
    fastest = float("inf")
    result = None
    for _ in range(times):
        since = time.perf_counter()
        result = call()
        fastest = min(fastest, time.perf_counter() - since)
    return 1e3 * fastest, result


def shared_forms(dim: int, users: int, settings: dict[str, Any]) -> list[Any]:
    """Contribution and sharing of a task, without proofs and with them."""
    cohort = cohort_of(users, users, 0, aggregators=2)
    forms = []
    for verified in (False, True):
        protocol = build("secagg", {**settings, "verified": verified}).settle(cohort, dim)
        contribution = protocol.contribution(cohort, dim)
        forms.append((protocol, contribution, sharing_of(contribution, 2)))
    return forms


def cost(dim: int, *, users: int = 1000, times: int = 3) -> dict[str, Any]:
    """Bytes and milliseconds per user."""
    (_, plain, plainly), (_, proven, sharing) = shared_forms(dim, users, SETTINGS)
    update = np.random.default_rng(0).standard_normal(dim)
    sampler = ExactSampler()
    nonce = secrets.token_bytes(16)
    drawn = proven.draw(update, sampler=sampler)
    residues = plain.draw(update, sampler=sampler)
    splitting, contents = best(times, lambda: sharing.shard(drawn, nonce=nonce))
    plain_splitting, _ = best(times, lambda: plainly.shard(residues, nonce=nonce))
    key = secrets.token_bytes(32)
    queried, milliseconds = [], []
    for index, content in enumerate(contents):

        def verify(index: int = index, content: bytes = content) -> Any:
            sharing.check(content, index)
            answers = sharing.proof.query(key, index, [sharing.report_to_verify(content, nonce)])
            sharing.add(sharing.empty_sum(), content, index)
            return answers[0]

        took, answer = best(times, verify)
        milliseconds.append(took)
        queried.append(answer)
    deciding, (message,) = best(times, lambda: sharing.proof.decide([[answer.verifier for answer in queried]]))
    if message is None:
        raise AssertionError("expected an honest report to be accepted, got it refused")
    field = 8 * dim + 8 + 8 + 32  # as one packed share and one seed
    return {
        "dim": dim,
        "bytes_verified": sum(map(len, contents)),
        "bytes_in_the_field": field,
        "ratio": sum(map(len, contents)) / field,
        "bytes_unverified": plainly.size(0) + plainly.size(1),
        "bytes_between_aggregators": 2 * (sharing.proof.verifier_size + 32),
        "client_ms": splitting,
        "client_ms_unverified": plain_splitting,
        "leader_ms": milliseconds[0] + deciding,
        "helper_ms": milliseconds[1] + deciding,
    }


def hostile_integers(attack: str, update: np.ndarray, target: np.ndarray, scale: float) -> np.ndarray | None:
    """What a hostile user shares where nobody checks; None: random numbers."""
    if attack == "random shares":
        return None
    vector = {"scaled": 1000 * update, "sign-flipped": -100 * update, "targeted": 100 * target}[attack]
    return np.rint(vector * scale).astype(np.int64)


def within_the_norm(attack: str, update: np.ndarray, target: np.ndarray, clip: float) -> np.ndarray:
    """The worst that the same attacker can prove: as long as the clip norm."""
    chosen = target if attack == "targeted" else -update
    return chosen * clip / max(np.linalg.norm(chosen), 1e-12)


class Rounds:
    """Rounds of a task, with the last users hostile."""

    def __init__(self, *, task: str, users: int, rounds: int, noise: float) -> None:
        overrides = ["protocol.noise=aggregators", f"protocol.noise_multiplier={noise}"]
        if task == "mnist-untrusted":
            config = read(task, [parse_override(text) for text in overrides])
        else:
            config = demo_config("secagg", clients=users, overrides=[f"task.name={task}", *overrides])
        self._learned, self._users, self._rounds = load_federation(config), users, rounds
        settings = {key: value for key, value in config.protocol.items() if key != "name"}
        self._plain, self._proven = shared_forms(self._learned.dim, users, settings)
        self._learning = self._learned.learning()
        self._trains = [self._learned.train(user) for user in range(users)]
        self._sampler = ExactSampler()
        self._target = self._towards_target()

    def _towards_target(self) -> np.ndarray:
        """An update that raises the target class's bias and lowers all others'."""
        update = np.full(self._learned.dim, 0.0)
        classes = self._learned.dataset.num_classes
        update[-classes:] = -1.0
        update[len(update) - classes + TARGET] = 1.0
        return update / np.linalg.norm(update)

    def accuracy(self, attack: str | None, hostile: int, *, verified: bool, within: bool = False) -> dict[str, Any]:
        """Test accuracy after all rounds, and how many reports were refused of how many hostile ones."""
        protocol, shared, sharing = self._proven if verified else self._plain
        server = self._learning.server.for_rounds(self._rounds)
        model = jnp.asarray(self._learning.initial, jnp.float32)
        refused = 0
        state = server.init(model)
        for _ in range(self._rounds):
            totals, counted = [sharing.empty_sum(), sharing.empty_sum()], 0
            key = secrets.token_bytes(32)
            for user in range(self._users):
                update = np.asarray(self._trains[user](np.asarray(model)), np.float64)
                nonce = secrets.token_bytes(16)
                unruly = attack is not None and user >= self._users - hostile
                contents = self._contents(protocol, shared, sharing, update, nonce, attack if unruly else None, within)
                if isinstance(sharing, VerifiedSharing) and not is_accepted(sharing, contents, key, nonce):
                    refused += 1
                    continue
                counted += 1
                for index, content in enumerate(contents):
                    sharing.add(totals[index], content, index)
            model, state = server.step(model, state, self._estimate(protocol, shared, sharing, totals, counted))
        published = np.asarray(server.model_to_publish(model, state))
        return {"accuracy": float(self._learning.evaluate(published)), "refused": refused}

    def _contents(self, protocol, shared, sharing, update, nonce, attack, within):  # type: ignore[no-untyped-def]
        if attack is None:
            return sharing.shard(shared.draw(update, sampler=self._sampler), nonce=nonce)
        clip = protocol.clip_norm
        dim = len(update)
        if within:
            chosen = within_the_norm(attack, update, self._target, clip)
            return sharing.shard(shared.draw(chosen, sampler=self._sampler), nonce=nonce)
        integers = hostile_integers(attack, update, self._target, protocol.scale)
        if isinstance(sharing, VerifiedSharing):
            if integers is None:
                integers = np.frombuffer(secrets.token_bytes(8 * dim), np.int64) >> 1
            liar = sharing_of(shared, 2)
            liar.proof = make_lying(sharing.proof, claimed=sharing.proof.layout.squared)
            return liar.shard(integers, nonce=nonce)
        if integers is None:
            integers = np.frombuffer(secrets.token_bytes(8 * dim), np.int64)
        return sharing.shard((integers & (2**shared.bits - 1)).astype(np.uint32), nonce=nonce)

    def _estimate(self, protocol, shared, sharing, totals, counted):  # type: ignore[no-untyped-def]
        encoded = [sharing.encode_sum(total, shared.noise(sampler=self._sampler)) for total in totals]
        leaves = [sharing.read_sum(data) for data in encoded]
        added = [a + b for a, b in zip(*leaves, strict=True)]
        tally = shared.tally(sharing.unshard(added), counted)
        estimate, _ = protocol.estimate(tally, self._users, protocol.init(shared.length), key=jax.random.key(0))
        return estimate


def is_accepted(sharing: VerifiedSharing, contents: list[bytes], key: bytes, nonce: bytes) -> bool:
    """Whether both aggregators accept a report."""
    queried = [
        sharing.proof.query(key, index, [sharing.report_to_verify(content, nonce)])[0]
        for index, content in enumerate(contents)
    ]
    (message,) = sharing.proof.decide([[answer.verifier for answer in queried]])
    return message is not None and all(answer.seeds == message for answer in queried)


def robustness(*, task: str, users: int, rounds: int, noise: float) -> list[dict[str, Any]]:
    """A row for every attack and share of hostile users."""
    running = Rounds(task=task, users=users, rounds=rounds, noise=noise)
    rows = [{"attack": "none", "hostile": 0, "unverified": running.accuracy(None, 0, verified=False)["accuracy"]}]
    rows[0]["verified"] = running.accuracy(None, 0, verified=True)["accuracy"]
    for attack in ATTACKS:
        for hostile in (max(1, users // 100), users // 10):
            without = running.accuracy(attack, hostile, verified=False)
            caught = running.accuracy(attack, hostile, verified=True)
            inside = running.accuracy(attack, hostile, verified=True, within=True)
            rows.append(
                {
                    "attack": attack,
                    "hostile": hostile,
                    "unverified": without["accuracy"],
                    "verified": caught["accuracy"],
                    "refused": caught["refused"],
                    "within_the_norm": inside["accuracy"],
                }
            )
            Console(stderr=True).print(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--task", default="digits", help="digits, mnist, or mnist-untrusted: that preset's features, model and steps"
    )
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--skip-costs", action="store_true")
    parser.add_argument("--skip-robustness", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    if not chosen.skip_costs:
        results["costs"] = costs = [cost(dim) for dim in DIMS]
        table = Table(title="per user")
        for name in costs[0]:
            table.add_column(name)
        for row in costs:
            table.add_row(*(f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" for value in row.values()))
        Console(width=220).print(table)
    if not chosen.skip_robustness:
        rows = robustness(task=chosen.task, users=chosen.users, rounds=chosen.rounds, noise=chosen.noise)
        results["robustness"] = rows
        table = Table(title=f"accuracy, {chosen.task}, {chosen.users} users, {chosen.rounds} rounds")
        names = ("attack", "hostile", "unverified", "verified", "refused", "within_the_norm")
        for name in names:
            table.add_column(name)
        for row in rows:
            table.add_row(*(f"{row[n]:.3f}" if isinstance(row.get(n), float) else str(row.get(n, "")) for n in names))
        Console(width=160).print(table)
    if chosen.out:
        chosen.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
