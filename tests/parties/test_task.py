"""Tasks: signed, canonical, and as costly as their protocol's quote says; policies that hold."""

from __future__ import annotations

import math
import os
import threading
import time

import msgspec
import numpy as np
import pytest

from dovetail.guarantee import Guarantee, Spread, quotes
from dovetail.parties.common import guarantees
from dovetail.parties.common.guarantees import calibrate_noise, certify_task
from dovetail.parties.common.keys import KeyPair, ServiceKeys
from dovetail.parties.common.task import SignedTask, TrainingTask, sign, verify
from dovetail.parties.demo import demo_config
from dovetail.parties.fleet import set_up_fleet
from dovetail.parties.user.policy import Policy, Refused
from dovetail.parties.user.spending import Later, Spending


def service_keys(**changed):
    """The public keys of a shuffler or aggregator."""
    return ServiceKeys(**{"sign": KeyPair.generate("sign").public, "seal": KeyPair.generate("seal").public, **changed})


SIGNER, ANALYZER, SHUFFLER = KeyPair.generate("sign"), KeyPair.generate("seal"), service_keys()

SHARED = {
    "protocol": "split_and_mix",
    "settings": {"clip_norm": 1.0, "noise_multiplier": 1.0},
    "shufflers": (SHUFFLER, service_keys()),
}


def task_of(**changed):
    asked = {
        "name": "digits",
        "protocol": "privunit",
        "settings": {"clip_norm": 1.0, "eps_local": 2.0},
        "dim": 20,
        "rounds": 5,
        "min_clients": 500,
        "max_clients": 1000,
        "round_seconds": 60.0,
        "eps": 3.0,
        "delta": 1e-6,
        "analyzer": ANALYZER.public,
        "shufflers": (SHUFFLER,),
    }
    return TrainingTask(**{**asked, **changed})


def policy_of(**changed):
    asked = {
        "signer": SIGNER.public.key_id,
        "analyzer": ANALYZER.public.key_id,
        "min_clients": 400,
        "eps_round": 1.0,
        "eps_task": 2.5,
        "eps_lifetime": 4.0,
        "delta_lifetime": 1e-5,
    }
    return Policy(**{**asked, **changed})


def test_a_signed_task_is_verified_and_has_one_id():
    task = task_of()
    signed = sign(task, SIGNER)
    assert verify(signed, signer=SIGNER.public.key_id) == task
    assert verify(signed, signer=SIGNER.public.key_id).task_id == task.task_id
    assert task_of(rounds=6).task_id != task.task_id
    assert task_of(settings={"eps_local": 2.0, "clip_norm": 1.0}).task_id == task.task_id  # the order says nothing
    whole = task_of(round_seconds=60, eps=3)  # whole numbers are numbers
    assert verify(sign(whole, SIGNER), signer=SIGNER.public.key_id).task_id == task.task_id


FOLDERS = ["project #3", "what?", "50%", "%41", "new\nline", os.fsdecode(b"caf\xe9"), "a'b\"c", "task?mode=rwc#"]


@pytest.mark.parametrize("name", FOLDERS)
def test_no_name_of_a_folder_switches_the_lifetime_budget_off(tmp_path, name):
    """Twelve tasks in "project #3" spent 8.25 of 2: another file was opened, and counted as nothing spent."""
    tasks = [task_of(name=f"task {number}", rounds=1) for number in range(12)]
    one = certify_task(tasks[0], 1)[0].eps
    spending = Spending(tmp_path / name, policy_of(eps_lifetime=2.5 * one))
    spent = []
    for task in tasks:
        try:
            spending.spend(task, 1)
            spent.append(task.name)
        except Refused as refusal:
            assert "would bring all tasks to" in str(refusal)
    assert spent == ["task 0", "task 1"]
    assert spending.total()[0] == pytest.approx(2 * one)


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be looked at as one" * 40, b"SQLite format 3\0"]
)
def test_a_ledger_that_cannot_be_read_stops_the_user(tmp_path, content):
    spending = Spending(tmp_path, policy_of())
    spending.spend(task_of(rounds=1), 1)
    (ledger,) = tmp_path.glob("task-*.db")
    for extra in tmp_path.glob("task-*.db-*"):
        extra.unlink()
    ledger.write_bytes(content)
    for ask in (spending.total, lambda: spending.spend(task_of(name="another", rounds=1), 1)):
        with pytest.raises(ValueError, match=r"cannot be read .* so what was spent is not known"):
            ask()


