"""Attacks on what the papers print: the claims that they refute, and their laws against the code."""

import itertools
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy.stats import binom, binomtest, chi2

from dovetail.accounting.releases.privunit import cap_mass
from dovetail.audit import exact
from dovetail.audit.attacks import curator, personal, shows_less_than_event, stronger_attacks
from dovetail.audit.attacks.curator import attack_scaled_noise
from dovetail.audit.attacks.flame import OneProbs, _count_full_dummy_messages, attack_whole_messages
from dovetail.audit.attacks.local import attack_privunit_round, cap_probs, mass_on_one_cap_alone
from dovetail.audit.bounds import best_bound
from dovetail.events import FixedSize, PaddedTopk, Personalized, Report, Shuffled
from dovetail.guarantee import quotes
from dovetail.shufflers import shuffle

DELTA = 5e-6


def plan(*, num_users=1000, dim=7850, delta=DELTA, **settings):
    return quotes.Terms(num_users=num_users, dim=dim, delta=delta, settings=settings)


def attacked(name: str, asked: quotes.Terms, delta: float = DELTA):
    protocol, cohort = quotes.settle_protocol(name, asked)
    return best_bound([exact_attack.eps(delta=delta) for exact_attack in stronger_attacks(protocol, cohort, asked.dim)])


@pytest.mark.parametrize(("randomizer", "eps"), [("rr2", 7.4258), ("laplace", 5.3804)])
def test_whole_messages_of_ss_double_refute_flame(randomizer, eps):
    asked = plan(beta=0.02, eps_local=0.5, pad_to=333, published=True, randomizer=randomizer)
    found = attacked("ss_double", asked)
    assert found.eps == pytest.approx(eps, rel=1e-3)
    assert "ones of 157" in found.attack
    quote = quotes.quote("ss_double", asked)
    assert quote.claimed.eps == pytest.approx(0.238, abs=1e-3)
    assert found.eps <= quote.certified.eps


@pytest.mark.parametrize(("kind", "off", "full"), [("rr", 1.3903, 2.0247), ("laplace", 1.2865, 1.8728)])
def test_ss_topk_as_printed_but_for_the_shuffle_refutes_flame(kind, off, full):
    report = Report(kind=kind, eps_local=0.5)
    event = PaddedTopk(report=report, num_users=1000, coordinates=7850, pad_to=333, top=157, decoys=0)
    found = exact.exact_attacks(event)
    signs = best_bound([exact_attack.eps(delta=DELTA) for exact_attack in found if "signs" in exact_attack.attack]).eps
    slots = best_bound([exact_attack.eps(delta=DELTA) for exact_attack in found if "full" in exact_attack.attack]).eps
    assert signs == pytest.approx(off, rel=1e-3)
    assert slots == pytest.approx(full, rel=1e-3)


def test_counts_and_indices_of_ss_topk_show_everything():
    kept = plan(k=157, eps_local=0.5, pad_to=333, decoys=0, overflow="keep")
    assert attacked("ss_topk", kept).is_unbounded
    some = plan(k=2, dim=10, eps_local=0.5, pad_to=333, decoys=4, overflow="keep")
    assert attacked("ss_topk", some, 0.4).is_unbounded
    assert attacked("ss_topk", some, 0.51).eps < 1e-6, "a decoy may stand where the victim's largest would"
    linked = plan(k=157, eps_local=0.5, pad_to=333, decoys=0, linkage="vector")
    assert attacked("ss_topk", linked).is_unbounded
    whole = plan(k=157, eps_local=0.5, linkage="vector")
    assert 30 < attacked("ss_topk", whole).eps <= quotes.quote("ss_topk", whole).certified.eps


def test_one_large_budget_among_small_ones_refutes_apes():
    budgets = (8.0,) + (0.05,) * 9999
    found = best_bound(
        [
            exact_attack.eps(delta=1e-8)
            for exact_attack in exact.exact_attacks(Personalized(kind="clip_laplace", eps_locals=budgets))
        ]
    )
    quote = quotes.quote("apes", plan(num_users=10_000, dim=1, delta=1e-8, budgets=list(budgets)))
    assert quote.claimed.eps == pytest.approx(0.0943, abs=1e-3)
    assert quote.claimed.eps < 0.13 < found.eps < quote.certified.eps < 0.134


