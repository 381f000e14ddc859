"""Configs: TOML in, validated records out.

A config is a file, or the name of a preset (`dovetail/presets`), changed by overrides: a dotted key and a value, on the
command line ``key.path=value``. A key of the protocol may stand alone: `clip_norm=1` is `protocol.clip_norm=1` where no
key of a config has that name. Every error is one sentence: an unknown key suggests the nearest valid one, a wrong type
says what was expected.

First come the sections of a config, each a class whose fields are its keys; then reading and writing; then overrides.
"""

from __future__ import annotations

import copy
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w

from dovetail import _fields, _imports, _validate, protocols
from dovetail.engine.devices import Performance
from dovetail.features import Features, Whitening
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import ServerSettings

__all__ = [
    "CohortConfig",
    "Config",
    "PrivacyConfig",
    "TaskConfig",
    "parse",
    "parse_override",
    "preset_titles",
    "presets",
    "read",
    "to_toml",
]


@_fields.with_fields_in_help
class TaskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The data, features of it, the model, and who holds which records.

    `users`, `records`, `subjects` and `spread` are public numbers: they are declared, never counted in data that are
    not published.
    """

    name: str
    """A task (`dovetail data` lists them), or `module:object` for one of your own."""
    model: str = "logistic"
    """`logistic`, `mlp`, `cnn`, `transformer`, or `scatter` (short for `logistic` on the features `scatter`)."""
    features: str = "none"
    """Fixed functions of a record: `none`, `scatter`, `patches`, `scatter+patches`, or `module:object` for your own."""
    symmetric: bool = False
    """Whether the features of a record and of its mirror image are added."""
    patches: tuple[tuple[int, int], ...] | None = None
    """With `patches`: pairs of the side of a patch and the number of filters."""
    whiten: Whitening | None = None
    """Whitening of the features: a table with `on` (`synthetic`, `strokes`, `leaves`, `strokes+leaves`, or the name of
    a task that is thereby declared public), `rank`, `ridge` and `images`."""
    partition: str | None = None
    """Who holds which records: `by-user` (as the data say; `writers` is an older name), `one-record`, `iid`, `shards`,
    `dirichlet` or `silos`. Default: `by-user` if the data name their users, otherwise `one-record`. The last four deal
    everybody's records at once: of data that are not published, `iid` and `silos` under replace-one alone."""
    users: int | None = None
    """Number of users. `one-record` and `by-user` take it from the data, unless it is given: then it is a declared,
    public number, and users beyond those with records hold nothing (add-remove needs that, or a roster)."""
    silos: int | None = None
    """With `silos`: number of silos."""
    records: int | None = None
    """Declared, public number of records, for protocols that sample records; counted only in published data sets."""
    subjects: int | None = None
    """Declared, public number of subjects, to compare delta with; counted only in published data sets."""
    spread: int | None = None
    """With `silos`: number of silos that hold a subject's records. Otherwise: declared maximum number of users that
    hold records of one subject."""
    concentration: float = 0.5
    """With `dirichlet`: the smaller, the more users differ."""
    evaluate: Literal["public", "private"] = "public"
    """`public`: the test records are public, and scores of every evaluation are exact. `private`: they are of people
    who are protected like those who are trained on, and the last model's scores alone are released, with noise."""
    folder: str | None = None
    """Folder with the task's files, if they are not in the cache."""

    @property
    def all_features(self) -> Features:
        """The features that records go through before the model, in training and in prediction alike.

        The model "scatter" is a linear one on scattering features, so it brings the kind where none is given. Refuses
        whitening on the task's own data, which would spend privacy that no statement counts.
        """
        kind = "scatter" if self.model == "scatter" and self.features == "none" else self.features
        if self.whiten is not None and self.whiten.task == self.name:
            raise ValueError(f"task.whiten needs public data, and on={self.whiten.on!r} are those of the task itself")
        return Features(kind=kind, symmetric=self.symmetric, patches=self.patches, whiten=self.whiten)


