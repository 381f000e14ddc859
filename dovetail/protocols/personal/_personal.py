"""What APES, S-APES and their baselines share: every client perturbs every coordinate with its own public budget.

Coordinates are clipped to [-C, C]; user i's report on one of them is eps_i-LDP, by Clip-Laplace or by Laplace noise of
scale 2C / eps_i. A user keeps its budget, so everyone takes part in every round. The estimate is an average over the
reports that came: their number says nothing about the data, for neighbours replace one user, and whoever receives the
reports sees it anyway. Fast and faithful path give the same tally from the same keys, up to the order of floating-point
sums.

Budgets are chosen without looking at anybody's data (`resolve_budgets`, at the end of this file). They are given as the
name of a distribution of APES, Table 2, as ``[low, high]`` for evenly spaced ones, or as a file with one number per
line. The table's ``N(m, 1)`` is read as a normal distribution of standard deviation 1, and "clip range" as its caption
says: values outside move to the nearer end, so the Gaussian budgets pile up at both ends of their range (41 to 48 % at
the lower one). A mixture draws its component for each user. The draws come from one fixed seed: whoever knows the
number of users knows the budgets.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from scipy import special

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.events import DataIndependent, Everyone, Mechanism, Personalized, Round, View
from dovetail.mechanisms import LaplaceRandomizer, LocalRandomizer, add_laplace
from dovetail.mechanisms._base import clamp
from dovetail.protocols._base import CLIP_VALUE, Cohort, Protocol
from dovetail.protocols._scopes import SLOTS_TELL_NOTHING, shuffle_scope
from dovetail.protocols._shared_sums import GridReports
from dovetail.shufflers import Layout, Reports, ShuffledReports, SlotSums, slot_sums
from dovetail.statements import Neighbors

__all__ = [
    "DISTRIBUTIONS",
    "PUBLIC_BUDGETS",
    "Distribution",
    "Personal",
    "budget_array",
    "laplace_reports",
    "resolve_budgets",
]

Budget = TypeVar("Budget", float, "jax.Array")
Settled = TypeVar("Settled", bound="Personal")

_BUDGETS = "uniform2"
PUBLIC_BUDGETS = "users' budgets are public and do not change when a user's data is replaced"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Personal(Protocol):
    """Per-coordinate reports under personal budgets.

    `budgets` is what `_budgets.resolve` takes; once settled, every user's eps_local for one coordinate. They are the
    users' own choice, so there is no noise left to calibrate, unless ``budget_scale = "fit"`` asks for one factor on
    all of them that meets a privacy target; without budgets of their own, that is what users get. A settled protocol
    has the scale in its budgets, and None as its scale.

    Guarantees:
        Only a settled protocol runs, so that clients spend what the event says.
    """

    references: ClassVar[tuple[str, ...]] = ("APES",)
    undeployed: ClassVar[str] = "has no messages for a shuffler; aggregators can add up its reports on a grid"

    budgets: Any = None  # a field, so that it is a config key; it takes the place of the property of `Protocol`
    """Each user's eps per coordinate: the name of a distribution, `[low, high]` or a file."""
    clip_value: float = CLIP_VALUE
    """Coordinates are clipped to plus or minus this."""
    budget_scale: float | Literal["fit"] | None = 1.0
    """Factor on all budgets; `"fit"` calibrates it to the target."""

    def __post_init__(self) -> None:
        _validate.positive(clip_value=self.clip_value)
        if self.budgets is None:
            object.__setattr__(self, "budgets", _BUDGETS)
            object.__setattr__(self, "budget_scale", "fit" if self.budget_scale == 1.0 else self.budget_scale)
        if isinstance(self.budgets, list):
            object.__setattr__(self, "budgets", tuple(self.budgets))
        if self.budget_scale is not None and self.budget_scale != "fit":
            _validate.positive(budget_scale=self.budget_scale)

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for a first try: budgets up to 1, evenly spread."""
        return {"budgets": "uniform2"}

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: budgets so large that a signal is left."""
        return [{"budgets": [2.0, 8.0]}]

    @property
    def noise_field(self) -> str:
        """The parameter that calibration sets: one factor on all budgets."""
        return "budget_scale"

    @property
    def is_calibrated(self) -> bool:
        """Whether all budgets are numbers: not where they are yet to be scaled to a target."""
        return self.budget_scale != "fit"

    def with_noise(self, noise: float) -> Self:
        """This protocol with all budgets divided by `noise`."""
        if self.budget_scale is None:
            return dataclasses.replace(self, budgets=tuple(eps_local / noise for eps_local in self.budgets))
        return dataclasses.replace(
            self, budget_scale=(1.0 if self.budget_scale == "fit" else self.budget_scale) / noise
        )

    def settle(self, cohort: Cohort, dim: int) -> Self:
        """The protocol with every user's own budget, scaled; refuses cohorts in which not everybody takes part."""
        if not isinstance(cohort.participation, Everyone):
            raise ValueError(
                "expected everyone to take part in every round with personal budgets, "
                f"got {type(cohort.participation).__name__}"
            )
        if self.budget_scale == "fit":
            raise ValueError("expected budget_scale to be a number, or a privacy target to fit it to, got 'fit'")
        if self.budget_scale is None:
            if len(self.budgets) != cohort.size:
                raise ValueError(f"expected one budget for each of {cohort.size} users, got {len(self.budgets)}")
            return self
        return _scale_budgets(self, self.budget_scale, cohort.size)

    @functools.cached_property
    def eps_locals(self) -> np.ndarray:
        """Every user's eps for one coordinate, float64 (users,); refuses a protocol that is not settled.

        Cached and read-only.
        """
        if self.budget_scale is not None:
            raise ValueError(f"expected a protocol that has been settled on its cohort, got budgets={self.budgets!r}")
        eps_locals = np.asarray(self.budgets, np.float64)
        eps_locals.flags.writeable = False
        return eps_locals

    def budgets_spent(self, budgets: tuple[float, ...]) -> tuple[float, ...]:
        """What every user spends, given what each of them is ready to spend; here all of it."""
        return budgets

    @property
    @abc.abstractmethod
    def kind(self) -> Literal["clip_laplace", "laplace"]:
        """The name of a report's distribution, as the event `Personalized` has it."""

    @abc.abstractmethod
    def perturb(self, x: jax.Array, budget: jax.Array, *, key: jax.Array) -> jax.Array:
        """Client: one report for every coordinate of x."""

    def randomizer_of(self, budget: float) -> LocalRandomizer:
        """The randomizer of one coordinate at this budget, on [-C, C]."""
        return LaplaceRandomizer(budget, -self.clip_value, self.clip_value)

    def log_density(self, value: np.ndarray, x: np.ndarray, *, budget: float | None = None) -> np.ndarray | None:
        """The log density of each coordinate's report, at the client's own budget; None where it has no simple form."""
        return self.randomizer_of(_require_budget(budget)).log_density(value, x)

    def clip_update(self, x: jax.Array, state: Any) -> jax.Array:
        """The update with each coordinate clipped to [-C, C]."""
        return jnp.clip(x, -self.clip_value, self.clip_value)

    def layout(self, dim: int) -> Layout:
        """One slot per coordinate, each of them filled by every client."""
        return Layout(slots=dim, reports_per_client=dim, shufflers=int(self.shuffled))

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """Every coordinate, with the client's own budget."""
        _ = self.eps_locals  # not before they are settled
        return Reports(slot=None, value=self.perturb(x, _require_budget(budget), key=key), valid=jnp.ones((), bool))

    def tally(self, reports: ShuffledReports, dim: int) -> SlotSums:
        """Sum and number of the reports on every coordinate."""
        return slot_sums(reports, dim, reports.value.dtype)

    def estimate(self, tally: SlotSums, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The average of the reports on every coordinate, over those that came, and the state as it was."""
        return tally.total / jnp.maximum(tally.messages, 1), state

    def contribution(self, cohort: Cohort, dim: int) -> GridReports:
        """What users share between aggregators: reports on a grid, drawn exactly (docs/proofs/grid-reports.md)."""
        return GridReports.for_budgets(**self._grid_arguments(cohort, dim))

    def _grid_arguments(self, cohort: Cohort, dim: int) -> dict[str, Any]:
        """The arguments of `GridReports.for_budgets` for this cohort."""
        budgets = float(self.eps_locals.min()), float(self.eps_locals.max())
        conditioned = self.kind == "clip_laplace"
        return {
            "clip_value": self.clip_value,
            "budgets": budgets,
            "conditioned": conditioned,
            "dim": dim,
            "users": cohort.max_uploads,
        }

    def noise_std(self, size: int, dim: int) -> float:
        """The standard deviation of the average of `size` reports on zero: Laplace noise at the settled budgets."""
        return math.sqrt(float(np.mean(8 * (self.clip_value / self.eps_locals) ** 2)) / size)

    def mechanism(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of one round as the analyzer sees it.

        Users that may be missing hide nobody, and are counted as if they were colluders.
        """
        return Personalized(
            kind=self.kind,
            eps_locals=self.settle(cohort, dim).budgets,
            coordinates=dim,
            colluders=cohort.colluders + cohort.size - cohort.crowd(),
        )

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """One round as the analyzer sees it: its event, and the scope with public budgets."""
        permutation = "the shuffler permutes every coordinate uniformly, with fresh randomness"
        scope = shuffle_scope(cohort, neighbors, permutation, PUBLIC_BUDGETS)
        return View(round=Round(mechanism=self.mechanism(cohort, dim), participation=cohort.participation), scope=scope)

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of everybody's reports before any is replaced: every coordinate, at each user's own budget.

        Without their crowd it is what a user's own reports reveal, for replacing some cannot reveal more.
        """
        return self._event_of_everybody(cohort, dim)

    def _event_of_everybody(self, cohort: Cohort, dim: int) -> Personalized:
        """The event with every user's budget and no colluders."""
        return Personalized(kind=self.kind, eps_locals=self.settle(cohort, dim).budgets, coordinates=dim)

    def slots_seen(self, dim: int) -> DataIndependent:
        """Slots tell nothing: every client fills every slot."""
        return SLOTS_TELL_NOTHING

    def published_event(self, cohort: Cohort, dim: int) -> tuple[Mechanism, dict[str, Any]] | None:
        """The event that APES's claims speak of: everybody's budgets, without colluders or missing users."""
        if cohort.size < 2:
            return None
        return self._event_of_everybody(cohort, dim), {}


@functools.lru_cache(maxsize=4)  # asked for again and again in one quote, and large
def _scale_budgets(protocol: Settled, scale: float, size: int) -> Settled:
    """The protocol with every user's budget times `scale`, and no scale left to apply; `size` users."""
    budgets = scale * budget_array(protocol.budgets, size)
    return dataclasses.replace(protocol, budgets=protocol.budgets_spent(tuple(budgets.tolist())), budget_scale=None)


def _require_budget(budget: Budget | None) -> Budget:
    """The client's own budget; refuses None, for there is no budget that fits everybody."""
    if budget is None:
        raise ValueError("expected the client's own budget, got budget=None")
    return budget


def laplace_reports(x: jax.Array, budget: jax.Array, clip_value: float, *, key: jax.Array) -> jax.Array:
    """Every coordinate of x, clipped to [-C, C], with Laplace noise of scale 2C / budget."""
    return add_laplace(clamp(x, -clip_value, clip_value), 2 * clip_value / budget, key=key)


_SEED = 2023
_FORMS = "the name of a distribution, [low, high] or a file with one number per line"


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Budgets in [low, high]: uniform, or a mixture of normal laws, given as (share, mean), clipped to the range."""

    low: float
    high: float
    normals: tuple[tuple[float, float], ...] = ()

    def draw(self, num_users: int) -> np.ndarray:
        """One budget per user.

        Guarantees:
            The same in every process, and within [low, high].
            A user that is there in a smaller federation has the same budget in a larger one.
        """
        position, component = np.random.default_rng(_SEED).random((num_users, 2)).T
        if not self.normals:
            return self.low + (self.high - self.low) * position
        shares, means = np.array(self.normals).T
        which = np.searchsorted(np.cumsum(shares)[:-1], component, side="right")
        return np.clip(means[which] + special.ndtri(position), self.low, self.high)


DISTRIBUTIONS = {
    "uniform1": Distribution(0.05, 0.5),
    "uniform2": Distribution(0.05, 1.0),
    "gauss1": Distribution(0.05, 0.5, ((1.0, 0.1),)),
    "gauss2": Distribution(0.05, 1.0, ((1.0, 0.2),)),
    "mixgauss1": Distribution(0.05, 0.5, ((0.9, 0.1), (0.1, 0.5))),
    "mixgauss2": Distribution(0.05, 1.0, ((0.9, 0.2), (0.1, 1.0))),
}


def resolve_budgets(given: str | Sequence[float], num_users: int) -> tuple[float, ...]:
    """Every user's budget, from any of the forms in which budgets may be given.

    Guarantees:
        One positive, finite number per user.
        What was resolved before resolves to itself.
    """
    return tuple(budget_array(given, num_users).tolist())


def budget_array(given: str | Sequence[float], num_users: int) -> np.ndarray:
    """Every user's budget as float64 (users,), like `resolve_budgets`, which of many users takes more time.

    Do not write to it.
    """
    if isinstance(given, str):
        values = _budgets_by_name(given, num_users)
    elif not isinstance(given, list | tuple) or len(given) == 0:
        raise ValueError(f"expected budgets as {_FORMS}, got budgets={given!r}")
    else:
        for value in given:
            _validate.positive(eps_local=value)
        values = np.array(given, np.float64)
        if len(values) == 2:
            values = np.linspace(values[0], values[1], num_users)
    if len(values) != num_users:
        raise ValueError(f"expected one budget for each of {num_users} users, got {len(values)}")
    wrong = values[~(np.isfinite(values) & (values > 0))]
    if len(wrong):
        raise ValueError(f"expected every budget to be a finite number > 0, got {float(wrong[0])}")
    return values


def _budgets_by_name(given: str, num_users: int) -> np.ndarray:
    """The budgets of a distribution of this name, or of a file at this path."""
    if given in DISTRIBUTIONS:
        return _draw_budgets(given, num_users)
    path = Path(given)
    if path.is_file():
        return _read_budgets(path)
    if path.suffix or len(path.parts) > 1:
        raise FileNotFoundError(f"expected budgets as {_FORMS}, got {given!r}, which is not a file")
    _validate.known_name("budgets", given, DISTRIBUTIONS)
    raise ValueError(f"expected budgets as {_FORMS}, got {given!r}")


@functools.lru_cache(maxsize=4)  # a calibration asks for the same ones at every scale
def _draw_budgets(name: str, num_users: int) -> np.ndarray:
    """The budgets of a distribution by name; cached, and so read-only."""
    budgets = DISTRIBUTIONS[name].draw(num_users)
    budgets.flags.writeable = False
    return budgets


def _read_budgets(path: Path) -> np.ndarray:
    """The budgets in a file with one number per line; empty lines do not count."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    values = []
    for line in lines:
        try:
            values.append(float(line))
        except ValueError as error:
            raise ValueError(f"expected one number per line in {str(path)!r}, got {line!r}") from error
    return np.array(values)
