"""What a held-out person adds: bounded by 1, its own alone, and unbiased for the scores; and how sums are read."""

import numpy as np
import pytest

from dovetail.engine.scoring import auc as exact_auc
from dovetail.evaluation import BinaryVectors, ClassVectors, LabelVectors, NumberVectors, People, intervals
from dovetail.evaluation.intervals import Moment

PEOPLE = 60
LAYOUTS = {
    "binary": BinaryVectors(people=PEOPLE),
    "binary, counted": BinaryVectors(people=PEOPLE, counted=True),
    "classes": ClassVectors(people=PEOPLE, classes=5),
    "classes, alone": ClassVectors(people=PEOPLE, classes=5, alone=True),
    "classes, counted": ClassVectors(people=PEOPLE, classes=5, counted=True),
    "labels": LabelVectors(people=PEOPLE, labels=4),
    "labels, alone": LabelVectors(people=PEOPLE, labels=4, alone=True),
    "labels, counted": LabelVectors(people=PEOPLE, labels=4, counted=True),
    "number": NumberVectors(people=PEOPLE),
    "number, counted": NumberVectors(people=PEOPLE, counted=True),
}


def some_records(layout, rng, count):
    """Records of the kind that a layout reads, extreme ones among them."""
    match layout:
        case BinaryVectors():
            scores = rng.choice([-1e30, -1.0, 0.0, 0.3, 1e30], count) * rng.choice([1, 1e-3], count)
            return {"label": rng.integers(0, 2, count), "score": scores, "correct": rng.integers(0, 2, count) * 1.0}
        case ClassVectors():
            return {"label": rng.integers(0, 5, count), "correct": rng.integers(0, 2, count) * 1.0}
        case LabelVectors():
            return {name: rng.integers(0, 2, (count, 4)) * 1.0 for name in ("label", "correct")}
        case NumberVectors():
            return {name: rng.choice([-1.0, 1.0, 0.0, rng.uniform(-1, 1)], count) for name in ("label", "predicted")}
    raise AssertionError(layout)


