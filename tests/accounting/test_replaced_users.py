"""A subject at several users, replaced together in noisy sums over samples: against all draws, and group privacy."""

import itertools
import math
import sys

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import hypergeom

from dovetail.accounting import bound, groups
from dovetail.accounting.releases import replaced_users
from dovetail.accounting.releases.replaced_users import law_of_binomial_draws, law_of_hypergeometric_draws
from dovetail.events import Disjoint, Everyone, FixedSize, Gaussian, Poisson, ReplacedUsers, Round
from dovetail.statements import Neighbors, NotApplicable

FEW, MANY = 40, 1_000
REPLACE = Neighbors.REPLACE_ONE
DELTA = 1e-5


def rounds(std, participation, times=1):
    noise = Gaussian(std=std, sensitivity=2.0, neighbors=REPLACE)
    return [Round(mechanism=noise, participation=participation)] * times


def together(std, users, participation, times=1):
    return [Round(mechanism=ReplacedUsers(std=std, clip_norm=1.0, users=users), participation=participation)] * times


class RoundSample:
    """A few users on the line, of whom some belong to a subject, and a random sample of them in each round."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.users, others = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        self.std = float(rng.choice([0.4, 1.0, 2.0, 5.0]))
        self.times = int(rng.integers(1, 3))
        ends = rng.random() < 0.7  # aligned contributions are the worst
        self.ours, self.theirs = (self._norms(rng, ends) for _ in range(2))
        self.others = np.full(others, self.theirs[0]) if ends else rng.uniform(-1, 1, others)
        population = self.users + others
        if rng.random() < 0.5:
            self.participation = Poisson(prob=float(rng.choice([0.01, 0.1, 0.4, 0.9])))
        else:
            self.participation = FixedSize(size=int(rng.integers(1, population)), population=population)

    def _norms(self, rng: np.random.Generator, ends: bool) -> np.ndarray:
        return np.full(self.users, float(rng.choice([-1.0, 1.0]))) if ends else rng.uniform(-1, 1, self.users)

    def cells(self, ours: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """What one round puts between neighbouring edges: a post-processing, which only loses."""
        data = np.concatenate([ours, self.others])
        law = np.zeros(len(edges) - 1)
        for picked in itertools.product((0, 1), repeat=len(data)):
            chosen = np.array(picked)
            match self.participation:
                case Poisson(prob=prob):
                    weight = prob ** chosen.sum() * (1 - prob) ** (len(data) - chosen.sum())
                case FixedSize(size=size):
                    weight = (chosen.sum() == size) / math.comb(len(data), size)
            if weight:
                law += weight * np.diff(ndtr((edges - chosen @ data) / self.std))
        return law

    def delta(self, eps: float) -> float:
        """Almost exactly, from below, in the worse direction."""
        reach = len(self.others) + self.users + 9 * self.std
        edges = np.concatenate([[-np.inf], np.linspace(-reach, reach, 601), [np.inf]])
        p, q = self.cells(self.ours, edges), self.cells(self.theirs, edges)
        if self.times == 2:
            p, q = np.outer(p, p).ravel(), np.outer(q, q).ravel()
        alpha = math.exp(eps)
        return max(float(np.maximum(p - alpha * q, 0).sum()), float(np.maximum(q - alpha * p, 0).sum()))


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.soak)])
def test_no_sum_over_a_sample_is_above_its_certificate(count, record_property):
    rng, least, compared, caught = np.random.default_rng(5), math.inf, 0, 0
    while compared < count:
        drawn = RoundSample(rng)
        eps = float(rng.choice([0.0, 0.05, 0.3, 1.0, 2.5]))
        exact = drawn.delta(eps)
        if exact < 1e-9:
            continue
        compared += 1
        certified = bound(together(drawn.std, drawn.users, drawn.participation, drawn.times), eps=eps).delta
        least = min(least, certified / exact)
        assert certified >= exact * (1 - 1e-12), vars(drawn)
        if drawn.users > 1:
            fewer = together(drawn.std, drawn.users - 1, drawn.participation, drawn.times)
            caught += bound(fewer, eps=eps).delta < exact
    record_property("smallest ratio of certified to exact delta", float(least))
    sys.stdout.write(f"{compared} comparisons, certified / exact at least {least:.6f}\n")
    assert least < 1.02, "it is nearly attained"
    assert caught > count / 10, "one user fewer would not do"


@pytest.mark.parametrize("participation", [Poisson(prob=0.02), FixedSize(size=100, population=1000)])
def test_one_user_is_the_pair_of_one_user(participation):
    one = bound(rounds(4.0, participation, 50), delta=DELTA).eps
    found = bound(together(4.0, 1, participation, 50), delta=DELTA).eps
    assert one * (1 - 1e-4) <= found <= one * 1.001


@pytest.mark.parametrize(
    ("std", "participation", "times"),
    [
        (4.0, Poisson(prob=0.3), 10),
        (2.0, FixedSize(size=20, population=1000), 100),
        (4.0, FixedSize(size=100, population=1000), 100),
    ],
)
def test_smaller_than_group_privacy_by_far_where_noise_is_small(std, participation, times):
    history = rounds(std, participation, times)
    found = [groups.subject_bound(history, users=users, delta=DELTA).eps for users in (2, 3, 5)]
    group = [groups._by_group_privacy(history, users, DELTA).eps for users in (2, 3, 5)]
    assert found == sorted(found)
    assert all(mine <= theirs for mine, theirs in zip(found, group, strict=True))
    assert found[-1] < 0.9 * group[-1]


def test_the_statement_names_the_theorem_and_a_known_sample_is_never_better():
    history = rounds(4.0, FixedSize(size=100, population=1000), 20)
    found = groups.subject_bound(history, users=3, delta=DELTA)
    assert "dovetail.replaced-users+dovetail.fixed-size" in found.proof.key
    everyone = groups.subject_bound(rounds(4.0, Everyone(), 20), users=3, delta=DELTA)
    assert found.eps < everyone.eps
    nearly = groups.subject_bound(rounds(4.0, Poisson(prob=1 - 1e-12), 20), users=3, delta=DELTA)
    assert nearly.eps <= everyone.eps


@pytest.mark.parametrize(("users", "size", "population"), [(3, 10, 1000), (5, 990, 1000), (4, 4, 9), (40, 500, 10**6)])
def test_hypergeometric_weights_are_right_to_their_error(users, size, population):
    drawn = law_of_hypergeometric_draws(users, FixedSize(size=size, population=population))
    with mpmath.workdps(40):
        for k, weight in enumerate(drawn.weights):
            exact = (
                mpmath.binomial(users, k)
                * mpmath.binomial(population - users, size - k)
                / mpmath.binomial(population, size)
            )
            assert abs(weight - exact) <= exact * drawn.error
    assert drawn.rare >= hypergeom.sf(len(drawn.weights) - 1, population, users, size) * (1 - 1e-6)


@pytest.mark.parametrize("eps", [0.0, 0.01, 0.7, 4.0])
def test_the_best_threshold_is_found(eps):
    """Neither mixture has a threshold that is better than the one that is taken."""
    scale = math.exp(eps)
    binomial = law_of_binomial_draws(3, 0.2)
    shifts = 0.8 * np.arange(4)
    tried = [binomial.weights @ (ndtr(shifts - a) - scale * ndtr(-shifts - a)) for a in np.linspace(-12, 12, 4001)]
    assert max(tried) <= replaced_users.poisson_delta(binomial, 0.8, eps) <= max(tried) * 1.001 + 1e-13
    drawn = law_of_hypergeometric_draws(3, FixedSize(size=4, population=12))
    tried = []
    for a in np.linspace(-12, 12, 801):
        value = (1 - scale) * drawn.weights[0] * ndtr(-a)
        for k in (1, 2, 3):
            u = np.linspace(-a, 1.6 * k - a, 201)
            value += drawn.weights[k] * np.max(ndtr(u) - scale * ndtr(u - 1.6 * k))
        tried.append(value)
    assert max(tried) <= replaced_users.fixed_size_delta(drawn, 1.6, eps) <= max(tried) * 1.002 + 1e-13


def test_refusals():
    with pytest.raises(NotApplicable, match="more than are drawn, and more than are not"):
        law_of_hypergeometric_draws(6, FixedSize(size=5, population=10))
    with pytest.raises(NotApplicable, match="disjoint"):
        bound(
            [Round(mechanism=ReplacedUsers(std=1.0, clip_norm=1.0, users=2), participation=Disjoint(epoch=0))],
            delta=0.1,
        )
    with pytest.raises(ValueError, match="users >= 1"):
        ReplacedUsers(std=1.0, clip_norm=1.0, users=0)
    huge = groups.subject_bound(rounds(1e-3, Poisson(prob=0.5)), users=4, delta=DELTA)
    everyone = groups.subject_bound(rounds(1e-3, Everyone()), users=4, delta=DELTA)
    assert 0 < huge.eps <= everyone.eps, "where shifts are too large for a grid, as if everyone took part"


def test_noise_is_too_small_where_all_who_are_drawn_shift_the_sum_beyond_what_is_resolved():
    drawn = replaced_users.NumberDrawn(np.array([0.5, 0.25, 0.25]), 0.0, 0.0)  # two at most
    half = replaced_users._LARGEST_SHIFT / 2
    replaced_users._require_small_shift(drawn, half)
    with pytest.raises(NotApplicable, match="the noise is too small"):
        replaced_users._require_small_shift(drawn, half * 1.01)
