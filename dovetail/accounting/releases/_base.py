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
from dovetail.events import Everyone, FixedSize, Participation, Poisson, Round, Separated
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
INTERVAL = 1e-4  # between neighbouring privacy losses, unless a release asks for another one


class Scale(NamedTuple):
    """About how large the privacy losses of a release are: to choose a grid by, never for a bound."""

    std: float  # of the loss of one of its noisy sums
    width: float  # about the largest loss less the smallest one, of one of its sums
    sums: int  # how many noisy sums one release has


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

    A family overrides what it has an answer to, and passes on to `super()` (which raises `NotApplicable`) what it has
    none to. Every answer is an upper bound for both neighbours, unless it says *below*: rounding errors are rounded up.
    Divergences and losses hold for one release; what is spent of delta beside them adds up over releases.
    """

    orders: np.ndarray | None = None  # the Renyi orders at which `renyi` is best asked; None: the accountant's own
    mu: float | None = None  # of a Gaussian, sensitivity over std: the one number that its privacy depends on
    refusal: str | None = None  # why it promises nothing at all; None if it promises something
    span: str | None = None  # what it covers in words, where that is more than a round
    mixes_in_stream: bool = True  # whether rounds of one stream may differ: the worst of them counts for all
    is_tight: bool = True  # whether it is as private as it says and no more: else no lower end of its eps is known
    concerns_subjects: bool = False  # whether it is accounted for a subject, whose records may be at several users

    def __init__(self, event: _Event) -> None:
        self.event = event

    @property
    def neighbors(self) -> Neighbors:
        """The neighbouring relation that its event is stated under."""
        relation = getattr(self.event, "neighbors", None)
        if relation is None:
            raise NotApplicable(f"{self._name} does not say which inputs are neighbours")
        return relation

    @property
    def colluders(self) -> int:
        """How many users are the adversary's own, who see whether they are drawn; 0 if the event does not say."""
        return getattr(self.event, "colluders", 0)

    @property
    def near_gaussian(self) -> NearGaussian | None:
        """The Gaussian release that it is or comes close to, where everyone takes part; None if there is none."""
        return None if self.mu is None else NearGaussian(self.mu)

    @property
    def theorem(self) -> Theorem | None:
        """The theorem that its divergence and loss rest on; None where the accountant's theorem is enough."""
        return None

    def renyi(self, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
        """Upper bounds on the Renyi divergence of one release, under both neighbours.

        Arguments:
            sampling: who takes part in the round.
            orders: Renyi orders, each above 1.

        Returns: one divergence for each order, infinite where none is known. It may be kept by callers: do not write
            to it.
        """
        raise NotApplicable(f"no Renyi bound here for {self._description(sampling)}")

    def losses(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The privacy loss of one release, rounded up to multiples of `interval`.

        Arguments:
            sampling: who takes part in the round.
            interval: between neighbouring losses of the grid.

        Returns: one loss for each thing that may be true of the victim, fixed but unknown (how a subject's items are
            spread over users), and mostly just one. The loss of several such releases is the composition of copies of
            one of them, and the worst one counts.
        """
        raise NotApplicable(f"no privacy-loss distribution here for {self._description(sampling)}")

    def losses_rounded_down(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The same losses as `losses`, rounded down: eps computed from them is a lower end of the exact one.

        Only a pair that is the release itself, and no upper bound on it, may be rounded down here.
        """
        raise NotApplicable(f"no privacy-loss distribution from below here for {self._description(sampling)}")

    @property
    def resolution(self) -> float:
        """The interval of privacy losses that one release should be composed on: a finer one gains next to nothing."""
        return INTERVAL

    def loss_scale(self, sampling: Sampling) -> Scale | None:
        """About how large its losses are, to choose an interval by; None where `resolution` alone says it."""
        return None

    @property
    def pure_eps(self) -> float:
        """An eps at which one release is (eps, 0)-DP, rounded up; `NotApplicable` if there is none."""
        raise NotApplicable(f"{self._name} has no pure guarantee")

    def equal_rounds(self, sampling: Sampling, times: int) -> Curve:
        """The curve of this many equal releases by a theorem of its own, instead of composing one of them.

        Arguments:
            sampling: who takes part in each round.
            times: how many rounds there are.
        """
        raise NotApplicable(f"{self._name} has no theorem of its own for equal rounds")

    def full_round_covers_known_sample(self, sampling: Sampling) -> bool:
        """Whether the bound of a round with *everyone* also holds on such a sample, even if it is known who was drawn.

        It does where, given the sample, the round is this release for those drawn and says nothing of all others: by
        joint convexity over the samples it is then never worse than a round with everyone. The bound that gains from
        sampling never holds for a known sample. By default True for users that are replaced and a sample of fixed size
        that is the crowd itself: a replaced user is drawn under both neighbours or under neither.
        """
        crowd = getattr(self.event, "num_users", None)
        fixed = isinstance(sampling, FixedSize) and sampling.size == crowd
        return fixed and self.neighbors is Neighbors.REPLACE_ONE

    def sampling_assumption(self, sampling: Sampling) -> str | None:
        """What a statement that gains from such a sample assumes of it, in words; None where everyone takes part."""
        match sampling:
            case Poisson(prob=prob):
                return f"each user joins a round independently with probability {prob:.4g}, secret from the adversary"
            case FixedSize(size=size, population=population):
                but = " (but colluders see whether they are sampled)" * bool(self.colluders)
                return (
                    f"the {size} of {population} users of a round are a uniform sample, secret from the adversary{but}"
                )
        return None

    def eps_per_user(self, times: int, *, delta: float) -> tuple[float, ...] | None:
        """Every user's own eps after so many releases with everyone, in the users' order; None if all are alike.

        Arguments:
            times: how many releases there are.
            delta: at which every user's eps is asked for.
        """
        return None

    def delta_spent(self, eps: float) -> tuple[Spent, ...]:
        """What one release spends of delta beside its divergence or loss.

        Arguments:
            eps: that of everything together, not of this release; the answer never falls as eps rises.
        """
        return ()

    def local_bound(self, *, delta: float) -> Bound:
        """What it guarantees about one client's part, seen with the client's name on it: no crowd, no sampling.

        Arguments:
            delta: for one round; the bound may need less.
        """
        raise NotApplicable(f"{self._name} does not describe what one client's reports reveal")

    def simplify(self, sampling: Sampling) -> Any:
        """An event with the same guarantee that accountants know better (a Gaussian), or the event itself."""
        return self.event

    def check_disjoint_batches(self) -> None:
        """Raise `NotApplicable` where one victim may be in several disjoint batches of an epoch; else do nothing."""

    def fold_stream(self, schedule: Separated) -> tuple[Any, int]:
        """What a stream of such rounds costs one user who takes part by this schedule: an event, and how often.

        By default the event itself, once for each upload: rounds are independent of each other.
        """
        self.check_disjoint_batches()
        return self.event, schedule.most_uploads

    def of_users(self, participation: Participation, users: int) -> Round | None:
        """The same round as a release about so many users who change together; None where group privacy is needed.

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
        """The release and how its users are sampled, as a refusal calls it."""
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
            events.register_event(kind)
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
