"""Trainings whose rounds take back noise of earlier ones: what they state, void rounds, resuming, refusals."""

import numpy as np
import pytest
from resuming import without_resuming
from tiny import TASK
from watchers import AfterRound

from dovetail import experiment
from dovetail.audit.training import audit as audit_training
from dovetail.events import CorrelatedGaussian
from dovetail.experiment import config
from dovetail.experiment.outlook import Outlook
from dovetail.mechanisms.correlated import share_kept
from dovetail.randomness import Randomness

BASE = {
    "noise": "seeded",
    "task": {"name": "tiny"},
    "cohort": {"kind": "separated", "size": 50, "rounds": 12},
    "server": {"learning_rate": 1.0},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0, "noise_rows": 4},
    "privacy": {"eps": 3.0, "delta": 1e-5},
}
VOID = (("cohort.dropout", 0.3), ("cohort.min_size", 35))  # of these twelve rounds some are void


class Interruption(Exception):  # noqa: N818
    pass


def plan(*overrides):
    return experiment.prepare(config.parse(BASE, overrides), task=TASK)


def test_noise_is_correlated_where_users_come_rarely_and_the_statement_says_so():
    ready = plan()
    protocol = ready.sampler.protocol
    assert protocol.is_correlated
    assert len(protocol.coefficients) <= 4
    result = experiment.run(ready)
    assert 3.0 * 0.999 < result.statement.eps <= 3.0
    assert result.statement.span == "12 rounds with at most 2 uploads per user"
    said = " ".join(result.statement.assumptions)
    assert "each user takes part at most 2 times, 6 rounds or more apart" in said
    assert "takes back part of that of the 3 rounds before it" in said
    (event,) = {round.mechanism for round in ready.guarantee.rounds()}
    assert event == CorrelatedGaussian(
        std=protocol.std, sensitivity=2.0, coefficients=protocol.coefficients, neighbors=ready.guarantee.relation
    )


def test_the_noise_that_models_keep_is_less_than_with_independent_rounds():
    ready, independent = plan(), plan(("protocol.correlation", "none"))
    assert not independent.sampler.protocol.is_correlated
    assert Outlook.of(ready).residual < 0.8 * Outlook.of(independent).residual
    assert "of which later rounds take back all but" in Outlook.of(ready).describe()


@pytest.mark.parametrize("kind", ["sqrt", "banded-inverse", "optimised"])
def test_every_kind_of_correlation_trains(kind):
    ready = plan(("protocol.correlation", kind))
    rows = len(ready.sampler.protocol.coefficients)
    assert rows == 12 if kind == "sqrt" else rows <= 4
    assert experiment.run(ready).accuracy > 0.5


def test_the_model_has_the_noise_of_the_rows():
    """Updates too short to matter: the model is the noise of all rounds, which share one row after the other."""
    quiet = (("protocol.clip_norm", 1e-6), ("protocol.noise_multiplier", 1e6), ("privacy.eps", None))
    ready = plan(("server.learning_rate", 50.0), *quiet)
    moves = []
    for seed in range(150):
        seeded = ready.with_randomness(Randomness.from_seed(seed))
        training = seeded.engine.start()
        for index in range(12):
            training = seeded.step(training, index, seeded.sampler.schedule.draw_users(index))
        moves.append(np.asarray(training.params) - ready.engine.first)
    protocol = ready.sampler.protocol
    wanted = share_kept(protocol.coefficients, 12) * np.sqrt(12) * protocol.std
    numbers = np.concatenate(moves)
    assert numbers.std() == pytest.approx(wanted, rel=4 / np.sqrt(2 * len(numbers)))


def test_a_round_that_is_void_draws_its_row_too():
    ready = plan(*VOID)
    training = ready.engine.start()
    drawn = []
    for index in range(12):
        users = ready.sampler.schedule.draw_users(index)
        void = len(users) < 35
        training = ready.skip(training, index) if void else ready.step(training, index, users)
        drawn.append(void)
        assert int(training.protocol.rows.drawn) == index + 1
    assert True in drawn
    assert False in drawn


