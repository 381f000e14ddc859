"""Noise that is correlated between rounds, for protocols whose sum gets Gaussian noise (`mechanisms.correlated`)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self, cast

from dovetail import _validate
from dovetail.events import CorrelatedGaussian, Separated
from dovetail.mechanisms import correlated
from dovetail.mechanisms.correlated import Workload
from dovetail.protocols._base import Cohort
from dovetail.statements import Neighbors

__all__ = ["CorrelatedNoise"]

_LEAST_GAIN = 1.02  # by which the noise in the model must fall before correlated noise is chosen by itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedNoise:
    """A part of a protocol: whether the noise of its rounds is correlated, and how; the config keys for it.

    `coefficients` are filled in when the protocol is settled. Without them rounds have independent noise.
    """

    correlation: Literal["auto", "none", "sqrt", "banded-inverse", "optimised"] = "auto"
    """Whether a round's noise takes back noise of earlier rounds, with `cohort.kind = "separated"`: `none`, `sqrt` (all
    of them, by the square root), `banded-inverse` (the last `noise_rows`, by the square root), `optimised` (the last
    `noise_rows`, for these rounds and uploads), or `auto`: optimised where that leaves less noise in the model."""
    noise_rows: int = 32
    """How many rounds' noise is kept at a time, each of it as long as an update."""
    coefficients: tuple[float, ...] | None = None
    """How much of the noise of this round, the last one, ... a round has; the first is positive, all others at most 0.
    Follows from `correlation` unless given."""
    server_momentum: float | None = None
    """The momentum of the server, which correlated noise is optimised for; follows from [server]."""

    def check_correlation(self) -> None:
        """Raise ValueError for settings of the noise's correlation that are wrong whatever the cohort is."""
        kinds = ("auto", "none", "sqrt", "banded-inverse", "optimised")
        _validate.one_of(kinds, correlation=self.correlation)
        _validate.integer(noise_rows=self.noise_rows)
        _validate.at_least(1, noise_rows=self.noise_rows)
        _validate.in_interval(0, 1, **_validate.not_none(server_momentum=self.server_momentum))
        if self.coefficients is not None:
            drawn = correlated.as_drawn(tuple(float(value) for value in self.coefficients))
            CorrelatedGaussian(std=1, sensitivity=1, coefficients=drawn, neighbors=Neighbors.ADD_REMOVE)
            object.__setattr__(self, "coefficients", drawn)

    @property
    def is_correlated(self) -> bool:
        """Whether rounds take back noise of earlier ones, as settled."""
        return self.coefficients is not None

    def settle_correlation(self, cohort: Cohort, *, obstacle: str | None = None) -> Self:
        """The protocol with the coefficients of its noise, or without where rounds have independent noise.

        Arguments:
            cohort: who takes part and how often, which `cohort.kind = "separated"` alone tells.
            obstacle: why the protocol's other settings need independent noise, if they do.
        """
        participation = cohort.participation
        if not isinstance(participation, Separated):
            obstacle = "with cohort.kind = 'separated' only, which says how often a user takes part"
        if obstacle is not None:
            if self.correlation not in ("auto", "none") or self.coefficients is not None:
                given = "coefficients" if self.coefficients is not None else f"correlation = {self.correlation!r}"
                raise ValueError(f"noise can be correlated {obstacle}: leave out protocol.{given}")
            return self
        if self.correlation == "none":
            if self.coefficients is not None:
                raise ValueError("expected no protocol.coefficients with protocol.correlation = 'none'")
            return self
        return self if self.coefficients is not None else self._with_coefficients(cast("Separated", participation))

    def _with_coefficients(self, schedule: Separated) -> Self:
        """The protocol with the coefficients of its kind of correlation for this schedule; without, if none gains."""
        workload = Workload(
            rounds=schedule.rounds,
            uploads=schedule.most_uploads,
            separation=schedule.separation,
            momentum=self.server_momentum or 0.0,
        )
        rows = min(self.noise_rows, schedule.rounds)
        match self.correlation:
            case "sqrt":
                coefficients = correlated.square_root(schedule.rounds)
            case "banded-inverse":
                coefficients = correlated.square_root(rows)
            case _:
                coefficients = correlated.optimize(workload, rows)
        if self.correlation == "auto":
            independent = correlated.error_of_model((1.0,), workload)
            if independent < _LEAST_GAIN * correlated.error_of_model(coefficients, workload):
                return self
        if len(coefficients) == 1:  # of one row nothing is taken back
            return self
        return dataclasses.replace(self, coefficients=coefficients)

    def noise_kept(self, rounds: int) -> float:
        """Of the noise that the mean of so many estimates would have, were rounds independent, the share it has."""
        return correlated.share_kept(self.coefficients or (1.0,), rounds)

    def correlation_in_words(self) -> tuple[str, ...]:
        """What a statement says of correlated noise; nothing of independent noise."""
        if self.coefficients is None:
            return ()
        kept = len(self.coefficients) - 1
        if not kept:
            return ()
        return (
            f"every round draws new noise and takes back part of that of the {kept} rounds before it, which whoever "
            "adds it keeps secret and then forgets; a round that is not released draws its noise too",
        )

    def correlated_event(self, *, std: float, sensitivity: float, neighbors: Neighbors) -> Any:
        """The event of one round with the settled coefficients."""
        return CorrelatedGaussian(
            std=std, sensitivity=sensitivity, coefficients=self.coefficients or (1.0,), neighbors=neighbors
        )
