import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dovetail.accounting import compose, gaussian, groups
from dovetail.accounting.pairs import mixtures
from dovetail.accounting.pairs.mixtures import ShiftLaw
from dovetail.accounting.releases import subjects
from dovetail.events import Everyone, Gaussian, Round, SampledSubject
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
        event = subject(
            items=row["items"], prob_user=two_level["prob_user"], prob_item=two_level["prob_item"], alone=True
        )
        assert eps(event, two_level["interval"]) == pytest.approx(row["eps"], rel=2e-3)
        assert eps(event) > eps(subject(items=row["items"]))


def test_users_whose_other_records_show_that_they_were_drawn():
    """The compound law would be 2.00, 5.65, 25.6; these are an independent computation's."""
    for row in GOLDEN["two_level_shown"]["eps"]:
        event = subject(items=row["items"], prob_user=0.1, prob_item=0.1)
        assert eps(event, 2**-8) == pytest.approx(row["eps"], rel=3e-3)


@pytest.mark.parametrize(("prob_user", "prob_item", "items"), [(0.1, 1.0, 1), (0.4, 0.5, 2)])
def test_two_levels_against_the_plane_where_others_show_the_draw(prob_user, prob_item, items):
    """The user's other records move the sum by 12 standard deviations across: brute force over the plane."""
    x, y = np.linspace(-8, 10, 1201), np.linspace(-8, 20, 1201)
    cell = (x[1] - x[0]) * (y[1] - y[0])
    across = [stats.norm.pdf(y, mean)[:, None] for mean in (0, 12)]
    along = stats.binom.pmf(np.arange(items + 1), items, prob_item)
    with_subject = sum(mass * stats.norm.pdf(x, k) for k, mass in enumerate(along))
    nobody = (1 - prob_user) * across[0] * stats.norm.pdf(x, 0)
    p = nobody + prob_user * across[1] * with_subject
    q = nobody + prob_user * across[1] * stats.norm.pdf(x, 0)
    event = subject(items=items, prob_user=prob_user, prob_item=prob_item, std=1.0)
    for at in (0.1, 0.5, 1.0):
        exact = max(np.maximum(0, a - math.exp(at) * b).sum() * cell for a, b in ((p, q), (q, p)))
        ours = subjects.delta(event, rounds=1, eps=at, interval=2**-8)
        assert exact * (1 - 1e-4) <= ours <= exact * 1.02, "the plane's grid errs by less than 1e-4"
        hidden = subjects.delta(dataclasses.replace(event, alone=True), rounds=1, eps=at, interval=2**-8)
        assert hidden < 0.95 * exact, "what would be certified if nobody else's records were there"


def test_golden_spanned_users():
    event = Gaussian(std=2.0, sensitivity=2.0, neighbors=Neighbors.ADD_REMOVE)
    for row in GOLDEN["spanned"]:
        mu = subjects.gaussian_of_users_together(event, users=row["users"]).mu
        assert mu >= math.sqrt(row["users"])
        assert gaussian.eps_of(mu, delta=GOLDEN["delta"]) == pytest.approx(row["eps"], rel=5e-3)


@pytest.mark.parametrize(("split", "prob_user"), [((4,), 0.3), ((2, 1, 1), 0.3), ((3, 2), 1.0)])
def test_the_law_of_the_items_in_the_sum_against_simulation(split, prob_user):
    event = subject(items=sum(split), prob_user=prob_user, prob_item=0.4, users_spanned=len(split))
    law = subjects.law_of_items_in_sum(event, split)
    rng = np.random.default_rng(0)
    trials = 40_000
    drawn = sum((rng.random(trials) < prob_user) * rng.binomial(items, 0.4, trials) for items in split)
    counts = np.bincount(drawn, minlength=len(law))
    assert stats.chisquare(counts, trials * law).pvalue > 1e-4
    near_miss = np.convolve(law, [0.98, 0.02])[: len(law)]
    assert stats.chisquare(counts, trials * near_miss / near_miss.sum()).pvalue < 1e-4


def test_one_round_against_the_hockey_stick_integral():
    event = subject(items=3, prob_user=0.5, prob_item=0.5, users_spanned=1, std=1.5, alone=True)
    law = subjects.law_of_items_in_sum(event, (3,))
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
    one = Bound(eps=eps(subject(), **few), delta=GOLDEN["delta"], proof=subjects.MIXTURE.proof)
    group = groups.for_group(one, size=2)
    assert subjects.delta(subject(items=2), rounds=50, eps=group.eps, interval=1e-2) <= group.delta


