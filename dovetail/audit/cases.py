"""What `dovetail audit` looks at unless told otherwise: every protocol, at its paper's size and at one that can be run.

Paper-sized cases are attacked exactly. Small ones run the code: few users, few coordinates, and a delta that some ten
thousand trials can resolve, so that the certified eps is within reach of counting. Settings that a caller leaves open
are the protocol's own example, for any number of users and coordinates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.audit.runs.scores import View
from dovetail.guarantee import quotes
from dovetail.protocols import PROTOCOLS, fill_settings
from dovetail.statements import Neighbors

__all__ = ["CASES", "INDICES", "Case", "attack_terms"]

_FLAME_USERS, _FLAME_DIM, _FLAME_DELTA = 1000, 7850, 5e-6
_SMALL_DELTA = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A protocol at parameters that are worth attacking, in one view; `view` and `trials` as in `findings.audit`."""

    protocol: str
    label: str
    num_users: int
    dim: int
    delta: float
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    colluders: int = 0
    view: View = "analyzer"
    trials: int | None = None
    neighbors: Neighbors | None = None  # the protocol's own unless given
    quick: bool = False  # whether it belongs to the quick audit: at least one case of each protocol, seconds each

    @property
    def terms(self) -> quotes.Terms:
        """The terms that are attacked, with the protocol's example for settings that the case leaves open."""
        return attack_terms(
            *(self.protocol, self.num_users, self.dim, self.delta),
            chosen=self.settings,
            colluders=self.colluders,
            neighbors=self.neighbors,
        )


def attack_terms(
    name: str,
    num_users: int,
    dim: int,
    delta: float,
    *,
    chosen: Mapping[str, Any],
    colluders: int = 0,
    rounds: int = 1,
    population: int | None = None,
    participation: str | None = None,
    neighbors: Neighbors | None = None,
) -> quotes.Terms:
    """The terms of an attack, with the protocol's example for settings that `chosen` leaves open.

    Arguments:
        name: the protocol.
        num_users: how many users a round has.
        dim: how many coordinates an update has.
        chosen: the protocol's settings that are not its example's.
        population: of how many users a round takes `num_users`; everyone takes part unless given.
        participation: how it takes them, one of `quotes.SAMPLED`; by default a secret sample of fixed size.
        neighbors: the protocol's own relation unless given.
    """
    terms = quotes.Terms(
        num_users=num_users,
        dim=dim,
        delta=delta,
        rounds=rounds,
        colluders=colluders,
        settings=fill_settings(name, dim, chosen),
        neighbors=neighbors,
    )
    return quotes.with_cohort(terms, participation, population)


def _flame_case(protocol: str, label: str, **chosen: Any) -> Case:
    """A case at the size of FLAME's experiments, attacked exactly; `chosen` are settings."""
    return Case(
        protocol=protocol,
        label=label,
        num_users=_FLAME_USERS,
        dim=_FLAME_DIM,
        delta=_FLAME_DELTA,
        settings=chosen,
        trials=0,
    )


def _apes_case(protocol: str, label: str, dim: int = _FLAME_DIM, delta: float = 3.6e-5, **chosen: Any) -> Case:
    """A case at the size of APES's experiments, attacked exactly; `chosen` are settings."""
    return Case(protocol=protocol, label=label, num_users=10_000, dim=dim, delta=delta, settings=chosen, trials=0)


def _sum_case(protocol: str, label: str, **chosen: Any) -> Case:
    """A case of a protocol that sums one number a user, attacked exactly; `chosen` are settings."""
    return Case(
        protocol=protocol, label=label, num_users=1000, dim=1, delta=_FLAME_DELTA, settings=chosen, trials=0, quick=True
    )


def _small_case(protocol: str, *, num_users: int = 10, dim: int = 2, **more: Any) -> Case:
    """A case that is small enough to run the code; `more` are the case's own fields, and settings by any other name."""
    chosen = {key: value for key, value in more.items() if key not in ("view", "colluders", "neighbors", "quick")}
    variant = [str(chosen[key]) for key in ("method", "clip", "randomizer", "noise") if key in chosen]
    crowd = [f"{more['colluders']} of {num_users} collude"] if "colluders" in more else []
    relation = [more["neighbors"].value] if "neighbors" in more else []
    return Case(
        protocol=protocol,
        label=", ".join(["the code", *variant, *crowd, *relation]),
        num_users=num_users,
        dim=dim,
        delta=_SMALL_DELTA,
        settings=chosen,
        colluders=more.get("colluders", 0),
        view=more.get("view", "analyzer"),
        neighbors=more.get("neighbors"),
        quick=more.get("quick", True),
    )


_K = _FLAME_DIM // 50  # FLAME's k, the coordinates that SS-Topk selects
_ODD_ONE_OUT = [8.0, *[0.05] * 9999]  # personal budgets

