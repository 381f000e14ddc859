import numpy as np
import pytest

from dovetail.features.synthetic import CHUNK, Synthetic


def images(**settings):
    return np.concatenate(list(Synthetic(**settings).chunks()))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("strokes", (28, 28)), ("leaves", (32, 32, 3)), ("strokes+leaves", (28, 28, 1))],
)
def test_the_first_of_more_images_are_fewer_images(kind, shape):
    more = images(kind=kind, shape=shape, count=CHUNK + 20)
    assert (more.shape, more.dtype) == ((CHUNK + 20, *shape), np.float32)
    assert more.min() >= 0 and more.max() <= 1
    np.testing.assert_array_equal(images(kind=kind, shape=shape, count=30), more[:30])
    assert np.abs(images(kind=kind, shape=shape, count=30, seed=1) - more[:30]).max() > 0.5


def test_strokes_are_thin_and_soft_and_away_from_the_border():
    found = images(kind="strokes", shape=(28, 28), count=CHUNK)
    assert 0.05 < found.mean() < 0.2
    soft = np.mean((found > 0) & (found < 1)) / np.mean(found > 0)
    assert 0.2 < soft < 0.7
    assert found[:, [0, -1]].max() == found[:, :, [0, -1]].max() == 0
    assert len(np.unique(found.reshape(CHUNK, -1), axis=0)) == CHUNK


def test_leaves_are_flat_areas_with_sharp_edges_and_a_little_texture():
    found = images(kind="leaves", shape=(32, 32), count=CHUNK)
    steps = np.abs(np.diff(found, axis=1)).ravel()
    assert 0.4 < found.mean() < 0.6
    assert np.median(steps) < 0.1  # texture within a leaf
    assert np.mean(steps > 0.2) > 0.05  # edges between leaves
    assert np.mean(steps == 0) < 0.05


def test_colours_of_leaves_are_muted():
    found = images(kind="leaves", shape=(32, 32, 3), count=CHUNK)
    spread = found.std(axis=3).mean()  # of independent uniform colours: about .24
    assert 0.08 < spread < 0.16
    assert found.mean(axis=3).std() > 0.2  # light and dark differ as before


def test_both_come_by_turns():
    both = images(kind="strokes+leaves", shape=(28, 28), count=2 * CHUNK)
    assert np.median(both[:CHUNK]) == 0 < np.median(both[CHUNK:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "dots", "shape": (28, 28)}, "expected kind to be one of strokes, leaves"),
        ({"kind": "leaves", "shape": (28, 30)}, "expected square images"),
        ({"kind": "leaves", "shape": (28, 28, 2)}, "expected square images"),
        (
            {"kind": "strokes", "shape": (32, 32, 3)},
            "strokes are grey: images in colour are of kind 'leaves', not 'strokes'",
        ),
        ({"kind": "leaves", "shape": (28, 28), "count": 0}, "expected count >= 1"),
    ],
)
def test_other_images_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Synthetic(**settings)
