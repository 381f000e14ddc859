import functools
import json
import math
import types

import jax
import numpy as np
import pytest
from grids import later
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from resuming import without_resuming
from tiny import TASK, TASK_WITH_SUBJECTS
from watchers import AfterRound

import dovetail
from dovetail import accounting, experiment, pages
from dovetail.accounting import gaussian
from dovetail.experiment import config, training
from dovetail.experiment.folder import BANNER, RunFolder
from dovetail.experiment.outlook import Outlook
from dovetail.learners import models
from dovetail.protocols import PROTOCOLS
from dovetail.statements import Neighbors, Statement, Trust, Unit

BASE = {
    "noise": "seeded",
    "task": {"name": "tiny"},
    "cohort": {"kind": "fixed", "size": 50, "rounds": 12},
    "server": {"learning_rate": 2.0},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0},
    "privacy": {"eps": 3.0, "delta": 1e-5},
}
MEDIAN = {"name": "dp_fl", "clip": "median", "noise_multiplier": 2.0}


def plan(*overrides):
    return experiment.prepare(config.parse(BASE, overrides), task=TASK)


@functools.cache
def noise():
    return plan().sampler.protocol.noise_multiplier


def known(*overrides):
    """The same plan with the noise that it is calibrated to, once for all tests."""
    return plan(("protocol.noise_multiplier", noise()), *overrides)


@pytest.mark.parametrize(
    ("kind", "neighbors"),
    [
        ("fixed", "replace-one"),
        ("poisson", "replace-one"),
        later("poisson", "add-remove"),
        ("disjoint", "replace-one"),
        later("disjoint", "add-remove"),
        ("everyone", "add-remove"),
    ],
)
def test_noise_is_calibrated_to_the_target_and_the_statement_says_so(kind, neighbors):
    size = 300 if kind == "everyone" else 50
    ready = plan(("cohort.kind", kind), ("cohort.size", size), ("privacy.neighbors", neighbors))
    result = experiment.run(ready)
    assert 3.0 * 0.999 < result.statement.eps <= 3.0
    assert result.statement.delta == 1e-5
    assert result.statement.neighbors is Neighbors(neighbors)
    assert result.statement.trust is Trust.CURATOR
    assert result.rounds == 12
    assert result.accuracy > 0.4


def test_fixed_size_with_add_remove_has_no_theorem_and_is_refused():
    with pytest.raises(ValueError, match="FixedSize participation under add-remove"):
        plan(("privacy.neighbors", "add-remove"))


def test_training_stops_before_it_would_overspend():
    ready = plan(
        ("protocol.noise_multiplier", 8.0), ("cohort.kind", "everyone"), ("cohort.size", 300), ("cohort.rounds", 400)
    )
    result = experiment.run(ready)
    assert 0 < result.rounds < 400
    assert result.statement.eps <= 3.0
    one_more = ready.record(list(range(result.rounds + 1))).certified_statement()
    assert one_more.eps > 3.0


def test_a_round_below_the_minimum_releases_nothing_and_costs_nothing():
    settings = [("cohort.kind", "everyone"), ("cohort.size", 300), ("cohort.dropout", 0.5)]
    ready = plan(*settings, ("cohort.min_size", 150))
    result = experiment.run(ready)
    large = [i for i in range(12) if len(ready.sampler.schedule.draw_users(i)) >= 150]
    assert 0 < len(large) < 12
    assert result.rounds == len(large)
    assert result.statement == ready.record(large).certified_statement()
    nothing = experiment.run(plan(*settings, ("cohort.min_size", 300)))
    assert nothing.rounds == 0
    assert nothing.statement.eps == 0
    assert not nothing.parameters["params"].any(), "the model never moved"


