"""What a run states is what it did: resumed, audited, verified, and recorded by the engine on its own."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from grids import later
from hypothesis import given, settings
from hypothesis import strategies as st
from resuming import without_resuming
from tiny import TASK, TASK_WITH_SUBJECTS, load
from watchers import AfterRound

from dovetail import accounting, events, experiment, pages
from dovetail.audit import curves
from dovetail.data import Task
from dovetail.events import NonPrivate, Report, Round, Shuffled, View
from dovetail.experiment import config
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.verify import verify
from dovetail.guarantee import quotes
from dovetail.guarantee.record import Record
from dovetail.protocols import PROTOCOLS as BUNDLED
from dovetail.protocols import Protocol, shuffle_scope
from dovetail.protocols.curator.dp_fl import DpFl
from dovetail.randomness import Randomness
from dovetail.shufflers import Layout, Reports
from dovetail.statements import Neighbors, Statement, Unit, Verdict

BASE = {
    "task": {"name": "tiny"},
    "cohort": {"kind": "everyone", "rounds": 6},
    "server": {"learning_rate": 1.0},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0, "noise_multiplier": 4.0},
    "privacy": {"delta": 1e-5},
}


def plan(*overrides, task=TASK):
    return experiment.prepare(config.parse(BASE, overrides), task=task)


class Interruption(Exception):  # noqa: N818
    pass


def interrupted(ready, out, *, after=4):
    """A run that was killed after some rounds, with checkpoints every two."""

    def interrupt(progress):
        if progress.round == after:
            raise Interruption

    with pytest.raises(Interruption):
        experiment.run(ready, out=out, checkpoint_every=2, callbacks=[AfterRound(interrupt)])


@pytest.fixture(scope="module")
def halted_once(tmp_path_factory):
    out = tmp_path_factory.mktemp("halted") / "run"
    interrupted(plan(), out)
    return out


@pytest.fixture
def halted(halted_once, tmp_path):
    """The folder of a run of `plan()` that was killed: a copy for each test."""
    return Path(shutil.copytree(halted_once, tmp_path / "run"))


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# resuming


@pytest.mark.parametrize("noise", ["os", "seeded"])
def test_an_interrupted_run_goes_on_with_new_noise_unless_it_is_seeded(tmp_path, monkeypatch, noise):
    overrides = [("cohort.kind", "poisson"), ("cohort.size", 60), ("noise", noise)]
    with monkeypatch.context() as patched:
        patched.setattr("secrets.token_bytes", lambda count: bytes(range(count)))
        whole = experiment.run(plan(*overrides))
        interrupted(plan(*overrides), tmp_path / "run", after=5)
    resumed = experiment.run(plan(*overrides), out=tmp_path / "run", resume=True)
    same = np.array_equal(resumed.parameters["params"], whole.parameters["params"])
    assert same == (noise == "seeded")
    assert without_resuming(resumed.statement) == whole.statement
    assert verify(tmp_path / "run").agrees


def relabelled(*, folder=None):
    data = load()
    labels = data.labels.copy()
    labels[7] = (labels[7] + 1) % 3
    return dataclasses.replace(data, labels=labels)


CHANGES = {
    "noise": ([("protocol.noise_multiplier", 100.0)], TASK, "protocol.noise_multiplier was 4.0 and is 100.0"),
    "rounds": ([("cohort.rounds", 400)], TASK, "cohort.rounds was 6 and is 400"),
    "minimum": ([("cohort.min_size", 7)], TASK, "cohort.min_size was None and is 7"),
    "target": ([("privacy.delta", 1e-3)], TASK, "privacy.delta was 1e-05 and is 0.001"),
    "source": ([("noise", "seeded")], TASK, "noise was 'os' and is 'seeded'"),
    "label": ([], Task(name="tiny", load=relabelled), "data was"),
    "users": ([("task.users", 299)], TASK, "task.users was None and is 299"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_since_is_refused_by_name(halted, change):
    overrides, task, said = CHANGES[change]
    before = files(halted)
    with pytest.raises(ValueError, match="was started differently") as refusal:
        experiment.run(plan(*overrides, task=task), out=halted, resume=True)
    assert said in str(refusal.value)
    assert files(halted) == before


def test_another_version_of_the_library_is_refused(halted, monkeypatch):
    monkeypatch.setattr("dovetail.experiment.fingerprint.__version__", "9.9")
    with pytest.raises(ValueError, match=r"library was 'dovetail .* and is 'dovetail 9\.9"):
        experiment.run(plan(), out=halted, resume=True)


@pytest.mark.parametrize("released", [[], [0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 3]])
def test_a_checkpoint_whose_rounds_are_not_the_plans_is_refused(halted, released):
    """Rounds that were run and are not listed would not be charged."""
    saved = RunFolder(halted).read_checkpoint()
    RunFolder(halted).save_checkpoint(dataclasses.replace(saved, released=tuple(released)))
    with pytest.raises(ValueError, match="lists rounds that were not planned"):
        experiment.run(plan(), out=halted, resume=True)


def test_speed_may_change(halted):
    result = experiment.run(plan(("performance.chunk", 7)), out=halted, resume=True)
    assert result.rounds == 6


def test_an_edited_config_is_refused_on_the_command_line(tmp_path, command):
    """50 rounds at noise 1 that were resumed at noise 100 were certified as if all had had it."""
    config_file = tmp_path / "c.toml"
    config_file.write_text(config.to_toml(config.parse({**BASE, "task": {"name": "tiny:TASK"}})))
    ready = experiment.prepare(config.read(config_file))
    interrupted(ready, tmp_path / "run")
    edited = (tmp_path / "run" / "config.toml").read_text().replace("noise_multiplier = 4.0", "noise_multiplier = 99.0")
    (tmp_path / "run" / "config.toml").write_text(edited)
    status, _, err = command("run", "--resume", "--out", str(tmp_path / "run"))
    assert status == 2
    assert "protocol.noise_multiplier was 4.0 and is 99.0" in " ".join(err.split())


def test_a_finished_run_says_so_and_stays_as_it_is(tmp_path, command):
    out = tmp_path / "run"
    experiment.run(plan(), out=out)
    pages.write(out)
    before = files(out)
    with pytest.raises(experiment.Finished, match="is finished: nothing to resume, and nothing was changed"):
        experiment.run(plan(("privacy.delta", 1e-3)), out=out, resume=True)
    status, said, _ = command("run", "--resume", "--out", str(out))
    assert status == 0
    assert "is finished: nothing to resume" in " ".join(said.split())
    status, said, _ = command("run", "--resume", "--out", str(out), "--json")
    assert json.loads(said)["finished"] is True
    assert files(out) == before


# what ran, in the engine's own words


def test_the_engine_refuses_what_its_note_would_not_say():
    ready = plan(("cohort.kind", "disjoint"), ("cohort.size", 50), ("cohort.min_size", 40))
    ready = ready.with_randomness(Randomness.from_os(0))
    users = ready.sampler.schedule.draw_users(0)
    with pytest.raises(ValueError, match="expected 40 to 50 users in a round, got 39"):
        ready.step(ready.engine.start(), 0, users[:39])
    with pytest.raises(ValueError, match="expected 40 to 50 users in a round, got 300"):
        ready.step(ready.engine.start(), 0, np.arange(300))
    training = ready.step(ready.engine.start(), 0, users)
    with pytest.raises(ValueError, match="have no user in common"):
        ready.step(training, 1, users)
    assert [item.index for item in ready.engine.round_logs] == [0]


def test_a_plan_that_the_engine_did_not_follow_is_not_certified(tmp_path):
    """A run whose rounds have other noise than its plan states ends without a statement."""
    ready = plan()
    quieter = dataclasses.replace(ready.sampler.schedule, noise_scales=(0.1,) * 6)
    mixed = dataclasses.replace(ready, sampler=dataclasses.replace(ready.sampler, schedule=quieter))
    with pytest.raises(RuntimeError, match="did not run what the plan states"):
        experiment.run(mixed, out=tmp_path / "run")
    assert not (tmp_path / "run" / "privacy.json").exists()


PROTOCOLS = {
    "dp_fl": {"clip_norm": 0.5, "noise_multiplier": 3.0},
    "dp_fl-scheduled": {"clip_norm": 0.5, "noise_multiplier": 3.0, "schedule": "linear", "schedule_end": 2.0},
    "dp_fl-adaptive": {"clip": "adaptive", "clip_norm": 0.5, "noise_multiplier": 3.0},
    "ldp_fl": {"clip_norm": 0.5, "noise_multiplier": 3.0},
    "ss_simple": {"clip_value": 0.3, "eps_local": 0.5},
    "ss_topk": {"clip_value": 0.3, "eps_local": 0.5, "k": 3},
    "ss_double": {"clip_value": 0.3, "eps_local": 0.5, "beta": 0.4},
    "privunit": {"clip_norm": 0.5, "eps_local": 2.0},
    "split_and_mix": {"clip_norm": 0.5, "noise_multiplier": 3.0, "mixing_error": 1e-6},
    "secagg": {"clip_norm": 0.5, "noise_multiplier": 3.0},
    "secagg-aggregators": {"clip_norm": 0.5, "noise_multiplier": 3.0, "noise": "aggregators"},
    "central_sub": {"clip_norm": 0.5, "noise_multiplier": 3.0, "items_per_subject": 3, "batch": 60},
    "local_sub": {"clip_norm": 0.5, "noise_multiplier": 3.0, "items_per_subject": 3, "batch": 3, "steps": 2},
    "fedavg": {},
}


@st.composite
def configs(draw):
    name = draw(st.sampled_from(list(PROTOCOLS)))
    cohort = {
        "kind": draw(st.sampled_from(["everyone", "disjoint", "fixed", "poisson", "secret"])),
        "rounds": draw(st.integers(1, 5)),
        "dropout": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "colluders": draw(st.sampled_from([0, 0, 5])),
    }
    if cohort["kind"] != "everyone":
        cohort["size"] = draw(st.sampled_from([60, 100]))
    if cohort["dropout"]:
        cohort["min_size"] = draw(st.sampled_from([30, 45]))
    return {
        "seed": draw(st.integers(0, 3)),
        "noise": draw(st.sampled_from(["os", "seeded", "seeded"])),
        "task": {"name": "tiny"},
        "cohort": cohort,
        "server": {"learning_rate": 1.0},
        "protocol": {"name": name.partition("-")[0], **PROTOCOLS[name]},
        "privacy": {
            "delta": draw(st.sampled_from([1e-5, 1e-3])),
            "neighbors": draw(st.sampled_from(["replace-one", "add-remove"])),
        },
    }, draw(st.integers(0, 6))


@settings(max_examples=6, deadline=None, derandomize=True)
@given(drawn=configs())
def test_the_statement_is_that_of_what_the_engine_noted(drawn, tmp_path_factory):
    """Random configs, some of them killed and resumed: `privacy.json` is what the ledger gives, and the plan too."""
    statement_of_what_was_noted(*drawn, tmp_path_factory)


@pytest.mark.soak
@settings(max_examples=100, deadline=None)
@given(drawn=configs())
def test_the_statement_is_that_of_what_the_engine_noted_in_many_runs(drawn, tmp_path_factory):
    statement_of_what_was_noted(*drawn, tmp_path_factory)


def statement_of_what_was_noted(data, stop, tmp_path_factory):
    try:
        ready = experiment.prepare(config.parse(data), task=TASK_WITH_SUBJECTS)
    except ValueError:  # refused with a sentence, as every bad combination must be
        return
    out = tmp_path_factory.mktemp("runs") / "run"
    resumed = 0 < stop < ready.num_rounds
    if resumed:
        interrupted(ready, out, after=stop)
    result = experiment.run(ready, out=out, resume=resumed)
    found = verify(out)
    assert found.agrees, found.differences
    assert found.rounds == result.rounds
    assert found.statement == result.statement
    ledger = Record.from_json(json.loads((out / "ledger.json").read_text()))
    assert ledger.statements_by_unit() == dict(result.units)
    assert ledger.local_statement() == result.quote.local
    assert ledger.shuffler_statement() == result.quote.shuffler


def test_a_plan_that_was_resumed_has_no_noise_left_over(tmp_path):
    """Two models with one noise: their difference told the data."""
    ready = plan()
    interrupted(plan(), tmp_path / "one")
    one = experiment.run(ready, out=tmp_path / "one", resume=True)
    two = experiment.run(ready, out=tmp_path / "two")
    three = experiment.run(plan())
    apart = [np.abs(one.parameters["params"] - other.parameters["params"]).mean() for other in (two, three)]
    assert apart[0] > apart[1] / 20, "with one noise they were a thousand times closer"


def test_a_run_is_one_processs_and_its_root_ends_with_it(tmp_path):
    out, ready = tmp_path / "run", plan()
    interrupted(ready, out)
    (out / ".checkpoint.npz.left").write_bytes(b"what a kill left of a checkpoint")
    with RunFolder(out).lock(), pytest.raises(ValueError, match="another process is using the run"):
        experiment.run(ready, out=out, resume=True)
    last = RunFolder(out).read_checkpoint()
    experiment.run(ready, out=out, resume=True)
    with pytest.raises(ValueError, match="has ended"):
        RunFolder(out).save_checkpoint(last)
    assert not list(out.glob(".checkpoint*"))
    assert not list(out.glob("checkpoint*"))


def test_own_code_that_changed_is_another_run(tmp_path, monkeypatch):
    """A model of the same shape that computes something else would have met the same noise."""
    module = tmp_path / "own_task.py"
    source = (
        "from tiny import load\n"
        "from dovetail.data import Task\n"
        "def mine(*, folder=None):\n"
        "    return load()\n"
        "TASK = Task(name='own', load=mine)\n"
    )
    module.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    data = {**BASE, "task": {"name": "own_task:TASK"}}
    interrupted(experiment.prepare(config.parse(data)), tmp_path / "run")
    module.write_text(source + "# changed\n")
    with pytest.raises(ValueError, match=r"own code\.own_task was"):
        experiment.run(experiment.prepare(config.parse(data)), out=tmp_path / "run", resume=True)


PERSONAL = {
    "apes": {"clip_value": 0.3, "budgets": [0.5, 2.0]},
    "s_apes": {"clip_value": 0.3, "budgets": [0.5, 2.0], "keep": 0.5},
    "unis": {"clip_value": 0.3, "budgets": [0.5, 2.0]},
    "pldp": {"clip_value": 0.3, "budgets": [0.5, 2.0]},
}


@pytest.mark.parametrize("name", [later("apes"), "s_apes", later("unis"), "pldp"])
def test_personal_budgets_are_in_the_ledger_and_survive_a_kill(tmp_path, name):
    overrides = [
        ("noise", "seeded"),
        ("task", {"name": "tiny", "partition": "iid", "users": 8}),
        ("protocol", {"name": name, **PERSONAL[name]}),
        ("cohort.rounds", 3),
    ]
    interrupted(plan(*overrides), tmp_path / "run", after=2)
    result = experiment.run(plan(*overrides), out=tmp_path / "run", resume=True)
    found = verify(tmp_path / "run")
    assert found.agrees, found.differences
    assert found.statement == result.statement


NOISY = {"std": 2.0, "neighbors": Neighbors.ADD_REMOVE}
CROWD = {"num_users": 20, "colluders": 3, "coordinates": 4}
BIT = Report(kind="rr", eps_local=0.5)
TRIAL = events.Repeated(mechanism=events.Gaussian(**NOISY, sensitivity=0.1), sampling=events.Poisson(prob=0.1), times=3)
EVENTS = [
    events.Gaussian(**NOISY, sensitivity=0.1),
    events.Laplace(scale=0.3, sensitivity=2.0, count=7, neighbors=Neighbors.REPLACE_ONE),
    events.NonPrivate(reason="why"),
    events.DataIndependent(reason="why"),
    events.ReplacedUsers(std=1.0, clip_norm=0.3, users=3),
    events.SampledSubject(std=1.0, clip_norm=0.3, items=3, prob_item=0.2, users_spanned=2, noise="user", steps=2),
    events.Shuffled(report=BIT, **CROWD),
    events.PaddedBernoulli(report=BIT, **CROWD, pad_to=20, inclusion=0.3),
    events.PaddedTopk(report=BIT, **CROWD, pad_to=20, top=2, decoys=1),
    events.Personalized(kind="clip_laplace", eps_locals=(0.1, 0.7, 1 / 3), coordinates=3),
    events.SplitAndMix(
        num_users=20, coordinates=3, clip_norm=1.0, scale=9.0, noise_variance=7.0, modulus=2**10, shares=9
    ),
    events.SkellamSum(num_users=20, coordinates=3, clip_norm=1.0, scale=9.0, noise_variance=7.0, modulus=2**10),
    TRIAL,
    events.BestTrial(settings=((TRIAL,), (TRIAL, TRIAL)), eta=0.5, gamma=0.2),
    events.Everyone(),
    events.Disjoint(epoch=3),
    events.FixedSize(size=3, population=9),
    events.Poisson(prob=0.1),
    events.Separated(uploads=2, separation=3, rounds=5, stream=1),
    events.CorrelatedGaussian(std=1.5, sensitivity=2.0, coefficients=(1.0, -0.5), neighbors=Neighbors.REPLACE_ONE),
    events.CorrelatedSum(coordinates=3, clip_norm=1.0, scale=9.0, std=7.0, coefficients=(1.0, -0.5)),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_survives_json(event):
    assert events.from_plain(json.loads(json.dumps(events.to_plain(event)))) == event


def test_no_event_is_forgotten():
    kinds = {one for name in events.__all__ if isinstance(one := getattr(events, name), type)}
    no_events = {events.Mechanism, events.Round, events.View, events.SkellamNoise, events.EncodedSum, Report}
    assert {type(event) for event in EVENTS} == kinds - no_events


# verify


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    experiment.run(plan(), out=out)
    return out


def test_verify_agrees_with_an_honest_run(finished, command):
    status, out, _ = command("verify", str(finished))
    assert status == 0
    assert "privacy.json agrees with the ledger of 6 rounds" in out
    status, out, _ = command("verify", str(finished), "--json")
    assert (status, json.loads(out)["agrees"]) == (0, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data["certified"].update(eps=0.1), "certified.eps is 0.1 in privacy.json"),
        (lambda data: data["certified"]["assumptions"].pop(), "certified.assumptions is"),
        (lambda data: data["units"]["user"].update(delta=1e-9), "units.user.delta is 1e-09"),
        (lambda data: data["local"].update(unbounded=False, eps=1.0), "local.eps is 1.0"),
        (lambda data: data.update(rounds=5), "rounds is 5"),
        (lambda data: data.update(noise="seeded"), "noise is 'seeded'"),
        (lambda data: data["protocol"].update(noise_multiplier=9.0), "protocol.noise_multiplier is 9.0"),
        (lambda data: data["certified"].update(verdict="claimed, holds"), "certified.verdict is 'claimed, holds'"),
    ],
)
def test_verify_finds_what_was_changed(finished, tmp_path, command, change, said):
    data = json.loads((finished / "privacy.json").read_text())
    change(data)
    (tmp_path / "privacy.json").write_text(json.dumps(data))
    (tmp_path / "ledger.json").write_bytes((finished / "ledger.json").read_bytes())
    status, out, _ = command("verify", str(tmp_path))
    assert status == 1
    assert f"differs: {said}" in out
    assert "privacy.json does not agree with the ledger" in out


@pytest.mark.parametrize(
    ("ledger", "said"),
    [
        (None, "has no ledger.json"),
        ("{", "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "not the ledger of a run"),
        ('{"format": 9}', "the ledger has format 9, and this version reads format 1"),
    ],
)
def test_verify_refuses_what_is_no_run(finished, tmp_path, command, ledger, said):
    (tmp_path / "privacy.json").write_bytes((finished / "privacy.json").read_bytes())
    if ledger is not None:
        (tmp_path / "ledger.json").write_text(ledger)
    status, _, err = command("verify", str(tmp_path))
    assert status == 2
    assert said in " ".join(err.split())


def test_verify_reads_neither_plan_nor_config(finished, tmp_path, command):
    for name in ("privacy.json", "ledger.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    assert verify(tmp_path).agrees
    status, out, _ = command("verify", str(tmp_path))
    assert status == 0
    assert "not in the folder, so not checked: config.toml, recipe.json, model.npz" in " ".join(out.split())


def exchange_model(folder):
    with np.load(folder / "model.npz") as arrays:
        changed = {name: array + 1 for name, array in arrays.items()}
    np.savez(folder / "model.npz", **changed)


def edit(name, change):
    def apply(folder):
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return apply


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (exchange_model, "model.npz is not what the run wrote"),
        (lambda folder: (folder / "config.toml").write_text("seed = 1\n"), "config.toml is not what the run wrote"),
        (edit("recipe.json", lambda data: data.update(target="labels")), "recipe.json is not what the run wrote"),
        (edit("privacy.json", lambda data: data["origin"].update(users=7)), "origin is not what the run wrote"),
        (edit("ledger.json", lambda data: data["chain"].pop()), "model.npz is not what the run wrote"),
        (edit("ledger.json", lambda data: data["chain"][0].update(hash="0" * 64)), "does not add up"),
        (edit("ledger.json", lambda data: data.pop("chain")), "has no chain of hashes"),
        (edit("privacy.json", lambda data: data.update(ledger="0" * 64)), "the ledger's last hash in privacy.json"),
    ],
)
def test_verify_ties_model_config_and_origin_to_the_ledger(finished, tmp_path, tamper, said):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    assert verify(folder).agrees
    tamper(folder)
    found = verify(folder)
    assert not found.agrees
    assert any(said in difference for difference in found.differences), found.differences


@pytest.mark.parametrize(
    ("nonsense", "said"),
    [
        (lambda data: data["own"].update(rounds=[[0, -1]]), "asks -1 times for number 0"),
        (lambda data: data["own"].update(rounds=[[0, 0]]), "asks 0 times for number 0"),
        (lambda data: data["own"].update(rounds=[[-1, 6]]), "asks 6 times for number -1"),
        (lambda data: data["own"].update(rounds=[[0, 5]]), "must be of the same rounds"),
        (lambda data: data["own"].update(rounds=[[0, 6.0]]), "times=6.0"),
        (lambda data: data["reports"].clear(), "must be of the same rounds"),
        (lambda data: data.update(delta=-1e-5), "delta=-1e-05"),
        (lambda data: data.update(delta=2.0), "delta=2.0"),
        (lambda data: data["spread"].update(users=-3), "users=-3"),
        (lambda data: data["spread"].update(users=0), "users=0"),
        (lambda data: data["spread"].update(items=0), "items=0"),
        (lambda data: data["rounds"][0]["mechanism"].update(std=-1.0), "std=-1.0"),
        (lambda data: data["rounds"][0]["mechanism"].update(std=float("nan")), "std=nan"),
    ],
)
def test_verify_refuses_a_ledger_that_no_run_can_write(finished, tmp_path, command, nonsense, said):
    """Minus one round was (0, 0)."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    edit("ledger.json", nonsense)(folder)
    with pytest.raises(ValueError, match=re.escape(said)):
        verify(folder)
    assert command("verify", str(folder))[0] == 2