def some_sums(layout, rng):
    """What earlier rounds may have shown: any numbers at all."""
    return [rng.normal(0, 10.0 ** rng.integers(-3, 4), layout.dim) for _ in range(layout.rounds)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_whatever_a_person_holds_moves_the_sum_by_one_if_removed_and_by_two_if_replaced(name):
    """Random pairs of people, in every round, whatever earlier rounds showed; nobody else's vector changes."""
    layout = LAYOUTS[name]
    rng = np.random.default_rng(0)
    longest = 0.0
    for _ in range(40):
        sums = some_sums(layout, rng)
        owner = np.sort(rng.integers(0, PEOPLE, 200))
        records = some_records(layout, rng, 200)
        victim = int(owner[rng.integers(len(owner))])
        others = owner != victim
        rest = {key: values[others] for key, values in records.items()}
        more = some_records(layout, rng, 7)
        replaced = {key: np.concatenate([rest[key], more[key]]) for key in records}
        for index in range(layout.rounds):
            here = layout.encode_records(records, People(owner, PEOPLE), sums[:index])
            without = layout.encode_records(rest, People(owner[others], PEOPLE), sums[:index])
            other = layout.encode_records(
                replaced, People(np.append(owner[others], [victim] * 7), PEOPLE), sums[:index]
            )
            assert here.shape == (PEOPLE, layout.dim)
            moved = [np.linalg.norm(here - changed, axis=1) for changed in (without, other)]
            assert moved[0][victim] <= 1 + 1e-12
            assert moved[1][victim] <= 2 + 1e-12
            assert all(np.delete(step, victim).max() == 0 for step in moved)
            longest = max(longest, moved[0][victim])
    assert longest > 0.9  # the bound is not idle


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_noise_the_scores_are_those_of_the_people(name):
    """Everybody counts the same, however many records a person has."""
    layout = LAYOUTS[name]
    rng = np.random.default_rng(1)
    records = some_records(layout, rng, 400)
    owner = np.concatenate([np.arange(PEOPLE), rng.integers(0, PEOPLE, 340)])
    people = People(owner, PEOPLE)
    weight = 1 / np.bincount(owner)[owner] / PEOPLE
    if isinstance(layout, NumberVectors):
        records = {"label": rng.uniform(-1, 1, 400), "predicted": rng.uniform(-1, 1, 400)}
    sums = []
    for _ in range(layout.rounds):
        sums.append(layout.encode_records(records, people, sums).sum(axis=0))
    scores = layout.scores_from_sums(sums, 0.0)
    assert scores.people == pytest.approx(PEOPLE)
    if isinstance(layout, NumberVectors):
        mse = weight @ (records["label"] - records["predicted"]) ** 2
        spread = weight @ (records["label"] - weight @ records["label"]) ** 2
        assert scores.metrics["rmse"] == pytest.approx(np.sqrt(mse), rel=1e-9)
        assert scores.metrics["r2"] == pytest.approx(1 - mse / spread, rel=1e-9)
        assert scores.baseline["rmse"] == pytest.approx(np.sqrt(spread), rel=1e-9)
    else:
        right = records["correct"].reshape(400, -1)
        assert scores.metrics["accuracy"] == pytest.approx(weight @ right.mean(axis=1))
        if "label_accuracy" in scores.metrics:
            assert scores.metrics["label_accuracy"] == pytest.approx(weight @ right)
    for metric, value in scores.metrics.items():
        ends = np.array(scores.intervals[metric], float).reshape(-1, 2)
        assert (ends[:, 0] <= np.atleast_1d(value)).all()
        assert (np.atleast_1d(value) <= ends[:, 1]).all()


def test_bins_find_the_area_under_a_curve_whatever_the_range_of_scores():
    """Ten bins, chosen by the first round, are as good as all scores to .001 or so."""
    rng = np.random.default_rng(2)
    size = 40_000
    layout = BinaryVectors(people=size)
    for scale, shift in ((1.0, 0.0), (0.1, -2.6), (4.0, 3.0)):
        label = (rng.random(size) < 0.3).astype(int)
        score = scale * (rng.normal(size=size) + 1.2 * label) + shift
        records = {"label": label, "score": score, "correct": np.ones(size)}
        people = People(np.arange(size), size)
        sums = []
        for _ in range(layout.rounds):
            sums.append(layout.encode_records(records, people, sums).sum(axis=0))
        assert layout.scores_from_sums(sums, 0.0).metrics["auc"] == pytest.approx(exact_auc(score, label), abs=0.002)


def test_where_noise_drowns_the_sums_every_value_stays():
    nothing = np.zeros(10)
    assert intervals.estimate_auc(nothing, nothing, 100.0) == intervals.Estimate(0.5, 0.0, 1.0)
    assert intervals.estimate_fraction(Moment(0.5, 10.0), 20) == intervals.Estimate(0.5, 0.0, 1.0)
    found = intervals.estimate_r2(*[Moment(0.0, 10.0)] * 4, 20)
    assert (found.low, found.high) == (-np.inf, 1.0)


def test_an_interval_is_that_of_wilson_where_there_is_no_noise():
    found = intervals.estimate_fraction(Moment(0.8, 0.0), 100)
    assert (found.low, found.high) == pytest.approx((0.7112, 0.8666), abs=0.001)  # Wilson (1927), z = 1.96


@pytest.mark.parametrize("people", [150, 2000])
def test_intervals_cover_the_scores_of_all_people(people):
    """With the noise of eps 2, of 300 drawings at least 92 %: fewer come up once in a hundred times at 95 %."""
    rng = np.random.default_rng(3)
    size = 100_000
    label = (rng.random(size) < 0.4).astype(int)
    score = rng.normal(size=size) + 1.2 * label - 0.5
    right = ((score > 0) == label).astype(float)
    true = {"accuracy": right.mean(), "auc": exact_auc(score, label)}
    layout = BinaryVectors(people=people)
    std = 3.65 * np.sqrt(layout.rounds)
    hits = dict.fromkeys(true, 0)
    for _ in range(300):
        drawn = rng.integers(0, size, people)
        records = {"label": label[drawn], "score": score[drawn], "correct": right[drawn]}
        sums = []
        for _ in range(layout.rounds):
            exact = layout.encode_records(records, People(np.arange(people), people), sums).sum(axis=0)
            sums.append(exact + std * rng.normal(size=layout.dim))
        found = layout.scores_from_sums(sums, std).intervals
        for name, value in true.items():
            hits[name] += found[name][0] <= value <= found[name][1]
    assert min(hits.values()) >= 276
    assert max(hits.values()) <= 299  # they are no wider than it takes


def test_ends_of_intervals_are_printed_without_crumbs_of_binary_fractions():
    """As README's ten lines print them: a candidate is the nearest number to k / 2000, whose shortest text is short."""
    for mean in np.linspace(0, 1, 101):
        found = intervals.estimate_fraction(Moment(mean, 0.02), 500)
        assert all(len(str(end)) <= len("0.0005") for end in (found.low, found.high)), found
