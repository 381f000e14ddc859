"""Every public function of the accountant, asked outside its region: it must refuse, and say why.

`CASES` has one or more questions for each function that a module names in its ``__all__``; a new function without one
fails the test. `NotApplicable` is a theorem outside its hypotheses, a plain `ValueError` is bad input.
"""

import dataclasses
import importlib
import inspect
import math
import pkgutil

import numpy as np
import pytest

import dovetail.accounting
import dovetail.claims
from dovetail.accounting import (
    accountants,
    adaptive,
    certification,
    compose,
    conversion,
    exposure,
    gaussian,
    groups,
    loss_distributions,
    numerics,
    releases,
    search,
    streams,
)
from dovetail.accounting.amplification import blanket, blanket_grid, clones, closed_forms, frontier, table
from dovetail.accounting.exposure import Exposure
from dovetail.accounting.pairs import binomial, blanket_pair, mixtures, personal, symmetric
from dovetail.accounting.releases import (
    crowds,
    personalized,
    privunit,
    replaced_users,
    selection,
    skellam_sums,
    split_and_mix,
    subjects,
)
from dovetail.claims import apes, flame, geyer, subdp, survey
from dovetail.events import (
    Disjoint,
    Everyone,
    FixedSize,
    Gaussian,
    Laplace,
    NonPrivate,
    PaddedBernoulli,
    PaddedTopk,
    Personalized,
    Poisson,
    Report,
    Round,
    SampledSubject,
    Shuffled,
    SplitAndMix,
)
from dovetail.statements import Bound, Neighbors, NotApplicable, Scope, Theorem, Trust, Unit

REPLACE, ADD = Neighbors.REPLACE_ONE, Neighbors.ADD_REMOVE


def report(kind="rr", eps_local=1.0, levels=2):
    return Report(kind=kind, eps_local=eps_local, levels=levels)


def shuffled(kind="rr", eps_local=1.0, n=100, d=1, levels=2):
    return Shuffled(report=report(kind, eps_local, levels), num_users=n, coordinates=d)


def once(mechanism, participation=None):
    return [Round(mechanism=mechanism, participation=participation or Everyone())]


def charged(mechanism, sampling=None):
    return (Exposure(mechanism=mechanism, sampling=sampling or Everyone(), times=1),)


def bound(eps, delta=0.0):
    return Bound(eps=eps, delta=delta, proof=Theorem(key="given", where="given").proof)


TWO, MANY = shuffled(), shuffled(d=2)
NOISE = Gaussian(std=1.0, sensitivity=1.0, neighbors=ADD)
REPLACED = Gaussian(std=1.0, sensitivity=2.0, neighbors=REPLACE)
PURE = Laplace(scale=1.0, sensitivity=1.0, count=1, neighbors=REPLACE)
NOTHING = NonPrivate(reason="no noise")
TERNARY = PaddedBernoulli(report=report(levels=3), num_users=9, pad_to=9, inclusion=0.5)
FULL = PaddedBernoulli(report=report(), num_users=9, pad_to=5, inclusion=0.9)
DROPPED = PaddedTopk(report=report(), num_users=9, pad_to=5, top=1, decoys=0, colluders=1)
BUDGETS = Personalized(kind="laplace", eps_locals=(0.5, 1.0, 2.0), coordinates=2)
LARGE_BUDGETS = Personalized(kind="rr", eps_locals=(30.0, 30.0))
MANY_BUDGETS = Personalized(kind="clip_laplace", eps_locals=(0.1,) * 400)
SHARES = SplitAndMix(num_users=50, coordinates=2, clip_norm=1.0, scale=9.0, noise_variance=9e4, modulus=2**10, shares=9)
OPEN = SplitAndMix(
    num_users=50,
    coordinates=2,
    clip_norm=1.0,
    scale=9.0,
    noise_variance=9e4,
    modulus=2**10,
    shares=9,
    colluding_slots=9,
)
SUBJECT = SampledSubject(std=2.0, clip_norm=1.0, items=2, prob_item=0.5)
SHIFTS = mixtures.ShiftLaw.dominating(np.array([0.0, 1.0]), np.array([0.5, 0.5]))
SPREAD = SampledSubject(std=2.0, clip_norm=1.0, items=60, prob_item=0.5, prob_user=0.5, users_spanned=60)
SCOPE = Scope(trust=Trust.CURATOR, adversary="observer", neighbors=REPLACE, unit=Unit.USER)
SLIVER = privunit.Cap(dim=10**6, threshold=1 - 1e-12, prob=0.5)
ORDERS = np.array([1.0, 2.0])
DIFFERENT = [
    *once(PURE, Disjoint(epoch=0)),
    *once(Laplace(scale=2.0, sensitivity=1.0, count=1, neighbors=REPLACE), Disjoint(epoch=0)),
]

OUTSIDE, BAD = NotApplicable, ValueError  # BAD stands for a ValueError that is not NotApplicable