def test_folder_holds_config_metrics_statement_model(tmp_path):
    ready = known()
    seen = []
    result = experiment.run(ready, out=tmp_path / "run", evaluate_every=4, callbacks=[AfterRound(seen.append)])
    assert config.read(tmp_path / "run" / "config.toml") == ready.config
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [4, 8, 12]
    assert lines[-1]["accuracy"] == result.accuracy
    spent = [line["eps"] for line in lines]
    assert spent == sorted(spent)
    written = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert Statement.from_json(written["certified"]) == result.statement
    assert written["protocol"]["noise_multiplier"] == ready.sampler.protocol.noise_multiplier
    np.testing.assert_array_equal(np.load(tmp_path / "run" / "model.npz")["params"], result.parameters["params"])
    assert [p.round for p in seen] == list(range(1, 13))


def test_a_folder_is_never_overwritten(tmp_path):
    ready = known()
    experiment.run(ready, out=tmp_path / "run")
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match="already holds a run"):
        experiment.run(ready, out=tmp_path / "run")
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}


def test_resuming_needs_a_run(tmp_path):
    with pytest.raises(ValueError, match="there is no run to resume"):
        experiment.run(known(), out=tmp_path / "nowhere", resume=True)


class Interruption(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("stop_at", [1, 5, 11])
def test_an_interrupted_run_resumes_to_the_same_end(tmp_path, stop_at):
    ready = plan(("cohort.kind", "disjoint"), ("cohort.dropout", 0.3), ("cohort.min_size", 34))
    whole = experiment.run(ready, out=tmp_path / "whole", evaluate_every=3)

    def interrupt(progress):
        if progress.round == stop_at:
            raise Interruption

    with pytest.raises(Interruption):
        experiment.run(
            ready, out=tmp_path / "cut", checkpoint_every=2, evaluate_every=3, callbacks=[AfterRound(interrupt)]
        )
    left = {file.name: file.read_bytes() for file in (tmp_path / "cut").iterdir()}
    RunFolder.reopen(tmp_path / "cut").read_checkpoint()
    assert {file.name: file.read_bytes() for file in (tmp_path / "cut").iterdir()} == left, "a look changes nothing"
    resumed = experiment.run(ready, out=tmp_path / "cut", resume=True, checkpoint_every=2, evaluate_every=3)
    np.testing.assert_array_equal(resumed.parameters["params"], whole.parameters["params"])
    assert (
        resumed.statement == whole.statement if stop_at == 1 else without_resuming(resumed.statement) == whole.statement
    )
    assert (tmp_path / "cut" / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()


def test_the_same_seed_gives_the_same_model_and_another_seed_another():
    one, two = experiment.run(known()), experiment.run(known())
    other = experiment.run(known(("seed", 1)))
    np.testing.assert_array_equal(one.parameters["params"], two.parameters["params"])
    assert not np.array_equal(one.parameters["params"], other.parameters["params"])


def test_protocols_rank_as_their_trust_suggests():
    def accuracy(*overrides):
        return np.mean([experiment.run(known(("seed", seed), *overrides)).accuracy for seed in range(2)])

    free = experiment.run(
        experiment.prepare(config.parse({**BASE, "protocol": {"name": "fedavg"}, "privacy": {}}), task=TASK)
    )
    assert free.statement.is_unbounded
    local = accuracy(("protocol", {"name": "ldp_fl", "clip_norm": 1.0}))
    assert free.accuracy > 0.9
    assert free.accuracy >= accuracy() > local


def test_the_front_door():
    result = dovetail.train(
        TASK,
        protocol="dp_fl",
        eps=5.0,
        delta=1e-5,
        settings={"protocol.clip_norm": 1.0, "cohort.rounds": 5, "cohort.kind": "everyone"},
    )
    assert result.statement.eps <= 5.0
    assert result.out is None


@pytest.mark.parametrize("task", ["digits", "mnist"])
def test_the_front_door_says_which_target_it_takes_when_none_is_given(task, monkeypatch):
    monkeypatch.setattr(training, "prepare", lambda settings, **_: settings)
    monkeypatch.setattr(training, "run", lambda ready, **_: ready)
    silent = types.SimpleNamespace(refuse_if_hopeless=lambda *, force: None, log_expectation=lambda: None)
    monkeypatch.setattr(Outlook, "of", lambda plan: silent)
    own, changed = dovetail.train(task).privacy, dovetail.train(task, protocol="privunit", eps=0.5).privacy
    assert f'({own.eps:g}, {own.delta:g}) for "{task}"' in " ".join(experiment.train.__doc__.split())
    assert (changed.eps, changed.delta) == (0.5, own.delta)
    other = dovetail.train("qmnist").privacy
    assert (other.eps, other.delta) == (None, 1e-05)


def test_fits_and_certify_agree_on_the_budget():
    ready = known()
    everything = list(range(12))
    assert ready.fits(everything)
    assert (
        accounting.certify([ready.guarantee.rounds()[i] for i in everything], ready.guarantee.scope, delta=1e-5).eps
        <= 3.0
    )
    assert math.isfinite(ready.record(everything).certified_statement().eps)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (("privacy.eps", -1.0), "expected eps > 0, got eps=-1.0"),
        (("privacy.delta", 1.0), "expected 0 < delta < 1, got delta=1.0"),
        (("protocol.name", "dpfl"), "unknown protocol 'dpfl': did you mean 'dp_fl'"),
        (("protocol.clip_nrom", 1.0), "unknown key of protocol 'dp_fl' 'clip_nrom': did you mean 'clip_norm'"),
        (("privacy.epsilon", 1.0), r"unknown key of \[privacy\] 'epsilon': did you mean 'eps'"),
        (("cohrot.size", 1), "unknown config key 'cohrot': did you mean 'cohort'"),
        (("cohort.size", 301), r"expected at most 300 clients per round \(all there are\), got size=301"),
        (("noise", "maybe"), "noise must be one of os, seeded, got 'maybe'"),
        (("privacy.unit", "family"), "privacy.unit must be one of item, user, subject, got 'family'"),
        (("cohort.size", "many"), "cohort.size must be a whole number or a list, got 'many'"),
        (("cohort.epochs", 1), "expected either cohort.epochs or cohort.rounds"),
        (("seed", -1), "expected 0 <= seed"),
        (("task.model", "resnet"), "unknown model 'resnet'"),
        (("task.partition", "iid"), "needs the number of users"),
        (("protocol", {"name": "fedavg"}), "'fedavg' gives no guarantee"),
        (("protocol", MEDIAN), "'dp_fl' gives no guarantee with these settings: leave out privacy.eps = 3.0"),
        (("protocol.schedule", [1.0] * 11), "expected a schedule of at least 12 rounds, got 11 factors"),
        (("cohort.size", [50] * 11), "expected a size for each of the 12 rounds, got 11 sizes"),
        (("cohort.size", []), "a list of sizes has at least one, and no size_end"),
        (("cohort.size_end", 301), "expected 1 <= size <= 300, got size=301"),
    ],
)
def test_bad_configs_are_one_sentence(override, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        plan(override)
    assert "\n" not in str(caught.value)


def test_noise_must_come_from_somewhere():
    data = {**BASE, "privacy": {"delta": 1e-5}}
    with pytest.raises(ValueError, match=r"set privacy.eps, or the noise of 'dp_fl' itself"):
        experiment.prepare(config.parse(data), task=TASK)


def test_presets_parse_and_name_registered_things():
    assert {"mnist", "digits"} <= set(config.presets())
    for name in config.presets():
        config.read(name)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("privacy.eps=2", ("privacy.eps", 2)),
        ("task.name=mnist", ("task.name", "mnist")),
        ('task.name="mnist"', ("task.name", "mnist")),
        ("performance.fast=false", ("performance.fast", False)),
        ("server.options={momentum = 0.9}", ("server.options", {"momentum": 0.9})),
    ],
)
def test_overrides_are_read_as_toml_or_plain_text(text, pair):
    assert config.parse_override(text) == pair