def test_links_of_ss_simple_help_the_attack():
    asked = plan(eps_local=0.05, dim=300, num_users=100, published=True)
    linked = attacked("ss_simple", asked)
    assert "whole messages" in linked.attack
    apart = Shuffled(report=Report(kind="rr", eps_local=0.05), num_users=100, coordinates=300)
    assert (
        linked.eps
        > 1.05 * best_bound([exact_attack.eps(delta=DELTA) for exact_attack in exact.exact_attacks(apart)]).eps
    )


def test_whole_messages_by_enumeration():
    high, low, dummy = 0.7, 0.3, 0.5
    exact_attacks = attack_whole_messages(OneProbs(high, low, dummy), 2, others=1, dummies=1)

    def law(victim: float) -> dict:
        found: dict = {}
        for ones in itertools.product(range(3), repeat=3):
            weight = math.prod(binom.pmf(k, 2, p) for k, p in zip(ones, (victim, low, dummy), strict=True))
            found[tuple(sorted(ones))] = found.get(tuple(sorted(ones)), 0.0) + weight
        return found

    first, second = law(high), law(low)
    for eps in np.linspace(0, 1.5, 16):
        sides = ((first, second), (second, first))
        most = max(sum(max(0.0, p[seen] - math.exp(eps) * q[seen]) for seen in p) for p, q in sides)
        for exact_attack in exact_attacks:
            assert exact_attack.delta(eps=eps) <= most + 1e-12


@pytest.mark.parametrize(
    ("dummies", "width"), [(0, 3), (1, 1), (5, 1), (2, 3), (3, 3), (10, 3), (11, 3), (12, 3), (49, 3)]
)
def test_dummies_are_dealt_to_as_few_messages_as_hold_them(dummies, width):
    """In turn, so that their lengths differ by one at most: few are as long as a client's."""
    messages = max(1, math.ceil(dummies / width))
    lengths = np.bincount(np.arange(dummies) % messages, minlength=messages)
    assert _count_full_dummy_messages(dummies, width) == np.sum(lengths == width)


@pytest.mark.soak
def test_dummies_are_dealt_as_the_attack_counts_them():
    asked = plan(num_users=7, dim=10, beta=0.3, eps_local=0.5, pad_to=7, published=True)
    protocol, _ = quotes.settle_protocol("ss_double", asked)
    keys = jax.random.split(jax.random.key(0), 8)
    reports = jax.vmap(lambda key: protocol.randomize(jnp.ones(10), (), key=key))(keys[:7])
    seen = shuffle(reports, protocol.layout(10), key=keys[7])
    whole = int(jnp.sum(seen.valid.sum(axis=1) == 3))
    assert whole == 7 + _count_full_dummy_messages(10 * 7 - 7 * 3, 3)


def test_privunit_never_passes_the_certified_bound_and_caps_are_those_of_the_density():
    asked = plan(num_users=200, dim=20, eps_local=2.0)
    assert 0.3 < attacked("privunit", asked).eps <= quotes.quote("privunit", asked).certified.eps
    protocol, _ = quotes.settle_protocol("privunit", asked)
    local, direction = protocol.local_randomizer(20), np.eye(20)[3]
    mass = cap_mass(dim=20, threshold=local.cap.threshold)
    for prob, report in zip(cap_probs(protocol, 20), (direction, -direction), strict=True):
        assert prob == pytest.approx(mass * math.exp(local.log_density(report, direction)), rel=1e-8)


def alone_mass_in_thirty_digits(dim, threshold):
    """On a cap, less the nearer of the caps at 120 degrees, along every direction in their plane."""

    def beyond(cosine):
        length = threshold / cosine if cosine > threshold else 1
        return (1 - length**2) ** (mpmath.mpf(dim) / 2 - 1) if length < 1 else mpmath.mpf(0)

    def at(angle):
        return max(0, beyond(mpmath.cos(angle)) - beyond(mpmath.cos(2 * mpmath.pi / 3 - angle)))

    with mpmath.workdps(30):
        threshold = mpmath.mpf(threshold)
        end = mpmath.acos(threshold)
        cuts = sorted({*(end * k / 12 for k in range(13)), min(end, mpmath.pi / 3)})
        return float(mpmath.quad(at, cuts) / mpmath.pi)


