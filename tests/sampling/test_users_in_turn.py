"""Schedules in which users come rarely, and the book that holds them to it."""

import itertools

import numpy as np
import pytest

from dovetail.events import Separated
from dovetail.randomness import Randomness
from dovetail.sampling import Schedule, UploadBook


def separated(**changes):
    settings = {"population": 100, "size": 30, "rounds": 10} | changes
    return Schedule(kind="separated", randomness=Randomness.from_seed(1), **settings)


@pytest.mark.parametrize(("population", "size", "rounds"), [(100, 30, 10), (60, 20, 7), (7, 7, 3), (10, 3, 1)])
def test_draws_keep_to_what_the_schedule_says(population, size, rounds):
    plan = separated(population=population, size=size, rounds=rounds)
    said = plan.cohort(0).participation
    assert isinstance(said, Separated)
    assert said.rounds == rounds
    came = {user: [] for user in range(population)}
    for index in range(rounds):
        assert plan.cohort(index).participation == said
        drawn = plan.draw_users(index)
        assert len(drawn) == len(set(drawn.tolist())) == size
        for user in drawn.tolist():
            came[user].append(index)
    counts = [len(visits) for visits in came.values()]
    assert max(counts) == said.uploads
    assert max(counts) - min(counts) <= 1, "all users take turns, also those that no whole batch has room for"
    gaps = [later - earlier for visits in came.values() for earlier, later in itertools.pairwise(visits)]
    assert min(gaps, default=said.separation) >= said.separation


def test_a_limit_that_so_many_rounds_exceed_is_refused():
    separated(rounds=10, uploads=3)
    with pytest.raises(ValueError, match="ask somebody 3 times, and uploads=2 is the limit: plan at most 6 rounds"):
        separated(rounds=10, uploads=2)
    with pytest.raises(ValueError, match="kind='separated' only"):
        Schedule(kind="fixed", population=9, size=3, rounds=3, uploads=1, randomness=Randomness.from_seed(1))


def book(**changes):
    return UploadBook(Separated(**({"uploads": 2, "separation": 3, "rounds": 9} | changes)))


def users(*ids):
    return np.array(ids, np.int32)


def test_a_user_that_comes_too_often_or_too_soon_is_refused():
    uploads = book()
    uploads.admit(users(1, 2), index=0)
    uploads.skip(index=1)
    with pytest.raises(
        ValueError, match="user 2 was promised 3 rounds or more between two uploads, got rounds 0 and 2"
    ):
        uploads.admit(users(3, 2), index=2)
    uploads.admit(users(3), index=2)  # nothing of the refused round was noted
    uploads.admit(users(1), index=3)
    for index in range(4, 8):
        uploads.skip(index=index)
    with pytest.raises(ValueError, match="user 1 was promised to take part 2 times at the most"):
        uploads.admit(users(1), index=8)


@pytest.mark.parametrize("index", [-1, 9])
def test_rounds_that_nobody_was_promised_are_refused(index):
    with pytest.raises(ValueError, match="promised 9 rounds"):
        book().admit(users(1), index=index)


def test_a_user_is_in_a_round_once():
    with pytest.raises(ValueError, match="once in a round"):
        book().admit(users(4, 4), index=0)


@pytest.mark.parametrize("index", [1, 5])
def test_rounds_come_in_their_turn(index):
    """Noise is taken back round by round: with a round left out, uploads would be nearer than was promised."""
    uploads = book()
    with pytest.raises(ValueError, match=r"round 0 .* is next"):
        uploads.admit(users(1), index=index)
    with pytest.raises(ValueError, match=r"round 0 .* is next"):
        uploads.skip(index=index)
