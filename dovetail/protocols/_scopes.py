"""The scope of each trust model: whom it trusts, and what all of its protocols assume."""

from __future__ import annotations

from dovetail.events import DataIndependent, NonPrivate, Poisson
from dovetail.protocols._base import Cohort
from dovetail.statements import Neighbors, NotApplicable, Scope, Trust, Unit

__all__ = [
    "CURATOR_SEES",
    "DROPOUT",
    "SLOTS_TELL_NOTHING",
    "check_shuffle_relation",
    "curator_scope",
    "enrolment_assumption",
    "local_scope",
    "shares_scope",
    "shuffle_scope",
]


DROPOUT = "which users drop out does not depend on the data"
_OF_SHUFFLER = "the shuffler "
_FRESH = "users draw fresh, independent noise"
CURATOR_SEES = NonPrivate(reason="the curator sees every update")
SLOTS_TELL_NOTHING = DataIndependent(reason="which slots a client fills does not depend on its data")


def curator_scope(neighbors: Neighbors, *assumptions: str, unit: Unit = Unit.USER) -> Scope:
    """The scope against an observer of the models, with a curator that is trusted."""
    return Scope(
        trust=Trust.CURATOR,
        adversary="observer of every model",
        neighbors=neighbors,
        unit=unit,
        assumptions=assumptions,
    )


def local_scope(neighbors: Neighbors, *more: str, unit: Unit = Unit.USER) -> Scope:
    """The scope against everyone else: a client's own noise needs no trust. `more` are further assumptions."""
    if unit is Unit.USER and neighbors is not Neighbors.REPLACE_ONE:
        raise ValueError(f"expected neighbors = replace-one for a local guarantee, got neighbors={neighbors.value!r}")
    return Scope(
        trust=Trust.LOCAL,
        adversary="server and everyone else",
        neighbors=neighbors,
        unit=unit,
        assumptions=(_FRESH, *more),
    )


def shuffle_scope(cohort: Cohort, neighbors: Neighbors, *more: str) -> Scope:
    """Against the analyzer, with one trusted shuffler and an enforced minimum number of users.

    Where the cohort has aggregators, their sum is all that the analyzer sees of the reports that a shuffler would hand
    on: then it is `shares_scope`, and assumptions about the shuffler ("the shuffler ...") fall away.
    """
    check_shuffle_relation(neighbors)
    if isinstance(cohort.participation, Poisson):
        raise NotApplicable("shuffling needs an enforced minimum number of users, which a Poisson sample does not have")
    if cohort.aggregators is not None:
        others = [text for text in more if not text.startswith(_OF_SHUFFLER)]
        return shares_scope(cohort, neighbors, enrolment_assumption(cohort), *others, aggregators=cohort.aggregators)
    return Scope(
        trust=Trust.SHUFFLE,
        adversary="analyzer",
        neighbors=neighbors,
        unit=Unit.USER,
        assumptions=(
            _FRESH,
            "shuffler and analyzer do not collude",
            f"each user uploads either all of its reports or none, and {DROPOUT}",
            enrolment_assumption(cohort),
            *more,
        ),
    )


def shares_scope(cohort: Cohort, neighbors: Neighbors, *more: str, aggregators: int, users_noise: bool = True) -> Scope:
    """The scope against the analyzer and all aggregators but one, who add up shares of what users contribute.

    Arguments:
        cohort: what is public about the round; its minimum is enforced.
        neighbors: which inputs must look alike.
        more: further assumptions, as sentences.
        aggregators: how many there are.
        users_noise: whether users bring the noise, and not aggregators.
    """
    seeds = "fresh seeds for their shares"
    least = f" of at least {cohort.min_size} users" if cohort.min_size else ""
    return Scope(
        trust=Trust.SHARES,
        adversary=f"analyzer with up to {aggregators - 1} of the {aggregators} aggregators",
        neighbors=neighbors,
        unit=Unit.USER,
        assumptions=(
            f"{_FRESH}, and {seeds}" if users_noise else f"users draw {seeds}",
            f"at least one of the {aggregators} aggregators is honest: it does not collude, adds up each user of one "
            f"agreed set{least} once per round, hands on that sum alone, and forgets the shares",
            "AES-128 in counter mode expands a random seed into shares that nobody can tell from random ones",
            f"a user counts with all of its shares or not at all, and {DROPOUT}",
            *more,
        ),
    )


def enrolment_assumption(cohort: Cohort) -> str:
    """The assumption that enough users are real, for which whoever enrols them is trusted."""
    honest = max(0, cohort.min_size - cohort.colluders)
    fake = f"at most {cohort.colluders} fake or colluding ones" if cohort.colluders else "no fake or colluding ones"
    return f"whoever enrols users is trusted: every round has at least {honest} honest users and {fake}"


def check_shuffle_relation(neighbors: Neighbors) -> None:
    """Refuse any relation other than replacement, the only one that shuffled rounds support."""
    if neighbors is not Neighbors.REPLACE_ONE:
        raise ValueError(f"expected neighbors = replace-one in the shuffle model, got neighbors={neighbors.value!r}")
