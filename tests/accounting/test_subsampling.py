import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.accounting import subsampling
from dovetail.accounting.releases import crowds
from dovetail.events import Disjoint, Everyone, FixedSize, Poisson, Report, Shuffled
from dovetail.statements import Bound, NotApplicable, Theorem

ANY = Theorem(key="any", where="a test")


def bound(eps, delta=0.0):
    return Bound(eps=eps, delta=delta, proof=ANY.proof)


# --- sampling


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-9, 600), st.floats(1e-300, 0.5), st.integers(1, 1000), st.integers(0, 5000))
def test_lemma_4_is_rounded_up_and_never_above_the_round_itself(eps, delta, size, more):
    one = bound(eps, delta)
    after = subsampling.sampled(one, FixedSize(size=size, population=size + more))
    with mpmath.workdps(50):
        q = mpmath.mpf(size) / (size + more)
        exact = mpmath.log1p(q * mpmath.expm1(mpmath.mpf(eps)))
    assert min(exact, eps) <= after.eps <= min(float(exact) * (1 + 1e-11), eps)
    assert min(q * delta, delta) <= after.delta <= min(float(q * delta) * (1 + 1e-11), delta)


def shuffled_law(eps_local, bits):
    law = np.ones(1)
    for bit in bits:
        p = 1 / (1 + math.exp(-eps_local if bit else eps_local))
        law = np.convolve(law, [1 - p, p])
    return law


@pytest.mark.parametrize(("population", "size"), [(4, 2), (5, 2), (5, 4), (6, 3)])
@pytest.mark.parametrize("eps_local", [0.5, 2.0])
def test_a_sampled_shuffled_round_enumerated(population, size, eps_local):
    round_itself = Shuffled(report=Report(kind="rr", eps_local=eps_local), num_users=size)
    certified = {eps: crowds.delta(round_itself, eps=eps) for eps in (0.1, 0.4, 0.9)}
    samples = list(itertools.combinations(range(population), size))
    for ones in range(population):
        others = [1] * ones + [0] * (population - 1 - ones)
        p, q = (
            np.mean([shuffled_law(eps_local, [data[i] for i in sample]) for sample in samples], axis=0)
            for data in ([1, *others], [0, *others])
        )
        for eps, delta in certified.items():
            one = bound(eps, delta)
            after = subsampling.sampled(one, FixedSize(size=size, population=population))
            for a, b in ((p, q), (q, p)):
                assert np.maximum(0, a - math.exp(after.eps) * b).sum() <= after.delta + 1e-14


def test_colluders_know_whether_they_were_drawn():
    one = bound(1.0, 1e-6)
    alone = subsampling.sampled(one, FixedSize(size=10, population=100))
    among = subsampling.sampled(one, FixedSize(size=10, population=100), colluders=50)
    assert among.eps == pytest.approx(math.log1p(0.2 * math.expm1(1)), rel=1e-9) and among.eps > alone.eps
    assert subsampling.sampled(one, FixedSize(size=10, population=100), colluders=95) is one
    with pytest.raises(ValueError, match="colluders < population"):
        subsampling.sampled(one, FixedSize(size=10, population=100), colluders=100)


def test_sampling_outside_its_hypotheses():
    one = bound(1.0, 1e-6)
    assert subsampling.sampled(one, Everyone()) is one
    for participation in (Poisson(prob=0.1), Disjoint(epoch=0)):
        with pytest.raises(NotApplicable, match="fixed-size"):
            subsampling.sampled(one, participation)
    with pytest.raises(ValueError, match="expected colluders >= 0"):
        subsampling.sampled(one, FixedSize(size=1, population=2), colluders=-1)
    assert subsampling.sampled(one, FixedSize(size=1, population=2)).proof.theorems[-1].key == "FLAME.lemma4"


# --- composition


def exact_delta(eps, count, total):
    """delta at `total` of `count` randomized responses, in 50 digits."""
    with mpmath.workdps(50):
        e = mpmath.mpf(eps)
        p = 1 / (1 + mpmath.exp(-e))
        return mpmath.fsum(
            mpmath.binomial(count, k) * p**k * (1 - p) ** (count - k) * (1 - mpmath.exp(total - (2 * k - count) * e))
            for k in range(count + 1)
            if (2 * k - count) * e > total
        )


@settings(max_examples=60, deadline=None)
@given(st.floats(0.001, 3), st.integers(1, 60), st.floats(1e-9, 0.1))
def test_optimal_is_exact_and_basic_is_above_it(eps, count, delta):
    rounds = [bound(eps)] * count
    best = subsampling.optimal(rounds, delta=delta)
    assert exact_delta(eps, count, best.eps) <= delta
    if best.eps > 1e-6:
        assert exact_delta(eps, count, best.eps * (1 - 1e-6)) > delta * (1 - 1e-6)
    assert best.eps <= subsampling.basic(rounds).eps


def test_the_rounds_own_deltas_are_spent():
    rounds = [bound(0.1, 1e-7)] * 20
    assert subsampling.basic(rounds).delta == pytest.approx(2e-6)
    assert subsampling.basic(rounds).eps == pytest.approx(2.0)
    tight, loose = (subsampling.optimal(rounds, delta=delta).eps for delta in (2.5e-6, 1e-5))
    assert exact_delta(0.1, 20, tight) <= 5e-7 < exact_delta(0.1, 20, tight * (1 - 1e-6))
    assert loose < tight
    with pytest.raises(NotApplicable, match="leave nothing"):
        subsampling.optimal(rounds, delta=2e-6)
    with pytest.raises(ValueError, match="expected 0 < delta < 1"):
        subsampling.optimal(rounds, delta=0.0)


def test_rounds_that_differ():
    rounds = [bound(0.1, 1e-8), bound(0.2)]
    with pytest.raises(NotApplicable, match="same eps and delta"):
        subsampling.optimal(rounds, delta=1e-5)
    assert subsampling.basic(rounds).eps >= 0.1 + 0.2
    endless = [bound(math.inf)] * 2
    assert subsampling.basic(endless).eps == subsampling.optimal(endless, delta=0.1).eps == math.inf
    assert subsampling.basic([]).eps == subsampling.optimal([], delta=0.1).eps == 0
