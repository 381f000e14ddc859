"""The best of a random number of trials: the bound against exact laws, and what is refused."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from dovetail import accounting
from dovetail.accounting import conversion
from dovetail.accounting.releases import release_of, selection
from dovetail.events import (
    BestTrial,
    Everyone,
    Gaussian,
    NonPrivate,
    Poisson,
    Repeated,
    Round,
    from_plain,
    to_plain,
)
from dovetail.statements import TUNING_ASSUMPTION, Neighbors, NotApplicable, Scope, Trust, Unit

ADD = Neighbors.ADD_REMOVE
SCOPE = Scope(trust=Trust.CURATOR, adversary="observer", neighbors=ADD, unit=Unit.USER)
ORDERS = np.array([1.05, 1.1, 1.2, 1.5, 2, 3, 5, 8, 16, 32, 64, 128, 512])
ETAS, MEANS = (-0.5, 0.0, 0.5, 1.0, 2.0), (1.5, 3.0, 10.0, 100.0)
GAMMAS = {(eta, mean): selection.gamma_for(mean, eta=eta) for eta in ETAS for mean in MEANS}


def law(eta, gamma, *, most):
    """P[K = k] for k = 1, ..., most, by the definition of the law."""
    k = np.arange(1, most + 1)
    factors = np.concatenate([[1.0], (k[:-1] + eta) / (k[:-1] + 1)])
    probs = (1 - gamma) ** k * np.cumprod(factors)
    scale = 1 / math.log(1 / gamma) if eta == 0 else eta / (gamma**-eta - 1)
    return probs * scale


def best(tails, eta, gamma):
    """The law of the best output, from P[output is at least as good as y], best y first: exact in small tails."""
    inner = np.log1p((1 - gamma) * np.asarray(tails) / gamma)
    if eta == 0:
        above = inner / math.log(1 / gamma)
    else:
        above = -np.expm1(-eta * inner) * gamma**-eta / (gamma**-eta - 1)
    return np.diff(np.concatenate([[0.0], above]))


def renyi(p, q):
    """At every order."""
    return np.logaddexp.reduce(np.outer(ORDERS, np.log(p)) + np.outer(1 - ORDERS, np.log(q)), axis=1) / (ORDERS - 1)


def both_ways(p, q):
    return np.maximum(np.maximum(renyi(p, q), renyi(q, p)), 0.0)


def random_pair(rng):
    outputs = rng.integers(2, 5)
    p = np.exp(rng.normal(size=outputs) * rng.choice([0.1, 1.0, 4.0]))
    q = p * np.exp(rng.normal(size=outputs) * rng.choice([0.01, 0.1, 1.0]))
    return p / p.sum(), q / q.sum()


@pytest.mark.parametrize("eta", ETAS)
def test_the_law_of_the_best_is_what_enumeration_gives(eta):
    gamma, p = 0.3, np.array([0.2, 0.5, 0.3])  # the best output first
    expected = np.zeros(3)
    probs = law(eta, gamma, most=7)
    for k, prob in enumerate(probs, start=1):
        for outputs in itertools.product(range(3), repeat=k):
            expected[min(outputs)] += prob * math.prod(p[list(outputs)])
    found = best(np.cumsum(p), eta, gamma)
    missing = 1 - probs.sum()
    assert (expected <= found + 1e-12).all() and (found <= expected + missing + 1e-12).all()


@pytest.mark.parametrize("eta", ETAS)
@pytest.mark.parametrize("mean", [1.5, 4.0, 30.0])
def test_the_number_of_trials_has_its_law_and_its_mean(eta, mean):
    gamma = selection.gamma_for(mean, eta=eta)
    probs = law(eta, gamma, most=200_000)
    assert probs.sum() == pytest.approx(1, abs=1e-9)
    assert probs @ np.arange(1, len(probs) + 1) == pytest.approx(mean, rel=1e-6)
    assert mean * (1 - 1e-9) <= selection.expected_trials(eta=eta, gamma=gamma) <= mean
    quantiles = np.cumsum(probs)
    for uniform in (0.0, 0.2, 0.7, 0.99, 0.9999):
        drawn = selection.trials_at_quantile(uniform, eta=eta, gamma=gamma)
        assert drawn == np.searchsorted(quantiles, uniform, side="right") + 1


def test_the_mean_is_smooth_where_the_logarithmic_law_is():
    around = [selection.expected_trials(eta=eta, gamma=0.1) for eta in (-1e-5, -1e-9, 0.0, 1e-9, 1e-5)]
    assert np.ptp(around) < 1e-3 and around[2] == pytest.approx(9 / math.log(10), rel=1e-11)


def test_no_selection_among_small_mechanisms_exceeds_the_bound():
    rng = np.random.default_rng(0)
    without_choice = math.inf
    for _ in range(1000):
        eta, mean = rng.choice(ETAS), rng.choice(MEANS)
        gamma = GAMMAS[eta, mean]
        p, q = random_pair(rng)
        single = both_ways(p, q)
        bound = selection.renyi_of_best(ORDERS, single, eta=eta, gamma=gamma)
        exact = renyi(best(np.cumsum(p), eta, gamma), best(np.cumsum(q), eta, gamma))
        assert (bound >= exact).all() and (bound >= single).all()
        without_choice = min(without_choice, float(np.min(single + math.log(mean) / (ORDERS - 1) - exact)))
    assert without_choice < -0.5  # the bound without what the choice adds would be refuted


def test_the_expected_number_of_trials_is_needed():
    eta, gamma = -0.5, 1e-5
    high, low = 1e-7, 1e-27  # the best output is rare, and much rarer for the neighbour
    p, q = np.array([high, 1 - high]), np.array([low, 1 - low])
    bound = selection.renyi_of_best(ORDERS, both_ways(p, q), eta=eta, gamma=gamma)
    tails = np.array([[high, 1.0], [low, 1.0]])
    exact = renyi(best(tails[0], eta, gamma), best(tails[1], eta, gamma))
    term = math.log(selection.expected_trials(eta=eta, gamma=gamma)) / (ORDERS - 1)
    assert (bound >= exact).all()
    assert (bound - term < exact - 1).any()


def test_trials_of_randomized_response():
    """Pure eps: the best of a geometric number of trials costs more than one of them and at most three."""
    eps, gamma = 0.5, 0.01
    truth = math.exp(eps) / (1 + math.exp(eps))
    p, q = np.array([truth, 1 - truth]), np.array([1 - truth, truth])
    chosen, other = best(np.cumsum(p), 1.0, gamma), best(np.cumsum(q), 1.0, gamma)
    worst = float(np.abs(np.log(chosen / other)).max())
    assert eps < worst <= 3 * eps
    high = np.array([1e6])
    bound = selection.renyi_of_best(high, np.array([eps]), eta=1.0, gamma=gamma)
    assert worst <= bound[0] <= 3 * eps + 1e-4


def selected(*mechanisms, eta=1.0, gamma=0.2, times=60):
    settings = tuple((Repeated(mechanism=one, sampling=Everyone(), times=times),) for one in mechanisms)
    return BestTrial(settings=settings, eta=eta, gamma=gamma)


def noise(mu):
    return Gaussian(std=1 / mu, sensitivity=1.0, neighbors=ADD)


def certified(event, delta=1e-5):
    return accounting.certify([Round(mechanism=event, participation=Everyone())], SCOPE, delta=delta)


def test_the_accountant_certifies_the_best_of_noisy_trials():
    event = selected(noise(0.02), noise(0.03))
    statement = certified(event)
    orders = np.array(sorted({1 + x / 10 for x in range(1, 2000)}))
    single = 60 * 0.03**2 / 2 * orders
    by_hand = conversion.eps_of(orders, selection.renyi_of_best(orders, single, eta=1.0, gamma=0.2), delta=1e-5)
    assert statement.eps == pytest.approx(by_hand, rel=1e-2)
    assert "PS22.thm2" in statement.proof.key and "5 on average" in statement.span
    one = accounting.bound([Round(mechanism=noise(0.03), participation=Everyone())] * 60, delta=1e-5)
    all_trials = accounting.bound([Round(mechanism=noise(0.03), participation=Everyone())] * 60_000, delta=1e-5)
    assert one.eps < statement.eps
    assert certified(selected(noise(0.03), gamma=0.001)).eps < all_trials.eps / 5  # a thousand trials on average


def test_the_worst_setting_counts_and_more_trials_cost_more():
    weak, strong = certified(selected(noise(0.01))), certified(selected(noise(0.03)))
    assert certified(selected(noise(0.01), noise(0.03))).eps == pytest.approx(strong.eps) and weak.eps < strong.eps
    assert certified(selected(noise(0.03), gamma=0.01)).eps > strong.eps


def test_the_best_of_non_private_trials_is_refused_a_statement():
    """However many trials have noise: one that has none decides too."""
    nothing = NonPrivate(reason="no noise is added")
    for event in (selected(nothing), selected(noise(0.01), nothing)):
        statement = certified(event)
        assert statement.is_unbounded and "without a guarantee: no noise is added" in str(statement)
    assert certified(selected(noise(0.01))).eps < math.inf


def test_what_is_assumed_of_samples_and_of_tuning():
    setting = (Repeated(mechanism=noise(1.0), sampling=Poisson(prob=0.01), times=10),)
    statement = certified(BestTrial(settings=(setting,), eta=0.0, gamma=0.1))
    assert any("probability 0.01" in said for said in statement.assumptions)
    assert TUNING_ASSUMPTION in statement.assumptions  # that the choice is covered must be said by whoever chose


def test_a_ledger_holds_the_event():
    sampled = (Repeated(mechanism=noise(0.2), sampling=Poisson(prob=0.5), times=3),)
    event = BestTrial(settings=(*selected(noise(0.1)).settings, sampled), eta=0.0, gamma=0.25)
    assert from_plain(to_plain(event)) == event


def test_what_is_no_selection_is_refused():
    with pytest.raises(ValueError, match="a release in each"):
        BestTrial(settings=((),), eta=1.0, gamma=0.5)
    with pytest.raises(ValueError, match="one neighbouring relation"):
        selected(noise(0.1), Gaussian(std=1.0, sensitivity=1.0, neighbors=Neighbors.REPLACE_ONE))
    with pytest.raises(ValueError, match="eta > -1"):
        selected(noise(0.1), eta=-1.0)
    with pytest.raises(NotApplicable, match="no Renyi bound"):
        release_of(selected(noise(0.1))).renyi(Poisson(prob=0.5), (2.0,))


@pytest.mark.parametrize("eta", [-0.5, 0.0, 1.0, 4.0])
@pytest.mark.parametrize("gamma", [0.9, 0.1, 1e-3])
def test_no_draw_is_beyond_the_numbers_whose_rounding_is_charged(eta, gamma):
    largest = selection.trials_at_quantile(Fraction(2**256 - 1, 2**256), eta=eta, gamma=gamma)
    assert 1 <= largest <= selection.most_trials(eta=eta, gamma=gamma)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        *(({"gamma": gamma}, "expected 0 < gamma < 1") for gamma in (0.0, 1.0, -0.5, 1.5)),
        ({"gamma": math.nan}, "gamma"),
        *(({"eta": eta}, "eta > -1") for eta in (-1.0, -7.0)),
        ({"eta": math.nan}, "eta"),
        ({"eta": math.inf}, "eta"),
    ],
)
def test_what_is_no_law_of_a_number_of_trials_is_refused(changed, sentence):
    """By whatever asks about it: the bound, the mean, the draw, the most that are likely."""
    law = {"eta": 1.0, "gamma": 0.5, **changed}
    for ask in (
        lambda: selection.renyi_of_best(np.array([2.0]), np.array([0.1]), **law),
        lambda: selection.expected_trials(**law),
        lambda: selection.trials_at_quantile(0.5, **law),
        lambda: selection.most_trials(**law),
    ):
        with pytest.raises(ValueError, match=sentence):
            ask()