# function: (which refusal, what it says, the question), ...
CASES = {
    accountants.equal_rounds: [
        (OUTSIDE, "Laplace has no theorem of its own", lambda: accountants.equal_rounds(charged(PURE))),
        (OUTSIDE, "all equal", lambda: accountants.equal_rounds(charged(PURE) + charged(NOISE))),
        (OUTSIDE, "0 < delta < 1", lambda: accountants.equal_rounds(charged(MANY_BUDGETS)).eps(0.0)),
        (OUTSIDE, "one coordinate and one round", lambda: accountants.equal_rounds(charged(BUDGETS))),
    ],
    accountants.exact_gaussian: [
        (OUTSIDE, "needs Gaussian noise", lambda: accountants.exact_gaussian(charged(PURE))),
        (OUTSIDE, "no sampling", lambda: accountants.exact_gaussian(charged(NOISE, Poisson(prob=0.5)))),
        (OUTSIDE, "0 < delta < 1", lambda: accountants.exact_gaussian(charged(NOISE)).eps(0.0)),
    ],
    accountants.ratio_to_gaussian: [
        (OUTSIDE, "near to one", lambda: accountants.ratio_to_gaussian(charged(PURE))),
        (OUTSIDE, "near to one", lambda: accountants.ratio_to_gaussian(charged(NOISE))),
    ],
    accountants.privacy_loss: [
        (OUTSIDE, "SplitAndMix", lambda: accountants.privacy_loss(charged(SHARES))),
        (
            OUTSIDE,
            "shuffle 100 users, but 50 are drawn",
            lambda: accountants.privacy_loss(charged(TWO, FixedSize(size=50, population=200))),
        ),
        (OUTSIDE, "FixedSize", lambda: accountants.privacy_loss(charged(PURE, FixedSize(size=2, population=9)))),
    ],
    accountants.pure_composition: [
        (OUTSIDE, "no pure guarantee", lambda: accountants.pure_composition(charged(NOISE))),
        (OUTSIDE, "no sampling", lambda: accountants.pure_composition(charged(PURE, Poisson(prob=0.5)))),
    ],
    accountants.renyi: [
        (OUTSIDE, "Gaussian noise with Poisson", lambda: accountants.renyi(charged(REPLACED, Poisson(prob=0.5)))),
        (OUTSIDE, "SampledSubject", lambda: accountants.renyi(charged(SUBJECT))),
        (OUTSIDE, "no Renyi order is finite", lambda: accountants.renyi(charged(noiseless()))),
        (OUTSIDE, "imperfect mixing", lambda: accountants.renyi(charged(OPEN)).eps(1e-6)),
    ],
    table.best: [(OUTSIDE, "no amplification bound improves", lambda: table.best(8.0, num_users=5, delta=1e-6))],
    table.bound: [
        (BAD, "unknown bound 'clones'", lambda: table.bound("clones", report(), num_users=9, delta=0.1)),
        (OUTSIDE, "Laplace .* only", lambda: table.bound("blanket-exact-laplace", report(), num_users=9, delta=0.1)),
        (OUTSIDE, "binary", lambda: table.bound("blanket-exact-rr2", report(levels=3), num_users=9, delta=0.1)),
    ],
    table.table: [(BAD, "0 < delta < 1", lambda: table.table(1.0, num_users=9, delta=1.0))],
    blanket.bennett: [
        (OUTSIDE, "no gain over eps_local", lambda: blanket.bennett(shuffled(n=5), delta=1e-9)),
        (OUTSIDE, "one coordinate", lambda: blanket.bennett(MANY, delta=0.1)),
        (OUTSIDE, "the blanket is empty", lambda: blanket.bennett(shuffled(eps_local=200.0), delta=0.1)),
    ],
    blanket.exact: [
        (OUTSIDE, "no gain over eps_local", lambda: blanket.exact(shuffled("laplace", n=3), delta=1e-9)),
        (OUTSIDE, "one coordinate", lambda: blanket.exact(MANY, delta=0.1)),
        (BAD, "0 < delta < 1", lambda: blanket.exact(TWO, delta=0.0)),
    ],
    blanket.exact_delta: [
        (OUTSIDE, "the report is generic", lambda: blanket.exact_delta(shuffled("generic"), eps=0.1)),
        (OUTSIDE, "precision of the FFT", lambda: blanket.exact_delta(shuffled("laplace", n=10**10), eps=0.1)),
        (BAD, "eps >= 0", lambda: blanket.exact_delta(TWO, eps=-0.1)),
        (BAD, "coarser >= 1", lambda: blanket.exact_delta(TWO, eps=0.1, coarser=0.5)),
    ],
    blanket.hoeffding: [
        (OUTSIDE, "no gain over eps_local", lambda: blanket.hoeffding(shuffled(n=5), delta=1e-9)),
        (OUTSIDE, "one coordinate", lambda: blanket.hoeffding(MANY, delta=0.1)),
    ],
    blanket_grid.mean_excess: [
        (BAD, "draws >= 1", lambda: blanket_grid.mean_excess(a_grid(), blanket_grid.BinomialDraws(0, 0.5))),
        (BAD, "prob <= 1", lambda: blanket_grid.mean_excess(a_grid(), blanket_grid.BinomialDraws(1, 1.5))),
    ],
    blanket.frontier_of: [(OUTSIDE, "no frontier here", lambda: blanket.frontier_of(report("laplace")))],
    blanket.laplace_blanket_probs: [
        (OUTSIDE, "no plateau for a budget", lambda: blanket.laplace_blanket_probs(np.ones(1), 1e-4, 1.0)),
    ],
    blanket.laplace_frontier: [
        (OUTSIDE, "no plateau for a budget", lambda: blanket.laplace_frontier(1e-4, 1.0)),
        (BAD, "half_width > 0", lambda: blanket.laplace_frontier(1.0, 0.0)),
    ],
    blanket.threshold_frontier: [
        (BAD, "0 < threshold < 1", lambda: blanket.threshold_frontier(1.0, 0.1, 1.0)),
    ],
    frontier.clip_laplace: [(BAD, "eps_local > 0", lambda: frontier.clip_laplace(0.0))],
    frontier.randomized_response: [(BAD, "0 < mass < 1", lambda: frontier.randomized_response(1.0, 1.0))],
    frontier.from_cells: [
        (BAD, "mean slope of 1", lambda: frontier.from_cells(np.ones(1), np.array([2.0]), np.ones(1), np.ones(1) * 2)),
    ],
    frontier.move_cells_to_ends: [
        (BAD, "broadcast", lambda: frontier.move_cells_to_ends(np.ones(2), np.ones(3), np.ones(2), np.ones(2))),
    ],
    frontier.from_excess: [
        (BAD, "mean slope of 1", lambda: frontier.from_excess(np.array([0.0, 3.0]), np.array([2.0, 0.0]))),
    ],
    symmetric.upper_envelope: [
        (BAD, "as many folds", lambda: symmetric.upper_envelope(a_pair(), dataclasses.replace(a_pair(), folds=2))),
    ],
    numerics.tilt: [(OUTSIDE, "could not be tilted", lambda: numerics.tilt(np.full(2, -np.inf), np.zeros(2)))],
    gaussian.mu_of: [
        (BAD, "eps >= 0", lambda: gaussian.mu_of(-1.0, delta=1e-6)),
        (BAD, "0 < delta < 1", lambda: gaussian.mu_of(1.0, delta=0.0)),
    ],
    adaptive.gaussian_bound: [
        (OUTSIDE, "needs 0 < delta < 1", lambda: adaptive.gaussian_bound(gaussian_rounds(), delta=0.0)),
        (OUTSIDE, "Gaussian", lambda: adaptive.gaussian_bound(sampled_rounds(), delta=1e-6)),
    ],
    symmetric.nodes_for: [(BAD, "folds >= 1", lambda: symmetric.nodes_for(0))],
    numerics.binomial_pmf: [(BAD, "prob=1.5", lambda: numerics.binomial_pmf(1, 2, 1.5))],
    numerics.binomial_cdf: [(BAD, "prob=nan", lambda: numerics.binomial_cdf(1, 2, math.nan))],
    numerics.binomial_sf: [(BAD, "trials >= 0", lambda: numerics.binomial_sf(1, -2, 0.5))],
    binomial.clone_counts_by_tail_bounds: [
        (
            OUTSIDE,
            "many coins",
            lambda: binomial.clone_counts_by_tail_bounds(binomial.Coins(np.ones(1) / 2, np.ones(1))),
        ),
    ],
    symmetric.sampled_pair: [
        (BAD, "prob > 0", lambda: symmetric.sampled_pair(lambda eps: 0.1, prob=0.0, eps_pure=1.0, std=1.0)),
        (BAD, "std > 0", lambda: symmetric.sampled_pair(lambda eps: 0.1, prob=0.5, eps_pure=1.0, std=0.0)),
    ],
    symmetric.pair_dominating_curve: [
        (OUTSIDE, "a loss of 21", lambda: symmetric.pair_dominating_curve(lambda eps: 0.1, eps_pure=21.0))
    ],
    personal.pair: [(OUTSIDE, "a loss of 30", lambda: personal.pair(LARGE_BUDGETS, np.array([0])))],
    personalized.pairs: [
        (OUTSIDE, "a loss of 30", lambda: personalized.pairs(LARGE_BUDGETS)),
        (BAD, "victim", lambda: personalized.pairs(BUDGETS, 3)),
    ],
    symmetric.repeated_loss: [
        (BAD, "times >= 1", lambda: loss_distributions.self_compose(symmetric.repeated_loss(crowds.pair(TWO), 1), 0)),
    ],
    symmetric.loss_rounded_down: [
        (BAD, "interval > 0", lambda: symmetric.loss_rounded_down(a_pair(), interval=0.0)),
        (OUTSIDE, "too small for a grid", lambda: symmetric.loss_rounded_down(a_pair(), interval=5.0)),
    ],
    symmetric.folded_loss: [
        (BAD, "interval > 0", lambda: symmetric.folded_loss(crowds.pair(TWO), interval=0.0)),
    ],
    blanket_pair.pair: [
        (OUTSIDE, "generic and binary", lambda: blanket_pair.pair(TWO)),
        (OUTSIDE, "loss of 21", lambda: blanket_pair.pair(shuffled("laplace", 21.0))),
    ],
    search.eps_after_spending: [
        (OUTSIDE, "spent beside", lambda: search.eps_after_spending(lambda d: 1.0, lambda eps: 0.5, delta=0.1)),
        (BAD, "0 < delta < 1", lambda: search.eps_after_spending(lambda d: 1.0, lambda eps: 0.0, delta=1.0)),
    ],
    search.smallest_eps: [
        (BAD, "0 < delta < 1", lambda: search.smallest_eps(lambda eps: 0.5, delta=0.0, high=1.0)),
    ],
    search.smallest_integer: [
        (BAD, "no value up to 9 meets eps=1.0", lambda: search.smallest_integer(lambda n: 2.0, eps=1.0, low=1, high=9)),
    ],
    search.smallest_noise: [
        (BAD, "no noise up to 2.40 meets eps=1.0", lambda: search.smallest_noise(lambda noise: 2.0, eps=1.0)),
        (BAD, "eps > 0", lambda: search.smallest_noise(lambda noise: 2.0, eps=0.0)),
    ],
    search.smallest_point: [
        (BAD, "high to be a finite", lambda: search.smallest_point(lambda x: True, low=0.0, high=math.inf)),
    ],
    certification.certify: [
        (OUTSIDE, "no order between them", lambda: certification.certify(DIFFERENT, SCOPE, delta=0.1)),
        (BAD, "under replace-one", lambda: certification.certify(once(NOISE), SCOPE, delta=0.1)),
        (BAD, "0 <= delta <= 1", lambda: certification.certify(once(PURE), SCOPE, delta=-0.1)),
    ],
    exposure.exposures_of: [
        (OUTSIDE, "no order between them", lambda: exposure.exposures_of(DIFFERENT)),
        (OUTSIDE, "several disjoint batches", lambda: exposure.exposures_of(once(SUBJECT, Disjoint(epoch=0)))),
    ],
    streams.impulse_response: [
        (BAD, "coefficient <= 0", lambda: streams.impulse_response((1.0, 0.5), 3)),
        (BAD, "first_coefficient > 0", lambda: streams.impulse_response((0.0, -0.5), 3)),
    ],
    streams.amplification_of_uploads: [
        (BAD, "coefficient <= 0", lambda: streams.amplification_of_uploads((1.0, 0.5), 3, 1, 1)),
        (BAD, "uploads >= 1", lambda: streams.amplification_of_uploads((1.0,), 3, 0, 1)),
        (BAD, "separation >= 1", lambda: streams.amplification_of_uploads((1.0,), 3, 1, 0)),
    ],
    exposure.delta_spent: [(BAD, "eps >= 0", lambda: exposure.delta_spent(charged(SHARES), eps=-1.0))],
    exposure.reason_for_refusal: [
        (OUTSIDE, "no release is registered for str", lambda: exposure.reason_for_refusal(once("an event")))
    ],
    clones.binomial_counts: [
        (BAD, "0 <= prob <= 1", lambda: clones.binomial_counts(9, 1.5, tail=0.1)),
        (BAD, "trials >= 0", lambda: clones.binomial_counts(-1, 0.5, tail=0.1)),
    ],
    clones.clone_probability: [
        (BAD, "year to be one of", lambda: clones.clone_probability(1.0, year=2021)),
        (BAD, "eps_local > 0", lambda: clones.clone_probability(0.0, year=2023)),
    ],
    clones.delta_of: [
        (OUTSIDE, "one coordinate", lambda: clones.delta_of(MANY, eps=0.1)),
        (BAD, "a finite number", lambda: clones.delta_of(TWO, eps=math.nan)),
    ],
    clones.expected_delta: [(BAD, "eps >= 0", lambda: clones.expected_delta(a_law(), eps=-1.0, eps_local=1.0))],
    clones.numerical22: [
        (OUTSIDE, "no gain over eps_local", lambda: clones.numerical22(shuffled(n=3), delta=1e-9)),
        (OUTSIDE, "one coordinate", lambda: clones.numerical22(MANY, delta=0.1)),
    ],
    clones.numerical23: [
        (OUTSIDE, "no gain over eps_local", lambda: clones.numerical23(shuffled(n=3), delta=1e-9)),
        (OUTSIDE, "there are no clones", lambda: clones.numerical23(shuffled(eps_local=600.0), delta=0.1)),
    ],
    clones.delta_by_clone_count: [
        (BAD, "eps_local > 0", lambda: clones.delta_by_clone_count(np.arange(3), eps=0.1, eps_local=0.0))
    ],
    closed_forms.clones22: [
        (OUTSIDE, "eps_local <= ", lambda: closed_forms.clones22(shuffled(eps_local=5.0, n=300), delta=1e-6)),
    ],
    closed_forms.clones23: [
        (OUTSIDE, "eps_local <= ", lambda: closed_forms.clones23(shuffled(eps_local=5.0, n=300), delta=1e-6)),
    ],
    closed_forms.erlingsson19: [
        (OUTSIDE, "eps_local <= 0.5", lambda: closed_forms.erlingsson19(shuffled(eps_local=0.6, n=5000), delta=1e-6)),
        (OUTSIDE, "n >= 1000", lambda: closed_forms.erlingsson19(shuffled(eps_local=0.1, n=500), delta=1e-6)),
        (OUTSIDE, "delta < 0.01", lambda: closed_forms.erlingsson19(shuffled(eps_local=0.1, n=5000), delta=0.02)),
    ],
    closed_forms.flame_lemma1: [
        (OUTSIDE, "randomized response only", lambda: closed_forms.flame_lemma1(shuffled("laplace"), delta=1e-6)),
        (OUTSIDE, "hypotheses fail", lambda: closed_forms.flame_lemma1(shuffled(n=20), delta=1e-6)),
    ],
    closed_forms.bound_if_gain: [
        (
            OUTSIDE,
            "no gain",
            lambda: closed_forms.bound_if_gain(1.0, TWO, delta=0.1, theorem=closed_forms.ERLINGSSON19),
        ),
        (
            OUTSIDE,
            "no gain",
            lambda: closed_forms.bound_if_gain(math.nan, TWO, delta=0.1, theorem=closed_forms.ERLINGSSON19),
        ),
    ],
    closed_forms.girgis21: [
        (OUTSIDE, "no gain over eps_local", lambda: closed_forms.girgis21(shuffled(eps_local=6.0, n=9), delta=1e-9)),
        (OUTSIDE, "one coordinate", lambda: closed_forms.girgis21(MANY, delta=0.1)),
    ],
    closed_forms.require_single_report: [
        (OUTSIDE, "compose instead", lambda: closed_forms.require_single_report(MANY, delta=0.1)),
        (BAD, "0 < delta < 1", lambda: closed_forms.require_single_report(TWO, delta=1.0)),
    ],
    compose.best_bound: [
        (OUTSIDE, "without a guarantee.*no Renyi", lambda: compose.best_bound(charged(NOTHING), delta=0.1)),
    ],
    compose.bound: [
        (OUTSIDE, "no Renyi bound", lambda: compose.bound(once(TWO, Poisson(prob=0.5)), delta=0.1)),
        (BAD, "0 <= delta <= 1", lambda: compose.bound(once(PURE), delta=2.0)),
        (BAD, "exactly one of delta and eps", lambda: compose.bound(once(PURE))),
    ],
    compose.check_target: [(BAD, "exactly one", lambda: compose.check_target(0.1, 1.0))],
    compose.fits: [(BAD, "0 <= delta <= 1", lambda: compose.fits(once(PURE), eps=1.0, delta=-1.0))],
    conversion.eps_of: [(BAD, "0 < delta < 1", lambda: conversion.eps_of(np.ones(1) * 2, np.ones(1), delta=0.0))],
    conversion.delta_of: [(BAD, "eps >= 0", lambda: conversion.delta_of(np.ones(1) * 2, np.ones(1), eps=-1.0))],
    conversion.eps_by_order: [
        (BAD, "0 < delta < 1", lambda: conversion.eps_by_order(np.array([2.0]), np.ones(1), delta=0.0)),
    ],
    conversion.log_delta_by_order: [
        (BAD, "eps >= 0", lambda: conversion.log_delta_by_order(np.array([2.0]), np.ones(1), eps=-1.0)),
    ],
    gaussian.delta_of: [
        (BAD, "eps >= 0", lambda: gaussian.delta_of(1.0, eps=-1.0)),
        (BAD, "mu > 0", lambda: gaussian.delta_of(-1.0, eps=1.0)),
    ],
    gaussian.lower_eps_of: [(BAD, "delta", lambda: gaussian.lower_eps_of(1.0, delta=0.0))],
    gaussian.eps_of: [(BAD, "0 < delta < 1", lambda: gaussian.eps_of(1.0, delta=0.0))],
    groups.for_group: [(BAD, "size >= 1", lambda: groups.for_group(bound(1.0), size=0))],
    binomial.clone_counts: [(BAD, "probabilities", lambda: binomial.clone_counts(np.array([0.5, 1.5])))],
    loss_distributions.self_compose: [(BAD, "times >= 1", lambda: loss_distributions.self_compose(a_loss(), 0))],
    loss_distributions.loss_of_mixture: [
        (BAD, "a release with a loss", lambda: loss_distributions.loss_of_mixture([(1.0, None)], interval=0.1)),
    ],
    loss_distributions.compose: [(BAD, "at least one release", lambda: loss_distributions.compose([]))],
    loss_distributions.worst_delta: [(BAD, "eps >= 0", lambda: loss_distributions.worst_delta([a_loss()], eps=-1.0))],
    loss_distributions.worst_eps: [
        (BAD, "0 < delta < 1", lambda: loss_distributions.worst_eps([a_loss()], delta=0.0)),
    ],
    split_and_mix.mixing_distance: [
        (OUTSIDE, "modulus >= num_users", lambda: split_and_mix.mixing_distance(num_users=100, slots=5, modulus=64)),
        (
            OUTSIDE,
            "too few share slots",
            lambda: split_and_mix.mixing_distance(num_users=50_000, slots=3, modulus=2**30),
        ),
        (BAD, "num_users >= 2", lambda: split_and_mix.mixing_distance(num_users=1, slots=5, modulus=64)),
    ],
    mixtures.interval_for: [(BAD, "std > 0", lambda: mixtures.interval_for(0.0, 1.0, num_releases=1))],
    mixtures.loss: [(BAD, "interval > 0", lambda: mixtures.loss(SHIFTS, interval=0.0))],
    crowds.delta: [
        (OUTSIDE, "binary randomized response", lambda: crowds.delta(TERNARY, eps=0.1)),
        (BAD, "eps >= 0", lambda: crowds.delta(TWO, eps=-0.1)),
    ],
    crowds.eps: [
        (OUTSIDE, "coordinates overflow", lambda: crowds.eps(FULL, delta=1e-6)),
        (OUTSIDE, "colluders see", lambda: crowds.eps(DROPPED, delta=1e-6)),
        (BAD, "0 < delta < 1", lambda: crowds.eps(TWO, delta=1.0)),
    ],
    compose.local_bound: [
        (OUTSIDE, "sees who was sampled", lambda: compose.local_bound(once(TWO, Poisson(prob=0.5)), delta=1e-6)),
        (OUTSIDE, "Gaussian does not describe", lambda: compose.local_bound(once(NOISE), delta=1e-6)),
    ],
    crowds.local_bound: [
        (OUTSIDE, "binary randomized response", lambda: crowds.local_bound(ternary_topk())),
        (BAD, "0 <= delta <= 1", lambda: crowds.local_bound(FULL, delta=2.0)),
    ],
    crowds.loss: [
        (OUTSIDE, "loss of 31", lambda: crowds.loss(shuffled(eps_local=31.0))),
        (BAD, "interval > 0", lambda: crowds.loss(TWO, interval=0.0)),
    ],
    crowds.most_sampled_coordinates: [
        (BAD, "0 <= delta <= 1", lambda: crowds.most_sampled_coordinates(FULL, delta=-1.0))
    ],
    crowds.pair: [
        (OUTSIDE, "binary randomized response", lambda: crowds.pair(TERNARY)),
        (OUTSIDE, "colluders see", lambda: crowds.pair(DROPPED)),
        (OUTSIDE, "no dominating pair here for Personalized", lambda: crowds.resolution(BUDGETS)),
    ],
    crowds.renyi: [
        (OUTSIDE, "binary randomized response", lambda: crowds.renyi(TERNARY, ORDERS + 1)),
        (BAD, "every order > 1", lambda: crowds.renyi(TWO, ORDERS)),
    ],
    crowds.resolution: [(OUTSIDE, "binary randomized response", lambda: crowds.resolution(TERNARY))],
    crowds.overflow_delta: [(OUTSIDE, "no dominating pair here for Gaussian", lambda: crowds.overflow_delta(NOISE))],
    crowds.theorem: [(OUTSIDE, "no dominating pair here for Gaussian", lambda: crowds.theorem(NOISE))],
    personalized.delta: [(BAD, "victim", lambda: personalized.delta(BUDGETS, eps=0.1, victim=7))],
    personalized.eps: [(BAD, "0 < delta < 1", lambda: personalized.eps(BUDGETS, delta=0.0))],
    personalized.bounds_per_user: [
        (BAD, "0 < delta < 1", lambda: personalized.bounds_per_user(BUDGETS, delta=1.0)),
    ],
    personalized.renyi: [(BAD, "victim", lambda: personalized.renyi(BUDGETS, ORDERS + 1, victim=-1))],
    privunit.least_variance_cap: [
        (OUTSIDE, "eps_local=600.0 is above 500", lambda: privunit.least_variance_cap(dim=10, eps_local=600.0)),
        (BAD, "dim >= 2", lambda: privunit.least_variance_cap(dim=1, eps_local=1.0)),
    ],
    privunit.cap_mass: [(BAD, "0 <= threshold <= 1", lambda: privunit.cap_mass(dim=10, threshold=1.5))],
    privunit.eps: [(OUTSIDE, "no mass to compute with", lambda: privunit.eps(SLIVER))],
    privunit.mean_projection: [(OUTSIDE, "no mass to compute with", lambda: privunit.mean_projection(SLIVER))],
    privunit.rms_error: [(OUTSIDE, "no mass to compute with", lambda: privunit.rms_error(SLIVER))],
    releases.losses: [
        (
            OUTSIDE,
            "Gaussian noise with FixedSize",
            lambda: releases.losses(NOISE, FixedSize(size=2, population=9), 0.1),
        ),
        (OUTSIDE, "Personalized", lambda: releases.losses(BUDGETS, Poisson(prob=0.5), 0.1)),
    ],
    releases.release_of: [
        (OUTSIDE, "no release is registered for str", lambda: releases.release_of("an event")),
        (OUTSIDE, "Gaussian has no pure guarantee", lambda: releases.release_of(NOISE).pure_eps),
        (OUTSIDE, "what one client's reports reveal", lambda: releases.release_of(NOISE).local_bound(delta=0.1)),
        (OUTSIDE, "how records enter a sum", lambda: releases.release_of(NOISE).of_replaced_item()),
    ],
    releases.releases: [
        (
            BAD,
            "called 'Gaussian' is registered already",
            lambda: releases.releases(type("Gaussian", (), {}))(releases.Release),
        )
    ],
    releases.renyi: [
        (OUTSIDE, "Laplace noise with Poisson", lambda: releases.renyi(PURE, Poisson(prob=0.5), (2.0,))),
        (OUTSIDE, "without a guarantee", lambda: releases.renyi(NOTHING, Everyone(), (2.0,))),
    ],
    selection.renyi_of_best: [
        (BAD, "every order > 1", lambda: selection.renyi_of_best(ORDERS, ORDERS, eta=1.0, gamma=0.5)),
        (BAD, "0 < gamma < 1", lambda: selection.renyi_of_best(ORDERS + 1, ORDERS, eta=1.0, gamma=1.0)),
    ],
    selection.expected_trials: [(BAD, "eta > -1", lambda: selection.expected_trials(eta=-1.0, gamma=0.5))],
    selection.gamma_for: [
        (BAD, "trials > 1, got mean=1.0", lambda: selection.gamma_for(1.0, eta=1.0)),
        (BAD, "gamma >= 1e-06 can give", lambda: selection.gamma_for(1e9, eta=1.0)),
    ],
    selection.most_trials: [(BAD, "eta > -1", lambda: selection.most_trials(eta=-1.0, gamma=0.5))],
    selection.trials_at_quantile: [
        (BAD, "0 <= uniform < 1", lambda: selection.trials_at_quantile(1.0, eta=1.0, gamma=0.5)),
    ],
    groups.subject_bound: [
        (
            OUTSIDE,
            "for a subject already",
            lambda: groups.subject_bound([Round(mechanism=SUBJECT, participation=Everyone())], users=2, delta=0.1),
        ),
        (BAD, "users >= 1", lambda: groups.subject_bound([], users=0, delta=0.1)),
    ],
    split_and_mix.calibrate: [
        (OUTSIDE, "need more than 32 shares", lambda: by_shares(num_users=3, delta=1e-12)),
        (BAD, "rounds >= 1", lambda: by_shares(rounds=0)),
        (BAD, "0 < mixing_share < 1", lambda: by_shares(mixing_share=1.0)),
    ],
    split_and_mix.delta: [(BAD, "eps >= 0", lambda: split_and_mix.delta(SHARES, eps=-1.0))],
    split_and_mix.eps: [
        (OUTSIDE, "spent beside the noise", lambda: split_and_mix.eps(OPEN, delta=1e-6)),
        (BAD, "rounds to be a whole number", lambda: split_and_mix.eps(SHARES, delta=1e-6, rounds=1.5)),
    ],
    split_and_mix.modulus_for: [
        (BAD, "norm > 0", lambda: split_and_mix.modulus_for(num_users=9, norm=0.0, noise_variance=1.0)),
    ],
    gaussian.log_ratio_slack: [
        (OUTSIDE, "variance >= 100", lambda: gaussian.log_ratio_slack([gaussian.SkellamDraws(1, 99.0)], tail=0.1)),
        (OUTSIDE, "too far", lambda: gaussian.log_ratio_slack([gaussian.SkellamDraws(1, 500.0)], tail=1e-6)),
        (BAD, "0 < tail < 1", lambda: gaussian.log_ratio_slack([], tail=0.0)),
    ],
    gaussian.eps_by_ratio: [
        (BAD, "0 < delta < 1", lambda: gaussian.eps_by_ratio(lambda delta: 1.0, [], delta=0.0)),
    ],
    gaussian.delta_by_ratio: [
        (BAD, "eps >= 0", lambda: gaussian.delta_by_ratio(lambda eps: 0.1, [], eps=-1.0)),
    ],
    gaussian.ratio_tail_cost: [(BAD, "eps >= 0", lambda: gaussian.ratio_tail_cost(lambda eps: 0.1, eps=-1.0))],
    gaussian.distance_delta: [
        (BAD, "eps >= 0", lambda: gaussian.distance_delta(1e-9, eps=-1.0)),
        (BAD, "divergence to be a finite number", lambda: gaussian.distance_delta(math.nan, eps=1.0)),
    ],
    skellam_sums.divergence_from_gaussian: [
        (OUTSIDE, "variance >= 100, got 99", lambda: skellam_sums.divergence_from_gaussian(99.0)),
        (BAD, "variance > 0", lambda: skellam_sums.divergence_from_gaussian(0.0)),
    ],
    skellam_sums.near_gaussian: [
        (
            OUTSIDE,
            "variance >= 100",
            lambda: skellam_sums.near_gaussian(sensitivity=1.0, coordinates=1, variance=1.0),
        ),
        (
            BAD,
            "sensitivity > 0",
            lambda: skellam_sums.near_gaussian(sensitivity=0.0, coordinates=1, variance=1e3),
        ),
    ],
    skellam_sums.near_gaussian_of: [
        (
            OUTSIDE,
            "variance >= 100",
            lambda: skellam_sums.near_gaussian_of(dataclasses.replace(SHARES, noise_variance=99.0)),
        ),
    ],
    split_and_mix.rounded_norm: [
        (
            BAD,
            "0 < rounding_tail < 1",
            lambda: split_and_mix.rounded_norm(clip_norm=1.0, scale=1.0, coordinates=2, rounding_tail=0.0),
        ),
    ],
    split_and_mix.shares_for: [
        (OUTSIDE, "more than 32 shares", lambda: split_and_mix.shares_for(num_users=2, modulus=64, target=1e-12)),
        (OUTSIDE, "modulus >= num_users", lambda: split_and_mix.shares_for(num_users=99, modulus=64, target=1e-2)),
    ],
    split_and_mix.mixing_delta: [(BAD, "eps >= 0", lambda: split_and_mix.mixing_delta(SHARES, -1.0))],
    subjects.delta: [(BAD, "eps >= 0", lambda: subjects.delta(SUBJECT, rounds=1, eps=-1.0))],
    subjects.eps: [
        (OUTSIDE, "more than 64 ways", lambda: subjects.eps(SPREAD, rounds=1, delta=0.1)),
        (BAD, "rounds >= 1", lambda: subjects.eps(SUBJECT, rounds=0, delta=0.1)),
    ],
    replaced_users.law_of_binomial_draws: [(BAD, "0 < prob < 1", lambda: replaced_users.law_of_binomial_draws(2, 1.0))],
    replaced_users.law_of_hypergeometric_draws: [
        (
            OUTSIDE,
            "more than are drawn",
            lambda: replaced_users.law_of_hypergeometric_draws(6, FixedSize(size=5, population=10)),
        ),
        (BAD, "users <= 4", lambda: replaced_users.law_of_hypergeometric_draws(5, FixedSize(size=1, population=4))),
    ],
    replaced_users.poisson_delta: [
        (
            BAD,
            "eps >= 0",
            lambda: replaced_users.poisson_delta(replaced_users.law_of_binomial_draws(2, 0.5), 1.0, -1.0),
        ),
    ],
    replaced_users.fixed_size_delta: [
        (
            BAD,
            "eps >= 0",
            lambda: replaced_users.fixed_size_delta(replaced_users.law_of_binomial_draws(2, 0.5), 1.0, -1.0),
        ),
    ],
    subjects.law_of_items_in_sum: [(BAD, "a split of items=2", lambda: subjects.law_of_items_in_sum(SUBJECT, (2, 1)))],
    subjects.losses: [
        (OUTSIDE, "more than 64 ways", lambda: subjects.losses(SPREAD, interval=0.1)),
        (BAD, "interval > 0", lambda: subjects.losses(SUBJECT, interval=0.0)),
    ],
    subjects.gaussian_of_users_together: [
        (BAD, "users >= 1", lambda: subjects.gaussian_of_users_together(NOISE, users=0))
    ],
    subjects.resolution: [(OUTSIDE, "more than 64 ways", lambda: subjects.resolution(SPREAD))],
    subjects.loss_std_and_width: [(OUTSIDE, "more than 64 ways", lambda: subjects.loss_std_and_width(SPREAD))],
    subjects.law_of_shift: [(BAD, "a split of items=2", lambda: subjects.law_of_shift(SUBJECT, (3,)))],
    subjects.splits_to_check: [(OUTSIDE, "more than 64 ways", lambda: subjects.splits_to_check(SPREAD))],
    symmetric.composed_loss: [
        (OUTSIDE, "loss of 31", lambda: symmetric.composed_loss(np.copy, 31.0, std=1.0, folds=1, interval=0.1)),
        (BAD, "interval > 0", lambda: symmetric.composed_loss(np.copy, 1.0, std=1.0, folds=1, interval=0.0)),
    ],
    symmetric.renyi: [(BAD, "every order > 1", lambda: symmetric.renyi(ORDERS, np.zeros(1), np.ones(1)))],
    symmetric.spread_to_grid: [
        (
            BAD,
            "a grid from 0 to 0.9",
            lambda: symmetric.spread_to_grid(np.array([0.9]), np.ones(1), np.array([0.0, 0.5])),
        ),
    ],
    # ------------------------------------------------------------ published formulas
    flame.bennett: [
        (OUTSIDE, "no gain over eps_local", lambda: flame.bennett(report("laplace", 4.0), num_users=9, delta=1e-9)),
        (OUTSIDE, "not generic reports", lambda: flame.bennett(report("generic"), num_users=100, delta=1e-3)),
    ],
    flame.corollary1: [
        (OUTSIDE, "needs .* eps_local <= ", lambda: flame.corollary1(eps_local=9.0, num_users=1000, delta=1e-6))
    ],
    flame.lemma1: [
        (OUTSIDE, "central eps <= 1", lambda: flame.lemma1(eps_local=2.0, levels=2, num_users=1000, delta=1e-6)),
    ],
    flame.lemma2: [(BAD, "eps >= 0", lambda: flame.lemma2(eps=-1.0, folds=2))],
    flame.lemma3: [
        (BAD, "0 < delta_slack < 1", lambda: flame.lemma3(eps=1.0, delta=0.0, folds=2, delta_slack=0.0)),
    ],
    flame.lemma4: [(BAD, "size <= 2", lambda: flame.lemma4(eps=1.0, delta=0.0, size=3, population=2))],
    flame.messages_range: [(BAD, "nu >= 1", lambda: flame.messages_range(nu=0.5, beta=0.1))],
    flame.ss_double: [
        (OUTSIDE, "delta_cd / beta < 1", lambda: flame.ss_double(rarely(), delta=0.9)),
        (BAD, "0 < delta < 1", lambda: flame.ss_double(FULL, delta=1.0)),
    ],
    flame.ss_simple: [
        (OUTSIDE, "central eps <= 1", lambda: flame.ss_simple(TWO, delta=1e-6, evaluation="closed")),
        (BAD, "evaluation to be one of", lambda: flame.ss_simple(TWO, delta=1e-6, evaluation="exact")),
    ],
    flame.ss_topk: [
        (OUTSIDE, "no gain over eps_local", lambda: flame.ss_topk(DROPPED, delta=1e-9)),
        (BAD, "0 < delta < 1", lambda: flame.ss_topk(DROPPED, delta=0.0)),
    ],
    flame.theorem1: [
        (
            BAD,
            "linkage to be one of",
            lambda: flame.theorem1(eps_each=0.1, delta_each=1e-6, coordinates=2, linkage="none"),
        ),
    ],
    flame.theorem4: [(BAD, "eps >= 0", lambda: flame.theorem4(eps_each=-0.1, delta_each=1e-6, selected=2))],
    flame.theorem5: [(OUTSIDE, "no index privacy", lambda: flame.theorem5(num_users=1000, pad_to=39, beta=0.02))],
    apes.apes: [
        (OUTSIDE, "blocks of 100", lambda: apes.apes(few_budgets(), delta=0.1)),
        (BAD, "0 < delta_shuffle < 1", lambda: apes.apes(MANY_BUDGETS, delta=0.0)),
    ],
    apes.echo_numerical: [(OUTSIDE, "blocks of 100", lambda: apes.echo_numerical((0.05,) * 150, delta=0.1))],
    apes.equation2: [
        (OUTSIDE, "eq. 2 needs eps_local <= ", lambda: apes.equation2((4.0,) * 1000, delta=1e-8)),
        (BAD, "every eps_local > 0", lambda: apes.equation2((0.1, math.nan), delta=1e-6)),
    ],
    apes.ldp_min: [(BAD, "0 < delta_slack < 1", lambda: apes.ldp_min(BUDGETS, delta=0.0))],
    apes.pldp: [(BAD, "0 <= delta <= 1", lambda: apes.pldp(BUDGETS, delta=-1.0))],
    apes.proposition1: [
        (
            BAD,
            "kept >= 1",
            lambda: apes.proposition1(eps_each=0.1, delta_each=1e-6, kept=0, delta_slack=1e-6),
        ),
    ],
    apes.s_apes: [(BAD, "1 <= kept <= 1", lambda: apes.s_apes(MANY_BUDGETS, delta=0.1, kept=3))],
    apes.theorem4: [
        (OUTSIDE, "needs 317 echoes", lambda: apes.theorem4((4.0,) * 1000)),
        (BAD, "at least 2 users", lambda: apes.theorem4((0.1,))),
    ],
    apes.unis: [(OUTSIDE, "blocks of 100", lambda: apes.unis(few_budgets(), delta=0.1, delta_shuffle=0.1))],
    apes.unis_numerical: [(OUTSIDE, "blocks of 100", lambda: apes.unis_numerical((0.05,) * 150, delta=0.1))],
    geyer.communication_cost: [(BAD, "clients >= 0", lambda: geyer.communication_cost([3, -1]))],
    geyer.dp_fl: [
        (OUTSIDE, "not in batches that are fixed", lambda: geyer.dp_fl(once(NOISE, Disjoint(epoch=0)), delta=1e-5)),
        (OUTSIDE, "under add-remove", lambda: geyer.dp_fl(once(REPLACED, Poisson(prob=0.5)), delta=1e-5)),
        (BAD, "clip to be one of", lambda: geyer.dp_fl(once(NOISE, Poisson(prob=0.5)), delta=1e-5, clip="mean")),
    ],
    geyer.noise_multiplier: [
        (
            BAD,
            "accountant to be one of",
            lambda: geyer.noise_multiplier(prob=0.5, rounds=1, eps=8.0, delta=1e-3, accountant="zcdp"),
        ),
    ],
    subdp.central_sub: [
        (
            OUTSIDE,
            "too low for groups of 40",
            lambda: subdp.central_sub(once(NOISE, Poisson(prob=0.5)), delta=1e-5, items_per_subject=40),
        ),
    ],
    subdp.local_sub: [
        (
            OUTSIDE,
            "too low for groups of 40",
            lambda: subdp.local_sub(once(NOISE, Poisson(prob=0.5)), delta=1e-5, items_per_subject=40),
        ),
    ],
    subdp.noise_scale: [
        (OUTSIDE, "orders up to 32", lambda: subdp.noise_scale(eps=2.0, delta=1e-5, group=5, prob=0.01, steps=10)),
    ],
    survey.amplification_erlingsson: [
        (BAD, "num_users >= 2", lambda: survey.amplification_erlingsson(eps_local=1.0, num_users=1, delta=0.1)),
    ],
    survey.amplification_multi: [
        (BAD, "0 < delta < 1", lambda: survey.amplification_multi(eps_local=1.0, num_users=100, delta=1.0)),
    ],
    survey.amplification_single: [
        (
            OUTSIDE,
            "needs .* eps_local <= ",
            lambda: survey.amplification_single(eps_local=9.0, num_users=100, delta=1e-6),
        ),
    ],
    survey.binary_sum_estimate: [
        (OUTSIDE, "every report", lambda: survey.binary_sum_estimate(reports_sum=1, num_users=2, prob_random=1.0)),
    ],
    survey.error_shuffled_response: [
        (BAD, "0 < delta < 1", lambda: survey.error_shuffled_response(eps=1.0, delta=1.0)),
    ],
}

