"""What a reviewer goes through before signing: who sees what, what ran, and what has to be true.

`parties` are those of each model of trust in the order in which data flow, as in docs/threat-model.md; `facts` are what
a reviewer asks for before reading the proof; `checklist` is a list to tick off, with who has to make sure of each item.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from dovetail.pages import words
from dovetail.statements import TUNING_ASSUMPTION, Neighbors, Statement, Trust, Unit

__all__ = [
    "Item",
    "Party",
    "checklist",
    "delta_in_words",
    "exposure_in_words",
    "noise_in_words",
    "owner_of",
    "party_boxes",
    "run_facts",
    "tuning_in_words",
]

_USERS = "their own records and updates, and every released model"
_FEW = "to follow the protocol; the checklist says how many may be fake or collude"
_TO_USERS = {
    Trust.CURATOR: "with nothing: the curator clips what they send",
    Trust.LOCAL: "with their own noise, which protects each of them alone",
    Trust.SHUFFLE: _FEW,
    Trust.SHARES: _FEW,
    Trust.NONE: "with nothing",
}
_MODELS = "every released model, the statement, and how many users each round had"
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
_RULES = (  # who has to make sure of an assumption that contains one of the phrases; the first that fits
    ("enrolment operator", ("whoever enrols users", "public roster", "place in the list of budgets")),
    ("aggregator operators", ("aggregators is honest", "by the aggregators", "aggregators draw", "aggregator")),
    (
        "shuffler operators",
        ("shuffler", "every share of every coordinate is permuted", "a round counts only users whose shares"),
    ),
    (
        "client vendor",
        ("users draw", "every user repeats", "uploads either all", "a user counts", "drop out", "AES-128", "a client"),
    ),
    ("curator", ("the curator", "the server adds", "each record joins", "records of a subject are used")),
    ("operator of the training", ("whoever runs the simulation", "floating-point", "noise key", "the seed")),
)
_ANALYST = "analyst"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Party:
    """One box of the picture: what it sees, what it must be trusted with, and what holds against it."""

    name: str
    sees: str
    trusted: str
    holds: str


def party_boxes(
    statement: Statement, protocol: Mapping[str, Any], *, local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    """Users first, the public last; between them whoever the model of trust has.

    Arguments:
        protocol: its settings, as privacy.json has them.
        local: what remains of the guarantee if nobody is trusted.
        shuffler: what the shuffler learns from the reports.
    """
    certified = words.eps_and_delta(statement)
    users = Party(
        name="Users", sees=_USERS, trusted=_TO_USERS[statement.trust], holds=f"about other users: {certified}"
    )
    public = Party(name="Public", sees=_MODELS, trusted="with nothing", holds=certified)
    between = {
        Trust.CURATOR: _parties_with_curator,
        Trust.LOCAL: _parties_with_server,
        Trust.SHUFFLE: _parties_with_shuffler,
        Trust.SHARES: _parties_with_aggregators,
        Trust.NONE: _parties_without_guarantee,
    }[statement.trust]
    return [users, *between(statement, protocol, local, shuffler), public]


# The parties between users and public, by model of trust. All five functions take what `parties` takes.


def _parties_with_curator(
    statement: Statement, protocol: Mapping[str, Any], local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    return [
        Party(
            name="Curator",
            sees="every user's update in the clear, and whose it is",
            trusted="to clip, to add the noise, to keep the updates to itself and to release the models alone",
            holds="no guarantee",
        )
    ]


def _parties_with_server(
    statement: Statement, protocol: Mapping[str, Any], local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    return [
        Party(
            name="Server",
            sees="every user's report, with the noise that the user has added, and whose it is",
            trusted="with nothing",
            holds=words.eps_and_delta(statement),
        )
    ]


def _parties_with_shuffler(
    statement: Statement, protocol: Mapping[str, Any], local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    count = protocol.get("shufflers")  # None where there is one
    follows = "one that follows the protocol" if count else "if it follows the protocol"
    kept = "" if shuffler is None else f"{follows}: {words.eps_and_delta(shuffler)}"
    broken = "all of them together" if count else "if it does not, or colludes with the analyzer"
    dishonest = "" if local is None else f"{broken}: {words.eps_and_delta(local)}"
    shufflers = Party(
        name=f"{count} shufflers" if count else "Shuffler",
        sees="who uploads and when; sealed messages" + (", of every value some of the shares" if count else ""),
        trusted="to permute, to enforce the minimum number of users, not to collude beyond what the checklist allows",
        holds="; ".join(filter(None, (kept, dishonest))) or "not stated",
    )
    analyzer = Party(
        name="Analyzer",
        sees="all messages in random order, without names; how many users a round had",
        trusted="not to collude with a shuffler beyond what the checklist allows",
        holds=words.eps_and_delta(statement),
    )
    return [shufflers, analyzer]


def _parties_with_aggregators(
    statement: Statement, protocol: Mapping[str, Any], local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    together = "" if local is None else f"; all of them with the analyzer: {words.eps_and_delta(local)}"
    aggregators = Party(
        name=f"{protocol['aggregators']} aggregators" if protocol.get("aggregators") else "Aggregators",
        sees="who uploads and when; of every value one share each, which alone looks random",
        trusted="one of them, whichever it is: not to collude, to add up every user once, and to forget the shares",
        holds=f"all but one of them with the analyzer: {words.eps_and_delta(statement)}{together}",
    )
    analyzer = Party(
        name="Analyzer",
        sees="the sum over all users, noise included; how many users a round had",
        trusted="with nothing, as long as one aggregator is honest",
        holds=words.eps_and_delta(statement),
    )
    return [aggregators, analyzer]


def _parties_without_guarantee(
    statement: Statement, protocol: Mapping[str, Any], local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    return [Party(name="Server", sees="every user's update", trusted="with everything", holds="no guarantee")]


def exposure_in_words(statement: Statement, setting: str | None) -> list[str]:
    """What was at risk before any noise was added, in two sentences: in this run, and where it is deployed.

    Arguments:
        setting: "simulation", "deployment" or None, as `privacy.json` has it under "origin".
    """
    if setting == "simulation":
        first = (
            "This was a simulation: the raw data of all users were collected on one machine. Whoever could read that "
            "machine, its backups or its memory could read them, and no noise protects them there."
        )
    else:
        first = "Raw records stay with the users, who compute their updates themselves."
    deployed = {
        Trust.CURATOR: "Deployed, the curator would collect every user's update in the clear, but no raw records.",
        Trust.LOCAL: "Deployed, only reports that users have randomized would leave their devices.",
        Trust.SHUFFLE: "Deployed, only sealed reports would leave the users' devices.",
        Trust.SHARES: "Deployed, only shares would leave the users' devices, each of them random by itself.",
        Trust.NONE: "Deployed, a server would collect every user's update in the clear.",
    }[statement.trust]
    return [first, deployed]


def run_facts(statement: Statement, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What ran and on what, as pairs of name and text; what a run did not record is said to be unknown.

    Arguments:
        summary: the content of `privacy.json`.
    """
    origin = summary.get("origin") or {}
    unit = statement.unit.value
    return [
        ("Setting", setting_in_words(origin.get("setting"))),
        ("Users", _count_in_words(origin.get("users"))),
        ("Records", _count_in_words(origin.get("records"))),
        ("Privacy unit", words.who_is_protected(statement).partition(";")[0]),
        ("Neighbours", _RELATIONS[statement.neighbors].format(unit=unit)),
        ("Delta", delta_in_words(statement)),
        ("Noise", noise_in_words(summary)),
        *_early_end_facts(summary),
        *_code_facts(origin),
        *_data_facts(origin.get("data") or {}),
    ]


