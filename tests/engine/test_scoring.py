"""The area under the ROC curve is the share of pairs in order."""

import itertools

import numpy as np
import pytest

from dovetail.engine import scoring


def test_it_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 40).astype(float), rng.integers(0, 2, 40)
    pairs = itertools.product(scores[labels == 1], scores[labels == 0])
    truth = np.mean([(high > low) + (high == low) / 2 for high, low in pairs])
    assert scoring.auc(scores, labels) == pytest.approx(truth)
    assert scoring.auc(np.exp(scores), labels) == pytest.approx(truth)
    assert scoring.auc(labels.astype(float), labels) == 1
    assert scoring.auc(np.zeros(40), labels) == 0.5
    assert scoring.auc(scores, np.ones(40)) is None
