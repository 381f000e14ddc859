"""Choosing: no more trust than there is, the target is met, and every protocol is shown or ruled out."""

import dataclasses
import math

import pytest

from dovetail import compare
from dovetail.compare import choosing
from dovetail.compare._contenders import committed_comparisons, nearest_comparison
from dovetail.guarantee import quotes
from dovetail.protocols import PROTOCOLS
from dovetail.statements import Trust

SMALL = choosing.Situation(trust="curator", users=1000, dim=7850, rounds=20, eps=0.5, delta=1e-6)
LEVELS = {
    "nobody": {Trust.LOCAL},
    "aggregators": {Trust.LOCAL, Trust.SHARES, Trust.SHUFFLE},  # of shufflers, one of two that mix shares
    "shuffler": {Trust.LOCAL, Trust.SHARES, Trust.SHUFFLE},
    "curator": {Trust.LOCAL, Trust.SHARES, Trust.SHUFFLE, Trust.CURATOR},
}


def names(found):
    return {one.protocol for one in found.fitting}


@pytest.fixture(scope="module")
def everything():
    return choosing.choose(SMALL)


def test_every_protocol_is_shown_or_ruled_out(everything):
    ruled_out = {one.protocol for one in everything.ruled_out}
    assert names(everything) | ruled_out == set(PROTOCOLS)
    assert not names(everything) & ruled_out
    assert names(everything) >= {"dp_fl", "secagg", "split_and_mix", "ss_topk", "privunit", "ldp_fl"}
    assert all(one.reason for one in everything.ruled_out)


def test_what_fits_meets_the_target_with_hardly_more_noise_than_it_needs(everything):
    for one in everything.fitting:
        assert one.certified.eps <= SMALL.eps
        assert one.certified.delta <= SMALL.delta
    (dp_fl,) = (one for one in everything.fitting if one.protocol == "dp_fl")
    _, least, _ = quotes.calibrate("dp_fl", SMALL.terms("dp_fl"), eps=SMALL.eps)
    assert least <= dp_fl.value <= 1.002 * least
    assert dp_fl.std == pytest.approx(dp_fl.value / SMALL.users)


def test_costs_are_those_of_compare(everything):
    (secagg,) = (one for one in everything.fitting if one.protocol == "secagg")
    terms = SMALL.terms("secagg").with_setting(secagg.parameter, secagg.value)
    protocol, _ = quotes.settle_protocol("secagg", terms)
    assert secagg.costs.bytes == compare.costs(protocol, SMALL.users, SMALL.dim).bytes


@pytest.mark.parametrize("trust", LEVELS)
def test_no_more_trust_is_asked_for_than_there_is(everything, trust):
    found = choosing.choose(dataclasses.replace(SMALL, trust=trust))
    assert {one.certified.trust for one in found.fitting} == LEVELS[trust]
    assert ("split_and_mix" in names(found)) == (trust != "nobody")
    assert ("ss_topk" in names(found)) == (trust in ("shuffler", "curator"))
    gone = names(everything) - names(found)
    assert all("it needs more trust" in one.reason for one in found.ruled_out if one.protocol in gone)


def test_disjoint_batches_cost_a_user_one_round_per_epoch():
    batches = dataclasses.replace(SMALL, per_round=100, rounds=11)
    assert batches.kind == "disjoint"
    assert batches.terms("dp_fl").rounds == 2  # ten rounds make an epoch
    assert batches.terms("dp_fl").num_users == 100


def test_a_sample_by_coins_rules_out_what_would_show_its_size():
    poisson = dataclasses.replace(SMALL, per_round=300, rounds=1, participation="poisson", trust="aggregators")
    reasons = {one.protocol: one.reason for one in choosing.choose(poisson).ruled_out}
    assert "aggregators see how many users a Poisson sample has" in reasons["secagg"]
    secret = choosing.choose(dataclasses.replace(poisson, participation="secret"))
    (secagg,) = (one for one in secret.fitting if one.protocol == "secagg")
    assert secret.source is None
    everyone = dataclasses.replace(SMALL, rounds=1, trust="aggregators")
    (other,) = (one for one in choosing.choose(everyone).fitting if one.protocol == "secagg")
    assert secagg.value < other.value, "the sample amplifies"
    assert secagg.std > secagg.value / SMALL.users, "the noise of all, over the users whose data enter"


def test_accuracies_come_from_a_comparison_that_is_near():
    found = nearest_comparison(eps=1.2, users=30_000, dim=10_000)
    assert found is not None
    assert (found.name, found.users, found.dim) == ("logistic-1", 60_000, 7850)
    assert nearest_comparison(eps=1.2, users=3000, dim=10_000) is None
    assert nearest_comparison(eps=10, users=30_000, dim=10_000) is None
    assert found.accuracy("dp_fl", rounds=60, per_round=1000) == pytest.approx(0.849, abs=1e-3)
    assert found.accuracy("secagg", rounds=60, per_round=1000) == found.runs["split_and_mix"]["accuracy"]
    assert found.accuracy("dp_fl", rounds=60, per_round=60_000) is None
    assert found.accuracy("dp_fl", rounds=1, per_round=1000) is None
    assert len(committed_comparisons()) == 6
    assert all(0 < run["accuracy"] < 1 for one in committed_comparisons() for run in one.runs.values())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"trust": "everybody"}, "expected trust to be one of nobody"),
        ({"per_round": 5000}, "per_round <= 1000"),
        ({"per_round": 100, "participation": "everyone"}, "where everyone takes part, per_round is 1000"),
        ({"participation": "poisson"}, "participation='poisson' needs per_round"),
        ({"eps": math.nan}, "eps"),
        ({"dim": 0}, "expected dim >= 1"),
    ],
)
def test_a_situation_that_makes_no_sense_is_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(SMALL, **change)
