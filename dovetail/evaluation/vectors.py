"""What a held-out person adds to a noisy sum, for every kind of answer, and what scores the sums give.

A person's numbers are means over its own records, so that everybody counts the same. They are put in [-1, 1], or are
shares of a histogram, and weighted so that the whole vector has norm at most 1. A `ScoreVectors` may ask for several
rounds: in the first one people say where scores or errors lie, which decides the bins, or the range, of the others,
whose sums are averaged. Nothing but noisy sums of earlier rounds goes into a later one.

Where it is secret how many people are there (add-remove), a coordinate counts them; otherwise the number is public.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dovetail.evaluation import intervals
from dovetail.evaluation.intervals import Estimate, Moment

__all__ = [
    "BinaryVectors",
    "ClassVectors",
    "LabelVectors",
    "NoisyScores",
    "NumberVectors",
    "People",
    "Records",
    "ScoreVectors",
]

Records = Mapping[str, np.ndarray]  # what is known of every held-out record, by name

_BINS = 10  # of scores, of two classes
_FINE = 64  # of scores in the first round
_LATER_ROUNDS = 4  # that are averaged, after the first
_COUNT = 0.3  # weight of the number of people, where it is secret


@dataclasses.dataclass(frozen=True, eq=False)
class People:
    """Whose the held-out records are: `owner` (records,) is a place below `places`, of which some may hold nothing."""

    owner: np.ndarray
    places: int

    def means(self, values: np.ndarray) -> np.ndarray:
        """Each person's mean over its records, (places, ...); zeros where there are none."""
        values = np.asarray(values, np.float64)
        sums = np.zeros((self.places, *values.shape[1:]))
        np.add.at(sums, self.owner, values)
        counts = np.maximum(np.bincount(self.owner, minlength=self.places), 1)
        return sums / counts.reshape(-1, *([1] * (values.ndim - 1)))

    def histogram(self, cells: np.ndarray, size: int) -> np.ndarray:
        """Each person's share of records in every cell, (places, size): it adds up to 1, or to 0 for nobody."""
        table = np.zeros((self.places, size))
        np.add.at(table, (self.owner, cells), 1.0)
        return table / np.maximum(table.sum(axis=1, keepdims=True), 1)

    @property
    def present_mask(self) -> np.ndarray:
        """1 for each place with a record, 0 for the others, (places,)."""
        return (np.bincount(self.owner, minlength=self.places) > 0).astype(np.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisyScores:
    """Scores by name with their intervals, and those of the best constant guess; a list where there is one per label.

    `people` is how many were held out: the public number, or a noisy one.
    """

    metrics: Mapping[str, Any]
    intervals: Mapping[str, Any]
    baseline: Mapping[str, Any]
    people: float

    @classmethod
    def from_estimates(
        cls, estimates: Mapping[str, Estimate | Sequence[Estimate]], *, people: float, **baseline: Any
    ) -> NoisyScores:
        """The scores of these estimates."""

        def each(pick: Any) -> dict[str, Any]:
            return {
                name: pick(found) if isinstance(found, Estimate) else [pick(one) for one in found]
                for name, found in estimates.items()
            }

        return cls(
            metrics=each(lambda found: found.value),
            intervals=each(lambda found: [_none_if_infinite(found.low), _none_if_infinite(found.high)]),
            baseline=baseline,
            people=people,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreVectors(abc.ABC):
    """What every person adds in each of `rounds` rounds, a vector of `dim` numbers, and what the sums tell.

    Arguments:
        people: how many people, or places, there are; public.
        counted: whether it is secret how many of the places have records, so that a coordinate counts them.

    Guarantees:
        A person's vector has norm at most 1, is zero without records, and depends on no other person's records.
        Vectors depend on the sums of earlier rounds and on nothing else that is secret.
    """

    rounds: ClassVar[int] = 1

    people: int
    counted: bool = False

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Coordinates of a person's vector, the same in every round."""

    @abc.abstractmethod
    def encode_records(self, records: Records, people: People, sums: Sequence[np.ndarray]) -> np.ndarray:
        """Everybody's vectors, (places, dim).

        Arguments:
            sums: the noisy sums of the rounds before.
        """

    @abc.abstractmethod
    def scores_from_sums(self, sums: Sequence[np.ndarray], std: float) -> NoisyScores:
        """The scores that the noisy sums of all rounds give; `std` is that of the noise on each of their numbers."""

    def _join_blocks(self, people: People, blocks: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
        """Blocks (places, width) of norm at most 1 each with their weights, side by side, padded to `dim`."""
        present = people.present_mask[:, None]
        parts = [weight * block * present for weight, block in blocks]
        if self.counted:
            parts = [_COUNT * present, *(math.sqrt(1 - _COUNT**2) * part for part in parts)]
        joined = np.concatenate(parts, axis=1)
        return np.pad(joined, ((0, 0), (0, self.dim - joined.shape[1])))

    def _split_into_blocks(self, total: np.ndarray, std: float, blocks: Sequence[tuple[float, int]]) -> _Sums:
        """The blocks of a noisy sum in units of a person, each with the standard deviation of its noise."""
        count = Moment(float(self.people), 0.0)
        rest, factor = total, 1.0
        if self.counted:
            count = Moment(max(1.0, float(total[0]) / _COUNT), std / _COUNT)
            rest, factor = total[1:], math.sqrt(1 - _COUNT**2)
        parts = []
        for weight, width in blocks:
            parts.append((rest[:width] / (weight * factor), std / (weight * factor)))
            rest = rest[width:]
        return _Sums(count=count, parts=tuple(parts))

    @property
    def _num_counting_coordinates(self) -> int:
        """Coordinates that count people."""
        return int(self.counted)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Noisy sums of blocks over people, and the number of people."""

    count: Moment
    parts: tuple[tuple[np.ndarray, float], ...]

    def noisy_mean(self, block: int, place: int, *, half_range: float = 1.0, centre: float = 0.0) -> Moment:
        """The mean over people of a number that entered as (number - centre) / half_range."""
        total, std = self.parts[block]
        value = float(total[place]) / self.count.value
        error = math.hypot(std, value * self.count.std) / self.count.value
        return Moment(centre + half_range * value, half_range * error)


def _average_sums(sums: Sequence[np.ndarray], std: float) -> tuple[np.ndarray, float]:
    """The mean of noisy sums of the same vectors, and the standard deviation of its noise."""
    return np.mean(sums, axis=0), std / math.sqrt(len(sums))


def _none_if_infinite(end: float) -> float | None:
    return end if math.isfinite(end) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassVectors(ScoreVectors):
    """Accuracy of any number of classes. `records`: "correct" (0 or 1), "label".

    With `alone`, of accuracy alone: one number, as where every person adds all the noise itself.
    """

    classes: int
    alone: bool = False

    _weights: ClassVar[tuple[float, float]] = (0.8, 0.6)

    @property
    def dim(self) -> int:
        """The accuracy, and how frequent every class is."""
        return self._num_counting_coordinates + 1 + (0 if self.alone else self.classes)

    def encode_records(self, records: Records, people: People, sums: Sequence[np.ndarray]) -> np.ndarray:
        """2 accuracy - 1, and the person's shares of classes."""
        right = people.means(2 * records["correct"] - 1)[:, None]
        if self.alone:
            return self._join_blocks(people, [(1.0, right)])
        shares = people.histogram(records["label"], self.classes)
        return self._join_blocks(people, [(self._weights[0], right), (self._weights[1], shares)])

    def scores_from_sums(self, sums: Sequence[np.ndarray], std: float) -> NoisyScores:
        """The accuracy, and that of always answering the commonest class."""
        if self.alone:
            found = self._split_into_blocks(*_average_sums(sums, std), [(1.0, 1)])
            guess = {"rule": "uniform guess", "accuracy": 1 / self.classes}
        else:
            found = self._split_into_blocks(
                *_average_sums(sums, std), [(self._weights[0], 1), (self._weights[1], self.classes)]
            )
            guess = _majority_baseline(found.parts[1][0])
        accuracy = intervals.estimate_fraction(found.noisy_mean(0, 0, half_range=0.5, centre=0.5), found.count.value)
        return NoisyScores.from_estimates({"accuracy": accuracy}, people=found.count.value, **guess)


def _majority_baseline(masses: np.ndarray) -> dict[str, Any]:
    """The accuracy of always answering the commonest class, from noisy masses of all classes."""
    masses = np.maximum(masses, 0)
    share = float(masses.max() / masses.sum()) if masses.sum() > 0 else 1 / len(masses)
    return {"rule": "majority-class baseline", "accuracy": share}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinaryVectors(ScoreVectors):
    """Accuracy and AUC of two classes. `records`: "correct" (0 or 1), "label" (0 or 1), "score" (higher for class 1).

    The first round tells where scores lie; bins with about equally many people follow from it.
    """

    rounds: ClassVar[int] = 1 + _LATER_ROUNDS
    _weights: ClassVar[tuple[float, float]] = (0.45, math.sqrt(1 - 0.45**2))
    # finest around 0, where the scores of a model that has learned little are; +-20 is as sure as a model gets
    _fine_edges: ClassVar[np.ndarray] = 0.1 * np.sinh(np.linspace(-6, 6, _FINE - 1))

    @property
    def dim(self) -> int:
        """The finer histogram of the first round, which is the longest vector."""
        return self._num_counting_coordinates + max(_FINE, 1 + 2 * _BINS)

    def encode_records(self, records: Records, people: People, sums: Sequence[np.ndarray]) -> np.ndarray:
        """First the histogram of scores; then 2 accuracy - 1, and the histogram of scores for each class."""
        if not sums:
            fine = np.searchsorted(self._fine_edges, records["score"])
            return self._join_blocks(people, [(1.0, people.histogram(fine, _FINE))])
        bins = np.searchsorted(self.bin_edges(sums[0]), records["score"]) + _BINS * records["label"]
        right = people.means(2 * records["correct"] - 1)[:, None]
        return self._join_blocks(
            people, [(self._weights[0], right), (self._weights[1], people.histogram(bins, 2 * _BINS))]
        )

    def bin_edges(self, first: np.ndarray) -> np.ndarray:
        """The edges of bins with about equally many people, from the noisy sum of the first round."""
        ((masses, _),) = self._split_into_blocks(first, 0.0, [(1.0, _FINE)]).parts
        inside = np.concatenate([[2 * self._fine_edges[0]], self._fine_edges, [2 * self._fine_edges[-1]]])
        below = np.concatenate([[0.0], np.maximum.accumulate(np.cumsum(masses))])
        below = np.maximum(below, 0) + 1e-9 * np.arange(len(below))
        return np.interp(np.arange(1, _BINS) / _BINS * below[-1], below, inside)

    def scores_from_sums(self, sums: Sequence[np.ndarray], std: float) -> NoisyScores:
        """Accuracy and AUC, and the accuracy of always answering the commoner class."""
        found = self._split_into_blocks(
            *_average_sums(sums[1:], std), [(self._weights[0], 1), (self._weights[1], 2 * _BINS)]
        )
        masses, noise = found.parts[1]
        negative, positive = masses[:_BINS], masses[_BINS:]
        accuracy = intervals.estimate_fraction(found.noisy_mean(0, 0, half_range=0.5, centre=0.5), found.count.value)
        area = intervals.estimate_auc(positive, negative, noise)
        guess = _majority_baseline(np.array([negative.sum(), positive.sum()]))
        return NoisyScores.from_estimates({"accuracy": accuracy, "auc": area}, people=found.count.value, **guess)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelVectors(ScoreVectors):
    """Accuracy of every one of several labels, and their mean. `records`: "correct" and "label", (records, labels).

    With `alone`, the mean alone.
    """

    labels: int
    alone: bool = False

    _weights: ClassVar[tuple[float, float]] = (0.8, 0.6)

    @property
    def dim(self) -> int:
        """The accuracy of each label, and how frequent it is."""
        return self._num_counting_coordinates + (1 if self.alone else 2 * self.labels)

    def encode_records(self, records: Records, people: People, sums: Sequence[np.ndarray]) -> np.ndarray:
        """2 accuracy - 1 and 2 share - 1 of every label, over the root of how many there are."""
        right = people.means(2 * records["correct"] - 1)
        if self.alone:
            return self._join_blocks(people, [(1.0, right.mean(axis=1, keepdims=True))])
        shares = people.means(2 * records["label"] - 1)
        root = math.sqrt(self.labels)
        return self._join_blocks(people, [(self._weights[0], right / root), (self._weights[1], shares / root)])

    def scores_from_sums(self, sums: Sequence[np.ndarray], std: float) -> NoisyScores:
        """The mean accuracy and that of each label, and that of always answering each label's commoner value."""
        if self.alone:
            found = self._split_into_blocks(*_average_sums(sums, std), [(1.0, 1)])
            mean = intervals.estimate_fraction(found.noisy_mean(0, 0, half_range=0.5, centre=0.5), found.count.value)
            return NoisyScores.from_estimates(
                {"accuracy": mean}, people=found.count.value, rule="uniform guess", accuracy=0.5
            )
        blocks = [(weight / math.sqrt(self.labels), self.labels) for weight in self._weights]
        found = self._split_into_blocks(*_average_sums(sums, std), blocks)
        each = [found.noisy_mean(0, place, half_range=0.5, centre=0.5) for place in range(self.labels)]
        whole = Moment(float(np.mean([one.value for one in each])), each[0].std / math.sqrt(self.labels))
        frequent = [found.noisy_mean(1, place, half_range=0.5, centre=0.5).value for place in range(self.labels)]
        guess = float(np.mean([min(1.0, max(share, 1 - share)) for share in frequent]))
        estimates: dict[str, Estimate | Sequence[Estimate]] = {
            "accuracy": intervals.estimate_fraction(whole, found.count.value),
            "label_accuracy": [intervals.estimate_fraction(one, found.count.value) for one in each],
        }
        return NoisyScores.from_estimates(
            estimates, people=found.count.value, rule="majority-value baseline", accuracy=guess
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumberVectors(ScoreVectors):
    """R2 and root mean square error of numbers in [-1, 1]. `records`: "label", "predicted", both in [-1, 1].

    The first round tells how large errors are and where labels lie. The later ones count errors and distances up to
    two and a half times what a tenth of the records exceeds, and larger ones as that.
    """

    rounds: ClassVar[int] = 1 + _LATER_ROUNDS
    _weights: ClassVar[tuple[float, ...]] = (0.55, 0.25, 0.55, 0.4, 0.4)  # their squares add up to .9875
    _beyond: ClassVar[float] = 0.1
    _allowance: ClassVar[float] = 2.5
    _error_edges: ClassVar[np.ndarray] = 2.0 * 2.0 ** (-np.arange(27, 0, -1) / 3)
    _label_edges: ClassVar[np.ndarray] = np.linspace(-1, 1, 33)[1:-1]

    @property
    def dim(self) -> int:
        """The two histograms of the first round, which are the longest vector."""
        return self._num_counting_coordinates + len(self._error_edges) + len(self._label_edges) + 2

    def encode_records(self, records: Records, people: People, sums: Sequence[np.ndarray]) -> np.ndarray:
        """First histograms of errors and labels; then powers of both within the ranges that these give."""
        label = np.asarray(records["label"], np.float64)
        error = np.abs(np.asarray(records["predicted"], np.float64) - label)
        if not sums:
            half = math.sqrt(0.5)
            errors = people.histogram(np.searchsorted(self._error_edges, error), len(self._error_edges) + 1)
            labels = people.histogram(np.searchsorted(self._label_edges, label), len(self._label_edges) + 1)
            return self._join_blocks(people, [(half, errors), (half, labels)])
        largest, centre, reach = self.label_and_error_ranges(sums[0])
        error = np.minimum(error / largest, 1)
        distance = np.clip((label - centre) / reach, -1, 1)
        numbers = (2 * error**2 - 1, distance, 2 * distance**2 - 1, 2 * error**4 - 1, 2 * distance**4 - 1)
        blocks = [people.means(number)[:, None] for number in numbers]
        return self._join_blocks(people, list(zip(self._weights, blocks, strict=True)))

    def label_and_error_ranges(self, first: np.ndarray) -> tuple[float, float, float]:
        """The largest error that counts, the middle of the labels, and the largest distance from it that counts."""
        half = math.sqrt(0.5)
        blocks = [(half, len(self._error_edges) + 1), (half, len(self._label_edges) + 1)]
        (errors, _), (labels, _) = self._split_into_blocks(first, 0.0, blocks).parts
        total = max(float(errors.sum()), 1.0)
        above = np.cumsum(errors[::-1])[::-1][1:]  # mass above each edge
        rare = np.flatnonzero(above > self._beyond * total)
        edge = 0 if len(rare) == 0 else rare[-1] + 1
        largest = 2.0 if edge >= len(self._error_edges) else float(self._error_edges[edge])
        below = np.maximum(np.maximum.accumulate(np.cumsum(labels)), 0) + 1e-9 * np.arange(len(labels))
        ends = np.concatenate([self._label_edges, [1.0]])
        low, centre, high = np.interp(np.array([self._beyond / 2, 0.5, 1 - self._beyond / 2]) * below[-1], below, ends)
        reach = max(float(high - centre), float(centre - low), 1 / 16)
        return min(2.0, self._allowance * largest), float(centre), min(2.0, self._allowance * reach)

    def scores_from_sums(self, sums: Sequence[np.ndarray], std: float) -> NoisyScores:
        """R2 and root mean square error, and those of always answering the mean."""
        largest, _, reach = self.label_and_error_ranges(sums[0])
        found = self._split_into_blocks(*_average_sums(sums[1:], std), [(weight, 1) for weight in self._weights])
        error = found.noisy_mean(0, 0, half_range=largest**2 / 2, centre=largest**2 / 2)
        mean = found.noisy_mean(1, 0, half_range=reach)
        second = found.noisy_mean(2, 0, half_range=reach**2 / 2, centre=reach**2 / 2)
        fourth = found.noisy_mean(3, 0, half_range=largest**4 / 2, centre=largest**4 / 2)
        spread_fourth = found.noisy_mean(4, 0, half_range=reach**4 / 2, centre=reach**4 / 2)
        spread = Moment(second.value - mean.value**2 + mean.std**2, math.hypot(second.std, 2 * mean.value * mean.std))
        people = found.count.value
        rmse = intervals.estimate_root_mean_square(error, fourth, people)
        estimates = {"r2": intervals.estimate_r2(error, fourth, spread, spread_fourth, people), "rmse": rmse}
        guess = {"rule": "mean baseline", "r2": 0.0, "rmse": math.sqrt(max(spread.value, 0.0))}
        return NoisyScores.from_estimates(estimates, people=people, **guess)
