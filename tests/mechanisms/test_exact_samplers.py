"""Exact samplers: their laws (ALPHA stated, seeds fixed) and what they do with their bits."""

from __future__ import annotations

import copy
import math
import os
import pickle
import threading
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dovetail.mechanisms.exact import EntropyExhausted, ExactSampler, round_at_random

ALPHA = 1e-4
SAMPLES = 20_000


def seeded(seed: int = 0) -> ExactSampler:
    return ExactSampler(np.random.default_rng(seed).bytes)


def scripted(*words: int) -> ExactSampler:
    """A source of these 64-bit words, then nothing."""
    left = [b"".join(word.to_bytes(8, "little") for word in words)]

    def entropy(count: int) -> bytes:
        taken, left[0] = left[0][:count], left[0][count:]
        return taken

    return ExactSampler(entropy, pool_words=1)


def chi_square(sample: list[int], log_weight) -> float:
    """p-value of integers against the law proportional to exp(log_weight(z)), tails pooled."""
    z = np.arange(-2000, 2001)
    weight = np.exp([log_weight(abs(int(v))) for v in z])
    expected = SAMPLES * weight / weight.sum()
    inner = expected >= 10
    counts = Counter(sample)
    observed = np.array([counts[int(v)] for v in z[inner]])
    if expected[~inner].sum() < 10:  # too rare to count: condition on the rest
        return stats.chisquare(observed, expected[inner] * observed.sum() / expected[inner].sum()).pvalue
    pooled = np.append(observed, SAMPLES - observed.sum())
    return stats.chisquare(pooled, np.append(expected[inner], expected[~inner].sum())).pvalue


# Laws


@pytest.mark.parametrize("bound", [1, 2, 3, 7, 1000])
def test_randbelow_is_uniform(bound: int) -> None:
    sampler = seeded()
    counts = Counter(sampler.randbelow(bound) for _ in range(SAMPLES))
    assert set(counts) <= set(range(bound))
    if bound > 1:
        assert stats.chisquare([counts[k] for k in range(bound)]).pvalue > ALPHA


def test_randbelow_is_exactly_uniform_over_its_bits() -> None:
    """All values of the bits that randbelow(5) reads: each result once, the rest rejected."""
    results = Counter()
    for word in range(8):
        try:
            results[scripted(word).randbelow(5)] += 1
        except EntropyExhausted:
            results["rejected"] += 1
    assert results == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, "rejected": 3}


@pytest.mark.parametrize("bits", [1, 63, 64, 65, 66, 128, 129, 193])
def test_randbelow_draws_every_bit(bits: int) -> None:
    sampler, seen, never = seeded(bits), 0, (1 << bits) - 1
    for _ in range(60):
        drawn = sampler.randbelow(1 << bits)
        seen, never = seen | drawn, never & drawn
    assert seen == (1 << bits) - 1 and never == 0


def test_randbelow_beyond_one_word() -> None:
    bound = 3 * 2**100
    sample = [seeded(7).randbelow(bound)] + [seeded(k).randbelow(bound) for k in range(300)]
    assert all(0 <= value < bound for value in sample)
    assert stats.kstest([float(Fraction(value, bound)) for value in sample], "uniform").pvalue > ALPHA
    assert scripted(1, 2).randbelow(2**128) == 2**64 + 2


@pytest.mark.parametrize("prob", [Fraction(0), Fraction(1, 3), Fraction(9, 10), Fraction(1)])
def test_bernoulli(prob: Fraction) -> None:
    sampler = seeded(1)
    heads = sum(sampler.bernoulli(prob) for _ in range(SAMPLES))
    assert stats.binomtest(heads, SAMPLES, float(prob)).pvalue > ALPHA
    heads = int(sampler.bernoullis(prob, SAMPLES).sum())
    assert stats.binomtest(heads, SAMPLES, float(prob)).pvalue > ALPHA


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 3), Fraction(1), Fraction(5, 2), Fraction(4)])
def test_bernoulli_exp(exponent: Fraction) -> None:
    sampler = seeded(2)
    heads = sum(sampler.bernoulli_exp(exponent) for _ in range(SAMPLES))
    assert stats.binomtest(heads, SAMPLES, math.exp(-exponent)).pvalue > ALPHA
    if exponent:
        assert stats.binomtest(heads, SAMPLES, math.exp(-1.15 * exponent)).pvalue < 1e-6