SHUFFLE = (
    ("cohort.kind", "everyone"),
    ("cohort.size", 300),
    ("protocol", {"name": "ss_simple", "clip_value": 0.3}),
    ("cohort.rounds", 4),
)


def test_a_shuffled_run_is_calibrated_to_its_crowd_and_stated_beside_the_claim(tmp_path):
    ready = plan(*SHUFFLE)
    assert ready.sampler.schedule.min_size == 300, "reports hide in a crowd, which must not be smaller than planned"
    result = experiment.run(ready, out=tmp_path / "run")
    assert 3.0 * 0.999 < result.statement.eps <= 3.0
    assert result.statement.trust is Trust.SHUFFLE
    saved = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert Statement.from_json(saved["claimed"]).span == "one round"
    assert Statement.from_json(saved["shuffler"]).eps == 0
    assert Statement.from_json(saved["local"]).eps > 3.0
    pages.write(tmp_path / "run")
    assert "What the shuffler learns" in (tmp_path / "run" / "report.html").read_text()


def test_colluders_cost_noise_and_dropout_needs_a_minimum():
    alone, watched = (plan(*SHUFFLE, ("cohort.colluders", t)).sampler.protocol.eps_local for t in (0, 100))
    assert watched < alone
    with pytest.raises(ValueError, match=r"with dropout=0\.1 set cohort\.min_size"):
        plan(*SHUFFLE, ("cohort.dropout", 0.1))
    fewer = plan(*SHUFFLE, ("cohort.dropout", 0.1), ("cohort.min_size", 200))
    assert fewer.sampler.protocol.eps_local == pytest.approx(watched)
    assert experiment.run(fewer).rounds == 4
    chosen = ("protocol.eps_local", fewer.sampler.protocol.eps_local)
    nobody = experiment.run(plan(*SHUFFLE, chosen, ("cohort.dropout", 0.5), ("cohort.min_size", 290)))
    assert nobody.rounds == 0, "rounds below the minimum release nothing"
    assert nobody.statement.eps == 0


