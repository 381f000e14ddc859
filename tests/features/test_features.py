"""Features of a dataset: a contract for every kind, the cache, views."""

import dataclasses
import hashlib
import sys

import numpy as np
import pytest
from grids import later

from dovetail import features
from dovetail.data import Dataset, views
from dovetail.features import Features, Whitening, patches, pipeline
from dovetail.features import cache as files

NUM = 19
MINE = """
import numpy as np
def squares(images):
    return np.asarray(images, np.float32).reshape(len(images), -1)[:, 370:410] ** 2
def whole(images):
    return squares(images).sum()
def broken(images):
    return squares(images) / 0
class Network:
    identity = "weights of 2026"
    def apply(self, images):
        return squares(images)
NETWORK, NUMBER = Network(), 3
"""


def inputs(num=NUM, *, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (num, 28, 28)).astype(np.uint8)


def dataset(images=None):
    images = inputs() if images is None else images
    labels = np.zeros(len(images), np.int32)
    return Dataset(inputs=images, labels=labels, test_inputs=images[:3], test_labels=labels[:3], num_classes=10)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Few images for a dictionary, and a module of one's own."""
    monkeypatch.setattr(patches, "_IMAGES", 300)
    (tmp_path / "my_features.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_features", raising=False)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


WHITE = Whitening(rank=8, images=40)
ALL = {
    "scatter": Features(kind="scatter"),
    "whitened": Features(kind="scatter", whiten=WHITE),
    "symmetric": Features(kind="scatter", symmetric=True, whiten=WHITE),
    "patches": Features(kind="patches", patches=((5, 6),)),
    "both": Features(kind="scatter+patches", patches=((5, 6), (8, 4)), symmetric=True, whiten=WHITE),
    "leaves": Features(kind="scatter", whiten=dataclasses.replace(WHITE, on="leaves")),
    "plugged": Features(kind="my_features:squares"),
    "object": Features(kind="my_features:NETWORK", whiten=WHITE),
}
PARTS = ("whitened", "symmetric", "patches")  # which "both" has all of


@pytest.mark.parametrize("name", [later(name) if name in PARTS else name for name in ALL])
def test_rows_are_finite_of_unit_norm_or_zero_and_depend_on_their_own_record_only(name, cache):
    images = inputs()
    images[0], images[1] = 0, 90
    rows = features.apply(dataset(images), ALL[name], cache=cache).inputs
    norms = np.linalg.norm(rows, axis=1)
    assert np.isfinite(rows).all()
    assert norms.max() <= 1 + 1e-6
    np.testing.assert_allclose(norms[2:], 1, atol=1e-5)
    assert all(norm < 1e-6 or abs(norm - 1) < 1e-5 for norm in norms[:2])
    others = images.copy()
    others[[0, *range(2, 7), *range(8, NUM)]] = inputs(seed=1)[: NUM - 2]
    again = features.apply(dataset(others), ALL[name], cache=cache).inputs
    np.testing.assert_allclose(again[[1, 7]], rows[[1, 7]], atol=2e-5)
    assert np.abs(again[3] - rows[3]).max() > 1e-3
    one = features.apply(dataset(images[7:10]), ALL[name], cache=cache).inputs
    np.testing.assert_allclose(one[0], rows[7], atol=2e-5)


def test_features_of_bytes_are_those_of_the_scaled_image(cache):
    data = features.apply(dataset(), ALL["scatter"], cache=cache)
    assert (data.inputs.shape, data.inputs.dtype) == ((NUM, 5184), np.float32)
    np.testing.assert_array_equal(data.test_inputs, data.inputs[:3])
    scaled = features.apply(dataset(inputs()[..., None].astype(np.float32) / 255), ALL["scatter"], cache=cache)
    np.testing.assert_array_equal(scaled.inputs, data.inputs)


@pytest.mark.parametrize("whiten", [None, WHITE])
def test_symmetric_features_do_not_see_left_and_right(whiten, cache):
    settings = Features(kind="scatter+patches", patches=((5, 6),), symmetric=True, whiten=whiten)
    mirrored = np.ascontiguousarray(inputs()[:, :, ::-1])
    found = [features.apply(dataset(x), settings, cache=cache).inputs for x in (inputs(), mirrored, inputs()[:, ::-1])]
    np.testing.assert_allclose(found[0], found[1], atol=2e-5)
    assert np.abs(found[0] - found[2]).max() > 1e-2  # it does see what is up


