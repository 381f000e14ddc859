"""One contract for every release: over rounds, coordinates, spread and participation.

The bound grows with the rounds, is never below the exact attack on as many rounds, grows with the coordinates and with
the users that a subject is at, and a sample is never worse than everyone. Where users differ, the largest of their own
bounds is the bound of all.
"""

import dataclasses

import pytest
from grids import later

from dovetail import accounting, events
from dovetail.accounting.releases import release_of
from dovetail.audit import exact
from dovetail.audit.bounds import best_bound
from dovetail.events import Everyone, FixedSize, Poisson, Report, Round
from dovetail.statements import Neighbors, NotApplicable

DELTA = 1e-3
ROUNDS = (1, 2, 30)
ADDED, REPLACED = {"neighbors": Neighbors.ADD_REMOVE}, {"neighbors": Neighbors.REPLACE_ONE}
BIT, LEVEL = Report(kind="rr", eps_local=0.5), Report(kind="laplace", eps_local=0.5)
CROWD = {"num_users": 20, "colluders": 3}
SUM = {"num_users": 20, "clip_norm": 1.0, "scale": 40.0, "noise_variance": 1600.0 * 4, "modulus": 2**24}
TOP = events.PaddedTopk(report=BIT, coordinates=4, pad_to=20, top=2, decoys=1, num_users=20, colluders=3)
FEW = dataclasses.replace(TOP, num_users=9)
CASES = {
    "gaussian": events.Gaussian(std=8.0, sensitivity=1.0, **ADDED),
    "gaussian, replaced": events.Gaussian(std=8.0, sensitivity=2.0, **REPLACED),
    "laplace": events.Laplace(scale=9.0, sensitivity=1.0, count=2, **REPLACED),
    "bits": events.Shuffled(report=BIT, coordinates=1, **CROWD),
    "bits, three": events.Shuffled(report=BIT, coordinates=3, **CROWD),
    "laplace reports": events.Shuffled(report=LEVEL, coordinates=2, **CROWD),
    "padded": events.PaddedBernoulli(report=BIT, coordinates=3, pad_to=20, inclusion=0.3, **CROWD),
    "top": TOP,
    "top, fewer users than reports": FEW,
    "padded, fewer reports": events.PaddedBernoulli(
        report=BIT, coordinates=3, pad_to=14, inclusion=0.1, num_users=20, colluders=3
    ),
    "personal": events.Personalized(kind="clip_laplace", eps_locals=(0.1, 0.7, 1 / 3) * 4, coordinates=1),
    "personal, three": events.Personalized(kind="clip_laplace", eps_locals=(0.1, 0.7, 1 / 3) * 4, coordinates=3),
    "personal, laplace": events.Personalized(kind="laplace", eps_locals=(0.2, 0.4) * 6, coordinates=1),
    "shared sum": events.SkellamSum(coordinates=3, **SUM),
    "shared sum, one": events.SkellamSum(coordinates=1, **SUM),
    "split and mix": events.SplitAndMix(coordinates=2, shares=60, **SUM),
    "subject": events.SampledSubject(std=8.0, clip_norm=1.0, items=3, prob_item=0.2, users_spanned=2),
    "replaced users": events.ReplacedUsers(std=16.0, clip_norm=1.0, users=2),
    "subject, certain": events.SampledSubject(
        std=8.0, clip_norm=1.0, items=4, prob_item=1.0, users_spanned=4, items_per_user=1, noise="user"
    ),
    "subject, own noise": events.SampledSubject(
        std=8.0, clip_norm=1.0, items=3, prob_item=0.2, users_spanned=2, noise="user", steps=2
    ),
}


def eps_of(event, times, participation=Everyone()):  # noqa: B008 - frozen
    return accounting.bound([Round(mechanism=event, participation=participation)] * times, delta=DELTA).eps


def attacked(event, times):
    return best_bound([attack.eps(delta=DELTA) for attack in exact.exact_attacks(event, rounds=times)]).eps


@pytest.mark.parametrize("name", CASES)
def test_more_rounds_cost_more(name):
    spent = [eps_of(CASES[name], times) for times in ROUNDS]
    assert 0 < spent[0] < spent[1] < spent[2] < float("inf")
    assert spent[1] > 1.05 * spent[0]
    assert spent[2] > 2 * spent[0], "30 rounds certified as one, or as two"
    assert spent[1] <= 2 * eps_at_half(CASES[name]) * (1 + 1e-6), "never above basic composition"


def eps_at_half(event):
    return accounting.bound([Round(mechanism=event, participation=Everyone())], delta=DELTA / 2).eps


