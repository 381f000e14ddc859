import json
import math

import numpy as np
import pytest
from tiny import TASK

import dovetail
from dovetail import accounting, config, experiment, report
from dovetail.statements import Neighbors, Statement, Trust

BASE = {
    "task": {"name": "tiny"},
    "cohort": {"kind": "fixed", "size": 50, "rounds": 12},
    "server": {"learning_rate": 2.0},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0},
    "privacy": {"eps": 3.0, "delta": 1e-5},
}


def plan(*overrides):
    return experiment.prepare(config.parse(BASE, overrides), task=TASK)


@pytest.mark.parametrize(
    ("kind", "neighbors"),
    [
        ("fixed", "replace-one"),
        ("poisson", "replace-one"),
        ("poisson", "add-remove"),
        ("disjoint", "replace-one"),
        ("disjoint", "add-remove"),
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
    one_more = ready.certify(list(range(result.rounds + 1)))
    assert one_more.eps > 3.0


def test_a_round_below_the_minimum_releases_nothing_and_costs_nothing():
    settings = [("cohort.kind", "everyone"), ("cohort.size", 300), ("cohort.dropout", 0.5)]
    ready = plan(*settings, ("cohort.min_size", 150))
    result = experiment.run(ready)
    large = [i for i in range(12) if len(ready.schedule.draw(i)) >= 150]
    assert 0 < len(large) < 12
    assert result.rounds == len(large)
    assert result.statement == ready.certify(large)
    nothing = experiment.run(plan(*settings, ("cohort.min_size", 300)))
    assert nothing.rounds == 0
    assert nothing.statement.eps == 0
    assert not nothing.parameters["params"].any(), "the model never moved"


def test_folder_holds_config_metrics_statement_model(tmp_path):
    ready = plan()
    seen = []
    result = experiment.run(ready, out=tmp_path / "run", evaluate_every=4, observe=seen.append)
    assert config.read(tmp_path / "run" / "config.toml") == ready.config
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [4, 8, 12]
    assert lines[-1]["accuracy"] == result.accuracy
    spent = [line["eps"] for line in lines]
    assert spent == sorted(spent)
    written = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert Statement.from_json(written["certified"]) == result.statement
    assert written["protocol"]["noise_multiplier"] == ready.protocol.noise_multiplier
    np.testing.assert_array_equal(np.load(tmp_path / "run" / "model.npz")["params"], result.parameters["params"])
    assert [p.round for p in seen] == list(range(1, 13))


def test_a_folder_is_never_overwritten(tmp_path):
    ready = plan()
    experiment.run(ready, out=tmp_path / "run")
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match="which holds one"):
        experiment.run(ready, out=tmp_path / "run")
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}


