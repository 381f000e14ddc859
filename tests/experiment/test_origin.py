"""Where a run comes from: the data under a key that is kept elsewhere, the code, and nothing that tells of a record."""

import dataclasses
import hashlib
import json
import os
import stat
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TASK

import dovetail
from dovetail import experiment
from dovetail.data import Task
from dovetail.data.readers.assembly import TESTED_NOTE
from dovetail.experiment import config, fingerprint
from dovetail.experiment.declared import declared_public
from dovetail.experiment.verify import verify

RUN = {
    "task": {"name": "tiny"},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0},
    "cohort": {"kind": "everyone", "rounds": 2},
    "privacy": {"eps": 3.0, "delta": 1e-5},
}


def trained(folder, task=TASK):
    return experiment.run(experiment.prepare(config.parse(RUN, ()), task=task), out=folder)


@pytest.fixture
def key(tmp_path, monkeypatch):
    path = tmp_path / "kept" / "data.key"
    monkeypatch.setenv(fingerprint.VARIABLE, str(path))
    return path


def origin(folder):
    return json.loads((folder / "privacy.json").read_text())["origin"]


def other_task(**changes):
    """The same task with some arrays changed."""

    def load(**given):
        dataset = TASK.load(**given)
        return dataclasses.replace(
            dataset, **{name: change(getattr(dataset, name)) for name, change in changes.items()}
        )

    return dataclasses.replace(TASK, load=load)


def test_the_key_is_made_once_outside_the_folder_and_for_its_owner_alone(tmp_path, key):
    trained(tmp_path / "one")
    made = key.read_text()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert [file.name for file in key.parent.iterdir()] == ["data.key"]
    trained(tmp_path / "two")
    assert key.read_text() == made
    assert origin(tmp_path / "one")["data"] == origin(tmp_path / "two")["data"]
    assert made.strip() not in "".join(file.read_text("latin-1") for file in (tmp_path / "one").iterdir())


def test_the_fingerprint_says_nothing_without_the_key(tmp_path, key, monkeypatch):
    trained(tmp_path / "one")
    monkeypatch.setenv(fingerprint.VARIABLE, str(tmp_path / "other.key"))
    trained(tmp_path / "two")
    one, two = (origin(tmp_path / name)["data"] for name in ("one", "two"))
    assert one["hmac_sha256"] != two["hmac_sha256"]
    assert one["key_id"] != two["key_id"]
    inputs = np.ascontiguousarray(TASK.load(folder=None).inputs)
    written = b"".join(file.read_bytes() for file in (tmp_path / "one").iterdir())
    for bare in (hashlib.sha256(inputs), hashlib.blake2b(inputs, digest_size=16)):
        assert bare.hexdigest().encode() not in written


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": lambda x: np.where(np.arange(len(x))[:, None] == 7, np.nextafter(x, 9), x).astype(x.dtype)},
        {"labels": lambda y: np.roll(y, 1)},
        {"test_labels": lambda y: np.roll(y, 1)},
    ],
)
def test_one_changed_record_is_found(tmp_path, key, changes):
    trained(tmp_path / "run")
    assert verify(tmp_path / "run", data_key=key, data=TASK).agrees
    found = verify(tmp_path / "run", data_key=key, data=other_task(**changes))
    assert not found.agrees
    assert found.to_json()["data"] == "the data are not those of the run"


def columns(**given):
    """What a fingerprint is taken of."""
    names = ("inputs", "labels", "test_inputs", "test_labels", "subjects", "users")
    return types.SimpleNamespace(**dict.fromkeys(names) | given)


FOUR = np.arange(8, dtype=np.float32).reshape(4, 2)
FOUR_AND_ONE = np.concatenate([FOUR, FOUR[:1]])


@pytest.mark.parametrize(
    "other",
    [
        columns(inputs=FOUR.reshape(2, 4), test_inputs=FOUR),
        columns(inputs=FOUR.view(np.int32), test_inputs=FOUR),
        columns(inputs=FOUR, test_labels=FOUR),
        columns(inputs=FOUR_AND_ONE, test_inputs=FOUR[1:]),
    ],
    ids=["another shape", "another type", "another column", "a record held out or not"],
)
def test_the_same_bytes_are_other_data_in_another_shape_type_or_place(other):
    """A fingerprint of bytes alone would take one record of four numbers for two records of two."""
    assert fingerprint._hmac_of_dataset(bytes(32), other) != fingerprint._hmac_of_dataset(
        bytes(32), columns(inputs=FOUR, test_inputs=FOUR)
    )