@pytest.mark.parametrize("scale", [Fraction(1, 3), Fraction(2), Fraction(31, 7)])
def test_discrete_laplace(scale: Fraction) -> None:
    sampler = seeded(3)
    sample = [sampler.discrete_laplace(scale) for _ in range(SAMPLES)]
    assert chi_square(sample, lambda z: -z / float(scale)) > ALPHA
    assert chi_square(sample, lambda z: -z / (1.1 * float(scale))) < 1e-6
    assert chi_square(sample, lambda z: -z / (2 / 3 * float(scale))) < 1e-9
    p = math.exp(-1 / scale)
    variance = 2 * p / (1 - p) ** 2
    assert np.var(sample) == pytest.approx(variance, rel=6 * math.sqrt(6 / SAMPLES / min(1, variance)))


@pytest.mark.parametrize("sigma_squared", [Fraction(1, 4), Fraction(3), Fraction(101, 7)])
def test_discrete_gaussian(sigma_squared: Fraction) -> None:
    sampler = seeded(4)
    sample = [sampler.discrete_gaussian(sigma_squared) for _ in range(SAMPLES)]
    assert chi_square(sample, lambda z: -z * z / (2 * float(sigma_squared))) > ALPHA
    assert chi_square(sample, lambda z: -z * z / (2 * 1.2 * float(sigma_squared))) < 1e-6
    assert chi_square(sample, lambda z: -z * z / (2 * (2 / 3) ** 2 * float(sigma_squared))) < 1e-9
    assert np.mean(sample) == pytest.approx(0, abs=4 * math.sqrt(sigma_squared / SAMPLES))
    if sigma_squared >= 1:  # the variance is sigma^2 but for exp(-2 pi^2 sigma^2)
        assert np.var(sample) == pytest.approx(float(sigma_squared), rel=4.5 * math.sqrt(2 / SAMPLES))


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 2**53, 2**63 - 1])
def test_integers_are_uniform(bound: int) -> None:
    sample = seeded(5).integers(bound, SAMPLES)
    assert sample.dtype == np.int64
    assert sample.min() >= 0
    assert sample.max() < bound
    if 1 < bound < 10:
        assert stats.chisquare(np.bincount(sample, minlength=bound)).pvalue > ALPHA
    elif bound > 10:
        assert stats.kstest(sample / bound, "uniform").pvalue > ALPHA


# Bits


def rounded(number: float, word: int, then: int = 0) -> int:
    """What becomes of a number if its coin's first 32 bits are these, and the next 53 are `then`."""
    answers = iter([np.array([word], "<u4").tobytes(), np.array([then], "<u8").tobytes()])
    return int(round_at_random(np.array([number]), ExactSampler(lambda count: next(answers)))[0])


def test_rounding_compares_further_digits_on_a_tie_alone() -> None:
    first = math.floor(0.3 * 2**32)
    assert [rounded(7.3, first + step) for step in (-1, 1)] == [8, 7]
    rest = (7.3 - 7 - first / 2**32) * 2**32
    assert [rounded(7.3, first, int(rest * 2**53) + step) for step in (-1, 1)] == [8, 7]
    assert [rounded(-0.25, word) for word in (0, 3 * 2**30 - 1, 3 * 2**30)] == [0, 0, -1]
    assert {rounded(5.0, word, then) for word in (0, 9, 2**32 - 1) for then in (0, 2**53 - 1)} == {5}
    assert {rounded(-1e-30, word, then) for word in (0, 2**32 - 1) for then in (0, 2**53 - 1)} == {0}


