"""Records are drawn independently, from the users that are there, and nothing else."""

import numpy as np
import pytest
from scipy import stats

from dovetail.data import Clients
from dovetail.randomness import Randomness
from dovetail.sampling.items import ItemDraws

SUBJECTS = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3], np.int32)
CLIENTS = Clients.from_owners(
    np.array([0, 1, 3, 5, 6, 2, 4, 7, 8]), np.array([0, 0, 0, 0, 0, 2, 2, 2, 2]), num_clients=4
)  # record 9 is nobody's, users 1 and 3 hold nothing
EVERYONE = np.arange(4)


def draws(rate=0.4, seed=0):
    return ItemDraws(clients=CLIENTS, subjects=SUBJECTS, rate=rate, randomness=Randomness.from_seed(seed))


def test_each_record_joins_alone_with_the_rate():
    joined = np.zeros((3000, 10), bool)
    for index in range(len(joined)):
        joined[index, draws().records_of_step(index, EVERYONE)] = True
    assert not joined[:, 9].any()
    held = joined[:, :9]
    assert stats.binomtest(int(held.sum()), held.size, 0.4).pvalue > 1e-4
    assert stats.binomtest(int(held.sum()), held.size, 0.415).pvalue < 1e-2
    correlation = np.corrcoef(held.T) - np.eye(9)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(len(held)), "36 pairs, alpha below 1e-3"
    assert np.abs(np.corrcoef(held[:-1, 0], held[1:, 0])[0, 1]) < 4 / np.sqrt(len(held)), "rounds are independent"


def test_only_users_that_are_there_give_records():
    everyone = draws().records_of_step(3, EVERYONE)
    assert set(draws().records_of_step(3, np.array([2]))) == set(everyone) & {2, 4, 7, 8}, (
        "and one user's draw is its own"
    )
    assert len(draws().records_of_step(3, np.array([1, 3]))) == 0


def test_batches_hold_each_users_own_records_step_by_step():
    rows = draws(0.7).records_by_user_and_step(5, np.array([0, 1, 2]), steps=3)
    assert rows.shape[:2] == (3, 3)
    held = [{0, 1, 3, 5, 6}, set(), {2, 4, 7, 8}]
    for user, mine in enumerate(held):
        for step in range(3):
            batch = rows[user, step][rows[user, step] >= 0]
            assert set(batch) <= mine
            assert len(set(batch)) == len(batch)
            assert set(batch) == set(draws(0.7).records_of_step(5, np.array([user]), step=step))
    steps = [tuple(rows[0, step]) for step in range(3)]
    assert len(set(steps)) > 1, "each step draws anew"
    assert (draws(1.0).records_by_user_and_step(0, EVERYONE, steps=1) >= 0).sum() == 9


def test_groups_count_one_subject_in_one_users_batch():
    np.testing.assert_array_equal(draws(1.0).largest_group_by_user(0, EVERYONE), [2, 0, 2, 0])
    assert draws(1.0).largest_group_of_rounds(3, EVERYONE, steps=1) == 2
    table = {1: 1.0, 2: 3.0}
    scales = draws(1.0).recipe_noise_scales(0, EVERYONE, steps=2, noise_of=table.__getitem__)
    np.testing.assert_allclose(scales, [[3, 3], [1, 1], [3, 3], [1, 1]])


def test_capacity_covers_what_is_drawn():
    for index in range(200):
        assert len(draws(0.5).records_of_step(index, EVERYONE)) <= draws(0.5).capacity
        assert draws(0.5).records_by_user_and_step(index, EVERYONE, steps=1).shape[2] <= max(5, draws(0.5).width)


@pytest.mark.parametrize("rate", [0.0, 1.5, -0.1, float("nan")])
def test_a_rate_is_a_probability(rate):
    with pytest.raises(ValueError, match="expected rate"):
        draws(rate)
