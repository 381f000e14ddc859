"""Streams with correlated noise: sensitivities by brute force over all schedules, and the released rows' exact law."""

import itertools
import math

import numpy as np
import pytest

from dovetail.accounting import bound, certify, gaussian
from dovetail.accounting.exposure import exposures_of
from dovetail.accounting.releases import release_of
from dovetail.accounting.streams import amplification_of_uploads, impulse_response
from dovetail.audit.exact import exact_attacks_on_rounds
from dovetail.events import (
    CorrelatedGaussian,
    Disjoint,
    Everyone,
    FixedSize,
    Gaussian,
    Poisson,
    Round,
    Separated,
    from_plain,
    to_plain,
)
from dovetail.guarantee.trials import concatenate_rounds
from dovetail.mechanisms.correlated import Workload, error_of_model, optimize, square_root
from dovetail.statements import Neighbors, NotApplicable, Scope, Trust, Unit

ADD, REPLACE = Neighbors.ADD_REMOVE, Neighbors.REPLACE_ONE
DELTA = 1e-5


def patterns(rounds, uploads, separation):
    """All sets of rounds that the schedule lets one user be in."""
    for count in range(1, uploads + 1):
        for chosen in itertools.combinations(range(rounds), count):
            if all(later - earlier >= separation for earlier, later in itertools.pairwise(chosen)):
                yield chosen


def matrix_of_noise(coefficients, rounds):
    """C^-1 as a dense matrix."""
    padded = np.zeros(rounds)
    padded[: len(coefficients)] = coefficients[:rounds]
    return np.array([[padded[t - s] if t >= s else 0.0 for s in range(rounds)] for t in range(rounds)])


def random_coefficients(rng, most):
    """A positive number and up to `most` that are at most 0, some of them so large that the column of C rises."""
    count = rng.integers(0, most + 1)
    return (float(rng.uniform(0.3, 2)), *(-rng.uniform(0, 1.2, count) * (rng.random(count) < 0.8)).tolist())


def stream(event, schedule, times=None):
    return [Round(mechanism=event, participation=schedule)] * (times or schedule.rounds)


def noise(coefficients=(1.0, -0.5, -0.125), std=3.0, sensitivity=2.0, neighbors=REPLACE):
    return CorrelatedGaussian(std=std, sensitivity=sensitivity, coefficients=coefficients, neighbors=neighbors)


def test_no_pattern_and_no_vectors_move_a_stream_further_than_is_certified():
    """Of 400 random streams: the worst over all patterns, by the released rows' exact mean and covariance.

    The distance between two Gaussians of one covariance is that of their means, whitened: all that privacy depends on.
    """
    rng = np.random.default_rng(7)
    exact = 0
    for _ in range(400):
        rounds = int(rng.integers(1, 8))
        uploads, separation = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        coefficients = random_coefficients(rng, 5)
        inverse = matrix_of_noise(coefficients, rounds)
        precision = np.linalg.inv(inverse @ inverse.T)
        worst = 0.0
        for chosen in patterns(rounds, uploads, separation):
            for signs in itertools.product((1.0, -1.0), repeat=len(chosen)):
                moved = np.zeros(rounds)
                moved[list(chosen)] = signs
                worst = max(worst, math.sqrt(moved @ precision @ moved))
        certified = amplification_of_uploads(coefficients, rounds, uploads, separation)
        assert certified >= worst * (1 - 1e-9)
        column = impulse_response(coefficients, rounds)
        if uploads == 1 or rounds <= separation or (np.diff(column) <= 0).all():
            exact += 1
            assert certified == pytest.approx(worst, rel=1e-9, abs=0)
    assert exact > 200


