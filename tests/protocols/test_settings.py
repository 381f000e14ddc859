"""What is no setting is refused before anything runs, for every number that a protocol takes."""

import dataclasses
import math
import types
import typing

import pytest

from dovetail import protocols
from dovetail.events import Everyone
from dovetail.protocols import Cohort

CLIENTS, DIM = 150, 40
COHORT = Cohort(participation=Everyone(), size=CLIENTS, min_size=CLIENTS)
FILLED_IN = {"claimed_eps"}  # by a recipe, never by a user


def settings_of(cls):
    dim = cls.only_dim or DIM
    settings = cls.variants(dim, CLIENTS)[0]
    return {**cls.example(dim, settings), **settings}


NUMBERS = [
    (name, field.name, "float" in str(field.type))
    for name, cls in protocols.PROTOCOLS.items()
    for field in dataclasses.fields(cls)
    if ("float" in str(field.type) or "int" in str(field.type)) and field.name not in FILLED_IN
]


def settled(name, **changed):
    cls = protocols.PROTOCOLS[name]
    return protocols.build(name, {**settings_of(cls), **changed}).settle(COHORT, cls.only_dim or DIM)


@pytest.mark.parametrize("name", protocols.PROTOCOLS)
def test_settings_as_they_are_pass(name):
    assert settled(name)


@pytest.mark.parametrize(("name", "field", "real"), NUMBERS)
def test_no_setting_is_negative_infinite_no_number_or_a_word(name, field, real):
    for value in (-1.0 if real else -1, math.nan, math.inf, -math.inf, "nonsense", *([] if real else [1.5])):
        with pytest.raises((ValueError, TypeError)):
            settled(name, **{field: value})


def one_of(hint):
    """The words that a field takes, if it takes no other ones."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = [part for part in parts if typing.get_origin(part) is typing.Literal]
    return typing.get_args(words[0]) if words and str not in parts else ()


WORDS = [
    (name, field)
    for name, cls in protocols.PROTOCOLS.items()
    for field, hint in typing.get_type_hints(cls).items()
    if typing.get_origin(hint) is not typing.ClassVar and one_of(hint) and hint is not bool
]


@pytest.mark.parametrize(("name", "field"), WORDS)
def test_a_word_that_means_nothing_is_refused_by_the_name_of_its_setting(name, field):
    """Also where the protocol's class is called, and no file is read."""
    cls = protocols.PROTOCOLS[name]
    with pytest.raises(ValueError, match=f"{field}='nonsense'"):
        cls(**{**settings_of(cls), field: "nonsense"})


def test_a_slot_is_filled_to_two_messages_beside_the_colluders_or_more():
    protocol = protocols.build("ss_double", {"eps_local": 0.5, "beta": 0.2, "pad_to": 5})
    enough, too_many = (
        Cohort(participation=Everyone(), size=9, min_size=9, colluders=colluders) for colluders in (3, 4)
    )
    assert protocol.padded_size(enough) == 5
    with pytest.raises(ValueError, match="expected pad_to - colluders >= 2, got pad_to=5 with 4 colluders"):
        protocol.padded_size(too_many)