def test_dropout_from_a_secret_sample_is_refused():
    secret = [("cohort.kind", "fixed"), ("cohort.size", 50), ("cohort.dropout", 0.1), ("cohort.min_size", 50)]
    with pytest.raises(ValueError, match="'ss_simple' cannot have dropout with a secret sample"):
        plan(*SHUFFLE, *secret)


def test_what_cannot_be_certified_runs_only_without_a_target():
    padded = {"name": "ss_double", "clip_value": 0.3, "beta": 0.5, "randomizer": "laplace", "eps_local": 1.0}
    free = [("protocol", padded), *[pair for pair in SHUFFLE if pair[0] != "protocol"]]
    result = experiment.run(experiment.prepare(config.parse({**BASE, "privacy": {}}, free), task=TASK))
    assert result.statement.is_unbounded
    assert "binary randomized response only" in str(result.statement.proof)
    del padded["eps_local"]
    with pytest.raises(ValueError, match="binary randomized response only"):
        plan(*free)


def test_personal_budgets_are_stated_user_by_user(tmp_path):
    personal = {"name": "apes", "clip_value": 0.3, "budgets": [0.5, 2.0]}
    few = ("task", {"name": "tiny", "partition": "iid", "users": 40})  # every user's own eps is worked out
    chosen = [*SHUFFLE, ("protocol", personal), few, ("cohort.size", 40)]
    ready = experiment.prepare(config.parse({**BASE, "privacy": {}}, chosen), task=TASK)
    result = experiment.run(ready, out=tmp_path / "run")
    assert len(result.statement.per_user) == 40
    assert result.statement.per_user[0] < result.statement.per_user[-1] <= result.statement.eps
    pages.write(tmp_path / "run")
    assert "Eps per user" in (tmp_path / "run" / "report.html").read_text()


