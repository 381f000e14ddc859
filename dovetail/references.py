"""What to cite: BibTeX of the theorems that a statement rests on and of the protocol that ran.

A `Theorem.key` begins with the key of its source ("BW18.thm8"), may be made of several ("FMT23.thm3.2+CKS20.prop12")
and may be wrapped ("group-privacy(BW18.thm8)"). Proofs of our own ("dovetail.ss-topk") cite Dovetail, where they are in
docs/proofs, and what they build on. "none" stands where nothing is proved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator

from dovetail import _validate
from dovetail.statements import Statement

__all__ = ["ENTRIES", "Entry", "bibtex", "entry", "of", "sources"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One work: who, what, where, when."""

    key: str
    authors: tuple[str, ...]
    title: str
    year: int
    venue: str = ""
    arxiv: str | None = None
    url: str | None = None

    @property
    def kind(self) -> str:
        """The kind of BibTeX entry."""
        if self.key == "Dovetail":
            return "software"
        if self.venue.startswith(("Proceedings on", "Foundations and", "Journal")):
            return "article"
        if self.venue.startswith("Tutorials"):
            return "incollection"
        return "inproceedings" if self.venue else "misc"

    def bibtex(self) -> str:
        """The entry for a bibliography."""
        where = {"article": "journal"}.get(self.kind, "booktitle")
        fields = {
            "author": " and ".join(self.authors),
            "title": f"{{{self.title}}}",
            where: self.venue,
            "year": str(self.year),
            "eprint": self.arxiv or "",
            "archivePrefix": "arXiv" if self.arxiv else "",
            "url": self.url or "",
        }
        lines = [f"  {name} = {{{value}}}" for name, value in fields.items() if value]
        return f"@{self.kind}{{{self.key},\n" + ",\n".join(lines) + "\n}"

    def __str__(self) -> str:
        venue = self.venue or (f"arXiv:{self.arxiv}" if self.arxiv else "")
        return f"{', '.join(self.authors)}. {self.title}. " + (f"{venue}, {self.year}." if venue else f"{self.year}.")


def _e(key: str, authors: str, title: str, venue: str, year: int, arxiv: str | None = None) -> Entry:
    return Entry(key=key, authors=tuple(authors.split("; ")), title=title, venue=venue, year=year, arxiv=arxiv)


_BBGN = "Borja Balle; James Bell; Adrià Gascón; Kobbi Nissim"
_FMT = "Vitaly Feldman; Audra McMillan; Kunal Talwar"

