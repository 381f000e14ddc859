"""What a task is: data, a model for it, and how the two are judged.

A `Dataset` holds records as NumPy arrays and, where that is known, whom each is about; a `Clients` table says which
records belong to which client, a `Model` maps parameters and inputs to outputs, a `Task` is how a dataset is loaded,
with its model and metrics if it brings its own. Records are stored once, whatever the number of clients: a client is a
list of indices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import numpy as np

from dovetail import _validate
from dovetail.data.readers import Sources

if TYPE_CHECKING:
    from dovetail.data.readers.recipes import Recipe

__all__ = [
    "Clients",
    "ClippingLearner",
    "Dataset",
    "HeldOut",
    "HeldOutPeople",
    "HostLearner",
    "LoadData",
    "Loss",
    "Metric",
    "Model",
    "Target",
    "Task",
    "as_inputs",
]

_MOST_SHOWN = 8  # columns or classes that `repr` of a dataset names
Target = Literal["classes", "number", "labels"]
Loss = Callable[[Any, Any], Any]  # outputs and labels of some records -> one loss per record
Metric = Callable[[np.ndarray, np.ndarray], float]  # outputs and labels of all test records -> a number


class HeldOut(NamedTuple):
    """The public rule by which test records were taken out of the data: about this share of users, by this seed."""

    share: float
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutPeople:
    """Whose the test records are, and what decided that they are for testing: for scores that protect these people.

    Arguments:
        people: whose each test record is, int32 (test records,).
        by: what decided: the id of a `user` or of a `subject` with a public seed, what a `row` holds with that seed, or
            that the records come from a `table` of their own.
        places: with a public list of users, how many of them are for testing, with records or without.
        shared: how many people have records on both sides.
        rows: of rows, which of all records are test records, in the order in which they came.
        share: of rows, the share that is held out.
        seed: of rows, the public seed.
    """

    people: np.ndarray
    by: Literal["user", "subject", "row", "table"]
    places: int | None = None
    shared: int = 0
    rows: np.ndarray | None = None
    share: float | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dataset(Sources):
    """Labelled records for training and testing.

    `inputs` is uint8 (read as value / 255) or float32, first axis the record. What labels are, `target` says:

    - "classes": one class per record, int32 in [0, num_classes);
    - "number": one number per record, float32, for regression; num_classes is 1;
    - "labels": several labels per record, float32 zeros and ones of shape (records, num_classes).

    `subjects`, int32 and >= 0, says whom each training record is about, and `users` who holds it; None if unknown.
    `roster` is a public number of places for users: those without a record count as removed, and `users` are places on
    it. Without users every row counts as one user. With
    several `views` of each training record, rows r * views to r * views + views - 1 of `inputs` are those of record r,
    its own first. `notes` are what else every statement about these data assumes, and `declared` what only the author
    of code that made the inputs knows, which makes a statement one *as declared*; `recipe` says how rows of the table
    that they came from became inputs. `name` is what reports call the data, and `held_out` how test records were taken
    out of them, None where they came apart. `people` is a fingerprint of whose data they are, whatever of them is read
    (`data.people`), and `held_out_people` says whose the test records are. `from_csv`, `from_pandas` and others make a
    dataset of what you have.
    `repr` counts users and rows, and shows no record: it is for the owner of the data (docs/concepts/counts.md).

    Guarantees:
        Inputs and labels are held in the types that compute, other floats and whole numbers converted to them.
        Every input is finite after its conversion; what float32 cannot hold is refused, with how many values that are.
    """

    inputs: np.ndarray
    labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    num_classes: int
    subjects: np.ndarray | None = None
    views: int = 1
    target: Target = "classes"
    users: np.ndarray | None = None
    roster: int | None = None
    notes: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()
    recipe: Recipe | None = None
    name: str | None = None
    held_out: HeldOut | None = None
    people: bytes | None = dataclasses.field(default=None, repr=False)
    held_out_people: HeldOutPeople | None = None

    def __post_init__(self) -> None:
        _validate.integer(views=self.views)
        _validate.at_least(1, views=self.views)
        _validate.one_of(get_args(Target), target=self.target)
        if self.target == "number" and self.num_classes != 1:
            raise ValueError(f'expected num_classes=1 with target="number", got num_classes={self.num_classes}')
        columns = (self.num_classes,) if self.target == "labels" else ()
        for part, labels_of_part, views in (("inputs", "labels", self.views), ("test_inputs", "test_labels", 1)):
            inputs = np.asanyarray(getattr(self, part))
            labels = np.asanyarray(getattr(self, labels_of_part))
            if inputs.ndim == 0 or labels.ndim == 0 or labels.shape[1:] != columns:
                each = f"a row of {self.num_classes} labels" if columns else "one label"
                raise ValueError(f"expected {each} for each record of {part}, got labels of shape {labels.shape}")
            if len(inputs) != len(labels) * views or len(inputs) == 0:
                rows = "record" if views == 1 else f"{views} rows"
                raise ValueError(f"expected one label for each {rows} of {part}, got {len(inputs)} and {len(labels)}")
            object.__setattr__(self, labels_of_part, self._convert_labels(f"labels of {part}", labels))
            object.__setattr__(self, part, as_inputs(part, inputs))
        for name in ("subjects", "users"):
            if (ids := getattr(self, name)) is not None:
                _check_ids(name, ids, len(self.labels))
        self._check_roster()

    def __repr__(self) -> str:
        return f"Dataset({', '.join(f'{key}: {value}' for key, value in self._facts().items())})"

    def _facts(self) -> dict[str, str]:
        """What `repr` shows, as text by name, for the owner of the data alone: users and rows are counted."""
        rows = f"{len(self.labels):,}" + (f" with {self.views} views each" if self.views > 1 else "")
        users = f"{len(np.unique(self.users)):,}" if self.users is not None else "every row is one"
        facts = {"users": users if self.roster is None else f"{users}, of {self.roster:,} on the roster", "rows": rows}
        if self.subjects is not None:
            facts["subjects"] = f"{len(np.unique(self.subjects)):,}"
        facts |= {"inputs": self._describe_inputs(), "target": self._describe_target()}
        held_out = "" if self.held_out is None else f", {self.held_out.share:.0%} held out"
        return {**facts, "test": f"{len(self.test_labels):,} rows{held_out}"}

    def _describe_inputs(self) -> str:
        """The columns that are read, or the shape of a record."""
        shape = self.inputs.shape[1:]
        columns = None if self.recipe is None or self.recipe.shape != shape else self.recipe.columns
        if columns is None:
            return f"{self.inputs.dtype} of shape {shape}"
        more = f" and {len(columns) - _MOST_SHOWN} more" if len(columns) > _MOST_SHOWN else ""
        named = ", ".join(repr(column.name) for column in columns[:_MOST_SHOWN])
        return f"{named}{more} ({shape[0]} numbers)"

    def _describe_target(self) -> str:
        """The columns that are predicted, and what their values are."""
        answer = None if self.recipe is None else self.recipe.answer
        named = "" if answer is None else ", ".join(map(repr, answer.columns[:_MOST_SHOWN]))
        if self.target == "number":
            kind = "a number"
        elif self.target == "labels":
            kind = f"{self.num_classes} labels"
        else:
            kind = f"one of {self.num_classes} classes"
            if answer is not None and answer.classes is not None and self.num_classes <= _MOST_SHOWN:
                kind = f"one of {', '.join(map(repr, answer.classes))}"
        return f"{named} ({kind})" if named else kind

    def _check_roster(self) -> None:
        """Refuse a roster with fewer places than the data have users."""
        if self.roster is None:
            return
        _validate.integer(roster=self.roster)
        needed = len(self.labels) if self.users is None else int(self.users.max()) + 1
        if self.roster < needed:
            raise ValueError(
                f"the data have users at {needed} places of the roster, and roster={self.roster} has fewer"
            )

    def _convert_labels(self, name: str, labels: np.ndarray) -> np.ndarray:
        """Labels in the type that computes; refuses those that are not what the target says, under the name `name`."""
        if self.target == "classes":
            return _as_classes(name, labels, self.num_classes)
        return _as_numbers(name, labels) if self.target == "number" else _as_zeros_and_ones(name, labels)


def as_inputs(name: str, inputs: np.ndarray) -> np.ndarray:
    """Inputs in the types that a dataset holds: uint8 as they are, finite floats as float32; refuses others.

    `name` is what an error calls them.
    """
    if inputs.dtype == np.uint8:
        return inputs
    if not np.issubdtype(inputs.dtype, np.floating):
        raise ValueError(
            f"expected {name} as uint8 (read as value / 255) or as floating-point numbers, got {inputs.dtype}"
        )
    _validate.finite_array(**{name: inputs})
    with np.errstate(over="ignore"):
        converted = inputs.astype(np.float32, copy=False)
    if converted is not inputs and (beyond := np.count_nonzero(~np.isfinite(converted))):
        raise ValueError(
            f"expected {name} within {np.finfo(np.float32).max:.2g} of zero, which float32 can hold, "
            f"got {beyond} values beyond it in {name}"
        )
    return converted


def _as_classes(name: str, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Labels as int32 in [0, num_classes); refuses others."""
    if labels.dtype.kind not in "biuf":
        raise ValueError(f"expected {name} as whole numbers, got {labels.dtype}")
    if labels.dtype.kind == "f" and (broken := np.count_nonzero(~(labels == np.floor(labels)) | np.isinf(labels))):
        raise ValueError(
            f'expected {name} to be whole numbers, got {broken} that are not: pass target="number" for regression'
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"expected {name} in [0, {num_classes}), got {labels.min()}..{labels.max()}")
    return labels.astype(np.int32, copy=False)


