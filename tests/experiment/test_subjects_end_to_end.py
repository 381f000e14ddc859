"""Items and subjects, from config to statement: what ran is what the event says."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from resuming import without_resuming
from tiny import TASK, TASK_WITH_SUBJECTS
from watchers import AfterRound

from dovetail import experiment
from dovetail.data.subjects import subject_maxima
from dovetail.experiment import config
from dovetail.learners.client import cross_entropy
from dovetail.mechanisms.gaussian import clip_l2
from dovetail.sampling import Items, RoundSample
from dovetail.statements import Neighbors, Unit, Verdict

BASE = {
    "noise": "seeded",
    "diagnostics": True,
    "task": {"name": "tiny", "partition": "silos", "silos": 6, "spread": 2},
    "cohort": {"kind": "everyone", "rounds": 4},
    "server": {"learning_rate": 1.0},
    "client": {"learning_rate": 0.5},
    "protocol": {"name": "central_sub", "clip_norm": 0.4, "items_per_subject": 3, "batch": 60},
    "privacy": {"eps": 6.0, "delta": 1e-5, "neighbors": "add-remove"},
}
LOCAL = {"name": "local_sub", "clip_norm": 0.4, "items_per_subject": 4, "items_per_user": 2, "batch": 12, "steps": 2}


def plan(*overrides, task=TASK_WITH_SUBJECTS):
    return experiment.prepare(config.parse(BASE, overrides), task=task)


def quiet(*overrides):
    """As good as no noise, and no target: for comparison with arithmetic by hand."""
    return plan(("protocol.noise_multiplier", 1e-9), ("privacy", {"neighbors": "add-remove"}), *overrides)


@jax.jit
def gradients(params, inputs, labels):
    def loss(w, x, y):
        w = w.reshape(4, 3)
        return cross_entropy((x @ w[:-1] + w[-1])[None], y[None])[0]

    return jax.vmap(jax.grad(loss), (None, 0, 0))(params, inputs, labels)


def clipped_gradients(params, rows, clip_norm=0.4):
    data = TASK_WITH_SUBJECTS.load(folder=None)
    each = gradients(params, data.inputs, jnp.asarray(data.labels))[np.asarray(rows, int)]
    return np.asarray(clip_l2(np.asarray(each), clip_norm)).sum(axis=0) if len(rows) else np.zeros(12)


def test_no_more_of_a_subject_is_used_than_the_statement_says():
    ready = plan()
    _, records = ready.sampler.clients.owners_and_records()
    subjects = TASK_WITH_SUBJECTS.load(folder=None).subjects
    assert np.bincount(subjects[records]).max() == 3
    assert len(records) == 180
    assert ready.sampler.protocol.rate == pytest.approx(60 / 180)
    mechanism = ready.guarantee.rounds()[0].mechanism
    assert (mechanism.items, mechanism.prob_item, mechanism.noise) == (3, ready.sampler.protocol.rate, "sum")
    capped = plan(("protocol", LOCAL))
    pairs = np.stack(
        [capped.sampler.clients.owners_and_records()[0], subjects[capped.sampler.clients.owners_and_records()[1]]]
    )
    assert np.unique(pairs, axis=1, return_counts=True)[1].max() == 2
    assert capped.guarantee.rounds()[0].mechanism.items_per_user == 2
    assert capped.guarantee.rounds()[0].mechanism.noise == "user"


def test_a_central_round_is_the_clipped_sum_over_the_expected_batch():
    ready = quiet(("cohort.rounds", 1))
    rows = ready.sampler.draws.records_of_step(0, np.arange(6))
    moved = experiment.run(ready).parameters["params"].ravel()
    np.testing.assert_allclose(moved, -clipped_gradients(jnp.zeros(12), rows) / 60, atol=2e-6)


def test_a_local_round_averages_what_noisy_steps_lead_to():
    ready = quiet(("protocol", LOCAL | {"noise_multiplier": 1e-9}), ("cohort.rounds", 1))
    rows = ready.sampler.draws.records_by_user_and_step(0, np.arange(6), steps=2)
    ends = []
    for user in range(6):
        params = np.zeros(12)
        for step in range(2):
            batch = rows[user, step][rows[user, step] >= 0]
            params = params - 0.5 / 12 * clipped_gradients(jnp.asarray(params, jnp.float32), batch)
        ends.append(params)
    after = ready.step(ready.engine.start(), 0, np.arange(6))
    moved = ready.engine.model_arrays(after)["params"].ravel()
    np.testing.assert_allclose(moved, np.mean(ends, axis=0), atol=3e-6)


def test_local_noise_is_fresh_for_every_user_and_step_and_of_the_stated_size():
    """200 rounds x 12 coordinates of the mean of 6 users after 2 steps (relative error of a variance: 3 %)."""
    noisy = LOCAL | {"noise_multiplier": 50.0}
    ready = plan(("protocol", noisy), ("privacy", {"neighbors": "add-remove"}), ("cohort.rounds", 1))
    engine, std, drawn, users = ready.engine, ready.sampler.protocol.std, [], np.arange(6)
    items = Items(np.full((6, 2, 4), -1, np.int32), np.ones((6, 2), np.float32))
    for index in range(200):
        training = engine.step(
            engine.start(), users, index=index, capacity=6, sample=RoundSample(users, 6, items=items)
        )
        drawn.append(np.asarray(training.params))
    measured = np.var(np.stack(drawn))
    expected = (0.5 / 12 * std) ** 2 * 2 / 6
    assert measured == pytest.approx(expected, rel=0.13)
    assert ready.guarantee.rounds()[0].mechanism.std == std


@pytest.mark.parametrize("protocol", [BASE["protocol"], LOCAL], ids=["central", "local"])
def test_noise_is_calibrated_and_the_table_says_whose_privacy(protocol):
    result = experiment.run(plan(("protocol", protocol)))
    assert 6.0 * 0.99 < result.statement.eps <= 6.0
    assert result.statement.unit is Unit.SUBJECT
    assert result.statement.neighbors is Neighbors.ADD_REMOVE
    assert result.units[Unit.SUBJECT].eps <= 6.0
    assert 0 < result.units[Unit.ITEM].eps < result.statement.eps
    assert result.units[Unit.ITEM].neighbors is Neighbors.REPLACE_ONE
    assert result.units[Unit.USER].is_unbounded
    assert "any number of them" in str(result.units[Unit.USER].proof)
    assert result.quote.claimed is not None
    assert result.quote.claimed.verdict is Verdict.CLAIMED_REFUTED


def test_items_alone_are_the_item_level_and_subjects_get_what_their_items_add_up_to():
    item = {key: value for key, value in BASE["protocol"].items() if key != "items_per_subject"}
    result = experiment.run(plan(("protocol", item), ("privacy.unit", "item")))
    assert result.statement.unit is Unit.ITEM
    assert result.units[Unit.SUBJECT].eps > 3 * result.statement.eps
    assert "or more than 5 records in total" in " ".join(result.units[Unit.SUBJECT].assumptions)


def test_unknown_subjects_are_users():
    ready = plan(("task", {"name": "tiny", "partition": "iid", "users": 30}), task=TASK)
    result = experiment.run(ready)
    assert result.units[Unit.USER].eps == result.units[Unit.SUBJECT].eps <= 6.0
    assert "each user is one subject" in " ".join(result.units[Unit.USER].assumptions)


def test_users_drawn_first_cost_more():
    together = plan(("protocol.noise_multiplier", 4.0), ("protocol.batch", 30), ("privacy.eps", 100.0))
    first = plan(
        ("protocol.noise_multiplier", 4.0),
        ("protocol.batch", 30),
        ("privacy.eps", 100.0),
        ("cohort", {"kind": "poisson", "size": 3, "rounds": 4}),
    )
    assert first.guarantee.rounds()[0].mechanism.prob_user == 0.5
    assert first.sampler.protocol.rate == pytest.approx(2 * together.sampler.protocol.rate)
    everything = list(range(4))
    assert first.record(everything).certified_statement().eps > together.record(everything).certified_statement().eps
    assert experiment.run(first).rounds == 4
    with pytest.raises(ValueError, match="min_size = 0"):
        plan(("cohort", {"kind": "poisson", "size": 3, "rounds": 4, "min_size": 1}))


@pytest.mark.parametrize("name", ["central_sub", "local_sub"])
def test_the_published_z_runs_marked_and_certifies_nothing(name):
    settings = {"name": name, "clip_norm": 0.4, "items_per_subject": 5, "sampling_rate": 0.1, "adaptive_z": True}
    ready = plan(("protocol", settings))
    scales = [ready.sampler.noise_scales(i, np.arange(6)) for i in range(4)]
    assert len({float(value) for scale in scales for value in scale.ravel()}) > 1, "the noise depends on the data"
    result = experiment.run(ready)
    assert result.statement.is_unbounded
    assert "reveals it" in str(result.statement.proof)
    assert all(statement.is_unbounded for statement in result.units.values())
    assert result.quote.claimed.verdict is Verdict.CLAIMED_REFUTED
    assert result.quote.claimed.eps == 6.0, "what the recipe was asked for"


def test_central_noise_of_the_published_form_adds_up_over_users():
    """One step of 300 seeds: 12 coordinates each (relative error of a variance: 2.4 %)."""
    settings = {"name": "central_sub", "clip_norm": 1e-6, "items_per_subject": 5, "sampling_rate": 0.1}
    ready = plan(("protocol", settings | {"adaptive_z": True}), ("cohort.rounds", 300))
    ratio = []
    for index in range(300):
        scale = ready.sampler.noise_scales(index, np.arange(6))
        moved = np.asarray(ready.step(ready.engine.start(), index, np.arange(6)).params)
        ratio.append((moved * ready.sampler.protocol.batch / ready.sampler.protocol.std) ** 2 / (scale**2).sum())
    assert np.mean(ratio) == pytest.approx(1.0, abs=0.1)


def test_a_resumed_run_goes_on_with_the_same_draws_and_the_same_ledger(tmp_path):
    class Interruption(Exception):  # noqa: N818
        pass

    def interrupt(progress):
        if progress.round == 3:
            raise Interruption

    ready = plan(("protocol", LOCAL))
    whole = experiment.run(ready, out=tmp_path / "whole")
    with pytest.raises(Interruption):
        experiment.run(ready, out=tmp_path / "cut", checkpoint_every=1, callbacks=[AfterRound(interrupt)])
    resumed = experiment.run(plan(("protocol", LOCAL)), out=tmp_path / "cut", resume=True)
    np.testing.assert_array_equal(resumed.parameters["params"], whole.parameters["params"])
    assert without_resuming(resumed.statement) == whole.statement
    written = json.loads((tmp_path / "cut" / "privacy.json").read_text())
    assert set(written["units"]) == {"item", "user", "subject"}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([("protocol.items_per_subject", 0)], "expected items_per_subject >= 1"),
        ([("protocol.batch", 181)], "expected a sampling rate of at most 1"),
        ([("protocol.sampling_rate", 1.5)], "expected sampling_rate <= 1"),
        ([("protocol.sampling_rate", 0.1)], "expected batch or sampling_rate"),
        ([("privacy.neighbors", "replace-one")], "expected neighbors = add-remove"),
        ([("cohort.kind", "disjoint"), ("cohort.size", 2)], "expected no batches of users that are fixed"),
        ([("cohort.kind", "fixed"), ("cohort.size", 2)], "expected cohort.kind = 'everyone' or 'poisson'"),
        ([("client.update", "fedavg")], "needs client.update = 'fedsgd'"),
        ([("task.spread", 7)], "expected"),
        ([("task.users", 3)], "set task.silos and not task.users"),
        ([("task.partition", "iid")], "task.silos needs task.partition = 'silos'"),
    ],
)
def test_bad_input_is_one_sentence(overrides, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(*overrides)


def test_records_at_several_users_are_refused():
    doubled = dataclasses.replace(TASK, load=TASK.load)
    shards = {"name": "tiny", "partition": "shards", "users": 400}
    with pytest.raises(ValueError, match="expected"):
        plan(("task", shards), task=doubled)


def test_a_subject_that_a_cap_leaves_at_one_user_is_not_alone():
    """Without that user its records at the other one would come in: removing a user may replace records."""
    ready = plan(("protocol.users_per_subject", 1))
    people = TASK_WITH_SUBJECTS.load(folder=None).subjects
    assert subject_maxima(ready.sampler.clients, people).most_users == 1
    assert not ready.guarantee.spread.alone
    assert experiment.run(ready).units[Unit.USER].is_unbounded


def test_every_row_says_all_that_its_number_rests_on():
    ready = plan(
        ("protocol", {"name": "dp_fl", "clip_norm": 1.0, "noise_multiplier": 3.0}),
        ("privacy", {"delta": 1e-5, "neighbors": "add-remove"}),
        ("cohort", {"kind": "poisson", "size": 3, "rounds": 2}),
    )
    rows = ready.record([0, 1]).statements_by_unit()
    for unit in Unit:
        said = " ".join(rows[unit].assumptions)
        assert "each user joins a round independently with probability 0.5" in said
        assert "hyper-parameters were chosen without the private data" in said
    assert "no record is held by more than 1 user" in " ".join(rows[Unit.ITEM].assumptions)
    capped = plan().record([0]).statements_by_unit()
    assert "replaced by another record of the same subject" in " ".join(capped[Unit.ITEM].assumptions)
    unknown = plan(("task", {"name": "tiny", "partition": "iid", "users": 30}), task=TASK)
    assert "each user is one subject" in " ".join(unknown.record([0]).certified_statement().assumptions)


def test_what_is_read_off_the_data_is_not_in_the_privacy_file(tmp_path):
    result = experiment.run(plan(), out=tmp_path / "run")
    assert "group_in_batch" not in (tmp_path / "run" / "privacy.json").read_text()
    assert "no statement covers" in " ".join(result.quote.claimed.assumptions)


def test_the_span_of_a_subject_in_silos_is_the_public_number_and_not_the_datas():
    """Five records each over six silos lie at five at most; noise for a subject is set for the six that were dealt."""
    user_level = ("protocol", {"name": "dp_fl", "clip_norm": 1.0})
    ready = plan(("task.spread", 6), user_level, ("privacy.unit", "subject"), ("cohort.rounds", 1))
    assert ready.guarantee.spread.users_per_subject == 6
