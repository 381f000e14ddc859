"""More is never better: larger budgets and more colluders never have a smaller eps."""

import contextlib
import math
import sys

import numpy as np
import pytest

from dovetail.accounting import bound
from dovetail.events import Everyone, FixedSize, PaddedBernoulli, PaddedTopk, Personalized, Report, Round, Shuffled
from dovetail.statements import NotApplicable

FEW, MANY = 30, 2_000
ROUNDING = 1e-6
KINDS = ("rr", "levels", "laplace", "generic", "cap", "double", "topk", "personal", "unis")


def crowd(rng: np.random.Generator, kind: str, eps_local: float):
    """A random event, as a function of its budget and of how many collude."""
    most = 500 if kind == "unis" else 5_000  # of more, a setting takes seconds
    users = int(np.exp(rng.uniform(np.log(10), np.log(most))))
    coordinates = int(np.exp(rng.uniform(0, np.log(300))))
    bits = {"kind": "rr", "levels": 2}
    report = {
        "rr": bits,
        "levels": {"kind": "rr", "levels": 4},
        "cap": {"kind": "cap", "cap_mass": float(rng.choice([0.02, 0.2]))},
    }.get(kind, {"kind": kind})
    inclusion, pad_to, top = (
        float(rng.uniform(0.02, 0.5)),
        int(users * rng.uniform(0.6, 1.2)) + 12,
        int(rng.integers(1, 9)),
    )
    spread = rng.uniform(0.2, 1.0, users)

    def event(factor: float, colluders: int):
        many = {"num_users": users, "colluders": colluders, "coordinates": coordinates}
        match kind:
            case "double":
                return PaddedBernoulli(
                    report=Report(eps_local=eps_local * factor, **bits), pad_to=pad_to, inclusion=inclusion, **many
                )
            case "topk":
                many["coordinates"] = 300
                return PaddedTopk(
                    report=Report(eps_local=eps_local * factor, **bits), pad_to=users + 3, top=top, decoys=0, **many
                )
            case "personal":
                budgets = tuple((eps_local * factor * spread).tolist())
                return Personalized(
                    kind="clip_laplace", eps_locals=budgets, coordinates=coordinates, colluders=colluders
                )
            case "unis":
                budgets = tuple((eps_local * factor * spread).tolist())
                return Personalized(kind="laplace", eps_locals=budgets, coordinates=coordinates, colluders=colluders)
        return Shuffled(report=Report(eps_local=eps_local * factor, **report), **many)

    return event, users


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [FEW // len(KINDS) + 1, pytest.param(MANY // len(KINDS) + 1, marks=pytest.mark.soak)])
def test_larger_budgets_and_more_colluders_are_never_better(kind, count, record_property):
    rng, worst, compared = np.random.default_rng(KINDS.index(kind)), 0.0, 0
    count = 1 if kind == "unis" and count < FEW else count  # which takes seconds
    while compared < count:
        eps_local = float(np.exp(rng.uniform(np.log(0.05), np.log(6))))
        event, users = crowd(rng, kind, eps_local)
        times, colluders = int(rng.integers(1, 12)), int(rng.integers(0, max(1, users // 10)))
        factor, more = float(rng.choice([1.02, 1.1, 1.4])), int(rng.integers(1, 4))
        sampled = kind not in ("personal", "unis") and rng.random() < 0.3
        participation = FixedSize(size=users, population=3 * users) if sampled else Everyone()

        def eps(factor: float, colluders: int) -> float:
            asked = [Round(mechanism=event(factor, colluders), participation=participation)] * times  # noqa: B023
            with contextlib.suppress(NotApplicable):
                return bound(asked, delta=1e-6).eps
            return math.inf

        plain, larger, among = eps(1.0, colluders), eps(factor, colluders), eps(1.0, colluders + more)
        if math.isinf(plain):
            continue
        compared += 1
        worst = max(worst, plain / larger - 1, plain / among - 1)
        told = str(event(1.0, colluders))[:300]
        assert plain <= larger * (1 + ROUNDING), (told, times, factor, plain, larger)
        assert plain <= among * (1 + ROUNDING), (told, times, more, plain, among)
    record_property("largest excess over a harder question", float(worst))
    sys.stdout.write(f"{kind}: {compared} settings, excess over a harder question at most {worst:.2e}\n")
