"""The commands of the parties: files that fit together, one sentence for what does not, a fleet that trains."""

from __future__ import annotations

import json

import pytest

from dovetail.parties.common.files import read_json
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.task import SignedTask, verify
from dovetail.parties.intermediary.enrolment import read_enrolled
from dovetail.parties.user.policy import Policy


@pytest.fixture
def made(tmp_path, command):
    """Keys of everybody, by the command line."""
    found = {}
    for name, use in (("owner", "sign"), ("analyzer", "service"), ("shuffler", "service")):
        status, out, _ = command("keys", str(tmp_path / name), "--use", use, "--json")
        assert status == 0
        found[name] = json.loads(out)
    return found


def new_task(command, tmp_path, made, *more):
    return command(
        *("task", "new", "digits", "--out", str(tmp_path / "task.json"), "--signer", str(tmp_path / "owner")),
        *("--analyzer", made["analyzer"]["public"], "--shuffler", made["shuffler"]["public"]),
        *("--rounds", "1", "--min-clients", "100", "--max-clients", "200"),
        *("--set", 'protocol={name="privunit",clip_norm=1.0}', "--set", "privacy={eps=2.0,delta=1e-5}", *more),
    )


def test_keys_and_a_task_are_made_signed_calibrated_and_shown(tmp_path, command, made):
    status, out, _ = new_task(command, tmp_path, made)
    assert status == 0
    assert f"signed by {made['owner']['id']}" in out
    status, out, _ = command("task", "show", str(tmp_path / "task.json"), "--signer", made["owner"]["id"], "--json")
    assert status == 0
    shown = json.loads(out)
    assert 1.9 < shown["certified"]["eps"] <= 2.0
    assert shown["task"]["dim"] == 650 and shown["task"]["analyzer_sign"]["use"] == "sign"
    assert shown["without_trust"]["eps"] > shown["certified"]["eps"]


def test_the_same_settings_make_another_task_each_time(tmp_path, command, made):
    """The first may have been withdrawn, and what users spent on its rounds is spent."""
    ids = set()
    for _ in range(2):
        assert new_task(command, tmp_path, made)[0] == 0
        signed = read_json(tmp_path / "task.json", SignedTask, "a signed task")
        ids.add(verify(signed, signer=signed.signer.key_id).task_id)
    assert len(ids) == 2


def test_an_analyzer_without_a_key_to_sign_with_signs_nothing(tmp_path, command, made):
    _, out, _ = command("keys", str(tmp_path / "analyzer"), "--use", "seal", "--json")
    assert new_task(command, tmp_path, {**made, "analyzer": json.loads(out)})[0] == 0
    signed = read_json(tmp_path / "task.json", SignedTask, "a signed task")
    assert verify(signed, signer=signed.signer.key_id).analyzer_sign is None


def test_a_task_that_every_user_would_refuse_is_not_signed(tmp_path, command, made):
    noise = ["--set", 'protocol={name="privunit",clip_norm=1.0,eps_local=8.0}']
    status, _, err = new_task(command, tmp_path, made, *noise)
    assert status == 2 and not (tmp_path / "task.json").exists()
    assert "above the task's budget of eps 2.0, so that every user would refuse it" in " ".join(err.split())


def test_a_task_without_a_model_of_ours_may_measure_what_users_evaluate(tmp_path, command, made):
    """A Flower app brings its own model: only `labels` asks how many classes there are."""
    config = tmp_path / "task.toml"
    config.write_text(
        '[task]\nname = "theirs"\n[protocol]\nname = "secagg"\nclip_norm = 2.0\n[privacy]\neps = 30.0\ndelta = 1e-5\n'
    )
    _, out, _ = command("keys", str(tmp_path / "other"), "--use", "service", "--json")
    status, _, err = command(
        *("task", "new", str(config), "--out", str(tmp_path / "task.json"), "--signer", str(tmp_path / "owner")),
        *("--analyzer", made["analyzer"]["public"], "--aggregator", made["shuffler"]["public"]),
        *("--aggregator", json.loads(out)["public"], "--rounds", "1", "--min-clients", "8", "--max-clients", "8"),
        *("--dim", "7", "--measure", "evaluation", "--held-out", "0.25"),
    )
    assert status == 0, err
    signed = read_json(tmp_path / "task.json", SignedTask, "a signed task")
    task = verify(signed, signer=signed.signer.key_id)
    assert (task.model_dim, task.dim, task.held_out) == (7, 10, 0.25)
    assert [measure.kind for measure in task.measures] == ["evaluation"]


