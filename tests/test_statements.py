import dataclasses
import json
import math

import pytest

from dovetail.statements import Neighbors, Scope, Statement, Theorem, Trust, Unit, Verdict, no_guarantee

SCOPE = Scope(
    trust=Trust.SHUFFLE,
    adversary="analyzer",
    neighbors=Neighbors.REPLACE_ONE,
    unit=Unit.USER,
    assumptions=("the shuffler shuffles",),
)


def statement(**changes):
    base = Statement(
        eps=0.932,
        delta=5e-6,
        trust=SCOPE.trust,
        adversary=SCOPE.adversary,
        neighbors=SCOPE.neighbors,
        unit=SCOPE.unit,
        proof=Theorem(key="T", where="A Theorem (2020), Thm. 1", url="https://example.org").proof,
        assumptions=SCOPE.assumptions,
        verdict=Verdict.CERTIFIED,
        span="one epoch",
    )
    return dataclasses.replace(base, **changes)


def test_prints_a_proof_tree():
    local = statement(eps=78.5, delta=0.0, trust=Trust.LOCAL, assumptions=("noise is fresh", "the shuffler shuffles"))
    text = str(statement(premises=(local,)))
    assert text.splitlines() == [
        "(0.932, 5e-06)-DP [shuffle; against the analyzer; replace-one; one user, one epoch]   certified",
        "  by A Theorem (2020), Thm. 1",
        "  if the shuffler shuffles",
        "  (78.5, 0)-DP [local; against the analyzer; replace-one; one user, one epoch]   certified, with a warning",
        "    warning: eps is above 10: such a bound rules out little",
        "    by A Theorem (2020), Thm. 1",
        "    if noise is fresh",
    ]


def test_personal_budgets_are_summarised_not_listed():
    assert "for 3 users with eps from 0.1 to 0.9" in str(statement(per_user=(0.1, 0.9, 0.5)))


@pytest.mark.parametrize("changes", [{}, {"eps": math.inf}, {"per_user": (0.1, 0.2)}, {"premises": (statement(),)}])
def test_json_round_trip(changes):
    before = statement(**changes)
    data = json.loads(json.dumps(before.to_json(), allow_nan=False))
    assert Statement.from_json(data) == before


def test_an_unbounded_statement_says_so_in_words_and_json():
    nothing = no_guarantee(SCOPE, reason="no noise is added")
    assert nothing.is_unbounded
    assert str(nothing).startswith("no guarantee [")
    assert nothing.to_json()["eps"] is None
    assert nothing.to_json()["unbounded"] is True


@pytest.mark.parametrize("changes", [{"eps": -0.1}, {"eps": math.nan}, {"delta": 1.5}, {"delta": math.nan}])
def test_impossible_numbers_are_refused(changes):
    with pytest.raises(ValueError, match="expected"):
        statement(**changes)
