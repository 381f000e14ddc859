"""Levels that deployed clients share with a proof of their range, where the task says so."""

from __future__ import annotations

import dataclasses

from dovetail.protocols._base import Cohort
from dovetail.protocols._contributions import Contribution
from dovetail.protocols._level_sums import level_sums
from dovetail.protocols._messages import Messages
from dovetail.protocols.flame._flame import Flame
from dovetail.statements import NotApplicable

__all__ = ["SharedLevels"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedLevels(Flame):
    """Reports that can be added up between aggregators; `verified`: each user proves that its reports are in range."""

    verified: bool = False

    def messages(self, dim: int) -> Messages:
        """Those of a shuffler, which sees no shares to verify."""
        if self.verified:
            raise NotApplicable("expected aggregators for verified = true, who verify shares, got messages to shuffle")
        return super().messages(dim)

    def contribution(self, cohort: Cohort, dim: int) -> Contribution:
        """The sum of the levels on every coordinate: reports and decoys, and no dummies."""
        return level_sums(dataclasses.replace(self, verified=False).messages(dim), cohort, verified=self.verified)
