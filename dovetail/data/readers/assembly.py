"""From records to a `Dataset`: whose they are, what they are to tell, and which are for testing.

Whether a user is held out depends on the user's own id and a public seed alone (a hash), never on who else there is: a
user more or less moves nobody else from one side to the other. Rows that nobody is named for are named by what they
hold; their numbers would change with a row more or less.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from dovetail import _validate
from dovetail.data._base import Dataset, HeldOut, HeldOutPeople
from dovetail.data.people import fingerprint_ids, fingerprint_records
from dovetail.data.readers.recipes import Answer, InputColumn, Recipe
from dovetail.data.readers.tables import Table

__all__ = ["CLASSES_NOTE", "TESTED_NOTE", "Rows", "assemble_dataset", "held_out_mask", "hold_out_by_number", "ids_of"]

CLASSES_NOTE = "the list of classes is public (it was read off the data)"
TESTED_NOTE = "the test records are public: what is measured on them has no noise"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Records as they were read: inputs, columns of targets, and the names of users and subjects, where they are known.

    All have one entry for each record, in the same order. `roster` is the public list of users, of whom some may have
    no records.
    """

    inputs: np.ndarray
    targets: Table
    users: Sequence[str] | None = None
    subjects: Sequence[str] | None = None
    roster: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, length in (("target", self.targets.rows), *((key, len(ids)) for key, ids in self._owners)):
            if length != len(self.inputs):
                raise ValueError(f"expected one {name} for each of {len(self.inputs)} records, got {length}")

        self._check_roster()

    def _check_roster(self) -> None:
        """Refuse a roster without users, and users who are not on it."""
        if self.roster is None:
            return
        if self.users is None:
            raise ValueError("roster= lists the users, so user= must say whose a row is, and it does not")
        if strangers := set(self.users) - set(self.roster):
            raise ValueError(
                f"{len(strangers)} users of the data are not on the roster, such as {min(strangers)!r}: it must list "
                "every user, with records or without"
            )

    @property
    def _owners(self) -> list[tuple[str, Sequence[str]]]:
        """The names that there are, of users and of subjects, each with what an error calls one of them."""
        return [(key, ids) for key, ids in (("user", self.users), ("subject", self.subjects)) if ids is not None]

    def names_to_split(self, labels: np.ndarray) -> Sequence[str]:
        """For each record a name, all of whose records stay together when some are held out for testing.

        These are the users, or else the subjects, or else single records. A record's name is what it and its label
        hold, and how many equal ones are before it: without one record, the names are the same but for one.
        """
        if owners := self.users or self.subjects:
            return owners
        before: collections.Counter[str] = collections.Counter()
        names = []
        for record, label in zip(self.inputs, labels, strict=True):
            content = hashlib.blake2b(record.tobytes() + label.tobytes(), digest_size=16).hexdigest()
            names.append(f"{content}:{before[content]}")
            before[content] += 1
        return names


def assemble_dataset(
    records: Rows,
    answer: Answer,
    *,
    test: Rows | None,
    test_share: float | None,
    test_seed: int,
    declared: bool,
    columns: tuple[InputColumn, ...] | None = None,
    name: str | None = None,
    people: Callable[[], bytes] | None = None,
) -> Dataset:
    """Make a dataset of records, with the notes that its statements need.

    Arguments:
        records: what is trained on, and tested on if there is `test_share`.
        answer: what a model is to tell.
        test: what is tested on; or else `test_share`, the share of users that is held out.
        test_seed: which users that are.
        declared: whether the classes were declared, and not read off the data.
        columns: how the columns of a table were read, if the records come from one.
        name: what reports call the data.
        people: makes the fingerprint of whose records they are where no ids say that; by default it is of the records.
    """
    if (test is None) == (test_share is None):
        raise ValueError(
            "expected either test= (records to test on) or test_share= (the share of users to hold out for that, such "
            f"as 0.2), got {'neither' if test is None else 'both'}"
        )
    labels = answer.read_labels(records.targets)
    ids = records.subjects or records.roster or records.users
    if ids is not None:
        fingerprint = fingerprint_ids(ids)
    else:
        fingerprint = people() if people is not None else fingerprint_records(records.inputs, labels)
    if test is not None:
        kept = np.ones(len(records.inputs), bool)
        test_inputs, test_labels = test.inputs, answer.read_labels(test.targets)
        if test_inputs.shape[1:] != records.inputs.shape[1:] or test_inputs.dtype != records.inputs.dtype:
            raise ValueError(
                f"expected test records like those to train on, {records.inputs.dtype} of {records.inputs.shape[1:]}, "
                f"got {test_inputs.dtype} of {test_inputs.shape[1:]}"
            )
    else:
        kept = ~held_out_mask(records.names_to_split(labels), share=float(test_share or 0), seed=test_seed)
        test_inputs, test_labels = records.inputs[~kept], labels[~kept]
    held_out = _describe_held_out_people(records, test, kept, share=test_share, seed=test_seed)
    recipe = Recipe(
        shape=records.inputs.shape[1:],
        dtype="uint8" if records.inputs.dtype == np.uint8 else "float32",
        answer=answer,
        columns=columns,
    )
    roster = None
    if records.roster is not None:
        listed = np.array(list(dict.fromkeys(records.roster)))
        tested = np.zeros(len(listed), bool)
        if test_share is not None:
            tested = np.array([is_held_out(name, share=test_share, seed=test_seed) for name in listed])
        roster = listed[~tested].tolist()
        if held_out is not None and records.users is not None and test is None:
            on_list = listed[tested].tolist()
            places = ids_of(records.users, ~kept, roster=on_list)
            if places is not None:
                held_out = dataclasses.replace(held_out, people=places, places=len(on_list))
    return Dataset(
        inputs=records.inputs[kept],
        labels=labels[kept],
        test_inputs=test_inputs,
        test_labels=test_labels,
        num_classes=answer.size,
        users=ids_of(records.users, kept, roster=roster),
        roster=None if roster is None else len(roster),
        subjects=ids_of(records.subjects, kept),
        notes=(*(() if declared or answer.kind != "classes" else (CLASSES_NOTE,)), TESTED_NOTE),
        recipe=recipe,
        target=answer.kind,
        name=name,
        held_out=None if test_share is None else HeldOut(share=float(test_share), seed=test_seed),
        people=fingerprint,
        held_out_people=held_out,
    )