def prepared(data, *overrides, task=TASK):
    return experiment.prepare(config.parse({**BASE, **data}, overrides), task=task)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    sampling=st.sampled_from(
        [("fixed", "replace-one"), ("poisson", "replace-one"), ("poisson", "add-remove"), ("everyone", "add-remove")]
    ),
    sizes=st.lists(st.sampled_from([30, 75, 300]), min_size=1, max_size=12),
    factors=st.lists(st.sampled_from([1.0, 1.7]), min_size=12, max_size=12),
    noise=st.sampled_from([2.0, 5.0, 12.0]),
    eps=st.sampled_from([0.2, 1.0, 4.0]),
    delta=st.sampled_from([1e-3, 1e-6]),
    stop=st.sampled_from(["eps", "delta"]),
)
def test_a_run_spends_what_it_may_and_one_round_more_would_overspend(sampling, sizes, factors, noise, eps, delta, stop):
    """Random sizes, noises, budgets: the rounds that fit are exactly those before the first prefix that does not."""
    kind, neighbors = sampling
    ready = plan(
        ("cohort", {"kind": kind, "size": 300 if kind == "everyone" else sizes, "rounds": len(sizes)}),
        ("protocol", {"name": "dp_fl", "clip": 0.5, "noise_multiplier": noise, "schedule": factors}),
        ("privacy", {"eps": eps, "delta": delta, "neighbors": neighbors, "stop": stop}),
    )
    count = ready.num_affordable_rounds()
    fitting = [ready.fits(list(range(rounds))) for rounds in range(len(sizes) + 1)]
    assert fitting == [rounds <= count for rounds in range(len(sizes) + 1)]
    spent = ready.record(list(range(count))).certified_statement()
    assert spent.eps <= eps
    assert spent.delta <= delta
    if stop == "delta":
        assert spent.eps == eps
    if count < len(sizes):
        more = ready.record(list(range(count + 1))).certified_statement()
        assert more.delta > delta if stop == "delta" else more.eps > eps


SCHEDULED = {
    "cohort": {"kind": "poisson", "size": 40, "size_end": 150, "rounds": 5},
    "protocol": {"name": "dp_fl", "clip": "adaptive", "clip_norm": 0.3, "schedule": "held", "noise_multiplier": 2.0},
    "privacy": {"neighbors": "add-remove"},
}


def test_uploads_are_the_planned_sizes_of_the_rounds_that_ran():
    sizes = [40, 40, 150, 150]
    noisy = {"name": "dp_fl", "clip": 0.5, "noise_multiplier": 5.0}
    chosen = {"protocol": noisy, "cohort": {"kind": "fixed", "size": sizes, "rounds": 4}, "privacy": {}}
    ready = prepared(chosen)
    whole = experiment.run(ready)
    assert (whole.rounds, whole.uploads) == (4, 380)
    assert whole.to_json()["uploads"] == 380
    budget = ready.record([0, 1, 2]).certified_statement().eps
    part = experiment.run(prepared(chosen, ("privacy.eps", budget)))
    assert (part.rounds, part.uploads) == (3, 230)
    assert part.statement.eps <= budget < ready.record([0, 1, 2, 3]).certified_statement().eps
    growing = prepared(chosen, ("cohort", {"kind": "fixed", "size": 40, "size_end": 150, "rounds": 5})).sampler.schedule
    assert [growing.cohort(index).size for index in range(5)] == [40, 68, 95, 122, 150]


def test_stopping_by_delta_states_the_targets_eps_and_logs_the_delta_spent(tmp_path):
    ready = plan(("privacy.stop", "delta"), ("cohort", {"kind": "everyone", "rounds": 3}))
    result = experiment.run(ready, out=tmp_path / "run", evaluate_every=1)
    assert result.statement.eps == 3.0
    assert 0.9e-5 < result.statement.delta <= 1e-5, "the noise is calibrated to the same target"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["eps"] for line in lines} == {3.0}
    spent = [line["delta"] for line in lines]
    assert spent == [ready.record(list(range(rounds))).certified_statement().delta for rounds in range(1, 4)]
    assert spent == sorted(set(spent))
    assert spent[-1] == result.statement.delta
    written = json.loads((tmp_path / "run" / "privacy.json").read_text())["certified"]
    assert (written["eps"], written["delta"]) == (3.0, result.statement.delta)


def test_stopping_by_delta_needs_an_eps():
    with pytest.raises(ValueError, match=r"privacy.stop = 'delta' needs privacy.eps"):
        prepared({"privacy": {"stop": "delta"}})


