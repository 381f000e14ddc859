"""Random changes of reports are refused and never crash anything; honest reports are accepted."""

import numpy as np
import pytest
from pine_reports import KEY, SMALL, accepted, of_norm, sharded_all

from dovetail.vdaf.field import FIELD64, Malencoded
from dovetail.vdaf.xof import SEED

BATCH = 100


def mutated(rng, report):
    """The report with something changed at one aggregator, or the same at both."""
    leader, helper = report
    kind = rng.integers(8)
    if kind < 3:  # one element of vector or proof
        place = int(rng.integers(len(leader.share) // 8 - SEED // 4))
        old = leader.share[8 * place : 8 * place + 8]
        new = FIELD64.encode(FIELD64.elements(rng.integers(0, 2 ** int(rng.integers(1, 63)), 1)))
        new = new if new != old else FIELD64.encode(FIELD64.add(FIELD64.decode(old), FIELD64.scalar(1)))
        share = leader.share[: 8 * place] + new + leader.share[8 * place + 8 :]
        return [leader._replace(share=share), helper]
    if kind == 3:  # a bit of the leader's
        return [leader._replace(share=flipped(rng, leader.share)), helper]
    if kind == 4:  # several bits of the helper's
        return [leader, helper._replace(share=flipped(rng, flipped(rng, helper.share)[::-1])[::-1])]
    if kind == 5:
        public = flipped(rng, leader.public)
        return [leader._replace(public=public), helper._replace(public=public)]
    if kind == 6:
        nonce = flipped(rng, leader.nonce)
        return [leader._replace(nonce=nonce), helper._replace(nonce=nonce)]
    first, second = sorted(rng.choice(4, 2, replace=False))  # two of the helper's seeds change places
    seeds = [helper.share[SEED * i : SEED * (i + 1)] for i in range(4)]
    seeds[first], seeds[second] = seeds[second], seeds[first]
    return [leader, helper._replace(share=b"".join(seeds))]


def flipped(rng, data):
    place = int(rng.integers(len(data)))
    return data[:place] + bytes([data[place] ^ (1 << int(rng.integers(8)))]) + data[place + 1 :]


def fits(report):
    try:
        for index, one in enumerate(report):
            SMALL.check_encoding(index, one)
    except Malencoded:
        return False
    return True


def accepted_mutations(rng, count):
    reports, found, looked_at = sharded_all(SMALL, rng, [of_norm(rng, 6, 990) for _ in range(20)]), 0, 0
    for _ in range(count // BATCH):
        changed = [mutated(rng, reports[rng.integers(len(reports))]) for _ in range(BATCH)]
        changed = [report for report in changed if report not in reports and fits(report)]
        found, looked_at = found + sum(accepted(SMALL, changed)), looked_at + len(changed)
    assert looked_at > 0.9 * count
    return found


def refused_honest(rng, count):
    refused = 0
    for _ in range(count // BATCH):
        vectors = [of_norm(rng, 6, rng.uniform(0, 1000)) for _ in range(BATCH)]
        refused += BATCH - sum(accepted(SMALL, sharded_all(SMALL, rng, vectors)))
    return refused


def test_some_mutations_are_refused():
    assert accepted_mutations(np.random.default_rng(1), 300) == 0


def test_some_honest_reports_are_accepted():
    assert refused_honest(np.random.default_rng(2), 100) == 0


@pytest.mark.soak
def test_many_mutations_are_refused():
    assert accepted_mutations(np.random.default_rng(3), 100_000) == 0


@pytest.mark.soak
def test_many_honest_reports_are_accepted():
    """One would be refused with probability below 2^-50, for a test point that is a root of unity."""
    assert len(KEY) == SEED
    assert refused_honest(np.random.default_rng(4), 100_000) == 0
