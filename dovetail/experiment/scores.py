"""Scores on held-out people who are protected like those who are trained on: what a plan releases besides its models.

Whose the test records are is in `Dataset.held_out_people`, with what decided that. The statement of a run with such
scores covers both sides (`guarantee.record.compose_in_parallel`, docs/proofs/private-evaluation.md), so whatever could
put one person on both of them, or move others, is refused here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from dovetail.data import Dataset, HeldOutPeople, Task, partition
from dovetail.engine import scoring
from dovetail.evaluation import (
    LEVEL,
    BinaryVectors,
    ClassVectors,
    Evaluation,
    LabelVectors,
    NumberVectors,
    People,
    ScoreVectors,
    calibrate_evaluation,
)
from dovetail.evaluation.release import people_add_own_noise
from dovetail.evaluation.vectors import NoisyScores, Records
from dovetail.experiment.config import Config
from dovetail.guarantee import Guarantee, Record, Spread
from dovetail.randomness import Randomness
from dovetail.statements import NotApplicable, Unit

__all__ = ["PrivateScores", "describe", "prepare_scores"]

_FEWEST = 10  # held-out people: the sample's spread is judged by a normal law
_INSTEAD = "or score on test records that are public (evaluate='public')"
_SIDES = {
    "user": "who is held out follows from users' ids and a public seed: a user that is replaced keeps its id",
    "subject": "who is held out follows from subjects' ids and a public seed: one that is replaced keeps its id",
    "row": "who is held out follows from the numbers of rows and a public seed: a user that is replaced keeps its row",
    "table": "nobody has records both in the table to train on and in the one to test on, and which of them a person "
    "is in does not depend on its records",
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrivateScores:
    """An evaluation on held-out people that is ready to be drawn, once, from the outputs of the last model."""

    release: Evaluation
    people: People
    dataset: Dataset

    @property
    def record(self) -> Record:
        """What the scores reveal, in privacy terms."""
        return self.release.guarantee.record()

    def draw(self, outputs: np.ndarray, randomness: Randomness) -> NoisyScores:
        """The scores of a model with these outputs for the test records."""
        return self.release.run_rounds(_records_to_score(outputs, self.dataset), self.people, randomness)


def describe(scores: NoisyScores, private: PrivateScores) -> dict[str, Any]:
    """What `privacy.json` says of private scores: intervals, how many people, how much noise."""
    return {
        "people": round(scores.people),
        "level": LEVEL,
        "intervals": dict(scores.intervals),
        "scores": dict(scores.metrics),
        "rounds": private.release.layout.rounds,
        "protocol": private.release.protocol.name,
        "noise_std": private.release.noise_std,
    }


def prepare_scores(config: Config, task: Task, dataset: Dataset, guarantee: Guarantee) -> PrivateScores | None:
    """The evaluation that a config asks for, its noise calibrated; None where test records are public.

    Arguments:
        config: with its partition.
        guarantee: that of the training, its noise set.

    Guarantees:
        Refuses data in which one person could be on both sides, or a person's data decide where others are.
        Refuses counts of people that are neither declared nor the same for neighbours.
    """
    if config.task.evaluate != "private":
        return None
    if task.metrics:
        raise ValueError(
            f"metrics of your own see the test records without noise: leave out {', '.join(task.metrics)} {_INSTEAD}"
        )
    held_out = _held_out_people(config, dataset, guarantee)
    people, counted = _people_of_test_records(config, held_out, published=task.published)
    if people.places < _FEWEST:
        raise ValueError(
            f"evaluate='private' needs {_FEWEST} held-out people or more, got {people.places}: hold out a larger "
            f"test_share, {_INSTEAD}"
        )
    by_place = guarantee.relation.value == "add-remove" and held_out.by != "table"
    release = calibrate_evaluation(
        guarantee,
        _score_vectors(dataset, guarantee, people=people.places, counted=counted),
        eps=_eps_of_scores(config, guarantee),
        colluders=config.cohort.colluders,
        spread=Spread(users=people.places, subjects=people.places, known=held_out.by == "subject", describes_data=True),
        assumptions=(*guarantee.assumptions, *(() if by_place else (_SIDES[held_out.by],))),
    )
    return PrivateScores(release=release, people=people, dataset=dataset)


def _held_out_people(config: Config, dataset: Dataset, guarantee: Guarantee) -> HeldOutPeople:
    """Whose the test records are; refuses what does not keep every person that the target protects on one side."""
    unit = guarantee.target_unit
    name = str(config.task.partition)
    if unit is Unit.ITEM:
        raise ValueError(
            f"evaluate='private' protects users or subjects, got privacy.unit='item': choose one, {_INSTEAD}"
        )
    held_out = dataset.held_out_people
    if held_out is None and dataset.users is None and dataset.subjects is None:
        held_out = HeldOutPeople(people=np.arange(len(dataset.test_labels), dtype=np.int32), by="table")
    if held_out is None:
        raise ValueError(
            f"evaluate='private' needs to know whose the test records are: hold users out by test_share=, {_INSTEAD}"
        )
    if held_out.shared:
        raise ValueError(
            f"{held_out.shared} users have records to train on and to test on, and evaluate='private' needs each of "
            f"them on one side: hold users out by test_share=, {_INSTEAD}"
        )
    if name not in (*partition.BY_USER, "one-record") and held_out.by != "subject":
        raise ValueError(
            f"task.partition = {name!r} deals training records to users of its own, and nobody deals the test records: "
            f"evaluate='private' needs 'by-user' or 'one-record', {_INSTEAD}"
        )
    if held_out.by == "subject" and unit is Unit.USER and name not in partition.BY_USER:
        raise ValueError(
            f"subjects are held out, and task.partition = {name!r} protects users of its own: set "
            f"task.partition = 'by-user', which makes every subject a user, {_INSTEAD}"
        )
    if held_out.by != "subject" and unit is Unit.SUBJECT and dataset.subjects is not None:
        raise ValueError(
            "subjects are protected, and users were held out, so that a subject may have records on both sides: leave "
            f"out user= where the data are read, {_INSTEAD}"
        )
    return held_out


def _people_of_test_records(config: Config, held_out: HeldOutPeople, *, published: bool) -> tuple[People, bool]:
    """Whose the test records are, by public places, and whether it is secret how many people there are."""
    found, owner = np.unique(held_out.people, return_inverse=True)
    if config.privacy.neighbors == "replace-one" or published:
        return People(owner, len(found)), False
    places = held_out.places if held_out.places is not None else config.task.users
    if places is None:
        raise ValueError(
            "under add-remove the number of held-out people is declared, not counted: pass roster= (the public list of "
            f"all users) to Dataset.from_..., set task.users, {_INSTEAD}"
        )
    if held_out.places is not None:
        return People(held_out.people, places), True
    if places < len(found):
        raise ValueError(
            f"{len(found)} people are held out, more than task.users = {places}: declare a number that is at least the "
            "larger of those who are trained on and those who are held out"
        )
    return People(owner, places), True


def _eps_of_scores(config: Config, guarantee: Guarantee) -> float:
    """The eps that scores keep to: the run's target, or what the training spends where there is none."""
    try:
        spent = guarantee.bound().eps
    except NotApplicable as refusal:
        raise ValueError(
            f"evaluate='private' keeps to the eps of the training, which promises nothing ({refusal}): {_INSTEAD[3:]}"
        ) from refusal
    if math.isinf(spent) or spent == 0:
        raise ValueError(f"evaluate='private' keeps to the eps of the training, which is {spent}: {_INSTEAD[3:]}")
    return spent if config.privacy.eps is None else config.privacy.eps