def test_adaptive_clipping_and_schedules_survive_a_kill(tmp_path):
    ready = prepared(SCHEDULED, ("diagnostics", True))
    whole = experiment.run(ready, out=tmp_path / "whole", evaluate_every=2)

    def interrupt(progress):
        if progress.round == 4:
            raise Interruption

    with pytest.raises(Interruption):
        experiment.run(
            ready, out=tmp_path / "cut", checkpoint_every=3, evaluate_every=2, callbacks=[AfterRound(interrupt)]
        )
    assert len((tmp_path / "cut" / "diagnostics.jsonl").read_text().splitlines()) == 1 + 4
    resumed = experiment.run(ready, out=tmp_path / "cut", resume=True, checkpoint_every=3, evaluate_every=2)
    np.testing.assert_array_equal(resumed.parameters["params"], whole.parameters["params"])
    assert without_resuming(resumed.statement) == whole.statement
    assert {unit: without_resuming(said) for unit, said in resumed.units.items()} == whole.units
    for name in ("metrics.jsonl", "diagnostics.jsonl"):
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_the_schedule_reaches_the_noise_of_each_round():
    """Nobody is there, so the model moves by noise alone: each round's is its factor times that without a schedule."""
    alone = {"cohort": {"kind": "everyone", "dropout": 1.0, "rounds": 3}, "privacy": {}}
    plain = {"name": "dp_fl", "clip": 1.0, "noise_multiplier": 1.0}
    one, two = (prepared({**alone, "protocol": {**plain, "schedule": s}}) for s in ("constant", [1.0, 4.0, 0.5]))
    moves = []
    for ready in (one, two):
        training, places = ready.engine.start(), []
        for index in range(3):
            places.append(np.array(training.params))
            training = ready.step(training, index, ready.sampler.schedule.draw_users(index))
        moves.append(np.diff([*places, np.array(training.params)], axis=0))
    assert np.abs(moves[0]).max() > 1e-4
    np.testing.assert_allclose(moves[1], np.array([[1.0], [4.0], [0.5]]) * moves[0], rtol=1e-3, atol=1e-6)
    assert [event.mechanism.std for event in two.guarantee.rounds()] == [1.0, 4.0, 0.5], "and what is accounted"


def test_a_small_cohort_with_an_adaptive_clip_norm_meets_its_target():
    small = {"task": {"name": "tiny", "users": 10}, "cohort": {"kind": "everyone", "rounds": 2}}
    ready = prepared({**small, "protocol": {"name": "dp_fl", "clip": "adaptive"}, "privacy": {"eps": 0.5}})
    assert 0.5 * 0.999 < ready.record([0, 1]).certified_statement().eps <= 0.5


def raw_updates(ready, params, users):
    """What each user would send, from its records and the plain gradient; by hand where the model is linear."""
    data, held = TASK.load(), ready.engine._data
    first = np.asarray(held.rows)[np.asarray(held.starts)[users]]
    inputs, labels = data.inputs[first], data.labels[first]
    if ready.config.task.model == "logistic":
        constant = ready.engine._classes[0].model.constant
        weights = params.reshape(4, 3)
        logits = inputs @ weights[:-1] + constant * weights[-1]
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        features = np.concatenate([inputs, np.full((len(users), 1), constant)], axis=1)
        return ((np.eye(3)[labels] - shares)[:, None, :] * features[:, :, None]).reshape(len(users), -1)
    _, model = models.build(ready.config.task.model, data)
    _, unravel = ravel_pytree(model.init(jax.random.key(0)))

    def loss(flat, x, label):
        return -jax.nn.log_softmax(model.apply(unravel(flat), x[None])[0])[label]

    return -np.asarray(jax.vmap(jax.grad(loss), (None, 0, 0))(params, inputs, labels))


