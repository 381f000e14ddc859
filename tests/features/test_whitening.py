import numpy as np
import pytest

from dovetail.features.whitening import normalize_rows, principal_axes

SCALES = 2.0 ** -np.arange(12)


def features(num=900, width=40):
    """Rows that vary along twelve known directions, each half as much as the one before, about a mean."""
    rng = np.random.default_rng(0)
    directions = np.linalg.qr(rng.normal(size=(width, 12)))[0]
    return (rng.normal(size=(num, 12)) * SCALES @ directions.T + rng.normal(size=width)).astype(np.float32)


def blocks(rows, size=256):
    return lambda: (rows[low : low + size] for low in range(0, len(rows), size))


def test_axes_are_those_of_the_dense_covariance():
    rows = features()
    found = principal_axes(blocks(rows), rank=6)
    variances, directions = np.linalg.eigh(np.cov(rows.T.astype(np.float64), bias=True))
    np.testing.assert_allclose(found.mean, rows.mean(axis=0, dtype=np.float64), atol=1e-6)
    np.testing.assert_allclose(found.variances, variances[::-1][:6], rtol=1e-4)
    along = np.abs(np.sum(found.directions * directions[:, ::-1][:, :6], axis=0))
    np.testing.assert_allclose(along, 1, atol=1e-4)
    np.testing.assert_allclose(found.directions.T @ found.directions, np.eye(6), atol=1e-5)
    assert (found.directions[np.abs(found.directions).argmax(axis=0), np.arange(6)] > 0).all()


def test_blocks_do_not_show():
    rows = features()
    one, many = principal_axes(blocks(rows, 900), rank=4), principal_axes(blocks(rows, 7), rank=4)
    np.testing.assert_allclose(one.directions, many.directions, atol=1e-3)


def test_whitening_evens_out_what_the_ridge_leaves():
    rows = features()
    axes = principal_axes(blocks(rows), rank=6)
    centred = (rows - axes.mean) @ axes.directions
    for ridge in (0.0, 0.01):
        expected = centred / np.sqrt(axes.variances + ridge * axes.variances[0])
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(axes.whitening_function(ridge)(rows), expected, atol=1e-4)
    spread = np.var(axes.whitening_function(0.0)(rows), axis=0)
    assert spread.max() / spread.min() < 1.3
    assert (
        np.ptp(np.log(np.var(axes.whitening_function(1.0)(rows), axis=0))) > 3
    )  # a large ridge leaves them as they were


def test_no_direction_is_divided_by_zero():
    axes = principal_axes(blocks(np.eye(5, dtype=np.float32)[[0, 1] * 8]), rank=3)
    with pytest.raises(ValueError, match="expected features that vary in all directions, or else a ridge > 0"):
        type(axes)(
            mean=axes.mean, directions=axes.directions, variances=np.array([1, 0.5, 0], np.float32)
        ).whitening_function(0)
    assert np.isfinite(axes.whitening_function(0.01)(np.zeros((2, 5), np.float32))).all()


@pytest.mark.parametrize("rank", [5, 16])
def test_a_rank_that_images_do_not_have_is_refused(rank):
    rows = features(num=5, width=20) if rank == 5 else features(width=15)
    with pytest.raises(ValueError, match="expected a rank below"):
        principal_axes(blocks(rows), rank=rank)


def test_a_row_of_zeros_stays():
    found = normalize_rows(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32))
    np.testing.assert_allclose(found, [[0.6, 0.8], [0, 0]])
