"""Configs: TOML in, validated records out.

A config is a file, or the name of a preset (`dovetail/presets`), changed by dotted overrides. Every error is one
sentence: an unknown key suggests the nearest valid one, a wrong type says what was expected.

Changes to a config from the command line: ``key.path=value``.

A key of the protocol may stand alone: `clip_norm=1` is `protocol.clip_norm=1` where no key of a config has that name.
"""

from __future__ import annotations

import copy
import re
import tomllib
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w

from dovetail import _imports, _validate, protocols
from dovetail.features import Features, Whitening

__all__ = [
    "ClientConfig",
    "CohortConfig",
    "Config",
    "PerformanceConfig",
    "PrivacyConfig",
    "ServerConfig",
    "TaskConfig",
    "apply",
    "described_presets",
    "parse",
    "parse_override",
    "presets",
    "read",
    "to_toml",
]


class _Section(msgspec.Struct, frozen=True, kw_only=True):
    pass


class TaskConfig(_Section, frozen=True, kw_only=True):
    """The data, features of it, the model, and who holds which records.

    `users`, `records`, `subjects` and `spread` are public numbers: they are declared, never counted in data that are
    not published.
    """

    name: str
    model: str = "logistic"
    features: str = "none"
    symmetric: bool = False
    patches: tuple[tuple[int, int], ...] | None = None
    whiten: Whitening | None = None
    partition: str | None = None
    users: int | None = None
    silos: int | None = None
    records: int | None = None
    subjects: int | None = None
    spread: int | None = None
    concentration: float = 0.5
    folder: str | None = None

    @property
    def all_features(self) -> Features:
        """Its features, those of the model "scatter" included; refuses what does not fit together."""
        kind = "scatter" if self.model == "scatter" and self.features == "none" else self.features
        if self.whiten is not None and self.whiten.task == self.name:
            raise ValueError(f"expected task.whiten on public data, got the task's own, on={self.whiten.on!r}")
        return Features(kind=kind, symmetric=self.symmetric, patches=self.patches, whiten=self.whiten)


class CohortConfig(_Section, frozen=True, kw_only=True):
    """Who takes part in which round; give `epochs` or `rounds`.

    `size` is one number, or a list with one per round; with `size_end` it changes linearly from round to round. Rounds
    below `min_size` release nothing; by default it is 0, or `size` for protocols that shuffle reports. With `kind =
    "secret"` everyone uploads, and the data of `size` users, who toss coins of their own, enter on average; the minimum
    counts uploads.
    """

    kind: Literal["disjoint", "fixed", "poisson", "everyone", "secret"] = "disjoint"
    size: int | list[int] | None = None
    size_end: int | None = None
    epochs: int | None = None
    rounds: int | None = None
    min_size: int | None = None
    colluders: int = 0
    dropout: float = 0.0