@pytest.mark.parametrize("stop_at", [5, 11])
def test_an_interrupted_run_goes_on_with_the_rows_that_it_had(tmp_path, stop_at):
    ready = plan(*VOID)
    whole = experiment.run(ready, out=tmp_path / "whole", evaluate_every=3)

    def interrupt(progress):
        if progress.round == stop_at:
            raise Interruption

    with pytest.raises(Interruption):
        experiment.run(
            ready, out=tmp_path / "cut", checkpoint_every=2, evaluate_every=3, callbacks=[AfterRound(interrupt)]
        )
    assert (tmp_path / "cut" / "checkpoint.npz").stat().st_mode & 0o777 == 0o600
    resumed = experiment.run(ready, out=tmp_path / "cut", resume=True, checkpoint_every=2, evaluate_every=3)
    np.testing.assert_array_equal(resumed.parameters["params"], whole.parameters["params"])
    assert without_resuming(resumed.statement) == whole.statement
    assert not (tmp_path / "cut" / "checkpoint.npz").exists(), "rows of noise do not outlive the run"


def test_who_comes_too_often_or_too_soon_is_refused_by_the_engine():
    ready = plan()
    training = ready.step(ready.engine.start(), 0, ready.sampler.schedule.draw_users(0))
    with pytest.raises(ValueError, match="was promised 6 rounds or more between two uploads"):
        ready.step(training, 1, ready.sampler.schedule.draw_users(0))
    with pytest.raises(ValueError, match=r"round 1 \(counted from 0\) is next in this stream, got round 6"):
        ready.step(training, 6, ready.sampler.schedule.draw_users(6))  # noise is taken back round by round
    training = ready.skip(training, 1)
    ready.step(training, 2, ready.sampler.schedule.draw_users(2))


def test_a_run_that_is_resumed_knows_who_came_before():
    ready = plan()
    training = ready.engine.start()
    ready.note_past_rounds(3)
    with pytest.raises(ValueError, match="was promised 6 rounds or more"):
        ready.step(training, 3, ready.sampler.schedule.draw_users(1))
    with pytest.raises(ValueError, match=r"round 3 .* is next"):
        ready.step(training, 0, ready.sampler.schedule.draw_users(0))


@pytest.mark.parametrize(
    ("why", "overrides"),
    [
        ("with cohort.kind = 'separated' only", [("cohort.kind", "disjoint")]),
        ("with a fixed clip norm only", [("protocol.clip", "adaptive")]),
        ("where it is as large in every round", [("protocol.schedule", "linear"), ("protocol.schedule_end", 0.5)]),
    ],
)
def test_what_needs_independent_noise_is_refused(why, overrides):
    asked = ("protocol.correlation", "optimised")
    with pytest.raises(ValueError, match=why):
        plan(asked, *overrides)
    if "kind" not in overrides[0][0]:
        assert not plan(*overrides).sampler.protocol.is_correlated, "by itself it is not chosen there"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("protocol.correlation", "square", "correlation"),
        ("protocol.noise_rows", 0, "noise_rows"),
        ("protocol.coefficients", [1.0, 0.5], "coefficient"),
        ("protocol.coefficients", [1e-38], "noise_multiplier is for the size of the noise"),
        ("protocol.coefficients", [1e39, -1.0], "noise_multiplier is for the size of the noise"),
        ("protocol.coefficients", [], "noise_multiplier is for the size of the noise"),
        ("protocol.server_momentum", 1.5, "server_momentum"),
        ("cohort.uploads", 1, "uploads=1 is the limit"),
    ],
)
def test_settings_that_make_no_sense_are_refused(key, value, why):
    with pytest.raises(ValueError, match=why):
        plan((key, value))


def test_the_accountant_knows_the_coefficients_that_are_drawn():
    ready = plan(("protocol.coefficients", [1.0, -0.1, -1e-40]))
    drawn = np.asarray(ready.sampler.protocol.coefficients, np.float32)
    assert ready.sampler.protocol.coefficients == tuple(drawn.tolist())
    assert drawn[2] == 0
    for kind in ("optimised", "sqrt"):
        settled = plan(("protocol.correlation", kind)).sampler.protocol.coefficients
        assert settled == tuple(np.asarray(settled, np.float32).tolist())


def test_an_audit_of_a_training_goes_through_void_rounds():
    """It runs the rounds as a training does, rows of void ones included, or the engine would refuse the next round."""
    found = audit_training(
        config.parse(BASE, [*VOID, ("privacy.eps", None), ("protocol.noise_multiplier", 2.0)]),
        canaries=20,
        task=TASK,
        ledger=False,
    )
    assert found.is_consistent


def test_a_fleet_says_that_it_does_not_know_users_in_turn(tmp_path):
    fleet = pytest.importorskip("dovetail.parties.fleet")
    with pytest.raises(ValueError, match="'separated' cannot be deployed yet"):
        fleet.set_up_fleet(tmp_path / "fleet", config.parse(BASE), rounds=1, clients=3)
    assert not (tmp_path / "fleet").exists()
