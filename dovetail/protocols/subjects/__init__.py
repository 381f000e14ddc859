"""Protocols that draw, clip and noise records, for the privacy of items or of people with several of them."""

from __future__ import annotations

from dovetail.protocols._base import Protocol
from dovetail.protocols.subjects._items import ItemLevel

__all__ = ["ItemLevel", "require_item_level"]


def require_item_level(protocol: Protocol) -> ItemLevel:
    """A protocol that samples records, with all that is particular to those; refuses any other."""
    if not isinstance(protocol, ItemLevel):
        raise ValueError(f"expected a protocol that samples records, got {protocol.name!r}")
    return protocol
