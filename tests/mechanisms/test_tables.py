"""Tables of magnitudes: draws have the law of the table exactly, whatever the bits."""

from __future__ import annotations

import bisect
import itertools
from fractions import Fraction

import numpy as np
import pytest

from dovetail.mechanisms import exact_skellam
from dovetail.mechanisms.exact import ExactSampler
from dovetail.mechanisms.exact_skellam import BITS, SignedTable

WEIGHTS = [3, 5, 40, 0, 1, 1, 2, 900, 7]


def scripted(*words: int, then: int = 0) -> ExactSampler:
    """A sampler whose first request is answered with these 32-bit words, later ones with the 64-bit word `then`."""
    answers = itertools.chain([np.array(words, "<u4").tobytes()], itertools.repeat(None))

    def entropy(count: int) -> bytes:
        first = next(answers)
        return first if first is not None else np.full(count // 8, then, "<u8").tobytes()

    return ExactSampler(entropy)


def test_draws_have_the_law_of_the_table_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a table of 10 bits, all 1024 uniforms are tried: every value comes as often as the table says."""
    monkeypatch.setattr(exact_skellam, "BITS", 10)
    monkeypatch.setattr(exact_skellam, "_UPPER", 4)
    table = SignedTable.of(WEIGHTS)
    drawn = [int(table.draw(1, sampler=scripted(u >> 6, then=u & 63))[0][0]) for u in range(1024)]
    np.testing.assert_array_equal(
        np.bincount(drawn, minlength=len(WEIGHTS)), np.diff([0, *table.below]).astype(np.int64)
    )
    assert table.below[-1] == 1024
    assert len({entry >> 6 for entry in table.below}) < len(table.below), "some entries share their upper bits"


def test_the_table_is_that_of_the_weights() -> None:
    below = SignedTable.of(WEIGHTS).below
    assert below == [(total << BITS) // sum(WEIGHTS) for total in itertools.accumulate(WEIGHTS)]
    large = [weight * 3**400 + 1 for weight in WEIGHTS]
    exact = [Fraction(total << BITS, sum(large)) for total in itertools.accumulate(large)]
    assert all(abs(entry - value) < 2 for entry, value in zip(SignedTable.of(large).below, exact, strict=True))


def test_ties_are_resolved_by_further_bits() -> None:
    table = SignedTable.of(range(1, 1000))
    words = table.upper[[400, 460, 500, 520]]
    for rest in (0, 2**64 - 1, 0x0123456789ABCDEF):
        drawn, _ = table.draw(4, sampler=scripted(*words, then=rest))
        low = int("".join(f"{rest:016x}" * 5), 16) & ((1 << 257) - 1)
        expected = [bisect.bisect_right(table.below, int(word) << 257 | low) for word in words]
        np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize("weights", [[1], [1, 10**9, 1], [2**i for i in range(40)], list(range(1, 5000)), [0, 0, 3, 0]])
def test_where_the_search_begins_changes_no_draw(weights):
    """Each entry, its neighbours and any words between: the number of entries below, as a search of all would find."""
    table = SignedTable.of(weights)
    entries = table.upper.astype(np.int64)
    words = np.concatenate([entries - 1, entries, entries + 1, np.random.default_rng(0).integers(2**31, size=2000)])
    words = words[(words >= 0) & (words < 2**31) & ~np.isin(words, entries)].astype(np.uint32)
    found = table._invert_distribution(words, ExactSampler())
    np.testing.assert_array_equal(found, np.searchsorted(table.upper, words))


def test_the_sign_is_a_bit_of_its_own() -> None:
    table = SignedTable.of(WEIGHTS)
    words = [123456789, 2**31 - 1, 987654321]
    positive = table.draw(3, sampler=scripted(*words))
    negative = table.draw(3, sampler=scripted(*(word + 2**31 for word in words)))
    np.testing.assert_array_equal(positive[0], negative[0])
    assert positive[1].tolist() == [0, 0, 0]
    assert negative[1].tolist() == [-1, -1, -1]


def test_blocks_are_not_to_be_seen() -> None:
    """As many draws as asked for, from four bytes each, also where they need several blocks."""
    asked = []

    def entropy(count: int) -> bytes:
        asked.append(count)
        return np.random.default_rng(len(asked)).bytes(count)

    magnitudes, signs = SignedTable.of([1, 1]).draw(150_000, sampler=ExactSampler(entropy))
    assert len(magnitudes) == len(signs) == 150_000
    assert sum(asked) == 600_000
    assert abs(magnitudes.mean() - 0.5) < 5 * 0.5 / 150_000**0.5
    assert abs(signs.mean() + 0.5) < 5 * 0.5 / 150_000**0.5
