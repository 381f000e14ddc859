"""Byte for byte what draft-irtf-cfrg-vdaf-20 and draft-chen-cfrg-vdaf-pine-01 say, where their vectors are present."""

import numpy as np
import pytest
from public_vectors import vectors

from dovetail.vdaf.circuits import Count, Histogram, MultihotCountVec, SumVec
from dovetail.vdaf.field import FIELD32, FIELD64, FIELD128, Malencoded
from dovetail.vdaf.flp import FullyLinearProof
from dovetail.vdaf.norms import NormLayout
from dovetail.vdaf.pine import PINE64, Pine
from dovetail.vdaf.prio3 import Prio3
from dovetail.vdaf.systems import SharedReport
from dovetail.vdaf.xof import TurboShake128

PINE32 = 0xFFFF1005


def raw(text):
    return bytes.fromhex(text)


def pine_of(vector):
    field = {"Field32": FIELD32, "Field64": FIELD64}[vector["field"]]
    layout = NormLayout(
        field=field,
        dim=vector["dimension"],
        squared=vector["l2_norm_bound"] ** 2,
        checks=vector["num_wr_checks"],
        successes=vector["num_wr_successes"],
        alpha=vector["alpha"],
    )
    return Pine(
        layout=layout,
        chunk=vector["chunk_length"],
        norm_chunk=vector["chunk_length_norm_equality"],
        shares=vector["shares"],
        proofs=vector["proofs"],
        norm_proofs=vector["proofs_norm_equality"],
        number=PINE32 if field is FIELD32 else PINE64,
    )


@pytest.mark.parametrize("vector", vectors("pine/*.json"))
def test_pine(vector):
    pine, field = pine_of(vector), pine_of(vector).field
    totals = [field.zeros(vector["dimension"]) for _ in range(vector["shares"])]
    for report in vector["prep"]:
        integers = np.rint(np.array(report["measurement"]) * 2 ** vector["num_frac_bits"]).astype(np.int64)
        nonce = raw(report["nonce"])
        public, shares = pine.shard(integers, nonce, raw(report["rand"]))
        assert public.hex() == report["public_share"]
        assert [share.hex() for share in shares] == report["input_shares"]
        queried = []
        for index, share in enumerate(shares):
            pine.check_encoding(index, SharedReport(nonce, public, share))
            queried += pine.query(raw(vector["verify_key"]), index, [SharedReport(nonce, public, share)])
        verifiers = [one.verifier for one in queried]
        assert [one.hex() for one in verifiers] == report["prep_shares"][0]
        (message,) = pine.decide([verifiers])
        assert message is not None and message.hex() == report["prep_messages"][0]
        assert {one.seeds for one in queried} == {message}
        outputs = [pine.output_share(index, share) for index, share in enumerate(shares)]
        assert [[field.encode(x[None]).hex() for x in one] for one in outputs] == report["out_shares"]
        totals = [field.add(total, one) for total, one in zip(totals, outputs, strict=True)]
    assert [field.encode(total).hex() for total in totals] == vector["agg_shares"]
    result = field.center(field.add(*totals)) / 2 ** vector["num_frac_bits"]
    assert result.tolist() == vector["agg_result"]


def prio3_of(vector):
    pytest.importorskip("Crypto.Hash.TurboSHAKE128", reason="expected PyCryptodome for TurboSHAKE128, got none")
    size, chunk, kind = vector.get("length"), vector.get("chunk_length"), vector["file"].split("_")[0]
    circuit, number, proofs = {
        "Prio3Count": lambda: (Count(FIELD64), 1, 1),
        "Prio3SumVec": lambda: (SumVec(FIELD128, size=size, largest=vector["max_measurement"], chunk=chunk), 3, 1),
        "Prio3Histogram": lambda: (Histogram(FIELD128, size=size, chunk=chunk), 4, 1),
        "Prio3MultihotCountVec": lambda: (
            MultihotCountVec(FIELD128, size=size, weight=vector["max_weight"], chunk=chunk),
            5,
            1,
        ),
        "Prio3SumVecWithMultiproof": lambda: (
            SumVec(FIELD64, size=size, largest=vector["max_measurement"], chunk=chunk),
            0xFFFFFFFF,
            3,
        ),
    }[kind]()
    return Prio3(
        FullyLinearProof(circuit, "values"),
        circuit,
        number,
        TurboShake128,
        shares=vector["shares"],
        proofs=proofs,
        context=raw(vector["ctx"]),
    )


