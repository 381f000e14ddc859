"""Rounds of split-and-mix, and of sums over the items of a subject, composed and certified."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from dovetail.accounting import (
    accountants,
    certify,
    compose,
    fits,
    gaussian,
    groups,
    loss_distributions,
)
from dovetail.accounting.exposure import delta_spent as spent_by
from dovetail.accounting.exposure import exposures_of
from dovetail.accounting.releases import skellam_sums, split_and_mix, subjects
from dovetail.events import Disjoint, Everyone, FixedSize, Gaussian, Poisson, Round, SampledSubject, SplitAndMix
from dovetail.numbers import at_most
from dovetail.statements import Neighbors, NotApplicable, Scope, Trust, Unit

DELTA = 1e-6
SHARES = SplitAndMix(
    num_users=500, coordinates=200, clip_norm=1.0, scale=300.0, noise_variance=4e7, modulus=2**19, shares=13
)
SUBJECT = SampledSubject(std=4.0, clip_norm=1.0, items=4, prob_item=0.5, prob_user=0.2, users_spanned=2)


def rounds(mechanism, count, participation=None):
    return [Round(mechanism=mechanism, participation=participation or Everyone())] * count


def scope(mechanism):
    return Scope(
        trust=Trust.SHUFFLE, adversary="analyzer", neighbors=mechanism.neighbors, unit=Unit.USER, assumptions=()
    )


def eps_of(history, delta=DELTA):
    return compose.bound(history, delta=delta).eps


# ---------------------------------------------------------------- split-and-mix


@pytest.mark.parametrize("count", [1, 3, 40])
def test_divergences_add_up_and_mixing_is_paid_at_the_whole_eps(count):
    curve = accountants.renyi(exposures_of(rounds(SHARES, count)))
    eps = curve.eps(DELTA)
    spent = count * (1 + math.exp(eps)) * 200 * split_and_mix.mixing_distance(num_users=500, slots=13, modulus=2**19)
    assert spent > 2e-4 * DELTA, "mixing must matter for this test to say anything"
    orders = np.arange(2.0, 5000.0)
    divergence = count * split_and_mix.renyi(SHARES, orders)
    noise = np.min((orders - 1) * (divergence - eps + np.log1p(-1 / orders)) - np.log(orders))
    assert DELTA * 0.9 <= math.exp(noise) + spent <= DELTA * (1 + 1e-6)
    assert spent <= curve.delta(eps) <= DELTA
    assert split_and_mix.delta(SHARES, eps=eps, rounds=count) <= curve.delta(eps) * (1 + 1e-6)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_distances_from_a_gaussian_add_up_and_the_better_route_is_taken(count):
    paid = exposures_of(rounds(SHARES, count))
    near, curve = split_and_mix.near_gaussian_of(SHARES), accountants.exact_gaussian(paid)
    assert near.mu == pytest.approx(skellam_sums.sensitivity(SHARES) / math.sqrt(4e7 - 1 / 12), rel=1e-12)
    assert curve.best == frozenset()
    for eps in (0.05, curve.eps(DELTA)):
        mixed = count * 200 * split_and_mix.mixing_distance(num_users=500, slots=13, modulus=2**19)
        distance = math.sqrt(200 * count) / (math.sqrt(96) * 4e7)
        by_hand = gaussian.delta_of(near.mu * math.sqrt(count), eps=eps) + (1 + math.exp(eps)) * (mixed + distance)
        assert curve.delta(eps) == pytest.approx(by_hand, rel=1e-6)
        assert curve.delta(eps) >= by_hand * (1 - 1e-9)
        others = [accountants.renyi(paid).delta(eps), accountants.ratio_to_gaussian(paid).delta(eps)]
        best = min(curve.delta(eps), *others)
        assert split_and_mix.delta(SHARES, eps=eps, rounds=count) == pytest.approx(best, rel=1e-9)
    bound = compose.bound(rounds(SHARES, count), delta=DELTA)
    others = [accountants.renyi(paid).eps(DELTA), accountants.ratio_to_gaussian(paid).eps(DELTA)]
    assert bound.eps == min(curve.eps(DELTA), *others)
    assert bound.eps == pytest.approx(split_and_mix.eps(SHARES, delta=DELTA, rounds=count).eps, rel=1e-7)


def test_a_statement_says_what_its_own_route_spends():
    far = "the gap between Skellam and Gaussian noise"
    sharp = certify(rounds(SHARES, 3), scope(SHARES), delta=DELTA)
    spent = {part.on: part.delta for part in sharp.proof.spent}
    assert set(spent) == {far, "imperfect mixing of shares"}
    assert 1e-5 * DELTA < spent[far] < 0.05 * DELTA, "the tails of the ratio"
    paid = 3 * split_and_mix.near_gaussian_of(SHARES).divergence
    assert spent[far] < gaussian.distance_delta(paid, eps=sharp.eps) / 5, "in total variation"
    assert "docs/proofs/skellam.md" in str(sharp.proof) and "Renyi" not in str(sharp.proof)
    at_eps = certify(rounds(SHARES, 3), scope(SHARES), eps=sharp.eps)
    assert at_eps.proof.spent == sharp.proof.spent
    few = dataclasses.replace(SHARES, noise_variance=99.0, scale=0.1)  # too little noise for the theorem
    coarse = certify(rounds(few, 1), scope(SHARES), delta=1e-3)
    assert {part.on for part in coarse.proof.spent} == {"imperfect mixing of shares"}
    assert "Renyi" in str(coarse.proof) and "docs/proofs/skellam.md" not in str(coarse.proof)


def test_many_users_together_spend_by_the_same_factor():
    one = compose.bound(rounds(SHARES, 3), delta=DELTA)
    group = groups.for_group(one, size=3)
    assert [part.on for part in group.proof.spent] == [part.on for part in one.proof.spent] != []
    assert group.proof.spent[0].delta / group.delta == pytest.approx(one.proof.spent[0].delta / one.delta)


def test_gaussian_releases_among_the_rounds_add_no_distance():
    noise = Gaussian(std=12.0, sensitivity=2.0, neighbors=Neighbors.REPLACE_ONE)
    curve = accountants.exact_gaussian(exposures_of(rounds(SHARES, 3) + rounds(noise, 3)))
    alone = accountants.exact_gaussian(exposures_of(rounds(SHARES, 3)))
    assert curve.delta_spent(0.7) == alone.delta_spent(0.7) and curve.delta_spent(0.7)[0].delta > 0
    assert curve.eps(DELTA) > alone.eps(DELTA)
    assert accountants.exact_gaussian(exposures_of(rounds(noise, 3))).best == {"eps", "delta"}


def test_a_statement_says_what_mixing_costs():
    statement = certify(rounds(SHARES, 40), scope(SHARES), delta=DELTA)
    spent = 40 * split_and_mix.mixing_delta(SHARES, statement.eps)
    assert f"{at_most(spent, 3)} of delta covers imperfect mixing of shares" in str(statement.proof)
    assert "Skellam" in str(statement.proof) and "docs/proofs/skellam.md" in str(statement.proof)
    (premise,) = statement.premises
    assert premise.eps == pytest.approx(eps_of(rounds(SHARES, 1)))
    assert fits(rounds(SHARES, 40), eps=statement.eps, delta=DELTA)
    assert not fits(rounds(SHARES, 41), eps=statement.eps, delta=DELTA)


def test_too_little_mixing_is_not_certified():
    few = dataclasses.replace(SHARES, colluding_slots=10)
    with pytest.raises(NotApplicable, match="imperfect mixing"):
        eps_of(rounds(few, 2))
    assert not fits(rounds(few, 2), eps=1e6, delta=DELTA)
    nearly = dataclasses.replace(SHARES, noise_variance=5e4)
    with pytest.raises(NotApplicable, match="spent beside the noise"):
        eps_of(rounds(nearly, 1))


def test_epochs_of_disjoint_batches_cost_one_round():
    batches = rounds(SHARES, 7, Disjoint(epoch=0)) + rounds(SHARES, 7, Disjoint(epoch=1))
    assert eps_of(batches) == eps_of(rounds(SHARES, 2))
    other = rounds(dataclasses.replace(SHARES, num_users=499), 1, Disjoint(epoch=0))
    with pytest.raises(NotApplicable, match="no order between them"):
        eps_of(batches + other)
    drawn = FixedSize(size=SHARES.num_users, population=1000)
    assert eps_of(rounds(SHARES, 2, drawn)) == eps_of(rounds(SHARES, 2)), "nothing is gained, and nothing lost"


@pytest.mark.parametrize("prob", [0.05, 0.5])
def test_secret_coins_of_the_users_hide_as_they_do_under_gaussian_noise(prob):
    near = split_and_mix.near_gaussian_of(SHARES)
    noise = Gaussian(std=1.0, sensitivity=near.mu, neighbors=Neighbors.REPLACE_ONE)
    ideal = eps_of(rounds(noise, 20, Poisson(prob=prob)))
    ours = eps_of(rounds(SHARES, 20, Poisson(prob=prob)))
    assert ideal < ours < 1.01 * ideal, "but for the distance from a Gaussian, and of the shares from their ideal"
    assert ours < eps_of(rounds(SHARES, 20))
    scope = Scope(trust=Trust.SHUFFLE, adversary="analyzer", neighbors=Neighbors.REPLACE_ONE, unit=Unit.USER)
    statement = certify(rounds(SHARES, 20, Poisson(prob=prob)), scope, delta=DELTA)
    assert any("decides secretly" in said for said in statement.assumptions)
    assert any("between Skellam and Gaussian noise" in part.on for part in statement.proof.spent)
    with pytest.raises(NotApplicable, match="no Renyi bound here for SplitAndMix"):
        eps_of(rounds(SHARES, 2, FixedSize(size=SHARES.num_users - 1, population=1000)))


def test_rounds_of_different_kinds_compose():
    noise = Gaussian(std=12.0, sensitivity=2.0, neighbors=Neighbors.REPLACE_ONE)
    both = eps_of(rounds(SHARES, 3) + rounds(noise, 3))
    assert max(eps_of(rounds(SHARES, 3)), eps_of(rounds(noise, 3))) < both
    assert both < eps_of(rounds(SHARES, 3), DELTA / 2) + eps_of(rounds(noise, 3), DELTA / 2)
    other = dataclasses.replace(SHARES, shares=14)
    mixed = exposures_of(rounds(SHARES, 3) + rounds(other, 2))
    spent = 3 * split_and_mix.mixing_delta(SHARES, 0.5) + 2 * split_and_mix.mixing_delta(other, 0.5)
    assert sum(part.delta for part in spent_by(mixed, eps=0.5)) == pytest.approx(spent, rel=1e-6, abs=0)


@pytest.mark.parametrize(("eps", "count"), [(0.3, 1), (2.0, 30), (6.0, 500)])
def test_calibration_for_many_rounds_is_tight_and_safe(eps, count):
    design = split_and_mix.calibrate(
        num_users=800, coordinates=500, clip_norm=0.5, eps=eps, delta=DELTA, rounds=count, colluders=20
    )
    assert eps * (1 - 2e-3) <= eps_of(rounds(design, count)) <= eps
    assert split_and_mix.eps(design, delta=DELTA, rounds=count).eps <= eps
    assert eps_of(rounds(design, count + max(1, count // 50))) > eps
    assert count * split_and_mix.mixing_delta(design, eps) <= 1e-3 * DELTA * (1 + 1e-6)


# ---------------------------------------------------------------- subjects


@pytest.mark.parametrize("count", [1, 6])
def test_a_subjects_rounds_compose_within_its_worst_split(count):
    ours = eps_of(rounds(SUBJECT, count))
    each = []
    for split in subjects.splits_to_check(SUBJECT):
        loss = subjects._loss_of_split(SUBJECT, split, subjects.resolution(SUBJECT, rounds=count))
        each.append(loss_distributions.self_compose(loss, count).eps(DELTA))
    assert len(each) == 3
    assert ours == pytest.approx(max(each), rel=1e-6)
    assert ours > min(each) * 1.02
    assert ours == pytest.approx(subjects.eps(SUBJECT, rounds=count, delta=DELTA).eps, rel=5e-3)


def mixture(law, std, y):
    return sum(mass * stats.norm.pdf(y, k, std) for k, mass in enumerate(law))


def test_different_sums_of_one_subject_against_integration():
    """Two rounds of different events: no split of either, the same in both or not, is worse than what is certified."""
    other = dataclasses.replace(SUBJECT, std=3.0, prob_item=0.3)
    curve = accountants.privacy_loss(exposures_of(rounds(SUBJECT, 1) + rounds(other, 1)))
    y, step = np.linspace(-22, 28, 1201, retstep=True)
    for one, two in itertools.product(subjects.splits_to_check(SUBJECT), subjects.splits_to_check(other)):
        null = np.outer(stats.norm.pdf(y, 0, 4.0), stats.norm.pdf(y, 0, 3.0))
        moved = np.outer(
            mixture(subjects.law_of_items_in_sum(SUBJECT, one), 4.0, y),
            mixture(subjects.law_of_items_in_sum(other, two), 3.0, y),
        )
        for eps in (0.2, 0.8):
            for p, q in ((null, moved), (moved, null)):
                assert np.maximum(0, p - math.exp(eps) * q).sum() * step**2 <= curve.delta(eps)


def test_one_item_is_a_poisson_sampled_gaussian():
    one = SampledSubject(std=1.2, clip_norm=1.0, items=1, prob_item=0.05)
    noise = Gaussian(std=1.2, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE)
    assert eps_of(rounds(one, 50)) == pytest.approx(eps_of(rounds(noise, 50, Poisson(prob=0.05))), rel=3e-3)
    both = eps_of(rounds(one, 20) + rounds(noise, 30, Poisson(prob=0.05)))
    assert both == pytest.approx(eps_of(rounds(one, 50)), rel=3e-3)


@pytest.mark.parametrize("std", [1.0, 30.0])
def test_the_grid_resolves_rare_and_small_shifts(std):
    event = SampledSubject(std=std, clip_norm=1.0, items=1, prob_item=0.02)
    count = 20 if std == 1 else 2000
    fine = Round(
        mechanism=Gaussian(std=std, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE), participation=Poisson(prob=0.02)
    )
    ours = accountants.privacy_loss(exposures_of(rounds(event, count))).eps(DELTA)
    exact = accountants.renyi(exposures_of([fine] * count)).eps(DELTA)
    assert ours <= exact * 1.02


def test_a_subject_statement_and_what_it_refuses():
    mine = dataclasses.replace(scope(SUBJECT), unit=Unit.SUBJECT, trust=Trust.CURATOR)
    statement = certify(rounds(SUBJECT, 6), mine, delta=DELTA)
    assert "mixture of Gaussians" in str(statement.proof) and "privacy-loss" in str(statement.proof)
    assert statement.eps >= certify(rounds(SUBJECT, 5), mine, delta=DELTA).eps
    assert fits(rounds(SUBJECT, 6), eps=statement.eps, delta=DELTA)
    assert not fits(rounds(SUBJECT, 6), eps=statement.eps * 0.99, delta=DELTA)
    with pytest.raises(NotApplicable, match="several disjoint batches"):
        eps_of(rounds(SUBJECT, 2, Disjoint(epoch=0)))
    with pytest.raises(NotApplicable, match="SampledSubject noise with FixedSize"):
        eps_of(rounds(SUBJECT, 2, FixedSize(size=5, population=10)))
    with pytest.raises(ValueError, match="stated under replace-one, but an event under"):
        certify(rounds(SUBJECT, 2), dataclasses.replace(mine, neighbors=Neighbors.REPLACE_ONE), delta=DELTA)
    many = [dataclasses.replace(SUBJECT, std=5.0 + i, clip_norm=1e-3) for i in range(4)]
    with pytest.raises(NotApplicable, match="81 ways"):
        eps_of([Round(mechanism=event, participation=Everyone()) for event in many])


def test_items_that_are_always_sampled_are_charged_as_gaussian_noise():
    one = SampledSubject(std=4.0, clip_norm=1.0, items=2, prob_item=1.0)
    same = dataclasses.replace(one, items_per_user=2, users_spanned=3)
    (exposure,) = exposures_of(rounds(one, 2) + rounds(same, 2))
    assert isinstance(exposure.mechanism, Gaussian) and exposure.times == 4
    exact = gaussian.eps_of(1.0, delta=DELTA)
    assert exact <= eps_of(rounds(one, 2) + rounds(same, 2)) <= exact * (1 + 1e-9)
    assert eps_of(rounds(dataclasses.replace(one, steps=4), 1)) == pytest.approx(exact, rel=1e-9)
    with pytest.raises(NotApplicable, match="SampledSubject noise with Poisson"):
        eps_of(rounds(one, 2, Poisson(prob=0.5)))


def test_a_subject_with_noise_at_every_user_is_certified():
    event = SampledSubject(
        std=4.0, clip_norm=1.0, items=6, items_per_user=2, users_spanned=3, prob_item=0.1, noise="user", steps=5
    )
    about = dataclasses.replace(scope(event), unit=Unit.SUBJECT, trust=Trust.LOCAL)
    statement = certify(rounds(event, 4), about, delta=DELTA)
    assert statement.eps == pytest.approx(subjects.eps(event, rounds=4, delta=DELTA).eps, rel=2e-3)
    assert statement.eps < certify(rounds(dataclasses.replace(event, noise="sum"), 4), about, delta=DELTA).eps
    (premise,) = statement.premises
    assert premise.span == "one of 4 rounds"
    assert premise.eps == pytest.approx(eps_of(rounds(event, 1)))
    at_eps = certify(rounds(event, 4), about, eps=statement.eps)
    assert at_eps.delta == pytest.approx(DELTA, rel=1e-3)