def personal_task(**changed):
    """Nine users with budgets of their own, by shares."""
    settings = {"budgets": [0.05] * 8 + [8.0], "clip_value": 1.0}
    shares = (service_keys(), service_keys())
    sizes = {"min_clients": 9, "max_clients": 9, "dim": 1, "rounds": 1}
    return task_of(protocol="apes", settings=settings, shufflers=(), aggregators=shares, **sizes, **changed)


@pytest.mark.parametrize("number", [None, 9, 500])
def test_a_user_without_a_place_among_the_budgets_does_not_guess_one(number):
    with pytest.raises(Refused, match=f"personal budgets for 9 users, .* number={number}: .* one from 0 to 8"):
        policy_of(number=number).budget(personal_task())
    assert policy_of(number=8).budget(personal_task()) == 8.0
    assert policy_of(number=0).budget(personal_task()) == 0.05
    assert policy_of(number=None).budget(task_of()) is None


def test_personal_budgets_assume_that_no_two_users_hold_one_place():
    """If all users held the place of the largest budget, 8.0 would be true where .361 is certified."""
    said = [
        line
        for line in certify_task(personal_task(), 1)[0].assumptions
        if "a place in the list of budgets of its own" in line
    ]
    assert len(said) == 1
    plain = certify_task(task_of(), 1)[0].assumptions
    assert not any("list of budgets" in line for line in plain)


@pytest.mark.parametrize(("protocol", "numbers"), [("apes", [0, 1, 2]), ("secagg", [None] * 3)])
def test_users_of_a_fleet_have_places_where_budgets_are_personal(tmp_path, protocol, numbers):
    set_up_fleet(tmp_path / "fleet", demo_config(protocol, clients=3), rounds=1, clients=3)
    homes = [tmp_path / "fleet" / "clients" / f"user-{user}" for user in range(3)]
    assert [Policy.read(home / "policy.json").number for home in homes] == numbers


def test_it_costs_what_the_quote_of_the_smallest_round_says():
    certified, local = certify_task(task_of(max_clients=500), 3)
    plan = quotes.Terms(num_users=500, dim=20, delta=1e-6, rounds=3, settings={"clip_norm": 1.0, "eps_local": 2.0})
    quote = quotes.quote("privunit", plan)
    assert (certified.eps, local.eps) == (quote.certified.eps, quote.local.eps)
    assert certify_task(task_of(), 3)[0].eps == certified.eps  # more users are welcome, and not counted on
    assert certify_task(task_of(colluders=300), 3)[0].eps > certified.eps


MIXED = {**SHARED, "settings": {"clip_norm": 1.0, "noise_multiplier": 8.0, "mixing_error": 1e-9}}


def test_what_sampling_is_off_by_is_taken_from_delta_and_adds_up_over_users():
    """A millionth of delta is set aside for it: the rest is what is certified, and both together are what is stated."""
    task, part = task_of(**MIXED), 1e-6
    messages = task.messages()
    off = guarantees._user_output_and_distance(task)[1]
    assert off > 0 and off == pytest.approx(1000 * messages.total_variation, abs=0)
    protocol, cohort = task.build()
    terms = {"dim": 20, "relation": protocol.relation, "spread": Spread(users=1000)}
    exact = Guarantee(protocol=protocol, cohorts=(cohort,) * 2, delta=1e-6 * (1 - part), **terms).bound().eps
    said = certify_task(task, 2)[0]
    assert (said.eps, said.delta) == (exact, 1e-6)
    (spent,) = [one for one in said.proof.spent if "law is not exact" in one.on]
    assert spent.delta == 1e-6 * part


