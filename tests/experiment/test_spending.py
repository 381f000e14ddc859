"""The ledger of what all runs on the same people spend: written before anything is seen, and never set back."""

import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tiny import TASK

import dovetail
from dovetail import experiment, pages
from dovetail.audit.training import audit
from dovetail.experiment import config, ledgers, tuning
from dovetail.experiment.callbacks import Callback
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.ledgers import Ceiling, CeilingReached, SpendingLedger
from dovetail.experiment.spending import open_account
from dovetail.guarantee.across import RunSpending

ROUNDS = 3
RUN = {
    "task": {"name": "tiny"},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0},
    "cohort": {"kind": "everyone", "rounds": ROUNDS},
    "privacy": {"eps": 2.0, "delta": 1e-5},
}
PRIVATE = dataclasses.replace(TASK, published=False)


@pytest.fixture(scope="module")
def plan():
    return experiment.prepare(config.parse(RUN, ()), task=PRIVATE)


@pytest.fixture
def ledger(tmp_path):
    return SpendingLedger(tmp_path / "people.json")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(ledgers.VARIABLE, str(tmp_path / "ledgers"))
    return tmp_path / "ledgers"


class Killed(BaseException):
    """What a process does not outlive."""


class KillAt(Callback):
    def __init__(self, round):
        self.round = round

    def on_round(self, progress):
        if progress.round == self.round:
            raise Killed


def total(ledger):
    (spent,) = ledger.total_spent().spent
    return spent


def test_two_runs_add_up_as_gaussian_noise_does(plan, ledger, tmp_path):
    first = experiment.run(plan, ledger=ledger.path, out=tmp_path / "run")
    assert first.across_runs.sentence == "on these people 1 run so far: (2, 1e-05)-DP per user"
    second = experiment.run(plan, ledger=ledger.path)
    spent = total(ledger)
    assert 1.4 * 2 < spent.eps < 1.5 * 2 and spent.delta == pytest.approx(2e-5)
    assert second.across_runs.spent == (spent,) and second.across_runs.runs == 2
    assert all(run.ended for run in ledger.runs())
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())["across_runs"]
    assert stated["runs"] == 1 and stated["ledger"] == "people.json"
    assert not (tmp_path / "run" / "spending.json").exists()


def test_what_a_run_may_spend_is_on_disk_before_its_first_round(plan, ledger, monkeypatch):
    seen = []
    step = type(plan).step
    monkeypatch.setattr(
        type(plan), "step", lambda *args: (seen.append(SpendingLedger(ledger.path).runs()), step(*args))[1]
    )
    experiment.run(plan, ledger=ledger.path)
    assert len(seen) == ROUNDS
    for (run,) in seen:
        assert not run.ended and run.spending.record == plan.record(range(ROUNDS))


def test_a_run_that_is_killed_and_resumed_is_charged_once(plan, ledger, tmp_path):
    for round in (1, 2):
        with pytest.raises(Killed):
            experiment.run(
                plan,
                ledger=ledger.path,
                out=tmp_path / "run",
                resume=round > 1,
                checkpoint_every=1,
                callbacks=[KillAt(round)],
            )
        assert total(ledger).eps == pytest.approx(2.0, rel=1e-3) and not ledger.runs()[0].ended
    result = experiment.run(plan, out=tmp_path / "run", resume=True)  # the folder knows its ledger
    assert result.across_runs.runs == 1 and ledger.runs()[0].ended
    assert total(ledger).eps <= 2.0


def kill(*arguments, **named):
    raise Killed


def test_a_run_of_which_no_round_began_gives_back_what_it_had_reserved(plan, ledger, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment.training, "rounds_due", kill)
    with pytest.raises(Killed):
        experiment.run(plan, ledger=ledger.path, out=tmp_path / "run")
    assert ledger.exists and ledger.runs() == []
    monkeypatch.undo()
    experiment.run(plan, out=tmp_path / "run", resume=True)
    assert len(ledger.runs()) == 1 and ledger.runs()[0].ended


