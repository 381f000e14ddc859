"""Numbers that a run prints, or that its noise rests on, are declared: none tells whether one unit is there."""

import dataclasses
import json

import numpy as np
import pytest
from grids import later

import dovetail
from dovetail import Dataset
from dovetail.data import Clients, Task
from dovetail.experiment.config import TaskConfig
from dovetail.experiment.folder import TIMING_BANNER
from dovetail.experiment.population import DEALT_NOTES, PLACES_NOTE, ROWS_NOTE, assign_records, spread_of
from dovetail.protocols.curator.dp_fl import DpFl

PEOPLE, ROWS = 12, 5
NOISY = ("hmac_sha256", "accuracy", "auc", "metrics", "learned", "ledger", "chain", "out", "head")


def dataset(*, removed=None, unit="user"):
    """Twelve users with five rows each, about thirty people; without one user, one person, or one row."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(PEOPLE, dtype=np.int32), ROWS)
    subjects = rng.permutation(PEOPLE * ROWS).astype(np.int32) // 2
    labels = rng.integers(0, 2, PEOPLE * ROWS)
    inputs = (np.stack([labels, 1 - labels], axis=1) + 0.3 * rng.normal(size=(PEOPLE * ROWS, 2))).astype(np.float32)
    there = np.ones(len(users), bool)
    if removed is not None:
        there = {"user": users, "subject": subjects, "item": np.arange(len(users))}[unit] != removed
    return Dataset(
        inputs=inputs[there],
        labels=labels[there],
        test_inputs=inputs[:20] + 0.1,
        test_labels=labels[:20],
        num_classes=2,
        users=users[there],
        subjects=subjects[there],
        roster=PEOPLE,
    )


USERS = {
    "dp_fl": {"noise_multiplier": 2.0},
    "dp_fl-adaptive": {"noise_multiplier": 2.0, "clip": "adaptive"},
    "secagg": {"noise_multiplier": 2.0},
    "secagg-aggregators": {"noise_multiplier": 2.0, "noise": "aggregators"},
    "split_and_mix": {"noise_multiplier": 2.0, "mixing_error": 1e-6},
    "ldp_fl": {"noise_multiplier": 2.0},
    "privunit": {"eps_local": 2.0},
    "ss_simple": {"eps_local": 0.5},
    "ss_double": {"eps_local": 0.5, "beta": 0.4},
    "ss_topk": {"eps_local": 0.5, "k": 2},
    "apes": {"budgets": [0.5, 2.0]},
    "s_apes": {"budgets": [0.5, 2.0], "keep": 0.5},
    "unis": {"budgets": [0.5, 2.0]},
    "pldp": {"budgets": [0.5, 2.0]},
    "ldp_min": {"budgets": [0.5, 2.0]},
    "fedavg": {},
}
RECORDS = {
    "central_sub": {"noise_multiplier": 2.0, "items_per_subject": 2},
    "local_sub": {"noise_multiplier": 2.0, "items_per_subject": 2, "steps": 2},
}
CASES = [(name, "user", "add-remove") for name in ("dp_fl", "dp_fl-adaptive", "secagg", "split_and_mix")]
CASES += [(name, "user", "replace-one") for name in USERS]
CASES += [(name, unit, "add-remove") for name in RECORDS for unit in ("subject", "item")]
QUICK = {("dp_fl", "add-remove"), ("secagg", "add-remove"), ("dp_fl", "replace-one"), ("ss_topk", "replace-one")}


def files(data, name, unit, neighbors, out, **cohort):
    """All that a run writes for anybody to read, its model and what follows from the model apart."""
    settings = {**USERS, **RECORDS}[name]
    if name in RECORDS and unit == "item":
        settings = {**settings, "items_per_subject": 1}
    chosen = {f"protocol.{key}": value for key, value in settings.items()}
    dovetail.train(
        data,
        protocol=name.partition("-")[0],
        settings={
            "noise": "seeded",
            "cohort.kind": "everyone",
            "cohort.rounds": 3,
            **{f"cohort.{key}": value for key, value in cohort.items()},
            "privacy.neighbors": neighbors,
            **({"privacy.unit": unit, "task.records": 60} if name in RECORDS else {}),
            **chosen,
        },
        out=out,
        ledger=out.parent / f"beside-{out.name}" / "people.json",
    )
    texts = {}
    for file in sorted(out.iterdir()):
        if file.name == "timing.json":
            assert json.loads(file.read_text())["banner"] == TIMING_BANNER  # which says what it is
        elif file.suffix in (".json", ".jsonl"):
            lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
            texts[file.name] = [_public(json.loads(line)) for line in lines]
        elif file.suffix == ".npz":
            with np.load(file) as arrays:
                texts[file.name] = {key: arrays[key].shape for key in arrays}
        else:
            texts[file.name] = file.read_text()
    return texts


def _public(value):
    """Without what the model, the keyed fingerprint and the clock decide."""
    if isinstance(value, dict):
        return {key: _public(inner) for key, inner in value.items() if key not in NOISY}
    return [_public(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("name", "unit", "neighbors"),
    [case if (case[0], case[2]) in QUICK or case[0] in RECORDS else later(*case) for case in CASES],
)
def test_nothing_that_is_written_tells_whether_one_unit_is_there(tmp_path, name, unit, neighbors):
    """Under replace-one the user stays, with one row in place of five."""
    if neighbors == "replace-one":
        whole, other = dataset(), dataset()
        kept = np.ones(60, bool)
        kept[11:15] = False
        other = dataclasses.replace(
            other,
            **{part: getattr(other, part)[kept] for part in ("inputs", "labels", "users", "subjects")},
        )
    else:
        whole, other = dataset(), dataset(removed=3, unit=unit)
    assert len(other.labels) < len(whole.labels)
    found = [files(data, name, unit, neighbors, tmp_path / str(number)) for number, data in enumerate((whole, other))]
    assert found[0] == found[1]


@pytest.mark.parametrize("cohort", [{"kind": "poisson", "size": 6}, {"kind": "disjoint", "size": 4}])
def test_nor_does_who_takes_part_in_which_round(tmp_path, cohort):
    pair = (dataset(), dataset(removed=3))
    found = [
        files(data, "dp_fl", "user", "add-remove", tmp_path / str(number), **cohort) for number, data in enumerate(pair)
    ]
    assert found[0] == found[1]


PLAIN = {"cohort.rounds": 2, "protocol.noise_multiplier": 2.0, "privacy.neighbors": "add-remove"}


def without_roster():
    return dataclasses.replace(dataset(), roster=None)


@pytest.mark.parametrize(
    ("protocol", "more", "said"),
    [
        ("dp_fl", {}, "under add-remove the number of users is declared, not counted"),
        ("dp_fl", {"cohort.kind": "disjoint", "cohort.size": 3, "task.users": 20}, "pass user= and roster= to"),
        ("central_sub", {"task.users": 20}, "set task.records to a public number"),
        ("central_sub", {"task.users": 20, "protocol.batch": 5}, "set task.records to a public number"),
        ("dp_fl", {"task.users": 11}, "the data name 12 users, more than task.users = 11"),
        ("dp_fl", {"task.users": 12, "task.spread": 1}, "more than task.spread = 1 declares"),
    ],
)
def test_what_must_be_declared_is_asked_for_by_its_key(protocol, more, said):
    with pytest.raises(ValueError, match=said):
        dovetail.train(without_roster(), protocol=protocol, settings={**PLAIN, **more})


@pytest.mark.parametrize(
    ("roster", "more", "said"),
    [
        (None, {"task.users": 59}, "the data have 60 rows, each of them a user, more than task.users = 59"),
        (60, {"cohort.kind": "disjoint", "cohort.size": 3}, "pass user= and roster= to"),
        (60, {"task.partition": "by-user"}, "under add-remove the number of users is declared, not counted"),
    ],
)
def test_rows_that_are_users_have_no_place_on_a_roster_and_none_is_left_out(roster, more, said):
    """With a row less, others would be left out, or be in other batches."""
    rows = dataclasses.replace(dataset(), users=None, roster=roster)
    with pytest.raises(ValueError, match=said):
        dovetail.train(rows, protocol="dp_fl", settings={**PLAIN, **more})


def unnamed(times=1):
    """Sixty rows about thirty people, or more of the same, whose holders the data do not name."""
    one = dataset()
    parts = {name: np.concatenate([getattr(one, name)] * times) for name in ("inputs", "labels", "subjects")}
    return dataclasses.replace(one, users=None, roster=None, **parts)


@pytest.mark.parametrize(
    ("partition", "neighbors", "said"),
    [
        ("iid", "add-remove", "would deal everybody's records anew where one is missing"),
        ("silos", "add-remove", "would deal everybody's records anew where one is missing"),
        ("shards", "replace-one", "one record's label moves those of other users"),
        ("dirichlet", "replace-one", "one record's label moves those of other users"),
    ],
)
def test_records_that_would_be_dealt_anew_are_dealt_of_published_data_alone(partition, neighbors, said):
    """Without one of 60 rows, the sum of six users moved by 1.6 to 2.0 clip norms, not by 1."""
    numbers = {"task.silos": 6, "task.spread": 2} if partition == "silos" else {"task.users": 6}
    settings = {**PLAIN, "task.partition": partition, "privacy.neighbors": neighbors, **numbers}
    with pytest.raises(ValueError, match=said):
        dovetail.train(unnamed(20), protocol="dp_fl", settings=settings)
    task = Task(name="benchmark", load=lambda *, folder: unnamed(20), published=True)
    assert dovetail.train(task, protocol="dp_fl", settings=settings).statement.verdict.value == "certified"


@pytest.mark.parametrize("partition", ["iid", "silos"])
def test_replaced_records_stay_where_they_are_and_the_statement_says_so(partition):
    """What is replaced keeps its row; a label, an input and whom nobody else is about move no other row."""
    numbers = {"task.silos": 6, "task.spread": 2} if partition == "silos" else {"task.users": 6}
    settings = {**PLAIN, "task.partition": partition, "privacy.neighbors": "replace-one", **numbers}
    result = dovetail.train(unnamed(), protocol="dp_fl", settings=settings)
    assert DEALT_NOTES[partition] in result.statement.assumptions
    assert all(DEALT_NOTES[partition] in statement.assumptions for statement in result.units.values())
    other = unnamed()
    other.labels[7], other.inputs[7] = 1 - other.labels[7], 9.0
    config = TaskConfig(
        name="benchmark", partition=partition, **{key.partition(".")[2]: n for key, n in numbers.items()}
    )
    held = [assign_records(config, data, seed=0) for data in (unnamed(), other)]
    np.testing.assert_array_equal(held[0].records, held[1].records)
    np.testing.assert_array_equal(held[0].counts, held[1].counts)


def test_that_places_go_by_subjects_where_they_are_the_users_is_said():
    settings = {"cohort.rounds": 2, "protocol.noise_multiplier": 2.0, "task.partition": "by-user"}
    for more, is_said in (({"cohort.kind": "disjoint", "cohort.size": 3}, True), ({}, False)):
        result = dovetail.train(unnamed(), protocol="dp_fl", settings={**settings, **more})
        assert (PLACES_NOTE in result.statement.assumptions) is is_said


def test_that_batches_and_budgets_go_by_ids_is_said_where_no_roster_fixes_them():
    settings = {"cohort.rounds": 2, "protocol.noise_multiplier": 2.0}
    disjoint = {**settings, "cohort.kind": "disjoint", "cohort.size": 3}
    for data, more, is_said in (
        (without_roster(), disjoint, True),
        (dataset(), disjoint, False),
        (without_roster(), settings, False),
    ):
        result = dovetail.train(data, protocol="dp_fl", settings=more)
        assert (PLACES_NOTE in result.statement.assumptions) is is_said


@pytest.mark.parametrize(
    "more",
    [
        {"task.records": 100, "protocol.batch": 5},
        {"protocol.batch": 5, "protocol.sampling_rate": 0.1},
    ],
)
def test_declared_records_set_rate_and_batch(tmp_path, more):
    result = dovetail.train(
        without_roster(), protocol="central_sub", settings={**PLAIN, "task.users": 20, **more}, out=tmp_path / "run"
    )
    written = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert written["protocol"]["sampling_rate"] == (0.05 if "task.records" in more else 0.1)
    assert written["protocol"]["batch"] == 5
    assert written["origin"]["users"] == 20
    assert written["origin"]["records"] == more.get("task.records")
    assert any("these declared numbers are public" in line for line in result.statement.assumptions)


def test_a_subject_is_promised_what_its_declared_spread_allows():
    open_ended = dovetail.train(dataset(), settings={**PLAIN})
    declared = dovetail.train(dataset(), settings={**PLAIN, "task.spread": 2})
    said = {result.units[dovetail.statements.Unit.SUBJECT] for result in (open_ended, declared)}
    assert {statement.is_unbounded for statement in said} == {True, False}
    assert "was not declared (task.spread)" in str(open_ended.units[dovetail.statements.Unit.SUBJECT])
    assert "no subject has records at more than 2 users (as declared" in str(
        declared.units[dovetail.statements.Unit.SUBJECT]
    )


def test_counts_of_published_data_are_public():
    task = Task(name="benchmark", load=lambda *, folder: without_roster(), published=True)
    result = dovetail.train(task, settings={**PLAIN, "cohort.kind": "everyone"})
    assert result.statement.population == PEOPLE


def test_rows_that_count_as_users_are_said_to():
    """Twenty people with sixty rows were sixty users, without a word."""
    rows = dataclasses.replace(dataset(), users=None, subjects=None, roster=None)
    result = dovetail.train(rows, settings={"cohort.rounds": 2, "protocol.noise_multiplier": 2.0})
    assert ROWS_NOTE in result.statement.assumptions
    named = dovetail.train(dataset(), settings={"cohort.rounds": 2, "protocol.noise_multiplier": 2.0})
    assert ROWS_NOTE not in named.statement.assumptions
    several = {"task.partition": "iid", "task.users": 6, "cohort.rounds": 2, "protocol.noise_multiplier": 2.0}
    assign_records = dovetail.train(rows, settings=several)
    assert ROWS_NOTE not in assign_records.statement.assumptions, "a user has ten rows"
    for statement in (result.statement, named.statement, assign_records.statement):
        assert "the test records are public: what is measured on them has no noise" in statement.assumptions


TABLE = {"visits": [1.0, 2.0, 3.0, 4.0], "ill": ["no", "yes", "no", "yes"]}
HOW = {"target": "ill", "inputs": ["visits"], "classes": ["no", "yes"], "test": TABLE}


@pytest.mark.parametrize("name", ["patient", "Patient ID", "userId", "subject", "person_id", "uid"])
def test_a_column_that_looks_like_ids_is_asked_about(name):
    table = {**TABLE, name: ["a", "a", "b", "c"]}
    with pytest.raises(
        ValueError, match=f"the column '{name}' of the mapping looks like ids, and 1 of its rows repeat"
    ):
        Dataset.from_pandas(table, **HOW)
    assert Dataset.from_pandas(table, user=None, **HOW).users is None
    assert Dataset.from_pandas(table, user=name, **HOW).users.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "column", [{"patient": ["a", "b", "c", "d"]}, {"ideal": [1, 1, 2, 2]}, {"considered": [0] * 4}]
)
def test_other_columns_are_not_asked_about(column):
    assert Dataset.from_pandas({**TABLE, **column}, **HOW).users is None


def test_a_roster_gives_everyone_a_place_with_records_or_without():
    table = {**TABLE, "patient": ["b", "b", "d", "d"]}
    data = Dataset.from_pandas(table, user="patient", roster=["a", "b", "c", "d"], **HOW)
    assert (data.users.tolist(), data.roster) == ([1, 1, 3, 3], 4)
    with pytest.raises(ValueError, match="1 users of the data are not on the roster, such as 'd'"):
        Dataset.from_pandas(table, user="patient", roster=["a", "b", "c"], **HOW)
    with pytest.raises(ValueError, match="user= must say whose a row is"):
        Dataset.from_pandas(table, user=None, roster=["a"], **HOW)


def test_who_is_held_out_has_no_place_among_those_trained_on():
    names = [f"p{number}" for number in range(40)]
    table = {"patient": names, "visits": [1.0] * 40, "ill": ["no", "yes"] * 20}
    how = {"target": "ill", "classes": ["no", "yes"], "user": "patient", "roster": names, "test_share": 0.3}
    whole = Dataset.from_pandas(table, **how)
    fewer = Dataset.from_pandas({key: values[1:] for key, values in table.items()}, **how)
    assert whole.roster == fewer.roster < 40
    assert set(fewer.users) <= set(whole.users)


def test_users_that_share_records_are_not_alone():
    """Where a record is at two users, what protects one of them protects nobody whom the record is about."""
    rows = dataclasses.replace(dataset(), users=None, subjects=None, roster=None)
    task = Task(name="benchmark", load=lambda *, folder: rows, published=True)
    settings = {"cohort.rounds": 1, "cohort.kind": "everyone", "protocol.noise_multiplier": 2.0}
    once = dovetail.train(task, settings={**settings, "task.partition": "iid", "task.users": 6})
    assert not once.units[dovetail.statements.Unit.SUBJECT].is_unbounded
    clients = Clients.from_rows(np.array([[0, 1], [1, 2], [3, 4]]))
    config = TaskConfig(name="benchmark", partition="shards")
    for published in (True, False):
        spread = spread_of(config, clients, clients, rows, DpFl(), published=published)
        assert (spread.alone, spread.users_per_item) == (False, 2)


def rows_of(owners, about):
    """Rows of these users about these subjects."""
    return dataclasses.replace(
        dataset(),
        inputs=np.zeros((len(owners), 2), np.float32),
        labels=np.zeros(len(owners), int),
        users=owners.astype(np.int32),
        subjects=about.astype(np.int32),
        roster=None,
    )


@pytest.mark.parametrize("declared", [{}, {"spread": 9, "records": 70, "subjects": 30}])
@pytest.mark.parametrize("seed", range(4))
def test_limits_of_published_data_are_counted_one_by_one_and_of_others_none(seed, declared):
    """As brute force counts them; what is declared comes first, and of private data alone."""
    rng = np.random.default_rng(seed)
    owners, about = rng.integers(0, 5, 40), rng.integers(0, 12, 40).astype(np.int32)
    clients = Clients.from_owners(np.arange(40), owners, num_clients=5)
    data = rows_of(owners, about)
    config = TaskConfig(name="benchmark", partition="given", **declared)
    counted, private = (
        spread_of(config, clients, clients, data, DpFl(), published=published) for published in (True, False)
    )
    at = {subject: owners[about == subject] for subject in np.unique(about)}
    assert counted.items == declared.get("records", 40)
    assert counted.subjects == declared.get("subjects", len(at))
    assert counted.users_per_subject == max(max(len(set(users)) for users in at.values()), declared.get("spread", 1))
    assert counted.items_per_subject == max(len(users) for users in at.values())
    assert counted.items_per_user == max(np.bincount(users).max() for users in at.values())
    assert counted.measured and not private.measured and not counted.alone
    assert (private.items, private.subjects) == (declared.get("records"), declared.get("subjects"))
    assert private.users_per_subject == declared.get("spread")
    assert private.items_per_subject is private.items_per_user is None


def test_subjects_are_alone_only_where_each_is_all_of_one_user():
    config = TaskConfig(name="benchmark", partition="given")
    for owners, about, alone, users in (
        ([0, 0, 1, 2], [7, 7, 8, 9], True, 1),
        ([0, 0, 1, 2], [7, 8, 5, 9], False, 1),  # two subjects at one user
        ([0, 0, 1, 2], [7, 7, 9, 9], False, 2),  # one subject at two users
    ):
        clients = Clients.from_owners(np.arange(4), np.array(owners), num_clients=3)
        data = rows_of(np.array(owners), np.array(about))
        counted = spread_of(config, clients, clients, data, DpFl(), published=True)
        assert (counted.alone, counted.users_per_subject) == (alone, users)
        assert not spread_of(config, clients, clients, data, DpFl(), published=False).alone