@pytest.mark.parametrize(("dim", "threshold"), [(10, 0.25), (50, 0.1114), (7850, 0.008877)])
def test_the_mass_of_a_cap_alone_is_that_of_the_integral_and_of_points(dim, threshold):
    mass = mass_on_one_cap_alone(dim=dim, threshold=threshold)
    assert mass == pytest.approx(alone_mass_in_thirty_digits(dim, threshold), rel=1e-12)
    points = np.random.default_rng(0).normal(size=(400_000, 3))
    rest = np.random.default_rng(1).chisquare(dim - 3, 400_000)
    plane = points[:, :2] / np.sqrt((points**2).sum(axis=1) + rest)[:, None]
    turns = 2 * math.pi / 3 * np.arange(3)
    on = plane @ np.stack([np.cos(turns), np.sin(turns)]) >= threshold
    seen = int((on[:, 0] & ~on[:, 1] & ~on[:, 2]).sum())
    assert binomtest(seen, len(on), mass).pvalue > 1e-4
    assert binomtest(int(on[:, 0].sum()), len(on), mass).pvalue < 1e-9, "the whole cap is a near miss"


def test_caps_apart_show_most_of_what_privunit_certifies():
    asked = plan(eps_local=2.0)
    protocol, cohort = quotes.settle_protocol("privunit", asked)
    opposite, apart = (found.eps(delta=DELTA).eps for found in attack_privunit_round(protocol, cohort, asked.dim))
    certified = quotes.quote("privunit", asked).certified.eps
    assert opposite < 0.8 * certified < 0.93 * certified < apart <= certified


def test_the_median_shows_in_the_noise():
    found = attacked("dp_fl", plan(clip="median", noise_multiplier=1.0))
    assert found.eps == pytest.approx(134.57, rel=1e-3)
    assert attacked("dp_fl", plan(clip="median", noise_multiplier=1.0, dim=100)).eps > 8
    protocol, cohort = quotes.settle_protocol("dp_fl", plan(clip="median", noise_multiplier=1.0))
    for users in (10, 11):
        medians = [
            float(
                protocol.prepare(
                    protocol.init(2), noise_scale=1.0, norms=jnp.array(curator.norms_around_median(users, long=long))
                ).clip_norm
            )
            for long in (False, True)
        ]
        assert medians[1] / medians[0] == pytest.approx(1.1, rel=1e-5)
        changed = [
            i
            for i, (a, b) in enumerate(zip(*(curator.norms_around_median(users, long=x) for x in (0, 1)), strict=True))
            if a != b
        ]
        assert changed == [users - 1], "the worlds differ in one user"
    drawn = quotes.Terms(
        num_users=100,
        dim=10,
        delta=DELTA,
        participation=FixedSize(size=100, population=1000),
        settings={"clip": "median", "noise_multiplier": 1.0},
    )
    assert curator.attack_dp_fl_round(*quotes.settle_protocol("dp_fl", drawn), 10) == []
    assert curator.attack_dp_fl_round(protocol.__class__(clip_norm=1.0), cohort, 10) == []


def test_scaled_noise_is_a_chi_square_in_both_worlds():
    exact_attack = attack_scaled_noise("noise", 50, [(0.3, 1.0), (0.7, 1.5)], [(1.0, 1.0)])
    cuts = np.linspace(30, 150, 4000)
    sides = []
    for tail in (chi2.sf, chi2.cdf):
        p, q = 0.3 * tail(cuts, 50) + 0.7 * tail(cuts / 1.5, 50), tail(cuts, 50)
        sides += [(p, q), (q, p)]
    for delta in (1e-2, 1e-4):
        direct = max(float(np.log((p - delta)[p > delta] / q[p > delta]).max()) for p, q in sides)
        assert exact_attack.eps(delta=delta).eps == pytest.approx(direct, rel=1e-2)


