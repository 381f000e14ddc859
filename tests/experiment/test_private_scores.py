"""Scores on held-out people who are protected, too: every protocol, every road to a score, every refusal."""

import dataclasses
import json

import numpy as np
import pytest
from grids import later

import dovetail
from dovetail import Dataset, pages
from dovetail.experiment import config as configs
from dovetail.experiment import training
from dovetail.experiment.callbacks import Callback, EarlyStopping
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.preparation import prepare
from dovetail.experiment.verify import verify
from dovetail.guarantee.record import PARALLEL
from dovetail.protocols import PROTOCOLS

PEOPLE = 150
QUICK = {"cohort.rounds": 2, "cohort.kind": "everyone", "noise": "seeded"}
NOISY = ("hmac_sha256", "accuracy", "auc", "metrics", "intervals", "scores", "baseline", "ledger", "chain", "out")


def table(*, changed=None, removed=None, target="ill", seed=0):
    """Visits of 150 patients, three each; with other data for one of them, or without one."""
    rng = np.random.default_rng(seed)
    patient = np.repeat(np.arange(PEOPLE), 3)
    age = rng.uniform(18, 95, len(patient)).round(1)
    risk = age / 100 + rng.normal(0, 0.1, len(patient))
    if changed is not None:
        age[patient == changed] = 20.0
        risk[patient == changed] = 2.0
    kept = patient != (-1 if removed is None else removed)
    answers = {
        "ill": np.where(risk > 0.5, "yes", "no"),
        "kind": np.array(["a", "b", "c"])[np.digitize(risk, [0.4, 0.7])],
        "risk": risk.clip(-1, 2),
        "x": (risk > 0.5).astype(int),
        "y": (risk > 0.3).astype(int),
    }
    columns = {"patient": [f"p{number:03}" for number in patient[kept]], "age": age[kept].tolist()}
    names = target if isinstance(target, list) else [target]
    return columns | {name: answers[name][kept].tolist() for name in names}


def read(frame, *, target="ill", **options):
    classes = {"ill": ["no", "yes"], "kind": ["a", "b", "c"]}.get(target if isinstance(target, str) else "")
    bounds = {"age": (0, 100)} | ({"risk": (-1.0, 2.0)} if target == "risk" else {})
    chosen = {"user": "patient", "test_share": 0.4, "classes": classes, **options}
    return Dataset.from_pandas(frame, target=target, bounds=bounds, **chosen)


DATA = read(table())


def train(data=DATA, *, protocol="dp_fl", eps=2.0, out=None, settings=None, **options):
    return dovetail.train(
        data,
        protocol=protocol,
        eps=eps,
        delta=1e-5,
        evaluate="private",
        out=out,
        settings={**QUICK, **(settings or {})},
        **options,
    )


def plan_of(data=DATA, *, protocol="dp_fl", eps=2.0, **settings):
    """The plan that `train` would run."""
    privacy = {"neighbors": PROTOCOLS[protocol].relation.value, "delta": 1e-5} | ({} if eps is None else {"eps": eps})
    tree = {"task": {"name": "dataset", "evaluate": "private"}, "protocol": {"name": protocol}, "privacy": privacy}
    return prepare(configs.parse(tree, {**QUICK, **settings}.items()), task=training.task_of(data))


class Listener(Callback):
    """Keeps all that a callback is told."""

    def __init__(self):
        self.told = []

    def on_round(self, progress):
        self.told.append(progress)


