"""Every protocol by its config name: a new one is a file here and a line in `PROTOCOLS`.

One from outside the package is found as "module:Class", or by its name where an installed distribution declares it as
an entry point of the group `dovetail.protocols`. Deployed parties take names alone: what runs at a node is what its
owner installed, and never code that a task names.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar

from dovetail import _imports, _validate
from dovetail._fields import meanings, with_fields_in_help
from dovetail.protocols._base import Cohort, Protocol
from dovetail.protocols._claimed import Claimed
from dovetail.protocols._contributions import Contribution
from dovetail.protocols._correlation import CorrelatedNoise
from dovetail.protocols._fast import Fast, fast_path
from dovetail.protocols._messages import Levels, Messages, Positions, Sent
from dovetail.protocols._scopes import curator_scope, local_scope, shares_scope, shuffle_scope
from dovetail.protocols.curator.dp_fl import DpFl
from dovetail.protocols.curator.fedavg import FedAvg
from dovetail.protocols.flame.ss_double import SsDouble
from dovetail.protocols.flame.ss_simple import SsSimple
from dovetail.protocols.flame.ss_topk import SsTopk
from dovetail.protocols.local.ldp_fl import LdpFl
from dovetail.protocols.local.privunit import PrivUnit
from dovetail.protocols.personal.apes import Apes
from dovetail.protocols.personal.pldp import LdpMin, Pldp, Unis
from dovetail.protocols.personal.s_apes import SApes
from dovetail.protocols.subjects.central_sub import CentralSub
from dovetail.protocols.subjects.local_sub import LocalSub
from dovetail.protocols.sums.binary_sum import BinarySum
from dovetail.protocols.sums.real_sum import RealSum
from dovetail.protocols.sums.secagg import SecAgg
from dovetail.protocols.sums.split_and_mix import SplitAndMixProtocol

__all__ = [
    "BUNDLED",
    "PROTOCOLS",
    "Claimed",
    "Cohort",
    "Contribution",
    "CorrelatedNoise",
    "Fast",
    "Levels",
    "Messages",
    "Positions",
    "Protocol",
    "SecAgg",
    "Sent",
    "build",
    "curator_scope",
    "fast_path",
    "fields",
    "fill_settings",
    "find",
    "local_scope",
    "register",
    "shares_scope",
    "shuffle_scope",
]

_CURATOR_AND_LOCAL = (FedAvg, DpFl, LdpFl)
_ITEMS = (CentralSub, LocalSub)
_SHUFFLED = (SsSimple, SsDouble, SsTopk, PrivUnit, SplitAndMixProtocol)
_SHARED = (SecAgg,)
_PERSONAL = (Apes, SApes, Unis, Pldp, LdpMin)
_SUMS = (BinarySum, RealSum)
PROTOCOLS: dict[str, type[Protocol]] = {
    cls.name: cls for cls in (*_CURATOR_AND_LOCAL, *_ITEMS, *_SHUFFLED, *_SHARED, *_PERSONAL, *_SUMS)
}
for _kind in PROTOCOLS.values():
    with_fields_in_help(_kind)
_ENTRY_POINTS = "dovetail.protocols"
P = TypeVar("P", bound=Protocol)
BUNDLED = frozenset(PROTOCOLS.values())  # those that we vouch for, whatever is registered later


def find(name: str) -> type[Protocol]:
    """The protocol class of this name, or the class "module:Class" itself.

    An unknown name is refused with the nearest known one as a hint.
    """
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    if ":" not in name:
        declared = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=_ENTRY_POINTS)}
        _validate.known_name("protocol", name, {*PROTOCOLS, *declared})
        PROTOCOLS[name] = _import_protocol(declared[name], installed=True)
        return PROTOCOLS[name]
    return _import_protocol(name)


def register(protocol: type[P]) -> type[P]:
    """Make a protocol known by its `name`, for this process: to configs, commands, audits and `quote`.

    Arguments:
        protocol: a class with a `name` that no bundled protocol has; one that was registered before is replaced.

    Returns: the class itself, so that this is a decorator.
    """
    if not _is_protocol_class(protocol):
        raise ValueError(f"expected a subclass of dovetail.Protocol, got {protocol!r}")
    name = getattr(protocol, "name", None)
    if not isinstance(name, str) or not name or ":" in name:
        raise ValueError(f"expected a name without ':' for {protocol.__name__}, got name={name!r}")
    if PROTOCOLS.get(name) in BUNDLED and PROTOCOLS[name] is not protocol:
        raise ValueError(f"expected a name of its own for {protocol.__name__}, but {name!r} is bundled with Dovetail")
    PROTOCOLS[name] = protocol
    return protocol


def _import_protocol(name: str, *, installed: bool = False) -> type[Protocol]:
    """The class "module:Class"; refuses what is no subclass of `Protocol`."""
    kind = "dovetail.protocols.Protocol"
    return _imports.import_named(name, what="protocol", kind=kind, accept=_is_protocol_class, installed=installed)


def _is_protocol_class(candidate: object) -> TypeGuard[type[Protocol]]:
    return isinstance(candidate, type) and issubclass(candidate, Protocol)


def fields(name: str) -> dict[str, dataclasses.Field[Any]]:
    """The settings of a protocol by their names, as dataclass fields."""
    return {field.name: field for field in dataclasses.fields(find(name))}  # type: ignore[arg-type]


def fill_settings(name: str, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """These settings, and the protocol's example for those that are left open."""
    return {**find(name).example(dim, settings), **settings}


def build(name: str, parameters: Mapping[str, Any]) -> Protocol:
    """The protocol of this name with these parameters, not settled; refuses keys that it does not have."""
    settings = fields(name)
    for key in parameters:
        _validate.known_name(f"key of protocol {name!r}", key, settings, meanings=lambda: meanings(find(name)))
    for key, field in settings.items():
        if key not in parameters and field.default is dataclasses.MISSING:
            raise ValueError(f"expected protocol.{key} for {name!r}, got none")
    return find(name)(**parameters)
