"""What an analyzer tells machines and people about its training: the statement, what was spent, how rounds ended."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from dovetail.parties.analyzer.book import Book
from dovetail.parties.common.costs import cost
from dovetail.parties.common.ledger import Ledger
from dovetail.parties.common.task import TrainingTask
from dovetail.statements import Statement

__all__ = ["facts_of"]


def facts_of(task: TrainingTask, ledger: Ledger, book: Book, *, round: int, notes: Sequence[str]) -> dict[str, Any]:
    """What is promised for the rounds that were reserved, what was spent of which budget, and how it went.

    `round` is the open one; `notes` are what the statement assumes of the learner.
    """

    def noted(statement: Statement) -> dict[str, Any]:
        return dataclasses.replace(statement, assumptions=(*statement.assumptions, *notes)).to_json()

    reserved = max((entry.round for entry in ledger.entries), default=0)
    certified, local = cost(task, max(1, reserved))
    eps, delta = ledger.spent
    return {
        "task": task.name,
        "task_id": task.task_id.hex(),
        "protocol": task.protocol,
        "rounds_reserved": reserved,
        "rounds": task.rounds,
        "budget": {"eps": task.eps, "delta": task.delta},
        "spent": {"eps": None if math.isinf(eps) else eps, "delta": delta},
        "statement": noted(certified),
        "without_trust": noted(local),
        "ledger_head": ledger.head.hex(),
        "history": [
            {"round": number, "outcome": outcome, "uploads": uploads, "accuracy": accuracy, **found}
            for number, outcome, uploads, accuracy, found in book.outcomes()
        ],
        "refused_messages": book.refusals(round)._asdict(),
        "messages": book.messages(round),
    }