class ClientConfig(_Section, frozen=True, kw_only=True):
    """What a client does with its records.

    It averages over `views` of each beside the record itself (see `dovetail.data.views`): "shift:1", "rotate:8",
    "flip", "zoom:1.1" or "module:name". `project` and `weight` are of "moments" (see `dovetail.learners.moments`).
    """

    update: Literal["fedsgd", "fedavg", "fedprox", "moments"] = "fedsgd"
    learning_rate: float = 0.1
    epochs: int = 1
    batch: int = 10
    mu: float = 0.0
    project: int | None = None
    weight: float = 1.0
    views: list[str] = []

    @property
    def steps(self) -> dict[str, Any]:
        """How its update is computed from what it trains on."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "views"}


class ServerConfig(_Section, frozen=True, kw_only=True):
    """The server's optimiser: an optax name, its learning rate and other options; or "ridge", for moments.

    With `average`, the mean of the models of the last part of the rounds is published: 0.5 for the last half.
    """

    optimizer: str = "sgd"
    learning_rate: float = 1.0
    options: dict[str, float | bool] = {}
    average: float = 0.0


class PrivacyConfig(_Section, frozen=True, kw_only=True):
    """The privacy target: noise is calibrated to it unless given, and training never spends more.

    It is for one `unit` (by default the one that the protocol protects). With `stop = "delta"` the statement is at the
    target's eps and reports the delta that was spent; with "eps" it is at the target's delta.
    """

    eps: float | None = None
    delta: float = 1e-5
    neighbors: Literal["replace-one", "add-remove"] = "replace-one"
    unit: Literal["item", "user", "subject"] | None = None
    stop: Literal["eps", "delta"] = "eps"


class PerformanceConfig(_Section, frozen=True, kw_only=True):
    """Settings that affect speed but never a statement."""

    devices: int | None = None
    chunk: int | None = None
    fast: bool = True
    size_classes: int | None = None


class Config(_Section, frozen=True, kw_only=True):
    """One training.

    `seed` determines everything public: how records are distributed, the initial model, the order of records. `noise`
    comes from the operating system ("os") or is derived from the seed too ("seeded"): for papers, tests and
    comparisons, without any privacy. `diagnostics` logs statistics of raw updates, which only a simulation can see.
    """

    seed: int = 0
    noise: Literal["os", "seeded"] = "os"
    diagnostics: bool = False
    task: TaskConfig
    cohort: CohortConfig = CohortConfig()
    client: ClientConfig = ClientConfig()
    server: ServerConfig = ServerConfig()
    protocol: dict[str, Any]
    privacy: PrivacyConfig = PrivacyConfig()
    performance: PerformanceConfig = PerformanceConfig()

    @property
    def protocol_settings(self) -> dict[str, Any]:
        """The protocol's own settings, without its name."""
        return {key: value for key, value in self.protocol.items() if key != "name"}


def presets() -> list[str]:
    """The names of the bundled configs."""
    folder = resources.files("dovetail") / "presets"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def described_presets() -> dict[str, str]:
    """What each bundled config is, by name: the first line of its file."""
    folder = resources.files("dovetail") / "presets"
    return {name: (folder / f"{name}.toml").read_text().partition("\n")[0].lstrip("# ") for name in presets()}


def read(source: str | Path, overrides: Iterable[tuple[str, Any]] = (), *, code_beside: bool = True) -> Config:
    """The config in a file, or the preset of this name, with overrides applied.

    Objects that a file names as "module:name" may lie beside it, unless `code_beside` is False.
    """
    path = Path(source)
    if path.is_file():
        text = path.read_text()
        if code_beside:
            _imports.look_in(path.parent)
    elif str(source) in presets():
        text = (resources.files("dovetail") / "presets" / f"{source}.toml").read_text()
    elif path.suffix == ".toml" or path.exists():
        raise FileNotFoundError(f"expected a config file, got {str(source)!r}, which is not a file")
    else:
        _validate.known_name("preset or config file", str(source), presets())
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"expected valid TOML in {str(source)!r}, got an error: {error}") from error
    return parse(data, overrides)


def parse(data: Mapping[str, Any], overrides: Iterable[tuple[str, Any]] = ()) -> Config:
    """The config in plain data."""
    tree: dict[str, Any] = copy.deepcopy(dict(data))
    apply(tree, overrides, known=[field.name for field in msgspec.structs.fields(Config)])
    _check_keys(tree)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ValueError(_sentence(error, tree)) from error
    if "name" not in config.protocol:
        raise ValueError("expected protocol.name, got none")
    _ = config.task.all_features
    _validate.integer(seed=config.seed)
    _validate.in_interval(0, 2**31 - 1, seed=config.seed)
    _validate.in_open_interval(0, 1, delta=config.privacy.delta)
    if config.privacy.eps is not None:
        _validate.positive(eps=config.privacy.eps)
    elif config.privacy.stop == "delta":
        raise ValueError("expected privacy.eps with privacy.stop = 'delta', got none")
    return config


