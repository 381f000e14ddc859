"""Events as plain data and back: what a ledger keeps of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from dovetail import _validate
from dovetail._structs import resolve_fields
from dovetail.events import _noise, _participation, _shuffled, _sums, _trials

__all__ = ["from_plain", "register_event", "to_plain"]

_EVENTS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        _noise.CorrelatedGaussian,
        _noise.DataIndependent,
        _noise.Gaussian,
        _noise.Laplace,
        _noise.NonPrivate,
        _noise.ReplacedUsers,
        _noise.SampledSubject,
        _trials.Repeated,
        _trials.BestTrial,
        _shuffled.PaddedBernoulli,
        _shuffled.PaddedTopk,
        _shuffled.Personalized,
        _shuffled.Shuffled,
        _sums.CorrelatedSum,
        _sums.SkellamSum,
        _sums.SplitAndMix,
        _participation.Disjoint,
        _participation.Everyone,
        _participation.FixedSize,
        _participation.Poisson,
        _participation.Separated,
    )
}


def register_event(kind: type) -> type:
    """Let a ledger hold events of this kind, a frozen dataclass; its name must not be another event's.

    A release is registered with its events (`accounting.releases`), so that a plug-in need not call this.

    Arguments:
        kind: the class of the event.
    """
    first = _EVENTS.setdefault(kind.__name__, kind)
    if (first.__module__, first.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"an event called {kind.__name__!r} is registered already: give this class another name")
    _EVENTS[kind.__name__] = kind
    return kind


def to_plain(event: Any) -> dict[str, Any]:
    """A mechanism, or a way to take part, as plain data: its class's name under `event`, and its fields."""
    fields = {field.name: _plain_value(getattr(event, field.name)) for field in dataclasses.fields(event)}
    return {"event": type(event).__name__, **fields}


def from_plain(data: dict[str, Any]) -> Any:
    """The event that `to_plain` wrote; ValueError for what is no event, and for values that an event refuses."""
    fields = {name: _read_plain_value(value) for name, value in data.items() if name != "event"}
    name = str(data.get("event"))
    _validate.known_name("event", name, _EVENTS)
    try:
        return msgspec.convert(fields, resolve_fields(_EVENTS[name]))
    except msgspec.ValidationError as error:
        raise ValueError(f"these are not the fields of a {name} event: {error}") from error


def _plain_value(value: Any) -> Any:
    """A field of an event as plain data; events in it become dicts with their names."""
    if _EVENTS.get(type(value).__name__) is type(value):
        return to_plain(value)
    if isinstance(value, tuple) and value and not isinstance(value[0], int | float):
        return [_plain_value(item) for item in value]
    return msgspec.to_builtins(value)


def _read_plain_value(value: Any) -> Any:
    """A field from plain data: dicts with the name of an event become events, all else stays as it is."""
    if isinstance(value, dict) and "event" in value:
        return from_plain(value)
    return [_read_plain_value(item) for item in value] if isinstance(value, list) else value
