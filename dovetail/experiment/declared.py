"""What of a run's data is treated as public, beside what the recipe says of columns: for whoever signs the report.

How columns are read, and the answer's values, are in `recipe.json`. Here is the rest: what the data are called, whether
all of them are published, where classes and test records come from, and the counts that were declared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.data import Dataset, Task
from dovetail.data.readers.assembly import CLASSES_NOTE, TESTED_NOTE
from dovetail.experiment.config import Config

__all__ = ["UNNAMED", "declared_public"]

UNNAMED = "dataset"  # the name of a task that is made of a dataset


def declared_public(config: Config, task: Task, dataset: Dataset, *, assumptions: Sequence[str]) -> dict[str, Any]:
    """What is public about these data, as plain data for `privacy.json`.

    Arguments:
        config: may declare counts, in its section [task].
        task: is named where the data are not, and may be published.
        dataset: as the model reads it.
        assumptions: what the statement assumes; nothing is told of test records unless they are assumed to be public.
    """
    section = config.task
    held_out = dataset.held_out
    tests = {
        "records": len(dataset.test_labels),
        "share": None if held_out is None else held_out.share,
        "seed": None if held_out is None else held_out.seed,
    }
    classes = None
    if dataset.target == "classes":
        classes = "read off the data" if CLASSES_NOTE in dataset.notes else "declared"
    return {
        "name": dataset.name or (None if task.name == UNNAMED else task.name),
        "published": task.published,
        "classes": classes,
        "tests": tests if task.published or TESTED_NOTE in assumptions else None,
        "roster": dataset.roster,
        "users": section.users,
        "records": section.records,
        "subjects": section.subjects,
        "spread": section.spread,
    }