@pytest.mark.parametrize(
    "overrides",
    [
        [("protocol.noise_multiplier", 1.0)],
        [("protocol.noise_multiplier", 1.0), ("task.model", "mlp")],
        [("protocol", {"name": "ss_simple", "clip_value": 0.3, "eps_local": 1.0}), ("performance.fast", False)],
    ],
    ids=["linear", "general", "faithful"],
)
def test_diagnostics_are_those_of_the_raw_updates(tmp_path, overrides):
    short = [("cohort.kind", "disjoint"), ("cohort.rounds", 3)]
    ready = prepared({"privacy": {}}, *short, ("diagnostics", True), *overrides)
    assert (ready.engine._classes[0].strategy == "linear") == (overrides[-1] == ("protocol.noise_multiplier", 1.0))
    assert ready.engine._faithful == (overrides[-1] == ("performance.fast", False))
    experiment.run(ready, out=tmp_path / "run")
    first, *lines = [json.loads(line) for line in (tmp_path / "run" / "diagnostics.jsonl").read_text().splitlines()]
    assert first == {"banner": BANNER}
    assert [line["round"] for line in lines] == [1, 2, 3]
    training = ready.engine.start()
    for index, line in enumerate(lines):
        users = ready.sampler.schedule.draw_users(index)
        updates = raw_updates(ready, np.array(training.params), users)
        assert line["variance"] == pytest.approx(updates.var(axis=0).mean(), rel=1e-4)
        assert line["scale"] == pytest.approx((updates.mean(axis=0) ** 2).mean(), rel=1e-4)
        training = ready.step(training, index, users)
    page = pages.write(tmp_path / "run").read_text()
    apart = (tmp_path / "run" / "diagnostics.html").read_text()
    for said in (BANNER, "update scale U_s", "between-clients variance V_c"):
        assert said in apart
        assert said not in page, "the page that is handed out"


def test_without_diagnostics_none_are_written_and_the_model_is_the_same(tmp_path):
    short = [("protocol.noise_multiplier", 4.0), ("cohort.rounds", 3)]
    quiet = experiment.run(plan(*short), out=tmp_path / "quiet")
    assert not (tmp_path / "quiet" / "diagnostics.jsonl").exists()
    assert BANNER not in pages.write(tmp_path / "quiet").read_text()
    assert not (tmp_path / "quiet" / "diagnostics.html").exists()
    loud = experiment.run(plan(*short, ("diagnostics", True)))
    np.testing.assert_allclose(quiet.parameters["params"], loud.parameters["params"], atol=1e-6)


@pytest.mark.parametrize("name", [name for name in PROTOCOLS if name not in ("fedavg", "binary_sum", "real_sum")])
def test_every_protocol_trains_by_its_defaults(name):
    """With twenty users: crowds, and every user's own eps, are worked out for each noise that is tried."""
    overrides = {
        "noise": "seeded",
        "task": {"name": "tiny", "partition": "iid", "users": 20},
        "cohort": {"kind": "everyone", "rounds": 2},
        "privacy.neighbors": PROTOCOLS[name].relation.value,
    }
    result = dovetail.train(TASK, protocol=name, eps=2.0, delta=1e-5, settings=overrides)
    assert result.rounds == 2
    assert 0 < result.statement.eps <= 2.0


def test_a_preset_gives_way_to_the_relation_of_another_protocol():
    settings = {"noise": "seeded", "cohort.rounds": 1}
    result = dovetail.train("digits", protocol="central_sub", eps=2.0, settings=settings)
    assert result.statement.neighbors is Neighbors.ADD_REMOVE


SILOS = {
    "task": {"name": "tiny", "partition": "silos", "silos": 30, "spread": 2},
    "cohort": {"kind": "everyone", "rounds": 4},
    "protocol": {"name": "dp_fl", "clip_norm": 0.5},
}


