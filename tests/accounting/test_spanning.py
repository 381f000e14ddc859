import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from dovetail.accounting import bound, gaussian, groups
from dovetail.accounting.groups import subject_bound
from dovetail.events import (
    Disjoint,
    Everyone,
    FixedSize,
    Gaussian,
    Laplace,
    NonPrivate,
    Personalized,
    Poisson,
    Report,
    Round,
    SampledSubject,
    Shuffled,
    SplitAndMix,
)
from dovetail.statements import Neighbors, NotApplicable

DELTA = 1e-5
ADD, REPLACE = Neighbors.ADD_REMOVE, Neighbors.REPLACE_ONE
SHARES = SplitAndMix(
    num_users=500, coordinates=200, clip_norm=1.0, scale=300.0, noise_variance=4e7, modulus=2**19, shares=16
)
CROWD = Shuffled(num_users=500, coordinates=5, report=Report(kind="rr", eps_local=0.5))


def noise(std=4.0, neighbors=ADD):
    return Gaussian(std=std, sensitivity=1.0, neighbors=neighbors)


def rounds(mechanism, count, participation=None):
    return [Round(mechanism=mechanism, participation=participation or Everyone())] * count


KINDS = {
    "everyone": rounds(noise(), 4),
    "epochs": [Round(mechanism=noise(neighbors=REPLACE), participation=Disjoint(epoch=i // 3)) for i in range(12)],
    "poisson": rounds(noise(1.0), 100, Poisson(prob=0.02)),
    "both": rounds(noise(), 2) + rounds(noise(1.0), 10, Poisson(prob=0.1)),
    "poisson replaced": rounds(noise(20.0, REPLACE), 50, Poisson(prob=0.01)),
    "fixed size": rounds(noise(20.0, REPLACE), 50, FixedSize(size=10, population=1000)),
    "laplace": rounds(Laplace(scale=10.0, sensitivity=1.0, count=2, neighbors=REPLACE), 3),
    "shuffled epochs": [Round(mechanism=CROWD, participation=Disjoint(epoch=i % 2)) for i in range(6)],
    "personal": rounds(Personalized(kind="rr", eps_locals=(0.1, 0.2) * 8), 1),
    "shares": rounds(SHARES, 3),
}
ADDED_UP = ("everyone", "epochs", "poisson", "both", "poisson replaced", "fixed size")
SHORT = [pytest.param(kind, marks=[pytest.mark.soak] if kind == "personal" else []) for kind in KINDS]


@pytest.mark.parametrize("kind", SHORT)
def test_one_user_is_the_bound_and_more_users_cost_more(kind):
    history = KINDS[kind]
    found = [subject_bound(history, users=users, delta=DELTA) for users in (1, 2, 4)]
    assert found[0] == bound(history, delta=DELTA)
    assert all(one.delta <= DELTA for one in found)
    assert 0 < found[0].eps < found[1].eps < found[2].eps < math.inf
    assert (groups.GROUP.where in str(found[1].proof)) == (kind not in ADDED_UP)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ADDED_UP])
def test_group_privacy_holds_at_what_is_returned(kind):
    """Back from the eps for the group: one user's delta at a third of it gives the group no more than was asked."""
    ours = subject_bound(KINDS[kind], users=3, delta=DELTA).eps
    one = bound(KINDS[kind], eps=ours / 3)
    assert groups.for_group(one, size=3).delta <= DELTA * 1.02


@pytest.mark.parametrize("kind", SHORT)
def test_never_above_group_privacy_of_any_one_point(kind):
    history = KINDS[kind]
    ours = subject_bound(history, users=3, delta=DELTA).eps
    for delta_one in (DELTA / 3, DELTA / 10, DELTA / 1e3, DELTA / 1e5):
        group = groups.for_group(bound(history, delta=delta_one), size=3)
        if group.delta <= DELTA:
            assert ours <= group.eps * (1 + 2e-3)


def test_shifts_of_gaussian_rounds_add_up_exactly():
    for users in (2, 5):
        exact = gaussian.eps_of(users / 4.0 * 2, delta=DELTA)
        assert subject_bound(KINDS["everyone"], users=users, delta=DELTA).eps == pytest.approx(exact, rel=1e-9)
        assert subject_bound(KINDS["epochs"], users=users, delta=DELTA).eps == pytest.approx(exact, rel=1e-9)


def test_no_spread_over_the_batches_of_an_epoch_is_worse():
    """Four users over three batches with their own noise: every way is a Gaussian, and none is above the bound."""
    stds = (3.0, 4.0, 6.0)
    history = [Round(mechanism=noise(std), participation=Disjoint(epoch=0)) for std in stds]
    ours = subject_bound(history, users=4, delta=DELTA).eps
    worst = 0.0
    for first in range(5):
        for second in range(5 - first):
            counts = (first, second, 4 - first - second)
            mu = math.sqrt(sum((count / std) ** 2 for count, std in zip(counts, stds, strict=True)))
            worst = max(worst, gaussian.eps_of(mu, delta=DELTA))
    assert worst * (1 - 1e-9) <= ours <= worst * (1 + 1e-9)


@pytest.mark.parametrize(("users", "prob"), [(2, 0.3), (3, 0.1)])
def test_poisson_rounds_against_integration(users, prob):
    """The subject's users join one by one, each with the largest shift: exactly what is certified."""
    history = rounds(noise(2.0), 1, Poisson(prob=prob))
    y, step = np.linspace(-20, 26, 200_001, retstep=True)
    null = stats.norm.pdf(y, 0, 2.0)
    law = stats.binom.pmf(range(users + 1), users, prob)
    moved = sum(mass * stats.norm.pdf(y, k, 2.0) for k, mass in enumerate(law))
    for delta in (0.05, 1e-3):
        eps = subject_bound(history, users=users, delta=delta).eps
        exact = max(np.maximum(0, a - math.exp(eps) * b).sum() * step for a, b in ((moved, null), (null, moved)))
        assert delta * 0.98 <= exact <= delta * (1 + 1e-9)


def test_pure_rounds_need_no_delta():
    assert subject_bound(KINDS["laplace"], users=3, delta=0.0).eps == pytest.approx(3 * 0.6)
    assert subject_bound(KINDS["laplace"], users=3, delta=0.0).delta == 0


def test_edges_and_refusals():
    assert subject_bound(rounds(NonPrivate(reason="none"), 1), users=3, delta=DELTA).eps == math.inf
    assert subject_bound([], users=3, delta=DELTA).eps == 0
    assert subject_bound(rounds(noise(), 1, Poisson(prob=0.0)), users=3, delta=DELTA).eps == 0
    always = rounds(noise(), 4, Poisson(prob=1.0))
    assert subject_bound(always, users=2, delta=DELTA).eps == subject_bound(KINDS["everyone"], users=2, delta=DELTA).eps
    too_many = subject_bound(rounds(dataclasses.replace(SHARES, shares=14), 3), users=200, delta=DELTA)
    assert too_many.eps == math.inf and "group of 200" in str(too_many.proof)
    with pytest.raises(NotApplicable, match="for a subject already"):
        subject_bound(rounds(SampledSubject(std=1.0, clip_norm=1.0, items=1, prob_item=0.1), 1), users=2, delta=DELTA)
    with pytest.raises(NotApplicable, match="no Renyi bound"):
        subject_bound(rounds(SHARES, 1, FixedSize(size=2, population=4)), users=2, delta=DELTA)
    for bad in ({"users": 0}, {"users": 1.5}, {"delta": -1.0}, {"delta": 2.0}):
        with pytest.raises(ValueError, match="expected"):
            subject_bound(KINDS["everyone"], **({"users": 2, "delta": DELTA} | bad))
