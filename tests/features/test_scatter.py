import math

import numpy as np
import pytest

from dovetail.features.scatter import Scatter, scatter_transform


def noise(num, *shape):
    return np.random.default_rng(0).random((num, *shape), dtype=np.float32)


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


def channels_of(image, psi, phi):
    """The 81 channels of one plane of 32 x 32 in float64."""
    x = image.astype(np.float64)
    every_second = np.outer(np.arange(32) % 2 == 0, np.arange(32) % 2 == 0)
    fine = [np.abs(convolve(x, kernel)) for kernel in psi[0]]
    coarse = [np.abs(convolve(x, kernel)) for kernel in psi[1]]
    second = [np.abs(convolve(signal, kernel)) for signal in fine for kernel in psi[1]]
    channels = [convolve(signal, phi).real[::4, ::4] for signal in (x, *fine)]
    channels += [convolve(4 * signal * every_second, phi).real[::4, ::4] for signal in (*coarse, *second)]
    assert np.shape(channels) == (81, 8, 8)
    return np.array(channels)


def reference(image, psi, phi):
    """The transform of one image, group by group."""
    if image.ndim == 2:
        channels = channels_of(np.pad(image, 2, mode="reflect"), psi, phi)
        groups = [channels[start : start + 3] for start in range(0, 81, 3)]
    else:
        groups = np.stack([channels_of(image[..., colour], psi, phi) for colour in range(3)], axis=1)
    rows = [(group - group.mean()) / math.sqrt(group.var() + 1e-5) for group in groups]
    row = np.concatenate(rows).ravel()
    return row / np.linalg.norm(row)


def test_the_transform_equals_its_definition():
    images = np.concatenate([strokes(3), noise(13, 28, 28)])  # 16: compiled once
    psi = [[morlet(j, math.pi * k / 8) for k in range(8)] for j in range(2)]
    phi = gaussian(1.6)
    found = np.asarray(scatter_transform(images))
    assert found.shape == (16, 5184)
    for image, row in zip(images[:5], found, strict=False):
        expected = reference(image, psi, phi)
        np.testing.assert_allclose(row, expected, atol=3e-6)
        assert np.abs(row - reference(image.T, psi, phi)).max() > 1e-3  # a near miss is a miss


def test_rows_have_unit_norm_and_a_black_image_none():
    images = strokes(16)
    images[14:] = 0
    images[14, 9, 9] = 1 / 255
    found = np.asarray(scatter_transform(images))
    np.testing.assert_allclose(np.linalg.norm(found[:15], axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(found[15], 0)


def test_a_row_depends_on_its_own_image_only():
    images = strokes(16)
    found = np.asarray(scatter_transform(images))
    changed = images.copy()
    changed[1:] = changed[1:, ::-1]
    np.testing.assert_allclose(np.asarray(scatter_transform(changed))[0], found[0], atol=1e-6)


def test_colour_is_normalised_over_the_three_colours_of_a_channel():
    images = noise(5, 32, 32, 3) * np.linspace(0.2, 1, 3, dtype=np.float32)
    psi = [[morlet(j, math.pi * k / 8) for k in range(8)] for j in range(2)]
    found = Scatter((32, 32, 3)).apply(images)
    assert found.shape == (5, Scatter((32, 32, 3)).size) == (5, 3 * 5184)
    np.testing.assert_allclose(found[0], reference(images[0], psi, gaussian(1.6)), atol=3e-6)


def test_batches_do_not_show():
    images = noise(19, 28, 28)  # more than a batch, and not a multiple of it
    found = Scatter((28, 28, 1)).apply(images[..., None])
    np.testing.assert_allclose(found[3:], Scatter((28, 28)).apply(images[3:]), atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (784,), (28, 32), (32, 32, 2)])
def test_other_images_are_refused(shape):
    with pytest.raises(
        ValueError, match="expected images of 28 x 28 or 32 x 32, grey or in three colours, for scatter"
    ):
        Scatter(shape)