_PAPERS = (
    _flame_case("ss_simple", "FLAME's size"),
    _flame_case("ss_simple", "as printed: whole messages", published=True),
    _flame_case("ss_double", "FLAME's size, repaired", pad_to=333),
    _flame_case("ss_double", "as printed: whole messages", published=True, pad_to=333),
    _flame_case("ss_topk", "FLAME's size, all decoys"),
    _flame_case("ss_topk", "as printed, but for the shuffle of coordinates", pad_to=333, decoys=0),
    _flame_case("ss_topk", "as printed: a surplus is kept", published=True, linkage="coordinate", pad_to=333, decoys=0),
    _flame_case("secagg", "FLAME's size"),
    _flame_case("secagg", "FLAME's size, aggregators' noise", noise="aggregators"),
    _flame_case("dp_fl", "FLAME's size"),
    _flame_case("dp_fl", "Geyer's median", clip="median"),
    _flame_case("central_sub", "FLAME's size"),
    _flame_case("central_sub", "as printed: adaptive Z", adaptive_z=True),
    _apes_case("apes", "APES's size"),
    _apes_case("apes", "one user at 8 among .05", dim=1, delta=1e-8, budgets=_ODD_ONE_OUT),
    _apes_case("s_apes", "APES's size"),
    _apes_case("unis", "APES's size"),
    _apes_case("pldp", "APES's size"),
    _apes_case("ldp_min", "APES's size"),
    _sum_case("binary_sum", "1000 users"),
    _sum_case("real_sum", "1000 users, one report", method="single"),
    _sum_case("real_sum", "1000 users, unary code", method="unary"),
    _sum_case("real_sum", "1000 users, shares", method="split", noise_multiplier=2.0),
)

_CODE = (
    _small_case("ss_simple", eps_local=1.0),
    _small_case("ss_simple", eps_local=1.0, colluders=5, quick=False),
    _small_case("ss_simple", eps_local=1.0, view="colluding"),
    _small_case("ss_simple", eps_local=1.0, view="observer", quick=False),
    _small_case("ss_double", num_users=20, dim=4, eps_local=2.0, beta=0.5),
    _small_case("ss_topk", dim=4, k=2, eps_local=1.0),
    _small_case("ss_topk", dim=4, k=2, eps_local=1.0, view="colluding", quick=False),
    _small_case("privunit", dim=4),
    _small_case("split_and_mix", num_users=60, dim=1, noise_multiplier=1.0),
    _small_case(
        "split_and_mix", num_users=60, dim=1, noise_multiplier=1.0, neighbors=Neighbors.ADD_REMOVE, quick=False
    ),
    _small_case("secagg", num_users=60, dim=1, noise_multiplier=1.0),
    _small_case("secagg", num_users=60, dim=1, noise_multiplier=1.0, neighbors=Neighbors.ADD_REMOVE, quick=False),
    _small_case("secagg", num_users=5, dim=1, noise_multiplier=1.0, noise="aggregators", quick=False),
    _small_case("apes", budgets=[0.5, 1.0]),
    _small_case("s_apes", dim=4, budgets=[0.5, 1.0], keep=0.5),
    _small_case("unis", budgets=[0.5, 1.0]),
    _small_case("pldp", budgets=[0.5, 1.0]),
    _small_case("ldp_min", budgets=[0.5, 1.0]),
    _small_case("real_sum", dim=1, method="single", levels=4, eps_local=2.0),
    _small_case("real_sum", dim=1, method="unary", levels=4, quick=False),
    _small_case("real_sum", dim=1, num_users=60, method="split", noise_multiplier=1.0, quick=False),
    _small_case("dp_fl", num_users=11, dim=200, clip="median", quick=False),
    _small_case("ldp_fl", randomizer="laplace", clip_value=1.0, eps_local=1.0, quick=False),
    _small_case("local_sub", steps=2),
)


def _example_cases() -> Iterator[Case]:
    """The example settings of every protocol that has no case above, at FLAME's size and at one that can be run."""
    for name, protocol in PROTOCOLS.items():
        if all(case.protocol != name for case in _PAPERS):
            yield dataclasses.replace(_flame_case(name, "FLAME's size"), dim=protocol.only_dim or _FLAME_DIM)
        if not any(case.protocol == name and case.quick for case in _CODE):
            yield _small_case(name, dim=protocol.only_dim or 2)


CASES: tuple[Case, ...] = (*_PAPERS, *_CODE, *_example_cases())

INDICES = attack_terms(  # l = 16: FLAME's nu is 3.125
    "ss_topk", _FLAME_USERS, _FLAME_DIM, _FLAME_DELTA, chosen={"k": _K, "decoys": 15 * _K, "pad_to": 333}
)