def test_a_task_has_a_window(tmp_path, command, made):
    window = ["--begins", "2026-01-31T12:00+00:00", "--ends", "2099-01-31T12:00+01:00"]
    assert new_task(command, tmp_path, made, *window)[0] == 0
    status, out, _ = command("task", "show", str(tmp_path / "task.json"))
    assert status == 0 and "begins 2026-01-31T12:00:00+00:00" in out and "ends 2099-01-31T11:00:00+00:00" in out
    for wrong, sentence in (("tomorrow", "is no date and time"), ("2099-01-31T12:00", "has no time zone")):
        status, _, err = new_task(command, tmp_path, made, "--ends", wrong)
        assert status == 2 and sentence in " ".join(err.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["keys", "{tmp}/x", "--use", "lock"], "expected use to be one of seal, sign, service"),
        (["task", "show", "{tmp}/none.json"], "expected a signed task in"),
        (["task", "show", "{tmp}/owner"], "expected a signed task in"),
        (
            ["analyzer", "{tmp}/a", "--task", "t", "--signer", "00", "--keys", "k"],
            "give --certificate and --private-key, or --plain",
        ),
        (
            ["analyzer", "{tmp}/a", "--task", "t", "--signer", "zz", "--keys", "k", "--plain", "--config", "digits"],
            "expected a signed task in 't', which is no file",
        ),
        (
            ["client", "run", "{tmp}", "--service", "u", "--config", "digits", "--users", "a"],
            "are no numbers of users: write 0 or 0,2,4",
        ),
        (["fleet", "demo", "--protocol", "fedavg"], "expected a protocol whose reports can be shared as sums"),
        (["fleet", "demo", "--protocol", "fedavg", "--shufflers", "1"], "a protocol with messages to deploy"),
        (["fleet", "demo", "--hostile", "20"], "of 20 users 20 cannot be hostile"),
        (
            ["fleet", "demo", "--hostile", "2", "--protocol", "privunit"],
            "which protocol privunit does not add up",
        ),
        (
            ["fleet", "demo", "--verified", "--set", "protocol.noise=users"],
            "expected protocol.noise = 'aggregators'",
        ),
        (
            ["fleet", "demo", "--protocol", "privunit", "--shufflers", "1", "--aggregators", "2"],
            "a fleet has either shufflers or aggregators",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(tmp_path, command, words, sentence):
    status, out, err = command(*(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert status == 2
    assert sentence in " ".join(err.split())
    assert out == ""


def test_a_task_is_refused_under_another_signer(tmp_path, command, made):
    new_task(command, tmp_path, made)
    status, _, err = command("task", "show", str(tmp_path / "task.json"), "--signer", "00" * 16)
    assert status == 2
    assert "expected a task signed by 0000000000000000" in " ".join(err.split())


def test_a_service_has_two_keys_and_a_place_in_the_task(tmp_path, command, made):
    new_task(command, tmp_path, made)
    service = ["--task", str(tmp_path / "task.json"), "--signer", made["owner"]["id"], "--plain"]
    more = ["--clients", "c.json", "--analyzer", "https://analyzer.example"]
    home = str(tmp_path / "home")
    for keys, index, sentence in (
        ("shuffler", "1", "the task has 1 shufflers, counted from 0: there is no --index 1"),
        ("owner", "0", "whose id is"),
    ):
        words = ["--keys", str(tmp_path / keys), "--index", index]
        status, _, err = command("shuffler", home, *service, *more, *words)
        assert status == 2
        assert sentence in " ".join(err.split())
    status, _, err = command("aggregator", home, *service, *more, "--keys", str(tmp_path / "shuffler"))
    assert status == 2
    assert "the task has 0 aggregators, counted from 0: there is no --index 0" in " ".join(err.split())
    made["shuffler"] = made["owner"]  # a key to sign with is no service's
    status, _, err = new_task(command, tmp_path, made)
    assert status == 2
    assert "expected a shuffler's public keys in" in " ".join(err.split())


def test_nobody_speaks_plainly_to_another_machine(tmp_path, command, made):
    new_task(command, tmp_path, made)
    (tmp_path / "clients.json").write_text("[]")
    service = ["--task", str(tmp_path / "task.json"), "--signer", made["owner"]["id"], "--plain"]
    words = ["--clients", str(tmp_path / "clients.json"), "--keys", str(tmp_path / "shuffler")]
    status, _, err = command("shuffler", str(tmp_path / "s"), *service, *words, "--analyzer", "http://analyzer.example")
    assert status == 2
    assert "is not an https:// address; http:// is for this machine alone" in " ".join(err.split())


def test_a_user_is_made_and_enrolled(tmp_path, command, made):
    for name in ("one", "two"):
        words = ["--signer", made["owner"]["id"], "--analyzer", made["analyzer"]["id"], "--min-clients", "10"]
        pins = ["--shuffler", made["shuffler"]["id"]] if name == "one" else ["--any-service", "--eps-lifetime", "inf"]
        status, _, _ = command("client", "new", str(tmp_path / name), *words, *pins, "--eps-task", "1")
        assert status == 0
    policy = Policy.read(tmp_path / "one" / "policy.json")
    assert policy.signer.hex() == made["owner"]["id"]
    assert (policy.eps_task, policy.eps_round, policy.eps_lifetime) == (1.0, None, 10.0)
    assert (policy.shufflers, policy.aggregators) == ((bytes.fromhex(made["shuffler"]["id"]),), ())
    tls_context = Policy.read(tmp_path / "two" / "policy.json")
    assert (tls_context.shufflers, tls_context.aggregators, tls_context.eps_lifetime) == (None, None, None)
    for pins in ([], ["--shuffler", made["shuffler"]["id"], "--any-service"]):  # neither, or both
        status, _, err = command("client", "new", str(tmp_path / "three"), *words, *pins)
        assert status == 2 and "name the services that this user trusts" in " ".join(err.split())
    assert not (tmp_path / "three").exists()
    clients = tmp_path / "clients.json"
    for name in ("one", "two", "two"):
        status, out, _ = command("client", "enrol", str(clients), str(tmp_path / name / "public.json"))
        assert status == 0
    assert "2 users" in out
    assert set(read_enrolled(clients)) == {
        KeyPair.load(tmp_path / name / "key.json").public.key_id for name in ("one", "two")
    }
    status, _, err = command("client", "new", str(tmp_path / "three"), str(tmp_path / "one"), *words, *pins[:2])
    assert status == 2
    assert "already holds a user (key.json)" in " ".join(err.split())
    assert not (tmp_path / "three").exists()  # all of them or none
    several = [tmp_path / f"node-{i}" for i in range(3)]
    status, out, _ = command("client", "new", *map(str, several), *words, *pins[:2])
    assert status == 0 and out.count("user ") == 3
    assert len({KeyPair.load(one / "key.json").public.key_id for one in several}) == 3


def test_tls_certificates_of_one_authority(tmp_path, command):
    for host in ("localhost", "127.0.0.1"):
        status, _, _ = command("keys", str(tmp_path), "--tls", host)
        assert status == 0
    assert (tmp_path / "tls-localhost.key").stat().st_mode & 0o077 == 0
    authority = (tmp_path / "authority.crt").read_bytes()
    command("keys", str(tmp_path), "--tls", "another.example")
    assert (tmp_path / "authority.crt").read_bytes() == authority


def test_a_fleet_of_processes_trains_and_says_who_saw_what(tmp_path, command):
    status, out, err = command(
        *(
            "fleet",
            "demo",
            "--protocol",
            "privunit",
            "--clients",
            "4",
            "--rounds",
            "2",
            "--processes",
            "1",
            "--folder",
            str(tmp_path / "fleet"),
        ),
        *("--set", "protocol.eps_local=4.0", "--json", "--seconds", "240"),
    )
    assert status == 0, err
    said = json.loads(out)
    assert [one["outcome"] for one in said["privacy"]["history"]] == ["released", "released"]
    assert [one["uploads"] for one in said["privacy"]["history"]] == [4, 4]
    assert said["privacy"]["spent"]["eps"] == pytest.approx(said["privacy"]["statement"]["eps"])
    assert [row["party"] for row in said["transcript"]] == ["4 users", "shuffler 0", "analyzer", "anybody"]
    assert "8 uploads" in said["transcript"][1]["saw"]
    logs = "".join(path.read_text() for path in (tmp_path / "fleet").glob("*.log"))
    assert "Traceback" not in logs


@pytest.mark.soak
def test_a_verified_fleet_names_its_hostile_user_to_the_enroller_alone(tmp_path, command):
    """One user in twenty is left out of every round, which is released; without proofs the same user spoils it."""
    shared = ["fleet", "demo", "--rounds", "2", "--json", "--seconds", "400"]
    status, out, err = command(*shared, "--verified", "--folder", str(tmp_path / "fleet"))
    assert status == 0, err
    said = json.loads(out)
    history = said["privacy"]["history"]
    assert [(one["outcome"], one["uploads"]) for one in history] == [("released", 19)] * 2
    hostile = KeyPair.load(tmp_path / "fleet" / "clients" / "user-19" / "key.json").public.key_id.hex()
    assert said["refused"] == [{"round": 1, "user": hostile}, {"round": 2, "user": hostile}]
    assert hostile not in json.dumps(said["privacy"])
    assert hostile in next(row["saw"] for row in said["transcript"] if row["party"] == "who enrols users")
    spoiled = json.loads(command(*shared, "--hostile", "1", "--set", "protocol.noise=aggregators")[1])
    assert history[-1]["accuracy"] > 0.75 > 0.3 > spoiled["privacy"]["history"][-1]["accuracy"]
