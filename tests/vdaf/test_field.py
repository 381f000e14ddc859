"""Field arithmetic, transforms and polynomials against Python's integers."""

import numpy as np
import pytest
from field_samples import elements

from dovetail.vdaf.field import FIELD32, FIELD64, FIELD128, Malencoded
from dovetail.vdaf.flp import (
    coefficients_from_values,
    lagrange_weights,
    next_power_of_two,
    values_at_roots,
    values_between_roots,
)
from dovetail.vdaf.xof import Xof

FIELDS = [FIELD32, FIELD64, FIELD128]


@pytest.fixture
def rng():
    return np.random.default_rng(25)


@pytest.fixture(params=FIELDS, ids=lambda field: field.name)
def field(request):
    return request.param


def integers(x):
    return [int(value) for value in np.asarray(x).reshape(-1)]


def test_arithmetic_is_that_of_integers(field, rng):
    a, b, p = elements(rng, 2000, field=field), elements(rng, 2000, field=field), field.modulus
    pairs = list(zip(integers(a), integers(b), strict=True))
    assert integers(field.add(a, b)) == [(x + y) % p for x, y in pairs]
    assert integers(field.sub(a, b)) == [(x - y) % p for x, y in pairs]
    assert integers(field.mul(a, b)) == [x * y % p for x, y in pairs]
    assert int(field.sum(a)) == sum(integers(a)) % p
    assert int(field.dot(a, b)) == sum(x * y for x, y in pairs) % p
    assert integers(field.power(a, 11)) == [pow(x, 11, p) for x in integers(a)]
    assert integers(field.powers(a[:3], 9)) == [pow(x, k, p) for x in integers(a[:3]) for k in range(9)]


def test_products_of_all_edges():
    edges = [0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63, FIELD64.modulus - 2**32, FIELD64.modulus - 1, 2**64 - 2**33]
    a, b = (np.array(side, np.uint64) for side in zip(*[(x, y) for x in edges for y in edges], strict=True))
    assert integers(FIELD64.mul(a, b)) == [x * y % FIELD64.modulus for x in edges for y in edges]


def test_sums_of_many_large_ones_do_not_overflow(field):
    many = np.full(5000, field.modulus - 1, field.dtype)
    assert int(field.sum(many)) == -5000 % field.modulus


def test_signed_integers_go_in_and_out(field):
    numbers = np.array([0, 1, -1, 2**30 - 1, -(2**30), 12345, -54321])
    assert np.array_equal(field.center(field.elements(numbers)).astype(np.int64), numbers)
    assert integers(field.elements([-1, field.modulus, 3])) == [field.modulus - 1, 0, 3]


def test_the_middle_of_the_field_is_where_signs_change(field):
    half = (field.modulus - 1) // 2
    middle = np.array([half, half + 1], field.dtype)
    assert integers(field.center(middle)) == [half, -half]


def test_the_root_has_its_order_and_no_smaller_one(field):
    for log in (1, 5, field.log_order):
        root = field.root_of(2**log)
        assert pow(root, 2**log, field.modulus) == 1
        assert pow(root, 2 ** (log - 1), field.modulus) == field.modulus - 1


def test_bytes_go_in_and_out_and_only_canonical_ones(field, rng):
    x = elements(rng, 20, field=field)
    assert np.array_equal(field.decode(field.encode(x)), x)
    assert field.encode(x[:1]) == int(x[0]).to_bytes(field.size, "little")
    for wrong in (field.modulus.to_bytes(field.size, "little"), b"\xff" * field.size, bytes(field.size + 1)):
        with pytest.raises(Malencoded):
            field.decode(wrong)


@pytest.mark.parametrize("order", [1, 2, 8, 32])
def test_transforms_are_evaluation_and_interpolation(field, rng, order):
    columns = elements(rng, 2, order, 3, field=field)
    root, p = field.root_of(order), field.modulus
    found = values_at_roots(field, columns, order)
    for lead in range(2):
        for column in range(3):
            own = integers(columns[lead, :, column])
            expected = [sum(c * pow(root, k * j, p) for j, c in enumerate(own)) % p for k in range(order)]
            assert integers(found[lead, :, column]) == expected
    assert np.array_equal(coefficients_from_values(field, found), columns)


def test_values_between_are_those_of_a_transform_of_twice_the_order(field, rng):
    own = elements(rng, 2, 8, 3, field=field)
    denser = values_at_roots(field, own, 16)
    assert np.array_equal(values_between_roots(field, denser[:, 0::2]), denser[:, 1::2])


def test_lagrange_evaluates_at_any_point(field, rng):
    order, points = 16, elements(rng, 5, field=field)
    own = elements(rng, order, 1, field=field)
    at_roots = values_at_roots(field, own, order)[:, 0]
    expected = [sum(int(c) * pow(int(t), j, field.modulus) for j, c in enumerate(own[:, 0])) for t in points]
    assert integers(field.dot(lagrange_weights(field, points, order), at_roots)) == [
        e % field.modulus for e in expected
    ]


def test_next_power_of_two():
    assert [next_power_of_two(n) for n in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 4, 8, 1024]


class Counted(Xof):
    """A stream of these numbers, field elements or not."""

    name = "counted"

    def __init__(self, numbers, size):
        self._bytes = b"".join(int(number).to_bytes(size, "little") for number in numbers)

    def next(self, length):
        taken, self._bytes = self._bytes[:length], self._bytes[length:]
        return taken


@pytest.mark.parametrize("field", [FIELD32, FIELD64])
def test_a_stream_gives_elements_alone_and_all_of_them(field):
    """The modulus itself is none: it would be a second zero."""
    largest = field.modulus - 1
    stream = Counted([0, field.modulus, largest, field.modulus + 1, 5, 7], field.size)
    assert [int(value) for value in stream.next_vec(field, 4)] == [0, largest, 5, 7]