def test_the_worst_split_is_searched():
    event = subject(items=4, prob_user=0.2, prob_item=0.5, std=3.0, users_spanned=2)
    assert subjects.splits_to_check(event) == [(4,), (3, 1), (2, 2)]
    worst = eps(event, rounds=5)
    for users in (1, 2):
        assert worst >= eps(subject(items=4, prob_user=0.2, prob_item=0.5, std=3.0, users_spanned=users), rounds=5)
    assert subjects.splits_to_check(subject(items=9, users_spanned=5)) == [(9,)]
    with pytest.raises(NotApplicable, match="ways"):
        subjects.splits_to_check(subject(items=60, users_spanned=60, prob_user=0.5))


# ---------------------------------------------------------------- noise at every user, caps, steps


def at_users(counts, event, y):
    """The density of two users' noisy sums on a grid, when they hold these numbers of the subject's items."""
    mine = [
        sum(
            mass * stats.norm.pdf(y, k, event.std)
            for k, mass in enumerate(stats.binom.pmf(range(n + 1), n, event.prob_item))
        )
        for n in counts
    ]
    return np.outer(*mine)


def hockey_stick(counts, event, eps):
    y, step = np.linspace(-9 * event.std, 4 + 9 * event.std, 801, retstep=True)
    moved, null = at_users(counts, event, y), at_users((0, 0), event, y)
    return max(np.maximum(0, a - math.exp(eps) * b).sum() * step**2 for a, b in ((moved, null), (null, moved)))


@pytest.mark.parametrize(("most", "prob", "std"), [(1, 0.2, 0.8), (2, 0.3, 1.0), (2, 0.6, 1.5), (3, 0.9, 2.0)])
def test_noise_at_every_user_against_integration_in_the_plane(most, prob, std):
    """No split of the items over two users is worse than what is certified, in either direction."""
    event = subject(items=2 * most, items_per_user=most, users_spanned=2, noise="user", prob_item=prob, std=std)
    loose = subject(items=2 * most, users_spanned=2, noise="user", prob_item=prob, std=std)
    for eps in (0.0, 0.3, 1.0, 2.0):
        ours = subjects.delta(event, rounds=1, eps=eps)
        assert ours <= subjects.delta(loose, rounds=1, eps=eps)
        for one in range(1, most + 1):
            for other in range(one + 1):
                assert hockey_stick((one, other), event, eps) <= ours + 1e-12


def test_the_integration_would_catch_a_shift_that_is_too_small():
    """With the larger of the two users' shifts for their norm the plane is above the bound."""
    event = subject(items=4, items_per_user=2, users_spanned=2, noise="user", prob_item=0.9, std=2.0)
    at_most = stats.binom.cdf(range(3), 2, 0.9) ** 2
    law = ShiftLaw.dominating(np.arange(3) / 2.0, np.diff(at_most, prepend=0.0))
    too_small = mixtures.loss(law, interval=1e-3).delta(0.3)
    assert hockey_stick((2, 2), event, 0.3) > 1.2 * too_small
    assert hockey_stick((2, 2), event, 0.3) > 0.9 * subjects.delta(event, rounds=1, eps=0.3), (
        "and ours is not far above"
    )


def test_which_split_stands_for_all_others():
    user = {"noise": "user", "prob_item": 0.1}
    assert subjects.splits_to_check(subject(items=6, items_per_user=2, users_spanned=3, **user)) == [(2, 2, 2)]
    assert subjects.splits_to_check(subject(items=9, items_per_user=2, users_spanned=3, **user)) == [(2, 2, 2)]
    assert subjects.splits_to_check(subject(items=6, users_spanned=3, **user)) == [(6,)]
    assert subjects.splits_to_check(subject(items=3, items_per_user=1, users_spanned=9, **user)) == [(1, 1, 1)]
    assert subjects.splits_to_check(subject(items=9, items_per_user=2, users_spanned=3)) == [(6,)], (
        "one noise: all caps count"
    )
    two_level = subject(items=9, items_per_user=2, users_spanned=3, prob_user=0.5)
    assert subjects.splits_to_check(two_level) == [(2, 2, 2)]
    assert subjects.splits_to_check(subject(items=4, items_per_user=3, users_spanned=3, prob_user=0.5)) == [
        (3, 1),
        (2, 2),
        (2, 1, 1),
    ]


def test_the_law_of_the_norm_against_simulation():
    event = subject(items=6, items_per_user=2, users_spanned=3, noise="user", prob_item=0.4)
    norms, law = subjects.law_of_shift(event, (2, 2, 2))
    rng = np.random.default_rng(0)
    drawn = (rng.binomial(2, 0.4, (40_000, 3)) ** 2).sum(axis=1)
    counts = np.array([(drawn == round(norm**2)).sum() for norm in norms])
    assert counts.sum() == 40_000
    assert stats.chisquare(counts, 40_000 * law).pvalue > 1e-4
    assert stats.chisquare(counts, 40_000 * np.roll(law, 1)).pvalue < 1e-4