_ALL = (
    Entry(
        key="Dovetail",
        authors=("{The Dovetail authors}",),
        title="Dovetail: federated learning that proves a bound on what can leak",
        year=2026,
    ),
    # the papers whose protocols are here
    _e(
        "FLAME",
        "Ruixuan Liu; Yang Cao; Hong Chen; Ruoyang Guo; Masatoshi Yoshikawa",
        "FLAME: Differentially Private Federated Learning in the Shuffle Model",
        "AAAI Conference on Artificial Intelligence",
        2021,
        "2009.08063",
    ),
    _e(
        "APES",
        "Yixuan Liu; Suyun Zhao; Li Xiong; Yuhan Liu; Hong Chen",
        "Echo of Neighbors: Privacy Amplification for Personalized Private Federated Learning with Shuffle Model",
        "AAAI Conference on Artificial Intelligence",
        2023,
        "2304.05516",
    ),
    _e(
        "Survey",
        "Moushira Abdallah Mohamed Ahmed; Shuhui Wu; Laure Deveriane Dushime; Yuanhong Tao",
        "Recent Progress of Differentially Private Federated Learning with the Shuffle Model",
        "",
        2021,
    ),
    _e(
        "GKN17",
        "Robin C. Geyer; Tassilo Klein; Moin Nabi",
        "Differentially Private Federated Learning: A Client Level Perspective",
        "",
        2017,
        "1712.07557",
    ),
    _e(
        "SubDP",
        "Virendra J. Marathe; Pallika Kanani",
        "Subject Granular Differential Privacy in Federated Learning",
        "",
        2022,
        "2206.03617",
    ),
    _e(
        "MMRHA17",
        "H. Brendan McMahan; Eider Moore; Daniel Ramage; Seth Hampson; Blaise Agüera y Arcas",
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        "International Conference on Artificial Intelligence and Statistics (AISTATS)",
        2017,
        "1602.05629",
    ),
    _e(
        "MRTZ18",
        "H. Brendan McMahan; Daniel Ramage; Kunal Talwar; Li Zhang",
        "Learning Differentially Private Recurrent Language Models",
        "International Conference on Learning Representations (ICLR)",
        2018,
        "1710.06963",
    ),
    _e(
        "BBGN20",
        _BBGN,
        "Private Summation in the Multi-Message Shuffle Model",
        "ACM Conference on Computer and Communications Security (CCS)",
        2020,
        "2002.00817",
    ),
    _e(
        "AKL21",
        "Naman Agarwal; Peter Kairouz; Ziyu Liu",
        "The Skellam Mechanism for Differentially Private Federated Learning",
        "Advances in Neural Information Processing Systems (NeurIPS)",
        2021,
        "2110.04995",
    ),
    _e(
        "BDFKR18",
        "Abhishek Bhowmick; John Duchi; Julien Freudiger; Gaurav Kapoor; Ryan Rogers",
        "Protection Against Reconstruction and Its Applications in Private Federated Learning",
        "",
        2018,
        "1812.00984",
    ),
    _e(
        "AFT22",
        "Hilal Asi; Vitaly Feldman; Kunal Talwar",
        "Optimal Algorithms for Mean Estimation under Local Differential Privacy",
        "International Conference on Machine Learning (ICML)",
        2022,
        "2205.02466",
    ),
    _e(
        "CSUZZ19",
        "Albert Cheu; Adam Smith; Jonathan Ullman; David Zeber; Maxim Zhilyaev",
        "Distributed Differential Privacy via Shuffling",
        "Advances in Cryptology (EUROCRYPT)",
        2019,
        "1808.01394",
    ),
    _e(
        "W65",
        "Stanley L. Warner",
        "Randomized Response: A Survey Technique for Eliminating Evasive Answer Bias",
        "Journal of the American Statistical Association",
        1965,
    ),
    # amplification
    _e(
        "EFMRTT19",
        "Úlfar Erlingsson; Vitaly Feldman; Ilya Mironov; Ananth Raghunathan; Kunal Talwar; Abhradeep Thakurta",
        "Amplification by Shuffling: From Local to Central Differential Privacy via Anonymity",
        "ACM-SIAM Symposium on Discrete Algorithms (SODA)",
        2019,
        "1811.12469",
    ),
    _e(
        "BBGN19",
        _BBGN,
        "The Privacy Blanket of the Shuffle Model",
        "Advances in Cryptology (CRYPTO)",
        2019,
        "1903.02837",
    ),
    _e(
        "FMT22",
        _FMT,
        "Hiding Among the Clones: A Simple and Nearly Optimal Analysis of Privacy Amplification by Shuffling",
        "IEEE Symposium on Foundations of Computer Science (FOCS)",
        2021,
        "2012.12803",
    ),
    _e(
        "FMT23",
        _FMT,
        "Stronger Privacy Amplification by Shuffling for Rényi and Approximate Differential Privacy",
        "ACM-SIAM Symposium on Discrete Algorithms (SODA)",
        2023,
        "2208.04591",
    ),
    _e(
        "GDDSK21",
        "Antonious M. Girgis; Deepesh Data; Suhas Diggavi; Ananda Theertha Suresh; Peter Kairouz",
        "On the Rényi Differential Privacy of the Shuffle Model",
        "ACM Conference on Computer and Communications Security (CCS)",
        2021,
        "2105.05180",
    ),
    _e(
        "SCW25",
        "Pengcheng Su; Haibo Cheng; Ping Wang",
        "Decomposition-Based Optimal Bounds for Privacy Amplification via Shuffling",
        "",
        2025,
        "2504.07414",
    ),
    _e(
        "BBG18",
        "Borja Balle; Gilles Barthe; Marco Gaboardi",
        "Privacy Amplification by Subsampling: Tight Analyses via Couplings and Divergences",
        "Advances in Neural Information Processing Systems (NeurIPS)",
        2018,
        "1807.01647",
    ),
    _e(
        "CGST23",
        "Christopher A. Choquette-Choo; Arun Ganesh; Thomas Steinke; Abhradeep Thakurta",
        "Privacy Amplification for Matrix Mechanisms",
        "International Conference on Learning Representations (ICLR)",
        2024,
        "2310.15526",
    ),
    # noise, composition, conversion
    _e(
        "BW18",
        "Borja Balle; Yu-Xiang Wang",
        "Improving the Gaussian Mechanism for Differential Privacy: Analytical Calibration and Optimal Denoising",
        "International Conference on Machine Learning (ICML)",
        2018,
        "1805.06530",
    ),
    _e(
        "DRS22",
        "Jinshuo Dong; Aaron Roth; Weijie J. Su",
        "Gaussian Differential Privacy",
        "Journal of the Royal Statistical Society, Series B",
        2022,
        "1905.02383",
    ),
    _e(
        "DR14",
        "Cynthia Dwork; Aaron Roth",
        "The Algorithmic Foundations of Differential Privacy",
        "Foundations and Trends in Theoretical Computer Science",
        2014,
    ),
    _e(
        "DRV10",
        "Cynthia Dwork; Guy N. Rothblum; Salil Vadhan",
        "Boosting and Differential Privacy",
        "IEEE Symposium on Foundations of Computer Science (FOCS)",
        2010,
    ),
    _e(
        "KOV15",
        "Peter Kairouz; Sewoong Oh; Pramod Viswanath",
        "The Composition Theorem for Differential Privacy",
        "International Conference on Machine Learning (ICML)",
        2015,
        "1311.0776",
    ),
    _e(
        "Mironov17",
        "Ilya Mironov",
        "Rényi Differential Privacy",
        "IEEE Computer Security Foundations Symposium (CSF)",
        2017,
        "1702.07476",
    ),
    _e(
        "CKS20",
        "Clément L. Canonne; Gautam Kamath; Thomas Steinke",
        "The Discrete Gaussian for Differential Privacy",
        "Advances in Neural Information Processing Systems (NeurIPS)",
        2020,
        "2004.00010",
    ),
    _e(
        "MTZ19",
        "Ilya Mironov; Kunal Talwar; Li Zhang",
        "Rényi Differential Privacy of the Sampled Gaussian Mechanism",
        "",
        2019,
        "1908.10530",
    ),
    _e(
        "WBK19",
        "Yu-Xiang Wang; Borja Balle; Shiva Prasad Kasiviswanathan",
        "Subsampled Rényi Differential Privacy and Analytical Moments Accountant",
        "International Conference on Artificial Intelligence and Statistics (AISTATS)",
        2019,
        "1808.00087",
    ),
    _e(
        "DGKMPS22",
        "Vadym Doroshenko; Badih Ghazi; Pritish Kamath; Ravi Kumar; Pasin Manurangsi",
        "Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions",
        "Proceedings on Privacy Enhancing Technologies",
        2022,
        "2207.04380",
    ),
    _e(
        "Vadhan17",
        "Salil Vadhan",
        "The Complexity of Differential Privacy",
        "Tutorials on the Foundations of Cryptography",
        2017,
    ),
    _e(
        "SNJ23",
        "Thomas Steinke; Milad Nasr; Matthew Jagielski",
        "Privacy Auditing with One (1) Training Run",
        "Advances in Neural Information Processing Systems (NeurIPS)",
        2023,
        "2305.08846",
    ),
)
ENTRIES = {item.key: item for item in _ALL}