@pytest.mark.parametrize("neighbors", list(Neighbors))
def test_the_table_of_units_says_what_each_is_promised(neighbors):
    """Exact Gaussian shifts: a user's own, an item's as a replaced user, a subject's as two replaced users."""
    protocol = {**SILOS["protocol"], "noise_multiplier": 20.0}
    privacy = {"delta": 1e-5, "neighbors": neighbors.value}
    ready = prepared({**SILOS, "protocol": protocol, "privacy": privacy}, task=TASK_WITH_SUBJECTS)
    rows = ready.record([0, 1, 2, 3]).statements_by_unit()
    mu = 2 / 20.0
    own = mu if neighbors is Neighbors.ADD_REMOVE else 2 * mu
    for unit, shift in ((Unit.USER, own), (Unit.ITEM, 2 * mu), (Unit.SUBJECT, 4 * mu)):
        assert rows[unit].eps == pytest.approx(gaussian.eps_of(shift, delta=1e-5), rel=1e-6)
        assert rows[unit].unit is unit
    assert rows[Unit.USER].neighbors is neighbors
    assert rows[Unit.ITEM].neighbors is rows[Unit.SUBJECT].neighbors is Neighbors.REPLACE_ONE
    assert any(
        text.startswith("no subject has records at more than 2 users, or more than 5 records in total")
        for text in rows[Unit.SUBJECT].assumptions
    )
    assert "hyper-parameters were chosen without the private data" in rows[Unit.ITEM].assumptions


@pytest.mark.parametrize("unit", ["item", "user", "subject"])
def test_the_target_may_be_another_units(unit):
    privacy = {"eps": 3.0, "delta": 1e-5, "unit": unit, "neighbors": "add-remove"}
    ready = prepared({**SILOS, "privacy": privacy}, task=TASK_WITH_SUBJECTS)
    shift = {"user": 1, "item": 2, "subject": 4}[unit] * 2 / ready.sampler.protocol.noise_multiplier
    assert 3.0 * 0.999 < gaussian.eps_of(shift, delta=1e-5) <= 3.0
    result = experiment.run(ready)
    assert result.rounds == 4
    assert result.statement.unit is Unit(unit)
    assert 3.0 * 0.999 < result.statement.eps <= 3.0
    assert result.statement.eps == result.units[Unit(unit)].eps
    assert result.units[Unit.USER].eps <= result.units[Unit.ITEM].eps <= result.units[Unit.SUBJECT].eps
    noisier = {**SILOS["protocol"], "noise_multiplier": 0.7 * ready.sampler.protocol.noise_multiplier}
    less = prepared({**SILOS, "protocol": noisier, "privacy": privacy}, task=TASK_WITH_SUBJECTS)
    assert 0 < less.num_affordable_rounds() < 4, "the stop rule is about that unit too"
    assert less.record(list(range(less.num_affordable_rounds()))).certified_statement().eps <= 3.0
    assert less.record(list(range(less.num_affordable_rounds() + 1))).certified_statement().eps > 3.0


def test_units_without_a_promise_say_why():
    median = {**SILOS["protocol"], "clip": "median", "noise_multiplier": 5.0}
    rows = (
        prepared({**SILOS, "protocol": median, "privacy": {}}, task=TASK_WITH_SUBJECTS)
        .record([0, 1])
        .statements_by_unit()
    )
    for unit in Unit:
        assert rows[unit].is_unbounded
        assert "exact median" in str(rows[unit].proof)
    central = {"name": "central_sub", "clip_norm": 0.5, "items_per_subject": 2, "batch": 30.0, "noise_multiplier": 5.0}
    by_record = {**SILOS, "protocol": central, "privacy": {"neighbors": "add-remove"}}
    rows = prepared(by_record, task=TASK_WITH_SUBJECTS).record([0, 1]).statements_by_unit()
    assert not rows[Unit.SUBJECT].is_unbounded
    assert rows[Unit.USER].is_unbounded
    assert "a user may hold any number of them" in str(rows[Unit.USER].proof)
    fedavg = (
        prepared({**SILOS, "protocol": {"name": "fedavg"}, "privacy": {}}, task=TASK_WITH_SUBJECTS)
        .record([0])
        .statements_by_unit()
    )
    assert all(row.is_unbounded and "no noise" in str(row.proof) for row in fedavg.values())


def test_a_user_is_taken_for_a_subject_where_nobody_knows_better():
    rows = plan(("protocol.noise_multiplier", 8.0), ("cohort.kind", "poisson")).record([0, 1]).statements_by_unit()
    assert rows[Unit.SUBJECT].eps == rows[Unit.USER].eps
    assert any("the data do not say whom a record is about" in said for said in rows[Unit.SUBJECT].assumptions)