def _describe_held_out_people(
    records: Rows, test: Rows | None, kept: np.ndarray, *, share: float | None, seed: int
) -> HeldOutPeople | None:
    """Whose the test records are; None where records have owners and those to test on do not say whose they are."""
    owners = records.users or records.subjects
    if test is not None:
        theirs = test.users or test.subjects
        if theirs is None and owners is not None:
            return None
        people = np.arange(len(test.inputs), dtype=np.int32) if theirs is None else _number_names(theirs)
        return HeldOutPeople(people=people, by="table", shared=len(set(theirs or ()) & set(owners or ())))
    if owners is None:
        people = np.arange(np.count_nonzero(~kept), dtype=np.int32)
        return HeldOutPeople(people=people, by="row", rows=~kept, share=share, seed=seed)
    theirs = [name for name, keep in zip(owners, kept, strict=True) if not keep]
    return HeldOutPeople(people=_number_names(theirs), by="subject" if records.users is None else "user")


def _number_names(names: Sequence[str]) -> np.ndarray:
    """The place of each name among the sorted different ones, int32."""
    return np.unique(np.asarray(names), return_inverse=True)[1].astype(np.int32)


def hold_out_by_number(dataset: Dataset) -> Dataset:
    """The same records, of which those are held out whose numbers a hash of the public seed picks, whatever they hold.

    Where rows are people and one may be replaced by another, one that goes by what it holds could change sides.

    Arguments:
        dataset: one whose rows are people, held out by what they hold.
    """
    held_out = dataset.held_out_people
    if held_out is None or held_out.rows is None or held_out.share is None:
        raise ValueError("expected a dataset whose rows are people, held out by test_share")
    before = held_out.rows
    numbers = [f"row {number}" for number in range(len(before))]
    after = held_out_mask(numbers, share=held_out.share, seed=held_out.seed)

    def sides(kept: np.ndarray, tested: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        whole = np.empty((len(before), *kept.shape[1:]), kept.dtype)
        whole[~before], whole[before] = kept, tested
        return whole[~after], whole[after]

    inputs, test_inputs = sides(dataset.inputs, dataset.test_inputs)
    labels, test_labels = sides(dataset.labels, dataset.test_labels)
    people = np.arange(np.count_nonzero(after), dtype=np.int32)
    return dataclasses.replace(
        dataset,
        inputs=inputs,
        labels=labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        held_out_people=dataclasses.replace(held_out, people=people, rows=after),
    )


def held_out_mask(names: Sequence[str], *, share: float, seed: int) -> np.ndarray:
    """A mask (records,) of those for testing: the records of about this share of the different names.

    Arguments:
        names: whose each record is.
        share: in (0, 1).
        seed: public, from which it follows which names these are.

    Guarantees:
        All records of a name are on one side, which depends on the name and the seed alone.
    """
    _validate.in_open_interval(0, 1, test_share=share)
    _validate.integer(test_seed=seed)
    different = set(names)
    tested = {name for name in different if is_held_out(name, share=share, seed=seed)}
    if not 0 < len(tested) < len(different):
        raise ValueError(
            f"expected a test_share that leaves someone on both sides, got test_share={share} with {len(tested)} of "
            f"{len(different)} held out (test_seed={seed})"
        )
    return np.fromiter((name in tested for name in names), bool, len(names))


def is_held_out(name: str, *, share: float, seed: int) -> bool:
    """Whether the records of this name are for testing: by a hash of the public seed and the name alone."""
    return _hash_to_unit(f"{seed}:{name}") < share


def ids_of(names: Sequence[str] | None, kept: np.ndarray, *, roster: Sequence[str] | None = None) -> np.ndarray | None:
    """The id of each record that is kept, int32: its name's place on the roster, or among the sorted names.

    Arguments:
        names: whose each record is; None if unknown, which is then returned.
        kept: a mask of the records.
        roster: names, of which those of the kept records are some.
    """
    if names is None:
        return None
    mine = [name for name, keep in zip(names, kept, strict=True) if keep]
    number = {name: place for place, name in enumerate(sorted(set(mine)) if roster is None else roster)}
    return np.fromiter((number[name] for name in mine), np.int32, len(mine))


def _hash_to_unit(text: str) -> float:
    """A hash of the text as a number in [0, 1]."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64