@_fields.with_fields_in_help
class CohortConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes part in which round; give `epochs` or `rounds`.

    `size` is one number, or a list with one per round; with `size_end` it changes linearly from round to round. Rounds
    below `min_size` release nothing; by default it is 0, or `size` for protocols that shuffle reports. `disjoint` deals
    users into batches anew in every epoch; with `separated` they take turns in one order, so that all uploads of a user
    are far apart. With `kind =
    "secret"` everyone uploads, and the data of `size` users, who toss coins of their own, enter on average; the minimum
    counts uploads.
    """

    kind: Literal["disjoint", "separated", "fixed", "poisson", "everyone", "secret"] = "disjoint"
    """`disjoint` batches of an epoch, users in turn (`separated`), secret `fixed` or `poisson`
    samples, `everyone`, or `secret`: everyone uploads, and users decide by coins of their own whether their data enter
    (`split_and_mix` and `secagg` only)."""
    size: int | list[int] | None = None
    """Number of users per round; a list gives one size per round. With `secret`: of how many users the data enter, on
    average."""
    size_end: int | None = None
    """Size of the last round; the sizes in between are interpolated linearly."""
    epochs: int | None = None
    """With `disjoint` and `separated`: how many times every user takes part, at most."""
    uploads: int | None = None
    """With `separated`: how often a user may take part at the most; a training that needs more is refused."""
    rounds: int | None = None
    """Number of rounds."""
    min_size: int | None = None
    """Minimum number of users per round; a round with fewer releases nothing. Shuffled protocols are accounted for with
    this number. With `secret` it counts uploads, and is everyone unless given."""
    colluders: int = 0
    """Number of users per round that the adversary may control."""
    dropout: float = 0.0
    """Probability that a selected user does not report (simulated)."""


@_fields.with_fields_in_help
class PrivacyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The privacy target: noise is calibrated to it unless given, and training never spends more.

    It is for one `unit` (by default the one that the protocol protects). With `stop = "delta"` the statement is at the
    target's eps and reports the delta that was spent; with "eps" it is at the target's delta.
    """

    eps: float | None = None
    """The target eps. Noise that is not given is calibrated to it, and a round that would exceed it does not start."""
    delta: float = 1e-5
    """The delta of the target and of the statement."""
    neighbors: Literal["replace-one", "add-remove"] = "replace-one"
    """`replace-one` or `add-remove`."""
    unit: Literal["item", "user", "subject"] | None = None
    """Whom the target protects: `item`, `user` or `subject`."""
    stop: Literal["eps", "delta"] = "eps"
    """`eps`: the statement is at the target's delta. `delta`: it is at the target's eps and reports the delta that was
    spent."""
    ceiling: float | tuple[float, float] | None = None
    """What all runs in the ledger of the same people may spend together, as eps or as [eps, delta]: a run beyond it is
    refused. Deployed, users have limits of their own (`dovetail client new`)."""


@_fields.with_fields_in_help
class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One training.

    `seed` determines everything public: how records are distributed, the initial model, the order of records. `noise`
    comes from the operating system ("os") or is derived from the seed too ("seeded"): for papers, tests and
    comparisons, without any privacy. `diagnostics` logs statistics of raw updates, which only a simulation can see.
    """

    seed: int = 0
    """Determines everything public: how records are distributed, the initial model, the order of records, disjoint
    batches."""
    noise: Literal["os", "seeded"] = "os"
    """`os`: noise and secret samples come from the operating system. `seeded`: they are derived from `seed`, for
    papers, tests and comparisons, and give no privacy."""
    diagnostics: bool = False
    """Whether to log statistics of raw updates. Only a simulation can, and no statement covers them."""
    task: TaskConfig
    cohort: CohortConfig = CohortConfig()
    client: ClientUpdate = ClientUpdate()
    server: ServerSettings = ServerSettings()
    protocol: dict[str, Any]
    privacy: PrivacyConfig = PrivacyConfig()
    performance: Performance = Performance()

    @property
    def protocol_settings(self) -> dict[str, Any]:
        """The protocol's own settings, without its name."""
        return {key: value for key, value in self.protocol.items() if key != "name"}


