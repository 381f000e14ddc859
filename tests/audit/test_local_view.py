"""The victim's own reports: as much as the local statement promises at delta 0, and never more."""

import math

import numpy as np
import pytest
from scipy.special import ive

from dovetail.audit import attacks
from dovetail.audit.attacks import sums
from dovetail.audit.bounds import best_bound
from dovetail.events import FixedSize
from dovetail.guarantee import quotes
from dovetail.statements import NotApplicable


def plan(*, num_users=100, dim=20, delta=5e-6, participation=None, **settings):
    more = {} if participation is None else {"participation": participation}
    return quotes.Terms(num_users=num_users, dim=dim, delta=delta, settings=settings, **more)


def audited(name: str, asked: quotes.Terms, delta: float) -> float:
    protocol, cohort = quotes.settle_protocol(name, asked)
    return best_bound(
        [exact_attack.eps(delta=delta) for exact_attack in attacks.attacks_on_own_reports(protocol, cohort, asked.dim)]
    ).eps


REACHED = {
    "ss_simple": ("ss_simple", plan(eps_local=0.3)),
    "ss_simple, laplace": ("ss_simple", plan(eps_local=0.3, randomizer="laplace")),
    "ss_simple, levels": ("ss_simple", plan(eps_local=0.3, randomizer="rr", levels=4)),
    "ss_topk": ("ss_topk", plan(k=5, eps_local=0.5)),
    "binary_sum": ("binary_sum", plan(dim=1, eps_local=1.0)),
    "real_sum, single": ("real_sum", plan(dim=1, eps_local=2.0)),
    "real_sum, unary": ("real_sum", plan(dim=1, eps_local=2.0, method="unary")),
    "privunit": ("privunit", plan(eps_local=4.0)),
    "apes": ("apes", plan(budgets=[0.05, 1.0])),
    "apes, wider": ("apes", plan(budgets=[0.05, 1.0], bound=2.0)),
    "unis": ("unis", plan(budgets=[0.05, 1.0], num_users=10, dim=2)),
    "pldp": ("pldp", plan(budgets=[0.05, 1.0])),
    "ldp_min": ("ldp_min", plan(budgets=[0.05, 1.0])),
    "ldp_fl, laplace": ("ldp_fl", plan(randomizer="laplace", eps_local=0.1, clip_value=1.0)),
    "ss_simple, FLAME's size": ("ss_simple", plan(eps_local=0.01, dim=7850, num_users=1000)),
}


@pytest.mark.parametrize(("name", "asked"), REACHED.values(), ids=REACHED)
def test_the_local_eps_is_reached_at_delta_0_and_never_passed(name, asked):
    protocol, cohort = quotes.settle_protocol(name, asked)
    exact_attacks = attacks.attacks_on_own_reports(protocol, cohort, asked.dim)
    stated = pure_eps(name, protocol, asked)
    found = best_bound([exact_attack.eps(delta=0.0) for exact_attack in exact_attacks]).eps
    assert found <= stated * (1 + 1e-9)
    assert found == pytest.approx(stated, rel=1e-6)
    assert best_bound([exact_attack.eps(delta=asked.delta) for exact_attack in exact_attacks]).eps < found


def pure_eps(name, protocol, asked) -> float:
    """What the randomizer promises for all reports of a client together."""
    match name:
        case "ss_topk":
            return protocol.k * protocol.eps_local
        case "binary_sum" | "real_sum":
            return protocol.slots * protocol.eps_local
        case "privunit":
            return protocol.eps_local
        case "apes" | "unis" | "pldp" | "ldp_min":
            return asked.dim * max(protocol.budgets)
    return asked.dim * protocol.eps_local


STATED = {
    "ss_double": ("ss_double", plan(beta=0.1, eps_local=0.5, pad_to=60)),
    "ss_double, as printed": ("ss_double", plan(beta=0.1, eps_local=0.5, pad_to=60, published=True)),
    "s_apes": ("s_apes", plan(budgets=[0.3, 1.0], num_users=10, dim=2, keep=0.5)),
    "ldp_fl": ("ldp_fl", plan(noise_multiplier=5.0, clip_norm=1.0)),
    "local_sub": ("local_sub", plan(items_per_subject=2, sampling_rate=0.1, noise_multiplier=2.0)),
}


@pytest.mark.parametrize(("name", "asked"), STATED.values(), ids=STATED)
def test_never_above_the_local_statement_at_its_own_delta(name, asked):
    statement = quotes.quote(name, asked).local
    found = audited(name, asked, statement.delta)
    assert 0.1 * statement.eps < found <= statement.eps


