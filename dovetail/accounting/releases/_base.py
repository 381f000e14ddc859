"""What an event implies: one `Release` class per family of events, found by the type of the event.

Accountants, statements and the reports of clients ask a release and never the type of an event. A new event brings a
class with the answers it has, registered by one line; a question that it does not answer is `NotApplicable`, so that
nothing is certified by silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from dovetail import events
from dovetail.accounting.gaussian import NearGaussian
from dovetail.accounting.loss_distributions import Loss
from dovetail.events import Everyone, FixedSize, Participation, Poisson, Round
from dovetail.statements import Bound, Neighbors, NotApplicable, Proof, Spent, Theorem

__all__ = [
    "Curve",
    "Release",
    "Sampling",
    "Scale",
    "release_of",
    "releases",
]

Sampling = Everyone | FixedSize | Poisson
_Event = TypeVar("_Event")
INTERVAL = 1e-4


class Scale(NamedTuple):
    """About the std and the width of the loss of one noisy sum, and how many sums a release has: to choose a grid."""

    std: float
    width: float
    sums: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """The privacy of a composition by one proof: eps at a delta, and delta at an eps.

    `best` names those of the two that no other theorem improves on. `delta_spent` is what this proof alone spends of
    delta, beside what the releases themselves spend. `lower` is eps at a delta rounded down, where it is known as
    well: it may take longer than eps itself, and raises `NotApplicable` where it is not.
    """

    proof: Proof
    eps: Callable[[float], float]
    delta: Callable[[float], float]
    best: frozenset[str] = frozenset()
    delta_spent: Callable[[float], tuple[Spent, ...]] = lambda eps: ()
    lower: Callable[[float], float] | None = None


class Release(Generic[_Event]):
    """One release of an event, and everything that it implies.

    A family overrides what it has an answer to. Divergences and losses hold for one release; what is spent of delta
    beside them adds up over releases.
    """

    orders: np.ndarray | None = None  # at which Renyi orders it is known best, if at special ones
    mu: float | None = None  # of a Gaussian, sensitivity over std: the one number that its privacy depends on
    refusal: str | None = None  # why nothing is promised at all
    span: str | None = None  # what it covers in words, where that is more than a round
    concerns_subjects: bool = False  # whether it is accounted for a subject, whose records may be at several users

    def __init__(self, event: _Event) -> None:
        self.event = event

    @property
    def neighbors(self) -> Neighbors:
        """The relation that its event is stated under."""
        relation = getattr(self.event, "neighbors", None)
        if relation is None:
            raise NotApplicable(f"{self._name} does not say which inputs are neighbours")
        return relation

    @property
    def colluders(self) -> int:
        """Users of the adversary's own, who see whether they are drawn."""
        return getattr(self.event, "colluders", 0)

    @property
    def near_gaussian(self) -> NearGaussian | None:
        """The Gaussian release that it is or comes close to, whatever its input, where everyone takes part."""
        return None if self.mu is None else NearGaussian(self.mu)

    @property
    def theorem(self) -> Theorem | None:
        """What its divergence and loss rest on; None where the accountant's theorem says all."""
        return None

    def renyi(self, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
        """Its Renyi divergence at every order; infinite where none is known.

        Arguments:
            sampling: who takes part in the round.
            orders: above 1.
        """
        raise NotApplicable(f"no Renyi bound here for {self._description(sampling)}")

    def losses(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """Its privacy loss on multiples of `interval`.

        Several, where it depends on something fixed but unknown about the victim (how a subject's items are spread
        over users): the loss of any number of such releases is the composition of one of them.

        Arguments:
            sampling: who takes part in the round.
            interval: of the grid of losses.
        """
        raise NotApplicable(f"no privacy-loss distribution here for {self._description(sampling)}")

    def losses_below(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The same losses rounded down, for a lower end of what is computed from them."""
        raise NotApplicable(f"no privacy-loss distribution from below here for {self._description(sampling)}")

    @property
    def resolution(self) -> float:
        """The interval of privacy losses that it should be composed on; of a `scale`, the finest that pays."""
        return INTERVAL

    def scale(self, sampling: Sampling) -> Scale | None:
        """The scale of a noisy sum; None for other releases."""
        return None

    @property
    def pure_eps(self) -> float:
        """An eps that holds without any delta."""
        raise NotApplicable(f"{self._name} has no pure guarantee")

    def equal_rounds(self, sampling: Sampling, times: int) -> Curve:
        """So many of it by a theorem of its own.

        Arguments:
            sampling: who takes part in each round.
            times: how many rounds there are.
        """
        raise NotApplicable(f"{self._name} has no theorem of its own for equal rounds")

    def holds_if_sample_known(self, sampling: Sampling) -> bool:
        """Whether a round on such a sample, were it known, is this release for those drawn and tells nothing of others.

        Then it is never worse than a round with everyone, by joint convexity over the samples. A crowd is as many as
        are drawn, and a user that is replaced is drawn or not under both neighbours.
        """
        crowd = getattr(self.event, "num_users", None)
        fixed = isinstance(sampling, FixedSize) and sampling.size == crowd
        return fixed and self.neighbors is Neighbors.REPLACE_ONE

    def sampling_assumption(self, sampling: Sampling) -> str | None:
        """What a statement assumes of such a sample, if it rests on it; None of everyone."""
        match sampling:
            case Poisson(prob=prob):
                return f"each user joins a round independently with probability {prob:.4g}, secret from the adversary"
            case FixedSize(size=size, population=population):
                but = " (but colluders see whether they are sampled)" * bool(self.colluders)
                return (
                    f"the {size} of {population} users of a round are a uniform sample, secret from the adversary{but}"
                )
        return None

    def per_user(self, times: int, *, delta: float) -> tuple[float, ...] | None:
        """Every user's own eps after so many releases, where users differ.

        Arguments:
            times: how many releases there are.
            delta: at which every user's eps is asked for.
        """
        return None

    def delta_spent(self, eps: float) -> tuple[Spent, ...]:
        """What it spends of delta beside its divergence, when eps is that of the whole; non-decreasing in eps."""
        return ()

    def local(self, *, delta: float) -> Bound:
        """What it guarantees about one client's part, seen with the client's name on it: no crowd, no sampling.

        Arguments:
            delta: for one round; the bound may need less.
        """
        raise NotApplicable(f"{self._name} does not describe what one client's reports reveal")

    def simplify(self, sampling: Sampling) -> Any:
        """An event that says the same and has a sharper accountant, or the event itself."""
        return self.event

    def check_disjoint_batches(self) -> None:
        """Refuse, with the reason, where disjoint batches of users do not concern different victims."""

    def of_users(self, participation: Participation, users: int) -> Round | None:
        """The same round for so many users together, where their shifts just add up; None where they do not.

        Arguments:
            participation: who takes part in the round.
            users: how many users count as one.
        """
        return None

    def of_subject(self, *, items: int, users: int, items_per_user: int | None) -> Any:
        """The same event, seen from a subject with so many records.

        Arguments:
            items: the most records that one subject has.
            users: the most users that hold them.
            items_per_user: the most of them at one user, if that is capped.
        """
        raise NotApplicable(f"{self._name} does not describe how records enter a sum")

    def of_replaced_item(self) -> list[Round]:
        """The same event, seen from one record that is replaced by another."""
        raise NotApplicable(f"{self._name} does not describe how records enter a sum")

    @property
    def _name(self) -> str:
        return type(self.event).__name__

    def _description(self, sampling: Sampling) -> str:
        relation = getattr(self.event, "neighbors", None)
        under = f" under {relation.value}" if relation else ""
        return f"{self._name} noise with {type(sampling).__name__} participation{under}"


_FAMILIES: dict[type, type[Release[Any]]] = {}
_Family = TypeVar("_Family", bound=type[Release[Any]])


def releases(*kinds: type) -> Callable[[_Family], _Family]:
    """Register a class of releases for these events, which a ledger can then hold: ``@releases(MyEvent)``.

    Arguments:
        kinds: classes of events, each with a name of its own.

    Returns: a decorator for a class derived from `Release`.

    Guarantees:
        What an event implies is never replaced: statements about bundled protocols rest on bundled releases.
    """

    def register(family: _Family) -> _Family:
        for kind in kinds:
            events.register(kind)
            first = _FAMILIES.setdefault(kind, family)
            if (first.__module__, first.__qualname__) != (family.__module__, family.__qualname__):
                raise ValueError(f"{kind.__name__} has a release already, {first.__name__}, which is never replaced")
            _FAMILIES[kind] = family
        return family

    return register


def release_of(event: Any) -> Release[Any]:
    """The release of an event; a subclass of a registered event is one, too."""
    for kind in type(event).__mro__:
        if kind in _FAMILIES:
            return _FAMILIES[kind](event)
    raise NotApplicable(f"no release is registered for {type(event).__name__}")