def test_axes_are_the_same_if_an_accelerator_holds_the_features(cache, tmp_path, monkeypatch):
    settings = ALL["both"]
    expected = features.apply(dataset(), settings, cache=cache).inputs
    monkeypatch.setattr(pipeline, "_accelerator_has_room", lambda size: True)
    monkeypatch.setattr(files, "spool", None)
    found = features.apply(dataset(), settings, cache=tmp_path / "other").inputs
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_variances_are_those_along_the_axes(cache):
    found = features.build_pipeline(ALL["whitened"], (28, 28), cache=cache).variances
    assert found.shape == (WHITE.rank,)
    assert (np.diff(found) <= 0).all() and found[-1] > 0


def test_blocks_have_the_same_weight(cache):
    rows = features.apply(dataset(), Features(kind="scatter+patches", patches=((5, 6),)), cache=cache).inputs
    np.testing.assert_allclose(np.linalg.norm(rows[:, :5184], axis=1), 0.5**0.5, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(rows[:, 5184:], axis=1), 0.5**0.5, atol=1e-5)


def test_all_but_the_inputs_is_carried_on(cache):
    subjects = np.arange(NUM, dtype=np.int32)[::-1] // 2
    data = dataclasses.replace(dataset(), subjects=subjects)
    found = features.apply(data, ALL["scatter"], cache=cache)
    np.testing.assert_array_equal(found.subjects, subjects)
    assert features.apply(data, Features()) is data


# views


def test_views_are_rows_with_features_of_their_own(cache):
    viewed = views.add_views(dataset(), ["flip"])
    found = features.apply(viewed, ALL["scatter"], cache=cache)
    plain = features.apply(dataset(), ALL["scatter"], cache=cache)
    turned = features.apply(dataset(np.ascontiguousarray(inputs()[:, :, ::-1])), ALL["scatter"], cache=cache)
    assert found.views == 2
    np.testing.assert_allclose(found.inputs[::2], plain.inputs, atol=1e-6)
    np.testing.assert_allclose(found.inputs[1::2], turned.inputs, atol=1e-6)
    np.testing.assert_array_equal(found.test_inputs, plain.test_inputs)


# one's own


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("whole", r"expected one row for a batch of one record from 'my_features:whole', got shape \(\)"),
        ("broken", "the features 'my_features:broken' of 2 of 2 records are not finite"),
        ("NUMBER", "expected 'NUMBER' in 'my_features' to be a function from images to features"),
        ("missing", "no such name"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_functions_that_give_no_features_are_refused(name, message, cache):
    with pytest.raises(ValueError, match=message):
        features.apply(dataset(), Features(kind=f"my_features:{name}"), cache=cache)


def test_ones_own_function_is_cached_by_its_file_and_by_what_it_does(cache, tmp_path, monkeypatch):
    settings = ALL["plugged"]
    before = features.apply(dataset(), settings, cache=cache).inputs
    (tmp_path / "my_features.py").write_text(MINE.replace("** 2", "** 3.0"))
    monkeypatch.delitem(sys.modules, "my_features")
    assert np.abs(features.apply(dataset(), settings, cache=cache).inputs - before).max() > 1e-3


def test_a_statement_is_told_what_is_taken_as_public():
    assert Features(kind="scatter", whiten=WHITE).assumptions == ()
    (own,) = ALL["plugged"].assumptions
    assert "'my_features:squares' were made without the private data" in own
    (public,) = Features(kind="scatter", whiten=Whitening(on="fashion-mnist")).assumptions
    assert "the images of 'fashion-mnist', on which features were whitened, are public" in public


def test_whitening_on_a_public_task_reads_its_images(cache, tmp_path):
    (tmp_path / "public_task.py").write_text(
        "import numpy as np\nfrom dovetail.data import Dataset, Task\n"
        "def load(*, folder=None):\n"
        "    x = np.random.default_rng(5).random((40, 28, 28), dtype=np.float32)\n"
        "    y = np.zeros(40, np.int32)\n"
        "    return Dataset(inputs=x, labels=y, test_inputs=x, test_labels=y, num_classes=2)\n"
        "TASK = Task(name='public', load=load)\n"
    )
    settings = Features(kind="scatter", whiten=dataclasses.replace(WHITE, on="public_task:TASK"))
    found = features.apply(dataset(), settings, cache=cache).inputs
    assert found.shape == (NUM, 8)
    assert np.abs(found - features.apply(dataset(), ALL["whitened"], cache=cache).inputs).max() > 0.01
    with pytest.raises(ValueError, match=r"whitening on .* is for records of"):
        features.apply(dataset(inputs()[..., None]), settings, cache=cache)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "scater"}, "unknown features 'scater': did you mean 'scatter'?"),
        ({"symmetric": True}, "features='none' cannot be symmetric or whitened"),
        ({"whiten": WHITE}, "features='none' cannot be symmetric or whitened"),
        ({"kind": "scatter", "patches": ((5, 6),)}, "expected sides and filters with features of patches"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Features(**settings)


# the cache


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_features_are_computed_once(cache, monkeypatch):
    first = features.apply(dataset(), ALL["whitened"], cache=cache)
    assert isinstance(first.inputs, np.memmap)
    kept = digests(cache)
    assert len(kept) == 3  # two arrays, one set of axes
    monkeypatch.setattr(pipeline.Pipeline, "apply", None)
    again = features.apply(dataset(), ALL["whitened"], cache=cache)
    np.testing.assert_array_equal(again.inputs, first.inputs)
    assert digests(cache) == kept


@pytest.mark.parametrize("keep", [0, later(50), later(200), -1])
def test_a_truncated_cache_is_computed_anew(cache, caplog, keep):
    features.apply(dataset(), ALL["whitened"], cache=cache)
    kept = digests(cache)
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[:keep])
    features.apply(dataset(), ALL["whitened"], cache=cache)
    assert {name: digest for name, digest in digests(cache).items() if name.endswith("npy")} == {
        name: digest for name, digest in kept.items() if name.endswith("npy")
    }
    assert len([record for record in caplog.records if "computed anew" in record.getMessage()]) == 3