def test_a_replaced_user_may_come_in_other_rounds():
    """Two users with schedules of their own, vectors in a plane: never further apart than twice one user's move."""
    rng = np.random.default_rng(8)
    for _ in range(60):
        rounds, uploads, separation = int(rng.integers(2, 6)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
        coefficients = random_coefficients(rng, 4)
        whitening = np.linalg.inv(matrix_of_noise(coefficients, rounds))
        allowed = list(patterns(rounds, uploads, separation))
        twice = 2 * amplification_of_uploads(coefficients, rounds, uploads, separation)
        for first, second in itertools.product(allowed, repeat=2):
            moved = np.zeros((rounds, 2))
            for chosen, sign in ((first, 1), (second, -1)):
                angles = rng.uniform(0, 0.5, len(chosen))
                moved[list(chosen)] += sign * np.stack([np.cos(angles), np.sin(angles)], 1)
            assert np.linalg.norm(whitening @ moved) <= twice * (1 + 1e-9)


def test_the_first_column_is_that_of_the_inverse_rounded_up():
    for coefficients in [(1.0,), (2.0, -1.0), square_root(7), (1.0, -0.1, 0.0, -0.8)]:
        column = np.linalg.inv(matrix_of_noise(coefficients, 40))[:, 0]
        upper = impulse_response(coefficients, 40)
        assert (upper >= column * (1 - 1e-13)).all()
        np.testing.assert_allclose(upper, column, rtol=1e-11, atol=1e-300)


def test_a_stream_is_one_gaussian_release():
    """By hand: d = (1, -1/2) has c = 2^-t; two uploads three rounds apart, over five rounds."""
    schedule = Separated(uploads=2, separation=3, rounds=5)
    (exposure,) = exposures_of(stream(noise((1.0, -0.5)), schedule))
    column = 0.5 ** np.arange(5)
    both = column + np.concatenate([np.zeros(3), column[:2]])
    assert exposure.times == 1
    assert exposure.sampling == Everyone()
    assert exposure.release.mu == pytest.approx(2.0 / 3.0 * np.linalg.norm(both), rel=1e-12, abs=0)
    statement = certify(
        stream(noise((1.0, -0.5)), schedule),
        Scope(trust=Trust.CURATOR, adversary="observer", neighbors=REPLACE, unit=Unit.USER),
        delta=DELTA,
    )
    assert statement.eps == pytest.approx(gaussian.eps_of(exposure.release.mu, delta=DELTA), rel=1e-12, abs=0)
    assert "dovetail.correlated-noise" in statement.proof.key
    assert statement.span == "5 rounds with at most 2 uploads per user"


@pytest.mark.parametrize("neighbors", [ADD, REPLACE])
def test_independent_noise_costs_one_release_for_each_upload(neighbors):
    schedule = Separated(uploads=4, separation=5, rounds=12)  # room for three
    plain = Gaussian(std=3.0, sensitivity=2.0, neighbors=neighbors)
    three = bound([Round(mechanism=plain, participation=Everyone())] * 3, delta=DELTA).eps
    assert bound(stream(plain, schedule), delta=DELTA).eps == three
    alike = bound(stream(noise((1.0,), neighbors=neighbors), schedule), delta=DELTA).eps
    assert alike == pytest.approx(three, rel=1e-9, abs=0)


def test_all_rounds_that_were_planned_are_charged():
    schedule = Separated(uploads=1, separation=9, rounds=9)
    whole = bound(stream(noise(), schedule), delta=DELTA).eps
    assert bound(stream(noise(), schedule, times=2), delta=DELTA).eps == whole


@pytest.mark.parametrize(
    ("why", "rounds"),
    [
        ("its schedule holds for fewer", stream(noise(), Separated(uploads=1, separation=3, rounds=3), times=4)),
        (
            "different schedules",
            stream(noise(), Separated(uploads=1, separation=3, rounds=3), times=1)
            + stream(noise(), Separated(uploads=1, separation=2, rounds=3), times=1),
        ),
        (
            "rounds of a stream differ",
            stream(noise(), Separated(uploads=1, separation=3, rounds=3), times=1)
            + stream(noise(std=4.0), Separated(uploads=1, separation=3, rounds=3), times=1),
        ),
        ("over its whole stream", [Round(mechanism=noise(), participation=Disjoint(epoch=0))]),
        ("one round of correlated noise by itself", [Round(mechanism=noise(), participation=Everyone())]),
        ("one round of correlated noise by itself", [Round(mechanism=noise(), participation=Poisson(prob=0.5))]),
        (
            "one round of correlated noise by itself",
            [Round(mechanism=noise(), participation=FixedSize(size=3, population=9))],
        ),
    ],
)
def test_what_no_theorem_covers_is_refused(why, rounds):
    with pytest.raises(NotApplicable, match=why):
        bound(rounds, delta=DELTA)


def test_a_subject_gains_nothing_from_users_who_come_rarely():
    scope = Scope(trust=Trust.CURATOR, adversary="observer", neighbors=REPLACE, unit=Unit.SUBJECT)
    with pytest.raises(NotApplicable, match="subject's data may sit in several batches"):
        certify(stream(noise(), Separated(uploads=1, separation=3, rounds=3)), scope, delta=DELTA)


@pytest.mark.parametrize("coefficients", [(), (0.0, -0.5), (-1.0,), (1.0, 0.5), (1.0, math.nan), (math.inf,)])
def test_coefficients_that_the_proof_does_not_cover_are_refused(coefficients):
    with pytest.raises(ValueError, match="coefficient"):
        noise(coefficients)


def test_noise_without_a_standard_deviation_promises_nothing():
    schedule = Separated(uploads=1, separation=3, rounds=3)
    assert bound(stream(noise(std=0.0), schedule), delta=DELTA).eps == math.inf


def test_several_users_together_and_several_streams():
    schedule = Separated(uploads=2, separation=3, rounds=5)
    one = release_of(exposures_of(stream(noise(), schedule))[0].mechanism).mu
    (item, *_) = stream(noise(), schedule)
    together = release_of(item.mechanism).of_users(schedule, 3)
    assert exposures_of([together] * 5)[0].release.mu == pytest.approx(3 * one, rel=1e-12, abs=0)
    assert release_of(item.mechanism).of_users(Everyone(), 3) is None
    twice = exposures_of(concatenate_rounds([stream(noise(), schedule), stream(noise(), schedule)]))
    assert sum(exposure.times for exposure in twice) == 2


def test_events_are_plain_data_and_back():
    (item, *_) = stream(noise(), Separated(uploads=2, separation=3, rounds=5))
    assert from_plain(to_plain(item.mechanism)) == item.mechanism
    assert from_plain(to_plain(item.participation)) == item.participation


@pytest.mark.parametrize("uploads", [1, 3])
def test_the_exact_attack_meets_the_certificate(uploads):
    """It whitens what was released; for a column of C that never rises nothing is lost."""
    schedule = Separated(uploads=uploads, separation=20, rounds=60)
    rounds = stream(noise(optimize(Workload(rounds=60, uploads=uploads, separation=20), 16)), schedule)
    certified = bound(rounds, delta=DELTA).eps
    attacked = max(attack.eps(delta=DELTA).eps for attack in exact_attacks_on_rounds(rounds))
    assert 0.99 * certified < attacked <= certified


# RMS noise of independent rounds over that of correlated ones, as the study of prototypes has them (two digits)
@pytest.mark.parametrize(
    ("gain", "workload"),
    [
        (2.5, Workload(rounds=60, uploads=1, separation=60)),
        (4.7, Workload(rounds=600, uploads=10, separation=60)),
        (1.0, Workload(rounds=30, uploads=30, separation=1)),
        pytest.param(8.4, Workload(rounds=2000, uploads=6, separation=342), marks=pytest.mark.soak),
    ],
)
def test_what_is_gained_where_users_come_rarely(gain, workload):
    coefficients = optimize(workload, 32)
    assert len(coefficients) <= 32
    ratio = error_of_model((1.0,), workload) / error_of_model(coefficients, workload)
    assert ratio == pytest.approx(gain, rel=0.03)
    for known in ((1.0,), square_root(min(32, workload.rounds))):
        assert error_of_model(coefficients, workload) <= error_of_model(known, workload)


def test_momentum_is_part_of_what_noise_is_chosen_for():
    plain, heavy = (Workload(rounds=60, uploads=1, separation=60, momentum=value) for value in (0.0, 0.9))
    assert error_of_model(optimize(heavy, 16), heavy) < 0.9 * error_of_model(optimize(plain, 16), heavy)