def _score_vectors(dataset: Dataset, guarantee: Guarantee, *, people: int, counted: bool) -> ScoreVectors:
    """What people add, by the kind of answer; one number alone where each adds all the noise itself."""
    alone = people_add_own_noise(guarantee)
    if dataset.target == "number":
        _check_target_range(dataset, alone=alone, name=guarantee.protocol.name)
        return NumberVectors(people=people, counted=counted)
    if dataset.target == "labels":
        return LabelVectors(people=people, counted=counted, labels=dataset.num_classes, alone=alone)
    if dataset.num_classes == 2 and not alone:
        return BinaryVectors(people=people, counted=counted)
    return ClassVectors(people=people, counted=counted, classes=dataset.num_classes, alone=alone)


def _check_target_range(dataset: Dataset, *, alone: bool, name: str) -> None:
    """Refuse targets without a declared range, and noise of everybody's own on numbers."""
    recipe = dataset.recipe
    if recipe is None or recipe.answer.bounds is None:
        raise ValueError(
            "evaluate='private' needs the public range of the target, for errors must be bounded: declare it by "
            f"bounds={{target: (low, high)}}, {_INSTEAD}"
        )
    if alone:
        raise ValueError(
            f"under {name!r} everybody would add noise to its own squared error, and R2 would drown in it: choose a "
            f"protocol that sums (secagg, dp_fl), {_INSTEAD}"
        )


def _records_to_score(outputs: np.ndarray, dataset: Dataset) -> Records:
    """What scores are made of, for every test record; outputs that are not numbers are the worst there are."""
    labels = dataset.test_labels
    if dataset.target == "number":
        predicted = np.clip(np.nan_to_num(outputs.reshape(len(labels), -1)[:, 0], nan=np.inf), -1, 1)
        return {"label": np.clip(labels, -1, 1), "predicted": predicted}
    if dataset.target == "labels":
        return {"label": labels, "correct": ((outputs > 0) == labels).astype(np.float64)}
    finite = np.nan_to_num(outputs, nan=0.0)
    records = {"label": labels, "correct": (scoring.predict_classes(finite) == labels).astype(np.float64)}
    if dataset.num_classes == 2:
        records["score"] = np.nan_to_num(scoring.ranking_score(finite).astype(np.float64))
    return records