@pytest.mark.parametrize("vector", vectors("prio3/Prio3*.json", absent=["_bad_"]))
def test_prio3(vector):
    prio3 = prio3_of(vector)
    field, key = prio3.field, raw(vector["verify_key"])
    totals = [0] * vector["shares"]
    for report in vector["reports"]:
        nonce = raw(report["nonce"])
        public, shares = prio3.shard(report["measurement"], nonce, raw(report["rand"]))
        assert public.hex() == report["public_share"]
        assert [share.hex() for share in shares] == report["input_shares"]
        found = [prio3.verify_init(key, index, nonce, public, share) for index, share in enumerate(shares)]
        assert [one.hex() for _, one in found] == report["verifier_shares"][0]
        message = prio3.verifier_shares_to_message([one for _, one in found])
        assert message is not None and message.hex() == report["verifier_messages"][0]
        outputs = [prio3.verify_next(state, message) for state, _ in found]
        assert [field.encode(one).hex() for one in outputs] == [as_bytes(one) for one in report["out_shares"]]
        totals = [field.add(total, one) for total, one in zip(totals, outputs, strict=True)]
    assert [field.encode(np.asarray(total)).hex() for total in totals] == vector["agg_shares"]
    whole = field.zeros(len(totals[0]))
    for total in totals:
        whole = field.add(whole, total)
    assert np.array_equal([int(x) for x in whole], np.atleast_1d(vector["agg_result"]))


def as_bytes(share):
    return share if isinstance(share, str) else "".join(share)


@pytest.mark.parametrize("vector", vectors("prio3/Prio3*_bad_*.json"))
def test_bad_prio3_reports_are_refused(vector):
    """As many steps succeed as the vector says; the one that is said to fail does."""
    prio3, key = prio3_of(vector), raw(vector["verify_key"])
    (report,) = vector["reports"]
    nonce, public = raw(report["nonce"]), raw(report["public_share"])
    found = [prio3.verify_init(key, i, nonce, public, raw(share)) for i, share in enumerate(report["input_shares"])]
    said = {one["operation"]: one["success"] for one in vector["operations"]}
    if "verifier_shares_to_message" in said:
        message = prio3.verifier_shares_to_message([one for _, one in found])
        assert (message is not None) == said["verifier_shares_to_message"]
    else:
        message = raw(report["verifier_messages"][0])
    failing = [one for one in vector["operations"] if not one["success"]]
    assert failing
    for one in failing:
        if one["operation"] == "verify_next":
            assert prio3.verify_next(found[one["aggregator_id"]][0], message) is None
    assert any(prio3.verify_next(state, message) is None for state, _ in found)


@pytest.mark.parametrize("vector", vectors("prio3/XofTurboShake128.json"))
def test_turboshake(vector):
    pytest.importorskip("Crypto.Hash.TurboSHAKE128", reason="expected PyCryptodome for TurboSHAKE128, got none")
    arguments = raw(vector["seed"]), raw(vector["dst"]), raw(vector["binder"])
    assert TurboShake128.derive_seed(*arguments).hex() == vector["derived_seed"]
    found = TurboShake128.expand(FIELD128, *arguments, vector["length"])
    assert FIELD128.encode(found).hex() == vector["expanded_vec_field128"]


def test_what_is_too_short_is_refused():
    circuit = SumVec(FIELD64, size=3, largest=7, chunk=2)
    prio3 = Prio3(FullyLinearProof(circuit, "values"), circuit, 3, TurboShake128)
    with pytest.raises(Malencoded):
        prio3.verify_init(bytes(32), 0, bytes(16), bytes(64), bytes(10))