# Nothing is outside these: they answer for every event (which has checked itself) or every order.
EVERYWHERE = {
    adaptive.add_up: "any bounds add up",
    adaptive.total_gaussian_mu: "None for what is not Gaussian",
    adaptive.total_delta: "any bounds add up, to 1 at most",
    exposure.distinct: "any rounds",
    numerics.lower_hull: "any points at rising x",
    numerics.power: "any array to any power",
    numerics.decaying_norm: "any slope from 0 up",
    numerics.as_eps_bound: "what is no number becomes infinite",
    numerics.as_probability_bound: "what is no probability becomes 1",
    numerics.smallest_bound: "what is no number is left out",
    numerics.exp_or_infinity: "infinite where it would overflow",
    numerics.binomial_outward_factor: "any number of trials has its factor",
    numerics.law_of_sum: "any laws on any circle; what is wrapped around adds",
    numerics.transform_error: "any length has its error",
    numerics.fourier_coefficients: "any law on any circle; what is wrapped around adds",
    personal.budget_range: "users of an event, whose budgets are checked there",
    personal.split_by_budget: "users of an event, and any budget",
    numerics.decaying_sums: "any numbers that are not negative, and any slope from 0 up",
    blanket.clip_laplace_blanket_probs: "any budgets",
    blanket.level_blanket_probs: "any budgets",
    symmetric.law_of_lower_hull: "any points have a hull",
    personal.budgets_of: "any event",
    personal.budget_classes: "any event",
    personal.hiding_coins: "any event",
    personal.users_by_budget: "any event",
    personal.delta_curve: "where there is no blanket the clones are left",
    personal.victim_groups: "every user is in a group",
    personal.halve_group: "a group that cannot be halved is one",
    binomial.coarsen_counts: "any law of counts",
    symmetric.composition_interval: "any pair",
    loss_distributions.symmetrize: "any distribution has its mirror image",
    exposure.without_sampling: "None where it would not hold",
    loss_distributions.from_dp_accounting: "a distribution was made by dp-accounting, which has checked it",
    skellam_sums.sensitivity: "any event: it was checked when it was made",
    skellam_sums.renyi: "an order without a bound costs inf",
    subjects.gaussian_if_all_sampled: "None where items are sampled",
}


