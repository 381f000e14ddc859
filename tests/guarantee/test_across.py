"""What runs on the same people spend together, each chosen after seeing the ones before: totals against brute force."""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import norm

from dovetail.accounting import adaptive, gaussian
from dovetail.events import Disjoint, Poisson
from dovetail.guarantee import across, quotes
from dovetail.guarantee.across import RunSpending
from dovetail.statements import TUNING_ASSUMPTION, Bound, Neighbors, Proof, Trust, Unit, Verdict

DELTA = 1e-5


def record(name="dp_fl", *, relation=None, participation=None, rounds=1, size=1000, **settings):
    terms = quotes.Terms(num_users=size, dim=10, delta=DELTA, rounds=rounds)
    changes = {"neighbors": relation, "participation": participation}
    terms = dataclasses.replace(terms, **{key: value for key, value in changes.items() if value is not None})
    settings = settings or {"noise_multiplier": 4.0}
    return RunSpending.from_record(quotes.guarantee(name, dataclasses.replace(terms, settings=settings)).record())


SHUFFLED = {"clip_value": 0.3, "eps_local": 0.5, "k": 3}


def eps_of(run):
    return run.statement.eps


def test_gaussian_runs_add_up_by_the_root_of_the_sum_of_squares():
    runs = [record(noise_multiplier=noise) for noise in (3.0, 4.0, 9.0)]
    (together,) = across.compose_runs(runs)
    mu = math.sqrt(sum(gaussian.mu_of(eps_of(run), delta=DELTA) ** 2 for run in runs))
    assert together.eps == pytest.approx(gaussian.eps_of(mu, delta=3 * DELTA), rel=1e-6)
    assert together.delta == 3e-5
    assert together.eps < sum(map(eps_of, runs))
    assert "dovetail.across-runs" in together.proof.key
    assert across.ODOMETER in together.assumptions and TUNING_ASSUMPTION not in together.assumptions


@pytest.mark.parametrize(
    "deltas", [(1e-5,) * 2, (1e-5,) * 3, (1e-5, 1e-6, 3e-7), (0.1,) * 3, (1 / 3, 1e-9), (0.9, 0.9)]
)
def test_the_sum_of_deltas_is_never_rounded_down(deltas):
    total = adaptive.total_delta([Bound(eps=1.0, delta=delta, proof=Proof()) for delta in deltas])
    exact = sum(map(Fraction, deltas))
    assert total == 1.0 if exact > 1 else exact <= Fraction(total) <= exact * (1 + Fraction(1, 10**11))


def test_batches_of_different_runs_are_not_disjoint():
    one = record(rounds=4, participation=Disjoint(epoch=0))
    (together,) = across.compose_runs([one, one])
    assert together.eps > 1.3 * eps_of(one)


def test_one_run_states_what_it_states_alone_and_more_never_less():
    runs = [record(), record(rounds=5), record("ss_topk", **SHUFFLED), record()]
    (alone,) = across.compose_runs(runs[:1])
    assert (alone.eps, alone.delta) == (eps_of(runs[0]), DELTA)
    totals = [across.compose_runs(runs[:count])[0] for count in range(1, 5)]
    assert all(before.eps < after.eps and before.delta < after.delta for before, after in itertools.pairwise(totals))


def test_other_runs_add_up_by_eps_and_delta_and_by_the_accountant_if_they_were_fixed():
    run = record(rounds=20, participation=Poisson(prob=0.01), size=10)
    (together,) = across.compose_runs([run, run])
    assert 2 * eps_of(run) <= together.eps < 2.0001 * eps_of(run)
    fixed = across.compose_runs_fixed_beforehand([run, run])
    assert eps_of(run) < fixed.eps < 0.9 * together.eps and fixed.delta == together.delta
    assert across.ODOMETER not in fixed.assumptions
    assert across.compose_runs_fixed_beforehand([run]) is None


def test_parties_that_are_trusted_anywhere_are_trusted_in_all():
    (together,) = across.compose_runs([record("ss_topk", **SHUFFLED), record()])
    assert together.trust is Trust.CURATOR
    assert "analyzer" in together.adversary and "observer" in together.adversary
    said = {text for run in (record("ss_topk", **SHUFFLED), record()) for text in run.statement.assumptions}
    assert said - {TUNING_ASSUMPTION} <= set(together.assumptions)


def test_relations_become_replacement():
    add, replace = record(relation=Neighbors.ADD_REMOVE), record(relation=Neighbors.REPLACE_ONE)
    assert eps_of(add) < eps_of(replace)
    (together,) = across.compose_runs([add, replace])
    (expected,) = across.compose_runs([replace, replace])
    assert together.neighbors is Neighbors.REPLACE_ONE
    assert (together.eps, together.delta) == (expected.eps, expected.delta)


