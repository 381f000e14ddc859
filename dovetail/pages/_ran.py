"""What ran, and on what: the facts that a reviewer asks for before reading the proof."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.pages import _words
from dovetail.pages._numbers import at_most, number
from dovetail.statements import Neighbors, Statement

__all__ = ["delta_in_words", "noise_in_words", "rows", "setting_in_words"]

_SETTINGS = {
    "simulation": "A simulation: one machine held the data of all users and drew all noise. No user, shuffler or "
    "aggregator took part as a party of its own, and whoever ran it has seen everything.",
    "deployment": "A deployment: users, intermediaries and the analyzer were separate parties.",
}
_RELATIONS = {
    Neighbors.REPLACE_ONE: "replace-one: the data of one {unit} is replaced by any other; the number of {unit}s stays",
    Neighbors.ADD_REMOVE: "add-remove: one {unit} is added or removed",
}
_SOURCES = {"os": "key of 256 bits from the operating system", "seeded": "seed in config.toml: no privacy"}
_NOISE = (
    ("noise_multiplier", "noise multiplier {value} (noise / clip norm)"),
    ("eps_local", "eps_local {value} (of one report)"),
    ("std", "standard deviation {value}"),
)


def rows(statement: Statement, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts, by name; what an older run did not record is said to be unknown."""
    origin = summary.get("origin") or {}
    unit = statement.unit.value
    return [
        ("Setting", setting_in_words(origin.get("setting"))),
        ("Users", _count(origin.get("users"))),
        ("Records", _count(origin.get("records"))),
        ("Privacy unit", _words.whom(statement).partition(";")[0]),
        ("Neighbours", _RELATIONS[statement.neighbors].format(unit=unit)),
        ("Delta", delta_in_words(statement)),
        ("Noise", noise_in_words(summary)),
        *_ended_early(summary),
        *_code(origin),
        *_data(origin.get("data") or {}),
    ]


def _ended_early(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    charged = summary.get("charged_rounds")
    if charged is None:
        return []
    return [
        ("Rounds", f"{summary['rounds']:,} were run: scores of models ended the training. All {charged:,} are charged.")
    ]


def setting_in_words(setting: str | None) -> str:
    """Whether all data were on one machine."""
    return _SETTINGS.get(setting or "", "Not recorded by the version of Dovetail that ran it.")


def delta_in_words(statement: Statement) -> str:
    """Delta beside one over the number of units."""
    if statement.unbounded:
        return "none: there is no guarantee"
    said, delta, count = at_most(statement.delta), statement.delta, statement.population
    if delta == 0:
        return "0: the guarantee has no exceptions"
    if count is None:
        return f"{said}; the number of {statement.unit.value}s is not known, so it cannot be compared with 1/n"
    share = delta * count
    if share >= 1:
        verdict = "not below 1/n: publishing the data of one of them, chosen at random, would satisfy it"
    elif share > 0.1:
        verdict = f"{number(1 / share, 2)} times smaller than 1/n, which is little"
    else:
        verdict = f"{number(1 / share, 2)} times smaller than 1/n"
    return f"{said}, where 1/n is {number(1 / count, 3)} for n = {count:,} {statement.unit.value}s: {verdict}"


def noise_in_words(summary: Mapping[str, Any]) -> str:
    """How much noise, and where it came from."""
    protocol = summary["protocol"]
    told = [text.format(value=number(protocol[name])) for name, text in _NOISE if _is_number(protocol.get(name))]
    budgets = [one for one in protocol.get("budgets") or () if _is_number(one)]
    if budgets:
        told.append(f"local budgets of users from {number(min(budgets))} to {number(max(budgets))}")
    source = _SOURCES.get(summary.get("noise", ""), "an unknown source")
    return f"{', '.join(told)}; drawn from a {source}" if told else "none is set by the protocol"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: int | None) -> str:
    return "not recorded" if value is None else f"{value:,}"


def _code(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    library = origin.get("library")
    if not library:
        return [("Code", "not recorded")]
    commit = library["commit"] or "not known: the package is not in a checkout"
    others = [(f"Own code: {module}", f"BLAKE2b-128 {digest}") for module, digest in origin["own_code"].items()]
    return [
        ("Dovetail", f"version {library['version']}"),
        ("Commit", commit),
        ("Code", f"SHA-256 of the package's files {library['code']}"),
        *others,
    ]


def _data(data: Mapping[str, str]) -> list[tuple[str, str]]:
    if "hmac_sha256" not in data:
        return [("Data", f"no fingerprint: {data.get('missing', 'not recorded')}")]
    return [
        (
            "Data",
            f"HMAC-SHA-256 {data['hmac_sha256']} under key {data['key_id']}, which the owner of the data keeps in "
            f"{data['key_file']}. Without the key it says nothing about the data; with it, dovetail verify "
            "--data-key FILE confirms that data are the same.",
        )
    ]