def a_grid():
    grid = blanket_grid.Grid(bottom=-1.0, top=1.0, step=0.1)
    grid.add_points(np.array([0.5]), np.ones(1))
    return grid


def a_loss():
    return mixtures.loss(SHIFTS, interval=0.1)


def a_pair():
    return symmetric.pair_dominating_curve(lambda eps: 0.1, eps_pure=1.0)


def a_law():
    return clones.CloneCounts(counts=np.arange(2), weights=np.ones(2) / 2, below=0.0, above=0.0)


def gaussian_rounds():
    return [Round(mechanism=Gaussian(std=1.0, sensitivity=1.0, neighbors=ADD), participation=Everyone())]


def sampled_rounds():
    return [dataclasses.replace(of_all, participation=Poisson(prob=0.5)) for of_all in gaussian_rounds()]


def noiseless():
    return Gaussian(std=0.0, sensitivity=1.0, neighbors=ADD)


def ternary_topk():
    return PaddedTopk(report=report(levels=3), num_users=9, pad_to=9, top=1, decoys=0)


def rarely():
    return PaddedBernoulli(report=report(), num_users=9, pad_to=5, inclusion=0.01, coordinates=2)


def few_budgets():
    return Personalized(kind="clip_laplace", eps_locals=(0.05,) * 150)


