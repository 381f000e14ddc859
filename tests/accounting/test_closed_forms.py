import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.accounting.amplification import clones, closed_forms
from dovetail.events import Report, Shuffled
from dovetail.statements import NotApplicable


def crowd(eps_local: float, num_users: int, kind: str = "generic", levels: int = 2, **more) -> Shuffled:
    return Shuffled(report=Report(kind=kind, eps_local=eps_local, levels=levels), num_users=num_users, **more)


ALL = (
    closed_forms.erlingsson19,
    closed_forms.flame_lemma1,
    closed_forms.clones22,
    closed_forms.clones23,
    closed_forms.girgis21,
)


def test_printed_values():
    # FMT 2021, Thm. 3.1 and the 2023 form at n = 10^4, eps_local = 1, delta = 1e-6, by hand
    root = math.sqrt(math.log(4e6))
    by_hand = math.log1p(math.tanh(0.5) * (8 * math.sqrt(math.e / 1e4) * root + 8 * math.e / 1e4))
    assert closed_forms.clones22(crowd(1.0, 10**4), delta=1e-6).eps == pytest.approx(by_hand, rel=1e-10)
    by_hand = math.log1p((math.e - 1) * (4 * math.sqrt(2 / (math.e + 1) / 1e4) * root + 4e-4))
    assert closed_forms.clones23(crowd(1.0, 10**4), delta=1e-6).eps == pytest.approx(by_hand, rel=1e-10)
    assert closed_forms.erlingsson19(crowd(0.5, 10**6), delta=1e-6).eps == pytest.approx(0.022301533, rel=1e-7)


@settings(max_examples=60, deadline=None)
@given(st.integers(100, 10**7), st.floats(0.01, 8), st.floats(1e-12, 0.1))
def test_closed_forms_are_never_below_the_numerical_bound_of_their_pair(num_users, eps_local, delta):
    event = crowd(eps_local, num_users)
    for closed, year in ((closed_forms.clones22, 2022), (closed_forms.clones23, 2023)):
        try:
            eps = closed(event, delta=delta).eps
        except NotApplicable:
            continue
        assert clones.delta_of(event, eps=eps, year=year) <= delta


@settings(max_examples=25, deadline=None)
@given(st.integers(1000, 10**6), st.floats(0.01, 6), st.floats(1e-12, 1e-3))
def test_comparisons_are_never_below_the_clones(num_users, eps_local, delta):
    for bound in (closed_forms.erlingsson19, closed_forms.flame_lemma1, closed_forms.girgis21):
        event = crowd(eps_local, num_users, "rr")
        try:
            eps = bound(event, delta=delta).eps
        except NotApplicable:
            continue
        assert clones.delta_of(event, eps=eps) <= delta


def test_girgis_renyi_against_fifty_digits():
    for order, n, eps_local in ((2, 1000, 0.5), (7, 1000, 2.0), (200, 10**5, 1.0), (3000, 10**6, 0.1)):
        with mpmath.workdps(50):
            E, nbar = mpmath.exp(mpmath.mpf(eps_local)), int((n - 1) / (2 * math.exp(eps_local))) + 1
            base = (E**2 - 1) ** 2 / (2 * E**2 * nbar)
            total = 1 + mpmath.binomial(order, 2) * (E - 1) ** 2 / (nbar * E)
            total += mpmath.fsum(
                mpmath.binomial(order, i) * i * mpmath.gamma(mpmath.mpf(i) / 2) * base ** (mpmath.mpf(i) / 2)
                for i in range(3, order + 1)
            )
            total += mpmath.exp(mpmath.mpf(eps_local) * order - (n - 1) / (8 * E))
            exact = mpmath.log(total) / (order - 1)
        ours = closed_forms._girgis_renyi(order, n, eps_local)
        assert exact <= ours <= exact * (1 + mpmath.mpf(10) ** -8)


def refused(bound, event, delta=1e-6, match="hypotheses fail"):
    with pytest.raises(NotApplicable, match=match):
        bound(event, delta=delta)


def test_outside_the_hypotheses_each_says_so():
    refused(closed_forms.erlingsson19, crowd(0.51, 10**6))
    refused(closed_forms.erlingsson19, crowd(0.4, 999))
    refused(closed_forms.erlingsson19, crowd(0.4, 10**6), delta=0.01)
    refused(closed_forms.erlingsson19, crowd(0.4, 1000), match="no gain")
    for n, delta in ((1000, 1e-6), (10**5, 1e-3)):
        limit = math.log(n / (16 * math.log(2 / delta)))
        refused(closed_forms.clones22, crowd(limit + 1e-9, n), delta)
        closed_forms.clones22(crowd(limit - 1e-9, n), delta=delta)
        limit = math.log(n / (8 * math.log(2 / delta)) - 1)
        refused(closed_forms.clones23, crowd(limit + 1e-9, n), delta)
        closed_forms.clones23(crowd(limit - 1e-9, n), delta=delta)
    refused(closed_forms.clones22, crowd(0.1, 5))
    refused(closed_forms.clones23, crowd(0.1, 5))
    refused(closed_forms.flame_lemma1, crowd(2.0, 1000, "rr"))  # eps above 1
    refused(closed_forms.flame_lemma1, crowd(3.0, 650, "rr"), delta=0.9)  # the condition that FLAME drops
    refused(closed_forms.flame_lemma1, crowd(1.0, 10**6), match="randomized response only")
    refused(closed_forms.flame_lemma1, crowd(1.0, 10**6, "laplace"), match="randomized response only")
    refused(closed_forms.flame_lemma1, crowd(0.1, 1000, "rr"), match="no gain")
    refused(closed_forms.girgis21, crowd(6.0, 1000), match="no gain")


def test_flame_grows_with_the_levels():
    two, ten = (closed_forms.flame_lemma1(crowd(1.0, 10**5, "rr", b), delta=1e-6).eps for b in (2, 10))
    assert two == pytest.approx(math.sqrt(14 * math.log(2e6) * (math.e + 1) / (10**5 - 1)))
    assert ten > two


@pytest.mark.parametrize("bound", ALL)
def test_questions_that_make_no_sense_are_refused(bound):
    refused(bound, crowd(0.4, 10**5, "rr", coordinates=2), match="one coordinate")
    for delta in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="delta"):
            bound(crowd(0.4, 10**5, "rr"), delta=delta)
    for extreme in (60.0, 500.0, 5000.0):
        with pytest.raises(NotApplicable):
            bound(crowd(extreme, 10**5, "rr"), delta=1e-6)


@pytest.mark.parametrize("bound", ALL)
def test_colluders_are_taken_off_the_crowd(bound):
    with_colluders = bound(crowd(0.45, 10**6, "rr", colluders=10**5), delta=1e-6)
    assert with_colluders == bound(crowd(0.45, 9 * 10**5, "rr"), delta=1e-6)
    assert with_colluders.eps > bound(crowd(0.45, 10**6, "rr"), delta=1e-6).eps
