"""Statistics of users' own data, added up beside their updates: further coordinates of the same noisy sum.

A measure turns what a user knows (its loss, its labels, a number) into a vector of norm at most 1. The user scales it
to `weight` times the clip norm, and its update to what is left of the clip norm, so that the whole has the norm that is
accounted: what a measure reveals is in the same statement and the same ledger as the model. Some users are held out:
whether a user is follows from its key and the task, so that nobody chooses it. They send their measures beside an
update of zero; the others send an update beside measures of zero, but for those that are about updates.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from dovetail import _validate
from dovetail.mechanisms.gaussian import clip_l2

__all__ = [
    "Measure",
    "append_measures",
    "is_held_out",
    "measures_by_name",
    "read_measures",
    "total_size_of_measures",
    "update_norm",
]

_HASHES = 2.0**64
Kind = Literal["evaluation", "labels", "histogram", "within_clip"]


class Measure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One statistic.

    - `evaluation`: mean accuracy and mean loss of the held-out users, losses above `largest` counted as that;
    - `labels`: the average user's share of every one of `classes` labels;
    - `histogram`: of the user's number `fact` over the intervals between `edges`, and with it quantiles;
    - `within_clip`: the share of training users whose update was no longer than the update's part of the clip norm.

    `weight` is the measure's part of the clip norm: the larger, the less noise on it and the more on the model.
    """

    kind: Kind
    weight: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.1
    classes: int = 0
    largest: float = 5.0
    fact: str = ""
    edges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _validate.positive(largest=self.largest)
        if (self.classes >= 2) != (self.kind == "labels"):
            raise ValueError(
                f"expected classes >= 2 with 'labels' alone, got classes={self.classes} with {self.kind!r}"
            )
        if (len(self.edges) >= 2 and bool(self.fact)) != (self.kind == "histogram"):
            raise ValueError(
                f"a histogram needs the name of a fact and two edges or more, and no other kind has them; this is "
                f"{self.kind!r} with fact={self.fact!r} and {len(self.edges)} edges"
            )
        if list(self.edges) != sorted(set(self.edges)):
            raise ValueError(f"expected edges in increasing order, each once, got {self.edges}")

    @property
    def size(self) -> int:
        """Coordinates that it takes."""
        return {"evaluation": 3, "labels": self.classes, "histogram": len(self.edges) + 1, "within_clip": 2}[self.kind]

    def vector_of_facts(self, facts: Mapping[str, Any], *, held_out: bool, within: bool) -> np.ndarray:
        """What a user adds, of norm at most 1; zeros where it has nothing to say.

        Arguments:
            facts: what the user measured, by name: "loss", "accuracy", "labels" (counts), or the measure's `fact`.
            held_out: whether the user is held out of training.
            within: whether its update was no longer than the update's part of the clip norm.
        """
        if self.kind == "within_clip":
            return np.zeros(2) if held_out else np.array([1.0, float(within)]) / math.sqrt(2)
        if self.kind == "evaluation":
            if not held_out:
                return np.zeros(3)
            loss, accuracy = (float(_require_fact(facts, name)) for name in ("loss", "accuracy"))
            loss = min(max(loss, 0.0), self.largest) / self.largest if math.isfinite(loss) else 1.0
            return np.array([1.0, min(max(accuracy, 0.0), 1.0), loss]) / math.sqrt(3)
        if self.kind == "labels":
            counts = np.asarray(_require_fact(facts, "labels"), np.float64)
            if counts.shape != (self.classes,) or not (np.isfinite(counts).all() and (counts >= 0).all()):
                raise ValueError(f"expected how many records have each of {self.classes} labels, got {counts!r}")
            return counts / max(1.0, counts.sum())
        place = np.searchsorted(self.edges, float(_require_fact(facts, self.fact)), side="right")
        return np.eye(self.size)[place]

    def read_statistic(self, sums: np.ndarray, std: float) -> dict[str, Any]:
        """The statistic by name.

        Arguments:
            sums: noisy sums of users' vectors.
            std: standard deviation of the noise on each coordinate.
        """
        if self.kind in ("evaluation", "within_clip"):
            users = sums[0] * math.sqrt(self.size)
            shares = sums[1:] * math.sqrt(self.size) / max(users, 1.0)
            error = std * math.sqrt(self.size) / max(users, 1.0)
            names = ("accuracy", "loss") if self.kind == "evaluation" else ("share",)
            scales = (1.0, self.largest)
            means = {name: float(share * scale) for name, share, scale in zip(names, shares, scales, strict=False)}
            return {"users": float(users), **means, "std": float(error)}
        total = max(1.0, float(sums.sum()))
        statistic: dict[str, Any] = {"shares": (sums / total).tolist(), "std": std / total}
        if self.kind == "histogram":
            below = np.maximum.accumulate(np.cumsum(sums)[:-1] / total)
            statistic["quantiles"] = {str(q): self._edge_at_quantile(below, q) for q in (0.25, 0.5, 0.75, 0.9)}
        return statistic

    def _edge_at_quantile(self, below: np.ndarray, q: float) -> float:
        """The first edge below which there is the part q of users, or the last edge."""
        return float(self.edges[min(int(np.searchsorted(below, q)), len(self.edges) - 1)])