def _early_end_facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A fact about rounds that are charged and were not run; nothing where all were."""
    charged = summary.get("charged_rounds")
    if charged is None:
        return []
    return [
        ("Rounds", f"{summary['rounds']:,} were run: scores of models ended the training. All {charged:,} are charged.")
    ]


def setting_in_words(setting: str | None) -> str:
    """What a setting means: "simulation" (all data were on one machine), "deployment", or None if not recorded."""
    return _SETTINGS.get(setting or "", "Not recorded by the version of Dovetail that ran it.")


def delta_in_words(statement: Statement) -> str:
    """Delta, rounded up, and how it compares with 1/n, where n is the number of units."""
    if statement.is_unbounded:
        return "none: there is no guarantee"
    delta, count = statement.delta, statement.population
    text = words.at_most(delta)
    if delta == 0:
        return "0: the guarantee has no exceptions"
    if count is None:
        return f"{text}; the number of {statement.unit.value}s is not known, so it cannot be compared with 1/n"
    ratio = delta * count  # of delta to 1/n
    if ratio >= 1:
        verdict = "not below 1/n: publishing the data of one of them, chosen at random, would satisfy it"
    elif ratio > 0.1:
        verdict = f"{words.number(1 / ratio, 2)} times smaller than 1/n, which is little"
    else:
        verdict = f"{words.number(1 / ratio, 2)} times smaller than 1/n"
    return f"{text}, where 1/n is {words.number(1 / count, 3)} for n = {count:,} {statement.unit.value}s: {verdict}"


def noise_in_words(summary: Mapping[str, Any]) -> str:
    """How much noise there is, by the protocol's settings in `privacy.json`, and which randomness it was drawn from."""
    protocol = summary["protocol"]
    parts = [text.format(value=words.number(protocol[name])) for name, text in _NOISE if _is_number(protocol.get(name))]
    budgets = [budget for budget in protocol.get("budgets") or () if _is_number(budget)]
    if budgets:
        parts.append(f"local budgets of users from {words.number(min(budgets))} to {words.number(max(budgets))}")
    source = _SOURCES.get(summary.get("noise", ""), "an unknown source")
    return f"{', '.join(parts)}; drawn from a {source}" if parts else "none is set by the protocol"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count_in_words(value: int | None) -> str:
    return "not recorded" if value is None else f"{value:,}"