def to_toml(config: Config) -> str:
    """The config as TOML, complete: what it leaves open is not written, what it decides is."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def _check_keys(tree: Mapping[str, Any]) -> None:
    sections = {field.name: field for field in msgspec.structs.fields(Config)}
    for name, value in tree.items():
        _validate.known_name("config key", name, sections)
        kind = sections[name].type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if not isinstance(value, Mapping):
                raise ValueError(f"expected a section [{name}], got {name}={value!r}")
            for key in value:
                _validate.known_name(f"key of [{name}]", key, kind.__struct_fields__)
            if name == "task" and isinstance(whiten := value.get("whiten"), Mapping):
                for key in whiten:
                    _validate.known_name("key of task.whiten", key, Whitening.__dataclass_fields__)


_KINDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def _sentence(error: msgspec.ValidationError, tree: Mapping[str, Any]) -> str:
    """What a key must be, and what it is."""
    text, _, where = str(error).partition(" - at `$")
    where = where.strip("`.")
    value, kind = tree, Config
    for name in re.sub(r"\[.*", "", where).split(".") if where else ():
        value = value.get(name) if isinstance(value, Mapping) else None  # type: ignore[assignment]
        kind = typing.get_type_hints(kind).get(name, Any) if isinstance(kind, type) else Any
    parts = (kind, *typing.get_args(kind))
    options = [one for part in parts if typing.get_origin(part) is Literal for one in typing.get_args(part)]
    kinds = re.match(r"Expected `([a-z]+(?: \| [a-z]+)*)`", text)
    if options:
        return f"{where} must be one of {', '.join(map(str, options))}, got {value!r}"
    if not where or kinds is None:
        message = text[:1].lower() + text[1:]
        return f"{message} in {where}" if where else message
    wanted = " or ".join(_KINDS.get(kind, kind) for kind in kinds[1].split(" | ") if kind != "null")
    return f"{where} must be {wanted}, got {value!r}"


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def parse_override(text: str) -> tuple[str, Any]:
    """``key.path=value`` as a pair; the value is read as TOML, or else as a plain string.

    Numbers may leave out a zero, which TOML does not allow: .025 and 2. are numbers too, also in lists.
    """
    path, separator, value = text.partition("=")
    if not separator or not path.strip():
        raise ValueError(f"expected --set key.path=value, got {text!r}")
    for spelled in (value, _with_zeros(value)):
        try:
            return path.strip(), tomllib.loads(f"value = {spelled}")["value"]
        except tomllib.TOMLDecodeError:
            continue
    return path.strip(), value


def apply(tree: dict[str, Any], overrides: Iterable[tuple[str, Any]], *, known: Collection[str]) -> None:
    """Change a config in plain data, whose top-level keys are `known`."""
    for path, value in _spelled_out(tree, list(overrides), known):
        _assign(tree, path, value)


def _spelled_out(
    tree: Mapping[str, Any], given: Sequence[tuple[str, Any]], known: Collection[str]
) -> list[tuple[str, Any]]:
    """Overrides by their full path: a bare key that is no key of a config may be one of its protocol."""
    section = dict(given).get("protocol", tree.get("protocol"))
    name = dict(given).get("protocol.name", section.get("name") if isinstance(section, Mapping) else None)
    bare = [key for key, _ in given if "." not in key and key not in known]
    own = protocols.fields(name) if bare and isinstance(name, str) else ()
    return [(f"protocol.{key}" if key in bare and key in own else key, value) for key, value in given]


def _assign(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    node = tree
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ValueError(f"expected a section at {name!r}, got a value in {path!r}")
    node[last] = copy.deepcopy(value)


def _with_zeros(value: str) -> str:
    return re.sub(r"(?<=\d)\.(?![\d.])", ".0", re.sub(r"(?<![\w.])\.(?=\d)", "0.", value))
