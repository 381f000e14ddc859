"""Who takes part in which round, and with which records: as the protocol `samples`, users or records."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dovetail.data import Clients
from dovetail.protocols import Protocol
from dovetail.protocols.subjects import require_item_level
from dovetail.sampling.records import RecordSampler, cap_records
from dovetail.sampling.samplers import Items, RoundSample, Sampler, SecretSampler, UserSampler
from dovetail.sampling.schedule import Schedule
from dovetail.sampling.uploads import UploadBook

__all__ = [
    "Items",
    "RecordSampler",
    "RoundSample",
    "Sampler",
    "Schedule",
    "SecretSampler",
    "UploadBook",
    "UserSampler",
    "make_sampler",
    "usable_clients",
]


def usable_clients(protocol: Protocol, clients: Clients, subjects: np.ndarray | None) -> Clients:
    """Who holds which of the records that the protocol will use; fewer than all where it caps a subject's records.

    Arguments:
        protocol: settled; what it `samples` decides.
        clients: who holds what.
        subjects: whom each record is about, by record; None: its user.
    """
    if protocol.samples == "users":
        return clients
    return cap_records(require_item_level(protocol), clients, subjects)


def make_sampler(
    protocol: Protocol,
    *,
    schedule: Schedule,
    clients: Clients,
    subjects: np.ndarray | None,
    noise_of: Callable[[int], float] | None,
) -> Sampler:
    """The sampler that a settled protocol asks for: of users, of users in secret, or of records.

    Arguments:
        protocol: settled.
        schedule: who takes part in which round.
        clients: who holds what, after `usable_clients`.
        subjects: whom each record is about, by record; None: its user.
        noise_of: a recipe's noise for each Z, where that sets it.
    """
    if protocol.samples == "users":
        kind = SecretSampler if schedule.kind == "secret" else UserSampler
        return kind(protocol=protocol, schedule=schedule, clients=clients)
    return RecordSampler(
        protocol=require_item_level(protocol), schedule=schedule, clients=clients, subjects=subjects, noise_of=noise_of
    )
