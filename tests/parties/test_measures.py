"""Measures: statistics beside updates, in the norm that is accounted, and held-out users by their keys."""

import math
import secrets

import numpy as np
import pytest
from sharing import Sharing, Straight, close, open_round

from dovetail.parties.common.guarantees import certify_task
from dovetail.parties.common.measures import Measure, append_measures, is_held_out, read_measures, update_norm

EVALUATION = Measure(kind="evaluation", weight=0.3)
LABELS = Measure(kind="labels", classes=3, weight=0.3)
AGE = Measure(kind="histogram", fact="age", edges=(20.0, 40.0, 60.0), weight=0.3)
CLIP = Measure(kind="within_clip", weight=0.3)
ALL = (EVALUATION, LABELS, AGE, CLIP)
FACTS = {"loss": 0.5, "accuracy": 0.75, "labels": [2, 0, 2], "age": 41.0}


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize(
    "facts",
    [
        FACTS,
        {**FACTS, "loss": math.inf, "accuracy": 7.0},
        {**FACTS, "loss": math.nan, "labels": [0, 0, 0]},
        {**FACTS, "age": -1e300},
    ],
)
def test_what_a_user_reports_has_the_norm_that_is_accounted(held_out, facts):
    for scale in (0.0, 0.5, 1e6):
        whole = append_measures(ALL, np.full(20, scale), facts, clip_norm=2.0, held_out=held_out)
        assert np.linalg.norm(whole.astype(np.float64)) <= 2.0 * (1 + 1e-6)
        assert len(whole) == 20 + 3 + 3 + 4 + 2


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(
    ("facts", "as_if"),
    [
        ({}, {}),
        ({"accuracy": 7.0}, {"accuracy": 1.0}),
        ({"accuracy": -7.0}, {"accuracy": 0.0}),
        ({"loss": -1.0}, {"loss": 0.0}),
        *(({"loss": loss}, {"loss": 5.0}) for loss in (6.0, math.inf, -math.inf, math.nan)),
        ({"labels": [0, 0, 0]}, {}),
        ({"labels": [0.25, 0, 0.25]}, {}),
    ],
)
def test_every_measure_of_its_own_has_norm_one_at_most(facts, as_if, held_out, within):
    """Whatever a user measured; what is out of range counts as the nearest end, and no number at all as the worst."""
    for measure in ALL:
        vector = measure.vector_of_facts({**FACTS, **facts}, held_out=held_out, within=within)
        assert vector.shape == (measure.size,) and np.linalg.norm(vector) <= 1 + 1e-12
        if "labels" not in facts:
            np.testing.assert_array_equal(
                vector, measure.vector_of_facts({**FACTS, **as_if}, held_out=held_out, within=within)
            )
    labels = LABELS.vector_of_facts({**FACTS, **facts}, held_out=held_out, within=within)
    assert labels.sum() == pytest.approx(min(1.0, sum({**FACTS, **facts}["labels"])))


def test_quantiles_of_noisy_shares_do_not_fall_back():
    """Noise may make the share of an interval negative: what is below a later edge is no less for it."""
    for counts, median in (([60.0, -20.0, 30.0, 30.0], 20.0), ([55.0, -25.0, 5.0, 65.0], 20.0)):
        found = AGE.read_statistic(np.array(counts), 1.0)["quantiles"]
        assert found["0.5"] == median
        assert list(found.values()) == sorted(found.values())


def test_measures_are_read_back_from_sums():
    """100 users, every tenth held out, no noise."""
    total = np.zeros(2 + 12)
    for user in range(100):
        facts = {"loss": 1.0, "accuracy": 0.6, "labels": [1, 1, 2], "age": float(user)}
        update = np.array([3.0, 0.0]) if user % 2 else np.zeros(2)
        total += append_measures(ALL, update, facts, clip_norm=2.0, held_out=user % 10 == 0)
    found = read_measures(ALL, (total / 100)[2:], size=100, clip_norm=2.0, std=0.0)
    assert found["evaluation"]["users"] == pytest.approx(10, rel=1e-5)
    assert found["evaluation"]["accuracy"] == pytest.approx(0.6, rel=1e-5)
    assert found["evaluation"]["loss"] == pytest.approx(1.0, rel=1e-5)
    assert found["labels"]["shares"] == pytest.approx([0.25, 0.25, 0.5], rel=1e-5)
    assert found["age"]["shares"] == pytest.approx([0.2, 0.2, 0.2, 0.4], rel=1e-5)
    assert found["age"]["quantiles"] == {"0.25": 40.0, "0.5": 60.0, "0.75": 60.0, "0.9": 60.0}
    assert found["within_clip"]["share"] == pytest.approx(40 / 90, rel=1e-5)