@pytest.mark.parametrize(
    "other", [np.zeros((NUM - 1, 8), np.float32), np.zeros((NUM, 7), np.float32), np.zeros((NUM, 8))]
)
def test_a_cached_array_of_another_shape_or_type_is_not_used(cache, other):
    kept = features.apply(dataset(), ALL["whitened"], cache=cache).inputs.copy()
    largest = max(cache.glob("*.npy"), key=lambda path: path.stat().st_size)
    np.save(largest, other)
    np.testing.assert_array_equal(features.apply(dataset(), ALL["whitened"], cache=cache).inputs, kept)


def test_what_differs_has_a_file_of_its_own(cache, monkeypatch):
    images = inputs()
    images[5, 0, 0] ^= 1
    names = set()
    for data in (dataset(), dataset(images)):
        features.apply(data, ALL["scatter"], cache=cache)
    assert len(names := set(digests(cache))) == 3  # the records for testing are the same
    for change in ({"ridge": 0.1}, {"rank": 7}, {"images": 41}, {"on": "leaves"}, {}):
        features.apply(dataset(), Features(kind="scatter", whiten=dataclasses.replace(WHITE, **change)), cache=cache)
    features.apply(dataset(), Features(kind="scatter", symmetric=True), cache=cache)
    monkeypatch.setattr("dovetail.features.scatter._VERSION", -1)
    features.apply(dataset(), ALL["scatter"], cache=cache)
    axes = [name for name in digests(cache) if name.endswith("npz")]
    assert len(axes) == 4
    assert len(set(digests(cache)) - names - set(axes)) == 2 * 7


def test_the_default_cache_is_dovetails(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path))
    features.apply(dataset(), ALL["scatter"])
    assert len(list((tmp_path / "features").glob("*.npy"))) == 2


def test_an_interrupted_computation_leaves_nothing(cache):
    def stop():
        yield np.zeros((1, 4), np.float32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.cached_rows(cache, "name", (3, 4), stop)
    assert not list(cache.iterdir())


def test_progress_is_told(monkeypatch, caplog):
    monkeypatch.setattr(files, "_SECONDS", -1.0)
    with caplog.at_level("INFO", logger="dovetail"):
        list(files.log_progress([np.zeros((4, 2))] * 2, 8, "features"))
    assert "features of 8 of 8 images" in caplog.records[-1].getMessage()
