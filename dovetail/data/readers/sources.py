"""What `Dataset.from_...` do, for tables, arrays, datasets of other libraries and folders of images.

A table's columns are inputs unless they are named as user, subject or target. Arrays are taken as they are. The
keywords are explained at `readers.TableOptions` and `readers.ArrayOptions`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal

import numpy as np

from dovetail import _validate
from dovetail.data._base import Dataset, Target
from dovetail.data.people import fingerprint_table
from dovetail.data.readers.assembly import Rows, assemble_dataset
from dovetail.data.readers.declarations import (
    check_types,
    input_columns,
    refuse_unclear_users,
    warn_of_ids,
    warn_of_ranges,
)
from dovetail.data.readers.recipes import Answer, input_matrix
from dovetail.data.readers.tables import MissingValues, Table, import_optional

__all__ = ["from_arrays", "from_folder", "from_huggingface", "from_items", "from_table"]

_LABEL = "labels"
_IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


def from_table(
    source: Any,
    *,
    target: str | Sequence[str],
    user: str | Sequence[Any] | EllipsisType | None = ...,
    subject: str | Sequence[Any] | None = None,
    roster: Sequence[Any] | None = None,
    inputs: str | Sequence[str] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    missing: Literal["indicator"] | Sequence[str] | Mapping[str, Any] | None = None,
    classes: Sequence[Any] | None = None,
    kind: Target | None = None,
    name: str | None = None,
    test: Any = None,
    test_share: float | None = None,
    test_seed: int = 0,
) -> Dataset:
    """Rows of a table as a dataset, each input column read as it is declared.

    Arguments:
        source: what `Table.of` takes.
        test: another one, to test on.
    """
    check_types(
        target=target,
        user=user,
        subject=subject,
        inputs=inputs,
        categories=categories,
        bounds=bounds,
        classes=classes,
        missing=missing,
    )
    table = Table.of(source)
    other = None if test is None else Table.of(test)
    targets = [target] if isinstance(target, str) else list(target)
    spoken_for = [*targets, *(column for column in (user, subject) if isinstance(column, str))]
    owner = None if isinstance(user, EllipsisType) else user
    if isinstance(user, EllipsisType):
        refuse_unclear_users(table, spoken_for)
    for column in spoken_for:
        table.column(column)
    named = [inputs] if isinstance(inputs, str) else inputs
    names = [column for column in table.columns if column not in spoken_for] if named is None else list(named)
    columns = input_columns(names, categories or {}, bounds or {}, missing, targets=targets)
    if inputs is None:
        warn_of_ids(columns)
    with _append_remedy("leave rows without one out of the table, for nothing can be learned from them"):
        answer = Answer.from_tables(
            [table] if other is None else [table, other],
            target=target,
            kind=kind,
            classes=classes,
            bounds=(bounds or {}).get(target) if isinstance(target, str) else None,
        )
        labels = answer.read_labels(table)
    with _append_remedy("every row must be somebody's, so leave rows without an id out, or give them ids"):
        users, subjects = _ids_of_rows(table, owner), _ids_of_rows(table, subject)
    records = Rows(
        inputs=input_matrix(table, columns),
        targets=table,
        users=users,
        subjects=subjects,
        roster=_as_text(roster),
    )
    warn_of_ranges(table, columns, records.inputs, answer, labels)
    return assemble_dataset(
        records,
        answer,
        test=None if other is None else _rows_to_test(other, input_matrix(other, columns), owner, subject),
        test_share=test_share,
        test_seed=test_seed,
        declared=classes is not None,
        columns=columns,
        name=name,
        people=lambda: fingerprint_table(table),
    )


@contextlib.contextmanager
def _append_remedy(remedy: str) -> Iterator[None]:
    """Within, an error about missing values ends with what to do about them."""
    try:
        yield
    except MissingValues as error:
        raise MissingValues(f"{error}: {remedy}") from error


def from_arrays(
    inputs: Any,
    labels: Any,
    *,
    user: Sequence[Any] | None = None,
    subject: Sequence[Any] | None = None,
    roster: Sequence[Any] | None = None,
    classes: Sequence[Any] | None = None,
    kind: Target | None = None,
    name: str | None = None,
    test: tuple[Any, Any] | None = None,
    test_share: float | None = None,
    test_seed: int = 0,
) -> Dataset:
    """Arrays as a dataset, taken as they are: whole numbers only as uint8, one label or row of labels per record."""
    if test is not None and len(test) != 2:
        raise ValueError(f"expected test=(inputs, labels), got {len(test)} parts")
    several = np.asarray(labels).ndim == 2
    if several and kind in (None, "labels"):
        kind = "labels"
        count = np.asarray(labels).shape[1]
        names = [str(value) for value in (range(count) if classes is None else classes)]
        if len(names) != count:
            raise ValueError(f"expected a name for each of {count} labels, got {len(names)} classes")
        target: str | list[str] = names
    else:
        target = _LABEL

    def rows_of(record_inputs: Any, labels: Any, users: Any = None, subjects: Any = None, roster: Any = None) -> Rows:
        values = np.asarray(labels)
        columns = {_LABEL: values} if isinstance(target, str) else dict(zip(target, values.T, strict=True))
        table = Table(name="the labels", columns=columns)
        return Rows(
            inputs=np.asarray(record_inputs),
            targets=table,
            users=_as_text(users),
            subjects=_as_text(subjects),
            roster=_as_text(roster),
        )

    train = rows_of(inputs, labels, user, subject, roster)
    other = None if test is None else rows_of(*test)
    tables = [train.targets] if other is None else [train.targets, other.targets]
    answer = Answer.from_tables(tables, target=target, kind=kind, classes=None if several else classes)
    return assemble_dataset(
        train,
        answer,
        test=other,
        test_share=test_share,
        test_seed=test_seed,
        declared=classes is not None,
        name=name,
    )


def from_items(
    items: Any, *, test: Any = None, channels_first: bool = False, what: str = "a torch dataset", **options: Any
) -> Dataset:
    """Pairs (input, label) by number, such as torch's datasets hold.

    Arguments:
        items: has a length and `items[number]`.
        test: other items, to test on.
        channels_first: whether inputs are images (channels, height, width).
        what: what messages call the items.
        options: keywords of `from_arrays`.
    """
    stacked = [_stack_items(part, channels_first, what) for part in (items, test) if part is not None]
    return from_arrays(*stacked[0], test=stacked[1] if test is not None else None, **options)


def from_huggingface(
    source: Any,
    *,
    target: str | Sequence[str],
    inputs: str | Sequence[str] | None = None,
    test: Any = None,
    **options: Any,
) -> Dataset:
    """A dataset's columns as a table; or, with one name as `inputs`, a column of images or of vectors.

    Arguments:
        source: a split of a dataset, or a dataset's name.
        options: keywords of `from_table`.
    """
    if isinstance(source, str):
        splits = import_optional(
            "datasets", needed_by="a Hugging Face dataset by name", install="datasets"
        ).load_dataset(source)
        _validate.known_name(f"split of {source}", "train", splits)
        options = {**options, "name": options.get("name") or source}
        source = splits["train"]
        if test is None and options.get("test_share") is None:
            test = splits.get("test")
    schema = _class_names(source, target)
    if options.get("classes") is None and schema is not None:
        options = {**options, "classes": schema}
        source = _with_class_names(source, target, schema)
        test = _with_class_names(test, target, schema)
    if not isinstance(inputs, str):
        return from_table(source, target=target, inputs=inputs, test=test, **options)
    if any(options.pop(declared, None) for declared in ("categories", "bounds", "missing")):
        raise ValueError(f"expected no categories, bounds or missing= with one column of arrays, got inputs={inputs!r}")
    tables = [Table.of(part) for part in (source, test) if part is not None]
    names = [target] if isinstance(target, str) else list(target)

    def arrays(table: Table) -> tuple[np.ndarray, np.ndarray]:
        labels = [np.asarray(table.values(name)) for name in names]
        return _stack_records(table.column(inputs), described_as=f"column {inputs!r}"), (
            labels[0] if isinstance(target, str) else np.stack(labels, axis=1)
        )

    if options.get("user", ...) is ...:
        subject = options.get("subject")
        refuse_unclear_users(tables[0], [*names, inputs, *([subject] if isinstance(subject, str) else [])])
        options = {**options, "user": None}
    for owner in ("user", "subject"):
        if isinstance(options.get(owner), str):
            options = {**options, owner: tables[0].ids_as_text(options[owner])}
    return from_arrays(*arrays(tables[0]), test=arrays(tables[1]) if test is not None else None, **options)


def from_folder(
    folder: str | Path,
    *,
    user: Callable[[Path], Any] | None = None,
    subject: Callable[[Path], Any] | None = None,
    classes: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    grey: bool = False,
    name: str | None = None,
    test: str | Path | None = None,
    test_share: float | None = None,
    test_seed: int = 0,
) -> Dataset:
    """Images under one folder per class, read by Pillow; arguments as of `Dataset.from_folder`."""
    files, labels = _images_in(Path(folder))
    other = None
    if test is not None:
        test_files, test_labels = _images_in(Path(test))
        other = _read_images(test_files, size, grey), test_labels
    return from_arrays(
        _read_images(files, size, grey),
        labels,
        user=None if user is None else [str(user(file)) for file in files],
        subject=None if subject is None else [str(subject(file)) for file in files],
        classes=classes,
        name=name or Path(folder).resolve().name,
        test=other,
        test_share=test_share,
        test_seed=test_seed,
    )


def _images_in(folder: Path) -> tuple[list[Path], list[str]]:
    """The images under the folders inside a folder, and for each the name of that inner folder, its class."""
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of images, one folder per class, got {str(folder)!r}")
    pairs = [
        (file, inside.name)
        for inside in sorted(folder.iterdir())
        if inside.is_dir()
        for file in sorted(inside.rglob("*"))
        if file.suffix.lower() in _IMAGE_SUFFIXES
    ]
    if not pairs:
        raise ValueError(f"expected images in one folder per class, got none in {str(folder)!r}")
    return [file for file, _ in pairs], [label for _, label in pairs]


def _read_images(files: Sequence[Path], size: tuple[int, int] | None, grey: bool) -> np.ndarray:
    """The images of these files, uint8, resized if a size (height, width) is given; refuses several sizes."""
    image = import_optional("PIL.Image", needed_by="Dataset.from_folder", install="pillow")
    pictures = []
    for file in files:
        with image.open(file) as opened:
            converted = opened.convert("L" if grey else "RGB")
            pictures.append(np.asarray(converted if size is None else converted.resize((size[1], size[0]))))
    shapes = {picture.shape[:2] for picture in pictures}
    if len(shapes) != 1:
        raise ValueError(
            f"expected images of one size, or size=(height, width), got {len(shapes)} sizes in {len(pictures)} images"
        )
    return np.stack(pictures)


def _ids_of_rows(table: Table, column: str | Sequence[Any] | None) -> list[str] | None:
    """The ids of the rows as text, from a column's name or from the ids themselves; None without any."""
    return table.ids_as_text(column) if isinstance(column, str) else _as_text(column)