def test_who_is_held_out_follows_from_key_and_task():
    """A share of .2 of 5,000 keys: within 6 standard deviations; another task holds out others."""
    keys = [secrets.token_bytes(16) for _ in range(5000)]
    first, second = ([is_held_out(bytes([task]) * 32, key, 0.2) for key in keys] for task in (1, 2))
    assert abs(sum(first) - 1000) < 6 * math.sqrt(5000 * 0.16)
    assert first != second
    assert not any(is_held_out(bytes(32), key, 0.0) for key in keys[:100])
    assert all(is_held_out(bytes(32), key, 1.0) for key in keys[:100])


def test_a_round_measures_and_the_statement_stays_the_same(tmp_path):
    measures = (EVALUATION, CLIP)
    settings = {"noise": "aggregators", "clip_norm": 1.0, "noise_multiplier": 0.05}
    sharing = Sharing(tmp_path / "with", dim=4 + 5, clients=40, measures=measures, held_out=0.5, settings=settings)
    plain = Sharing(tmp_path / "without", dim=4 + 5, clients=40, settings=settings)
    assert certify_task(sharing.task, 2)[0].eps == certify_task(plain.task, 2)[0].eps
    analyzer, parties = sharing.analyzer(initial=4), [sharing.aggregator(i) for i in range(2)]
    open_round(parties, analyzer)
    for user in range(40):
        facts = {"loss": 1.0, "accuracy": 0.5}
        sharing.accept(parties, user, update=np.full(4, 0.01, np.float32), facts=facts)
    close(parties)
    for index, party in enumerate(parties):
        party.forward(1, Straight(analyzer, index))
    (round,) = analyzer.privacy()["history"]
    found, held_out = (
        round["measured"]["evaluation"],
        sum(is_held_out(sharing.task.task_id, user.public.key_id, 0.5) for user in sharing.users),
    )
    assert abs(found["users"] - held_out) < 6 * found["std"] * held_out
    assert abs(found["accuracy"] - 0.5) < 6 * found["std"]
    assert abs(round["measured"]["within_clip"]["share"] - 1) < 6 * round["measured"]["within_clip"]["std"]


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        ({"kind": "labels"}, "expected classes >= 2"),
        ({"kind": "evaluation", "classes": 3}, "expected classes >= 2"),
        ({"kind": "histogram", "edges": (1.0, 2.0)}, "a histogram needs the name of a fact"),
        ({"kind": "histogram", "fact": "age", "edges": (2.0, 1.0)}, "expected edges in increasing order"),
        ({"kind": "evaluation", "largest": -1.0}, "largest"),
    ],
)
def test_a_measure_that_makes_no_sense_is_refused(measure, words):
    with pytest.raises(ValueError, match=words):
        Measure(**measure)


def test_measures_leave_something_for_the_update(tmp_path):
    with pytest.raises(ValueError, match="squared weights"):
        update_norm((Measure(kind="evaluation", weight=0.8), Measure(kind="within_clip", weight=0.8)), 1.0)
    with pytest.raises(ValueError, match=r"held_out=0\.5 without any measure"):
        Sharing(tmp_path, held_out=0.5)
    with pytest.raises(ValueError, match="clipped in norm"):
        Sharing(tmp_path / "other", "ss_simple", measures=(EVALUATION,))


def test_facts_that_are_missing_are_named(tmp_path):
    with pytest.raises(ValueError, match="the task measures 'accuracy'"):
        append_measures((EVALUATION,), np.zeros(2), {"loss": 1.0}, clip_norm=1.0, held_out=True)
