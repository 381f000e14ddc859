"""Reports to verify: honest ones, hostile ones, changed ones."""

import hashlib

import numpy as np

from dovetail.parties.user.hostile import make_lying as hostile
from dovetail.vdaf.field import FIELD64
from dovetail.vdaf.norms import NormLayout
from dovetail.vdaf.pine import Pine
from dovetail.vdaf.systems import SharedReport, Unlucky

KEY = hashlib.sha256(b"a key that aggregators share").digest()
__all__ = ["KEY", "SMALL", "accepted", "hostile", "of_norm", "sharded", "sharded_all", "small_checks", "two_squares"]
SMALL = Pine.shipped_variant(dim=6, squared=1000**2)


def small_checks(dim, *, squared, checks, shares=2):
    """A variant with fewer wraparound checks, whose luck can be seen."""
    layout = NormLayout(field=FIELD64, dim=dim, squared=squared, checks=checks, successes=checks)
    return Pine(layout=layout, chunk=8, norm_chunk=2, shares=shares)


def sharded(pine, rng, integers, nonce=None):
    """A report for every aggregator."""
    nonce = rng.bytes(16) if nonce is None else nonce
    while True:
        try:
            public, shares = pine.shard(np.asarray(integers), nonce, rng.bytes(pine.rand_size))
        except Unlucky:
            continue
        return [SharedReport(nonce, public, share) for share in shares]


def sharded_all(pine, rng, vectors):
    """Reports about all rows, none of which may be unlucky."""
    nonces = [rng.bytes(16) for _ in vectors]
    found = pine.shard_all(np.asarray(vectors), nonces, [rng.bytes(pine.rand_size) for _ in vectors])
    return [
        [SharedReport(nonce, public, share) for share in shares]
        for nonce, (public, shares) in zip(nonces, found, strict=True)
    ]


def accepted(pine, reports, keys=None):
    """Whether each report, a list with one share per aggregator, is accepted by all aggregators."""
    keys = [KEY] * pine.shares if keys is None else keys
    queried = [pine.query(keys[i], i, [report[i] for report in reports]) for i in range(pine.shares)]
    decided = pine.decide([[one.verifier for one in row] for row in zip(*queried, strict=True)])
    return [
        message is not None and all(one.seeds == message for one in row)
        for message, row in zip(decided, zip(*queried, strict=True), strict=True)
    ]


def of_norm(rng, dim, norm):
    """Integers of a norm close below."""
    direction = rng.standard_normal(dim)
    return np.trunc(direction / np.linalg.norm(direction) * norm).astype(np.int64)


def two_squares(modulus=FIELD64.modulus):
    """Integers whose squares add up to the modulus, by Euclid's algorithm from a root of -1."""
    a, b = modulus, pow(7, (modulus - 1) // 4, modulus)
    while b * b > modulus:
        a, b = b, a % b
    return b, a % b
