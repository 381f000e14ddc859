import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dovetail.accounting import gaussian, groups, subjects
from dovetail.events import Gaussian, SampledSubject
from dovetail.statements import Bound, Neighbors, NotApplicable

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "subjects.json").read_text())


def subject(**changes):
    fields = {"std": GOLDEN["noise_multiplier"], "clip_norm": 1.0, "items": 1, "prob_item": GOLDEN["prob"]}
    return SampledSubject(**(fields | changes))


def eps(event, interval=1e-2, rounds=GOLDEN["rounds"]):
    return subjects.eps(event, rounds=rounds, delta=GOLDEN["delta"], interval=interval).eps


def test_golden_items_sampled_federation_wide():
    assert eps(subject(), 2e-3) == pytest.approx(GOLDEN["item_eps"], rel=3e-3)
    for row in GOLDEN["federation_wide"]:
        assert eps(subject(items=row["items"])) == pytest.approx(row["eps"], rel=0.01)


def test_golden_users_first_then_items():
    two_level = GOLDEN["two_level"]
    for row in two_level["eps"]:
        event = subject(items=row["items"], prob_user=two_level["prob_user"], prob_item=two_level["prob_item"])
        assert eps(event, two_level["interval"]) == pytest.approx(row["eps"], rel=2e-3)
        assert eps(event) > eps(subject(items=row["items"]))


def test_golden_spanned_users():
    event = Gaussian(std=2.0, sensitivity=2.0, neighbors=Neighbors.ADD_REMOVE)
    for row in GOLDEN["spanned"]:
        mu = subjects.spanning(event, users=row["users"]).mu
        assert mu >= math.sqrt(row["users"])
        assert gaussian.eps_of(mu, delta=GOLDEN["delta"]) == pytest.approx(row["eps"], rel=5e-3)


@pytest.mark.parametrize(("split", "prob_user"), [((4,), 0.3), ((2, 1, 1), 0.3), ((3, 2), 1.0)])
def test_the_law_of_the_items_in_the_sum_against_simulation(split, prob_user):
    event = subject(items=sum(split), prob_user=prob_user, prob_item=0.4, users_spanned=len(split))
    law = subjects.items_in_sum(event, split)
    rng = np.random.default_rng(0)
    trials = 40_000
    drawn = sum((rng.random(trials) < prob_user) * rng.binomial(items, 0.4, trials) for items in split)
    counts = np.bincount(drawn, minlength=len(law))
    assert stats.chisquare(counts, trials * law).pvalue > 1e-4
    near_miss = np.convolve(law, [0.98, 0.02])[: len(law)]
    assert stats.chisquare(counts, trials * near_miss / near_miss.sum()).pvalue < 1e-4


def test_one_round_against_the_hockey_stick_integral():
    event = subject(items=3, prob_user=0.5, prob_item=0.5, users_spanned=1, std=1.5)
    law = subjects.items_in_sum(event, (3,))
    x = np.linspace(-20, 25, 400_001)
    p = sum(mass * stats.norm.pdf(x, k, 1.5) for k, mass in enumerate(law))
    q = stats.norm.pdf(x, 0, 1.5)
    for at in (0.1, 0.7):
        exact = max(np.maximum(0, a - math.exp(at) * b).sum() * (x[1] - x[0]) for a, b in ((p, q), (q, p)))
        ours = subjects.delta(event, rounds=1, eps=at, interval=1e-2)
        assert exact * (1 - 1e-9) <= ours <= exact * 1.01


def test_limits_that_are_known_exactly():
    always = subject(items=3, prob_item=1.0, std=4.0)
    exact = gaussian.eps_of(3 / 4, delta=GOLDEN["delta"])
    assert exact * (1 - 1e-9) <= eps(always, 5e-3, rounds=1) <= exact * 1.002
    assert eps(subject(std=2.0, clip_norm=2.0, items=2), rounds=20) == eps(
        subject(std=1.0, clip_norm=1.0, items=2), rounds=20
    )


def test_monotone_and_below_group_privacy():
    few = {"rounds": 50}
    base = eps(subject(items=2), **few)
    assert eps(subject(items=3), **few) > base
    assert eps(subject(items=2, prob_item=0.02), **few) > base
    assert eps(subject(items=2, std=0.9), **few) > base
    assert eps(subject(items=2), rounds=60) > base
    one = Bound(eps=eps(subject(), **few), delta=GOLDEN["delta"], theorem=subjects.MIXTURE)
    group = groups.for_group(one, size=2)
    assert subjects.delta(subject(items=2), rounds=50, eps=group.eps, interval=1e-2) <= group.delta


def test_the_worst_split_is_searched():
    event = subject(items=4, prob_user=0.2, prob_item=0.5, std=3.0, users_spanned=2)
    assert subjects.splits(event) == [(4,), (3, 1), (2, 2)]
    worst = eps(event, rounds=5)
    for users in (1, 2):
        assert worst >= eps(subject(items=4, prob_user=0.2, prob_item=0.5, std=3.0, users_spanned=users), rounds=5)
    assert subjects.splits(subject(items=9, users_spanned=5)) == [(9,)]
    with pytest.raises(NotApplicable, match="ways"):
        subjects.splits(subject(items=60, users_spanned=60, prob_user=0.5))


def test_refusals():
    for bad in (
        {"std": 0.0},
        {"std": math.nan},
        {"items": 0},
        {"items": 1.5},
        {"prob_item": 0.0},
        {"prob_item": 1.5},
        {"prob_user": -0.1},
        {"users_spanned": 0},
        {"clip_norm": -1.0},
    ):
        with pytest.raises(ValueError, match="expected"):
            subject(**bad)
    for bad in ({"delta": 0.0}, {"delta": 1.0}, {"rounds": 0}):
        with pytest.raises(ValueError, match="expected"):
            subjects.eps(subject(), **({"delta": 1e-5, "rounds": 1} | bad))
    with pytest.raises(ValueError, match="users"):
        subjects.spanning(Gaussian(std=1.0, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE), users=0)
