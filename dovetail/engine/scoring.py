"""Scores of a model on test records."""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata

__all__ = ["auc"]


def auc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """The share of pairs of a record of class 1 and one of class 0 that the scores put in order; ties count half.

    Guarantees:
        Invariant under increasing maps of the scores; 1/2 for equal ones. None where a class is missing.
    """
    positive = labels == 1
    high, low = int(positive.sum()), int((~positive).sum())
    if high == 0 or low == 0:
        return None
    return float((rankdata(scores)[positive].sum() - high * (high + 1) / 2) / (high * low))
