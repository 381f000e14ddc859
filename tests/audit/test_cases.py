"""Every protocol that is registered is attacked, and none certifies less than the attacks find."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
from grids import later

from dovetail import audit as audits
from dovetail.protocols import PROTOCOLS
from dovetail.protocols.sums.binary_sum import BinarySum

QUICK = [case for case in audits.CASES if case.quick and case.trials is None]
EXACT = [case for case in audits.CASES if case.trials == 0]


def name(case):
    return f"{case.protocol}-{case.label}-{case.view}-{case.settings.get('method', '')}"


def test_every_protocol_is_run_and_attacked_at_its_papers_size():
    assert {case.protocol for case in QUICK} == set(PROTOCOLS)
    assert {case.protocol for case in EXACT} == set(PROTOCOLS)


FAMILIES = ("dp_fl", "central_sub", "ldp_fl", "privunit", "ss_topk", "ss_double", "s_apes", "secagg", "real_sum")


@pytest.mark.parametrize(
    "case", [case if case.protocol in FAMILIES else later(case) for case in QUICK], ids=lambda case: name(case)
)
def test_the_running_code_keeps_its_promise(case):
    finding = audits.audit(case.protocol, case.terms, view=case.view, trials=300, confidence=0.99, seed=5)
    assert finding.is_consistent
    assert finding.counted_bound is not None


@pytest.mark.soak
@pytest.mark.parametrize("case", audits.CASES, ids=name)
def test_no_attack_finds_more_than_is_certified(case):
    finding = audits.audit(case.protocol, case.terms, view=case.view, trials=case.trials, confidence=0.999)
    assert finding.is_consistent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Newcomer(BinarySum):
    """A protocol that no attack has heard of."""

    name: ClassVar[str] = "newcomer"


def test_a_new_protocol_is_attacked_without_new_code(monkeypatch):
    monkeypatch.setitem(PROTOCOLS, "newcomer", Newcomer)
    plan = audits.attack_terms("newcomer", 10, 1, 0.01, chosen={"eps_local": 1.0})
    finding = audits.audit("newcomer", plan, trials=2000)
    assert finding.is_consistent
    assert finding.bound.eps > 0.9 * finding.certified.eps  # exactly
    assert finding.counted_bound.eps > 0.3 * finding.certified.eps  # by running it