def _rows_to_test(
    table: Table, inputs: np.ndarray, owner: str | Sequence[Any] | None, subject: str | Sequence[Any] | None
) -> Rows:
    """The rows of a table to test on, with their users or subjects where it has these columns in full."""

    def names(column: str | Sequence[Any] | None) -> list[str] | None:
        with contextlib.suppress(ValueError):  # public records need not say whose they are
            return table.ids_as_text(column) if isinstance(column, str) and column in table.columns else None
        return None

    return Rows(inputs=inputs, targets=table, users=names(owner), subjects=names(subject))


def _as_text(ids: Sequence[Any] | None) -> list[str] | None:
    """Ids of any type as text, None as None; refuses missing ones."""
    if ids is None:
        return None
    return Table(
        name="the ids", columns={"ids": ids if isinstance(ids, list | tuple) else np.asarray(ids)}
    ).ids_as_text("ids")


def _stack_items(items: Any, channels_first: bool, described_as: str) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and labels of pairs, each as one array."""
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise ValueError(f"expected {described_as} with a length and numbered items, got {type(items).__name__}")
    pairs = [items[number] for number in range(len(items))]
    if not pairs or any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise ValueError(f"expected {described_as} of pairs (input, label), got {len(pairs)} items of another form")
    inputs = _stack_records([pair[0] for pair in pairs], described_as="inputs")
    labels = np.stack([np.asarray(pair[1]) for pair in pairs])
    return np.moveaxis(inputs, 1, -1) if channels_first else inputs, labels


def _stack_records(values: Any, *, described_as: str) -> np.ndarray:
    """Records of one shape as one array, first axis the record; whole numbers but uint8 become float32."""
    arrays = [np.asarray(value) for value in values]
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1:
        raise ValueError(
            f"expected records of one shape in {described_as}, got {len(shapes)} shapes in {len(arrays)} records"
        )
    records = np.stack(arrays)
    return records.astype(np.float32) if records.dtype.kind in "biu" and records.dtype != np.uint8 else records


def _class_names(source: Any, target: str | Sequence[str]) -> list[str] | None:
    """The names of the classes, where the schema of a Hugging Face dataset declares them for its target."""
    features = getattr(source, "features", None)
    feature = features.get(target) if isinstance(features, Mapping) and isinstance(target, str) else None
    return getattr(feature, "names", None)


def _with_class_names(source: Any, target: Any, names: Sequence[str]) -> Table | None:
    """The table of a dataset, whose target has the names of classes in place of their numbers; None without one."""
    if source is None:
        return None
    table = Table.of(source)
    column = [names[value] for value in table.values(target)]
    return Table(name=table.name, columns={**table.columns, target: column})