# run --audit


@pytest.mark.parametrize(
    "overrides",
    [
        [
            ("protocol", {"name": "ss_simple", "clip_value": 0.3, "eps_local": 0.5}),
            ("cohort", {"kind": "everyone", "rounds": 2, "dropout": 0.5, "min_size": 100}),
        ],
        [("protocol.schedule", [0.1, 0.2]), ("cohort.rounds", 2)],
    ],
    ids=["minimum", "schedule"],
)
def test_an_audit_is_about_the_rounds_that_ran(tmp_path, overrides):
    """It forgot the minimum and the schedule: 1.115 was written beside 2.0, .7255 for 9.997."""
    ready = plan(*overrides)
    result = experiment.run(ready, out=tmp_path / "run")
    found = json.loads(curves.write_audit(ready, tmp_path / "run").read_text())
    alone = [accounting.certify([item], ready.guarantee.scope, delta=1e-5) for item in set(ready.guarantee.rounds())]
    costliest = max(alone, key=lambda one: one.eps)
    assert found["certified"]["eps"] == pytest.approx(costliest.eps, rel=1e-9)
    assert 0 < found["eps_lower"] <= found["certified"]["eps"] <= result.statement.eps * (1 + 1e-9)
    assert found["consistent"]


# protocols from outside the package


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestFirst(Protocol):
    """Sends its largest coordinate in that coordinate's slot, and says nothing about slots."""

    name = "largest"
    shuffled = True
    eps_local: float = 1.0

    def layout(self, dim):
        return Layout(slots=dim, reports_per_client=1, shufflers=1)

    def randomize(self, x, state, *, key, budget=None):
        place = jnp.argmax(jnp.abs(x))
        return Reports(slot=place[None], value=jnp.sign(x[place])[None], valid=jnp.ones(1, bool))

    def estimate(self, tally, size, state, *, key):
        return tally / size, state

    def noise_std(self, size, dim):
        return 0.0

    def view(self, cohort, dim, *, neighbors):
        report = Report(kind="generic", eps_local=self.eps_local)
        event = Shuffled(report=report, num_users=cohort.crowd(), colluders=cohort.colluders)
        return View(
            round=Round(mechanism=event, participation=cohort.participation), scope=shuffle_scope(cohort, neighbors)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unproven(LargestFirst):
    """In the shuffle model, without an event of its own."""

    name = "unproven"

    def view(self, cohort, dim, *, neighbors):
        seen = Round(mechanism=NonPrivate(reason="nobody has proved it"), participation=cohort.participation)
        return View(round=seen, scope=shuffle_scope(cohort, neighbors))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noiseless(DpFl):
    """Says that it adds noise, and adds none."""

    name = "noiseless"

    def estimate(self, tally, size, state, *, key):
        return tally / size, state


HERE = __name__


def quoted(name, **more):
    return quotes.quote(f"{HERE}:{name}", quotes.Terms(num_users=300, dim=5, delta=1e-5, **more))


def test_what_a_protocol_does_not_say_of_slots_is_not_certified():
    """By its event it was certified (0, 0) against the shuffler."""
    found = quoted("LargestFirst")
    assert found.shuffler.is_unbounded
    assert "does not declare what a client's choice of slots depends on" in str(found.shuffler.proof)
    assert found.local.is_unbounded
    assert "does not declare what a client's own reports reveal" in str(found.local.proof)


def test_nobody_is_told_of_a_curator_where_there_is_none():
    found = quoted("Unproven")
    assert found.certified.is_unbounded
    assert "curator" not in " ".join((found.local.adversary, str(found.local.proof), str(found.shuffler)))


def test_whoever_registers_a_protocol_or_renames_its_module_is_still_outside(monkeypatch):
    monkeypatch.setitem(BUNDLED, "noiseless", Noiseless)
    monkeypatch.setattr(Noiseless, "__module__", "dovetail.protocols.noiseless")
    settings = {"clip_norm": 1.0, "noise_multiplier": 4.0}
    found = quotes.quote("noiseless", quotes.Terms(num_users=9, dim=2, delta=1e-5, settings=settings))
    assert found.certified.verdict is Verdict.DECLARED


def test_protocols_from_outside_are_as_declared(tmp_path):
    """A subclass of a certified protocol that leaves out the noise was called certified."""
    ready = plan(("protocol.name", f"{HERE}:Noiseless"))
    result = experiment.run(ready, out=tmp_path / "run")
    assert result.statement.verdict is Verdict.DECLARED
    assert {statement.verdict for statement in result.units.values()} == {Verdict.DECLARED}
    assert result.statement.headline().endswith("   as declared")
    assert "as declared" in pages.write(tmp_path / "run").read_text()
    assert verify(tmp_path / "run", trust_code=True).agrees
    seeded = experiment.run(plan(("protocol.name", f"{HERE}:Noiseless"), ("noise", "seeded")))
    assert seeded.statement.verdict is Verdict.DECLARED_REPRODUCIBLE


def test_an_audit_runs_for_protocols_from_outside(tmp_path, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "outside", sys.modules[HERE])
    config_file = tmp_path / "c.toml"
    data = {**BASE, "task": {"name": "tiny:TASK"}, "protocol": {**BASE["protocol"], "name": "outside:Noiseless"}}
    config_file.write_text(config.to_toml(config.parse(data)))
    status, _, err = command("run", str(config_file), "--out", str(tmp_path / "run"), "--audit")
    assert status == 0, err
    found = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert found["reason"] is None
    assert found["certified"]["verdict"] == "as declared"
    assert found["trials"] or found["unbounded"], "the code was run: its event is only what it declares"
    assert not found["consistent"], "it adds no noise"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "the proof or the code is wrong" in page


# the local statement


@pytest.mark.parametrize(("beta", "eps_local", "kept"), [(0.00501, 5.0, 1), (0.5, 0.3, 50)])
def test_fixed_k_is_k_reports_to_whoever_sees_them(beta, eps_local, kept):
    """It was stated for another event: (0, .4) where the truth is .987 at eps 0."""
    settings = {"beta": beta, "inclusion": "fixed-k", "eps_local": eps_local}
    found = quotes.quote("ss_double", quotes.Terms(num_users=200, dim=100, delta=0.4, settings=settings))
    assert found.local.eps == pytest.approx(kept * eps_local, rel=1e-6)
    assert found.local.delta == 0.0


# numbers that mean little


def test_delta_is_held_against_the_number_of_what_it_is_about():
    """Ten users with 300 records: delta .05 is small beside one of ten, and not beside one of 300."""
    ready = plan(
        ("task", {"name": "tiny", "partition": "iid", "users": 10}),
        ("protocol", {"name": "dp_fl", "clip_norm": 1.0, "noise_multiplier": 100.0}),
        ("privacy", {"delta": 0.05}),
    )
    table = experiment.run(ready).units
    assert not table[Unit.USER].warnings
    assert "delta is above 1/300, one over the number of items" in table[Unit.ITEM].warnings[0]


def test_what_a_paper_claims_from_the_data_is_a_diagnostic(tmp_path):
    data = {
        **BASE,
        "task": {"name": "tiny", "partition": "silos", "silos": 6},
        "protocol": {"name": "central_sub", **PROTOCOLS["central_sub"]},
        "privacy": {"delta": 1e-5, "neighbors": "add-remove"},
    }
    quiet, loud = (
        experiment.run(
            experiment.prepare(config.parse({**data, "diagnostics": told}), task=TASK_WITH_SUBJECTS),
            out=tmp_path / str(told),
        )
        for told in (False, True)
    )
    assert quiet.quote.claimed is None
    assert loud.quote.claimed is not None
    assert json.loads((tmp_path / "True" / "privacy.json").read_text())["claimed"] is None
    assert "claimed" in (tmp_path / "True" / "diagnostics.jsonl").read_text()


@pytest.mark.parametrize(
    ("eps", "delta", "said"),
    [(9.9, 1e-5, []), (10.1, 1e-5, ["eps is above 10"]), (1.0, 0.1, ["delta is above 1/300"])],
)
def test_a_warning_stands_where_numbers_mean_little(tmp_path, eps, delta, said):
    ready = plan(("protocol.noise_multiplier", None), ("privacy", {"eps": eps, "delta": delta}))
    result = experiment.run(ready, out=tmp_path / "run")
    assert len(result.statement.warnings) == len(said)
    page = pages.write(tmp_path / "run").read_text()
    for text in said:
        assert f"  warning: {text}" in str(result.statement)
        assert f"Warning: {text}" in page
        assert text in json.loads((tmp_path / "run" / "privacy.json").read_text())["certified"]["warnings"][0]
    lead = page[page.index('class="lead"') :].partition("</p>")[0]
    assert ('class="badge good"' in lead) == (not said)


def test_statements_survive_json(finished):
    stated = json.loads((finished / "privacy.json").read_text())["certified"]
    assert Statement.from_json(stated).to_json() == stated