def test_another_key_is_told_from_other_data(tmp_path, key):
    trained(tmp_path / "run")
    fingerprint.data_key(tmp_path / "other.key")
    assert "another key" in verify(tmp_path / "run", data_key=tmp_path / "other.key", data=TASK).data
    with pytest.raises(ValueError, match="there is no file"):
        verify(tmp_path / "run", data_key=tmp_path / "none.key", data=TASK)
    assert "same_data" not in verify(tmp_path / "run").to_json()


def test_a_key_that_others_can_read_is_refused_before_the_run_starts(tmp_path, key):
    fingerprint.data_key(key)
    key.chmod(0o644)
    with pytest.raises(ValueError, match="others can read"):
        trained(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_key_in_the_runs_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(fingerprint.VARIABLE, str(tmp_path / "run" / "data.key"))
    with pytest.raises(ValueError, match="inside the run's folder"):
        trained(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_no_key_is_refused(tmp_path, key):
    key.parent.mkdir()
    key.write_text("secret\n")
    key.chmod(0o600)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        trained(tmp_path / "run")


def test_where_no_key_can_be_made_the_run_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv(fingerprint.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    trained(tmp_path / "run")
    assert "no key could be made" in origin(tmp_path / "run")["data"]["missing"]
    assert "has no fingerprint" in verify(tmp_path / "run", data_key=tmp_path / "any", data=TASK).data


def test_the_key_stands_in_the_users_configuration(tmp_path, monkeypatch):
    monkeypatch.delenv(fingerprint.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert fingerprint.key_path() == tmp_path / "dovetail" / "data.key"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fingerprint.key_path() == tmp_path / ".config" / "dovetail" / "data.key"


def test_a_saved_result_comes_from_the_same_data_and_nothing_is_made_without_a_folder(tmp_path, key):
    result = trained(None)
    assert not key.exists()
    result.save(tmp_path / "saved")
    trained(tmp_path / "run")
    assert origin(tmp_path / "saved") == origin(tmp_path / "run")
    key.chmod(0o644)
    with pytest.raises(ValueError, match="others can read"):
        result.save(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_counts_and_code_are_recorded(tmp_path, key):
    trained(tmp_path / "run")
    found = origin(tmp_path / "run")
    assert (found["setting"], found["users"], found["records"]) == ("simulation", 300, 300)
    assert len(found["library"]["code"]) == 64
    assert found["own_code"]["tiny"], "the task is outside the package"


def test_two_that_make_the_key_at_once_get_the_same(tmp_path, monkeypatch):
    path, link = tmp_path / "data.key", os.link

    def late(source, target):
        monkeypatch.setattr(os, "link", link)
        fingerprint.data_key(path)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert fingerprint.data_key(path).hex() == path.read_text().strip()
    assert [file.name for file in tmp_path.iterdir()] == ["data.key"]


def test_a_statement_that_is_there_twice_is_refused(tmp_path):
    """Python takes the last of two equal names, other readers and people the first."""
    (tmp_path / "privacy.json").write_text('{"certified": {"eps": 0.001}, "certified": {"eps": 20.0}}')
    with pytest.raises(ValueError, match="the name 'certified' occurs twice"):
        verify(tmp_path)


# data that a program gave


FRAME = {
    "patient": [f"patient {i % 20}" for i in range(60)],
    "age": np.linspace(20, 90, 60),
    "city": np.array(["Oslo", "Rome", "Rome"] * 20),
    "ill": np.array(["no", "yes"] * 30),
}


def frame_dataset(frame=FRAME, **changes):
    how = {"user": "patient", "target": "ill", "bounds": {"age": (0, 100)}, "test_share": 0.2, "name": "visits"}
    return dovetail.Dataset.from_pandas(frame, **{**how, "categories": {"city": np.unique(FRAME["city"])}, **changes})


def on_frame(folder, data, **more):
    settings = {"cohort.rounds": 2, "protocol.noise_multiplier": 5.0}
    return dovetail.train(data, settings=settings, out=folder, **more)


@pytest.fixture
def frame_run(tmp_path, key):
    on_frame(tmp_path / "run", frame_dataset())
    return tmp_path / "run"


def test_data_that_a_program_gave_are_checked_by_giving_them_again(frame_run, key):
    assert dovetail.verify(frame_run, data=frame_dataset()).agrees, "by the user's own key"
    assert dovetail.verify(str(frame_run), data=frame_dataset(), data_key=str(key)).agrees
    younger = {**FRAME, "age": np.append(FRAME["age"][:-1], 89.0)}
    found = dovetail.verify(frame_run, data=frame_dataset(younger))
    assert (found.agrees, found.data) == (False, "the data are not those of the run")
    assert not dovetail.verify(frame_run, data=frame_dataset(bounds={"age": (0, 99)})).agrees
    with pytest.raises(ValueError, match=r"given to the run by a Python program: .*data=dataset.*--data module:object"):
        dovetail.verify(frame_run, data_key=key)
    with pytest.raises(ValueError, match=r"data= as a Dataset or a Task, got dict: make a dataset of it"):
        dovetail.verify(frame_run, data=FRAME)


def test_the_data_of_a_model_of_ones_own_are_checked_without_the_model(tmp_path, key):
    zeros = jnp.zeros((3, 2))
    model = dovetail.Model(name="mine", init=lambda key: zeros, apply=lambda weights, inputs: inputs @ weights)
    on_frame(tmp_path / "run", frame_dataset(), model=model)
    assert dovetail.verify(tmp_path / "run", data=frame_dataset()).agrees


def test_the_command_takes_the_name_of_data(frame_run, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = "from experiment.test_origin import frame_dataset\ndata = frame_dataset()\nwhat = 3\nbroken = lambda: 3\n"
    (tmp_path / "my_data_to_verify.py").write_text(code)
    for name in ("data", "frame_dataset"):
        status, out, err = command("verify", str(frame_run), "--data", f"my_data_to_verify:{name}")
        assert (status, err) == (0, "")
        assert "data: the same as in the run" in out
    status, _, err = command("verify", str(frame_run), "--data", "my_data_to_verify:what")
    assert (status, "to be a Dataset, Task, or function that returns one, got a int" in err) == (2, True)
    status, _, err = command("verify", str(frame_run), "--data", "my_data_to_verify:broken")
    assert (status, "to return a Dataset or a Task, got int" in err) == (2, True)
    status, out, _ = command("verify", str(frame_run), "--data", "tiny:TASK", "--json")
    assert status == 1
    assert json.loads(out)["same_data"] is False


# what is declared public


def test_what_was_declared_is_in_the_origin_and_in_the_chain(frame_run):
    declared = origin(frame_run)["declared"]
    tested = len(frame_dataset().test_labels)
    assert declared == {
        "name": "visits",
        "published": False,
        "classes": "read off the data",
        "tests": {"records": tested, "share": 0.2, "seed": 0},
        **dict.fromkeys(("roster", "users", "records", "subjects", "spread")),
    }
    stated = json.loads((frame_run / "privacy.json").read_text())
    stated["origin"]["declared"]["classes"] = "declared"
    (frame_run / "privacy.json").write_text(json.dumps(stated))
    assert any("origin is not what the run wrote" in said for said in dovetail.verify(frame_run).differences)


def test_nothing_is_told_of_test_records_that_are_not_assumed_to_be_public():
    data = frame_dataset(classes=["no", "yes"])
    settings = config.parse({**RUN, "task": {"name": "dataset", "users": 30}}, ())
    task = Task(name="dataset", load=lambda *, folder: data)
    public = declared_public(settings, task, data, assumptions=(TESTED_NOTE,))
    assert public["tests"]["records"] == len(data.test_labels)
    assert (public["classes"], public["users"]) == ("declared", 30)
    assert declared_public(settings, task, data, assumptions=())["tests"] is None
    published = dataclasses.replace(task, published=True)
    assert declared_public(settings, published, data, assumptions=())["tests"] == public["tests"]
    unnamed = dataclasses.replace(data, name=None)
    assert declared_public(settings, task, unnamed, assumptions=())["name"] is None


@pytest.mark.parametrize(("script", "commit"), [("exit 128", None), ("test $3 = rev-parse && echo abc", "abc")])
def test_a_checkout_that_git_does_not_answer_for_has_no_commit(tmp_path, monkeypatch, script, commit):
    git = tmp_path / "git"
    git.write_text(f"#!/bin/sh\n{script}\n")
    git.chmod(0o755)
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(fingerprint, "_PACKAGE", tmp_path / "dovetail")
    monkeypatch.setattr(fingerprint.shutil, "which", lambda name: str(git))
    assert fingerprint._commit_in_words.__wrapped__() == commit
