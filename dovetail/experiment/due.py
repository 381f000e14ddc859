"""Which rounds a training still runs: before each, the budget is asked whether it fits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dovetail.experiment.plan import Plan

__all__ = ["rounds_due"]


def rounds_due(plan: Plan, released: list[int], *, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
    """The rounds from `start` that fit the budget beside those `released`, a list that grows, and who is drawn."""
    affordable = plan.affordable()
    for index in range(start, len(plan.rounds)):
        if index >= affordable and not plan.fits([*released, index]):
            return
        yield index, plan.schedule.draw(index)
