"""The cohorts of a training, as its config asks for them."""

from __future__ import annotations

import dataclasses

import numpy as np

from dovetail import _validate, protocols
from dovetail.experiment.config import CohortConfig, Config
from dovetail.randomness import Randomness
from dovetail.sampling.schedule import Schedule

__all__ = ["schedule_of"]


def schedule_of(
    config: Config, protocol: protocols.Protocol, *, population: int, records: int | None, randomness: Randomness
) -> Schedule:
    """Who takes part when, of so many users; `records` is the public number of records, where they are sampled."""
    cohort = config.cohort
    if (cohort.epochs is None) == (cohort.rounds is None):
        raise ValueError(
            f"expected either cohort.epochs or cohort.rounds, got epochs={cohort.epochs}, rounds={cohort.rounds}"
        )
    _refuse_secret(cohort, protocol)
    sizes = _sizes(cohort)
    size = sizes[0] if sizes else population if cohort.size is None else cohort.size
    schedule = Schedule(
        kind=cohort.kind,
        population=population,
        size=size,  # type: ignore[arg-type]
        rounds=cohort.rounds or 1,
        randomness=randomness,
        min_size=_min_size(cohort, population if cohort.kind == "secret" else size, protocol),  # type: ignore[arg-type]
        colluders=cohort.colluders,
        dropout=cohort.dropout,
        sizes=sizes,
        records=records,
    )
    if cohort.epochs is not None:
        _validate.integer(epochs=cohort.epochs)
        schedule = dataclasses.replace(schedule, rounds=cohort.epochs * schedule.rounds_per_epoch)
    planned = [schedule.size_of(index) for index in range(schedule.rounds)]
    return dataclasses.replace(schedule, noise_scales=protocol.noise_scales(planned))


def _refuse_secret(cohort: CohortConfig, protocol: protocols.Protocol) -> None:
    """Secret rounds need a sum to which everyone adds noise, and their rate."""
    if cohort.kind != "secret":
        return
    if not protocol.secret_rounds:
        able = [name for name, known in protocols.PROTOCOLS.items() if known.secret_rounds]
        raise ValueError(
            f"expected cohort.kind = 'secret' with a protocol in which all users' noise adds up ({', '.join(able)}), "
            f"got protocol.name={protocol.name!r}"
        )
    if not isinstance(cohort.size, int) or cohort.size_end is not None:
        raise ValueError(
            "expected one cohort.size with cohort.kind = 'secret' (of how many users the data enter, on average), got "
            f"size={cohort.size} and size_end={cohort.size_end}"
        )


def _min_size(cohort: CohortConfig, size: int, protocol: protocols.Protocol) -> int:
    if protocol.needs_minimum and cohort.dropout and cohort.kind == "fixed":
        raise ValueError(
            f"expected no dropout under {protocol.name!r} with a secret sample (a withheld round would reveal who was "
            f"sampled), got dropout={cohort.dropout}"
        )
    if cohort.min_size is not None:
        return cohort.min_size
    if protocol.needs_minimum and cohort.dropout:
        raise ValueError(
            f"expected cohort.min_size with dropout={cohort.dropout} under {protocol.name!r}, got none: "
            "its guarantee needs a minimum number of users in every round"
        )
    return size if protocol.needs_minimum else 0


def _sizes(cohort: CohortConfig) -> tuple[int, ...]:
    """The sizes of all rounds, where they differ."""
    if isinstance(cohort.size, list):
        if not cohort.size or cohort.size_end is not None:
            raise ValueError(f"expected a list of sizes without size_end, got {cohort.size} and {cohort.size_end}")
        return tuple(cohort.size)
    if cohort.size_end is None:
        return ()
    if cohort.size is None or cohort.rounds is None:
        raise ValueError("expected cohort.size and cohort.rounds with cohort.size_end, got none")
    return tuple(np.linspace(cohort.size, cohort.size_end, cohort.rounds).round().astype(int).tolist())
