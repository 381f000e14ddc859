"""What rounds that protect one unit say of another: never less than that one is promised, and every limit is said."""

import dataclasses
import itertools

import pytest

from dovetail import accounting
from dovetail.accounting import groups
from dovetail.audit import exact
from dovetail.audit.bounds import best_bound
from dovetail.events import Everyone, Gaussian, Round, SampledSubject
from dovetail.guarantee import units
from dovetail.guarantee.units import ScopedRounds, Spread
from dovetail.statements import Neighbors, NotApplicable, Scope, Trust, Unit, Verdict

DELTA = 1e-3
LIMITS = ("users_per_subject", "items_per_subject", "items_per_user")


def scope(unit, neighbors):
    return Scope(trust=Trust.CURATOR, adversary="observer", neighbors=neighbors, unit=unit)


def of_users(times=2, neighbors=Neighbors.REPLACE_ONE):
    """Rounds that protect one user."""
    event = Gaussian(std=6.0, sensitivity=2.0, neighbors=neighbors)
    rounds = (Round(mechanism=event, participation=Everyone()),) * times
    return ScopedRounds(rounds=rounds, scope=scope(Unit.USER, neighbors))


def of_items(times=2, unit=Unit.ITEM, **changed):
    """Rounds that sample records, each with noise of the users' own."""
    settings = {"std": 4.0, "clip_norm": 0.5, "items": 1, "prob_item": 0.3, "users_spanned": 1, "noise": "user"}
    event = SampledSubject(**settings | changed)
    item = Round(mechanism=event, participation=Everyone())
    return ScopedRounds(rounds=(item,) * times, scope=scope(unit, Neighbors.ADD_REMOVE))


def eps_of(unit, own, spread, replaced=None):
    return units.bound(unit, own, replaced, spread, delta=DELTA).eps


@pytest.mark.parametrize("times", [1, 3])
def test_a_subject_of_sampled_records_has_the_bound_of_as_many_records_at_as_many_users(times):
    """Where nothing is declared of its users, each of its records may be at another one: that costs most."""
    own = of_items(times)
    found = {}
    for items, users, at_one in itertools.product((1, 3), (None, 1, 2, 3), (None, 1, 2)):
        spread = Spread(
            known=True, alone=False, users_per_subject=users, items_per_subject=items, items_per_user=at_one
        )
        mine = dataclasses.replace(
            own.rounds[0].mechanism, items=items, users_spanned=users or items, items_per_user=at_one
        )
        expected = accounting.bound([Round(mechanism=mine, participation=Everyone())] * times, delta=DELTA).eps
        found[items, users, at_one] = eps_of(Unit.SUBJECT, own, spread)
        assert found[items, users, at_one] == pytest.approx(expected)
    assert found[3, None, None] == pytest.approx(found[3, 3, None])
    assert found[3, None, None] == pytest.approx(max(found.values()))
    assert found[1, None, None] < 0.7 * found[3, 1, None]


def test_items_of_one_subject_need_a_limit_and_users_of_sampled_records_have_none():
    own = of_items()
    with pytest.raises(NotApplicable, match="a subject may have any number of them"):
        eps_of(Unit.SUBJECT, own, Spread(known=True, alone=False))
    with pytest.raises(NotApplicable, match="a user may hold any number of them"):
        eps_of(Unit.USER, own, Spread(known=True, alone=False, items_per_subject=3))


@pytest.mark.parametrize("native", [Unit.USER, Unit.SUBJECT])
def test_only_users_and_subjects_can_be_one_to_one(native):
    """An item is another matter, however its user's records lie."""
    own = of_users() if native is Unit.USER else of_items(unit=Unit.SUBJECT, items=3)
    alone = Spread(known=True, alone=True, users_per_subject=1, items_per_subject=3)
    plain = accounting.bound(own.rounds, delta=DELTA).eps
    for unit in (Unit.USER, Unit.SUBJECT):
        assert eps_of(unit, own, alone) == pytest.approx(plain)
    if native is Unit.USER:
        with pytest.raises(NotApplicable, match="changing one item may replace a user's data"):
            eps_of(Unit.ITEM, own, alone)
    else:  # its own record, replaced by another one of the same subject
        assert eps_of(Unit.ITEM, own, alone) != pytest.approx(plain)