def test_resuming_needs_the_same_config(tmp_path):
    experiment.run(plan(), out=tmp_path / "run")
    with pytest.raises(ValueError, match="got another one"):
        experiment.run(plan(("privacy.eps", 4.0)), out=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="expected a run to resume"):
        experiment.run(plan(), out=tmp_path / "nowhere", resume=True)


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
        experiment.run(ready, out=tmp_path / "cut", checkpoint_every=2, evaluate_every=3, observe=interrupt)
    resumed = experiment.run(ready, out=tmp_path / "cut", resume=True, checkpoint_every=2, evaluate_every=3)
    np.testing.assert_array_equal(resumed.parameters["params"], whole.parameters["params"])
    assert resumed.statement == whole.statement
    assert (tmp_path / "cut" / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()


def test_the_same_seed_gives_the_same_model_and_another_seed_another():
    one, two = experiment.run(plan()), experiment.run(plan())
    other = experiment.run(plan(("seed", 1)))
    np.testing.assert_array_equal(one.parameters["params"], two.parameters["params"])
    assert not np.array_equal(one.parameters["params"], other.parameters["params"])


def test_protocols_rank_as_their_trust_suggests():
    def accuracy(*overrides):
        return np.mean([experiment.run(plan(("seed", seed), *overrides)).accuracy for seed in range(3)])

    free = experiment.run(
        experiment.prepare(config.parse({**BASE, "protocol": {"name": "fedavg"}, "privacy": {}}), task=TASK)
    )
    assert free.statement.unbounded
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


def test_fits_and_certify_agree_on_the_budget():
    ready = plan()
    everything = list(range(12))
    assert ready.fits(everything)
    assert accounting.certify([ready.rounds[i] for i in everything], ready.scope, delta=1e-5).eps <= 3.0
    assert math.isfinite(ready.certify(everything).eps)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (("privacy.eps", -1.0), "expected eps > 0, got eps=-1.0"),
        (("privacy.delta", 1.0), "expected 0 < delta < 1, got delta=1.0"),
        (("protocol.name", "dpfl"), "unknown protocol 'dpfl': did you mean 'dp_fl'"),
        (("protocol.clip_nrom", 1.0), "unknown key of protocol 'dp_fl' 'clip_nrom': did you mean 'clip_norm'"),
        (("privacy.epsilon", 1.0), r"unknown key of \[privacy\] 'epsilon': did you mean 'eps'"),
        (("cohrot.size", 1), "unknown config key 'cohrot': did you mean 'cohort'"),
        (("cohort.size", 301), r"expected at most as many clients a round as there are \(300\), got size=301"),
        (("cohort.size", "many"), "expected `int | null`, got `str` in cohort.size"),
        (("cohort.epochs", 1), "expected either cohort.epochs or cohort.rounds"),
        (("seed", -1), "expected 0 <= seed"),
        (("task.model", "transformer"), "unknown model 'transformer'"),
        (("task.partition", "iid"), "expected the number of users"),
        (("protocol", {"name": "fedavg"}), "expected no privacy.eps with 'fedavg'"),
    ],
)
def test_bad_configs_are_one_sentence(override, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        plan(override)
    assert "\n" not in str(caught.value)


def test_noise_must_come_from_somewhere():
    data = {**BASE, "privacy": {"delta": 1e-5}}
    with pytest.raises(ValueError, match=r"expected privacy.eps or the noise of 'dp_fl'"):
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
    assert ready.schedule.min_size == 300, "reports hide in a crowd, which must not be smaller than planned"
    result = experiment.run(ready, out=tmp_path / "run")
    assert 3.0 * 0.999 < result.statement.eps <= 3.0
    assert result.statement.trust is Trust.SHUFFLE
    saved = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert Statement.from_json(saved["claimed"]).span == "one round"
    assert Statement.from_json(saved["shuffler"]).eps == 0
    assert Statement.from_json(saved["local"]).eps > 3.0
    report.write(tmp_path / "run")
    assert "What the shuffler learns" in (tmp_path / "run" / "report.html").read_text()


def test_colluders_cost_noise_and_dropout_needs_a_minimum():
    alone, watched = (plan(*SHUFFLE, ("cohort.colluders", t)).protocol.eps_local for t in (0, 100))
    assert watched < alone
    with pytest.raises(ValueError, match=r"expected cohort\.min_size with dropout=0\.1"):
        plan(*SHUFFLE, ("cohort.dropout", 0.1))
    fewer = plan(*SHUFFLE, ("cohort.dropout", 0.1), ("cohort.min_size", 200))
    assert fewer.protocol.eps_local == pytest.approx(watched)
    assert experiment.run(fewer).rounds == 4
    nobody = experiment.run(plan(*SHUFFLE, ("cohort.dropout", 0.5), ("cohort.min_size", 290)))
    assert nobody.rounds == 0, "rounds below the minimum release nothing"
    assert nobody.statement.eps == 0


def test_dropout_from_a_secret_sample_is_refused():
    secret = [("cohort.kind", "fixed"), ("cohort.size", 50), ("cohort.dropout", 0.1), ("cohort.min_size", 50)]
    with pytest.raises(ValueError, match="expected no dropout under 'ss_simple' where the sample is secret"):
        plan(*SHUFFLE, *secret)


def test_what_cannot_be_certified_runs_only_without_a_target():
    padded = {"name": "ss_double", "clip_value": 0.3, "beta": 0.5, "randomizer": "laplace", "eps_local": 1.0}
    free = [("protocol", padded), *[pair for pair in SHUFFLE if pair[0] != "protocol"]]
    result = experiment.run(experiment.prepare(config.parse({**BASE, "privacy": {}}, free), task=TASK))
    assert result.statement.unbounded
    assert "binary randomized response only" in result.statement.theorem.where
    del padded["eps_local"]
    with pytest.raises(ValueError, match="binary randomized response only"):
        plan(*free)


def test_personal_budgets_are_stated_user_by_user(tmp_path):
    personal = {"name": "apes", "clip_value": 0.3, "budgets": [0.5, 2.0]}
    chosen = [*SHUFFLE, ("protocol", personal)]
    ready = experiment.prepare(config.parse({**BASE, "privacy": {}}, chosen), task=TASK)
    result = experiment.run(ready, out=tmp_path / "run")
    assert len(result.statement.per_user) == 300
    assert result.statement.per_user[0] < result.statement.per_user[-1] <= result.statement.eps
    report.write(tmp_path / "run")
    assert "own eps" in (tmp_path / "run" / "report.html").read_text()
