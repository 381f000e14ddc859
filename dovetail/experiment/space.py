"""What is tried when settings are chosen: all combinations of the values of some config keys."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Space", "parse_space"]

_TUNABLE = ("client", "cohort", "protocol", "server", "task.features", "task.model", "task.symmetric", "task.whiten")
_FIXED = ("protocol.name", "cohort.kind", "cohort.colluders")
_MOST_SETTINGS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """The settings to choose from: all combinations of the values of some config keys.

    Guarantees:
        Refuses keys that say whose data are protected, or how well, rather than how to train.
    """

    axes: Mapping[str, tuple[Any, ...]]

    def __post_init__(self) -> None:
        if not self.axes or not all(self.axes.values()):
            raise ValueError(f"expected a space with keys and values, got axes={dict(self.axes)!r}")
        for key in self.axes:
            if key in _FIXED or not any(key == name or key.startswith(f"{name}.") for name in _TUNABLE):
                raise ValueError(f"expected a key that says how to train (of {', '.join(_TUNABLE)}), got {key!r}")
        if (count := math.prod(len(values) for values in self.axes.values())) > _MOST_SETTINGS:
            raise ValueError(f"expected a space of at most {_MOST_SETTINGS} settings, got {count}")

    @property
    def settings(self) -> tuple[Mapping[str, Any], ...]:
        """All combinations."""
        return tuple(dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values()))


def parse_space(texts: Iterable[str]) -> Space:
    """The space of ``key.path=value,value,...``, one text for each key; values are read as TOML, or else as text."""
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, separator, values = text.partition("=")
        key = key.strip()
        if not separator or not key or not values.strip() or key in axes:
            raise ValueError(f"expected --space key.path=value,value,... once for each key, got {text!r}")
        try:
            axes[key] = tuple(tomllib.loads(f"values = [{values}]")["values"])
        except tomllib.TOMLDecodeError:
            axes[key] = tuple(value.strip() for value in values.split(","))
    return Space(axes=axes)
