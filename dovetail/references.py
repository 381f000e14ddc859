"""What to cite: BibTeX of the theorems that a statement rests on and of the protocol that ran.

The entries are in `references.bib`; here is who cites which. A `Theorem.key` begins with the key of its source
("BW18.thm8"), may be made of several ("FMT23.thm3.2+CKS20.prop12") and may be wrapped ("group-privacy(BW18.thm8)").
Proofs of our own ("dovetail.ss-topk") cite Dovetail, where they are in docs/proofs, and what they build on. "none"
stands where nothing is proved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from importlib import resources

from dovetail import _validate
from dovetail.statements import Statement

__all__ = ["ENTRIES", "Entry", "bibtex", "entries_of_theorem", "find_entry", "parse_bibtex", "works_cited_by"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One work: who, what, where, when, and the BibTeX that says so."""

    key: str  # as in references.bib: "BW18"
    kind: str  # BibTeX's: "article"
    authors: tuple[str, ...]
    title: str
    year: int
    venue: str = ""  # journal or proceedings
    arxiv: str | None = None  # the number of the preprint
    source: str = dataclasses.field(repr=False)  # the entry as it stands in the file

    def bibtex(self) -> str:
        """The entry as BibTeX, to be put into a bibliography as it is."""
        return self.source

    def __str__(self) -> str:
        venue = self.venue or (f"arXiv:{self.arxiv}" if self.arxiv else "")
        return f"{', '.join(self.authors)}. {self.title}. " + (f"{venue}, {self.year}." if venue else f"{self.year}.")


_ENTRY = re.compile(r"@(?P<kind>[a-z]+)\{(?P<key>\w+),\n(?P<fields>  .+(?:,\n  .+)*)\n\}")
_FIELD = re.compile(r"  (?P<name>\w+) = \{(?P<value>.+)\}")
_NEEDED = {"author", "title", "year"}
_KNOWN = _NEEDED | {"journal", "booktitle", "eprint", "archivePrefix"}


def parse_bibtex(text: str) -> dict[str, Entry]:
    """Entries by their keys, from as much of BibTeX as `references.bib` uses; anything else is refused.

    Entries and comments (which begin with %) are parted by empty lines. A field is a line, its value in braces; a
    title has a second pair of braces, which keep its capitals.
    """
    entries: dict[str, Entry] = {}
    for source in text.strip().split("\n\n"):
        if source.startswith("%"):
            continue
        item = _parse_entry(source)
        if item.key in entries:
            raise ValueError(f"expected one BibTeX entry for each key, got two of {item.key!r}")
        entries[item.key] = item
    return entries


def _parse_entry(source: str) -> Entry:
    """One entry; ValueError for a field that is not a line of its own, is missing, or is not known."""
    fields: dict[str, str] = {}
    entry = _ENTRY.fullmatch(source)
    for line in entry["fields"].split(",\n") if entry else ():
        field = _FIELD.fullmatch(line)
        if field is None or field["name"] in fields or not _has_balanced_braces(field["value"]):
            raise ValueError(f"expected a BibTeX field of its own in braces, got {line!r}")
        fields[field["name"]] = field["value"]
    if entry is None or not _NEEDED <= fields.keys() <= _KNOWN:
        raise ValueError(f"expected a BibTeX entry with {sorted(_NEEDED)} and no field unknown, got {source!r}")
    return Entry(
        key=entry["key"],
        kind=entry["kind"],
        authors=tuple(fields["author"].split(" and ")),
        title=fields["title"].removeprefix("{").removesuffix("}"),
        year=int(fields["year"]),
        venue=fields.get("journal") or fields.get("booktitle", ""),
        arxiv=fields.get("eprint"),
        source=source,
    )


def _has_balanced_braces(value: str) -> bool:
    """Whether every brace that opens is closed, and none is closed before it opens; not for empty text."""
    depths = list(itertools.accumulate({"{": 1, "}": -1}.get(letter, 0) for letter in value))
    return min(depths) >= 0 and depths[-1] == 0


ENTRIES = parse_bibtex((resources.files("dovetail") / "references.bib").read_text(encoding="utf-8"))