def test_a_run_that_failed_in_a_round_stays_charged(plan, ledger, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(plan), "step", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        experiment.run(plan, ledger=ledger.path)
    assert total(ledger).eps == pytest.approx(2.0, rel=1e-3)


def test_a_run_that_ended_but_was_not_settled_is_settled_when_it_is_resumed(plan, ledger, tmp_path, monkeypatch):
    monkeypatch.setattr(SpendingLedger, "settle", kill)
    with pytest.raises(Killed):
        experiment.run(plan, ledger=ledger.path, out=tmp_path / "run")
    monkeypatch.undo()
    assert RunFolder(tmp_path / "run").is_finished and not ledger.runs()[0].ended
    with pytest.raises(experiment.training.Finished):
        experiment.run(plan, out=tmp_path / "run", resume=True)
    assert ledger.runs()[0].ended and not (tmp_path / "run" / "spending.json").exists()


def test_a_copy_of_a_run_that_goes_on_is_another_run(plan, ledger, tmp_path):
    with pytest.raises(Killed):
        experiment.run(plan, ledger=ledger.path, out=tmp_path / "run", checkpoint_every=1, callbacks=[KillAt(1)])
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (tmp_path / "run").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    for place in (tmp_path / "run", copy):
        experiment.run(plan, out=place, resume=True)
    assert len(ledger.runs()) == 2


def test_a_ceiling_stops_the_next_run_and_nothing_is_written(plan, ledger, tmp_path):
    experiment.run(plan, ledger=ledger.path)
    ledger.set_ceiling(Ceiling(eps=2.5))
    before = ledger.path.read_bytes()
    with pytest.raises(CeilingReached) as refused:
        experiment.run(plan, ledger=ledger.path, out=tmp_path / "run")
    message = str(refused.value)
    for part in ("asks for (2, 1e-05)-DP", "the ceiling (2.5, 0.0001)", "1 run spent (2, 1e-05)", "eps 0.5"):
        assert part in message
    assert ledger.path.read_bytes() == before and not (tmp_path / "run").exists()
    with pytest.raises(CeilingReached, match="above the ceiling"):  # one that the run brings itself
        experiment.run(plan, ledger=tmp_path / "other.json", ceiling=(3.0, 1e-6))
    with pytest.raises(ValueError, match="a ceiling needs a ledger"):
        experiment.run(plan, ledger=False, ceiling=3.0)


def test_a_ceiling_allows_what_it_says_and_nothing_above(plan):
    spent = plan.guarantee.record().certified_statement()
    assert (spent.eps, spent.delta) == (pytest.approx(2.0, rel=1e-3), 1e-5)
    assert Ceiling(eps=spent.eps, delta=spent.delta).allows(spent)
    assert not Ceiling(eps=spent.eps * (1 - 1e-9), delta=spent.delta).allows(spent)
    assert not Ceiling(eps=spent.eps, delta=spent.delta * (1 - 1e-9)).allows(spent)


def test_without_a_bound_all_runs_together_have_none(ledger, plan):
    seeded = experiment.prepare(config.parse({**RUN, "noise": "seeded"}, ()), task=PRIVATE)
    experiment.run(seeded, ledger=ledger.path)
    result = experiment.run(plan, ledger=ledger.path)
    assert result.across_runs.sentence.startswith("on these people 2 runs together: no guarantee, for 1 of them")
    assert "the other: (2, 1e-05)" in result.across_runs.sentence
    with pytest.raises(CeilingReached, match="promises nothing"):
        experiment.run(plan, ledger=ledger.path, ceiling=100.0)


FRAME = {
    "patient": [f"p{number // 3}" for number in range(60)],
    "age": np.linspace(20, 80, 60),
    "ill": [number % 2 for number in range(60)],
}


def read(frame=FRAME, **options):
    options = {"user": "patient", "test_share": 0.2, "bounds": {"age": (0, 100)}, "classes": [0, 1]} | options
    return dovetail.Dataset.from_pandas(frame, target="ill", **options)


def in_order(order, frame=FRAME):
    return {name: np.asarray(column)[order] for name, column in frame.items()}


def test_people_are_the_same_however_their_rows_are_read():
    shuffled = in_order(np.random.default_rng(0).permutation(60))
    assert read().people == read(shuffled).people == read(test_share=0.5, bounds={"age": (0, 200)}).people
    assert read(in_order(np.arange(60), {**FRAME, "age": FRAME["age"] ** 2})).people == read().people
    assert read(in_order(np.arange(30))).people != read().people
    rows = read(user=None, inputs=["age"]).people
    assert rows == read(shuffled, user=None, inputs=["age"], test_share=0.4).people != read().people
    fewer = in_order(np.arange(59))
    assert read(fewer, user=None, inputs=["age"]).people != rows


def test_data_that_are_not_published_have_a_ledger_and_others_do_not(folder, plan):
    options = {"eps": 2.0, "settings": {"cohort.rounds": 1}}
    result = dovetail.train(read(), **options)
    assert result.across_runs.runs == 1
    (found,) = ledgers.find_ledgers()
    order = np.random.default_rng(1).permutation(60)
    assert account_of(read(in_order(order), test_share=0.4)).ledger.path == found.path
    assert account_of(read(in_order(np.arange(30)))).ledger.path != found.path
    assert found.path.stat().st_mode & 0o077 == 0
    content = found.path.read_text()
    assert read().people.hex() not in content and "p1" not in content.replace("dp_fl", "")
    assert account_of(read(), ledger=False).ledger is None
    published = dataclasses.replace(plan, task=TASK)
    assert experiment.run(published).across_runs is None and len(ledgers.find_ledgers()) == 1


def test_ledgers_can_be_turned_off_and_their_folder_be_out_of_reach(monkeypatch, plan, tmp_path):
    monkeypatch.setenv(ledgers.VARIABLE, "off")
    assert experiment.run(plan).across_runs is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(ledgers.VARIABLE, str(tmp_path / "file" / "ledgers"))
    with pytest.raises(ValueError, match="cannot be written to"):
        experiment.run(plan, ledger=True)


def account_of(dataset, **options):
    options = {"ledger": None, "ceiling": None, "published": False, "task": "t", "protocol": "dp_fl"} | options
    return open_account(people=dataset.people, **options)


def test_tables_that_name_one_ledger_add_up(plan, folder, tmp_path):
    other = {"patient": [f"p{number}" for number in range(30)], "age": np.arange(30.0), "ill": [0, 1] * 15}
    shared = tmp_path / "shared" / "hospital.json"
    record = plan.record(range(ROUNDS))
    for dataset in (read(), read(other)):
        account = account_of(dataset, ledger=shared)
        account.reserve(record)
        together = account.total_with(record)
        account.settle(record)
    assert together.runs == 2 and ledgers.find_ledgers() == []
    people = {run.people for run in SpendingLedger(shared).runs()}
    assert len(people) == 2 and None not in people


def a_run(plan, number):
    return ledgers.LedgerRun(
        id=f"{number:032x}",
        time="2030-01-01 00:00:00",
        what="run",
        task="t",
        protocol="dp_fl",
        folder=None,
        people=None,
        ended=False,
        spending=RunSpending.from_record(plan.record(range(1))),
    )


def test_processes_that_reserve_at_once_lose_nothing(plan, ledger):
    runs = [a_run(plan, number) for number in range(10)]
    script = (
        "import pickle, sys; from dovetail.experiment.ledgers import SpendingLedger; from pathlib import Path\n"
        "runs = pickle.load(sys.stdin.buffer); print(flush=True)\n"
        "for run in runs: SpendingLedger(Path(sys.argv[1])).reserve(run)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(dovetail.__file__).parents[1])}
    command = [sys.executable, "-c", script, str(ledger.path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    other.stdin.write(pickle.dumps(runs[:5]))
    other.stdin.close()
    other.stdout.readline()  # it has read what to do
    for run in runs[5:]:
        ledger.reserve(run)
    assert other.wait() == 0
    other.stdout.close()
    assert {run.id for run in ledger.runs()} == {run.id for run in runs}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace('"delta":0.00001', '"delta":0.000001', 1), "was changed at entry 1"),
        (lambda text: "\n".join(line for number, line in enumerate(text.split("\n")) if number != 2), "was changed at"),
        (lambda text: text[:-40], "is damaged"),
        (lambda text: "{}", "is damaged"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "has format 9"),
    ],
)
def test_a_ledger_that_was_changed_or_damaged_is_refused_in_a_sentence(plan, ledger, change, said):
    for number in range(3):
        ledger.reserve(a_run(plan, number))
    text = ledger.path.read_text()
    assert change(text) != text
    ledger.path.write_text(change(text))
    for ask in (
        ledger.total_spent,
        lambda: ledger.reserve(a_run(plan, 7)),
        lambda: experiment.run(plan, ledger=ledger.path),
    ):
        with pytest.raises(ValueError, match=said) as refused:
            ask()
        assert "\n" not in str(refused.value)
    assert ledger.path.read_text() == change(text)


def test_the_ledger_of_others_is_refused(plan, tmp_path):
    SpendingLedger(tmp_path / "one.json", people="a" * 64).reserve(a_run(plan, 1))
    with pytest.raises(ValueError, match="not the ledger of these people"):
        SpendingLedger(tmp_path / "one.json", people="b" * 64).runs()


def test_ceilings_are_read_as_they_are_written():
    assert ledgers.parse_ceiling("8") == ledgers.parse_ceiling(8) == Ceiling(eps=8.0)
    assert ledgers.parse_ceiling("8,1e-6") == ledgers.parse_ceiling((8, 1e-6)) == Ceiling(eps=8.0, delta=1e-6)
    for wrong in ("eight", "1,2,3", "-1", "1,2"):
        with pytest.raises(ValueError, match="ceiling"):
            ledgers.parse_ceiling(wrong)


def test_a_ledger_is_shown_with_its_runs_and_its_total(plan, folder, ledger, tmp_path, command):
    assert command("runs", "--spent")[1].startswith("no ledgers in")
    for out in (tmp_path / "one", None):
        experiment.run(plan, ledger=ledger.path, out=out)
    status, out, _ = command("runs", "--spent", "--ledger", str(ledger.path))
    assert status == 0 and out.count("dp_fl") == 2 and "on these people 2 runs together: (2." in out
    told = json.loads(command("runs", "--spent", "--ledger", str(ledger.path), "--json")[1])
    assert told["runs"] == 2 and [run["ended"] for run in told["list"]] == [True, True]
    assert told["spent"][0]["eps"] == pytest.approx(told["if_fixed"]["eps"], rel=1e-6)
    experiment.run(plan, ledger=True)
    (found,) = json.loads(command("runs", "--spent", "--json")[1])["ledgers"]
    name = Path(found["path"]).name
    assert name in command("runs", "--spent")[1]
    short = name.removeprefix("people-")[:6]
    status, out, _ = command("runs", "--ledger", short, "--ceiling", "2.1,1e-4")
    assert status == 0 and "ceiling: (2.1, 0.0001)" in out
    with pytest.raises(CeilingReached):
        experiment.run(plan)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ceiling", "8"), "--ceiling needs --ledger"),
        (("--spent", "--ledger", "none.json"), "there is no ledger 'none.json'"),
        (("--spent", "--compare"), "leave out folders, --compare and --plot"),
        (("--ledger", "none.json", "--ceiling", "much"), "expected a ceiling as an eps"),
    ],
)
def test_wrong_questions_about_ledgers_are_refused_in_a_sentence(
    arguments, said, command, folder, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    status, _, err = command("runs", *arguments)
    assert status == 2 and said in " ".join(err.split())
    assert not (tmp_path / "none.json").exists()


def test_a_run_of_the_command_line_is_refused_above_its_ceiling(command, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(config.to_toml(config.parse({**RUN, "task": {"name": "tiny:TASK"}}, ())))
    arguments = ("run", "run.toml", "--out", "one", "--ledger", "people.json")
    status, _, err = command(*arguments, "--ceiling", "1")
    assert status == 2 and "above the ceiling (1, 0.0001)" in " ".join(err.split()) and not (tmp_path / "one").exists()
    status, out, _ = command(*arguments)
    assert status == 0 and "on these people 1 run so far: (2, 1e-05)-DP per user" in out
    report = " ".join((tmp_path / "one" / "report.html").read_text(encoding="utf-8").split())
    assert "On these people, this run spent (2, 1e-5)-DP, and it is the first in its ledger." in report


def test_all_trials_of_a_tuning_are_one_entry(ledger):
    base = config.parse({**RUN, "privacy": {"delta": 1e-5}}, ())
    space = tuning.Space(axes={"server.learning_rate": (0.5,)})
    options = {"eps": 2.0, "public_test": True, "by": "composition", "task": PRIVATE, "ledger": ledger.path}
    result = tuning.run_trials(base, space, **options).result
    (run,) = ledger.runs()
    assert run.what == "tuning" and run.ended and result.across_runs.runs == 1
    assert run.spending.statement.eps == pytest.approx(2.0, rel=1e-3)


def test_a_ceiling_in_the_config_stops_runs_tunings_and_audits(ledger, plan):
    limited = config.parse({**RUN, "privacy": {"eps": 2.0, "ceiling": [1.5, 1e-4]}}, ())
    assert config.parse(tomllib.loads(config.to_toml(limited))) == limited
    planned = dataclasses.replace(plan, config=limited)
    space = tuning.Space(axes={"server.learning_rate": (0.5,)})
    trials = {"public_test": True, "by": "composition", "task": PRIVATE, "ledger": ledger.path}
    for spend in (
        lambda: experiment.run(planned, ledger=ledger.path),
        lambda: tuning.run_trials(limited, space, eps=2.0, **trials),
        lambda: audit(limited, canaries=20, task=PRIVATE, ledger=ledger.path),
    ):
        with pytest.raises(CeilingReached, match=r"the ceiling \(1\.5, 0\.0001\)"):
            spend()
    assert ledger.runs() == []
    with pytest.raises(ValueError, match="a ceiling needs a ledger"):
        experiment.run(planned, ledger=False)
    tuning.run_trials(limited, space, eps=1.0, **trials)  # all trials together are below it
    experiment.run(planned, ledger=ledger.path, ceiling=8.0)  # what a call says comes before the config


@pytest.mark.parametrize("wrong", [0.0, -1.0, [2.0, 1.0], [2.0], "much"])
def test_a_ceiling_in_the_config_is_checked_when_it_is_read(wrong):
    with pytest.raises(ValueError, match="ceiling"):
        config.parse({**RUN, "privacy": {"ceiling": wrong}}, ())


def test_an_audit_counts_as_a_run_without_a_guarantee(ledger, plan):
    audit(config.parse(RUN, ()), canaries=20, task=PRIVATE, ledger=ledger.path)
    (run,) = ledger.runs()
    assert run.what == "audit" and run.ended and "seed" in run.spending.reason_without_bound


def test_the_report_adds_up_all_runs(plan, ledger, tmp_path):
    experiment.run(plan, ledger=ledger.path)
    ledger.set_ceiling(Ceiling(eps=9.0))
    experiment.run(plan, ledger=ledger.path, out=tmp_path / "run")
    page = " ".join(pages.write(tmp_path / "run").read_text(encoding="utf-8").split())
    assert "this run spent (2, 1e-5)-DP; all 2 runs in its ledger together have spent (2." in page
    assert "Their ceiling is (9, 1e-4)." in page
    schema = json.loads((Path(dovetail.__file__).parents[1] / "docs" / "privacy.schema.json").read_text())
    jsonschema.validate(json.loads((tmp_path / "run" / "privacy.json").read_text()), schema)
    experiment.run(plan, ledger=False, out=tmp_path / "alone")
    assert "No ledger counted this run" in pages.write(tmp_path / "alone").read_text(encoding="utf-8")


@pytest.mark.parametrize("protocol", ["dp_fl", "secagg"])
def test_runs_with_private_scores_add_up_for_whoever_changes_sides(tmp_path, protocol):
    """Nobody is on both sides of one run, but anybody may be on another side of the next: both are counted in full."""
    rng = np.random.default_rng(0)
    rows = {"patient": [f"p{number}" for number in range(200)], "age": rng.uniform(0, 90, 200), "ill": [0, 1] * 100}
    path = tmp_path / "hospital.json"
    totals = []
    for seed in range(2):
        data = read(rows, test_share=0.3, test_seed=seed)
        settings = {"cohort.rounds": 3}
        result = dovetail.train(
            data, protocol=protocol, eps=2, evaluate="private", settings=settings, ledger=path, force=True
        )
        totals.append(result.across_runs.spent[0])
    assert totals[0].eps == pytest.approx(2, rel=1e-3)
    least = 2 * math.sqrt(2) * 0.98 if protocol == "dp_fl" else 2 * 2 * 0.99
    assert least < totals[1].eps <= 2 * 2 * (1 + 1e-9)