def _code_facts(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts about the code that ran: version, commit, and hashes of the package and of code from outside it."""
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


def _data_facts(data: Mapping[str, str]) -> list[tuple[str, str]]:
    """The fact about the data's fingerprint, or why there is none (see `experiment.fingerprint.origin_of`)."""
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


class Item(NamedTuple):
    """One box to tick: what must hold, and who makes sure of it."""

    text: str
    owner: str


def owner_of(assumption: str) -> str:
    """Who has to make sure of an assumption; the analyst, where it is about data and choices."""
    return next((owner for owner, phrases in _RULES if any(phrase in assumption for phrase in phrases)), _ANALYST)


def checklist(statement: Statement, origin: Mapping[str, Any]) -> list[Item]:
    """Every assumption of the statement, and what else must hold for the page to be released.

    Arguments:
        origin: where the run comes from, as `privacy.json` has it; empty for runs that did not record it.
    """
    boxes = [Item(text, owner_of(text)) for text in statement.assumptions]
    if origin:
        hidden = ["records"] if statement.unit is not Unit.ITEM or statement.neighbors is Neighbors.ADD_REMOVE else []
        hidden += ["users"] if statement.neighbors is Neighbors.ADD_REMOVE else []
        if hidden:
            counts = f"the number{'s' * (len(hidden) > 1)} of {' and '.join(hidden)} on this page"
            boxes.append(
                Item(
                    f"{counts} may be public: the guarantee does not hide {'them' * (len(hidden) > 1) or 'it'}",
                    _ANALYST,
                )
            )
        if "hmac_sha256" in (origin.get("data") or {}):
            boxes.append(Item("the key of the data's fingerprint is kept, and not handed out", "owner of the data"))
    boxes.append(Item("other releases from the same data are added to the privacy budget", "owner of the data"))
    return boxes


def tuning_in_words(statement: Statement, summary: Mapping[str, Any]) -> str:
    """How the settings were chosen, and whether eps covers that, in a sentence or two."""
    search = summary.get("tuning")
    if search is None:
        if TUNING_ASSUMPTION in statement.assumptions:
            return (
                "Nothing was spent on tuning: settings are assumed to be chosen without the private data. If they were "
                "chosen by looking at them, that cost is not in eps."
            )
        return "Nothing is assumed of how settings were chosen."
    trials = search.get("trials")
    count = (
        f"{len(trials)} trials" if trials else f"{search['mean_trials']:g} trials on average, the number kept secret"
    )
    return (
        f"Settings were chosen by {search['by']} among {count}, by {search['score']} on {search['public']}, which are "
        "taken to be public. The eps of this page covers all trials, not the chosen one alone."
    )