_OTHER_NAMES = {"Geyer": "GKN17", "LiuCaoChenGuoYoshikawa21": "FLAME", "LiuZhaoXiongLiuChen23": "APES"}

# by the first part of a theorem's key, what it cites where that is not the entry of the same name alone
_SOURCES: dict[str, tuple[str, ...]] = {
    "none": (),
    "none shown": (),
    "BW18": ("BW18", "DRS22"),
    "CKS20": ("CKS20", "Mironov17"),
    "MTZ19": ("MTZ19", "Mironov17", "CKS20"),
    "WBK19": ("WBK19", "Mironov17", "CKS20"),
    "PS22": ("PS22", "LT19"),
    "PrivUnit": ("BDFKR18", "AFT22"),
    "group-privacy": ("Vadhan17",),
    "lemma2": ("APES",),  # the end of "APES.thm3+lemma2"
    "BBGN19.exact": ("BBGN19", "SCW25"),
    "FLAME.lemma4": ("FLAME", "BBG18"),
    "dovetail": ("Dovetail",),
    "dovetail.ss-topk": ("Dovetail", "FLAME"),
    "dovetail.ss-double": ("Dovetail", "FLAME"),
    "dovetail.split-and-mix": ("Dovetail", "AKL21", "BBGN20"),
    "dovetail.secagg": ("Dovetail", "AKL21"),
    "dovetail.poisson-replacement": ("Dovetail", "DGKMPS22"),
    "dovetail.fixed-size": ("Dovetail", "ZDW22", "BBG18"),
    "dovetail.blanket-composition": ("Dovetail", "BBGN19", "FMT23"),
    "dovetail.across-runs": ("Dovetail", "RRUV16", "ST22", "DRS22"),
    "dovetail.binary": ("Dovetail", "FMT23"),
    "dovetail.blankets": ("Dovetail", "BBGN19", "FMT23"),
    "dovetail.personalized-clones": ("Dovetail", "FMT23"),
    "dovetail.skellam-gaussian": ("Dovetail", "AKL21"),
    "dovetail.ss-double.exact": ("Dovetail", "FLAME"),
    "dovetail.ss-topk.exact": ("Dovetail", "FLAME"),
}


def find_entry(key: str) -> Entry:
    """The entry of this key, or of the other name of a paper; ValueError, with the nearest key, for unknown ones."""
    key = _OTHER_NAMES.get(key, key)
    _validate.known_name("reference", key, ENTRIES)
    return ENTRIES[key]


def entries_of_theorem(theorem_key: str) -> tuple[Entry, ...]:
    """What a theorem of this key cites, in the order of its parts."""
    parts = [part for part in re.split(r"[+()]", theorem_key) if part]
    keys = [key for part in parts for key in _keys_cited_by(part)]
    return tuple(find_entry(key) for key in dict.fromkeys(keys))


def _keys_cited_by(part: str) -> tuple[str, ...]:
    """Keys of the entries that one part of a theorem's key cites: by its whole name, or by what is before its dot."""
    prefix = part.split(".")[0]
    return _SOURCES.get(part) or _SOURCES.get(prefix, (prefix,))


def works_cited_by(statements: Iterable[Statement | None], papers: Iterable[str] = ()) -> list[Entry]:
    """Everything that a run rests on, each once: its protocol's papers, the theorems of its proof trees, Dovetail.

    A theorem that somebody else's code made, with a key that is not known here, is left out.

    Arguments:
        statements: of the run; None is left out.
        papers: keys of entries, those of the protocol.
    """
    entries = [find_entry(key) for key in papers]
    for statement in statements:
        for theorem_key in _theorem_keys(statement) if statement is not None else ():
            with contextlib.suppress(ValueError):
                entries += entries_of_theorem(theorem_key)
    return list(dict.fromkeys([*entries, ENTRIES["Dovetail"]]))


def _theorem_keys(statement: Statement) -> Iterator[str]:
    """The keys of all theorems of a statement and its premises."""
    for theorem in statement.proof.theorems:
        yield theorem.key
    for premise in statement.premises:
        yield from _theorem_keys(premise)


def bibtex(entries: Iterable[Entry]) -> str:
    """The text of a .bib file with these entries."""
    return "\n\n".join(item.bibtex() for item in entries)
