"""A user's consent: it leaves tasks, refuses kinds of them, and sees what it has spent on whom."""

from __future__ import annotations

import json

import numpy as np
import pytest
from parties.household import Household
from typer.testing import CliRunner

from dovetail.cli import app
from dovetail.parties.user.client import Client
from dovetail.parties.user.consent import Consent, spending_by_task
from dovetail.parties.user.policy import Refused


def user(household, **options):
    folder = household.folder / "user-0"
    folder.mkdir()
    household.users[0].save(folder / "key.json")
    return folder, Client(folder, policy=household.policy, key=household.users[0], **options)


def run(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_who_has_left_a_task_reports_no_more_and_what_it_spent_stays(tmp_path):
    household = Household(tmp_path, "privunit", rounds=3)
    folder, client = user(household)
    client.report(household.signed, 1, np.zeros(6))
    run("client", "leave", folder, household.task.task_id.hex())
    with pytest.raises(Refused, match="this user has left the task"):
        client.admit(household.signed)  # the client that runs
    with pytest.raises(Refused, match="this user has left the task"):
        client.report(household.signed, 2, np.zeros(6))
    (told,) = json.loads(run("client", "spent", folder, "--json"))
    assert (told["name"], told["protocol"], told["rounds"], told["left"]) == ("small", "privunit", 1, True)
    assert told["analyzer"] == household.task.analyzer_id.hex() and told["eps"] > 0
    assert ")-DP for one user, by the task's own statement" in run("client", "spent", folder)


def test_what_a_restored_ledger_has_forgotten_is_told_by_the_witness(tmp_path):
    household, witness = Household(tmp_path, "privunit", rounds=3), tmp_path / "witness"
    folder, client = user(household, witness=witness)
    client.report(household.signed, 1, np.zeros(6))
    before = json.loads(run("client", "spent", folder, "--witness", witness, "--json"))
    for file in (folder / "spending").glob("task-*"):
        file.unlink()
    (told,) = json.loads(run("client", "spent", folder, "--witness", witness, "--json"))
    assert [{**told, "set_back": False}] == before and told["set_back"] and told["eps"] > 0
    assert run("client", "spent", folder, "--witness", witness).strip().endswith("; set back")
    assert json.loads(run("client", "spent", folder, "--witness", tmp_path / "another", "--json")) == []


@pytest.mark.parametrize("kind", ["small", "privunit"])
def test_a_kind_of_task_is_refused_for_ever(tmp_path, kind):
    household = Household(tmp_path, "privunit")
    folder, client = user(household)
    run("client", "refuse", folder, kind)
    with pytest.raises(Refused, match="this user refuses tasks of the name or protocol"):
        client.report(household.signed, 1, np.zeros(6))
    assert spending_by_task(folder) == [] and Consent.read(folder).known == {}


def test_another_training_on_the_same_users_is_spent_from_the_same_lifetime(tmp_path):
    first, again = (Household(tmp_path / name, "privunit", delta=0.3) for name in ("first", "again"))
    folder, client = user(first)
    client.report(first.signed, 1, np.zeros(6))
    policy = again.policy  # of the same user, with a lifetime of delta .5
    second = Client(folder, policy=policy, key=first.users[0])
    with pytest.raises(Refused, match=r"would bring all tasks to .* above the policy's eps_lifetime"):
        second.report(again.signed, 1, np.zeros(6))
