"""What FLAME prints about privacy, held against what is certified and what an attack shows; nothing is trained.

Every number is for one epoch, which is one round of each user. *As printed* the k reports of a client travel as one
message and a surplus over n_p is kept. *Apart* is the reading that is kindest to the paper: every coordinate is
shuffled on its own, and a surplus is dropped. Certified and audited are always about the form that a row names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.audit import LowerBound
from dovetail.claims import flame
from dovetail.guarantee import quotes
from dovetail.papers._exhibit import Part, Row
from dovetail.papers._runner import Runner
from dovetail.protocols import Claimed
from dovetail.statements import Statement

__all__ = [
    "BETA",
    "DELTA",
    "DIM",
    "EPS_REPORT",
    "HEADLINE",
    "USERS",
    "apart",
    "as_printed",
    "claimed_on",
    "eps_of",
    "plan",
    "row_on",
]

USERS, DIM, DELTA = 1000, 7850, 5e-6
BETA, EPS_REPORT, EPS_LOCAL = 0.02, 0.5, 78.5


def plan(*, num_users: int = USERS, dim: int = DIM, **settings: Any) -> quotes.Terms:
    """One epoch at FLAME's size, unless told otherwise."""
    return quotes.Terms(num_users=num_users, dim=dim, delta=DELTA, settings=settings)


def as_printed(name: str, **settings: Any) -> quotes.Terms:
    """The printed form with its Laplace reports, as its analyzer can attack it.

    For SS-Topk the attack looks at counts alone, so links between coordinates are left out: it needs less than is
    shown.
    """
    links: dict[str, Any] = {"linkage": "coordinate"} if name == "ss_topk" else {}
    return plan(published=True, randomizer="laplace", **links, **settings)


def apart(name: str, *, dim: int, eps_report: float, beta: float = BETA, pad_to: int = 333) -> quotes.Terms:
    """The repaired form: coordinates shuffled on their own; binary reports where a part of them is selected."""
    match name:
        case "ss_simple":
            return plan(dim=dim, eps_local=eps_report, randomizer="laplace")
        case "ss_double":
            return plan(dim=dim, eps_local=eps_report, beta=beta, pad_to=pad_to)
    return plan(dim=dim, eps_local=eps_report, k=round(beta * dim), decoys=0, pad_to=pad_to)


def eps_of(one: Statement | LowerBound | None) -> float | None:
    """Of a statement or an attack, if there is one."""
    return None if one is None else one.eps


def claimed_on(name: str, about: quotes.Terms, **how: Any) -> Statement:
    """The paper's own formula for this protocol, computed in a given way."""
    protocol, cohort = quotes.settle_protocol(name, about)
    if not isinstance(protocol, Claimed) or (published := protocol.published_event(cohort, about.dim)) is None:
        raise ValueError(f"expected a protocol that its paper makes a claim for, got {name!r}")
    scope = protocol.view(cohort, about.dim, neighbors=protocol.relation).scope
    return protocol.formula(published[0], delta=about.delta, **how).statement(scope, span="one epoch")


def row_on(
    runner: Runner,
    label: str,
    name: str,
    about: quotes.Terms,
    *,
    paper: Mapping[str, float] | None = None,
    claimed: Statement | None = None,
    **more: Any,
) -> Row:
    """A protocol on these terms: claimed, certified and attacked."""
    quoted = quotes.quote(name, about)
    return Row(
        label=label,
        paper=paper or {},
        claimed=claimed or quoted.claimed,
        certified=quoted.certified,
        audited=runner.audit(name, about),
        **more,
    )


_SELECTED: dict[str, Any] = {"eps_local": EPS_REPORT, "pad_to": 333}
_TOP: dict[str, Any] = {**_SELECTED, "k": round(BETA * DIM)}


def _headline(runner: Runner) -> Iterable[Row]:
    yield from _simple(runner)
    yield from _double(runner)
    yield from _topk(runner)
    yield from _topk_wide(runner)
    yield _index_privacy()


def _simple(runner: Runner) -> Iterable[Row]:
    eps_report = EPS_LOCAL / DIM
    yield row_on(
        runner,
        "SS-Simple as printed",
        "ss_simple",
        as_printed("ss_simple", eps_local=eps_report),
        paper={"eps": 0.91},
        note="The formula is wrong, and whole messages can be linked, but no attack here exceeds the claim: a budget "
        "of .01 per coordinate reveals little. Only the local guarantee is certified.",
    )
    apart_form = apart("ss_simple", dim=DIM, eps_report=eps_report)
    yield row_on(runner, "SS-Simple, coordinates apart", "ss_simple", apart_form)


