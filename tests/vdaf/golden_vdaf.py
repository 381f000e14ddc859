"""Test vectors of what ships, for tests/golden/vdaf.json: `python tests/vdaf/golden_vdaf.py` prints them."""

import hashlib
import json
import sys

import numpy as np

from dovetail.parties.aggregator.store import round_key
from dovetail.parties.common.sharing import field_head, proof_nonce
from dovetail.vdaf.circuits import MultihotCountVec
from dovetail.vdaf.field import FIELD64
from dovetail.vdaf.flp import FullyLinearProof
from dovetail.vdaf.levels import LevelProofs
from dovetail.vdaf.pine import Pine
from dovetail.vdaf.prio3 import Prio3
from dovetail.vdaf.systems import SharedReport
from dovetail.vdaf.xof import HmacSha256Aes128

KEY, NONCE = bytes(range(32)), bytes(range(16))


def digest(data):
    return hashlib.sha256(data).hexdigest()


def rand(size):
    return bytes(i % 256 for i in range(size))


def pine(shares):
    variant = Pine.shipped_variant(dim=5, squared=100**2, shares=shares)
    integers = np.array([60, -80, 0, 0, 0])
    public, parts = variant.shard(integers, NONCE, rand(variant.rand_size))
    queried = [variant.query(KEY, i, [SharedReport(NONCE, public, part)])[0] for i, part in enumerate(parts)]
    (message,) = variant.decide([[one.verifier for one in queried]])
    return {
        "integers": integers.tolist(),
        "squared_norm": 100**2,
        "chunks": [variant.chunk, variant.norm_chunk],
        "public": public.hex(),
        "sha256_of_shares": [digest(part) for part in parts],
        "sha256_of_verifiers": [digest(one.verifier) for one in queried],
        "message": message.hex(),
        "outputs": [FIELD64.encode(variant.output_share(i, part)).hex() for i, part in enumerate(parts)],
    }


def multihot():
    circuit = MultihotCountVec(FIELD64, size=9, weight=4, chunk=3)
    flp = FullyLinearProof(circuit, "values")
    prio3 = Prio3(flp, circuit, 0xFFFFFFFF, HmacSha256Aes128, proofs=2, context=b"dovetail")
    bits = [1, 0, 0, 1, 0, 0, 0, 0, 1]
    public, parts = prio3.shard(bits, NONCE, rand(prio3.rand_size))
    found = [prio3.verify_init(KEY, i, NONCE, public, part) for i, part in enumerate(parts)]
    message = prio3.verifier_shares_to_message([one for _, one in found])
    return {
        "bits": bits,
        "public": public.hex(),
        "sha256_of_shares": [digest(part) for part in parts],
        "sha256_of_verifiers": [digest(one) for _, one in found],
        "message": message.hex(),
        "outputs": [FIELD64.encode(prio3.verify_next(state, message)).hex() for state, _ in found],
    }


def levels():
    proofs = LevelProofs.shipped_variant(size=6, largest=2)
    integers = np.array([0, 1, 2, 2, 1, 0])
    public, parts = proofs.shard(integers, NONCE, rand(proofs.rand_size))
    queried = [proofs.query(KEY, i, [SharedReport(NONCE, public, part)])[0] for i, part in enumerate(parts)]
    (message,) = proofs.decide([[one.verifier for one in queried]])
    return {
        "integers": integers.tolist(),
        "largest": 2,
        "chunk": proofs.chunk,
        "public": public.hex(),
        "sha256_of_shares": [digest(part) for part in parts],
        "sha256_of_verifiers": [digest(one.verifier) for one in queried],
        "message": message.hex(),
        "outputs": [FIELD64.encode(proofs.output_share(i, part)).hex() for i, part in enumerate(parts)],
    }


def computed():
    return {
        "provenance": "computed by this library; the code that computes them reproduces the public test vectors",
        "key": KEY.hex(),
        "nonce": NONCE.hex(),
        "rand": "the bytes 0, 1, 2, ... modulo 256, as many as are drawn",
        "pine_2": pine(2),
        "pine_3": pine(3),
        "multihot": multihot(),
        "levels": levels(),
        "wire": {
            "task_id": KEY.hex(),
            "round": 3,
            "sender": NONCE.hex(),
            "report": NONCE[::-1].hex(),
            "nonce": proof_nonce(KEY, 3, NONCE, NONCE[::-1]).hex(),
            "parts": [bytes(32).hex(), (b"\1" * 32).hex()],
            "round_key": round_key(KEY, 3, [b"\1" * 32, bytes(32)]).hex(),
            "head_of_5_packed": field_head(5, packed=True).hex(),
            "head_of_5_seeded": field_head(5, packed=False).hex(),
        },
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(computed(), indent=2) + "\n")