@pytest.mark.parametrize("times", ROUNDS)
@pytest.mark.parametrize("name", CASES)
def test_no_bound_is_below_the_exact_attack_on_as_many_rounds(name, times):
    lower, certified = attacked(CASES[name], times), eps_of(CASES[name], times)
    assert 0 < lower <= certified
    assert lower > 0.3 * certified, "an attack that shows little would notice little"


@pytest.mark.parametrize("times", ROUNDS)
@pytest.mark.parametrize("name", CASES)
def test_the_largest_bound_of_a_user_is_that_of_all(name, times):
    own = release_of(CASES[name]).eps_per_user(times, delta=DELTA)
    if own is None:
        assert not name.startswith("personal")
        return
    assert max(own) == pytest.approx(eps_of(CASES[name], times), rel=0.021)
    assert min(own) < 0.9 * max(own)


@pytest.mark.parametrize("times", [1, later(30)])
@pytest.mark.parametrize("name", [name for name in CASES if hasattr(CASES[name], "coordinates")])
def test_more_coordinates_cost_more(name, times):
    """Where every coordinate has a report of its own: not where a norm is clipped, or as many are chosen as before."""
    event = CASES[name]
    wider = dataclasses.replace(event, coordinates=2 * event.coordinates + 1)
    floor = 1 - 1e-6 if hasattr(event, "clip_norm") or hasattr(event, "top") else 1.2
    assert eps_of(wider, times) >= floor * eps_of(event, times)


@pytest.mark.parametrize("times", ROUNDS)
@pytest.mark.parametrize("changed", [{"items": 6}, {"users_spanned": 3}, {"prob_item": 0.4}])
@pytest.mark.parametrize("name", ["subject", "subject, own noise"])
def test_more_of_a_subject_costs_no_less(name, changed, times):
    event = CASES[name]
    assert eps_of(dataclasses.replace(event, **changed), times) >= eps_of(event, times) * (1 - 1e-6)


@pytest.mark.parametrize(
    "report",
    [
        Report(kind="rr", eps_local=0.5, levels=5),
        Report(kind="laplace", eps_local=0.5),
        Report(kind="generic", eps_local=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["padded", "padded, fewer reports", "top", "top, fewer users than reports"])
def test_padding_is_certified_for_fair_coins_alone(name, report):
    """Dummies of other reports are not like those of users: no proof covers them, whatever their eps."""
    event = dataclasses.replace(CASES[name], report=report)
    for times in (1, 30):
        with pytest.raises(NotApplicable, match="padding is proven for binary randomized response only"):
            eps_of(event, times)


@pytest.mark.parametrize("times", ROUNDS)
def test_reports_that_may_be_dropped_cost_more(times):
    """Where more users report than a slot takes, what one reports may push another's out."""
    event = dataclasses.replace(TOP, colluders=0)
    surplus = dataclasses.replace(event, num_users=TOP.pad_to + 8)
    assert eps_of(surplus, times) > 1.2 * eps_of(event, times)


@pytest.mark.parametrize("times", ROUNDS)
def test_dummies_hide_more_than_users_whose_reports_may_tell(times):
    """Of as many reports, those of users may be known not to be drawn from the blanket; dummies always are."""
    assert eps_of(FEW, times) < 0.97 * eps_of(TOP, times)


MEASURED = {"std", "sensitivity", "clip_norm"}


@pytest.mark.parametrize("times", [1, 30])
@pytest.mark.parametrize("name", [name for name in CASES if MEASURED & set(vars(CASES[name]))])
def test_no_bound_depends_on_the_unit_that_updates_are_measured_in(name, times):
    event = CASES[name]
    powers = {key: 1 for key in MEASURED if hasattr(event, key)}
    if hasattr(event, "scale"):
        powers["scale"] = 1 if isinstance(event, events.Laplace) else -1  # of the noise, or integers per unit
    assert len(powers) == 2
    for factor in (1 / 4, 8.0):
        other = dataclasses.replace(
            event, **{key: getattr(event, key) * factor**power for key, power in powers.items()}
        )
        assert eps_of(other, times) == pytest.approx(eps_of(event, times), rel=1e-9)


SAMPLED = {
    "replaced users": Poisson(prob=0.2),
    "gaussian": Poisson(prob=0.2),
    "gaussian, replaced": FixedSize(size=20, population=100),
    "bits": FixedSize(size=20, population=100),
    "bits, three": FixedSize(size=20, population=100),
}


@pytest.mark.parametrize("times", ROUNDS)
@pytest.mark.parametrize("name", SAMPLED)
def test_a_secret_sample_costs_less_and_more_of_them_more(name, times):
    event = CASES[name]
    drawn = eps_of(event, times, SAMPLED[name])
    assert 0 < drawn <= eps_of(event, times) * (1 + 1e-9)
    if times > 1:
        assert drawn > eps_of(event, 1, SAMPLED[name])
