import math

import numpy as np
import pytest

from dovetail.features import patches
from dovetail.features.patches import Patches, sample_dictionary
from dovetail.features.synthetic import Synthetic

SMALL = Synthetic(kind="strokes+leaves", shape=(28, 28), count=600, seed=1)


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setattr(patches, "_IMAGES", 600)


def reference(image, found):
    """The features of one grey image, patch by patch, in float64."""
    side, last = found.side, 28 - found.side + 1
    sums, counts = np.zeros((2, 3, 3, len(found.filters))), np.zeros((3, 3))
    for row in range(last):
        for column in range(last):
            patch = image[row : row + side, column : column + side].astype(np.float64).ravel()
            patch = (patch - patch.mean()) / math.sqrt(patch.var() + 10 / 255**2)
            white = found.whiten.astype(np.float64) @ patch
            along = found.filters @ white / math.sqrt(white @ white + 1e-4)
            for where in [(i, j) for i in around(row, last) for j in around(column, last)]:
                counts[where] += 1
                sums[0][where] += np.maximum(along - 0.25, 0)
                sums[1][where] += np.maximum(-along - 0.25, 0)
    roots = np.sqrt(sums / counts[..., None]).ravel()
    roots -= roots.mean()
    return roots / np.linalg.norm(roots)


def around(place, places):
    """Which of the first, the middle and the last half a place is in."""
    quarter = int(4 * (place + 0.5) / places)
    return [window for window in range(3) if window <= quarter <= window + 1]


def test_responses_equal_their_definition():
    block = Patches(shape=(28, 28), side=5, filters=12)
    images = np.concatenate(list(Synthetic(kind="strokes", shape=(28, 28), count=3).chunks()))
    found = block.apply(images)
    assert found.shape == (3, block.size) == (3, 216)
    expected = reference(images[1], sample_dictionary(SMALL, side=5, filters=12))
    np.testing.assert_allclose(found[1], expected, atol=1e-5)
    assert np.abs(found[0] - expected).max() > 0.01


def test_a_dictionary_is_white_and_of_unit_norm():
    found = sample_dictionary(SMALL, side=5, filters=200)
    np.testing.assert_allclose(np.linalg.norm(found.filters, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(found.whiten, found.whiten.T, atol=1e-4)
    second = found.filters.T @ found.filters / 200
    assert np.linalg.eigvalsh(second)[-1] < 0.2  # patches as they are have one direction with more than a third
    assert len(np.unique(found.filters, axis=0)) > 190  # the corner of a stroke may come twice


@pytest.mark.parametrize("shape", [(28, 28), (32, 32, 3)])
def test_an_image_of_one_colour_is_zero_and_others_are_of_unit_norm(shape):
    images = np.full((3, *shape), 0.3, np.float32)
    images[1] = 0
    images[2, 10:20, 5:9] = 0.9
    found = Patches(shape=shape, side=6, filters=8).apply(images)
    np.testing.assert_array_equal(found[:2], 0)
    assert np.linalg.norm(found[2]) == pytest.approx(1, abs=1e-5)


def test_a_row_depends_on_its_own_image_only():
    images = np.concatenate(list(Synthetic(kind="leaves", shape=(28, 28), count=9).chunks()))
    block = Patches(shape=(28, 28), side=5, filters=12)
    np.testing.assert_allclose(block.apply(images)[5], block.apply(images[5:6])[0], atol=1e-6)


@pytest.mark.parametrize("settings", [{"side": 1}, {"side": 15}, {"filters": 0}, {"filters": 601}])
def test_other_patches_are_refused(settings):
    with pytest.raises(ValueError, match="expected"):
        Patches(**{"shape": (28, 28), "side": 5, "filters": 12, **settings})