def test_units_that_no_statement_covers_together_are_stated_apart():
    users = record()
    people = record("central_sub", clip_norm=1.0, noise_multiplier=5.0, batch=50, sampling_rate=0.05)
    both = across.compose_runs([users, people, users])
    assert {statement.unit for statement in both} == {Unit.USER, people.statement.unit} and len(both) == 2
    assert both[0].span == "2 runs" and both[1].span == "1 run"


def with_verdict(run, verdict):
    return RunSpending.from_record(dataclasses.replace(run.record, verdict=verdict))


def test_runs_without_a_bound_are_said_to_have_none():
    run = record()
    assert run.reason_without_bound is None
    assert "seed" in with_verdict(run, Verdict.REPRODUCIBLE).reason_without_bound
    assert record(clip="median", noise_multiplier=4.0).reason_without_bound is not None


def test_what_is_declared_of_one_run_is_declared_of_all():
    (together,) = across.compose_runs([record(), with_verdict(record(), Verdict.DECLARED)])
    assert together.verdict is Verdict.DECLARED


def test_a_run_whose_rounds_cannot_be_read_counts_by_its_statement():
    run = record()
    unread = dataclasses.replace(run, record=None)
    (together,) = across.compose_runs([run, unread])
    assert 2 * eps_of(run) <= together.eps < 2.0001 * eps_of(run)
    assert across.compose_runs_fixed_beforehand([run, unread]) is None


POINTS = np.linspace(-12, 16, 20_001)


def exceeds(first, branch, eps):
    """Hockey-stick divergence at eps of a Gaussian run and of what is chosen by its output.

    Arguments:
        first: mu of the first run.
        branch: from outputs and the eps that is left at each to the hockey-stick divergence of what follows there.
    """
    losses = first * POINTS - first**2 / 2
    density = norm.pdf(POINTS - first)
    return np.trapezoid(density * branch(POINTS, eps - losses), POINTS)


def delta_of(mu, eps):
    """Hockey-stick divergence of N(mu, 1) from N(0, 1), also at negative eps."""
    mu = np.maximum(mu, 1e-12)
    return norm.cdf(mu / 2 - eps / mu) - np.exp(np.minimum(eps, 700)) * norm.cdf(-mu / 2 - eps / mu)


@pytest.mark.parametrize("spend", ["more after large outputs", "more after small ones", "at random", "all"])
def test_an_analyst_who_chooses_the_noise_by_what_was_seen_gets_no_more_than_the_total(spend):
    """Among the outputs after which no more than the total is spent (docs/proofs/across-runs.md)."""
    eps, first, total = 1.0, 0.4, 0.8
    left = math.sqrt(total**2 - first**2)
    chosen = {
        "more after large outputs": np.where(POINTS > 0.5, left, 2 * left),
        "more after small ones": np.where(POINTS > 0.5, 2 * left, left * np.exp(-(POINTS**2))),
        "at random": np.random.default_rng(0).uniform(0, 1.5 * left, len(POINTS)),
        "all": np.full(len(POINTS), left),
    }[spend]
    within = chosen <= left
    counted = exceeds(first, lambda y, rest: within * delta_of(chosen, rest), eps)
    assert counted <= gaussian.delta_of(total, eps=eps) * (1 + 1e-6)
    assert counted > 0.99 * gaussian.delta_of(total, eps=eps) or spend != "all"
    everything = exceeds(first, lambda y, rest: delta_of(chosen, rest), eps)
    assert within.all() or everything > counted


def test_a_ceiling_that_prices_runs_in_two_ways_costs_twice_its_delta_at_most():
    """By the first output the analyst takes another Gaussian run, or a pure one: each alone fills the ceiling."""
    eps, delta, first = 1.0, 1e-3, 0.2
    total = gaussian.mu_of(eps, delta=delta)
    second = math.sqrt(total**2 - first**2)
    pure = eps - gaussian.eps_of(first, delta=delta)

    def gaussian_run(y, rest):
        return delta_of(second, rest)

    def pure_run(y, rest):
        worst = math.exp(pure) / (1 + math.exp(pure))
        truth = worst - np.exp(np.minimum(rest, 700)) * (1 - worst)
        lie = (1 - worst) - np.exp(np.minimum(rest, 700)) * worst
        return np.maximum(truth, 0) + np.maximum(lie, 0)

    for alone in (gaussian_run, pure_run):
        assert exceeds(first, alone, eps) <= delta * (1 + 1e-6)
    either = exceeds(first, lambda y, rest: np.maximum(gaussian_run(y, rest), pure_run(y, rest)), eps)
    assert delta < either <= 2 * delta
