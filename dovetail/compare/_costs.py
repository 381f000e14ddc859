"""What a round costs as it is deployed: each message sealed on its own, opened and added up by one core."""

from __future__ import annotations

import dataclasses
import functools
import time

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dovetail.events import Everyone
from dovetail.parties.common import sealing
from dovetail.parties.common.keys import KEY_ID
from dovetail.protocols import Cohort, Contribution, Protocol
from dovetail.statements import NotApplicable

__all__ = ["SEED_BYTES", "Costs", "costs", "in_bytes", "packed_size", "sealed_size"]

SEED_BYTES = 32  # from which a share is expanded
_SLOT_BYTES, _FLOAT_BYTES = 4, 4
_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What one round asks of a client and of the analyzer; how long a client seals was not measured at first."""

    messages: int
    bytes: int
    server_seconds: float
    client_seconds: float | None = None

    def __str__(self) -> str:
        """What a client sends and computes beside its training, in words."""
        sealing = "" if not self.client_seconds else f" and spend {_seconds(self.client_seconds)} on sealing them"
        what = "1 message" if self.messages == 1 else f"{self.messages:,} messages"
        return f"every user would send {what} ({in_bytes(self.bytes)}) per round{sealing}"


def costs(protocol: Protocol, size: int, dim: int) -> Costs:
    """A client's messages and bytes, and the analyzer's seconds, for one round of so many users."""
    layout = protocol.layout(dim)
    aggregators = getattr(protocol, "aggregators", None)
    if aggregators is not None:
        return _costs_of_shares(protocol, size, dim, aggregators)
    if not layout.shufflers:
        vector = _FLOAT_BYTES * dim
        return Costs(messages=1, bytes=vector, server_seconds=size * dim / _additions_a_second(), client_seconds=0.0)
    try:
        deployed = protocol.messages(dim)
        messages, plain = deployed.per_client, deployed.size
    except (NotApplicable, ValueError):  # simulated only: a float a report
        messages = round(layout.reports_per_client * protocol.inclusion_rate(dim))
        plain = _FLOAT_BYTES
    received = size * messages if layout.padding is None else layout.padding.pad_to * layout.slots
    return Costs(
        messages=messages,
        bytes=messages * sealed_size(plain),
        server_seconds=received * _seconds_each(plain)[1],
        client_seconds=messages * _seconds_each(plain)[0],
    )


def _costs_of_shares(protocol: Protocol, size: int, dim: int, aggregators: int) -> Costs:
    """One packed share and a seed for each other aggregator, each sealed; the server is the one that adds up shares."""
    cohort = Cohort(participation=Everyone(), size=size, min_size=size, aggregators=aggregators)
    packed = packed_size(protocol.contribution(cohort, dim))
    seconds = [_seconds_each(plain) for plain in (packed, *[SEED_BYTES] * (aggregators - 1))]
    return Costs(
        messages=aggregators,
        bytes=packed + (aggregators - 1) * SEED_BYTES + aggregators * sealing.OVERHEAD,
        server_seconds=size * (seconds[0][1] + dim / _additions_a_second()),
        client_seconds=sum(each for each, _ in seconds),
    )


def packed_size(contribution: Contribution) -> int:
    """Bytes of a client's integers in as few bits as they need."""
    return -(-contribution.length * contribution.bits // 8)


def _seconds(count: float) -> str:
    return f"{count:.0f} s" if count >= 10 else f"{count:.2g} s"


def in_bytes(count: float) -> str:
    """So many bytes in the unit that fits."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def sealed_size(plain: int) -> int:
    """Bytes of a message of so many plain bytes as it is uploaded: its slot, and the sealed rest."""
    return _SLOT_BYTES + plain + sealing.OVERHEAD


@functools.cache
def _seconds_each(size: int, repeats: int = 200) -> tuple[float, float]:
    """One message, sealed and opened by one core of this machine."""
    key = X25519PrivateKey.generate()
    purpose = sealing.Purpose(task_id=bytes(32), round=1, role="report", key_id=bytes(KEY_ID))
    begun = time.thread_time()
    for _ in range(repeats):
        sealed = sealing.seal(bytes(size), key.public_key(), purpose)
    between = time.thread_time()
    for _ in range(repeats):
        sealing.open_sealed(sealed, key, purpose)
    return (between - begun) / repeats, (time.thread_time() - between) / repeats


@functools.cache
def _additions_a_second() -> float:
    """Numbers that this machine adds to a sum of vectors in a second."""
    block, total = np.ones((64, 65_536), np.float32), np.zeros(65_536, np.float32)
    begun = time.thread_time()
    total += block.sum(axis=0)
    return block.size / (time.thread_time() - begun)
