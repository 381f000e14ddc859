"""Adult, toxicity and CIFAR-10 from small files of the same form: encodings are public, nobody's data leaks in."""

import json

import numpy as np
import pytest

from dovetail.data import adult, cifar10, partition, resolve, toxicity

PEOPLE = """39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, \
United-States, <=50K
52, ?, 209642, HS-grad, 9, Married-civ-spouse, ?, Husband, White, Male, 0, 0, 45, ?, >50K

"""


class TestAdult:
    def read(self, tmp_path, text):
        (tmp_path / "adult.data").write_text(text)
        return adult.read(tmp_path / "adult.data")

    def test_words_are_one_hot_and_numbers_scaled_by_given_bounds(self, tmp_path):
        inputs, labels = self.read(tmp_path, PEOPLE)
        assert inputs.shape == (2, adult.NUM_FEATURES) == (2, 104)
        np.testing.assert_array_equal(labels, [0, 1])
        np.testing.assert_allclose(inputs[0, :5], [0.39, 13 / 16, np.log1p(2174) / np.log1p(1e5), 0, 0.4], rtol=1e-6)
        assert inputs[0, 5:].sum() == 8  # a word for each of eight columns
        assert inputs[1, 5:].sum() == 5  # three are not known
        assert inputs.min() >= 0 and inputs.max() <= 1

    def test_a_person_is_encoded_whoever_else_is_there(self, tmp_path):
        both, _ = self.read(tmp_path, PEOPLE)
        alone, _ = self.read(tmp_path, PEOPLE.splitlines()[1])
        np.testing.assert_array_equal(alone[0], both[1])

    def test_the_form_of_the_test_file_is_read_too(self, tmp_path):
        marked = "|1x3 Cross validator\n" + PEOPLE.replace("50K\n", "50K.\n")
        np.testing.assert_array_equal(self.read(tmp_path, marked)[0], self.read(tmp_path, PEOPLE)[0])

    @pytest.mark.parametrize(("old", "new"), [("Male", "Other"), (", 40", ""), ("<=50K", "50K")])
    def test_anything_else_is_refused(self, tmp_path, old, new):
        with pytest.raises(ValueError, match="expected"):
            self.read(tmp_path, PEOPLE.replace(old, new, 1))


COMMENTS = {  # number: text, split
    11: ("You are great. NEWLINE_TOKEN Thanks!", "train"),
    12: ("you ARE great", "train"),
    13: ("an awful, awful idea", "dev"),
    14: ("great are you", "train"),
    20: ("never trained on", "test"),
    21: ("", "test"),
    22: ("rated by nobody", "test"),
}
RATED = [(11, 5, 0), (12, 5, 0), (13, 5, 1), (14, 5, 1), (11, 9, 1), (20, 9, 1), (20, 5, 1), (20, 2, 0), (21, 2, 0)]


def built(folder, rated=RATED, **more):
    lines = [f"{number}.0\t{text}\t2005\tTrue\tuser\trandom\t{split}" for number, (text, split) in COMMENTS.items()]
    comments, ratings = folder / "comments.tsv", folder / "ratings.tsv"
    comments.write_text("\n".join(["rev_id\tcomment\tyear\tlogged_in\tns\tsample\tsplit", *lines, ""]))
    lines = [f"{number}.0\t{worker}\t{toxic}\t{-toxic}.0" for number, worker, toxic in rated]
    ratings.write_text("\n".join(["rev_id\tworker_id\ttoxicity\ttoxicity_score", *lines, ""]))
    return toxicity.build_dataset(comments, ratings, **more)