def test_items_that_are_always_sampled_are_an_exact_gaussian():
    delta = GOLDEN["delta"]

    def expected(norm, releases):
        return gaussian.eps_of(norm / 4.0 * math.sqrt(releases), delta=delta)

    always = {"prob_item": 1.0, "std": 4.0}
    for changes, norm, releases in (
        ({"items": 6}, 6.0, 5),
        ({"items": 6, "steps": 3}, 6.0, 15),
        ({"items": 6, "items_per_user": 2, "users_spanned": 2}, 4.0, 5),
        ({"items": 6, "items_per_user": 2, "users_spanned": 3, "noise": "user"}, math.sqrt(12), 5),
        ({"items": 5, "items_per_user": 2, "users_spanned": 4, "noise": "user"}, 3.0, 5),
        ({"items": 5, "users_spanned": 4, "noise": "user"}, 5.0, 5),
    ):
        event = subject(**always, **changes)
        exact = expected(norm, releases)
        assert exact * (1 - 1e-12) <= subjects.eps(event, rounds=5, delta=delta).eps <= exact * (1 + 1e-9)
        assert subjects.delta(event, rounds=5, eps=exact) == pytest.approx(delta, rel=1e-6)
        nearly = dataclasses.replace(event, prob_item=1 - 1e-9)
        assert subjects.eps(nearly, rounds=5, delta=delta).eps >= exact * (1 - 1e-3)


def test_steps_are_rounds():
    event = subject(items=3, items_per_user=2, users_spanned=2, noise="user")
    steps = dataclasses.replace(event, steps=10)
    assert eps(steps, rounds=5) == pytest.approx(eps(event, rounds=50), rel=1e-6)
    assert subjects.eps(steps, rounds=5, delta=1e-5).eps == pytest.approx(eps(event, 1e-3, rounds=50), rel=2e-3)


def test_noise_at_every_user_lies_between_one_user_and_one_noise():
    few = {"rounds": 50}
    alone = eps(subject(items=2), **few)
    spread = eps(subject(items=4, items_per_user=2, users_spanned=2, noise="user"), **few)
    assert alone < spread < eps(subject(items=4), **few)


@pytest.mark.parametrize(
    ("items", "prob_item", "std", "rounds"),
    [
        (200, 0.005, 0.5, 3000),
        (200, 0.005, 500.0, 3000),
        (200, 0.5, 0.5, 1),
        (200, 0.9, 500.0, 3000),
        (1, 0.005, 500.0, 1),
    ],
)
def test_large_counts_at_both_ends_of_the_noise(items, prob_item, std, rounds):
    """Never above the Gaussian of all items, never below half of them, and a finer grid gains little."""
    event = subject(items=items, prob_item=prob_item, std=std)
    ours = subjects.eps(event, rounds=rounds, delta=1e-5).eps
    assert ours <= gaussian.eps_of(items / std * math.sqrt(rounds), delta=1e-5)
    if items > 1:
        assert ours > subjects.eps(dataclasses.replace(event, items=items // 2), rounds=rounds, delta=1e-5).eps
    finer = eps(event, subjects.resolution(event, rounds=rounds) / 4, rounds=rounds)
    assert finer * (1 - 1e-6) <= ours <= finer * 1.01 + 1e-9


def test_subjects_whose_users_are_sampled_and_seen_are_refused():
    seen = subject(items=2, prob_user=0.5, noise="user")
    shared = subject(items=2, prob_user=0.5, steps=2)
    for event, why in ((seen, "it is seen who takes part"), (shared, "share the users")):
        with pytest.raises(NotApplicable, match=why):
            subjects.eps(event, rounds=1, delta=1e-5)
        with pytest.raises(NotApplicable, match=why):
            compose.bound([Round(mechanism=event, participation=Everyone())], delta=1e-5)


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
        {"noise": "both"},
        {"items_per_user": 0},
        {"items_per_user": 1.5},
        {"steps": 0},
    ):
        with pytest.raises(ValueError, match="expected"):
            subject(**bad)
    for bad in ({"delta": 0.0}, {"delta": 1.0}, {"rounds": 0}):
        with pytest.raises(ValueError, match="expected"):
            subjects.eps(subject(), **({"delta": 1e-5, "rounds": 1} | bad))
    with pytest.raises(ValueError, match="users"):
        subjects.gaussian_of_users_together(Gaussian(std=1.0, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE), users=0)


@pytest.mark.parametrize("split", [(3,), (2, 1), (5, -1), (4, 0), (2, 2, 1), ()])
def test_a_split_that_is_none_of_the_subjects_items_is_refused(split):
    event = SampledSubject(std=1.0, clip_norm=1.0, items=4, prob_item=0.5, prob_user=0.5, users_spanned=4)
    with pytest.raises(ValueError, match="expected a split of items=4 over users"):
        subjects.law_of_items_in_sum(event, split)
    assert subjects.law_of_items_in_sum(event, (3, 1)).sum() == pytest.approx(1)