def _double(runner: Runner) -> Iterable[Row]:
    how: dict[str, Any] = {**_SELECTED, "beta": BETA}
    yield row_on(
        runner, "SS-Double as printed", "ss_double", as_printed("ss_double", **how), paper={"eps": 0.24}, note=_LINKED
    )
    yield row_on(runner, "SS-Double as printed, binary reports", "ss_double", plan(published=True, **how), note=_LINKED)
    yield row_on(
        runner,
        "SS-Double, coordinates apart, each with probability beta",
        "ss_double",
        plan(**how),
        note="Thm. 4 repaired: every coordinate is drawn on its own, and all d of them compose. Below the claim, and "
        "true.",
    )


def _topk(runner: Runner) -> Iterable[Row]:
    yield row_on(
        runner, "SS-Topk as printed", "ss_topk", as_printed("ss_topk", **_TOP), paper={"eps": 0.24}, note=_COUNTED
    )
    yield row_on(
        runner,
        "SS-Topk, coordinates apart, surplus dropped",
        "ss_topk",
        plan(decoys=0, **_TOP),
        note="The selection depends on the data, so it does not amplify. The shuffler still sees the selection.",
    )
    yield row_on(
        runner,
        "SS-Topk, all other coordinates as decoys",
        "ss_topk",
        plan(eps_local=EPS_REPORT, k=_TOP["k"]),
        note="We recommend this form: the shuffler learns nothing from indices, and 78.5 remains if it colludes.",
    )
    yield row_on(
        runner,
        "SS-Topk without subsampling, coordinates apart, surplus dropped",
        "ss_topk",
        plan(decoys=0, **_TOP),
        paper={"eps": 20.53},
        claimed=claimed_on("ss_topk", plan(decoys=0, **_TOP), subsampled=False, pad_to=USERS / 3),
        note="The paper's own fallback, which is far from tight: the certified eps is a ninth of it.",
    )


def _topk_wide(runner: Runner) -> Iterable[Row]:
    how: dict[str, Any] = {"eps_local": EPS_REPORT, "k": DIM // 10, "pad_to": 667}
    claimed = claimed_on("ss_topk", plan(decoys=0, **how), pad_to=USERS / 1.5)
    yield row_on(
        runner,
        "SS-Topk as printed, beta 1/10, n/n_p 1.5",
        "ss_topk",
        as_printed("ss_topk", **how),
        paper={"eps": 2.348},
        claimed=claimed,
        note=_COUNTED,
    )
    yield row_on(
        runner,
        "SS-Topk, beta 1/10, n/n_p 1.5, coordinates apart, surplus dropped",
        "ss_topk",
        plan(decoys=0, **how),
        claimed=claimed,
        note="Here the attack comes close to the number and does not pass it.",
    )


def _index_privacy() -> Row:
    nu = flame.theorem5(num_users=USERS, pad_to=USERS / 3, beta=BETA)
    return Row(
        label="index privacy against the shuffler (Thm. 5)",
        paper={"nu": 3.125, "l": 16},
        extra={"nu": nu.value, "l": round(1 / (nu.value * BETA)), "verdict": nu.verdict.value},
        note=nu.reason,
    )


_LINKED = (
    "The k reports of a client are one message, so messages with many ones reveal the victim. Only the local guarantee "
    "is certified."
)
_COUNTED = "A surplus over n_p is kept and shows how many clients chose a coordinate, so there is no guarantee."

HEADLINE = Part(
    key="headline",
    title="The printed numbers",
    caption="MNIST's size: d = 7850, n = 1000, delta 5e-6, eps_l = 78.5, beta = 1/50, n/n_p = 3, Laplace reports "
    "unless a row says otherwise. Claimed is the paper's own formula, recomputed; certified is what holds for the form "
    "that the row names; audited is a lower bound from an exact attack on that form. Shuffling does amplify: the "
    "repaired forms of SS-Simple and SS-Double are certified below what was claimed. The claim for SS-Topk does not "
    "hold, because its selection depends on the data. The ratios x2.55 and x137.36 are those of Figure 3.",
    rows=_headline,
)