class TestToxicity:
    def test_ratings_are_records_and_annotators_users(self, tmp_path):
        data = built(tmp_path)
        np.testing.assert_array_equal(data.subjects, [5, 5, 5, 5, 9])
        assert sorted(data.labels[:4]) == [0, 0, 1, 1] and data.labels[4] == 1
        users = partition.build("writers", data.labels, users=None, seed=0, subjects=data.subjects)
        np.testing.assert_array_equal(users.counts, [4, 1])

    def test_test_records_are_the_votes_on_comments_that_are_not_trained_on(self, tmp_path):
        data = built(tmp_path)
        np.testing.assert_array_equal(data.test_labels, [1, 0])
        np.testing.assert_array_equal(data.test_inputs, toxicity.hash_texts(["never trained on", ""]))
        assert not any((row == data.test_inputs[0]).all() for row in data.inputs)

    def test_few_ratings_of_each_are_kept_by_a_rule_that_looks_at_one_annotator(self, tmp_path):
        few = built(tmp_path, ratings=2)
        np.testing.assert_array_equal(few.subjects, [5, 5, 9])
        without = built(tmp_path, [one for one in RATED if one[1] != 9], ratings=2)
        np.testing.assert_array_equal(without.inputs, few.inputs[:2])
        backwards = built(tmp_path, RATED[::-1], ratings=2)
        np.testing.assert_array_equal(np.sort(backwards.labels), np.sort(few.labels))

    def test_inputs_are_a_function_of_the_text(self):
        first, same, other, nothing = toxicity.hash_texts(["You are great", "you  ARE great!", "great are you", "..."])
        np.testing.assert_array_equal(first, same)
        assert np.linalg.norm(first) == pytest.approx(1, rel=1e-6)
        assert np.any(first != other)
        both, forth, back = (
            toxicity.hash_texts(["one two one", "one two", "two one"]) > 0,
            *toxicity.hash_texts(["one", "two"]),
        )
        assert not np.array_equal(*toxicity.hash_texts(["one two", "two one"])), "pairs have an order"
        words = (forth != 0) | (back != 0)
        pairs = toxicity.hash_texts(["one two three"])[0]
        alone = np.any(toxicity.hash_texts(["one", "two", "three"]) != 0, axis=0)
        assert np.count_nonzero(pairs[~alone]) == 2, "one two, and two three; not one three"
        assert words.any() and both.any()
        assert not nothing.any()
        assert first.dtype == np.float32 and first.shape == (toxicity.FEATURES,)

    def test_words_have_signs_so_that_those_that_share_a_place_may_cancel(self):
        words = toxicity.hash_texts([f"word{number}" for number in range(400)])
        assert np.all(np.sort(np.abs(words), axis=1)[:, -2:] == [0, 1]), "one place each"
        assert abs(words.sum()) < 4 * np.sqrt(400), "as many of either sign"
        three = toxicity.hash_texts(["one two three"])[0]
        np.testing.assert_allclose(np.abs(three[three != 0]), 1 / np.sqrt(5), rtol=1e-6)

    def test_ratings_of_unknown_comments_and_other_tables_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="which the table of comments does not have"):
            built(tmp_path, [*RATED, (99, 5, 0)])
        with pytest.raises(ValueError, match="expected the columns"):
            toxicity.build_dataset(tmp_path / "ratings.tsv", tmp_path / "ratings.tsv")


class TestCifar10:
    def test_a_row_is_an_image(self, tmp_path):
        Image = pytest.importorskip("PIL.Image")
        pixels = np.random.default_rng(0).integers(0, 256, (4, 1024, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "some.png")
        np.testing.assert_array_equal(cifar10.read_images(tmp_path / "some.png"), pixels.reshape(4, 32, 32, 3))
        Image.fromarray(pixels[:, :99]).save(tmp_path / "narrow.png")
        with pytest.raises(ValueError, match="a row of 1024 pixels"):
            cifar10.read_images(tmp_path / "narrow.png")

    def test_labels_are_a_list(self, tmp_path):
        (tmp_path / "labels.json").write_text(json.dumps([6, 9]))
        np.testing.assert_array_equal(cifar10.read_labels(tmp_path / "labels.json"), [6, 9])
        (tmp_path / "labels.json").write_text(json.dumps({"6": 9}))
        with pytest.raises(ValueError, match="is not a list of whole numbers"):
            cifar10.read_labels(tmp_path / "labels.json")


@pytest.mark.parametrize("name", ["adult", "cifar10", "toxicity"])
def test_they_are_registered_and_ask_for_verified_files(name, tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    with pytest.raises(FileNotFoundError, match=f"of {name}: tried"):
        resolve(name).load(folder=tmp_path)