def test_rounding_is_unbiased_and_takes_blocks() -> None:
    """The mean of 200,000 coins within 5 standard errors (alpha below 1e-6); another number's is not."""
    drawn = round_at_random(np.full((2, 100_000), -2.7), seeded(8))
    assert drawn.shape == (2, 100_000)
    assert set(np.unique(drawn)) == {-3, -2}
    assert abs(drawn.mean() + 2.7) < 5 * math.sqrt(0.21 / 200_000)
    assert abs(drawn.mean() + 2.69) > 5 * math.sqrt(0.21 / 200_000)


def test_a_tie_reads_further_digits() -> None:
    """1/3 is .0101... in binary: after 64 equal digits the next word decides, exactly."""
    tie = (2**64) // 3
    assert scripted(tie, 0).bernoullis(Fraction(1, 3), 1).tolist() == [True]
    assert scripted(tie, 2**64 - 1).bernoullis(Fraction(1, 3), 1).tolist() == [False]
    assert scripted(tie, tie, tie - 1).bernoullis(Fraction(1, 3), 1).tolist() == [True]
    assert scripted(tie - 1).bernoullis(Fraction(1, 3), 1).tolist() == [True]
    assert scripted(2**63).bernoullis(Fraction(1, 2), 1).tolist() == [False]  # no digits left: not below


def test_integers_reject_the_ragged_end() -> None:
    """2^64 is 2 modulo 7: the last two words belong to no complete run of 7."""
    assert scripted(2**64 - 1, 2**64 - 2, 9).integers(7, 1).tolist() == [2]
    assert scripted(2**64 - 3).integers(7, 1).tolist() == [6]


def test_draws_are_a_function_of_the_bytes() -> None:
    def transcript(sampler: ExactSampler) -> list:
        return [
            sampler.discrete_gaussian(5),
            sampler.randbelow(10**30),
            *sampler.integers(9, 20),
            sampler.bernoulli_exp(1),
        ]

    assert transcript(seeded(1)) == transcript(seeded(1))
    assert transcript(seeded(1)) != transcript(seeded(2))
    assert transcript(ExactSampler()) != transcript(ExactSampler())


def test_a_dry_source_raises() -> None:
    with pytest.raises(EntropyExhausted, match="expected 8 bytes from the bit source, got 0"):
        scripted().randbelow(2)
    with pytest.raises(EntropyExhausted, match="expected 24 bytes from the bit source, got 16"):
        scripted(1, 2).integers(10, 3)


def test_a_forked_child_does_not_repeat_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def entropy(count: int) -> bytes:
        fetched.append(count)
        return os.urandom(count)

    sampler = ExactSampler(entropy)
    sampler.randbelow(10)
    sampler.randbelow(10)
    assert len(fetched) == 1
    monkeypatch.setattr(os, "getpid", lambda: -1)
    sampler.randbelow(10)
    assert len(fetched) == 2


def test_threads_never_share_a_word() -> None:
    lock, state = threading.Lock(), [0]

    def counter(count: int) -> bytes:
        with lock:
            first, state[0] = state[0], state[0] + count // 8
        return np.arange(first, first + count // 8, dtype="<u8").tobytes()

    sampler, seen = ExactSampler(counter, pool_words=7), []
    threads = [
        threading.Thread(target=lambda: seen.extend([sampler.randbelow(2**64) for _ in range(3000)])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == len(seen) == 12_000


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(duplicate) -> None:
    with pytest.raises(TypeError, match="would repeat its randomness"):
        duplicate(ExactSampler())


# What is refused


@pytest.mark.parametrize(
    ("method", "bad"),
    [
        ("randbelow", 0),
        ("randbelow", 1.5),
        ("bernoulli", 0.5),
        ("bernoulli", Fraction(3, 2)),
        ("bernoulli", Fraction(-1, 2)),
        ("bernoulli", True),
        ("bernoulli_exp", -1),
        ("bernoulli_exp", 0.1),
        ("discrete_laplace", 0),
        ("discrete_laplace", 1.0),
        ("discrete_gaussian", Fraction(-1)),
        ("discrete_gaussian", math.nan),
    ],
)
def test_bad_arguments_are_refused(method: str, bad: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        getattr(seeded(), method)(bad)
