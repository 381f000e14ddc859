"""What settings mean is read beneath their fields, and said by help and by errors."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from dovetail import _fields
from dovetail.experiment.config import parse
from dovetail.protocols import build

BASE = {"task": {"name": "digits"}, "protocol": {"name": "dp_fl"}}


@dataclasses.dataclass(frozen=True)
class Base:
    """What two have in common."""

    width: int
    """How wide it is, from
    left to right."""
    depth: int = 2


@_fields.with_fields_in_help
@dataclasses.dataclass(frozen=True)
class Box(Base):
    """A box."""

    names: list[str] = dataclasses.field(default_factory=list)
    """What it is called."""


class Packet(msgspec.Struct, frozen=True):
    """A packet."""

    box: Box
    """What is in it."""
    weight: float = 1.0


def test_fields_have_the_texts_beneath_them_also_inherited_ones():
    assert [tuple(field)[::3] for field in _fields.fields(Box)] == [
        ("width", "How wide it is, from left to right."),
        ("depth", ""),
        ("names", "What it is called."),
    ]
    assert [field.default for field in _fields.fields(Box)] == [_fields.REQUIRED, 2, []]
    assert _fields.meanings(Packet) == {"box": "What is in it."}
    assert list(_fields.types_by_name(Packet)) == ["box", "weight"] and _fields.types_by_name(Packet)["weight"] is float


def test_a_class_without_source_has_no_texts():
    made = dataclasses.make_dataclass("Made", [("x", int, 1)])
    assert _fields.meanings(made) == {}
    assert [field.name for field in _fields.fields(made)] == ["x"]


def test_help_lists_the_fields_and_the_summary_does_not():
    assert (
        Box.__doc__
        == "A box.\n\nFields:\n    width: How wide it is, from left to right.\n    names: What it is called."
    )
    assert _fields.summary(Box) == "A box."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ([("cohort.round", 3)], r"did you mean 'rounds'\? \(Number of rounds\)"),
        ([("client.batch", "x")], r"must be a whole number, got 'x' \(Number of records per local step\)"),
        ([("client.batch", 0)], r"expected batch >= 1, got batch=0 in \[client\]"),
        ([("performance.chunk", 0)], r"expected chunk >= 1, got chunk=0 in \[performance\]"),
        ([("task.whiten", {"rank": "many"})], r"task.whiten.rank must be a whole number, got 'many'"),
    ],
)
def test_an_error_about_a_key_says_what_it_means(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse(BASE, changes)


def test_an_error_about_a_protocols_key_says_what_it_means():
    with pytest.raises(ValueError, match=r"did you mean 'beta'\? \(Share of coordinates that a client reports\)"):
        build("ss_double", {"bet": 0.5})
