"""Rounds on samples are never certified worse than with everyone, and then without asking for secrecy."""

import dataclasses
import itertools

import numpy as np
import pytest

from dovetail.accounting import bound, certify, compose, fits
from dovetail.accounting.exposure import exposures_of, without_sampling
from dovetail.events import (
    Everyone,
    FixedSize,
    Gaussian,
    Laplace,
    PaddedBernoulli,
    Personalized,
    Poisson,
    Report,
    Round,
    SampledSubject,
    Shuffled,
    SplitAndMix,
)
from dovetail.statements import Neighbors, NotApplicable, Scope, Trust, Unit

DELTA = 1e-5
REPLACE, ADD = Neighbors.REPLACE_ONE, Neighbors.ADD_REMOVE
NOISE = Gaussian(std=5.0, sensitivity=2.0, neighbors=REPLACE)
PURE = Laplace(scale=10.0, sensitivity=1.0, count=1, neighbors=REPLACE)
CROWD = Shuffled(report=Report(kind="rr", eps_local=1.0), num_users=100)
SHARES = SplitAndMix(
    num_users=500, coordinates=200, clip_norm=1.0, scale=300.0, noise_variance=4e7, modulus=2**19, shares=13
)
NEARLY = FixedSize(size=999_999_999, population=10**9)


def scope(neighbors=REPLACE):
    return Scope(trust=Trust.CURATOR, adversary="observer", neighbors=neighbors, unit=Unit.USER)


def rounds(mechanism, participation, times=20):
    return [Round(mechanism=mechanism, participation=participation)] * times


def test_all_but_one_of_the_users_cost_no_more_than_everyone():
    everyone = bound(rounds(NOISE, Everyone()), delta=DELTA).eps
    assert 8.7 < everyone < 8.73
    drawn = bound(rounds(NOISE, FixedSize(size=1436, population=1437)), delta=DELTA)
    assert 8.7 < drawn.eps < everyone
    assert not drawn.sample_known


def test_where_sampling_gains_nothing_the_statement_does_not_ask_for_secrecy():
    statement = certify(rounds(NOISE, NEARLY), scope(), delta=DELTA)
    plain = certify(rounds(NOISE, Everyone()), scope(), delta=DELTA)
    assert statement.eps == plain.eps
    assert statement.proof == plain.proof
    assert statement.assumptions == plain.assumptions
    assert "sample" not in " ".join(statement.assumptions)
    (premise,) = statement.premises
    assert premise.eps == plain.premises[0].eps
    drawn = certify(rounds(NOISE, FixedSize(size=100, population=1437)), scope(), delta=DELTA)
    assert any("uniform sample, secret" in said for said in drawn.assumptions)
    assert "fixed-size" in drawn.proof.key


def test_the_same_for_delta_at_an_eps_and_for_fits():
    plain = bound(rounds(NOISE, Everyone()), eps=8.0)
    nearly = bound(rounds(NOISE, NEARLY), eps=8.0)
    assert nearly.delta == plain.delta
    assert nearly.sample_known
    eps = bound(rounds(SHARES, Everyone(), 3), delta=DELTA).eps
    drawn = rounds(SHARES, FixedSize(size=500, population=900), 3)
    assert fits(drawn, eps=eps * 1.0001, delta=DELTA)
    assert not fits(drawn, eps=eps * 0.99, delta=DELTA)


@pytest.mark.parametrize(
    ("mechanism", "sampling"),
    [
        (PURE, FixedSize(size=3, population=9)),
        (PURE, Poisson(prob=0.5)),
        (dataclasses.replace(PURE, neighbors=ADD), Poisson(prob=0.5)),
        (SHARES, FixedSize(size=500, population=700)),
        (SHARES, FixedSize(size=600, population=700)),
        (dataclasses.replace(CROWD, colluders=20), FixedSize(size=100, population=110)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_bound_without_sampling_is_found(mechanism, sampling):
    found = bound(rounds(mechanism, sampling, 5), delta=DELTA)
    assert found.eps == bound(rounds(mechanism, Everyone(), 5), delta=DELTA).eps
    assert found.sample_known == (mechanism.neighbors is not ADD), "whoever sees names sees who was added"
    assert "lemma4" not in found.proof.key


@pytest.mark.parametrize(
    ("mechanism", "sampling"),
    [
        (dataclasses.replace(NOISE, neighbors=ADD), FixedSize(size=10, population=100)),
        (dataclasses.replace(PURE, neighbors=ADD), FixedSize(size=10, population=100)),
        (CROWD, FixedSize(size=50, population=200)),
        (CROWD, Poisson(prob=0.5)),
        (SHARES, FixedSize(size=499, population=600)),
        (PaddedBernoulli(report=CROWD.report, num_users=100, pad_to=100, inclusion=0.5), Poisson(prob=0.5)),
        (Personalized(kind="rr", eps_locals=(1.0,) * 50), FixedSize(size=10, population=50)),
        (
            SampledSubject(std=1.0, clip_norm=1.0, items=2, prob_item=0.1, users_spanned=1),
            FixedSize(size=1, population=9),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_where_the_release_is_not_the_one_on_the_sample_nothing_is_certified(mechanism, sampling):
    assert without_sampling(exposures_of(rounds(mechanism, sampling, 2))) is None
    with pytest.raises(NotApplicable):
        bound(rounds(mechanism, sampling, 2), delta=DELTA)


def test_samples_of_several_sizes_become_one_release_and_nobody_sampled_is_left_as_it_is():
    several = exposures_of(
        [
            *rounds(NOISE, FixedSize(size=3, population=9), 2),
            *rounds(NOISE, FixedSize(size=4, population=9), 3),
            *rounds(NOISE, Everyone(), 4),
        ]
    )
    assert len(several) == 3
    (one,) = without_sampling(several)
    assert (one.times, one.sampling) == (9, Everyone())
    assert without_sampling(exposures_of(rounds(NOISE, Everyone()))) is None
    assert compose.best_bound((), delta=DELTA).eps == 0


def test_a_known_sample_is_never_worse_than_everyone_by_enumeration():
    """A table for every multiset of two bits; the sample is told, and the worst over it is that of the table."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        size, n = 2, 4
        laws = rng.dirichlet(np.ones(3), size=size + 1)
        samples = list(itertools.combinations(range(n), size))
        alphas = np.exp(rng.uniform(-1, 1, 5))
        neighbors = [(laws[a], laws[b]) for a, b in [(0, 1), (1, 0), (1, 2), (2, 1)]]
        most = [max(np.maximum(p - alpha * q, 0).sum() for p, q in neighbors) for alpha in alphas]
        for rest in itertools.product((0, 1), repeat=n - 1):
            told = [
                np.concatenate([laws[sum((x, *rest)[i] for i in sample)] for sample in samples]) / len(samples)
                for x in (0, 1)
            ]
            for alpha, worst in zip(alphas, most, strict=True):
                for p, q in itertools.permutations(told):
                    assert np.maximum(p - alpha * q, 0).sum() <= max(worst, 1 - alpha) + 1e-12