@pytest.mark.parametrize("rounds", [1, 4])
def test_sampling_that_is_too_coarse_for_its_part_of_delta_is_not_certified(monkeypatch, rounds):
    """Of rounds * (1 + e^eps) * distance, what the part of delta holds to the last digit, and no more."""
    task = task_of(**MIXED)
    eps = certify_task(task, rounds)[0].eps
    largest = 1e-6 * 1e-6 / (rounds * (1 + math.exp(eps)))
    for factor, holds in ((1 - 1e-9, True), (1 + 1e-9, False)):
        monkeypatch.setattr(
            guarantees, "_user_output_and_distance", lambda task, at=factor: (task.messages(), at * largest)
        )
        assert guarantees._certify_task_body.__wrapped__(task.body, rounds)[0].is_unbounded != holds


def test_a_task_names_a_protocol_that_is_installed_and_no_module():
    for name in ("os:PathLike", "sign_bits:SignBits"):
        with pytest.raises(ValueError, match="the name of an installed protocol"):
            task_of(protocol=name)
    with pytest.raises(ValueError, match="unknown protocol"):
        task_of(protocol="not_installed")


SEALED, SIGNED = KeyPair.generate("seal").public, KeyPair.generate("sign").public


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"dim": 0}, "expected dim >= 1, got dim=0"),
        ({"rounds": 0}, "expected rounds >= 1, got rounds=0"),
        ({"max_clients": 0}, "expected max_clients >= 1"),
        ({"min_clients": 0}, "min_clients=0"),
        ({"min_clients": 1001}, "min_clients=1001"),
        ({"colluders": -1}, "expected colluders >= 0"),
        ({"round_seconds": 0.0}, "expected round_seconds > 0"),
        ({"eps": 0.0}, "expected eps > 0"),
        ({"delta": 0.0}, "delta=0.0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"version": 0}, "version=0"),
        ({"begins": -1}, "expected begins >= 0"),
        ({"ends": 0}, "must end after it begins"),
        ({"begins": 50, "ends": 50}, "must end after it begins: begins=50, ends=50"),
        ({"analyzer": SIGNED}, "this one is to sign with"),
        ({"analyzer_sign": SEALED}, "this one is to seal with"),
        ({"shufflers": ()}, "this one names 0 shufflers and 0 aggregators"),
        ({"aggregators": (service_keys(), service_keys())}, "names 1 shufflers and 2 aggregators"),
        ({**SHARED, "shufflers": (SHUFFLER, service_keys(sign=SHUFFLER.sign))}, "the same key to sign with"),
        ({**SHARED, "shufflers": (SHUFFLER, service_keys(seal=SHUFFLER.seal))}, "the same key to seal with"),
    ],
)
def test_a_task_that_cannot_be_is_refused_by_the_name_of_what_is_wrong(changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        task_of(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"dim": 2, "rounds": 1, "eps": 1e-6, "delta": 0.999},
        {"min_clients": 1},
        {"min_clients": 1000},
        {"colluders": 1000},
        {"begins": 0, "ends": 1},
        {"begins": 49, "ends": 50, "analyzer_sign": SIGNED},
    ],
)
def test_a_task_at_the_ends_of_what_may_be_is_one(changed):
    task = task_of(**changed)
    assert task.is_over() or verify(sign(task, SIGNER), signer=SIGNER.public.key_id) == task


def test_a_task_is_over_from_the_second_on_at_which_it_ends():
    task = task_of(begins=40, ends=50)
    assert [task.is_over(now) for now in (0.0, 49.9, 50.0, 60.0)] == [False, False, True, True]
    assert not task_of().is_over(1e12)


def resigned(body):
    return SignedTask(body=body, signature=SIGNER.sign(b"dovetail task\0" + body), signer=SIGNER.public)