def test_a_z_read_off_the_batch_shows_in_the_noise():
    every = plan(adaptive_z=True, items_per_subject=2, sampling_rate=1.0, noise_multiplier=1.0)
    assert attacked("central_sub", every).eps > 50
    rare = plan(adaptive_z=True, items_per_subject=5, sampling_rate=0.01, noise_multiplier=1.0)
    assert attacked("central_sub", rare).eps > 50
    assert attacked("central_sub", rare, 0.01).eps < 1, "two of five records meet in a batch once in a thousand times"
    steps = plan(adaptive_z=True, items_per_subject=2, sampling_rate=0.1, noise_multiplier=1.0, steps=4)
    assert attacked("local_sub", steps).eps > 50
    protocol, cohort = quotes.settle_protocol("central_sub", every)
    close = curator.attack_subjects_round(protocol, cohort, 101, noise_multiplier_of=lambda z: 1 + 0.05 * (z - 1))
    direct = attack_scaled_noise("noise", 100, [(1.0, 1.05**2)], [(1.0, 1.0)])
    assert close[0].eps(delta=1e-3).eps == direct.eps(delta=1e-3).eps
    fixed = plan(items_per_subject=2, sampling_rate=1.0, noise_multiplier=1.0)
    assert curator.attack_subjects_round(*quotes.settle_protocol("central_sub", fixed), 100) == []


def test_sparsified_reports_have_the_law_of_the_code():
    asked = plan(num_users=4, dim=4, clip_value=1.0, budgets=[0.5, 2.0], keep=0.5)
    protocol, _ = quotes.settle_protocol("s_apes", asked)
    law = personal.laws_after_sparsifying(protocol, 4)
    draws = np.asarray(protocol.perturb(jnp.full(40_000, 1.0), jnp.asarray(2.0), key=jax.random.key(2)))
    masses = np.float64(law(np.array([2.0]), 1.0)[0])
    cut = protocol.threshold / 2
    cuts = np.unique(np.concatenate([np.linspace(0, 1, 65)[1:-1], [0.5 - cut, 0.5 + cut]]))
    seen = np.bincount(np.searchsorted(cuts, (draws + 1) / 2), minlength=len(masses))
    z = (seen - 40_000 * masses) / np.sqrt(40_000 * masses)
    assert np.abs(z).max() < 5.5  # alpha 4e-8 a cell, 65 cells
    assert masses.sum() == pytest.approx(1)


@pytest.mark.parametrize("sparsify", ["random", "top"])
def test_a_selection_that_keeps_everything_couples_no_reports(sparsify):
    """It is attacked as it would be without; where some are left out, nothing is known."""
    every, half = (
        quotes.settle_protocol("s_apes", plan(num_users=20, dim=4, budgets=[0.5, 2.0], keep=keep, sparsify=sparsify))
        for keep in (1.0, 0.5)
    )
    (found,) = stronger_attacks(*every, 4)
    apes = quotes.settle_protocol("apes", plan(num_users=20, dim=4, budgets=[0.5, 2.0]))
    certified = quotes.quote("apes", plan(num_users=20, dim=4, budgets=[0.5, 2.0])).certified.eps
    assert every[0].eps_locals == pytest.approx(apes[0].eps_locals)
    assert 0 < found.eps(delta=DELTA).eps <= certified
    assert stronger_attacks(*half, 4) == []


def test_where_the_event_shows_more_than_the_code_the_registry_says_so():
    def settled(name, **settings):
        return quotes.settle_protocol(name, plan(num_users=20, dim=10, **settings))[0]

    assert shows_less_than_event(settled("s_apes", budgets=[0.5, 1.0], keep=0.5))
    assert shows_less_than_event(settled("ss_double", beta=0.5, eps_local=0.5, inclusion="fixed-k"))
    assert not shows_less_than_event(settled("ss_double", beta=0.5, eps_local=0.5))
    assert not shows_less_than_event(settled("apes", budgets=[0.5, 1.0]))
    for name, settings in (
        ("ss_simple", {"eps_local": 0.5}),
        ("ss_double", {"eps_local": 0.5, "beta": 0.5}),
        ("ss_topk", {"eps_local": 0.5, "k": 2}),
        ("s_apes", {"budgets": [0.5, 1.0], "keep": 0.5, "published": True}),
    ):
        protocol, cohort = quotes.settle_protocol(name, plan(num_users=20, dim=10, **settings))
        assert stronger_attacks(protocol, cohort, 10) == []
