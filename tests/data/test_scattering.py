import dataclasses
import hashlib
import math

import idx_files
import numpy as np
import pytest

from dovetail.data import Dataset, scattering

NUM = 19  # more than a batch, and not a multiple of it


def dataset(inputs=None):
    inputs = idx_files.images(NUM) if inputs is None else inputs
    labels = np.zeros(len(inputs), np.int32)
    return Dataset(inputs=inputs, labels=labels, test_inputs=inputs[:3], test_labels=labels[:3], num_classes=10)


def strokes(num):
    """Images with edges: rectangles on black."""
    images = np.zeros((num, 28, 28), np.float32)
    for i, (top, left, height, width) in enumerate(np.random.default_rng(0).integers(2, 14, (num, 4))):
        images[i, top : top + height, left : left + width] = 1
    return images


def morlet(j, angle):
    """psi on the 32 x 32 torus, pixel by pixel, by its definition; the images of the torus are summed."""
    sigma, xi, slant = 0.8 * 2**j, 3 * math.pi / 4 / 2**j, 0.5
    wave, bell = np.zeros((32, 32), complex), np.zeros((32, 32))
    for row in range(32):
        for column in range(32):
            for y in (row - 64, row - 32, row, row + 32):
                for x in (column - 64, column - 32, column, column + 32):
                    u = y * math.cos(angle) + x * math.sin(angle)
                    v = -y * math.sin(angle) + x * math.cos(angle)
                    g = math.exp(-(u * u + slant * slant * v * v) / (2 * sigma * sigma))
                    g *= slant / (2 * math.pi * sigma * sigma)
                    wave[row, column] += g * complex(math.cos(xi * u), math.sin(xi * u))
                    bell[row, column] += g
    return wave - bell * wave.sum() / bell.sum()


def gaussian(sigma):
    place = np.arange(32)
    near = np.minimum(place, 32 - place)  # the torus's other images weigh less than exp(-100)
    return np.exp(-(near[:, None] ** 2 + near[None, :] ** 2) / (2 * sigma**2)) / (2 * math.pi * sigma**2)


def convolve(signal, kernel):
    return np.fft.ifft2(np.fft.fft2(signal) * np.fft.fft2(kernel))


def reference(image, psi, phi):
    """The transform of one image in float64, channel by channel."""
    x = np.pad(image.astype(np.float64), 2, mode="reflect")
    fine = [np.abs(convolve(x, kernel)) for kernel in psi[0]]
    coarse = [np.abs(convolve(x, kernel)) for kernel in psi[1]]
    second = [np.abs(convolve(signal, kernel)) for signal in fine for kernel in psi[1]]
    channels = [convolve(signal, phi).real[::4, ::4] for signal in (x, *fine, *coarse, *second)]
    assert np.shape(channels) == (81, 8, 8)
    rows = []
    for start in range(0, 81, 3):
        group = np.array(channels[start : start + 3])
        rows.append((group - group.mean()) / math.sqrt(group.var() + 1e-5))
    row = np.concatenate(rows).ravel()
    return row / np.linalg.norm(row)


def test_the_transform_equals_its_definition():
    images = np.concatenate([strokes(3), idx_files.images(13).astype(np.float32) / 255])  # 16: compiled once
    psi = [[morlet(j, math.pi * k / 8) for k in range(8)] for j in range(2)]
    phi = gaussian(1.6)
    found = np.asarray(scattering.transform(images))
    assert found.shape == (16, 5184)
    for image, row in zip(images[:5], found, strict=False):
        expected = reference(image, psi, phi)
        np.testing.assert_allclose(row, expected, atol=3e-6)
        assert np.abs(row - reference(image.T, psi, phi)).max() > 1e-3  # a near miss is a miss