def measures_by_name(names: Sequence[str], *, classes: int) -> tuple[Measure, ...]:
    """Measures by the names of their kinds, for those that need no settings.

    Arguments:
        names: of "evaluation", "labels" and "within_clip".
        classes: number of classes of users' labels.
    """
    kinds: tuple[Kind, ...] = ("evaluation", "labels", "within_clip")
    for name in names:
        _validate.one_of(kinds, measure=name)
    return tuple(Measure(kind=kind, classes=classes if kind == "labels" else 0) for kind in kinds if kind in names)


def total_size_of_measures(measures: Sequence[Measure]) -> int:
    """Coordinates of all of them together."""
    return sum(measure.size for measure in measures)


def update_norm(measures: Sequence[Measure], clip_norm: float) -> float:
    """What is left of the clip norm for the update; refuses measures that leave nothing."""
    left = 1.0 - sum(measure.weight**2 for measure in measures)
    if left <= 0:
        raise ValueError(
            f"the squared weights of measures must add up to less than 1, and these add up to {1 - left:g}: give them "
            "smaller weights"
        )
    return clip_norm * math.sqrt(left)


def check_measures(
    measures: Sequence[Measure], *, held_out: float, dim: int, shared: bool, clip_norm: float | None
) -> None:
    """Refuse measures that a task of this dimension cannot have: only sums of vectors clipped in norm have room."""
    _validate.in_interval(0, 1, held_out=held_out)
    if held_out and not measures:
        raise ValueError(
            f"held_out={held_out} without any measure: name one that these users report (--measure), or give 0"
        )
    if not measures:
        return
    if not dim > (size := total_size_of_measures(measures)):
        raise ValueError(f"the measures take {size} coordinates, which leaves none for updates of dim={dim}")
    if not shared or clip_norm is None:
        raise ValueError(
            "measures are added up beside vectors clipped in norm: use protocol secagg, or give no measures"
        )
    update_norm(measures, clip_norm)


def is_held_out(task_id: bytes, key_id: bytes, share: float) -> bool:
    """Whether the user of a key is held out of a task that holds out this share of its users."""
    place = int.from_bytes(hashlib.sha256(b"dovetail held out\0" + task_id + key_id).digest()[:8], "big")
    return place < share * _HASHES


def append_measures(
    measures: Sequence[Measure], update: np.ndarray, facts: Mapping[str, Any], *, clip_norm: float, held_out: bool
) -> np.ndarray:
    """What a user reports: its update, or zeros if it is held out, followed by its measures.

    Arguments:
        measures: those of the task.
        update: the model's update; clipped to what is left of the clip norm.
        facts: what the user measured, by name.
        clip_norm: norm of the whole.
        held_out: whether the user is held out.
    """
    most = update_norm(measures, clip_norm)
    within = float(np.linalg.norm(np.asarray(update, np.float64))) <= most
    kept = np.zeros(len(update)) if held_out else clip_l2(np.asarray(update, np.float64), most)
    blocks = [
        clip_norm * measure.weight * clip_l2(measure.vector_of_facts(facts, held_out=held_out, within=within), 1.0)
        for measure in measures
    ]
    return np.concatenate([kept, *blocks]).astype(np.float32)


def read_measures(
    measures: Sequence[Measure], means: np.ndarray, *, size: int, clip_norm: float, std: float
) -> dict[str, Any]:
    """The statistics of all measures, by name.

    Arguments:
        measures: those of the task.
        means: the mean of what users added, over the planned `size` of users.
        size: the planned number of users of a round.
        clip_norm: norm of a user's whole report.
        std: standard deviation of the noise on each coordinate of `means`.
    """
    statistics: dict[str, Any] = {}
    for measure in measures:
        block, means = means[: measure.size].astype(np.float64), means[measure.size :]
        scale = size / (clip_norm * measure.weight)
        statistics[measure.fact or measure.kind] = measure.read_statistic(block * scale, std * scale)
    return statistics


def _require_fact(facts: Mapping[str, Any], name: str) -> Any:
    if name not in facts:
        raise ValueError(f"the task measures {name!r}, and this user's measure function gave only {sorted(facts)}")
    return facts[name]