WORKS = {
    "dp_fl": {},
    "secagg": {},
    "split_and_mix": {"protocol.mixing_error": 1e-9},
    "ldp_fl": {},
    "privunit": {},
    "ss_simple": {},
    "ss_double": {"protocol.beta": 0.4},
    "ss_topk": {"protocol.k": 1},
    "central_sub": {"task.records": 270, "task.users": 150, "protocol.items_per_subject": 3},
}
REFUSED = {
    "fedavg": ({}, "the eps of the training, which is inf"),
    "local_sub": (
        {"task.records": 270, "task.users": 150, "protocol.items_per_subject": 3, "protocol.steps": 2},
        "no such sum of scores",
    ),
    "apes": ({"protocol.budgets": [0.5, 2.0]}, "a budget for every user"),
    "s_apes": ({"protocol.budgets": [0.5, 2.0], "protocol.keep": 0.5}, "a budget for every user"),
    "unis": ({"protocol.budgets": [0.5, 2.0]}, "a budget for every user"),
    "pldp": ({"protocol.budgets": [0.5, 2.0]}, "a budget for every user"),
    "ldp_min": ({"protocol.budgets": [0.5, 2.0]}, "a budget for every user"),
}


def test_every_protocol_is_here_but_those_for_one_number():
    assert {*WORKS, *REFUSED} == set(PROTOCOLS) - {"binary_sum", "real_sum"}


@pytest.mark.parametrize(
    "name", ["dp_fl", "secagg", *map(later, [name for name in WORKS if name not in ("dp_fl", "secagg")])]
)
def test_a_protocol_states_training_and_scores_within_one_eps(tmp_path, name):
    listener = Listener()
    result = train(protocol=name, settings=WORKS[name], out=tmp_path / "run", callbacks=[listener])
    assert 1.5 < result.statement.eps <= 2.0
    assert result.statement.proof.theorems[0] == PARALLEL
    learned, scored = result.statement.premises
    assert learned.eps <= 2.0
    assert 1.9 < scored.eps <= 2.0
    assert scored.trust is learned.trust or scored.trust.value == "local"  # never more trust than the training takes
    low, high = result.intervals["accuracy"]
    assert 0 <= low <= result.accuracy <= high <= 1
    assert verify(tmp_path / "run").agrees
    assert [progress.metrics for progress in listener.told] == [None, None]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["accuracy"] is None and line["metrics"] is None and line["eps"] > 0 for line in lines)


@pytest.mark.parametrize("name", REFUSED)
def test_other_protocols_are_refused_with_a_sentence(name):
    settings, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        plan_of(protocol=name, eps=None if "budgets" in str(settings) or name == "fedavg" else 2.0, **settings)


@pytest.mark.parametrize("target", ["kind", "risk", ["x", "y"]])
def test_every_kind_of_answer_has_scores(target):
    """At an eps at which noise is small they are those of the model on the held-out people."""
    result = train(read(table(target=target), target=target), eps=2000.0)
    for name, value in result.metrics.items():
        ends = np.array(result.intervals[name], float).reshape(-1, 2)
        assert (ends[:, 0] <= value).all()
        assert (value <= ends[:, 1]).all()
    assert set(result.metrics) == {"kind": {"accuracy"}, "risk": {"r2", "rmse"}}.get(
        str(target), {"accuracy", "label_accuracy"}
    )


def test_with_little_noise_scores_are_the_exact_ones_of_every_person():
    private = train(eps=2000.0)
    public = dovetail.train(DATA, eps=2000.0, delta=1e-5, settings=QUICK)
    assert private.parameters.keys() == public.parameters.keys()
    assert private.accuracy == pytest.approx(public.accuracy, abs=0.01)  # three visits each: people count as visits do
    assert private.auc == pytest.approx(public.auc, abs=0.02)
    assert public.intervals == {}
    assert "evaluation" not in public.to_json()


def files(data, out, **settings):
    """What a run writes for anybody to read, but for what its model and its noise decide."""
    dovetail.train(data, eps=2.0, delta=1e-5, evaluate="private", out=out, settings={**QUICK, **settings}, ledger=False)
    return {
        file.name: _public(json.loads(file.read_text()))
        for file in sorted(out.glob("*.json"))
        if "timing" not in file.name
    }


def _public(value):
    if isinstance(value, dict):
        return {key: _public(inner) for key, inner in value.items() if key not in NOISY}
    return [_public(inner) for inner in value] if isinstance(value, list) else value


