"""Sums by shares: whose noise is counted, what is stated, and the law of what clients and aggregators draw."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from dovetail import accounting, protocols
from dovetail.events import Everyone, FixedSize, Poisson
from dovetail.guarantee import quotes
from dovetail.mechanisms import ExactSampler
from dovetail.protocols import Cohort
from dovetail.protocols.sums import _skellam
from dovetail.protocols.sums._skellam import WholeNoise
from dovetail.statements import Neighbors, NotApplicable, Trust

USERS, DIM = 60, 5
COHORT = Cohort(participation=Everyone(), size=USERS, min_size=USERS)
ANY = Cohort(participation=Everyone(), size=5, colluders=4)  # hospitals, of which all but one collude
ALPHA = 1e-4  # of every test of a law, at fixed seeds
REPLACE, REMOVE = Neighbors.REPLACE_ONE, Neighbors.ADD_REMOVE
HEADLINE = {"num_users": 60_000, "dim": 6010, "delta": 1e-5, "rounds": 160}


def seeded(seed=0):
    return ExactSampler(np.random.default_rng(seed).bytes)


def built(cohort=COHORT, dim=DIM, **settings):
    return protocols.build("secagg", {"clip_norm": 1.0, "noise_multiplier": 2.0} | settings).settle(cohort, dim)


def view_of(protocol, cohort=COHORT, dim=DIM, neighbors=REPLACE):
    return protocol.view(cohort, dim, neighbors=neighbors)


def event_of(protocol, cohort=COHORT, dim=DIM, neighbors=REPLACE):
    return view_of(protocol, cohort, dim, neighbors).round.mechanism


# ---------------------------------------------------------------- whose noise is counted


def test_the_noise_of_the_honest_users_of_the_minimum_is_what_is_certified():
    cohort = Cohort(participation=Everyone(), size=20, min_size=16, colluders=2)
    protocol = built(cohort)
    assert protocol.honest == 14
    event = event_of(protocol, cohort)
    assert (event.num_users, event.colluders) == (16, 2)
    assert event.noise_variance == pytest.approx((2.0 * protocol.scale) ** 2)
    assert protocol.part_variance * 14 == event.noise_variance
    assert protocol.noise_std(20, DIM) == pytest.approx(2.0 * math.sqrt(20 / 14) / 20), "all 20 add their part"
    fewer = dataclasses.replace(cohort, min_size=9)
    assert event_of(protocol, fewer).noise_variance == pytest.approx(event.noise_variance / 2)


@pytest.mark.parametrize("aggregators", [2, 5])
def test_of_the_aggregators_noise_one_is_counted_and_all_is_there(aggregators):
    protocol = built(ANY, noise="aggregators", aggregators=aggregators)
    event = event_of(protocol, ANY)
    assert event.noise_variance == (2.0 * protocol.scale) ** 2
    assert (event.num_users, event.colluders) == (0, 0), "nothing depends on who is honest or stays"
    assert protocol.noise_std(5, DIM) == pytest.approx(2.0 * math.sqrt(aggregators) / 5)
    larger = dataclasses.replace(ANY, colluders=0, size=4, min_size=3)
    assert event_of(protocol, larger) == event


def test_the_same_noise_gives_the_same_eps_whoever_adds_it_and_less_is_worse():
    terms = quotes.Terms(num_users=100, dim=50, delta=1e-5, settings={"noise_multiplier": 4.0})
    users = quotes.quote("secagg", terms).certified
    whole = quotes.quote("secagg", terms.with_setting("noise", "aggregators")).certified
    mixed = quotes.quote("split_and_mix", terms).certified
    assert whole.eps == pytest.approx(users.eps, rel=5e-3), "their scales differ a little"
    assert users.eps <= mixed.eps * 1.001, "less by what mixing spends"
    less = quotes.quote("secagg", terms.with_setting("noise_multiplier", 3.0)).certified
    assert less.eps > 1.2 * users.eps


def test_rounds_of_different_sizes_where_aggregators_bring_the_noise():
    assert built(noise="aggregators").noise_scales([5, 9]) == (1.0, 1.0)
    with pytest.raises(ValueError, match="expected rounds of one size"):
        built().noise_scales([5, 9])
    with pytest.raises(ValueError, match=r"expected modulus >= .* for the sum of 1200 users"):
        view_of(built(noise="aggregators"), dataclasses.replace(COHORT, size=20 * USERS))


# ---------------------------------------------------------------- what is stated


def test_the_statement_says_who_is_trusted_with_what():
    scope = view_of(built(aggregators=3)).scope
    assert scope.trust is Trust.SHARES
    assert scope.adversary == "analyzer with up to 2 of the 3 aggregators"
    said = " | ".join(scope.assumptions)
    for words in (
        "at least one of the 3 aggregators is honest",
        "one agreed set of at least 60 users once",
        "forgets the shares",
        "whoever enrols users is trusted",
        "fresh, independent noise",
        "seed",
        "drop out",
    ):
        assert words in said
    assert "shuffler" not in said
    assert "is removed" not in said


def test_where_aggregators_bring_the_noise_no_number_of_users_is_assumed():
    said = " | ".join(view_of(built(ANY, noise="aggregators"), ANY).scope.assumptions)
    assert "draws its noise once per round" in said
    for words in ("honest users", "at least 0", "independent noise"):
        assert words not in said


@pytest.mark.parametrize(("noise", "stays"), [("users", "with its part of the noise"), ("aggregators", "zero")])
def test_under_add_remove_it_says_who_is_removed_and_what_stays(noise, stays):
    replaced, removed = (view_of(built(noise=noise), neighbors=relation) for relation in (REPLACE, REMOVE))
    (said,) = set(removed.scope.assumptions) - set(replaced.scope.assumptions)
    assert said.startswith("a user that is removed stays on the public roster")
    assert said.endswith(stays)
    eps = [accounting.certify([view.round] * 3, view.scope, delta=1e-6) for view in (removed, replaced)]
    assert eps[0].eps < 0.6 * eps[1].eps
    assert "dovetail.secagg-removed" in eps[0].proof.key
    assert "dovetail.secagg" in eps[1].proof.key


@pytest.mark.parametrize("noise", ["users", "aggregators"])
def test_nothing_is_left_if_all_aggregators_collude_and_no_shuffler_is_asked(noise):
    terms = quotes.Terms(num_users=50, dim=4, delta=1e-5, settings={"noise_multiplier": 4.0, "noise": noise})
    quote = quotes.quote("secagg", terms)
    assert quote.local.is_unbounded
    assert quote.local.adversary == "analyzer and all aggregators, and everyone else"
    assert "all aggregators together see every share" in str(quote.local.proof)
    assert quote.shuffler is None
    assert quote.claimed is None


def test_secret_coins_are_those_of_a_sampled_sum_and_samples_that_are_seen_amplify_nothing():
    secret = Cohort(participation=Poisson(prob=0.1), size=6, uploads=USERS, min_size=USERS)
    drawn = Cohort(participation=FixedSize(size=USERS, population=600), size=USERS, min_size=USERS)
    eps = {}
    for cohort in (COHORT, secret, drawn):
        for noise in ("users", "aggregators"):
            view = view_of(built(cohort, noise=noise), cohort)
            eps[cohort, noise] = accounting.certify([view.round] * 3, view.scope, delta=1e-4)
    for noise in ("users", "aggregators"):
        assert eps[secret, noise].eps < 0.5 * eps[COHORT, noise].eps
        assert any("secretly" in said for said in eps[secret, noise].assumptions)
        assert eps[drawn, noise].eps == pytest.approx(eps[COHORT, noise].eps, rel=1e-3)
    with pytest.raises(NotApplicable, match="aggregators see how many users a Poisson sample has"):
        view_of(built(), Cohort(participation=Poisson(prob=0.1), size=USERS, min_size=USERS))


@pytest.mark.parametrize(
    ("settings", "cohort", "sentence"),
    [
        ({"aggregators": 1}, COHORT, "one would hold all shares"),
        ({"noise": "nobody"}, COHORT, "expected noise to be one of"),
        ({"noise": "aggregators", "honest": 5}, COHORT, "expected no honest users to count"),
        ({"honest": 61}, COHORT, "expected 2 to 60 honest users"),
        ({"modulus": 2**7}, COHORT, "expected modulus >="),
        ({}, dataclasses.replace(COHORT, min_size=0), r"expected cohort\.min_size >= 2"),
        ({}, dataclasses.replace(COHORT, aggregators=3), r"expected protocol\.aggregators=3"),
    ],
)
def test_bad_settings_are_refused(settings, cohort, sentence):
    with pytest.raises(ValueError, match=sentence):
        built(cohort, **settings)


# ---------------------------------------------------------------- scale and size


def test_at_the_size_of_the_headline_a_user_shares_28_bits_and_noise_is_that_of_split_and_mix():
    def calibrated(name, **settings):
        return quotes.guarantee(name, quotes.Terms(settings={"clip_norm": 0.2} | settings, **HEADLINE)).calibrate(2.9)

    ours, mixed = calibrated("secagg"), calibrated("split_and_mix", colluding_shufflers=1)
    contribution = ours.settled_protocol.contribution(ours.cohorts[0], 6010)
    assert contribution.bits == 28
    assert contribution.length * contribution.bits / 8 < 21_100
    assert ours.settled_protocol.noise_multiplier <= mixed.settled_protocol.noise_multiplier * 1.0001
    assert contribution.total_variation <= 6010 * 2.0**-240
    rounding = 60_000 / 4 / event_of(ours.settled_protocol, ours.cohorts[0], 6010).noise_variance
    assert rounding < 1e-5
    assert ours.settled_protocol.encoding(6010).norm / (ours.settled_protocol.scale * 0.2) < 1.002


@pytest.mark.parametrize(("users", "dim", "noise"), [(300_000, 1, 1.0), (3000, 4, 0.5), (1000, 7850, 2.0)])
def test_rounding_adds_less_than_a_hundredth_to_the_certified_variance(users, dim, noise):
    cohort = Cohort(participation=Everyone(), size=users, min_size=users)
    protocol = built(cohort, dim, noise_multiplier=noise)
    assert users / 4 <= 0.01001 * event_of(protocol, cohort, dim).noise_variance
    assert protocol.encoding(dim).norm <= 1.0021 * protocol.scale


def test_sums_of_very_many_users_are_as_fine_as_a_word_allows():
    cohort = Cohort(participation=Everyone(), size=10**6, min_size=10**6)
    protocol = built(cohort, 1, noise_multiplier=1.0)
    assert protocol.modulus == 2**32
    assert 1900 < protocol.scale < 2**31 / 10**6


# ---------------------------------------------------------------- laws


def accepts(values, variance):
    """Whether a chi-square test takes these whole numbers for Skellam noise of this variance."""
    reach = math.ceil(3 * math.sqrt(variance))
    cells = np.clip(values, -reach, reach) + reach
    inner = stats.skellam.pmf(np.arange(-reach + 1, reach), variance / 2, variance / 2)
    tail = (1 - inner.sum()) / 2
    expected = np.concatenate([[tail], inner, [tail]])
    found = np.bincount(cells, minlength=len(expected))
    return stats.chisquare(found, expected * len(values)).pvalue > ALPHA


def signed(residues, modulus):
    values = residues.astype(np.int64)
    return np.where(values >= modulus // 2, values - modulus, values)


COARSE = {"scale": 3.0, "noise_multiplier": 1.0}
WIDE = 20_000


def test_the_clients_noise_adds_up_to_the_certified_law():
    cohort = Cohort(participation=Everyone(), size=6, min_size=6)
    protocol = built(cohort, WIDE, **COARSE)
    contribution, draws = protocol.contribution(cohort, WIDE), seeded(1)
    total = sum(contribution.draw(np.zeros(WIDE), sampler=draws).astype(np.uint64) for _ in range(6))
    values = signed(total & np.uint64(protocol.modulus - 1), protocol.modulus)
    variance = event_of(protocol, cohort, WIDE).noise_variance
    assert accepts(values, variance)
    assert not accepts(values, 0.9 * variance)
    assert not accepts(values, 1.1 * variance)
    assert contribution.noise(sampler=draws) is None
    assert 0 < contribution.total_variation < 1e-60
    assert contribution.noise_total_variation == 0


def test_an_aggregators_noise_has_the_certified_law_alone():
    protocol = built(ANY, WIDE, noise="aggregators", **COARSE)
    contribution, draws = protocol.contribution(ANY, WIDE), seeded(2)
    drawn = contribution.noise(sampler=draws)
    assert drawn.dtype == np.uint32
    values = signed(drawn, protocol.modulus)
    assert accepts(values, 9.0)
    assert not accepts(values, 8.0)
    assert not accepts(values, 10.0)
    assert not contribution.draw(np.zeros(WIDE), sampler=draws).any(), "a client brings none"
    assert contribution.total_variation == 0
    assert 0 < contribution.noise_total_variation < 1e-60


def test_noise_of_any_variance_is_a_sum_of_draws_that_fit_a_table(monkeypatch):
    assert WholeNoise(100.0).draws == 1
    huge = WholeNoise(6.5e9)
    assert huge.draws == 128
    assert huge.law_of_one_draw.variance * huge.draws == 6.5e9
    monkeypatch.setattr(_skellam, "_LARGEST_PART", 2.0)
    several = WholeNoise(9.0)
    assert several.draws == 8
    values = several(WIDE, sampler=seeded(3))
    assert accepts(values, 9.0)
    assert not accepts(values, 9.0 * 7 / 8), "one draw less would show"
    assert several.distance == 8 * several.law_of_one_draw.distance


def test_no_client_adds_more_than_the_norm_that_is_accounted():
    cohort = Cohort(participation=Everyone(), size=6, min_size=6)
    protocol = built(cohort, DIM, noise="aggregators", scale=4.0)
    contribution, limit = protocol.contribution(cohort, DIM), protocol.encoding(DIM).norm
    for seed, x in enumerate((np.full(DIM, 1e9), -np.ones(DIM), np.full(DIM, np.nan), np.full(DIM, np.inf))):
        drawn = signed(contribution.draw(x, sampler=seeded(seed)), protocol.modulus)
        assert np.linalg.norm(drawn) <= limit
        assert np.isfinite(x).all() or not drawn.any()
    with pytest.raises(ValueError, match=r"expected an update of shape \(5,\)"):
        contribution.draw(np.zeros(4), sampler=seeded())
