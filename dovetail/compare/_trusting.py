"""Whom a user must trust, in words."""

from __future__ import annotations

from dovetail.protocols import Protocol
from dovetail.statements import Trust

__all__ = ["may_collude", "whom"]


def may_collude(protocol: Protocol) -> int:
    """How many shufflers or aggregators may work with the analyzer."""
    many = getattr(protocol, "aggregators", None)
    return getattr(protocol, "colluding_shufflers", 0) if many is None else many - 1


def whom(trust: Trust, protocol: Protocol, dim: int) -> str:
    """Who must be honest for the statement of this protocol."""
    may = may_collude(protocol)
    match trust:
        case Trust.CURATOR:
            return "a curator who sees every update"
        case Trust.SHUFFLE:
            many = protocol.layout(dim).shufflers
            if many == 1:
                return "one shuffler that does not collude"
            return f"{many} shufflers, of which {may or 'none'} may collude"
        case Trust.SHARES:
            return f"{may + 1} aggregators, of which {may} may collude"
        case _:
            return "nobody"
