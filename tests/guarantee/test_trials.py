"""Several trainings on the same data, under one statement."""

import dataclasses
import functools

import pytest

from dovetail import accounting
from dovetail.events import Disjoint
from dovetail.guarantee import quotes, trials
from dovetail.guarantee.record import Record
from dovetail.statements import TUNING_ASSUMPTION, NotApplicable, Trust, Unit, Verdict

TERMS = quotes.Terms(num_users=1000, dim=10, delta=1e-5, rounds=20)


def record(protocol="dp_fl", **settings):
    return quotes.guarantee(protocol, dataclasses.replace(TERMS, settings=settings)).record()


def in_batches(epoch):
    """Rounds over disjoint batches of one epoch."""
    terms = dataclasses.replace(TERMS, rounds=4, participation=Disjoint(epoch=epoch), settings={"noise_multiplier": 5})
    return quotes.guarantee("dp_fl", terms).record()


def test_all_rounds_of_all_trials_are_counted():
    first, second = record(noise_multiplier=20.0), record(noise_multiplier=30.0, clip_norm=0.5)
    both = trials.record_of_all([first, second], tuning="all of it")
    expected = accounting.bound((*first.own.rounds, *second.own.rounds), delta=1e-5)
    assert both.certified_statement().eps == trials.bound(both).eps == expected.eps
    assert both.certified_statement().eps > max(first.certified_statement().eps, second.certified_statement().eps)
    assert (
        "all of it" in both.certified_statement().assumptions
        and TUNING_ASSUMPTION not in both.certified_statement().assumptions
    )
    assert all(TUNING_ASSUMPTION not in one.assumptions for one in both.statements_by_unit().values())
    assert Record.from_json(both.to_json()) == both


def test_batches_of_different_trials_are_not_disjoint():
    """Both trials number their epochs from 0; taken as they are, the second would cost nothing."""
    one = in_batches(0)
    both = trials.record_of_all([one, one, in_batches(2)], tuning="")
    epochs = {item.participation.epoch for item in both.own.rounds}
    assert len(epochs) == 3
    naive = accounting.bound((*one.own.rounds, *one.own.rounds), delta=1e-5)
    assert naive.eps == one.certified_statement().eps  # what must not happen
    assert both.certified_statement().eps > 1.5 * one.certified_statement().eps


def test_epochs_of_a_trial_stay_apart_and_follow_those_of_all_trials_before_it():
    """In what everybody sees together, and in each user's own reports."""
    two = in_batches(0).followed_by(in_batches(1))
    both = trials.record_of_all([two, two, in_batches(0)], tuning="")
    for rounds in (both.own.rounds, both.reports, both.replaced.rounds):
        assert [item.participation.epoch for item in rounds] == [epoch for epoch in range(5) for _ in range(4)]
    apart = [
        dataclasses.replace(one.own.rounds[0], participation=Disjoint(epoch=at)) for at, one in enumerate([two] * 5)
    ]
    assert both.certified_statement().eps == accounting.bound(apart, delta=1e-5).eps


@pytest.mark.parametrize(
    "combine", [trials.record_of_all, functools.partial(trials.record_of_best, eta=0.0, gamma=0.5)]
)
def test_what_holds_under_replacement_is_known_of_all_trials_or_of_none(combine):
    """A record of several users changes by replacement: trials whose view of that is missing may not be left out."""
    first, second = record(noise_multiplier=20.0), record(noise_multiplier=10.0)
    assert first.replaced is not None and second.replaced is not None
    both = combine([first, second], tuning="")
    for alone in (first, second):
        assert both.statements_by_unit()[Unit.ITEM].eps > alone.statements_by_unit()[Unit.ITEM].eps
    lacking = dataclasses.replace(second, replaced=None)
    for tried in ([first, lacking], [lacking, first]):
        assert combine(tried, tuning="").replaced is None
        assert combine(tried, tuning="").statements_by_unit()[Unit.ITEM].is_unbounded


def test_shuffled_trials_are_counted_for_every_adversary():
    one = record("ss_simple", eps_local=0.5)
    both = trials.record_of_all([one, one], tuning="all of it")
    assert both.certified_statement().eps > one.certified_statement().eps
    assert both.local_statement().eps == pytest.approx(2 * one.local_statement().eps)
    assert both.shuffler_statement() is not None


def test_the_best_trial_needs_a_curator():
    assert (
        trials.record_of_best([record(noise_multiplier=20.0)], eta=1.0, gamma=0.2, tuning="").own.scope.trust
        is Trust.CURATOR
    )
    with pytest.raises(NotApplicable, match="the analyzer sees every one of them"):
        trials.record_of_best([record("ss_simple", eps_local=0.5)], eta=1.0, gamma=0.2, tuning="")


def test_the_best_trial_is_a_record_like_any_other():
    records = [record(noise_multiplier=20.0, clip_norm=norm) for norm in (0.5, 1.0)]
    best = trials.record_of_best(records, eta=0.0, gamma=0.1, tuning="all of it")
    assert Record.from_json(best.to_json()) == best
    said = best.certified_statement()
    assert said.eps > records[0].certified_statement().eps and said.adversary == "observer of the chosen trial's models"
    assert any("keeps all other trials to itself" in text for text in said.assumptions)
    assert TUNING_ASSUMPTION not in said.assumptions
    assert best.local_statement().is_unbounded


def test_the_best_of_non_private_trials_is_refused_a_statement():
    nothing = record("fedavg")
    for tried in ([nothing] * 3, [record(noise_multiplier=20.0), nothing]):
        with_choice = trials.record_of_best(tried, eta=1.0, gamma=0.2, tuning="")
        assert with_choice.certified_statement().is_unbounded and "without a guarantee" in str(
            with_choice.certified_statement()
        )
        assert trials.record_of_all(tried, tuning="").certified_statement().is_unbounded


def test_trials_must_have_one_scope():
    with pytest.raises(ValueError, match="one adversary, unit, relation"):
        trials.record_of_all([record(noise_multiplier=20.0), record("ss_simple", eps_local=0.5)], tuning="")
    with pytest.raises(ValueError, match="at least one trial"):
        trials.record_of_all([], tuning="")


@pytest.mark.parametrize(
    "combine", [trials.record_of_all, functools.partial(trials.record_of_best, eta=0.0, gamma=0.5)]
)
def test_what_is_declared_of_any_trial_is_declared_of_all(combine):
    """What is left without trust rests on the code of every trial, and said so of the first one alone."""
    first, second = (
        dataclasses.replace(record(noise_multiplier=2.0), declared=(said,), verdict=Verdict.DECLARED)
        for said in ("the first function is of one record", "the second function is of one record")
    )
    both = combine([first, second], tuning="all of it")
    assert both.declared == (*first.declared, *second.declared)
    assert set(both.declared) <= set(both.local_statement().assumptions)