UNBOUNDED = {
    "ss_topk, no decoys": ("ss_topk", plan(k=5, eps_local=0.5, decoys=0, pad_to=60), True),
    "ss_topk, some decoys": ("ss_topk", plan(k=5, eps_local=0.5, decoys=7, pad_to=60), True),
    "dp_fl": ("dp_fl", plan(noise_multiplier=1.0), True),
    "dp_fl, sampled": ("dp_fl", plan(noise_multiplier=1.0, participation=FixedSize(size=100, population=400)), True),
    "fedavg": ("fedavg", plan(), True),
    "central_sub": ("central_sub", plan(items_per_subject=3, sampling_rate=0.1, noise_multiplier=1.0), True),
    "split_and_mix": ("split_and_mix", plan(noise_multiplier=8.0), False),
    "secagg": ("secagg", plan(noise_multiplier=8.0), False),
    "secagg, aggregators' noise": ("secagg", plan(noise_multiplier=8.0, noise="aggregators"), True),
    "real_sum, split": ("real_sum", plan(dim=1, method="split", noise_multiplier=2.0), False),
    "ldp_fl": ("ldp_fl", plan(noise_multiplier=1.0, clip_norm=1.0), False),
}


@pytest.mark.parametrize(("name", "asked", "also_above_0"), UNBOUNDED.values(), ids=UNBOUNDED)
def test_no_finite_eps_where_supports_differ_or_ratios_have_no_bound(name, asked, also_above_0):
    assert math.isinf(audited(name, asked, 0.0))
    at_delta = audited(name, asked, 5e-6)
    assert math.isinf(at_delta) == also_above_0
    assert at_delta > 1


def test_the_server_sees_only_who_is_drawn():
    asked = plan(noise_multiplier=1.0, participation=FixedSize(size=100, population=400))
    assert math.isinf(audited("dp_fl", asked, 0.2))
    assert audited("dp_fl", asked, 0.26) < 1e-6


def test_the_chance_that_decoys_hide_the_largest():
    protocol, cohort = quotes.settle_protocol("ss_topk", plan(dim=4, k=1, decoys=2, eps_local=0.5, pad_to=90))
    (exact_attack,) = attacks.attacks_on_own_reports(protocol, cohort, 4)
    np.testing.assert_allclose(np.exp(exact_attack.log_second), [2 / 3, 1 / 3])


def test_one_clients_skellam_noise_is_bounded_from_the_right_side():
    for variance, distance in ((4.0, 5), (0.1, 3), (50.0, 20)):
        tail = ive(np.arange(distance, distance + 400), variance).sum()
        assert sums._log_tail(variance, distance) >= math.log(tail)


def test_thresholds_on_one_clients_noisy_value_are_bounded_by_their_probabilities():
    asked = plan(dim=1, method="split", noise_multiplier=1.0, mix={"scale": 8.0})
    protocol, cohort = quotes.settle_protocol("real_sum", asked)
    variance, shift = protocol.sharing.part_variance, 8
    exact_attacks = [
        exact_attack
        for exact_attack in attacks.attacks_on_own_reports(protocol, cohort, 1)
        if "above" in exact_attack.attack
    ]
    assert exact_attacks
    for exact_attack in exact_attacks:
        above = int(exact_attack.attack.split()[-1])
        values = np.arange(-200, 201)
        masses = ive(np.abs(values), variance)
        assert math.exp(exact_attack.log_first[1]) <= masses[values + shift >= above].sum()
        assert math.exp(exact_attack.log_second[1]) >= masses[values >= above].sum()


def test_what_has_no_simple_law_is_refused():
    protocol, cohort = quotes.settle_protocol(
        "s_apes", plan(budgets=[0.3, 1.0], num_users=10, published=True, keep=0.5)
    )
    with pytest.raises(NotApplicable, match="depend on each other"):
        attacks.attacks_on_own_reports(protocol, cohort, 20)


@pytest.mark.parametrize(("noise", "delta", "truth"), [(8.0, 1e-5, 4.98), (8.0, 0.05, 1.86), (12.0, 0.3, 0.0)])
def test_a_clients_own_noise_is_not_thought_smaller_than_it_is(noise, delta, truth):
    """Bounds on two tails are no law: where they overlap they say nothing. Truths from the law itself."""
    asked = quotes.Terms(num_users=20, dim=1, delta=1e-5, settings={"noise_multiplier": noise})
    assert audited("split_and_mix", asked, delta) <= truth + 0.01
