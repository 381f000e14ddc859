"""Scores of a model on held-out people who are private too: one noisy sum, and intervals that cover what they estimate.

Every held-out person adds one vector of norm at most 1 (`vectors`); the vectors are summed with noise by a protocol of
the training's own trust model (`release`); scores and their intervals are computed from the sums alone (`vectors`,
`intervals`). The privacy of it is in docs/proofs/private-evaluation.md.
"""

from __future__ import annotations

from dovetail.evaluation.intervals import LEVEL, Estimate
from dovetail.evaluation.release import Evaluation, calibrate_evaluation
from dovetail.evaluation.vectors import BinaryVectors, ClassVectors, LabelVectors, NumberVectors, People, ScoreVectors

__all__ = [
    "LEVEL",
    "BinaryVectors",
    "ClassVectors",
    "Estimate",
    "Evaluation",
    "LabelVectors",
    "NumberVectors",
    "People",
    "ScoreVectors",
    "calibrate_evaluation",
]