@pytest.mark.parametrize(
    ("signed", "sentence"),
    [
        (
            lambda good: msgspec.structs.replace(good, signature=bytes(64)),
            "the task does not bear the signature of",
        ),
        (lambda good: msgspec.structs.replace(good, body=good.body[:-1] + b" }"), "does not bear the signature of"),
        (lambda good: sign(task_of(), KeyPair.generate("sign")), "expected a task signed by"),
        (lambda good: resigned(good.body + b" "), "the task is not in canonical JSON"),
        (lambda good: resigned(good.body.replace(b'"rounds":5', b'"rounds":0')), "expected rounds >= 1"),
        (
            lambda good: resigned(good.body.replace(b'"rounds":5', b'"rounds":5,"more":1')),
            "this is not a task of this version",
        ),
        (lambda good: resigned(b"{}"), "this is not a task of this version"),
        (lambda good: resigned(b"x" * 2_000_000), "expected a task of at most"),
    ],
)
def test_what_was_not_signed_like_this_is_refused(signed, sentence):
    with pytest.raises(ValueError, match=sentence):
        verify(signed(sign(task_of(), SIGNER)), signer=SIGNER.public.key_id)


def test_expired_keys_are_refused(monkeypatch):
    signed = sign(task_of(), SIGNER)
    later = time.time() + 400 * 86_400
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(ValueError, match="a key of the signer has expired"):
        verify(signed, signer=SIGNER.public.key_id)
    assert verify(signed, signer=SIGNER.public.key_id, fresh=False) == task_of()


@pytest.mark.parametrize(
    ("task", "whose"),
    [
        ({"analyzer": msgspec.structs.replace(ANALYZER.public, expires=1)}, "the analyzer"),
        (
            {"shufflers": (service_keys(sign=msgspec.structs.replace(SHUFFLER.sign, expires=1)),)},
            "shuffler 0",
        ),
        (
            {"shufflers": (service_keys(seal=msgspec.structs.replace(SHUFFLER.seal, expires=1)),)},
            "shuffler 0",
        ),
    ],
)
def test_nobody_reports_to_a_party_whose_key_has_expired(task, whose):
    signed = resigned(task_of(**task).body)
    with pytest.raises(Refused, match=f"a key of {whose} has expired"):
        policy_of().admit(signed)
    with pytest.raises(ValueError, match=f"a key of {whose} expires before 5 rounds of 60 seconds"):
        sign(task_of(**task), SIGNER)


