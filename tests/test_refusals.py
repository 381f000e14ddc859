"""What a function or a class does not take is refused in a sentence that names it, before anything is computed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dovetail.accounting import bound, groups, search
from dovetail.accounting.amplification import frontier
from dovetail.accounting.compose import check_target
from dovetail.accounting.pairs.binary import BinaryReports
from dovetail.accounting.pairs.binomial import BinomialPair, PoissonBinomialPair, clone_counts
from dovetail.accounting.releases import privunit, selection, split_and_mix, subjects
from dovetail.accounting.releases.privunit import Cap
from dovetail.audit import indices
from dovetail.audit.attacks import local
from dovetail.audit.bounds import ExactAttack, LowerBound
from dovetail.audit.indices import Population
from dovetail.audit.runs import lower_bound_from_scores
from dovetail.audit.training import one_run
from dovetail.data import views
from dovetail.events import Everyone, Gaussian, Round
from dovetail.experiment.ledgers import Ceiling
from dovetail.features import pipeline, whitening
from dovetail.learners.client import ClientUpdate
from dovetail.mechanisms.exact import ExactSampler
from dovetail.parties.common import sharing
from dovetail.parties.common.ledger import Ledger
from dovetail.parties.common.measures import Measure, check_measures
from dovetail.parties.common.sealing import Purpose, Workers
from dovetail.protocols.flame import _select
from dovetail.statements import Neighbors
from dovetail.vdaf import circuits
from dovetail.vdaf.field import FIELD64
from dovetail.vdaf.norms import NormLayout

GUESSED = {"canaries": 100, "guesses": 20, "right": 15, "delta": 1e-5, "confidence": 0.95, "attack": "a"}
NAMED = {"task_id": bytes(32), "round": 1, "role": "model", "key_id": bytes(16)}
LAWS = {"attack": "a", "log_first": np.log([0.5, 0.5]), "log_second": np.log([0.4, 0.6])}
NOISE = Gaussian(std=2.0, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE)
EVERYONE = Round(mechanism=NOISE, participation=Everyone())
CAP = {"dim": 4, "threshold": 0.5, "prob": 0.5}
BINARY = {"others": 3, "places": 3, "eps_local": 1.0}
COINS = {"others": 3, "exposed": 2, "prob_exposed": 0.5, "tilt": 0.5}
ROOM = {"dim": 3, "squared": 9, "checks": 4, "successes": 2}
UPDATE = {"update": "fedprox", "learning_rate": 0.5, "epochs": 1, "batch": 2, "mu": 0.1}
MEASURED = {"held_out": 0.5, "dim": 9, "shared": True, "clip_norm": 1.0}

SAID = {  # where a sentence has another word than the argument's name
    "task_id": "task id", "key_id": "key id", "log_first": "not on the same values", "scored": "pilot",
    "tried": "tried|right", "eps": "eps|ceiling", "coins": "probabilities|probs", "sender": "a sender of",
    "report": "a report of", "shared": "measures", "parts": "release",
}  # fmt: skip

CASES = [  # what is called, its arguments, and by name what of them is wrong, if alone
    (Cap, CAP, {"dim": [1, 2.5], "threshold": [-0.1, 1, 1.1], "prob": [0, 1]}),
    (privunit.least_variance_cap, {"dim": 4, "eps_local": 1.0}, {"dim": [1, 2.5], "eps_local": [0, math.inf]}),
    (
        BinaryReports,
        BINARY,
        {"others": [-1, 1.5], "places": [-1, 1.5], "eps_local": [0.0, math.nan], "inclusion": [0.0, 1.1]},
    ),
    (BinaryReports(**BINARY).pair, {"folds": 1}, {"folds": [0]}),
    (BinaryReports(**BINARY).delta, {"eps": 0.0}, {"eps": [-0.1, math.inf]}),
    (
        BinomialPair,
        COINS,
        {"others": [-1, 1.5], "exposed": [-1, 1.5], "folds": [0, 1.5], "prob_exposed": [-0.1, 1.1], "tilt": [0, 1.1]},
    ),
    (PoissonBinomialPair, {"hiding": [], "eps_local": 1.0}, {"eps_local": [0.0, math.inf]}),
    (PoissonBinomialPair(hiding=[], eps_local=1.0).delta, {"eps": 0.0}, {"eps": [-0.1]}),
    (clone_counts, {"coins": np.array([0.5])}, {"coins": [np.array([1.1]), np.array([-0.1]), np.array([math.nan])]}),
    (groups.for_group, {"bound": bound([EVERYONE], delta=1e-5), "size": 2}, {"size": [0, 1.5]}),
    (check_target, {"delta": None, "eps": 0.0}, {"eps": [-0.1, math.nan], "delta": [0.5]}),
    (check_target, {"delta": 0.5, "eps": None}, {"delta": [None, 1.1, -0.1]}),
    (selection.gamma_for, {"mean": 5.0, "eta": 0.0}, {"mean": [1.0, math.inf], "eta": [-1.0, math.inf]}),
    (
        split_and_mix.mixing_distance,
        {"num_users": 100, "slots": 5, "modulus": 256},
        {"num_users": [2.5], "slots": [2.5], "modulus": [2.5]},
    ),
    (
        split_and_mix.shares_for,
        {"num_users": 100, "modulus": 256, "target": 0.01},
        {"target": [0.0, 1.0]},
    ),
    (subjects.gaussian_of_users_together, {"event": NOISE, "users": 2}, {"users": [0, 1.5]}),
    (
        frontier.randomized_response,
        {"eps_local": 1.0, "mass": 0.5},
        {"eps_local": [0.0, math.inf], "mass": [0.0, 1.0]},
    ),
    (search.smallest_noise, {"eps_of": lambda noise: 1 / noise, "eps": 1.0}, {"eps": [0.0, math.inf]}),
    (ExactSampler, {"pool_words": 1}, {"pool_words": [0, 1.5]}),
    (ExactSampler().integers, {"bound": 2**63 - 1, "size": 1}, {"bound": [0, 2**63, 1.5]}),
    (_select._check_k, {"k": 3, "dim": 3}, {"k": [0, 4, 1.5]}),
    (LowerBound, {"eps": 0.0, "delta": 0.0, "attack": "a"}, {"confidence": [-0.1, 1.1], "eps": [-1.0], "delta": [1.1]}),
    (
        ExactAttack,
        LAWS,
        {"slack": [-1e-9], "pure_eps": [-1e-9, math.nan], "log_first": [np.zeros(3), np.zeros((1, 2))]},
    ),
    (ExactAttack(**LAWS).eps, {"delta": 0.0}, {"delta": [-0.1, 1.1]}),
    (ExactAttack(**LAWS).delta, {"eps": 0.0}, {"eps": [-0.1]}),
    (
        one_run.lower_bound,
        GUESSED,
        {
            "canaries": [0, 1.5],
            "guesses": [0, 101, 1.5],
            "right": [-1, 21, 1.5],
            "delta": [-0.1, 1.1],
            "confidence": [0.5, 1.0],
        },
    ),
    (
        one_run.p_value,
        {name: GUESSED[name] for name in ("canaries", "guesses", "right", "delta")} | {"eps": 0.0},
        {"eps": [-0.1, math.inf], "delta": [-0.1, 1.1], "right": [21], "guesses": [0]},
    ),
    (
        one_run.best_bound_of_guesses,
        {name: GUESSED[name] for name in ("canaries", "delta", "confidence", "attack")} | {"tried": {20: 15}},
        {"tried": [{}, {20: 21}], "confidence": [0.5, 1.0]},
    ),
    (
        lower_bound_from_scores,
        {"scored": {"a": np.zeros((2, 10))}, "delta": 1e-5, "confidence": 0.95},
        {"scored": [{"a": np.zeros((2, 9))}], "confidence": [0.0, 1.0]},
    ),
    (
        Population,
        {"users": 4, "dim": 2},
        {
            "users": [3, 4.5],
            "dim": [1, 2.5],
            "scale_exponent": [-0.1],
            "persistence": [-0.1, 1.1],
        },
    ),
    (
        indices.posterior_if_reported,
        {"prior": np.array([0.5]), "decoy_rate": 1.0},
        {"decoy_rate": [-0.1, 1.1]},
    ),
    (local.mass_on_one_cap_alone, {"dim": 10, "threshold": 0.5}, {"threshold": [0.0, 1.0], "dim": [2]}),
    (views.shift, {"rows": 1, "columns": -1}, {"rows": [0.5], "columns": [0.5]}),
    (views.rotate, {"degrees": -10.0}, {"degrees": [math.inf]}),
    (views.zoom, {"factor": 0.5}, {"factor": [0.0, -1.0]}),
    (Ceiling, {"eps": 0.1}, {"eps": [0.0, math.inf], "delta": [0.0, 1.0]}),
    (
        pipeline.Whitening,
        {"on": "digits", "rank": 1, "images": 2},
        {"rank": [0, 1.5], "images": [1, 2.5], "ridge": [-1e-9]},
    ),
    (
        whitening.principal_axes,
        {"blocks": lambda: [np.eye(3, dtype=np.float32)], "rank": 1},
        {"rank": [0, 1.5, 3]},
    ),
    (
        ClientUpdate,
        UPDATE,
        {"learning_rate": [0.0], "epochs": [0, 1.5], "batch": [0, 1.5], "mu": [-0.1], "update": ["other"]},
    ),
    (
        sharing.shard_additively,
        {"values": np.zeros(3, np.uint32), "bits": 32, "count": 2},
        {"bits": [0, 33, 1.5], "count": [1, 2.5]},
    ),
    (
        Purpose,
        NAMED,
        {
            "task_id": [bytes(31), bytes(33)],
            "key_id": [b""],
            "round": [-1, 2**32, 1.5],
            "role": ["other", "upload"],
            "version": [1.5],
            "sender": [bytes(32)],
            "report": [bytes(16)],
        },
    ),
    (Workers, {"workers": 1}, {"workers": [-1]}),
    (Measure, {"kind": "within_clip"}, {"largest": [0.0, math.inf], "classes": [2]}),
    (
        check_measures,
        {"measures": (Measure(kind="within_clip"),), **MEASURED},
        {"held_out": [-0.1, 1.1], "shared": [False]},
    ),
    (check_measures, {"measures": (), **MEASURED, "held_out": 0.0}, {"held_out": [0.5]}),
    (
        circuits.SumVec,
        {"field": FIELD64, "size": 2, "largest": 1, "chunk": 1},
        {"size": [0], "largest": [0], "chunk": [0]},
    ),
    (
        circuits.MultihotCountVec,
        {"field": FIELD64, "size": 2, "weight": 2, "chunk": 1},
        {"weight": [0, 3], "chunk": [0]},
    ),
    (
        NormLayout,
        {"field": FIELD64, **ROOM},
        {"dim": [0], "squared": [0], "checks": [0], "successes": [0, 5]},
    ),
]


@pytest.mark.parametrize(
    ("call", "arguments", "wrong"), CASES, ids=[getattr(call, "__qualname__", "?") for call, _, _ in CASES]
)
def test_one_argument_that_is_none_is_refused_and_all_of_them_pass_otherwise(call, arguments, wrong):
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=SAID.get(name, name)):
                call(**{**arguments, name: value})
    call(**arguments)


def test_ledger_of_a_task(tmp_path):
    good = {"task_id": bytes(32), "eps": 1.0, "delta": 1e-5}
    for wrong in ({"task_id": bytes(31)}, {"eps": 0.0}, {"delta": 0.0}, {"delta": 1.0}):
        with pytest.raises(ValueError, match="expected"):
            Ledger(tmp_path / "ledger.db", **{**good, **wrong})
    ledger = Ledger(tmp_path / "ledger.db", **good)
    for wrong in ({"round": 0}, {"round": 1.5}, {"eps": -0.1}, {"eps": math.nan}, {"delta": -0.1}):
        with pytest.raises(ValueError, match="expected"):
            ledger.reserve(**{"round": 1, "eps": 0.1, "delta": 1e-6, **wrong})


def test_updates_without_noise_are_of_a_round_or_more_and_of_steps_that_move():
    for wrong in ({"rounds": 0}, {"rounds": 1.5}, {"rounds": 1, "learning_rate": 0.0}):
        with pytest.raises(ValueError, match=r"rounds|learning_rate"):
            indices.noiseless_updates("digits", users=4, **wrong)