_OTHER_NAMES = {"Geyer": "GKN17", "LiuCaoChenGuoYoshikawa21": "FLAME", "LiuZhaoXiongLiuChen23": "APES"}

# by the first part of a theorem's key, what it cites where that is not the entry of the same name alone
_SOURCES: dict[str, tuple[str, ...]] = {
    "none": (),
    "none shown": (),
    "BW18": ("BW18", "DRS22"),
    "CKS20": ("CKS20", "Mironov17"),
    "MTZ19": ("MTZ19", "Mironov17", "CKS20"),
    "WBK19": ("WBK19", "Mironov17", "CKS20"),
    "PrivUnit": ("BDFKR18", "AFT22"),
    "group-privacy": ("Vadhan17",),
    "lemma2": ("APES",),  # the end of "APES.thm3+lemma2"
    "BBGN19.exact": ("BBGN19", "SCW25"),
    "FLAME.lemma4": ("FLAME", "BBG18"),
    "dovetail": ("Dovetail",),
    "dovetail.ss-topk": ("Dovetail", "FLAME"),
    "dovetail.ss-double": ("Dovetail", "FLAME"),
    "dovetail.split-and-mix": ("Dovetail", "AKL21", "BBGN20"),
    "dovetail.poisson-replacement": ("Dovetail", "DGKMPS22"),
    "dovetail.blanket-composition": ("Dovetail", "BBGN19", "FMT23"),
    "dovetail.personalized-clones": ("Dovetail", "FMT23"),
    "dovetail.personalized-clones-renyi": ("Dovetail", "FMT23", "CKS20"),
}


def entry(key: str) -> Entry:
    """The entry of this key; unknown keys get the nearest known one as a hint."""
    key = _OTHER_NAMES.get(key, key)
    _validate.known("reference", key, ENTRIES)
    return ENTRIES[key]


def sources(theorem_key: str) -> tuple[Entry, ...]:
    """What a theorem of this key cites, in the order of its parts."""
    parts = [part for part in re.split(r"[+()]", theorem_key) if part]
    found = [key for part in parts for key in _cited(part)]
    return tuple(entry(key) for key in dict.fromkeys(found))


def _cited(part: str) -> tuple[str, ...]:
    prefix = part.split(".")[0]
    return _SOURCES.get(part) or _SOURCES.get(prefix, (prefix,))


def of(statements: Iterable[Statement | None], papers: Iterable[str] = ()) -> list[Entry]:
    """Everything that a run rests on, each once: its protocol's papers, the theorems of its proof trees, Dovetail.

    A theorem that somebody else's code made, with a key that is not known here, is left out.
    """
    found = [entry(key) for key in papers]
    for statement in statements:
        for theorem_key in _theorems(statement) if statement is not None else ():
            with contextlib.suppress(ValueError):
                found += sources(theorem_key)
    return list(dict.fromkeys([*found, ENTRIES["Dovetail"]]))


def _theorems(statement: Statement) -> Iterator[str]:
    yield statement.theorem.key
    for premise in statement.premises:
        yield from _theorems(premise)


def bibtex(entries: Iterable[Entry]) -> str:
    """The entries as a file."""
    return "\n\n".join(item.bibtex() for item in entries)
