"""The demonstration: every party a process, and a transcript of who saw what, from what the parties counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.events import Everyone
from dovetail.experiment.config import Config, parse, parse_override
from dovetail.parties.common.task import TrainingTask
from dovetail.parties.federation import load_federation
from dovetail.parties.fleet import Fleet
from dovetail.protocols import Cohort, build, find
from dovetail.statements import NotApplicable

__all__ = ["SETTINGS", "demo_config", "transcript"]

SETTINGS: dict[str, dict[str, Any]] = {
    "secagg": {"clip_norm": 4.0, "noise_multiplier": 0.3},
    "privunit": {"clip_norm": 4.0, "eps_local": 8.0},
    "ss_simple": {"clip_value": 1.0, "eps_local": 4.0},
    "ss_topk": {"clip_value": 1.0, "k": 65, "eps_local": 4.0},
    "split_and_mix": {"clip_norm": 4.0, "noise_multiplier": 0.3, "shufflers": 3, "mixing_error": 1e-8},
}
_STEP = {"privunit": 0.5}
_FEW_SHARES = 6
_DIM = 650  # of logistic regression on the digits


def demo_config(protocol: str, *, clients: int, overrides: Sequence[str] = ()) -> Config:
    """Logistic regression on the bundled digits, spread over the users at random, by a protocol's example settings."""
    settings = SETTINGS.get(protocol) or find(protocol).example(_DIM, {})
    tree = {
        "diagnostics": False,
        "task": {"name": "digits", "model": "logistic", "partition": "iid", "users": clients},
        "cohort": {"kind": "everyone"},
        "client": {"update": "fedavg", "epochs": 5, "batch": 10, "learning_rate": 1.0},
        "server": {"optimizer": "sgd", "learning_rate": _STEP.get(protocol, 1.0)},
        "protocol": {"name": protocol, **settings},
        "privacy": {"delta": 1e-5},
    }
    config = parse(tree, [parse_override(text) for text in overrides])
    try:
        cohort = Cohort(participation=Everyone(), size=clients, min_size=clients)
        settings = config.protocol_settings
        build(protocol, settings).settle(cohort, load_federation(config).dim)
    except NotApplicable:  # too few users to hide among: it runs, and the statement says that nothing is certified
        config.protocol["shares"] = _FEW_SHARES
    return config


def transcript(fleet: Fleet, facts: dict[str, Any]) -> list[dict[str, str]]:
    """One row per party: what it holds, what it saw by its own counts, and what it never sees.

    Arguments:
        fleet: its services, which are asked for their counts.
        facts: what the analyzer says of the training.
    """
    task = fleet.deployment.task
    ended = [row for row in facts["history"] if row["outcome"] != "void"]
    reports = sum(row["uploads"] for row in ended)
    rows = [
        {
            "party": f"{fleet.deployment.clients} users",
            "holds": "their own records, a signing key, a policy and a ledger each",
            "saw": f"the signed task, {len(facts['history'])} models",
            "never": "anything about other users",
        }
    ]
    accepted = [fleet.counts(name).get("accepted", 0) for name in fleet.deployment.services]
    rows += _rows_of_aggregators(task, accepted) if task.aggregators else _rows_of_shufflers(task, accepted)
    if task.has_proofs:
        refused = fleet.refused_users()
        users = {row["user"] for row in refused}
        rows.append(
            {
                "party": "who enrols users",
                "holds": "the users' public keys and who they are",
                "saw": f"{len(refused)} reports refused, of {len(users)} users: {', '.join(sorted(users)) or 'nobody'}",
                "never": "anything about other users, or what the refused ones shared",
            }
        )
    seen = "permuted slot by slot" if task.shufflers else "added up"
    what = "the messages of" if task.shufflers else "one sum per round, of"
    rows.append(
        {
            "party": "analyzer",
            "holds": "the secret key, the model, the ledger",
            "saw": f"{what} {reports} reports in {len(ended)} rounds, {seen}",
            "never": "a user's name, address, or time of arrival"
            + ("" if task.shufflers else ", or anything that one user sent"),
        }
    )
    rows.append(
        {
            "party": "anybody",
            "holds": "nothing",
            "saw": f"{sum(row['outcome'] == 'released' for row in ended)} released models, the statement",
            "never": "anything else",
        }
    )
    return rows


def _rows_of_shufflers(task: TrainingTask, accepted: Sequence[int]) -> list[dict[str, str]]:
    messages = task.messages()
    return [
        {
            "party": f"shuffler {index}",
            "holds": f"the users' public keys, {len(slots)} of {messages.slots} slots",
            "saw": f"{accepted[index]} uploads and who sent them, ciphertexts of {task.message_bytes} bytes",
            "never": "any value, or the analyzer's secret key",
        }
        for index, slots in enumerate(task.assign_slots().slots)
    ]


def _rows_of_aggregators(task: TrainingTask, accepted: Sequence[int]) -> list[dict[str, str]]:
    sharing = task.sharing()
    return [
        {
            "party": f"aggregator {index}",
            "holds": "the users' public keys",
            "saw": f"{accepted[index]} uploads and who sent them, each a random share ({sharing.size(index):,} bytes)",
            "never": "any value, or the analyzer's secret key",
        }
        for index in range(len(task.aggregators))
    ]
