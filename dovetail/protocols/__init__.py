"""Every protocol by its config name: a new one is a file here and a line in `PROTOCOLS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dovetail import _validate
from dovetail.protocols._base import Cohort, Protocol
from dovetail.protocols.dp_fl import DpFl
from dovetail.protocols.fedavg import FedAvg
from dovetail.protocols.ldp_fl import LdpFl

__all__ = ["PROTOCOLS", "Cohort", "Protocol", "build"]

PROTOCOLS: dict[str, type[Protocol]] = {cls.name: cls for cls in (FedAvg, DpFl, LdpFl)}


def build(name: str, parameters: Mapping[str, Any]) -> Protocol:
    """The protocol of this name with these parameters; unknown names get the nearest known one as a hint."""
    _validate.known("protocol", name, PROTOCOLS)
    cls = PROTOCOLS[name]
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in parameters:
        _validate.known(f"key of protocol {name!r}", key, fields)
    for key, field in fields.items():
        if key not in parameters and field.default is dataclasses.MISSING:
            raise ValueError(f"expected protocol.{key} for {name!r}, got none")
    return cls(**parameters)
