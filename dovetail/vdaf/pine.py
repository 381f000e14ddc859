"""PINE: vectors of bounded norm, added up by aggregators that verify it (draft-chen-cfrg-vdaf-pine-01).

Like Prio3, with two proofs: one that the squared norm is what is claimed, which needs no joint randomness, and one or
more about everything else (`norms`). Joint randomness comes twice: the random vectors for the wraparound checks from a
hash of the shares of the integers, what the proofs need from a hash of all shares.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from dovetail import _validate
from dovetail.vdaf.field import FIELD64, Field, Malencoded
from dovetail.vdaf.flp import Circuit, FullyLinearProof
from dovetail.vdaf.norms import NormBits, NormEquality, NormLayout, random_products
from dovetail.vdaf.systems import Queried, SharedReport, Unlucky
from dovetail.vdaf.xof import SEED, HmacSha256Aes128, Xof

__all__ = ["PINE64", "Pine", "Queried", "SharedReport", "Unlucky", "best_chunks"]


PINE64 = 0xFFFF1004
_BASIS: Literal["coefficients"] = "coefficients"
_VERSION = 1
_SHARE, _PROOF, _JOINT, _PROVE, _QUERY, _JOINT_SEED, _JOINT_PART, _WRAP, _WRAP_SEED, _WRAP_PART = range(1, 11)
_WIDER = 16.0  # norms that count as small products: more than the draft's, so that e^eps times an error stays nothing


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PineVariant:
    """One variant of PINE, by its id, for so many aggregators: sizes, seeds and hashes that all parties compute alike.

    The proofs come in two kinds, always in this order: of the norm (`norm_proofs` of them), and of all bits (`proofs`).
    """

    layout: NormLayout
    chunk: int
    norm_chunk: int
    shares: int = 2
    proofs: int = 2
    norm_proofs: int = 1
    number: int = PINE64
    xof: type[Xof] = HmacSha256Aes128

    def __post_init__(self) -> None:
        _validate.in_interval(2, 255, shares=self.shares)
        _validate.in_interval(1, 255, proofs=self.proofs, norm_proofs=self.norm_proofs)

    @property
    def field(self) -> Field:
        """The field that vectors are shared in."""
        return self.layout.field

    @functools.cached_property
    def flps(self) -> tuple[tuple[FullyLinearProof, int], tuple[FullyLinearProof, int]]:
        """The two kinds of proofs, of the norm and of the bits, and how many of each."""
        norm = NormEquality(self.layout, chunk=self.norm_chunk)
        bits = NormBits(self.layout, chunk=self.chunk)
        return (FullyLinearProof(norm, _BASIS), self.norm_proofs), (FullyLinearProof(bits, _BASIS), self.proofs)

    def total_length(self, length_name: str) -> int:
        """The elements of all proofs together, by a length of `FullyLinearProof`, such as "proof_length"."""
        return sum(count * getattr(flp, length_name) for flp, count in self.flps)

    @property
    def proof_counts(self) -> bytes:
        """How many proofs there are of each kind, as the two bytes that seeds are bound to."""
        return bytes([self.norm_proofs, self.proofs])

    @property
    def verifier_size(self) -> int:
        """Bytes of a verifier share."""
        return self.field.size * self.total_length("verifier_length") + 2 * SEED

    @property
    def public_size(self) -> int:
        """Bytes of the public share."""
        return 2 * SEED * self.shares

    @property
    def rand_size(self) -> int:
        """Random bytes that a user draws."""
        return SEED * (4 * self.shares - 1)

    def share_size(self, index: int) -> int:
        """Bytes of an aggregator's share: four seeds, or, for the leader (index 0), all elements and two blinds."""
        return (
            4 * SEED
            if index
            else self.field.size * (self.layout.num_shared + self.total_length("proof_length")) + 2 * SEED
        )

    def cut_by_kind(self, rows: np.ndarray, length_name: str) -> list[np.ndarray]:
        """Rows of elements of both kinds cut apart, into (rows, proofs of that kind, length) for each kind."""
        lengths = [count * getattr(flp, length_name) for flp, count in self.flps]
        parts = np.split(rows, [lengths[0]], axis=-1)
        return [
            part.reshape(len(rows), count, part.shape[-1] // count)
            for part, (_, count) in zip(parts, self.flps, strict=True)
        ]

    def wraparound_products(self, vector: np.ndarray, seed: bytes) -> np.ndarray:
        """The products of the integers with the random vectors that this seed stands for, (checks,)."""
        checks = self.layout.checks
        stream = self.xof(seed, self.tag(_WRAP)).next(checks * -(-len(vector) // 4))
        return random_products(self.field, vector, stream, checks)

    def joint_parts(
        self, usage: int, vector: np.ndarray, shares: list[np.ndarray], blinds: list[bytes], nonce: bytes
    ) -> list[bytes]:
        """Every aggregator's hash of its own share, the leader's first.

        Arguments:
            usage: which hash, `_WRAP_PART` or `_JOINT_PART`.
            vector: what is shared; the leader's share is what the helpers' shares leave of it.
            shares: the helpers' shares, which may be longer than the vector: their beginnings count.
            blinds: every aggregator's blind, the leader's first.
            nonce: the report's.
        """
        left = vector
        for share in shares:
            left = self.field.sub(left, share[: len(vector)])
        return [
            self.joint_part(usage, index, blind, share[: len(vector)], nonce)
            for index, (blind, share) in enumerate(zip(blinds, [left, *shares], strict=True))
        ]

    def joint_part(self, usage: int, index: int, blind: bytes, share: np.ndarray, nonce: bytes) -> bytes:
        """An aggregator's hash of its share, under its blind: its part of the joint randomness."""
        return self.xof.derive_seed(blind, self.tag(usage), bytes([index]), nonce, self.field.encode(share))

    def joint_seed(self, usage: int, parts: Sequence[bytes]) -> bytes:
        """The seed that follows from every aggregator's part, in order: nobody can choose a vector after it."""
        return self.xof.derive_seed(bytes(SEED), self.tag(usage), *parts)

    def vector_share(self, index: int, seed: bytes, length: int | None = None) -> np.ndarray:
        """A helper's share of the vector (or of its first `length` elements), expanded from its seed."""
        size = self.layout.num_shared if length is None else length
        return self.xof.expand(self.field, seed, self.tag(_SHARE), bytes([index]), size)

    def proof_share(self, index: int, seed: bytes) -> np.ndarray:
        """A helper's share of all proofs, expanded from its seed."""
        binder = self.proof_counts + bytes([index])
        return self.xof.expand(self.field, seed, self.tag(_PROOF), binder, self.total_length("proof_length"))

    def query_randomness(self, key: bytes, nonce: bytes) -> np.ndarray:
        """The random elements of all queries about one report, from the key that aggregators share."""
        length = self.total_length("query_length")
        return self.xof.expand(self.field, key, self.tag(_QUERY), self.proof_counts + nonce, length)

    def joint_randomness(self, seed: bytes) -> np.ndarray:
        """The joint random elements of the bits' proofs; the norm's proof needs none."""
        length = self.proofs * NormBits.joint
        return self.xof.expand(self.field, seed, self.tag(_JOINT), bytes([self.proofs]), length)

    def tag(self, usage: int) -> bytes:
        """What keeps hashes for different usages, variants and versions apart: 7 bytes."""
        return bytes([_VERSION]) + self.number.to_bytes(4, "big") + usage.to_bytes(2, "big")


class _Sharding(NamedTuple):
    """A report before its proofs.

    The vector and its products, the helpers' shares of it and their seeds, the leader's blinds with the seed of the
    proofs, and everybody's parts of the joint randomness.
    """

    vector: np.ndarray
    products: np.ndarray
    shares: list[np.ndarray]
    helpers: list[list[bytes]]
    own: tuple[bytes, bytes, bytes]
    parts: list[bytes]


def best_chunks(layout: NormLayout) -> tuple[int, int]:
    """The chunk lengths that make proofs shortest: of the bits' circuit, and of the norm's."""

    def best(length: int, circuit: Callable[[int], Circuit]) -> int:
        chunks = sorted({-(-length // rows) for rows in range(1, 1 + min(length, 4096))})
        return min(chunks, key=lambda chunk: FullyLinearProof(circuit(chunk), _BASIS).proof_length)

    return (
        best(layout.num_bits, lambda chunk: NormBits(layout, chunk=chunk)),
        best(layout.dim, lambda chunk: NormEquality(layout, chunk=chunk)),
    )


class Pine(PineVariant):
    """The roles of a variant: users shard, aggregators check, query, decide and add up.

    Guarantees:
        Shares of an honest vector are accepted, but for test points that are roots of unity.
        All shares of vector and proof but one are uniform, and what aggregators tell each other about an honest vector
        follows from public randomness.
    """

    @classmethod
    @functools.lru_cache(maxsize=32)
    def shipped_variant(cls, *, dim: int, squared: int, shares: int = 2) -> Pine:
        """The variant that ships: 64-bit field, 100 wraparound checks of 16 norms or more, the shortest proofs."""
        layout = NormLayout(field=FIELD64, dim=dim, squared=squared, alpha=_WIDER)
        if not layout.has_visible_wraps:
            raise ValueError(
                f"expected dim and norm for which every wraparound shows, got dim={dim}, norm={layout.norm_bound}"
            )
        chunk, norm_chunk = best_chunks(layout)
        return cls(layout=layout, chunk=chunk, norm_chunk=norm_chunk, shares=shares)

    @property
    def num_elements(self) -> int:
        """Field elements that an aggregator works with per report: the vector with its products."""
        return self.layout.length

    @property
    def zero_knowledge_error(self) -> float:
        """How far an honest user's randomness is from uniform, at most, because it draws again where a check failed."""
        return self.layout.prob_unlucky

    def soundness_error(self, hashes: float) -> float:
        """The probability, at most, that a report is accepted whose integers have a larger norm; rounded up.

        Its sender computes so many hashes to find lucky joint randomness, and aggregators follow the protocol
        (`docs/proofs/verified.md`, 3). The factor 1 + 1e-9 covers the rounding of this sum; parameters that the proof
        does not cover give 1.
        """
        if not self.layout.has_visible_wraps or self.layout.successes < self.layout.checks:
            return 1.0
        (norm, _), (bits, _) = self.flps
        modulus = self.field.modulus
        joint = (self.layout.num_bits + self.layout.checks + 3) / modulus
        at_norm, at_bits = (2 * flp.order / (modulus - flp.order) for flp in (norm, bits))
        lucky = hashes * (0.5**self.layout.checks + joint**self.proofs)
        mixed = sum(
            math.comb(self.proofs, k) * min(1.0, hashes * joint ** (self.proofs - k)) * at_bits**k
            for k in range(1, self.proofs + 1)
        )
        return min(1.0, (lucky + at_norm**self.norm_proofs + mixed) * (1 + 1e-9))

    def shard(self, integers: np.ndarray, nonce: bytes, rand: bytes) -> tuple[bytes, list[bytes]]:
        """User: the public share, and every aggregator's share, the leader's first.

        Raises `Unlucky` where a wraparound check failed: an honest user draws other random bytes.
        """
        (report,) = self.shard_all(integers[None], [nonce], [rand])
        return report

    def shard_all(
        self, integers: np.ndarray, nonces: Sequence[bytes], rands: Sequence[bytes]
    ) -> list[tuple[bytes, list[bytes]]]:
        """`shard` for several vectors, one per row."""
        shardings = [self._begin_sharding(*arguments) for arguments in zip(integers, nonces, rands, strict=True)]
        proofs = self._prove(shardings)
        return [self._finish_sharding(sharding, proof) for sharding, proof in zip(shardings, proofs, strict=True)]

    def _begin_sharding(self, integers: np.ndarray, nonce: bytes, rand: bytes) -> _Sharding:
        """Everything of a report that comes before its proofs, from `rand`.

        Raises `Unlucky` where too few products are small.

        `rand` holds four seeds for each helper (vector, proofs, both blinds), then the leader's blinds and the proofs'
        seed.
        """
        if len(rand) != self.rand_size:
            raise ValueError(f"expected {self.rand_size} random bytes, got {len(rand)}")
        seeds = [rand[i : i + SEED] for i in range(0, len(rand), SEED)]
        helpers = [seeds[4 * i : 4 * i + 4] for i in range(self.shares - 1)]
        wrap_blind, blind, prove = seeds[-3:]
        layout = self.layout
        vectors = [self.vector_share(index, seed[0]) for index, seed in enumerate(helpers, 1)]
        vector = self._encode_norm_part(integers)
        wrap_blinds = [wrap_blind, *(seed[2] for seed in helpers)]
        wrap_parts = self.joint_parts(_WRAP_PART, vector, vectors, wrap_blinds, nonce)
        products = self.wraparound_products(vector[: layout.dim], self.joint_seed(_WRAP_SEED, wrap_parts))
        bits = self._encode_product_part(products)
        if bits is None:
            raise Unlucky("expected small products of an honest vector, got a large one")
        vector = np.concatenate([vector, bits])
        parts = self.joint_parts(_JOINT_PART, vector, vectors, [blind, *(seed[3] for seed in helpers)], nonce)
        return _Sharding(vector, products, vectors, helpers, (wrap_blind, blind, prove), wrap_parts + parts)

    def _encode_norm_part(self, integers: np.ndarray) -> np.ndarray:
        """The first part of the vector, on its own so that a client that lies about it can be simulated."""
        return self.layout.encode_norm_part(integers)

    def _encode_product_part(self, products: np.ndarray) -> np.ndarray | None:
        """The second part of the vector, or None; on its own so that a client that lies about it can be simulated."""
        return self.layout.encode_product_part(products)

    def _prove(self, shardings: Sequence[_Sharding]) -> np.ndarray:
        """The proofs of all vectors at once, both kinds one after the other: one row of elements per vector."""
        length = self.total_length("prove_length")
        random = np.stack(
            [self.xof.expand(self.field, one.own[2], self.tag(_PROVE), self.proof_counts, length) for one in shardings]
        )
        seeds = [self.joint_seed(_JOINT_SEED, one.parts[self.shares :]) for one in shardings]
        joint = np.stack([self.joint_randomness(seed).reshape(self.proofs, -1) for seed in seeds])
        vectors = np.stack([np.concatenate([one.vector, one.products]) for one in shardings])
        proofs = []
        for (flp, count), randomness in zip(self.flps, self.cut_by_kind(random, "prove_length"), strict=True):
            copies = np.broadcast_to(vectors[:, None], (len(shardings), count, vectors.shape[-1]))
            own = joint if flp.circuit.joint else joint[:, :count, :0]
            proofs.append(flp.prove(copies, randomness, own).reshape(len(shardings), -1))
        return np.concatenate(proofs, axis=-1)

    def _finish_sharding(self, sharding: _Sharding, proofs: np.ndarray) -> tuple[bytes, list[bytes]]:
        """The public share and all shares.

        The leader gets in full what the helpers' seeds leave of vector and proofs.
        """
        field = self.field
        vector = sharding.vector
        for index, (share, seed) in enumerate(zip(sharding.shares, sharding.helpers, strict=True), 1):
            vector = field.sub(vector, share)
            proofs = field.sub(proofs, self.proof_share(index, seed[1]))
        leader = field.encode(vector) + field.encode(proofs) + sharding.own[0] + sharding.own[1]
        return b"".join(sharding.parts), [leader, *(b"".join(seed) for seed in sharding.helpers)]

    def check_encoding(self, index: int, report: SharedReport) -> None:
        """Refuse, with `Malencoded`, a report whose shares have another length or elements that are not canonical."""
        wanted = self.public_size, self.share_size(index)
        if (len(report.public), len(report.share)) != wanted:
            raise Malencoded(f"expected public and own share of {wanted} bytes, got others")
        if index == 0:
            self.field.decode(report.share[: -2 * SEED])

    def query(self, key: bytes, index: int, reports: Sequence[SharedReport]) -> list[Queried]:
        """An aggregator's answers about its shares of some reports, in their order, computed all at once."""
        if not reports:
            return []
        opened = [self._open_report(index, report) for report in reports]
        vectors, proofs, joints = (np.stack([one[i] for one in opened]) for i in range(3))
        queries = np.stack([self.query_randomness(key, report.nonce) for report in reports])
        verifiers = []
        proof_parts = self.cut_by_kind(proofs, "proof_length")
        query_parts = self.cut_by_kind(queries, "query_length")
        for (flp, count), proof, query in zip(self.flps, proof_parts, query_parts, strict=True):
            copies = np.broadcast_to(vectors[:, None], (len(reports), count, vectors.shape[-1]))
            joint = joints.reshape(len(reports), self.proofs, -1)
            joint = joint if flp.circuit.joint else joint[:, :1, :0]
            verifiers.append(flp.query(copies, proof, query, joint, self.shares).reshape(len(reports), -1))
        encoded = np.concatenate(verifiers, axis=-1)
        return [
            Queried(one[3], self.field.encode(verifier) + one[4]) for one, verifier in zip(opened, encoded, strict=True)
        ]

    def decide(self, verifiers: Sequence[Sequence[bytes]]) -> list[bytes | None]:
        """For every report, given the verifier shares of all aggregators in order: the seeds that all must have found.

        None: it is refused, for what it proves, or because a verifier share has not the form of one.
        """
        if not verifiers:
            return []
        size = self.verifier_size - 2 * SEED
        fine = np.array([len(one) == self.shares and all(map(self._is_well_formed, one)) for one in verifiers])
        sound = [one for one, ok in zip(verifiers, fine, strict=True) if ok]
        total = self.field.zeros(len(sound), size // self.field.size)
        for index in range(self.shares):
            shares = b"".join(one[index][:size] for one in sound)
            total = self.field.add(total, self.field.decode_unchecked(shares).reshape(total.shape))
        accepted = np.ones(len(sound), bool)
        for (flp, _), part in zip(self.flps, self.cut_by_kind(total, "verifier_length"), strict=True):
            accepted &= np.all(flp.decide(part), axis=-1)
        fine[fine] = accepted
        return [self._agreed_seeds(one) if ok else None for one, ok in zip(verifiers, fine, strict=True)]

    def public_share_of(self, verifiers: Sequence[bytes]) -> bytes:
        """The public share that fits these verifier shares; parts for the wraparound checks come first."""
        return b"".join(one[-2 * SEED : -SEED] for one in verifiers) + b"".join(one[-SEED:] for one in verifiers)

    def output_share(self, index: int, share: bytes) -> np.ndarray:
        """The aggregator's share of the integers, (dim,) elements; `share` has passed `check`."""
        if index:
            return self.vector_share(index, share[:SEED], length=self.layout.dim)
        return self.field.decode(share[: self.field.size * self.layout.dim])

    def _is_well_formed(self, verifier: bytes) -> bool:
        """Whether a verifier share has the right length and consists of canonical elements."""
        size = self.verifier_size - 2 * SEED
        return len(verifier) == self.verifier_size and bool(
            np.all(self.field.decode_unchecked(verifier[:size]) < self.field.modulus)
        )

    def _agreed_seeds(self, verifiers: Sequence[bytes]) -> bytes:
        """The joint seeds, of wraparound checks and of proofs, that follow from the parts in the verifier shares."""
        wrap = [one[-2 * SEED : -SEED] for one in verifiers]
        parts = [one[-SEED:] for one in verifiers]
        return self.joint_seed(_WRAP_SEED, wrap) + self.joint_seed(_JOINT_SEED, parts)

    def _open_report(self, index: int, report: SharedReport) -> tuple[np.ndarray, np.ndarray, np.ndarray, bytes, bytes]:
        """Vector with products, proofs, joint randomness, both joint seeds, and this aggregator's own parts of them."""
        field = self.field
        layout = self.layout
        share = report.share
        if index:
            vector = self.vector_share(index, share[:SEED])
            proofs = self.proof_share(index, share[SEED : 2 * SEED])
        else:
            elements = field.decode(share[: -2 * SEED])
            vector = elements[: layout.num_shared]
            proofs = elements[layout.num_shared :]
        public = [report.public[i : i + SEED] for i in range(0, len(report.public), SEED)]
        wrap_parts = public[: self.shares]
        parts = public[self.shares :]
        wrap_parts[index] = self.joint_part(
            _WRAP_PART, index, share[-2 * SEED : -SEED], vector[: layout.norm_part_length], report.nonce
        )
        parts[index] = self.joint_part(_JOINT_PART, index, share[-SEED:], vector, report.nonce)
        wrap_seed = self.joint_seed(_WRAP_SEED, wrap_parts)
        seed = self.joint_seed(_JOINT_SEED, parts)
        products = self.wraparound_products(vector[: layout.dim], wrap_seed)
        own_parts = wrap_parts[index] + parts[index]
        return np.concatenate([vector, products]), proofs, self.joint_randomness(seed), wrap_seed + seed, own_parts
