import numpy as np
import pytest

from dovetail.events import Disjoint, Everyone, FixedSize, Poisson
from dovetail.randomness import Randomness
from dovetail.sampling.schedule import Schedule


def schedule(kind, **changes):
    settings = {"kind": kind, "population": 100, "size": 30, "rounds": 6, "seed": 1} | changes
    return Schedule(randomness=Randomness.from_seed(settings.pop("seed")), **settings)


def test_disjoint_batches_never_meet_within_an_epoch():
    plan = schedule("disjoint")
    assert plan.rounds_per_epoch == 3
    for epoch in range(2):
        drawn = np.concatenate([plan.draw_users(3 * epoch + batch) for batch in range(3)])
        assert len(np.unique(drawn)) == 90
        assert plan.cohort(3 * epoch).participation == Disjoint(epoch=epoch)
    assert not np.array_equal(plan.draw_users(0), plan.draw_users(3)), "each epoch deals anew"


def test_fixed_size_is_uniform():
    plan = schedule("fixed", rounds=2000)
    counts = np.bincount(np.concatenate([plan.draw_users(i) for i in range(2000)]), minlength=100)
    assert counts.sum() == 2000 * 30
    z = (counts - 600) / np.sqrt(2000 * 0.3 * 0.7)
    assert np.abs(z).max() < 4.5
    assert plan.cohort(0).participation == FixedSize(size=30, population=100)


def test_poisson_draws_are_independent_coins():
    plan = schedule("poisson", rounds=2000)
    sizes = np.array([len(plan.draw_users(i)) for i in range(2000)])
    assert abs(sizes.mean() - 30) < 4.5 * np.sqrt(21 / 2000)
    assert 0.85 < sizes.var() / 21 < 1.15, "binomial variance: neither fixed-size (0) nor twice as much"
    assert plan.cohort(0).participation == Poisson(prob=0.3)
    assert (sizes <= plan.capacity).all()


def test_everyone_and_dropout():
    plan = schedule("everyone", size=100)
    np.testing.assert_array_equal(plan.draw_users(4), np.arange(100))
    assert plan.cohort(0).participation == Everyone()
    lossy = schedule("everyone", size=100, dropout=0.25)
    left = [len(lossy.draw_users(i)) for i in range(400)]
    assert abs(np.mean(left) - 75) < 4.5 * np.sqrt(100 * 0.25 * 0.75 / 400)
    assert lossy.cohort(0).size == 100, "the public size does not follow the dropouts"


def test_draws_depend_on_seed_and_round_alone():
    one, same, other = schedule("fixed"), schedule("fixed"), schedule("fixed", seed=2)
    np.testing.assert_array_equal(one.draw_users(3), same.draw_users(3))
    assert not np.array_equal(one.draw_users(3), one.draw_users(4))
    assert not np.array_equal(one.draw_users(3), other.draw_users(3))


SIZES = (10, 20, 40, 80, 100, 5)


def test_a_fixed_size_schedule_draws_what_it_says():
    plan = schedule("fixed", size=10, sizes=SIZES)
    assert tuple(len(plan.draw_users(i)) for i in range(6)) == SIZES
    assert [plan.cohort(i).size for i in range(6)] == list(SIZES)
    assert [plan.cohort(i).participation for i in range(6)] == [FixedSize(size=m, population=100) for m in SIZES]
    assert plan.capacity == 100


def test_a_poisson_schedule_draws_with_each_rounds_probability():
    """Means over 400 seeds, within 4.5 standard errors of the planned size."""
    plans = [schedule("poisson", size=10, sizes=SIZES, seed=seed) for seed in range(400)]
    drawn = np.array([[len(plan.draw_users(i)) for i in range(6)] for plan in plans])
    wanted = np.array(SIZES)
    error = 4.5 * np.sqrt(wanted * (1 - wanted / 100) / 400)
    assert (np.abs(drawn.mean(axis=0) - wanted) <= error).all()
    assert [plans[0].cohort(i).participation for i in range(6)] == [Poisson(prob=m / 100) for m in SIZES]
    assert drawn.max() <= plans[0].capacity


def test_noise_scales_are_public_beside_the_size():
    plan = schedule("fixed", rounds=3, noise_scales=(1.0, 0.5, 2.0))
    assert [plan.cohort(i).noise_scale for i in range(3)] == [1.0, 0.5, 2.0]
    assert schedule("fixed").cohort(5).noise_scale == 1.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"kind": "disjoint", "sizes": SIZES},
            "expected one cohort size with kind='disjoint', got a schedule of sizes",
        ),
        ({"kind": "everyone", "size": 100, "sizes": (100,) * 6}, "expected one cohort size with kind='everyone'"),
        ({"kind": "secret", "sizes": (30,) * 6}, "expected one cohort size with kind='secret'"),
        ({"kind": "secret", "min_size": 101}, "expected 0 <= min_size <= 100"),
        ({"sizes": (30, 30)}, "expected a size for each of the 6 rounds, got 2 sizes"),
        ({"sizes": (30,) * 5 + (101,)}, "expected 1 <= size <= 100, got size=101"),
        ({"kind": "poisson", "sizes": (30,) * 5 + (0,)}, "expected 1 <= size <= 100, got size=0"),
        ({"sizes": (30,) * 5 + (2.5,)}, "expected size to be a whole number, got size=2.5"),
        ({"size": 101}, r"expected at most 100 clients per round \(all there are\), got size=101"),
        ({"size": 0}, "expected size >= 1"),
        ({"rounds": 0}, "expected rounds >= 1"),
        ({"dropout": 1.5}, "expected 0 <= dropout <= 1"),
        ({"min_size": 31}, "expected 0 <= min_size <= 30"),
        ({"kind": "everyone"}, "expected size = 100 with kind='everyone'"),
        ({"kind": "sometimes"}, "expected kind to be one of"),
        ({"size": 3.5}, "expected size to be a whole number"),
    ],
)
def test_impossible_schedules_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        schedule(changes.pop("kind", "fixed"), **changes)