@pytest.mark.parametrize("unit", [Unit.ITEM, Unit.SUBJECT])
@pytest.mark.parametrize("times", [1, 3])
def test_who_is_at_several_users_has_the_bound_of_all_of_them_together(unit, times):
    own, limit = of_users(times), {Unit.ITEM: "users_per_item", Unit.SUBJECT: "users_per_subject"}[unit]
    spent = []
    for users in (1, 2, 5):
        spread = Spread(known=True, alone=False, **{limit: users})
        spent.append(eps_of(unit, own, spread, replaced=own))
        assert spent[-1] == pytest.approx(groups.subject_bound(own.rounds, users=users, delta=DELTA).eps)
        together = exact.exact_attacks(
            Gaussian(std=6.0, sensitivity=2.0 * users, neighbors=Neighbors.REPLACE_ONE), rounds=times
        )
        assert best_bound([attack.eps(delta=DELTA) for attack in together]).eps <= spent[-1]
    assert spent[0] < 0.7 * spent[1] < spent[1] < 0.7 * spent[2]
    other = {"users_per_subject": 5} if unit is Unit.ITEM else {"users_per_item": 5}
    assert eps_of(unit, own, Spread(known=True, alone=False, **other), replaced=own) == pytest.approx(spent[0])


def test_what_is_unknown_of_a_subject_is_said_and_not_guessed():
    own = of_users()
    with pytest.raises(NotApplicable, match="there is no bound for that"):
        eps_of(Unit.SUBJECT, own, Spread(known=True, alone=False))
    with pytest.raises(NotApplicable, match="do not say whom a record is about"):
        eps_of(Unit.SUBJECT, own, Spread(known=False, alone=False), replaced=own)
    with pytest.raises(NotApplicable, match="was not declared"):
        eps_of(Unit.SUBJECT, own, Spread(known=True, alone=False, users_per_subject=None), replaced=own)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("declared", [chosen for size in range(4) for chosen in itertools.combinations(LIMITS, size)])
def test_every_limit_that_is_declared_is_in_the_assumption_and_no_other(declared, measured):
    words = {
        "users_per_subject": "records at more than 2 users",
        "items_per_subject": "more than 3 records in total",
        "items_per_user": "more than 4 at one user",
    }
    values = dict(zip(LIMITS, (2, 3, 4), strict=True))
    spread = Spread(
        known=True,
        alone=False,
        measured=measured,
        **{name: values[name] if name in declared else None for name in LIMITS},
    )
    said = spread.assumption
    assert [name for name in LIMITS if words[name] in said] == list(declared)
    if not declared:
        assert said == "nothing is declared of how a subject's records lie"
    else:
        assert said.startswith("no subject has ")
        assert ("computed from the data" in said) == measured and ("declared before the training" in said) != measured
    assert "more than 1 user (" in Spread(known=True, alone=False).assumption


def test_units_that_are_known_are_counted():
    spread = Spread(users=3, items=50, subjects=20, known=True, alone=False)
    assert [spread.count_of(unit) for unit in (Unit.USER, Unit.ITEM, Unit.SUBJECT)] == [3, 50, 20]
    assert dataclasses.replace(spread, known=False).count_of(Unit.SUBJECT) == 3, "each user is one subject"


@pytest.mark.parametrize(
    "own", [of_users(), of_items(), of_items(unit=Unit.SUBJECT, items=3)], ids=["user", "item", "subject"]
)
def test_the_table_has_a_bound_or_a_reason_for_every_unit(own):
    """And its numbers are those of `bound`."""
    spread = Spread(known=True, alone=False, users_per_subject=2, items_per_subject=3, users_per_item=2)
    replaced = own if own.scope.unit is Unit.USER else None
    found = units.statements_by_unit(own, replaced, spread, delta=DELTA)
    for unit in Unit:
        statement = found[unit]
        try:
            expected = eps_of(unit, own, spread, replaced)
        except NotApplicable as refusal:
            assert statement.is_unbounded and str(refusal) in str(statement)
        else:
            assert statement.eps == pytest.approx(expected) and statement.verdict is Verdict.CERTIFIED
        if unit is Unit.SUBJECT and own.scope.unit is not Unit.SUBJECT:
            assert spread.assumption in statement.assumptions


def test_a_bound_for_another_unit_is_stated_for_replacement_where_it_was_computed_so():
    """An item more or less replaces its user's update; an item of a capped subject may let another one in."""
    own, replaced = of_users(neighbors=Neighbors.ADD_REMOVE), of_users()
    spread = Spread(known=True, alone=False, users_per_subject=3, users_per_item=2)
    found = units.statements_by_unit(own, replaced, spread, delta=DELTA)
    assert {unit: found[unit].neighbors for unit in Unit} == {
        Unit.USER: Neighbors.ADD_REMOVE, Unit.ITEM: Neighbors.REPLACE_ONE, Unit.SUBJECT: Neighbors.REPLACE_ONE
    }  # fmt: skip
    assert "no record is held by more than 2 users" in found[Unit.ITEM].assumptions
    found = units.statements_by_unit(of_items(unit=Unit.SUBJECT, items=3), None, spread, delta=DELTA)
    assert found[Unit.SUBJECT].neighbors is Neighbors.ADD_REMOVE
    assert found[Unit.ITEM].neighbors is Neighbors.REPLACE_ONE
    assert "another record of the same subject at the same user" in " ".join(found[Unit.ITEM].assumptions)
