"""Every theorem and every protocol has something to cite."""

import ast
from pathlib import Path

import pytest

import dovetail
from dovetail import references
from dovetail.protocols import PROTOCOLS
from dovetail.statements import Bound, Neighbors, Scope, Theorem, Trust, Unit, Verdict, no_guarantee

SOURCE = Path(dovetail.__file__).parent
SCOPE = Scope(trust=Trust.SHUFFLE, adversary="analyzer", neighbors=Neighbors.REPLACE_ONE, unit=Unit.USER)


def theorem_keys() -> list[tuple[str, str]]:
    """(where, key) of every Theorem(key=...) in the source; of a computed key what is known of its beginning."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "Theorem(" in text else ():
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Theorem"):
                continue
            for keyword in node.keywords:
                where = f"{file.relative_to(SOURCE)}:{node.lineno}"
                value = keyword.value
                if keyword.arg != "key":
                    continue
                if isinstance(value, ast.Constant):
                    found.append((where, value.value))
                elif isinstance(value, ast.JoinedStr) and isinstance(value.values[0], ast.Constant):
                    found.append((where, value.values[0].value))
                elif isinstance(value, ast.BinOp) and isinstance(value.right, ast.Constant):
                    found.append((where, value.right.value))
    return found


KEYS = theorem_keys()


def test_the_source_was_read():
    assert len(KEYS) > 30
    assert {"BW18.thm8", "FLAME.", "+lemma2"} <= {key for _, key in KEYS}


@pytest.mark.parametrize(("where", "key"), KEYS, ids=[where for where, _ in KEYS])
def test_every_theorem_has_an_entry(where, key):
    cited = references.entries_of_theorem(key)
    assert cited or key.startswith("none"), f"{where}: {key}"


@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
def test_every_protocol_has_a_paper(protocol):
    papers = PROTOCOLS[protocol].references
    assert [item.key for item in references.works_cited_by([], papers)] == [*papers, "Dovetail"]


def test_every_reproduced_paper_has_an_entry():
    found = [
        keyword.value.value
        for file in (SOURCE / "papers").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "reference" and isinstance(keyword.value, ast.Constant)
    ]
    assert found
    for reference in found:
        assert references.find_entry(reference).bibtex()


def test_keys_of_several_parts_cite_all_of_them():
    keys = [item.key for item in references.entries_of_theorem("group-privacy(FMT23.thm3.2+CKS20.prop12)")]
    assert keys == ["Vadhan17", "FMT23", "CKS20", "Mironov17"]
    assert [item.key for item in references.entries_of_theorem("BBGN19.exact")] == ["BBGN19", "SCW25"]
    assert references.entries_of_theorem("none") == ()


def test_a_run_cites_its_proof_tree_once_and_its_protocol_first():
    premise = SCOPE.state(
        Bound(eps=2.0, delta=0.0, proof=Theorem(key="DR14.thm3.16", where="x").proof), Verdict.CERTIFIED
    )
    bound = Bound(eps=1.0, delta=1e-6, proof=Theorem(key="FMT23.thm3.2+CKS20.prop12", where="x").proof)
    statement = SCOPE.state(bound, Verdict.CERTIFIED, premises=(premise, premise))
    found = [
        item.key
        for item in references.works_cited_by([statement, None, no_guarantee(SCOPE, reason="nothing")], ["FLAME"])
    ]
    assert found == ["FLAME", "FMT23", "CKS20", "Mironov17", "DR14", "Dovetail"]


def test_bibtex_has_balanced_braces_and_one_key_each():
    text = references.bibtex(references.ENTRIES.values())
    assert text.count("{") == text.count("}")
    assert text.count("\n@") + 1 == len(references.ENTRIES)
    assert "@inproceedings{BW18,\n  author = {Borja Balle and Yu-Xiang Wang}" in text
    for item in references.ENTRIES.values():
        assert 1965 <= item.year <= 2026
        assert item.authors
        assert str(item).startswith(item.authors[0])


ONE = (
    "@misc{A1,\n  author = {B. Cee and D. Eff},\n  title = {{A {Title}}},\n  year = {2020},\n  eprint = {2001.00001}\n}"
)


def test_an_entry_is_read_field_by_field_and_given_back_as_it_was():
    found = references.parse_bibtex(f"% a comment\n\n{ONE}\n")["A1"]
    assert (found.kind, found.authors, found.title) == ("misc", ("B. Cee", "D. Eff"), "A {Title}")
    assert (found.year, found.venue, found.arxiv) == (2020, "", "2001.00001")
    assert found.bibtex() == ONE
    text = (SOURCE / "references.bib").read_text()
    assert all(item.bibtex() in text for item in references.ENTRIES.values())
    assert text.count("\n@") == len(references.ENTRIES)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("@misc", "misc"),
        ("{A1,", "{A 1,"),
        ("{A1,", "{A1"),
        ("2020},", "2020}"),
        ("2020}", "MMXX}"),
        ("2020}", "{2020}"),
        ("  year = {2020},\n", ""),
        ("  year = {2020},\n", "  year = {2020},\n  year = {2021},\n"),
        ("eprint", "eprnt"),
        ("{B. Cee and D. Eff}", '"B. Cee and D. Eff"'),
        ("Cee and", "Cee} and {"),
        ("00001}\n}", "00001}\n"),
        ("00001}\n}", "00001},\n}"),
        ("00001}\n}", "00001}\n}\nmore"),
        (ONE, f"{ONE}\n\n{ONE}"),
    ],
)
def test_a_broken_bibliography_is_refused(before, after):
    assert before in ONE
    with pytest.raises(ValueError, match=r"expected|invalid literal"):
        references.parse_bibtex(ONE.replace(before, after))


@pytest.mark.parametrize("item", references.ENTRIES.values(), ids=list(references.ENTRIES))
def test_the_kind_of_an_entry_says_where_it_was_published(item):
    where = {"article": "journal", "inproceedings": "booktitle", "incollection": "booktitle"}.get(item.kind)
    assert bool(item.venue) == (where is not None)
    assert where is None or f"\n  {where} = {{{item.venue}}}" in item.bibtex()
    assert item.kind in ("article", "inproceedings", "incollection", "misc", "software")
    assert ("archivePrefix = {arXiv}" in item.bibtex()) == (item.arxiv is not None)


def test_unknown_references_get_a_hint():
    with pytest.raises(ValueError, match="did you mean 'BW18'"):
        references.find_entry("BW19")
    with pytest.raises(ValueError, match="unknown reference"):
        references.entries_of_theorem("XYZ99.thm1")
