"""Why a round released nothing, in a sentence for its owner."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dovetail.parties.analyzer.book import Refusals
from dovetail.parties.common.task import TrainingTask
from dovetail.parties.common.wire import Closed

__all__ = ["incomplete", "set_back", "silent", "void"]


def _name(task: TrainingTask, sender: int) -> str:
    return f"{'aggregator' if task.aggregators else 'shuffler'} {sender}"


def silent(task: TrainingTask, closed: Collection[int]) -> str:
    """Some did not close it."""
    missing = [_name(task, sender) for sender in range(len(task.intermediaries)) if sender not in closed]
    return f"nothing was heard in time from {', '.join(missing)}"


def set_back(task: TrainingTask, sender: int, what: str) -> str:
    """Somebody says something else than before."""
    return f"{_name(task, sender)} {what}: its store was set back, or it is not honest"


def void(task: TrainingTask, said: Mapping[int, Closed]) -> str | None:
    """Somebody closed it as void; None if nobody did."""
    names = [_name(task, sender) for sender, one in sorted(said.items()) if one.state == "void"]
    uploads = min(one.uploads for one in said.values())
    if names and uploads < task.min_clients:
        where = "" if len(task.intermediaries) == 1 else f" to all {'aggregators' if task.aggregators else 'shufflers'}"
        return f"{uploads} users reported{where}, and the task asks for {task.min_clients}"
    return f"{', '.join(names)} did not agree with the others on whom to count" if names else None


def incomplete(task: TrainingTask, said: Mapping[int, Closed], refused: Refusals) -> str:
    """Something else came than its users send."""
    uploads = [one.uploads for _, one in sorted(said.items())]
    if len(set(uploads)) > 1 or not task.min_clients <= min(uploads) <= task.max_clients:
        return f"numbers of users differ, or are not what the task allows: {uploads}"
    if task.aggregators and len({one.batch for one in said.values()}) > 1:
        return "aggregators added up different users"
    if any(refused):
        return f"messages do not count: {refused._asdict()}"
    return f"other numbers of messages came than {uploads[0]} users send"
