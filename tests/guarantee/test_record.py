"""One contract for whatever a protocol states: over rounds, sampling, adversaries and units, and rounds that follow."""

import dataclasses
import itertools
import json

import pytest

from dovetail.events import Everyone, FixedSize, NonPrivate, Poisson
from dovetail.guarantee import Guarantee, Spread, quotes
from dovetail.guarantee.quotes import Terms
from dovetail.guarantee.record import Record
from dovetail.statements import NotApplicable, Trust, Unit, Verdict

USERS, DIM, DELTA = 60, 3, 1e-5
RECORDS = {"clip_norm": 0.5, "noise_multiplier": 4.0, "items_per_subject": 2, "sampling_rate": 0.1}
NAMES = {
    "dp_fl": {"clip_norm": 0.5, "noise_multiplier": 4.0},
    "ldp_fl": {"clip_norm": 0.5, "noise_multiplier": 4.0},
    "secagg": {"clip_norm": 0.5, "noise_multiplier": 4.0},
    "split_and_mix": {"clip_norm": 0.5, "noise_multiplier": 4.0, "mixing_error": 1e-9},
    "privunit": {"clip_norm": 0.5, "eps_local": 2.0},
    "ss_simple": {"clip_value": 0.1, "eps_local": 0.5},
    "ss_topk": {"clip_value": 0.1, "eps_local": 0.5, "k": 1},
    "ss_double": {"clip_value": 0.1, "eps_local": 0.5, "beta": 0.5},
    "apes": {"clip_value": 0.1, "budgets": [0.2, 0.6]},
    "unis": {"clip_value": 0.1, "budgets": [0.2, 0.6]},
    "central_sub": RECORDS,
    "local_sub": RECORDS,
    "fedavg": {},
}
every_protocol = pytest.mark.parametrize("name", NAMES)


def training(name, *, rounds=1, participation=Everyone(), **more) -> Guarantee:  # noqa: B008 - frozen
    terms = Terms(
        num_users=USERS, dim=DIM, delta=DELTA, rounds=rounds, participation=participation, settings=NAMES[name]
    )
    return dataclasses.replace(quotes.guarantee(name, terms), **more)


def numbers(record):
    """Every eps of a record; infinite where nothing is promised."""
    return {
        "certified": record.certified_statement().eps,
        "local": record.local_statement().eps,
        **{unit: statement.eps for unit, statement in record.statements_by_unit().items()},
    }


@every_protocol
def test_more_rounds_cost_more_to_whomever_anything_is_promised(name):
    """Against the adversary that is stated, against everybody, and for every unit."""
    few, many = (numbers(training(name, rounds=rounds).record()) for rounds in (1, 4))
    for what, eps in few.items():
        assert many[what] > 1.3 * eps or eps == many[what] == float("inf"), what
    assert few["certified"] < float("inf") or name == "fedavg"


@every_protocol
def test_who_trusts_nobody_is_promised_no_more(name):
    record = training(name, rounds=2).record()
    assert record.local_statement().eps >= record.certified_statement().eps * (1 - 1e-9)
    assert record.local_statement().trust is Trust.LOCAL


@pytest.mark.parametrize("participation", [Poisson(prob=0.2), FixedSize(size=USERS, population=5 * USERS)], ids=str)
@every_protocol
def test_who_sees_names_sees_who_was_sampled(name, participation):
    """What is promised without trust is not amplified; what is promised with it is no worse for being sampled."""
    whole = training(name, rounds=2).record()
    try:
        drawn = training(name, rounds=2, participation=participation).record()
    except (NotApplicable, ValueError):
        assert name in ("secagg", "central_sub", "local_sub", "apes", "unis") or isinstance(participation, Poisson)
        return
    assert drawn.local_statement().eps == pytest.approx(whole.local_statement().eps)
    assert drawn.certified_statement().eps <= whole.certified_statement().eps * (1 + 1e-9)


