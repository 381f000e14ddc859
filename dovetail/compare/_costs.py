"""What a round costs as it is deployed: each message sealed on its own, opened and added up by one core.

Messages and bytes are counted; seconds are measured on this machine, once per message size and process, and so differ
from call to call of the program.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dovetail import hpke
from dovetail.events import Everyone
from dovetail.protocols import Cohort, Contribution, Protocol
from dovetail.statements import NotApplicable

__all__ = ["SEED_BYTES", "Costs", "bytes_in_words", "costs", "packed_size", "sealed_size"]

SEED_BYTES = 32  # from which a share is expanded
_SLOT_BYTES, _FLOAT_BYTES = 4, 4
_INFO = bytes(63)  # as long as what a report is bound to, in deployments
_clock = time.perf_counter if os.name == "nt" else time.thread_time  # Windows counts a thread's time in steps of 16 ms
_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What one round costs a client and the analyzer."""

    messages: int  # that each client sends
    bytes: int  # that each client sends, sealed
    server_seconds: float  # for the messages of all clients, on one core
    client_seconds: float | None = None  # for sealing, on one core; None in files of earlier versions

    def __str__(self) -> str:
        """What a client sends and computes beside its training, in words."""
        sealing = (
            "" if not self.client_seconds else f" and spend {_format_seconds(self.client_seconds)} on sealing them"
        )
        what = "1 message" if self.messages == 1 else f"{self.messages:,} messages"
        return f"every user would send {what} ({bytes_in_words(self.bytes)}) per round{sealing}"


def costs(protocol: Protocol, size: int, dim: int) -> Costs:
    """The costs of one round.

    Arguments:
        size: users in the round.
        dim: coordinates of an update.
    """
    layout = protocol.layout(dim)
    aggregators = getattr(protocol, "aggregators", None)
    if aggregators is not None:
        return _costs_of_shares(protocol, size, dim, aggregators)
    if not layout.shufflers:
        vector = _FLOAT_BYTES * dim
        return Costs(messages=1, bytes=vector, server_seconds=size * dim / _additions_per_second(), client_seconds=0.0)
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
        server_seconds=received * _seal_and_open_seconds(plain)[1],
        client_seconds=messages * _seal_and_open_seconds(plain)[0],
    )


def _costs_of_shares(protocol: Protocol, size: int, dim: int, aggregators: int) -> Costs:
    """The costs of a round in which every user shares an update between aggregators.

    One aggregator gets a packed share, each of the others a seed, and all are sealed. Server seconds are those of the
    aggregator with the packed shares.
    """
    cohort = Cohort(participation=Everyone(), size=size, min_size=size, aggregators=aggregators)
    packed = packed_size(protocol.contribution(cohort, dim))
    seconds = [_seal_and_open_seconds(plain) for plain in (packed, *[SEED_BYTES] * (aggregators - 1))]
    return Costs(
        messages=aggregators,
        bytes=packed + (aggregators - 1) * SEED_BYTES + aggregators * hpke.OVERHEAD,
        server_seconds=size * (seconds[0][1] + dim / _additions_per_second()),
        client_seconds=sum(each for each, _ in seconds),
    )


def packed_size(contribution: Contribution) -> int:
    """Bytes of a client's integers, each packed in as few bits as the contribution needs; rounded up to whole bytes."""
    return -(-contribution.length * contribution.bits // 8)


def _format_seconds(count: float) -> str:
    """Seconds as text, with two digits below ten."""
    return f"{count:.0f} s" if count >= 10 else f"{count:.2g} s"


def bytes_in_words(count: float) -> str:
    """A number of bytes as text, in the unit that fits: 1500 is "1.5 kB"."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def sealed_size(plain_bytes: int) -> int:
    """Bytes that are uploaded for a message of `plain_bytes` bytes: its slot, and the message sealed."""
    return _SLOT_BYTES + plain_bytes + hpke.OVERHEAD


@functools.cache
def _seal_and_open_seconds(size: int, repeats: int = 200) -> tuple[float, float]:
    """Seconds that one core of this machine needs to seal a message of `size` bytes, and to open it."""
    key = X25519PrivateKey.generate()
    public = key.public_key()
    begun = _clock()
    for _ in range(repeats):
        sealed = hpke.encrypt(bytes(size), public, _INFO)
    between = _clock()
    for _ in range(repeats):
        hpke.decrypt(sealed, key, _INFO)
    return (between - begun) / repeats, (_clock() - between) / repeats


@functools.cache
def _additions_per_second() -> float:
    """How many numbers one core of this machine adds to a sum of vectors in a second."""
    block = np.ones((64, 65_536), np.float32)
    total = np.zeros(65_536, np.float32)
    begun = _clock()
    total += block.sum(axis=0)
    return block.size / (_clock() - begun)
