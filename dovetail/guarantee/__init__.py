"""A training in privacy terms: what its rounds guarantee, to whom, and the noise that meets a target.

Simulation, deployed parties, quotes, comparisons and papers all ask a `Guarantee`. It views every cohort through the
protocol and hands the rounds to the accountant; what it states is a `Record`, which a ledger keeps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from dovetail import accounting, protocols
from dovetail.accounting import gaussian
from dovetail.events import DataIndependent, Disjoint, Everyone, NonPrivate, Round, Separated
from dovetail.guarantee import units
from dovetail.guarantee.record import Quote, Record
from dovetail.guarantee.units import ScopedRounds, Spread
from dovetail.protocols import Cohort, Protocol
from dovetail.statements import Bound, Neighbors, NotApplicable, Scope, Statement, Trust, Unit, Verdict

__all__ = ["Guarantee", "Quote", "Record", "ScopedRounds", "Spread", "verdict_on"]


_LARGEST_EPS_LOCAL = 50.0  # a report with a larger one lies less often than a computer errs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guarantee:
    """A protocol, the cohorts of its rounds, and what is asked about them.

    `assumptions` are what the way it is run adds to the protocol's own: simulated, or deployed as messages. `declared`
    are those among them that only the author of code from outside the package knows: on them statements stand *as
    declared*.
    """

    protocol: Protocol
    cohorts: tuple[Cohort, ...]  # one for each round, in their order
    dim: int  # of an update
    relation: Neighbors
    delta: float
    eps: float | None = None  # where delta is sought at an eps
    unit: Unit | None = None  # the one that the protocol protects itself, unless given
    spread: Spread = dataclasses.field(default_factory=Spread)
    assumptions: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()
    reproducible: bool = False  # whether the noise is derived from a seed

    @functools.cached_property
    def settled_protocol(self) -> Protocol:
        """The protocol with everything set that follows from cohort and dimension."""
        return self.protocol.settle(self.cohorts[0], self.dim)

    @functools.cached_property
    def scope(self) -> Scope:
        """What is stated besides numbers and proof, under `relation`."""
        return self._scope(self.relation)

    @property
    def target_unit(self) -> Unit:
        """The unit that the target and the statement are about."""
        return self.unit or self.scope.unit

    def rounds(self, cohorts: Sequence[Cohort] | None = None) -> tuple[Round, ...]:
        """The rounds of these cohorts, or of all, under `relation`, one for each cohort."""
        return self._rounds(self.relation, self.cohorts if cohorts is None else cohorts)

    def check_views(self) -> None:
        """Raise the protocol's own refusal if it has no view of some round; nothing is run or accounted."""
        self.rounds()

    def view_rounds(self, cohorts: Sequence[Cohort] | None = None) -> tuple[ScopedRounds, ScopedRounds | None]:
        """The rounds of these cohorts, or of all: as they are stated, and under replacement of a user.

        The second is None where the protocol has no such view.
        """
        cohorts = self.cohorts if cohorts is None else cohorts
        own = ScopedRounds(rounds=self._rounds(self.relation, cohorts), scope=self.scope)
        try:
            scope = self._scope(Neighbors.REPLACE_ONE)
            return own, ScopedRounds(rounds=self._rounds(Neighbors.REPLACE_ONE, cohorts), scope=scope)
        except ValueError:
            return own, None

    def record(self, cohorts: Sequence[Cohort] | None = None) -> Record:
        """The `Record` of these cohorts' rounds, or of all: every statement about them follows from it."""
        cohorts = self.cohorts if cohorts is None else cohorts
        own, replaced = self.view_rounds(cohorts)
        shuffled = own.scope.trust is Trust.SHUFFLE and len(cohorts) > 0
        return Record(
            own=own,
            replaced=replaced,
            reports=_view_each_cohort(cohorts, self._round_of_own_reports),
            slots=self._slots_seen(cohorts[0]) if shuffled else None,
            spread=self.spread,
            unit=self.target_unit,
            delta=self.delta,
            eps=self.eps,
            verdict=verdict_on(self.protocol, declared=self.declared, reproducible=self.reproducible),
            declared=self.declared,
        )

    def claim(self, cohorts: Sequence[Cohort] | None = None) -> Statement | None:
        """What the protocol's paper says of these rounds, or of all; None if it says nothing."""
        cohorts = self.cohorts if cohorts is None else cohorts
        if not isinstance(self.settled_protocol, protocols.Claimed):
            return None
        return self.settled_protocol.claim_statement(cohorts, self.dim, self.scope, delta=self.delta)

    def quote(self, cohorts: Sequence[Cohort] | None = None) -> Quote:
        """What is certified, beside what the paper claims, what the shuffler learns, and what remains without trust."""
        return Quote.from_record(self.protocol.name, self.record(cohorts), self.claim(cohorts))

    def with_assumption(self, assumption: str) -> Guarantee:
        """The same training, whose statements also make this assumption."""
        return dataclasses.replace(self, assumptions=(*self.assumptions, assumption))

    def with_declaration(self, declaration: str) -> Guarantee:
        """The same training, whose statements are *as declared*, and this is what is declared."""
        return dataclasses.replace(self, declared=(*self.declared, declaration))

    def bound(self, cohorts: Sequence[Cohort] | None = None) -> Bound:
        """The (eps, delta) of the statement without the rest of it; `NotApplicable` where nothing is certified."""
        delta = self.delta if self.eps is None else None
        if self.target_unit is self.scope.unit:
            return accounting.bound(self.rounds(cohorts), delta=delta, eps=self.eps)  # needs no other view
        own, replaced = self.view_rounds(cohorts)
        return units.bound(self.target_unit, own, replaced, self.spread, delta=delta, eps=self.eps)

    def fits(self, eps: float, cohorts: Sequence[Cohort] | None = None) -> bool:
        """Whether these rounds stay within a budget of eps at delta."""
        if self.target_unit is self.scope.unit:
            return accounting.fits(self.rounds(cohorts), eps=eps, delta=self.delta)
        try:
            return dataclasses.replace(self, eps=None).bound(cohorts).eps <= eps
        except NotApplicable:
            return False

    def calibrate(self, eps: float, *, tolerance: float = 1e-5) -> Guarantee:
        """The same training with the least noise that keeps to eps; a budget per report is at most 50.

        The accountant is asked, not a formula inverted: what is calibrated is what will be certified.

        Arguments:
            eps: the target at this guarantee's delta.
            tolerance: the noise is at most this much above the least, relatively.
        """
        refusals: list[NotApplicable] = []
        within: dict[float, Guarantee] = {}
        at_delta = dataclasses.replace(self, eps=None)

        def eps_at(noise: float) -> float:
            training = at_delta._with_noise(noise)
            try:
                spent = training.bound().eps
            except NotApplicable as refusal:
                refusals.append(refusal)
                return math.inf
            if spent <= eps:
                within.clear()
                within[noise] = training  # whose rounds are cached
            return spent

        ruler = functools.partial(gaussian.mu_of, delta=self.delta) if self.delta > 0 else float
        lowest = {} if self.protocol.noise_field == "noise_multiplier" else {"lowest": 1 / _LARGEST_EPS_LOCAL}
        try:
            noise = accounting.smallest_noise(eps_at, eps=eps, tolerance=tolerance, ruler=ruler, **lowest)
        except ValueError as error:
            raise refusals[-1] if refusals else error from error
        calibrated = within.get(noise) or self._with_noise(noise)
        return calibrated if self.eps is None else dataclasses.replace(calibrated, eps=self.eps)

    def _with_noise(self, noise: float) -> Guarantee:
        """The same training with this much noise, in the units of `Protocol.with_noise`."""
        return dataclasses.replace(self, protocol=self.protocol.with_noise(noise))

    def _scope(self, relation: Neighbors) -> Scope:
        """The scope of all rounds, as the first cohort's view has it."""
        scope = self.settled_protocol.view(self.cohorts[0], self.dim, neighbors=relation).scope
        assumptions = (*scope.assumptions, *_schedule_in_words(self.cohorts[0]), *self.assumptions, *self.declared)
        if scope.unit is Unit.SUBJECT and self.spread.describes_data and not self.spread.known:
            assumptions = (*assumptions, self.spread.assumption)
        return dataclasses.replace(scope, assumptions=assumptions, population=self.spread.count_of(scope.unit))

    def _rounds(self, relation: Neighbors, cohorts: Sequence[Cohort]) -> tuple[Round, ...]:
        """The round of every cohort as it is stated under this relation."""
        settled = self.settled_protocol
        return _view_each_cohort(cohorts, lambda cohort: settled.view(cohort, self.dim, neighbors=relation).round)

    def _round_of_own_reports(self, cohort: Cohort) -> Round:
        """The release of one client's reports in a round, seen with its name on them.

        Sampling gains nothing there: who sees names sees who was sampled. Batches that are fixed stay what they are.
        """
        fixed = isinstance(cohort.participation, Disjoint | Separated)
        participation = cohort.participation if fixed else Everyone()
        return Round(mechanism=self.settled_protocol.own_reports(cohort, self.dim), participation=participation)

    def _slots_seen(self, cohort: Cohort) -> DataIndependent | NonPrivate:
        """The release that the shuffler sees in a round, with the paper's claim about it among its reasons, if any."""
        settled = self.settled_protocol
        seen = settled.slots_seen(self.dim)
        claim = settled.claim_about_slots(cohort, self.dim) if isinstance(settled, protocols.Claimed) else None
        return seen if claim is None else dataclasses.replace(seen, reason=f"{seen.reason}; {claim}")


