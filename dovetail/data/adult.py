"""Adult: whether a person earns more than 50,000 dollars a year, 32,561 and 16,281 people (Kohavi, Becker 1996).

One person is one record. Features are public by construction: words are one-hot in the vocabularies that the data's
documentation lists, numbers are divided by bounds that are given here, and nothing is estimated from the data. What is
not known ("?") has no word. The census weight is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dovetail.data._base import Dataset, Task
from dovetail.data.download import Origin, RemoteFile, fetch_all

__all__ = ["FILES", "NUM_FEATURES", "TASK", "load", "read"]

_ORIGIN = Origin(name="adult", pypi="aif360==0.3.0rc0", inside="aif360/data/raw/adult")
FILES = tuple(
    RemoteFile(origin=_ORIGIN, name=name, size=size, sha256=sha256)
    for name, size, sha256 in (
        ("adult.data", 3974305, "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
        ("adult.test", 2003153, "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
    )
)

_COUNTRIES = (
    "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, Outlying-US(Guam-USVI-etc), India, Japan, Greece, "
    "South, China, Cuba, Iran, Honduras, Philippines, Italy, Poland, Jamaica, Vietnam, Mexico, Portugal, Ireland, "
    "France, Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, Hungary, Guatemala, Nicaragua, Scotland, "
    "Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, Hong, Holand-Netherlands"
)
_WORDS = {  # by column, as in adult.names
    1: "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, Without-pay, Never-worked",
    3: "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, 7th-8th, 12th, Masters, "
    "1st-4th, 10th, Doctorate, 5th-6th, Preschool",
    5: "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, Married-spouse-absent, Married-AF-spouse",
    6: "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, Prof-specialty, Handlers-cleaners, "
    "Machine-op-inspct, Adm-clerical, Farming-fishing, Transport-moving, Priv-house-serv, Protective-serv, "
    "Armed-Forces",
    7: "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried",
    8: "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black",
    9: "Female, Male",
    13: _COUNTRIES,
}


def _linear_scale(bound: float) -> Callable[[float], float]:
    """The map from [0, bound] to [0, 1] in proportion; what is outside is clipped."""
    return lambda value: min(max(value / bound, 0.0), 1.0)


def _log_scale(bound: float) -> Callable[[float], float]:
    """The map x -> log(1 + x) / log(1 + bound) from [0, bound] to [0, 1]; what is outside is clipped."""
    return lambda value: min(math.log1p(max(value, 0.0)) / math.log1p(bound), 1.0)


_NUMBERS = {  # by column
    0: _linear_scale(100),
    4: _linear_scale(16),
    10: _log_scale(1e5),
    11: _log_scale(1e4),
    12: _linear_scale(100),
}
_PLACES = {  # by column and word, which feature it is: the numbers come first
    (column, word): place
    for place, (column, word) in enumerate(
        ((column, word) for column, words in _WORDS.items() for word in words.split(", ")), start=len(_NUMBERS)
    )
}
NUM_FEATURES = len(_NUMBERS) + len(_PLACES)
_FIELDS = 15
_CLASSES = {"<=50K": 0, ">50K": 1}


def load(*, folder: Path | None) -> Dataset:
    """Adult, in the order of its files."""
    train, test = (read(path) for path in fetch_all(FILES, folder=folder))
    return Dataset(inputs=train[0], labels=train[1], test_inputs=test[0], test_labels=test[1], num_classes=2)


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features, float32 in [0, 1] of shape (people, NUM_FEATURES), and labels, 1 for more than 50,000 dollars."""
    lines = [line.strip().rstrip(".") for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [line.split(", ") for line in lines if line and not line.startswith("|")]
    inputs = np.zeros((len(rows), NUM_FEATURES), np.float32)
    labels = np.empty(len(rows), np.int32)
    for number, row in enumerate(rows):
        if len(row) != _FIELDS or row[-1] not in _CLASSES:
            raise ValueError(f"expected {_FIELDS} fields and a class at the end, got {', '.join(row)!r} in {path}")
        labels[number] = _CLASSES[row[-1]]
        inputs[number, : len(_NUMBERS)] = [scale(float(row[column])) for column, scale in _NUMBERS.items()]
        for column in _WORDS:
            if row[column] == "?":
                continue
            if (column, row[column]) not in _PLACES:
                raise ValueError(f"expected a word of the documentation, got {row[column]!r} in {path}")
            inputs[number, _PLACES[column, row[column]]] = 1.0
    return inputs, labels


TASK = Task(name="adult", load=load, published=True)
