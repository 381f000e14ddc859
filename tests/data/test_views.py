"""Views are what their names say, and records of the same client."""

import numpy as np
import pytest

from dovetail.data import views
from dovetail.data._base import Clients, Dataset

RNG = np.random.default_rng(0)
GREY = RNG.uniform(0, 1, (3, 6, 5)).astype(np.float32)
COLOUR = RNG.uniform(0, 1, (2, 5, 6, 3)).astype(np.float32)
OWN = [lambda images: 1 - images, lambda images: images * 0]


def narrow(images):
    return images[:, 1:]


def dataset(inputs):
    labels = np.arange(len(inputs)) % 2
    return Dataset(inputs=inputs, labels=labels, test_inputs=inputs, test_labels=labels, num_classes=2)


@pytest.mark.parametrize("images", [GREY, COLOUR], ids=["grey", "colour"])
class TestImages:
    def test_shifts_are_exact_and_repeat_the_edge(self, images):
        moved = np.asarray(views.shift(1, 0)(images))
        np.testing.assert_array_equal(moved[:, 1:], images[:, :-1])
        np.testing.assert_array_equal(moved[:, 0], images[:, 0])
        moved = np.asarray(views.shift(0, -2)(images))
        np.testing.assert_array_equal(moved[:, :, :-2], images[:, :, 2:])

    def test_turning_by_nothing_and_by_a_right_angle_is_exact(self, images):
        np.testing.assert_array_equal(views.rotate(0.0)(images), images)
        np.testing.assert_array_equal(views.zoom(1.0)(images), images)
        square = images[:, :5, :5]
        np.testing.assert_allclose(views.rotate(90.0)(square), np.rot90(square, axes=(1, 2)), atol=1e-6)

    def test_flip_is_its_own_inverse_and_not_nothing(self, images):
        once = np.asarray(views.flip(images))
        np.testing.assert_array_equal(views.flip(once), images)
        np.testing.assert_array_equal(once[:, :, 0], images[:, :, -1])

    def test_a_view_looks_at_one_image_at_a_time(self, images):
        for view in views.parse_views(["shift:1", "rotate:8", "flip", "zoom:1.2"]):
            np.testing.assert_array_equal(view(images)[1:], view(images[1:]))
            assert np.asarray(view(images)).shape == images.shape


def test_zoom_enlarges_and_turns_are_opposite():
    ramp = np.tile(np.arange(9.0, dtype=np.float32), (1, 9, 1))
    np.testing.assert_allclose(np.asarray(views.zoom(2.0)(ramp))[0, 4], 4 + (np.arange(9) - 4) / 2)
    there, back = views.parse_views(["rotate:8"])[1:]
    np.testing.assert_allclose(np.asarray(back(there(ramp)))[0, 3:6, 3:6], ramp[0, 3:6, 3:6], atol=1e-5)


def test_a_list_of_views_is_read():
    assert len(views.parse_views([])) == 1
    assert len(views.parse_views(["shift:1", "rotate:8", "flip", "zoom:1.1"])) == 1 + 4 + 2 + 1 + 1
    assert views.parse_views([f"{__name__}:OWN", f"{__name__}:narrow"])[1:] == (*OWN, narrow)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mirror", "did you mean|expected"),
        ("flip:2", "without an amount"),
        ("rotate:much", "with a number"),
        ("rotate", "with a number"),
        ("shift:0.5", "whole pixels"),
        ("zoom:0", "expected amount > 0"),
        (f"{__name__}:GREY", "function of images"),
    ],
)
def test_what_is_no_view_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        views.parse_views([text])


def test_expanded_inputs_have_the_views_of_a_record_one_after_the_other():
    data = views.add_views(dataset(GREY), ["flip", "shift:1"])
    assert data.views == 6
    assert data.inputs.shape == (18, 6, 5)
    np.testing.assert_array_equal(data.inputs[6], GREY[1])
    np.testing.assert_array_equal(data.inputs[7], GREY[1, :, ::-1])
    assert len(data.labels) == 3
    assert views.add_views(dataset(GREY), []).views == 1


def test_bytes_stay_bytes():
    pixels = (GREY * 255).astype(np.uint8)
    data = views.add_views(dataset(pixels), ["rotate:8"])
    assert data.inputs.dtype == np.uint8
    turned = np.asarray(views.rotate(8.0)(pixels.astype(np.float32)))
    assert np.abs(data.inputs[1::3] - turned).max() <= 0.5


def test_what_cannot_be_expanded_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="expected images"):
        views.add_views(dataset(GREY.reshape(3, -1)), ["flip"])
    with pytest.raises(ValueError, match="keep the shape"):
        views.add_views(dataset(GREY), [f"{__name__}:narrow"])
    monkeypatch.setattr(views, "_LARGEST", 4 * GREY.nbytes)
    views.add_views(dataset(GREY), ["flip"])
    with pytest.raises(ValueError, match="at most"):
        views.add_views(dataset(GREY), ["shift:1"])
    with pytest.raises(ValueError, match="one label for each 2 rows"):
        Dataset(inputs=GREY, labels=[0, 1, 0], test_inputs=GREY, test_labels=[0, 1, 0], num_classes=2, views=2)


def test_views_of_a_clients_records_are_the_clients_rows():
    held = Clients.from_rows(np.array([[2, 0], [1, 1]]), np.array([2, 1])).with_views(3)
    np.testing.assert_array_equal(held.records, [6, 7, 8, 0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(held.counts, [6, 3])


def brighter(images):
    return images + 200


def darker(images):
    return images - 200


def test_bytes_that_a_view_drives_out_of_range_stay_at_its_ends():
    """A cast alone would make 300 of 255 + 45, and 44 of that."""
    data = dataset(np.array([[[0, 100]], [[200, 255]]], np.uint8))
    rows = views.add_views(data, [f"{__name__}:brighter", f"{__name__}:darker"]).inputs.reshape(2, 3, 2)
    np.testing.assert_array_equal(rows[:, 1], [[200, 255], [255, 255]])
    np.testing.assert_array_equal(rows[:, 2], [[0, 0], [0, 55]])