def verdict_on(protocol: Protocol, *, declared: Sequence[str] = (), reproducible: bool = False) -> Verdict:
    """On whose word statements about a protocol stand: ours, or that of whoever wrote code of their own.

    That is a protocol, or what else is `declared` of code that could see the records of several users.
    """
    if type(protocol) not in protocols.BUNDLED or declared:
        return Verdict.DECLARED_REPRODUCIBLE if reproducible else Verdict.DECLARED
    return Verdict.REPRODUCIBLE if reproducible else Verdict.CERTIFIED


def _schedule_in_words(cohort: Cohort) -> tuple[str, ...]:
    """What a statement assumes of a schedule in which users come rarely; nothing of other ways to take part."""
    match cohort.participation:
        case Separated(most_uploads=1):
            return ("each user takes part once at most; who comes when was fixed without looking at anybody's data",)
        case Separated(most_uploads=uploads, separation=separation):
            return (
                f"each user takes part at most {uploads} times, {separation} rounds or more apart; who comes when "
                "was fixed without looking at anybody's data",
            )
    return ()


def _view_each_cohort(cohorts: Sequence[Cohort], view: Callable[[Cohort], Round]) -> tuple[Round, ...]:
    """The view of every cohort, computed once for equal ones; those that are one object are not even compared."""
    distinct = {id(cohort): cohort for cohort in cohorts}
    rounds = {cohort: view(cohort) for cohort in dict.fromkeys(distinct.values())}
    by_object = {key: rounds[cohort] for key, cohort in distinct.items()}
    return tuple(by_object[id(cohort)] for cohort in cohorts)