def presets() -> list[str]:
    """The names of the bundled configs."""
    folder = resources.files("dovetail") / "presets"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def preset_titles() -> dict[str, str]:
    """What each bundled config is, by name: the first line of its file."""
    folder = resources.files("dovetail") / "presets"
    return {
        name: (folder / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        for name in presets()
    }


def read(source: str | Path, overrides: Iterable[tuple[str, Any]] = (), *, code_beside: bool = True) -> Config:
    """The config in a file, or the preset of this name.

    Arguments:
        source: a TOML file or the name of a preset.
        overrides: keys by dotted path with their values, as `parse_override` reads them.
        code_beside: whether objects that a file names as "module:name" may lie beside it.
    """
    path = Path(source)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8-sig")  # editors of Windows put a mark before the first letter
        except UnicodeDecodeError as error:
            raise ValueError(f"{str(source)!r} is not text in UTF-8: save it with that encoding") from error
        if code_beside:
            _imports.add_search_folder(path.parent)
    elif str(source) in presets():
        text = (resources.files("dovetail") / "presets" / f"{source}.toml").read_text(encoding="utf-8")
    elif path.suffix == ".toml" or path.exists():
        raise FileNotFoundError(f"there is no config file {str(source)!r}")
    else:
        _validate.known_name("preset or config file", str(source), presets())
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{str(source)!r} is not valid TOML: {error}") from error
    return parse(data, overrides)


def parse(data: Mapping[str, Any], overrides: Iterable[tuple[str, Any]] = ()) -> Config:
    """The config in plain data; refuses unknown keys and wrong types in one sentence.

    Arguments:
        data: sections and their keys, as TOML has them.
        overrides: keys by dotted path with their values; a key of the protocol may stand alone.
    """
    tree: dict[str, Any] = copy.deepcopy(dict(data))
    _apply_overrides(tree, list(overrides))
    _check_keys(tree)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ValueError(_error_sentence(error, tree)) from error
    if "name" not in config.protocol:
        raise ValueError("the config names no protocol: set protocol.name")
    _ = config.task.all_features
    _validate.integer(seed=config.seed)
    _validate.in_interval(0, 2**31 - 1, seed=config.seed)
    _validate.in_open_interval(0, 1, delta=config.privacy.delta)
    if config.privacy.eps is not None:
        _validate.positive(eps=config.privacy.eps)
    elif config.privacy.stop == "delta":
        raise ValueError("privacy.stop = 'delta' needs privacy.eps, at which delta is stated")
    if config.privacy.ceiling is not None:
        _check_ceiling(config.privacy.ceiling)
    if config.task.evaluate == "private" and config.privacy.stop == "delta":
        raise ValueError("task.evaluate = 'private' is stated at a delta, and privacy.stop = 'delta' at an eps")
    return config


def _check_ceiling(ceiling: float | tuple[float, float]) -> None:
    """ValueError unless this is an eps, or an eps and a delta."""
    if isinstance(ceiling, tuple):
        ceiling, delta = ceiling
        _validate.in_open_interval(0, 1, ceiling_delta=delta)
    _validate.positive(ceiling=ceiling)


def to_toml(config: Config) -> str:
    """The config as TOML, with all defaults written out; keys that are None, which TOML cannot say, are left out."""
    return tomli_w.dumps(_drop_none(msgspec.to_builtins(config)))


def _check_keys(tree: Mapping[str, Any]) -> None:
    """Refuse sections and keys that no config has, with the nearest name that one has."""
    kinds = _fields.types_by_name(Config)
    for name, value in tree.items():
        _validate.known_name("config key", name, kinds, meanings=lambda: _fields.meanings(Config))
        if not _fields.is_settings(kinds[name]):
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"[{name}] is a section and has keys, got {name}={value!r}")
        _check_names(f"key of [{name}]", value, kinds[name])
        if name == "task" and isinstance(whiten := value.get("whiten"), Mapping):
            _check_names("key of task.whiten", whiten, Whitening)


def _check_names(what: str, keys: Iterable[str], kind: type) -> None:
    """Refuse keys that are no field of the section `kind`; `what` names such a key in the message."""
    for key in keys:
        _validate.known_name(what, key, _fields.types_by_name(kind), meanings=lambda: _fields.meanings(kind))