def test_a_task_is_not_signed_that_outlasts_a_key():
    short = service_keys(seal=KeyPair.generate("seal", days=1).public)
    sign(task_of(shufflers=(short,), round_seconds=86_000 / 5), SIGNER)
    with pytest.raises(ValueError, match="a key of shuffler 0 expires before 5 rounds of 17300 seconds"):
        sign(task_of(shufflers=(short,), round_seconds=17_300), SIGNER)
    now = int(time.time())
    sign(task_of(shufflers=(short,), round_seconds=17_300, ends=now + 80_000), SIGNER)  # over before the key is
    with pytest.raises(ValueError, match="a key of shuffler 0 expires before"):  # which begins an hour from now
        sign(task_of(shufflers=(short,), round_seconds=86_000 / 5, begins=now + 3600), SIGNER)
    with pytest.raises(ValueError, match="a key of shuffler 0 expires before"):
        sign(task_of(shufflers=(short,), round_seconds=17_300, ends=now + 90_000), SIGNER)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"protocol": "privunti"}, "did you mean 'privunit'"),
        ({"settings": {"clip_norm": 1.0, "eps": 1}}, "unknown key of protocol"),
        ({"min_clients": 2000}, "min_clients"),
        ({"min_clients": 0}, "min_clients"),
        ({"max_clients": 0, "min_clients": 0}, "expected max_clients >= 1"),
        ({"colluders": -1}, "expected colluders >= 0"),
        ({"dim": 0}, "expected dim >= 1"),
        ({"delta": 0.0}, "expected 0 < delta < 1"),
        ({"delta": 1.0}, "expected 0 < delta < 1"),
        ({"eps": 0.0}, "expected eps > 0"),
        ({"rounds": 0}, "expected rounds >= 1"),
        ({"round_seconds": -1.0}, "expected round_seconds > 0"),
        ({"version": 1}, "expected a task of version 2"),
        ({"analyzer": SHUFFLER.sign}, "reports are sealed to the analyzer's key, and this one is to sign with"),
        ({"shufflers": ()}, "either shufflers or aggregators; this one names 0 shufflers and 0 aggregators"),
        (
            {"aggregators": (service_keys(), service_keys())},
            "this one names 1 shufflers and 2 aggregators",
        ),
    ],
)
def test_a_task_that_cannot_be_is_refused(changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        task_of(**changed)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"min_clients": 0}, "expected min_clients >= 1"),
        *(({name: 0.0}, f"expected {name} > 0") for name in ("eps_round", "eps_task", "eps_lifetime", "eps_local")),
        ({"delta_lifetime": 0.0}, "expected 0 < delta_lifetime < 1"),
        ({"delta_lifetime": 1.0}, "expected 0 < delta_lifetime < 1"),
        ({"epoch_seconds": -1.0}, "expected epoch_seconds >= 0"),
        ({"number": -1}, "expected number >= 0"),
    ],
)
def test_a_policy_that_bounds_nothing_is_refused(changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        policy_of(**changed)


def test_a_policy_admits_what_it_agrees_to():
    assert policy_of().admit(sign(task_of(), SIGNER)) == task_of()
    pinned = policy_of(shufflers=(service_keys().key_id, SHUFFLER.key_id))
    assert pinned.admit(sign(task_of(), SIGNER)) == task_of()


@pytest.mark.parametrize("use", ["sign", "seal"])
def test_who_has_one_of_two_keys_is_not_who_was_pinned(use):
    """A policy pins both at once: the key that is signed with, and the one that uploads are sealed to."""
    impostor = msgspec.structs.replace(SHUFFLER, **{use: KeyPair.generate(use).public})
    with pytest.raises(Refused, match=f"the task names {impostor.key_id.hex()}, which is not among"):
        policy_of(shufflers=(SHUFFLER.key_id,)).admit(sign(task_of(shufflers=(impostor,)), SIGNER))


@pytest.mark.parametrize(
    ("policy", "task", "sentence"),
    [
        ({}, {"min_clients": 300}, "wants at least 400 honest users in a round; the task guarantees 300"),
        ({}, {"colluders": 200}, "wants at least 400 honest users in a round; the task guarantees 300"),
        ({"eps_round": 0.01}, {}, "above the policy's eps_round=0.01"),
        ({"eps_task": 0.5}, {}, "all 5 rounds cost eps .* above the policy's eps_task, 0.5"),
        ({}, {"eps": 0.5}, "all 5 rounds cost eps .* above the task's own budget, 0.5"),
        ({"eps_local": 3.0}, {}, "if nobody is trusted, above the policy's eps_local=3.0"),  # 2 per round
        ({"eps_local": 1.0}, {}, "if nobody is trusted, above the policy's eps_local=1.0"),
        ({"analyzer": bytes(16)}, {}, "this user has pinned the analyzer 0000000000000000"),
        ({"shufflers": (bytes(16),)}, {}, "not among this user's pinned shufflers"),
        ({"shufflers": (SHUFFLER.key_id,)}, SHARED, "not among this user's pinned shufflers"),  # one of two
        ({"shufflers": ()}, {}, "not among this user's pinned shufflers"),
        ({"signer": bytes(16)}, {}, "expected a task signed by 0000000000000000"),
        (
            {"eps_local": 100.0, "eps_round": None, "eps_task": None},
            {**SHARED, "eps": None},
            "cost eps inf .* if nobody is trusted, above the policy's eps_local",
        ),
    ],
)
def test_a_policy_refuses_in_one_sentence(policy, task, sentence):
    with pytest.raises(Refused, match=sentence):
        policy_of(**policy).admit(sign(task_of(**task), SIGNER))


def test_rounds_are_spent_once_and_add_up(tmp_path):
    task, spending = task_of(), Spending(tmp_path, policy_of())
    assert spending.total() == (0, 0)
    spending.spend(task, 1)
    assert spending.total() == (certify_task(task, 1)[0].eps, 1e-6)
    with pytest.raises(Refused, match="has reported to round 1 before"):
        spending.spend(task, 1)
    spending.spend(task, 3)
    assert spending.total() == (certify_task(task, 2)[0].eps, 1e-6)
    assert Spending(tmp_path, policy_of()).total() == spending.total()


def test_the_lifetime_of_all_tasks_is_bounded(tmp_path):
    one = certify_task(task_of(), 1)[0].eps
    spending = Spending(tmp_path, policy_of(eps_lifetime=2.5 * one))
    spending.spend(task_of(), 1)
    spending.spend(task_of(name="another"), 1)
    with pytest.raises(Refused, match="would bring all tasks to"):
        spending.spend(task_of(name="third"), 1)
    assert spending.total()[0] == pytest.approx(2 * one)
    few = Spending(tmp_path / "few", policy_of(delta_lifetime=1.5e-6))
    few.spend(task_of(), 1)
    few.spend(task_of(), 2)  # a task's delta is spent once, however many rounds it has
    with pytest.raises(Refused, match="would bring all tasks to"):
        few.spend(task_of(name="another"), 1)


def test_a_ceiling_may_be_reached_and_not_passed(tmp_path):
    """To the last digit, of a round, a task and a lifetime, of eps and of delta."""
    task = task_of(rounds=2)
    once, whole = (certify_task(task, rounds)[0].eps for rounds in (1, 2))
    exact = {"eps_round": once, "eps_task": whole, "eps_lifetime": whole, "delta_lifetime": 1e-6}
    policy = policy_of(**exact, eps_local=certify_task(task, 2)[1].eps)
    assert policy.admit(sign(task, SIGNER)) == task
    spending = Spending(tmp_path / "all", policy)
    spending.spend(task, 1)
    spending.spend(task, 2)
    assert spending.total() == (whole, 1e-6)
    for name, value in exact.items():
        less = msgspec.structs.replace(policy, **{name: math.nextafter(value, 0)})
        if name in ("eps_round", "eps_task"):
            with pytest.raises(Refused, match=name):
                less.admit(sign(task, SIGNER))
        if name != "eps_round":
            with pytest.raises(Refused, match=f"{name}="):
                spent = Spending(tmp_path / name, less)
                spent.spend(task, 1)
                spent.spend(task, 2)


def test_many_at_once_spend_a_round_once(tmp_path):
    task, outcomes = task_of(), []

    def spend():
        try:
            Spending(tmp_path, policy_of()).spend(task, 1)
            outcomes.append("spent")
        except Refused:
            outcomes.append("refused")

    threads = [threading.Thread(target=spend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["refused"] * 3 + ["spent"]


def test_slots_are_dealt_so_that_no_shuffler_holds_all_shares():
    keys = tuple(service_keys() for _ in range(4))
    task = task_of(**{**SHARED, "shufflers": keys})  # two parties, two processes each
    deal, messages = task.assign_slots(), task.messages()
    party = messages.shuffler_of(np.arange(messages.slots))
    assert np.array_equal(deal.holder // 2, party)
    assert sorted(np.concatenate(deal.slots)) == list(range(messages.slots))
    for index, slots in enumerate(deal.slots):
        assert np.array_equal(deal.holder[slots], np.full(len(slots), index))
        assert np.array_equal(deal.place[slots], np.arange(len(slots)))
    with pytest.raises(ValueError, match="expected 2 shufflers or a multiple of that, got 3"):
        task_of(**{**SHARED, "shufflers": keys[:3]})
    with pytest.raises(ValueError, match="expected at most one shuffler per slot, got 2 for 1 slots"):
        task_of(shufflers=keys[:2])


def test_a_protocol_without_messages_is_no_task():
    with pytest.raises(ValueError, match="has a trusted curator and no shuffler to deploy"):
        task_of(protocol="fedavg", settings={})


def test_a_task_cannot_name_code_to_import():
    """It comes from the analyzer: a client must not import what it names."""
    with pytest.raises(ValueError, match="protocol"):
        task_of(protocol="dovetail.protocols.local.privunit:PrivUnit", settings={"clip_norm": 1.0, "eps_local": 1.0})


def test_noise_that_is_not_given_is_calibrated_to_the_budget():
    fields = {"protocol": "privunit", "dim": 20, "rounds": 3, "min_clients": 500, "max_clients": 1000}
    settings = calibrate_noise(settings={"clip_norm": 1.0}, **fields, colluders=10, eps=1.0, delta=1e-6)
    task = task_of(settings=settings, colluders=10, rounds=3)
    assert 0.98 < certify_task(task, 3)[0].eps <= 1.0
    with pytest.raises(ValueError, match=r"give the budget, privacy\.eps, or the noise, protocol\.eps_local"):
        calibrate_noise(settings={"clip_norm": 1.0}, **fields, colluders=0, eps=None, delta=1e-6)


def test_one_report_an_epoch_whatever_the_task(tmp_path):
    spending = Spending(tmp_path, policy_of(epoch_seconds=0.5, eps_lifetime=None))
    spending.spend(task_of(), 1)
    with pytest.raises(Refused, match=r"allows one in 0.5 seconds"):
        spending.spend(task_of(name="another"), 1)
    time.sleep(0.6)
    spending.spend(task_of(name="another"), 1)


def test_a_clock_that_was_once_ahead_locks_nobody_out(tmp_path):
    spending = Spending(tmp_path, policy_of(epoch_seconds=0.2, eps_lifetime=None))
    (tmp_path / "last-report").write_text(repr(time.time() + 1e6))
    with pytest.raises(Later, match=r"allows one in 0.2 seconds"):
        spending.spend(task_of(), 1)
    time.sleep(0.25)
    spending.spend(task_of(), 1)


def test_what_promises_nothing_is_spent_as_infinite(tmp_path):
    spending = Spending(tmp_path, policy_of(eps_round=None, eps_task=None, eps_lifetime=None))
    task = task_of(settings={"clip_norm": 1.0, "eps_local": 3.0}, eps=None)
    spending.spend(task, 1)
    assert 0 < spending.total()[0] < float("inf")


def test_a_surplus_that_would_be_kept_is_refused():
    settings = {"clip_value": 1.0, "eps_local": 1.0, "beta": 0.5, "inclusion": "fixed-k", "pad_to": 600}
    asked = {"protocol": "ss_double", "settings": settings}
    assert task_of(**asked).build()[0].layout(20).padding.pad_to == 600
    with pytest.raises(
        ValueError, match="may overflow slots that are padded to 600: this needs overflow = 'drop', not 'keep'"
    ):
        task_of(protocol="ss_double", settings={**settings, "overflow": "keep"})


def test_shufflers_have_keys_of_their_own():
    alike = (SHUFFLER, service_keys(sign=SHUFFLER.sign), service_keys(seal=SHUFFLER.seal))
    for other in alike:
        with pytest.raises(ValueError, match="two shufflers or aggregators have the same key to"):
            task_of(**{**SHARED, "shufflers": (SHUFFLER, other)})


def test_without_trust_it_rests_on_the_same_messages():
    _, local = certify_task(task_of(), 1)
    assert any("AES-128" in assumption for assumption in local.assumptions)


def test_a_ledger_that_was_only_begun_spent_nothing_and_a_ceiling_may_change(tmp_path):
    (tmp_path / "task-00.db").touch()
    Spending(tmp_path, policy_of()).spend(task_of(), 1)
    assert Spending(tmp_path, policy_of(eps_task=2.4)).total()[0] > 0
    Spending(tmp_path, policy_of(eps_task=2.4)).spend(task_of(), 2)
    with pytest.raises(Refused, match=r"above the policy's eps_task=0\.1"):
        Spending(tmp_path, policy_of(eps_task=0.1)).spend(task_of(), 3)
