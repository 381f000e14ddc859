"""Words for a guarantee: they grow with eps, agree with each other, and are those of the best attack there is."""

import dataclasses
import math

import numpy as np
import pytest

from dovetail import wording
from dovetail.statements import Bound, Neighbors, Proof, Scope, Trust, Unit, Verdict, no_guarantee

SCOPE = Scope(trust=Trust.SHUFFLE, adversary="analyzer", neighbors=Neighbors.REPLACE_ONE, unit=Unit.USER)


def stated(eps, delta=0.0, **changes):
    bound = Bound(eps=eps, delta=delta, proof=Proof(notes=("x",)))
    return dataclasses.replace(SCOPE, **changes).state(bound, Verdict.CERTIFIED, span="60 rounds")


@pytest.mark.parametrize(
    ("eps", "delta", "phrase"),
    [
        (0.1, 1e-6, "hardly changes"),
        (0.11, 1e-6, "changes little"),
        (1.0, 1e-5, "changes little"),
        (2.0, 1e-5, "changes to a limited extent"),
        (3.1, 1e-5, "may change a lot, within a bound"),
        (10.5, 1e-5, "may change so much that the bound rules out little"),
        (0.1, 0.5, "changes to a limited extent"),
        (800.0, 0.0, "may change so much that the bound rules out little"),
        (1.0, 1.0, "may change so much that the bound rules out little"),
    ],
)
def test_words_match_eps_and_a_large_delta(eps, delta, phrase):
    assert wording.change_in_words(stated(eps, delta)) == phrase


def test_nothing_hardly_changes_where_the_odds_may_change_by_seven():
    assert "hardly" not in wording.change_in_words(stated(2.0, 1e-5))


@pytest.mark.parametrize(("eps", "delta"), [(0.3, 0.0), (2.0, 0.0), (1.0, 0.05), (5.0, 1e-3)])
def test_the_certainty_is_that_of_the_best_guess_on_the_worst_mechanism(eps, delta):
    """The mechanism that gives the case away with probability delta and else answers by randomized response."""
    truth = (1 - delta) * math.exp(eps) / (1 + math.exp(eps))
    lie = (1 - delta) - truth
    first, second = np.array([delta, truth, lie, 0.0]), np.array([0.0, lie, truth, delta])
    best = np.maximum(first, second).sum() / 2
    assert wording.largest_certainty(stated(eps, delta)) == pytest.approx(best)


def test_percentages_are_rounded_outward():
    assert wording.percent(wording.largest_certainty(stated(2.0)), up=True) == "88.1%"  # 88.0797
    assert wording.percent(0.880797, up=False) == "88%"
    assert wording.percent(0.5, up=True) == wording.percent(0.5, up=False) == "50%"
    assert wording.percent(1 - 1e-9, up=True) == "almost 100%"
    assert wording.percent(1.0, up=True) == "100%"


@pytest.mark.parametrize("neighbors", Neighbors)
@pytest.mark.parametrize("unit", Unit)
def test_the_guarantee_is_one_sentence_with_all_that_it_depends_on(unit, neighbors):
    said = wording.guarantee_in_words(stated(2.0, 1e-5, unit=unit, neighbors=neighbors))
    for text in ("(2, 1e-05)-DP", f"one {unit.value}:", "analyzer", "60 rounds", "88.1%"):
        assert text in said
    others = [one for one in Neighbors if one is not neighbors]
    assert all(wording.guarantee_in_words(stated(2.0, 1e-5, unit=unit, neighbors=one)) != said for one in others)
    assert ". " not in said
    assert wording.guarantee_in_words(no_guarantee(SCOPE, reason="no noise is added")).endswith("no noise is added")


def test_an_attack_is_compared_with_what_the_statement_allows():
    said = wording.attack_in_words(stated(1.0, 1e-5), eps=0.5, delta=1e-5)
    assert "can tell with 62.2% certainty whether one user's data was exchanged for any other" in said
    assert "the statement allows at most 73.2%, not counting outcomes" in said
    assert "at least 62.2%" in wording.attack_in_words(stated(1.0), eps=0.5, delta=0.0, trials=1000)
    assert "not counting" not in wording.attack_in_words(stated(1.0), eps=0.5, delta=0.0)
    assert "with 50% certainty" in wording.attack_in_words(stated(1.0), eps=0.0, delta=0.0)
    nothing = no_guarantee(SCOPE, reason="no noise is added")
    assert "can tell with certainty whether" in wording.attack_in_words(nothing, eps=math.inf, delta=0.0)
    assert "the statement guarantees nothing" in wording.attack_in_words(nothing, eps=math.inf, delta=0.0)


def test_equal_bounds_are_equal_words_but_for_the_rounding():
    """What is shown is rounded down, what is allowed up: no attack seems to find more than it does."""
    for eps in np.geomspace(1e-3, 12, 40).tolist():
        shown, allowed = (
            wording.percent(wording.certainty(eps), up=False),
            wording.percent(wording.certainty(eps), up=True),
        )
        assert allowed == "almost 100%" or float(shown[:-1]) <= float(allowed[:-1]) <= float(shown[:-1]) + 0.11
