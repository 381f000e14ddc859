import dataclasses
import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.accounting import gaussian, groups
from dovetail.statements import Bound, Spent, Theorem

SOME = Theorem(key="some", where="some theorem")


def bound(eps, delta):
    return Bound(eps=eps, delta=delta, proof=SOME.proof)


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 5), st.floats(1e-30, 1e-3), st.integers(2, 40))
def test_the_geometric_sum_rounded_up_and_never_above_the_printed_theorem(eps, delta, size):
    ours = groups.for_group(bound(eps, delta), size=size)
    with mpmath.workdps(40):
        exact = mpmath.mpf(delta) * mpmath.fsum(mpmath.exp(j * mpmath.mpf(eps)) for j in range(size))
    assert ours.eps >= size * eps
    assert ours.eps == pytest.approx(size * eps, rel=1e-11)
    assert ours.delta >= min(1, exact)
    assert ours.delta <= min(1.0, float(exact) * (1 + 1e-9))
    assert ours.delta <= min(1.0, size * math.exp((size - 1) * eps) * delta) * (1 + 1e-9)


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("eps", [0.0, 0.4])
def test_parts_of_delta_that_were_spent_grow_with_delta(eps, size):
    """What a part of delta went to for one item takes the same part of it for several."""
    parts = (Spent(2e-7, "noise that is rounded"), Spent(1e-8, "shares that are not mixed"))
    whole = dataclasses.replace(bound(eps, 1e-6), proof=SOME.proof.with_spent(*parts))
    ours = groups.for_group(whole, size=size)
    assert [part.on for part in ours.proof.spent] == [part.on for part in parts]
    assert [part.delta / ours.delta for part in ours.proof.spent] == pytest.approx([0.2, 0.01])


def test_it_holds_for_the_gaussian_whose_groups_are_known_exactly():
    for size in (2, 5):
        for mu in (0.05, 0.3):
            one = bound(gaussian.eps_of(mu, delta=1e-7), 1e-7)
            group = groups.for_group(one, size=size)
            assert gaussian.delta_of(size * mu, eps=group.eps) <= group.delta


def test_edges_and_refusals():
    assert groups.for_group(bound(1.0, 1e-5), size=1) == bound(1.0, 1e-5)
    assert groups.for_group(bound(1.0, 0.0), size=3).delta == 0
    assert groups.for_group(bound(9.0, 1e-5), size=10).delta == 1
    assert groups.for_group(bound(math.inf, 0.0), size=3).eps == math.inf
    assert "some theorem" in str(groups.for_group(bound(1.0, 0.1), size=2).proof)
    for size in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="size"):
            groups.for_group(bound(1.0, 1e-5), size=size)
    for bad in (bound(-1.0, 0.1), bound(math.nan, 0.1), bound(1.0, -0.1), bound(1.0, math.nan)):
        with pytest.raises(ValueError, match="expected"):
            groups.for_group(bad, size=2)
