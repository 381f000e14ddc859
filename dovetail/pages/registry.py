"""A run as an entry for a public registry of deployments of differential privacy: plain data, gaps left to the owner.

The fields are those that such registries ask for: who releases what, about whom, under which model of trust, with
which parameters, by which mechanism and implementation, and why. What a run cannot know is null, and is in `to_fill`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.pages import review, words
from dovetail.statements import Statement, Unit

__all__ = ["registry"]

_SUBJECTS = {
    Unit.ITEM: "one record",
    Unit.USER: "one user, with all of that user's data",
    Unit.SUBJECT: "one person, with all records about that person at any user",
}
_OWNERS = ("organisation", "product", "contact", "date_of_release", "data_source", "intended_use", "justification")


def registry(folder: Path) -> dict[str, Any]:
    """A finished run as an entry, as plain data; `to_fill` lists the fields that only the owner knows.

    Guarantees:
        Every number is that of privacy.json; nothing is guessed for the owner.
    """
    path = folder / "privacy.json"
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} is not the folder of a finished run: it has no privacy.json")
    summary = json.loads(path.read_text(encoding="utf-8"))
    statement = Statement.from_json(summary["certified"])
    origin = summary.get("origin") or {}
    tuned = review.tuning_in_words(statement, summary)
    return {
        "to_fill": list(_OWNERS),
        **dict.fromkeys(_OWNERS),
        "status": origin.get("setting"),
        "guarantee": statement.verdict.value if not statement.is_unbounded else "no guarantee",
        "data_subject": _SUBJECTS[statement.unit],
        "privacy_unit": statement.unit.value,
        "number_of_units": statement.population,
        "trust_model": {
            "model": statement.trust.value,
            "adversary": statement.adversary,
            "in_words": words.trust_in_words(statement),
        },
        "privacy_parameters": {
            "definition": "(eps, delta)-differential privacy",
            "eps": None if statement.is_unbounded else statement.eps,
            "delta": statement.delta,
            "delta_in_words": review.delta_in_words(statement),
        },
        "neighbours": statement.neighbors.value,
        "composition": {
            "scope": statement.span,
            "rounds": summary["rounds"],
            "tuning": tuned,
            "not_included": "other releases from the same data",
        },
        "mechanism": {
            "protocol": summary["protocol"]["name"],
            "noise": review.noise_in_words(summary),
            "proof": str(statement.proof),
        },
        "implementation": {"name": "Dovetail", **(origin.get("library") or {})},
        "assumptions": list(statement.assumptions),
        "warnings": list(statement.warnings),
    }