_TYPES = {
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def _error_sentence(error: msgspec.ValidationError, tree: Mapping[str, Any]) -> str:
    """A validation error as one sentence: what the key must be, what it is, and what it means.

    Arguments:
        error: msgspec's, whose text ends in " - at `$.path`".
        tree: the config as plain data, to look up the value.
    """
    text, _, where = str(error).partition(" - at `$")
    where = re.sub(r"\[.*", "", where.strip("`."))
    kind, value, meaning = _look_up_key(where, tree)
    names = [
        name
        for part in (kind, *typing.get_args(kind))
        if typing.get_origin(part) is Literal
        for name in typing.get_args(part)
    ]
    if names:
        return f"{where} must be one of {', '.join(map(str, names))}, got {value!r}{_validate.in_brackets(meaning)}"
    types = re.match(r"Expected `([a-z]+(?: \| [a-z]+)*)`", text)
    if where and types is not None:
        wanted = " or ".join(_TYPES.get(name, name) for name in types[1].split(" | ") if name != "null")
        return f"{where} must be {wanted}, got {value!r}{_validate.in_brackets(meaning)}"
    message = text[:1].lower() + text[1:]
    if where and _fields.is_settings(kind):
        return f"{message} in [{where}]"
    return f"{message} in {where}" if where else message


def _look_up_key(path: str, tree: Mapping[str, Any]) -> tuple[Any, Any, str]:
    """The type of the key at a dotted path, its value in the config, and its meaning ("" if it has none)."""
    kind: Any = Config
    value: Any = tree
    meaning = ""
    for name in path.split(".") if path else ():
        value = value.get(name) if isinstance(value, Mapping) else None
        if not _fields.is_settings(kind):
            return Any, value, ""
        meaning = _fields.meanings(kind).get(name, "")
        kind = typing.get_type_hints(kind).get(name, Any)
    return kind, value, meaning


def _drop_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    return value


def parse_override(text: str) -> tuple[str, Any]:
    """``key.path=value`` as a pair; the value is read as TOML, or else as a plain string.

    Numbers may leave out a zero, which TOML does not allow: .025 and 2. are numbers too, also in lists.
    """
    path, separator, value = text.partition("=")
    if not separator or not path.strip():
        raise ValueError(f"expected --set key.path=value, got {text!r}")
    for spelled in (value, _fill_in_zeros(value)):
        try:
            return path.strip(), tomllib.loads(f"value = {spelled}")["value"]
        except tomllib.TOMLDecodeError:
            continue
    return path.strip(), value


def _apply_overrides(tree: dict[str, Any], overrides: Sequence[tuple[str, Any]]) -> None:
    """Apply overrides, in their order, to a config in plain data; `tree` is changed."""
    for path, value in _with_full_paths(tree, overrides):
        _set_at_path(tree, path, value)


def _with_full_paths(tree: Mapping[str, Any], overrides: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Overrides by their full path: a bare key that is no key of a config may be one of its protocol."""
    section = dict(overrides).get("protocol", tree.get("protocol"))
    name = dict(overrides).get("protocol.name", section.get("name") if isinstance(section, Mapping) else None)
    bare = [key for key, _ in overrides if "." not in key and key not in Config.__struct_fields__]
    own = protocols.fields(name) if bare and isinstance(name, str) else ()
    return [(f"protocol.{key}" if key in bare and key in own else key, value) for key, value in overrides]


def _set_at_path(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the key at a dotted path in nested dicts, with a copy of the value; makes sections that are missing."""
    *parents, last = path.split(".")
    node = tree
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ValueError(f"{name!r} in {path!r} is a value and not a section: it has no keys")
    node[last] = copy.deepcopy(value)


def _fill_in_zeros(value: str) -> str:
    """The text with the zeros that TOML requires: .5 becomes 0.5, and 2. becomes 2.0."""
    return re.sub(r"(?<=\d)\.(?![\d.])", ".0", re.sub(r"(?<![\w.])\.(?=\d)", "0.", value))
