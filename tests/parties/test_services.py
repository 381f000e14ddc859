"""What a service is told when it starts: what it cannot do, it says; what it does not do is no option."""

from __future__ import annotations

import logging

import msgspec
import pytest
import typer
from parties.household import Household

from dovetail.cli import app
from dovetail.parties.common import files
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.intermediary.enrolment import Enrolled

ROLES = ("analyzer", "shuffler", "aggregator")
LIMIT = "has 5 users and a round of this task takes 4 (max_clients)"


def write_list(path, count):
    keys = [KeyPair.generate("sign").public for _ in range(count)]
    path.write_bytes(msgspec.json.encode(keys))
    return {key.key_id for key in keys}


def test_several_services_do_not_start_with_more_users_than_a_round_takes(tmp_path):
    """Each would admit others first: once every such round was void, and charged, and nobody said why."""
    write_list(tmp_path / "clients.json", 5)
    with pytest.raises(ValueError, match="2 services would admit different users first") as refused:
        Enrolled(tmp_path / "clients.json", max_users=4, services=2)
    assert LIMIT in str(refused.value) and "revoke some" in str(refused.value)
    write_list(tmp_path / "clients.json", 4)
    assert len(Enrolled(tmp_path / "clients.json", max_users=4, services=2)) == 4


def test_one_service_says_that_not_all_of_its_users_fit(tmp_path, caplog):
    write_list(tmp_path / "clients.json", 5)
    assert len(Enrolled(tmp_path / "clients.json", max_users=4)) == 5
    assert LIMIT in caplog.text and "is turned away and charged for it" in caplog.text


def test_a_list_that_grows_too_long_is_followed_and_complained_about(tmp_path, caplog, monkeypatch):
    """It may take users off, which must hold at once."""
    monkeypatch.setattr(files, "_LOOK", 0.0)
    write_list(tmp_path / "clients.json", 4)
    enrolled = Enrolled(tmp_path / "clients.json", max_users=4, services=2)
    assert caplog.text == ""
    others = write_list(tmp_path / "clients.json", 5)
    assert set(enrolled) == others
    assert [one.levelno for one in caplog.records] == [logging.WARNING] and LIMIT in caplog.text


@pytest.mark.parametrize(("protocol", "status"), [("split_and_mix", 2), ("privunit", 0)])
def test_the_command_says_so(tmp_path, command, monkeypatch, protocol, status):
    """Two shufflers do not start; one does."""
    household = Household(tmp_path, protocol, clients=4)
    write_list(tmp_path / "clients.json", 5)
    (tmp_path / "task.json").write_bytes(msgspec.json.encode(household.signed))
    monkeypatch.setattr("dovetail.parties.http.server.serve", lambda *_, **__: None)
    words = ["--task", str(tmp_path / "task.json"), "--signer", household.signer.public.key_id.hex(), "--plain"]
    words += ["--clients", str(tmp_path / "clients.json"), "--keys", str(tmp_path / "shuffler-0" / "keys")]
    found, out, err = command("shuffler", str(tmp_path / "home"), *words, "--analyzer", "https://analyzer.example")
    assert (found, out) == (status, "")
    assert (LIMIT in " ".join(err.split())) == (status == 2)  # the warning of one goes to the log


def test_who_seals_and_opens_messages_has_workers_and_who_adds_up_has_none(command):
    """`dovetail aggregator --workers 8` once did nothing."""
    commands = typer.main.get_command(app).commands
    has = {name: "--workers" in {flag for one in commands[name].params for flag in one.opts} for name in ROLES}
    assert has == {"analyzer": True, "shuffler": True, "aggregator": False}
    status, _, err = command("aggregator", "x", "--workers", "2")
    assert status == 2 and "No such option: --workers" in err