def side_of(data, name):
    """Which side a dataset has a patient on, by rows."""
    return len(read(table(removed=name)).labels) < len(data.labels)


def test_files_differ_in_noise_and_model_alone_if_a_held_out_person_is_another(tmp_path):
    trained = next(number for number in range(PEOPLE) if side_of(DATA, number))
    tested = next(number for number in range(PEOPLE) if not side_of(DATA, number))
    found = [files(read(table(changed=changed)), tmp_path / str(changed)) for changed in (None, trained, tested)]
    assert found[0] == found[1] == found[2]
    assert found[0]["privacy.json"]["evaluation"]["people"] > 40


def test_files_differ_in_noise_and_model_alone_if_a_held_out_person_is_removed(tmp_path):
    roster = [f"p{number:03}" for number in range(PEOPLE)]
    tested = next(number for number in range(PEOPLE) if not side_of(DATA, number))
    found = [
        files(read(table(removed=gone), roster=roster), tmp_path / str(gone), **{"privacy.neighbors": "add-remove"})
        for gone in (None, tested)
    ]
    for written in found:
        written["privacy.json"]["evaluation"].pop("people")  # a noisy number under this relation
        written["ledger.json"]["evaluation"].pop("people")
    assert found[0] == found[1]


def test_a_row_that_is_replaced_stays_on_its_side():
    """Held out by what they hold, half of the rows that change would change sides."""
    moved = []
    for changed in range(0, 30, 3):
        pair = []
        for frame in (table(), table(changed=changed)):
            frame.pop("patient")
            data = read(frame, user=None)
            pair.append((data.held_out_people.rows, plan_of(data).scores.dataset.held_out_people.rows))
        moved.append((pair[0][0] != pair[1][0]).any())
        assert (pair[0][1] == pair[1][1]).all()
    assert any(moved)


@pytest.mark.parametrize("name", ["dp_fl", later("secagg"), later("split_and_mix"), later("ldp_fl")])
def test_the_noise_is_as_large_as_it_is_stated(name):
    """Of zero vectors the sums are noise alone: its size is accepted, two thirds and three halves of it are not."""
    from dovetail.randomness import Randomness

    release = plan_of(protocol=name).scores.release
    nothing = np.zeros((release.layout.people, release.layout.dim))
    drawn = np.concatenate(
        [release._noisy_sum_of_round(nothing, 0, Randomness.from_os(0)) for _ in range(-(-800 // nothing.shape[1]))]
    )
    ratio = drawn.std() / release.noise_std
    near = 4.5 / np.sqrt(2 * len(drawn))
    assert abs(ratio - 1) < near
    assert abs(ratio * 3 / 2 - 1) > near
    assert abs(ratio * 2 / 3 - 1) > near


def test_scores_that_nobody_saw_are_drawn_anew_after_a_kill(tmp_path, monkeypatch):
    """No file has them before the statement, which ends the run."""
    out = tmp_path / "run"
    finish = RunFolder.finish
    drawn = []

    def killed(self, privacy, *rest):
        drawn.append(privacy["evaluation"]["scores"])
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        train(out=out, settings={"noise": "os"})
    left = b"".join(file.read_bytes() for file in out.iterdir() if file.suffix != ".npz")
    assert str(drawn[0]["accuracy"])[:8].encode() not in left
    monkeypatch.setattr(RunFolder, "finish", finish)
    result = train(out=out, settings={"noise": "os"}, resume=True)
    assert result.metrics != drawn[0]
    assert verify(out).agrees


def test_scores_and_statement_of_a_changed_folder_do_not_verify(tmp_path):
    out = tmp_path / "run"
    train(out=out)
    stated = json.loads((out / "privacy.json").read_text())
    stated["evaluation"]["intervals"]["accuracy"] = [0.99, 1.0]
    (out / "privacy.json").write_text(json.dumps(stated))
    assert any("evaluation.intervals" in text for text in verify(out).differences)


def test_people_who_could_be_on_both_sides_are_refused():
    frame = table()
    both = read(table(), test=frame, test_share=None)
    with pytest.raises(ValueError, match="150 users have records to train on and to test on"):
        plan_of(both)
    strangers = {**table(seed=1), "patient": [f"q{number}" for number in np.repeat(np.arange(PEOPLE), 3)]}
    apart = plan_of(read(table(), test=strangers, test_share=None))
    assert apart.scores.people.places == PEOPLE
    assert any("nobody has records both" in text for text in apart.scores.record.own.scope.assumptions)
    nameless = {name: column for name, column in frame.items() if name != "patient"}
    with pytest.raises(ValueError, match="whose the test records are"):
        plan_of(read(table(), test=nameless, test_share=None))


def test_a_subject_at_several_users_is_promised_nothing():
    frame = {**table(), "person": [f"s{number % 40}" for number in range(3 * PEOPLE)]}
    data = read(frame, subject="person")
    result = train(data)
    units = {unit.value: statement for unit, statement in result.units.items()}
    assert units["user"].eps <= 2
    assert units["item"].eps <= 2
    assert units["subject"].is_unbounded
    with pytest.raises(ValueError, match="a subject may have records on both sides"):
        plan_of(data, protocol="central_sub", **WORKS["central_sub"])
    by_subject = read(frame, user=None, subject="person", inputs=["age"])
    settings = {**WORKS["central_sub"], "task.partition": "by-user"}
    assert plan_of(by_subject, protocol="central_sub", **settings).scores.people.places == 150  # as declared
    assert len(np.unique(by_subject.held_out_people.people)) < 40


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"privacy.unit": "item"}, "protects users or subjects"),
        ({"privacy.stop": "delta"}, "stated at a delta"),
        ({"privacy.neighbors": "add-remove", "task.users": 5}, "more than task.users"),
        ({"privacy.neighbors": "add-remove"}, "roster="),
    ],
)
def test_what_does_not_fit_is_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        plan_of(**settings)


