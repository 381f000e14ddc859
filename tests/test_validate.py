import math

import numpy as np
import pytest

from dovetail import _validate


@pytest.mark.parametrize(
    ("check", "good", "bad", "sentence"),
    [
        (_validate.positive, 0.1, 0, "expected x > 0, got x=0"),
        (_validate.positive, 1, math.nan, "expected x to be a finite number, got x=nan"),
        (_validate.positive, 1, True, "expected x to be a finite number, got x=True"),
        (_validate.non_negative, 0, -1e-9, "expected x >= 0, got x=-1e-09"),
        (_validate.integer, 3, 3.0, "expected x to be a whole number, got x=3.0"),
        (lambda **kw: _validate.at_least(2, **kw), 2, 1, "expected x >= 2, got x=1"),
        (lambda **kw: _validate.at_most(2, **kw), 2, 3, "expected x <= 2, got x=3"),
        (lambda **kw: _validate.in_open_interval(0, 1, **kw), 0.5, 1, "expected 0 < x < 1, got x=1"),
        (lambda **kw: _validate.in_interval(0, 1, **kw), 1, 1.5, "expected 0 <= x <= 1, got x=1.5"),
        (lambda **kw: _validate.one_of(("a", "b"), **kw), "a", "c", "expected x to be one of a, b, got x='c'"),
    ],
)
def test_each_check_accepts_the_good_and_words_the_bad(check, good, bad, sentence):
    check(x=good)
    with pytest.raises(ValueError) as caught:
        check(x=bad)
    assert str(caught.value) == sentence


def test_unknown_names_get_the_nearest_one():
    with pytest.raises(ValueError, match=r"unknown protocol 'dpfl': did you mean 'dp_fl'\?"):
        _validate.known_name("protocol", "dpfl", ["fedavg", "dp_fl"])
    with pytest.raises(ValueError, match="expected one of: a, b"):
        _validate.known_name("thing", "zzzzzz", ["b", "a"])


def test_arrays_with_nan_are_refused():
    _validate.finite_array(x=np.ones(3), labels=np.ones(3, int))
    with pytest.raises(ValueError, match="got 2 NaN or infinite values in x"):
        _validate.finite_array(x=np.array([1.0, np.nan, np.inf]))


def test_what_is_left_open_passes_and_what_is_given_is_checked():
    assert _validate.not_none(x=None, y=0) == {"y": 0}
    _validate.positive(**_validate.not_none(x=None))
    with pytest.raises(ValueError, match="expected y > 0, got y=0"):
        _validate.positive(**_validate.not_none(x=None, y=0))
