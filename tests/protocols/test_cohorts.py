"""Who takes part in a round: what cannot be is refused, the ends of what may be are not."""

import dataclasses

import pytest

from dovetail.events import Disjoint, Everyone, FixedSize, Poisson
from dovetail.protocols import Cohort

EVERYONE = {"participation": Everyone(), "size": 10}
BY_COINS = {"participation": Poisson(prob=0.25), "size": 10, "uploads": 40}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"size": 0}, "size=0"),
        ({"size": 1.5}, "size=1.5"),
        ({"min_size": -1}, "min_size=-1"),
        ({"min_size": 11}, "min_size=11"),
        ({"min_size": 2.5}, "min_size=2.5"),
        ({"colluders": -1}, "colluders=-1"),
        ({"colluders": 0.5}, "colluders=0.5"),
        ({"noise_scale": 0.0}, "noise_scale=0.0"),
        ({"aggregators": 1}, "aggregators=1"),
        ({"aggregators": 2.5}, "aggregators=2.5"),
        ({**BY_COINS, "uploads": 9}, "uploads=9"),
        ({**BY_COINS, "uploads": 40.5}, "uploads=40.5"),
        ({**BY_COINS, "uploads": 41}, "expected 10 of 41 users by coins"),
        ({**BY_COINS, "min_size": 41}, "min_size=41"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        Cohort(**{**EVERYONE, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": 1},
        {"min_size": 10},
        {"colluders": 10},
        {"noise_scale": 1e-3},
        {"aggregators": 2},
        {**BY_COINS, "min_size": 40},
        {"participation": Poisson(prob=1.0), "uploads": 10},
    ],
)
def test_the_ends_of_what_may_be_pass(arguments):
    assert dataclasses.replace(Cohort(**{**EVERYONE, **arguments})) is not None


def test_a_minimum_would_reveal_a_secret_sample_unless_all_upload():
    secret = Cohort(participation=Poisson(prob=0.25), size=10, min_size=1)
    with pytest.raises(ValueError, match="expected min_size = 0 with a secret sample"):
        secret.refuse_minimum_if_secret()
    dataclasses.replace(secret, min_size=0).refuse_minimum_if_secret()
    Cohort(**BY_COINS, min_size=1).refuse_minimum_if_secret()
    Cohort(**EVERYONE, min_size=10).refuse_minimum_if_secret()


def test_the_federation_is_as_large_as_its_sample_says():
    assert Cohort(**EVERYONE).population == 10
    assert Cohort(**BY_COINS).population == Cohort(**BY_COINS).max_uploads == 40
    assert Cohort(participation=FixedSize(size=10, population=70), size=10).population == 70
    assert Cohort(participation=Poisson(prob=0.125), size=10).population == 80
    with pytest.raises(ValueError, match="got disjoint batches of users"):
        _ = Cohort(participation=Disjoint(epoch=0), size=10).population


def test_the_crowd_is_the_minimum_that_is_enforced():
    assert Cohort(**EVERYONE, min_size=7).crowd() == 7
    assert Cohort(**EVERYONE, min_size=2).crowd() == 2
    with pytest.raises(ValueError, match=r"expected cohort.min_size >= 2 .*, got 1"):
        Cohort(**EVERYONE, min_size=1).crowd()


def test_of_a_sample_honest_users_are_hidden_among_those_that_do_not_collude():
    sample = FixedSize(size=10, population=70)
    for colluders, honest in ((0, sample), (59, FixedSize(size=10, population=11)), (60, Everyone()), (69, Everyone())):
        assert Cohort(participation=sample, size=10, colluders=colluders).participation_of_honest == honest
    with pytest.raises(ValueError, match="expected colluders < population=70, got colluders=70"):
        _ = Cohort(participation=sample, size=10, colluders=70).participation_of_honest
    assert Cohort(**BY_COINS, colluders=5).participation_of_honest == Poisson(prob=0.25)