@every_protocol
def test_records_that_follow_each_other_are_the_record_of_all_rounds(name):
    whole = training(name, rounds=3)
    first, rest = whole.record(whole.cohorts[:1]), whole.record(whole.cohorts[1:])
    assert first.followed_by(rest) == whole.record()
    nothing = whole.record(())
    assert nothing.followed_by(whole.record()) == whole.record() == whole.record().followed_by(nothing)


@pytest.mark.parametrize("reproducible", [False, True])
@every_protocol
def test_every_statement_says_what_is_declared_and_on_whose_word_it_stands(name, reproducible):
    """To every adversary, and for every unit."""
    own = "users' code sees one record at a time"
    plain = training(name, reproducible=reproducible).record()
    said = training(name, reproducible=reproducible).with_declaration(own).record()
    for record, declared in ((plain, False), (said, True)):
        statements = [
            record.certified_statement(),
            record.local_statement(),
            record.shuffler_statement(),
            *record.statements_by_unit().values(),
        ]
        for statement in filter(None, statements):
            assert (own in statement.assumptions) == declared
            if not statement.is_unbounded:
                word = Verdict.DECLARED if declared else Verdict.CERTIFIED
                if reproducible:
                    word = Verdict.DECLARED_REPRODUCIBLE if declared else Verdict.REPRODUCIBLE
                assert statement.verdict is word
    assert numbers(plain) == numbers(said)


@every_protocol
def test_what_is_asked_about_another_unit_is_the_line_of_that_unit(name):
    for unit in Unit:
        record = training(name, rounds=2, unit=unit).record()
        line = record.statements_by_unit()[unit]
        for what in ("eps", "delta", "unit", "neighbors", "trust", "adversary", "assumptions", "verdict", "population"):
            assert getattr(record.certified_statement(), what) == getattr(line, what), what
        try:
            assert training(name, rounds=2, unit=unit).bound().eps == record.certified_statement().eps
        except NotApplicable:
            assert record.certified_statement().is_unbounded


@every_protocol
def test_only_where_a_shuffler_is_trusted_is_it_an_adversary(name):
    record = training(name).record()
    shuffled = record.own.scope.trust is Trust.SHUFFLE
    assert (record.shuffler_statement() is not None) == shuffled
    if shuffled and not isinstance(record.slots, NonPrivate):
        assert record.shuffler_statement().eps <= record.local_statement().eps


@pytest.mark.parametrize("name", ["central_sub", "local_sub", "dp_fl"])
def test_that_nobody_knows_whom_records_are_about_is_said_of_data_and_of_subjects_alone(name):
    for known, describes_data in itertools.product((False, True), repeat=2):
        spread = Spread(known=known, describes_data=describes_data, alone=False)
        said = training(name, spread=spread).record().certified_statement().assumptions
        unknown = any("the data do not say whom a record is about" in line for line in said)
        assert unknown == (name != "dp_fl" and describes_data and not known)


@every_protocol
def test_a_record_is_the_same_when_it_is_read_again(name):
    record = training(name, rounds=3).with_declaration("own code").record()
    written = json.loads(json.dumps(record.to_json()))
    again = Record.from_json(written)
    assert again == record
    assert (again.certified_statement(), again.local_statement()) == (
        record.certified_statement(),
        record.local_statement(),
    )


@pytest.mark.parametrize(
    "changed",
    [
        *({"delta": delta} for delta in (-1e-9, 1.5, float("nan"))),
        *({"eps": eps} for eps in (-1.0, float("nan"))),
        *({"spread": {name: 0}} for name in ("users", "items", "subjects", "users_per_subject", "items_per_subject")),
        {"own": {"rounds": [[0, 2]]}},
        {"reports": [[0, 2]]},
        {"format": -1},
    ],
    ids=str,
)
def test_a_record_that_no_run_can_have_made_is_refused(changed):
    written = training("dp_fl", rounds=3).record().to_json()
    assert Record.from_json(written)
    for key, value in changed.items():
        written[key] = {**written[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ValueError):
        Record.from_json(written)
