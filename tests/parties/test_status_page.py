"""The analyzer's page: what it says, and that no name on it is markup."""

import re

import pytest

from dovetail.parties.http.monitoring import status_page
from dovetail.statements import Bound, Neighbors, Scope, Theorem, Trust, Unit, Verdict

EVIL = "<script>alert('x')</script>"
SCOPE = Scope(trust=Trust.SHUFFLE, adversary="analyzer", neighbors=Neighbors.REPLACE_ONE, unit=Unit.USER)
STATEMENT = SCOPE.state(
    Bound(eps=1.0, delta=1e-5, proof=Theorem(key="none", where=f"by hand {EVIL}").proof), Verdict.CERTIFIED
)
HISTORY = [
    {"round": 1, "outcome": "released", "uploads": 40, "accuracy": 0.5},
    {"round": 2, "outcome": f"void {EVIL}", "uploads": 3, "accuracy": None},
]
FACTS = {
    "task": "digits",
    "protocol": "privunit",
    "task_id": "0123456789abcdef" * 4,
    "rounds_reserved": 2,
    "rounds": 5,
    "spent": {"eps": 1.00001},
    "budget": {"eps": 4.0, "delta": 1e-5},
    "statement": STATEMENT.to_json(),
    "history": HISTORY,
}


def text_of(page):
    body = page[page.index("<body>") :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))


def test_the_page_says_where_the_training_stands():
    page = status_page(FACTS)
    assert "<title>Dovetail: digits</title>" in page
    text = text_of(page)
    assert "privunit, task 0123456789abcdef…" in text
    assert "Round 2 of 5; round 2 was void" in text
    assert "Spent: eps 1.001 at delta 1e-05; the budget is eps 4." in text, "rounded up"
    assert '<div style="width: 25.0%"></div>' in page
    assert 'points="560.0,80.0"' in page
    assert "50.0% after round 1." in text
    assert page.index("<td>2</td>") < page.index("<td>1</td>"), "the latest round first"


def test_the_page_before_anything_happened():
    page = status_page({**FACTS, "history": [], "spent": {"eps": None}, "budget": {"eps": None, "delta": 1e-5}})
    text = text_of(page)
    assert "no round has ended yet." in text
    assert "Spent: no guarantee at delta 1e-05; no budget was set." in text
    assert "No model has been released yet." in text
    assert 'class="bar"' not in page
    assert "<svg" not in page


def test_a_bar_is_never_longer_than_its_budget():
    assert "width: 100.0%" in status_page({**FACTS, "spent": {"eps": 9.0}})


@pytest.mark.parametrize("name", ["task", "protocol"])
def test_no_name_is_markup(name):
    page = status_page({**FACTS, name: EVIL})
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 3, "the name, the theorem, the outcome"