def test_what_would_show_exact_scores_is_refused():
    with pytest.raises(ValueError, match="metrics of your own see the test records"):
        train(metrics={"mine": lambda outputs, labels: 0.0})
    with pytest.raises(ValueError, match="EarlyStopping goes by scores"):
        train(callbacks=[EarlyStopping(public_test=True)])
    with pytest.raises(ValueError, match="public range of the target"):
        frame = table(target="risk")
        plan_of(Dataset.from_pandas(frame, target="risk", user="patient", test_share=0.4))
    with pytest.raises(ValueError, match="R2 would drown"):
        plan_of(read(table(target="risk"), target="risk"), protocol="ldp_fl")
    with pytest.raises(ValueError, match="needs 10 held-out people"):
        plan_of(read(table(), test_share=0.03))
    with pytest.raises(ValueError, match="tuning scores every trial on public"):
        dovetail.tune(
            DATA, space={"cohort.rounds": [1, 2]}, eps=1.0, public_test=True, settings={"task.evaluate": "private"}
        )


def test_the_config_keeps_it_and_words_tell_it(tmp_path):
    result = train(out=tmp_path / "run")
    assert 'evaluate = "private"\n' in (tmp_path / "run" / "config.toml").read_text()
    people = result.evaluation["people"]
    assert f"% interval {result.intervals['accuracy'][0]:.1%} to " in repr(result)
    assert f"with noise, on {people} held-out people" in repr(result)
    pages.write(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"with noise, on {people} held-out people" in page
    assert "it is assumed to be public" not in page


def test_people_count_the_same_whatever_they_hold():
    """One more visit of a held-out patient does not make it count more."""
    data = plan_of().scores
    vectors = data.release.layout.encode_records(
        {"label": np.zeros(3, int), "correct": np.ones(3), "score": np.zeros(3)},
        dataclasses.replace(data.people, owner=np.zeros(3, int)),
        [],
    )
    assert np.linalg.norm(vectors[0]) <= 1 + 1e-12