def test_rows_have_unit_norm_and_a_black_image_none():
    images = strokes(16)
    images[14:] = 0
    images[14, 9, 9] = 1 / 255
    found = np.asarray(scattering.transform(images))
    np.testing.assert_allclose(np.linalg.norm(found[:15], axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(found[15], 0)


def test_a_row_depends_on_its_own_image_only():
    images = strokes(16)
    found = np.asarray(scattering.transform(images))
    changed = images.copy()
    changed[1:] = changed[1:, ::-1]
    np.testing.assert_allclose(np.asarray(scattering.transform(changed))[0], found[0], atol=1e-6)


def test_features_of_bytes_are_those_of_the_scaled_image(tmp_path):
    data = scattering.features(dataset(), cache=tmp_path)
    assert (data.inputs.shape, data.inputs.dtype) == ((NUM, 5184), np.float32)
    expected = scattering.transform(idx_files.images(NUM)[3:].astype(np.float32) / 255)
    np.testing.assert_allclose(data.inputs[3:], expected, atol=1e-6)
    np.testing.assert_array_equal(data.test_inputs, data.inputs[:3])
    as_floats = scattering.features(dataset(idx_files.images(NUM)[..., None].astype(np.float32) / 255), cache=tmp_path)
    np.testing.assert_array_equal(as_floats.inputs, data.inputs)


def test_subjects_are_carried_on(tmp_path):
    subjects = np.arange(NUM, dtype=np.int32)[::-1] // 2
    data = scattering.features(dataclasses.replace(dataset(), subjects=subjects), cache=tmp_path)
    np.testing.assert_array_equal(data.subjects, subjects)
    assert scattering.features(dataset(), cache=tmp_path).subjects is None


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_features_are_computed_once(tmp_path, monkeypatch):
    first = scattering.features(dataset(), cache=tmp_path)
    assert isinstance(first.inputs, np.memmap)
    kept = digest(tmp_path)
    assert len(kept) == 2
    monkeypatch.setattr(scattering, "transform", None)
    again = scattering.features(dataset(), cache=tmp_path)
    np.testing.assert_array_equal(again.inputs, first.inputs)
    assert digest(tmp_path) == kept


@pytest.mark.parametrize("keep", [0, 50, 1000, -1])
def test_a_truncated_cache_is_computed_anew(tmp_path, caplog, keep):
    scattering.features(dataset(), cache=tmp_path)
    kept = digest(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:keep])
    data = scattering.features(dataset(), cache=tmp_path)
    np.testing.assert_allclose(np.linalg.norm(data.inputs, axis=1), 1, atol=1e-5)
    assert digest(tmp_path) == kept
    assert len([record for record in caplog.records if "computed anew" in record.getMessage()]) == 2


@pytest.mark.parametrize(
    "other", [np.zeros((NUM - 1, 5184), np.float32), np.zeros((NUM, 5183), np.float32), np.zeros((NUM, 5184))]
)
def test_a_cached_array_of_another_shape_or_type_is_not_used(tmp_path, other):
    scattering.features(dataset(), cache=tmp_path)
    kept = digest(tmp_path)
    largest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    np.save(largest, other)
    scattering.features(dataset(), cache=tmp_path)
    assert digest(tmp_path) == kept


def test_other_images_or_another_version_have_a_file_of_their_own(tmp_path, monkeypatch):
    scattering.features(dataset(), cache=tmp_path)
    other = idx_files.images(NUM)
    other[0, 0, 0] ^= 1
    scattering.features(dataset(other), cache=tmp_path)
    assert len(digest(tmp_path)) == 4
    monkeypatch.setattr(scattering, "_VERSION", -1)
    scattering.features(dataset(), cache=tmp_path)
    assert len(digest(tmp_path)) == 6


def test_the_default_cache_is_dovetails(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    scattering.features(dataset())
    assert len(list((tmp_path / "scattering").glob("*.npy"))) == 2


def test_an_interrupted_computation_leaves_nothing(tmp_path, monkeypatch):
    def stop(images):
        yield np.zeros((1, scattering.NUM_FEATURES), np.float32)
        raise KeyboardInterrupt

    monkeypatch.setattr(scattering, "_computed", stop)
    with pytest.raises(KeyboardInterrupt):
        scattering.features(dataset(), cache=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [(8, 8), (784,), (28, 28, 3)])
def test_other_images_are_refused(tmp_path, shape):
    with pytest.raises(ValueError, match="expected grey images of 28 x 28 for scatter, got records of"):
        scattering.features(dataset(np.zeros((4, *shape), np.float32)), cache=tmp_path)
