"""The demonstration: digits, every party a process, and a transcript of who saw what, from what the parties counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.events import Everyone
from dovetail.experiment.config import Config, parse, parse_override
from dovetail.parties.federation import federation
from dovetail.parties.fleet import Fleet
from dovetail.protocols import Cohort, build, find
from dovetail.statements import NotApplicable

__all__ = ["SETTINGS", "demo_config", "transcript"]

SETTINGS: dict[str, dict[str, Any]] = {
    "privunit": {"clip_norm": 4.0, "eps_local": 8.0},
    "ss_simple": {"clip_value": 1.0, "eps_local": 4.0},
    "ss_topk": {"clip_value": 1.0, "k": 65, "eps_local": 4.0},
    "split_and_mix": {"clip_norm": 4.0, "noise_multiplier": 0.3, "shufflers": 3, "mixing_error": 1e-8},
}
_STEP = {"privunit": 0.5}
_FEW_SHARES = 6


def demo_config(protocol: str, *, clients: int, overrides: Sequence[str] = ()) -> Config:
    """Logistic regression on the bundled digits, dealt to the users at random."""
    find(protocol)
    tree = {
        "diagnostics": False,
        "task": {"name": "digits", "model": "logistic", "partition": "iid", "users": clients},
        "cohort": {"kind": "everyone"},
        "client": {"update": "fedavg", "epochs": 5, "batch": 10, "learning_rate": 1.0},
        "server": {"optimizer": "sgd", "learning_rate": _STEP.get(protocol, 1.0)},
        "protocol": {"name": protocol, **SETTINGS.get(protocol, {})},
        "privacy": {"delta": 1e-5},
    }
    config = parse(tree, [parse_override(text) for text in overrides])
    try:
        cohort = Cohort(participation=Everyone(), size=clients, min_size=clients)
        settings = config.protocol_settings
        build(protocol, settings).settle(cohort, federation(config).dim)
    except NotApplicable:  # too few users to hide among: it runs, and the statement says that nothing is certified
        config.protocol["shares"] = _FEW_SHARES
    return config


def transcript(fleet: Fleet, facts: dict[str, Any]) -> list[dict[str, str]]:
    """One row per party, from what it counted."""
    task, ended = fleet.deployment.task, [one for one in facts["history"] if one["outcome"] != "void"]
    messages = task.messages()
    reports = sum(one["uploads"] for one in ended)
    rows = [
        {
            "party": f"{fleet.deployment.clients} users",
            "holds": "their own records, a signing key, a policy and a ledger each",
            "saw": f"the signed task, {len(facts['history'])} models",
            "never": "anything about other users",
        }
    ]
    for index, slots in enumerate(task.deal().slots):
        counts = fleet.counts(f"shuffler-{index}")
        rows.append(
            {
                "party": f"shuffler {index}",
                "holds": f"the users' public keys, {len(slots)} of {messages.slots} slots",
                "saw": f"{counts.get('accepted', 0)} uploads and who sent them, ciphertexts of {task.length} bytes",
                "never": "any value, or the analyzer's secret key",
            }
        )
    rows.append(
        {
            "party": "analyzer",
            "holds": "the secret key, the model, the ledger",
            "saw": f"the messages of {reports} reports in {len(ended)} rounds, permuted slot by slot",
            "never": "a user's name, address, or time of arrival",
        }
    )
    rows.append(
        {
            "party": "anybody",
            "holds": "nothing",
            "saw": f"{sum(one['outcome'] == 'released' for one in ended)} released models, the statement",
            "never": "anything else",
        }
    )
    return rows