def by_shares(**changes):
    asked = {"num_users": 50, "coordinates": 2, "clip_norm": 1.0, "eps": 1.0, "delta": 1e-6}
    return split_and_mix.calibrate(**(asked | changes))


def public_functions():
    """Every function in the ``__all__`` of a module whose name has no leading underscore, once."""
    found = {}
    for package in (dovetail.accounting, dovetail.claims):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.rpartition(".")[2].startswith("_"):
                public = importlib.import_module(module.name)
                for name in getattr(public, "__all__", ()):
                    if inspect.isroutine(inspect.unwrap(getattr(public, name))):
                        found.setdefault(getattr(public, name), f"{module.name.partition('.')[2]}.{name}")
    return found


def test_every_public_function_is_asked_outside_its_region():
    named = public_functions()
    missing = [name for function, name in named.items() if function not in CASES and function not in EVERYWHERE]
    assert not missing, "add a case for each"
    unknown = [function for function in (*CASES, *EVERYWHERE) if function not in named]
    assert not unknown, "not public, or gone"
    assert all(CASES.values())
    assert all(says for cases in CASES.values() for _, says, _ in cases)


QUESTIONS = [
    pytest.param(*case, id=f"{function.__module__.rpartition('.')[2]}.{function.__name__}-{index}")
    for function, cases in CASES.items()
    for index, case in enumerate(cases)
]


@pytest.mark.parametrize(("refusal", "says", "ask"), QUESTIONS)
def test_a_refusal_and_its_reason(refusal, says, ask):
    with pytest.raises(refusal, match=says) as raised:
        ask()
    assert isinstance(raised.value, NotApplicable) == (refusal is OUTSIDE)
    assert len(str(raised.value)) > 15