def _as_numbers(name: str, labels: np.ndarray) -> np.ndarray:
    """Labels as finite float32; refuses text."""
    if labels.dtype.kind not in "biuf":
        raise ValueError(f"expected {name} as numbers, got {labels.dtype}")
    return as_inputs(name, labels if labels.dtype.kind == "f" else labels.astype(np.float64))


def _as_zeros_and_ones(name: str, labels: np.ndarray) -> np.ndarray:
    """Labels as float32, each 0 or 1; refuses others."""
    if labels.dtype.kind not in "biuf":
        raise ValueError(f"expected {name} as zeros and ones, got {labels.dtype}")
    if broken := np.count_nonzero((labels != 0) & (labels != 1)):
        raise ValueError(f"expected {name} to be zeros and ones, got {broken} that are neither")
    return labels.astype(np.float32, copy=False)


def _check_ids(name: str, ids: np.ndarray, num_records: int) -> None:
    """Refuse ids that are not one per record, int32 and at least 0."""
    if ids.shape != (num_records,):
        raise ValueError(
            f"expected one {name[:-1]} for each of the {num_records} records of inputs, got {name} of {ids.shape}"
        )
    if ids.dtype != np.int32:
        raise ValueError(f"expected {name} to be int32, got {ids.dtype}")
    _validate.at_least(0, **{name: int(ids.min())})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A function from parameters and a batch of inputs to outputs, logits for classes.

    Arguments:
        name: what the model is called in results.
        init: from a key to the first parameters.
        apply: from parameters and a batch of inputs, first axis the record, to the outputs for each record.
        constant: of a linear model the value of the constant feature, which the bias is multiplied by; None for other
            models. The parameters are then one array of shape (features + 1, classes), and the logits
            ``inputs @ params[:-1] + constant * params[-1]`` on flattened inputs. The engine never forms a client's
            gradient of such a model (`engine.linear`).
        loss: a name of `learners.losses.LOSSES` or a function of one's own; by default it follows from the target of
            the dataset.
        learner: what trains the model outside JAX: it computes updates and outputs, and `apply` may not be compiled.
            None
            for models in JAX.
    """

    name: str
    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, Any], Any]
    constant: float | None = None
    loss: str | Loss | None = None
    learner: HostLearner | None = None


class HostLearner(Protocol):
    """What trains a model outside JAX: NumPy arrays in, NumPy arrays out, parameters as one flat vector.

    Where `platform` is the one that JAX computes on, records come as arrays of JAX, and updates may be one.

    Arguments:
        gradients: whether an update of "fedsgd" is the negative gradient of the mean loss, which protocols need that
            clip records one by one.
        ignores_settings: whether the learner decides by itself how a client trains.
    """

    gradients: bool
    ignores_settings: bool

    @property
    def platform(self) -> str:
        """Where clients train: "host", or an accelerator ("gpu")."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What every statement about models that it trained assumes."""
        ...

    @property
    def code(self) -> tuple[Any, ...]:
        """The objects whose source a resumed run must have in common with the run that it goes on from."""
        ...

    def updates(
        self,
        settings: Any,
        loss: str | Loss,
        parameters: np.ndarray,
        inputs: Any,
        labels: Any,
        counts: Any,
    ) -> Any:
        """Updates of some clients, (clients, dim).

        Arguments:
            settings: a `learners.client.ClientUpdate`.
            loss: a name of `learners.losses.LOSSES`, or one's own.
            parameters: the flat vector that the clients start from.
            inputs: (clients, records, ...), of which the first `counts` of each client are real.
            labels: (clients, records), or (clients, records, labels), in the same way.
            counts: how many records each client has, (clients,); it may be 0.
        """
        ...

    def outputs(self, parameters: Any, inputs: np.ndarray) -> np.ndarray:
        """The model's outputs for some records, at parameters in the model's own shape."""
        ...

    def losses(self, loss: str | Loss, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The loss of each record, (records,), from what `outputs` returned for it."""
        ...


@runtime_checkable
class ClippingLearner(HostLearner, Protocol):
    """A learner that adds up clipped gradients by itself, where that is faster than forming each of them."""

    def clipped_sum(
        self, loss: str | Loss, parameters: np.ndarray, inputs: Any, labels: Any, counts: Any, *, clip_norm: float
    ) -> Any:
        """The sum (dim,) of minus the updates of "fedsgd", each scaled down to `clip_norm` where it is longer.

        Arguments otherwise as of `updates`. One that is not finite adds zero.
        """
        ...

    def describe_clipping(self, loss: str | Loss, parameters: np.ndarray, records: int) -> list[str]:
        """How `clipped_sum` is computed for clients with so many records, in lines."""
        ...


class LoadData(Protocol):
    """Loads a dataset.

    Arguments:
        folder: where the user keeps the files, if anywhere.
    """

    def __call__(self, *, folder: Path | None) -> Dataset:
        """Return the dataset, or raise `FileNotFoundError` with one sentence."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Data and, if it brings its own, a model. Test records are held to be public.

    Arguments:
        name: what the task is called in configs and results.
        load: loads the dataset.
        model: overrides the model that is named in a config. It is a `Model`, a module of PyTorch, Flax or Equinox, or
            a function from a `RecordSpec` to one of these.
        loss: overrides that of the model.
        metrics: functions of the model's outputs and the labels of all test records, reported by name beside accuracy
            and the like.
        published: whether it is public how many users and records the dataset has; of any other these numbers are
            declared, never counted (docs/concepts/counts.md).
    """

    name: str
    load: LoadData
    model: Any = None
    loss: str | Loss | None = None
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    published: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Clients:
    """Who owns which records: `records` lists those of client 0, then those of client 1, and so on; `counts` how many.

    A client may own nothing at all. Memory grows with the records, however unequal the clients are.
    """

    records: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        if self.records.ndim != 1 or self.counts.ndim != 1 or len(self.counts) == 0:
            raise ValueError(
                "expected a list of records and the counts of at least one client, "
                f"got shapes {self.records.shape} and {self.counts.shape}"
            )
        if self.counts.min() < 0 or self.counts.sum() != len(self.records):
            raise ValueError(
                f"expected counts >= 0 that add up to the {len(self.records)} records, "
                f"got counts from {self.counts.min()} that add up to {self.counts.sum()}"
            )

    @classmethod
    def from_owners(cls, records: np.ndarray, owners: np.ndarray, *, num_clients: int) -> Clients:
        """Clients 0 to `num_clients` - 1, where client `owners[i]` owns record `records[i]`.

        A client's records keep their order.
        """
        counts = np.bincount(owners, minlength=num_clients)
        return cls(records=records[np.argsort(owners, kind="stable")].astype(np.int32), counts=counts.astype(np.int32))

    @classmethod
    def from_rows(cls, rows: np.ndarray, counts: np.ndarray | None = None) -> Clients:
        """One client for each row of `rows` (clients, width), which owns its records, or the first `counts` of them."""
        width = rows.shape[1]
        sizes = np.full(len(rows), width, np.int32) if counts is None else np.asarray(counts, np.int32)
        if sizes.shape != rows.shape[:1] or sizes.max(initial=0) > width:
            raise ValueError(f"expected a count of at most {width} for each of the {len(rows)} rows, got {counts}")
        return cls(records=rows[np.arange(width) < sizes[:, None]].astype(np.int32), counts=sizes)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Where in `records` those of each client begin, (clients,), int32."""
        return (np.cumsum(self.counts) - self.counts).astype(np.int32)

    def records_of(self, client: int) -> np.ndarray:
        """The records of one client."""
        return self.records[self.starts[client] : self.starts[client] + self.counts[client]]

    def subset(self, clients: np.ndarray) -> Clients:
        """The table of these clients alone, in this order."""
        return Clients.from_rows(self.rows(clients), self.counts[clients])

    def rows(self, clients: np.ndarray, *, width: int | None = None) -> np.ndarray:
        """The records of some clients, one row each.

        Rows are padded with the client's own first record, never with someone else's, except that there is no choice
        for a client without any: its row holds record 0.

        Arguments:
            width: how many columns there are; by default as many as the largest of these clients has records.
        """
        counts = self.counts[clients][:, None]
        column = np.arange(width or max(1, counts.max(initial=0)))
        starts = np.where(counts > 0, self.starts[clients][:, None], len(self.records))
        return np.append(self.records, 0)[starts + np.where(column < counts, column, 0)].astype(np.int32)

    def owners_and_records(self) -> tuple[np.ndarray, np.ndarray]:
        """The client of every entry of `records`, and the record: two arrays of that length."""
        return np.repeat(np.arange(self.num_clients), self.counts), self.records

    def with_views(self, views: int) -> Clients:
        """The clients' rows of inputs where each record has so many views: more records, as far as training goes."""
        rows = self.records[:, None] * np.int32(views) + np.arange(views, dtype=np.int32)
        return Clients(records=rows.reshape(-1), counts=self.counts * np.int32(views))

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return len(self.counts)

    @property
    def max_records(self) -> int:
        """How many records the largest client has; 1 where nobody has any."""
        return max(1, int(self.counts.max()))
