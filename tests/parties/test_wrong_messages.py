"""Wrong messages in well-formed requests, and rounds that never had enough users: counted, and no harm to others."""

from __future__ import annotations

import asyncio
import collections
import secrets
import time

import httpx
import numpy as np
import pytest
from parties.household import Direct, Household, files_under

from dovetail import protocols
from dovetail.events import Everyone
from dovetail.mechanisms import ExactSampler
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.sealing import seal
from dovetail.parties.common.wire import Closed, Malformed, Packed, Upload, sign_request
from dovetail.parties.http import intermediary as service_module
from dovetail.parties.http.intermediary import IntermediaryService


def bad_message(task, how):
    """A message of the right length that no honest client sends."""
    if how == "unsealable":
        return secrets.token_bytes(task.message_bytes)
    if how == "another round":
        return seal(bytes(task.messages().size), task.analyzer.sealing_key(), task.message_purpose(2))
    if how == "another key":
        other = KeyPair.generate("seal").public
        return seal(bytes(task.messages().size), other.sealing_key(), task.message_purpose(1))
    return seal(
        b"\xff" * task.messages().size, task.analyzer.sealing_key(), task.message_purpose(1)
    )  # no level, no share


@pytest.mark.parametrize(
    ("protocol", "how", "counted"),
    [
        ("ss_simple", "out of range", {"unsealable": 0, "out_of_range": 6, "repeated": 0}),
        ("ss_simple", "unsealable", {"unsealable": 6, "out_of_range": 0, "repeated": 0}),
        ("privunit", "another round", {"unsealable": 1, "out_of_range": 0, "repeated": 0}),
        ("privunit", "another key", {"unsealable": 1, "out_of_range": 0, "repeated": 0}),
    ],
)
def test_a_sealed_message_that_is_wrong_is_counted_and_the_round_goes_on(tmp_path, protocol, how, counted):
    household = Household(tmp_path, protocol)
    facts, said = one_round(household, bad=lambda user, upload: spoiled(household, user, upload, how))
    assert facts["history"] == [{"round": 1, "outcome": "released", "uploads": 4, "accuracy": None}]
    assert facts["last_refused"] == counted
    assert said == [(1, Closed(state="sent", parts=1, uploads=4, batch=facts["batch"]))]


@pytest.mark.parametrize("how", ["out of range", "unsealable"])
def test_one_wrong_share_spoils_the_round_of_split_and_mix(tmp_path, how):
    household = Household(tmp_path, "split_and_mix", dim=2)
    facts, _ = one_round(household, bad=lambda user, upload: spoiled(household, user, upload, how, only=1))
    assert [one["outcome"] for one in facts["history"]] == ["spoiled"]
    assert sum(facts["last_refused"].values()) == 1


def test_a_round_of_nothing_but_wrong_messages_ends(tmp_path):
    household = Household(tmp_path, "privunit")
    facts, _ = one_round(
        household, bad=lambda user, upload: spoiled(household, user, upload, "unsealable"), bad_users=4
    )
    assert facts["history"][0]["outcome"] == "released"
    assert facts["last_refused"] == {"unsealable": 4, "out_of_range": 0, "repeated": 0}


def spoiled(household, user, upload, how, *, only=None):
    """The upload of a user who puts other messages into it, and seals it to the shuffler as it should."""
    task = household.task
    packed = Packed.decode(household.content(user, upload), length=task.message_bytes)
    sealed = packed.ciphertexts()
    changed = [bad_message(task, how) if only is None or i < only else one for i, one in enumerate(sealed)]
    return household.sealed(user, Packed(packed.slots, b"".join(changed)).encode(), report=upload.report)


def one_round(household, *, bad, bad_users=1):
    """A round without a network, in which the first users send what `bad` makes of their upload to shuffler 0."""
    analyzer = household.analyzer()
    shufflers = [household.shuffler(i) for i in range(len(household.shuffler_keys))]
    for shuffler in shufflers:
        shuffler.store.open_round(1, head=analyzer.status().head, closes=0.0)
    for user, key in enumerate(household.users):
        for i, upload in enumerate(household.envelope(user).uploads):
            sent = bad(user, upload) if user < bad_users and i == 0 else upload
            shufflers[i].accept(1, client=key.public.key_id, upload=sent)
    rosters = [shuffler.store.freeze(1) for shuffler in shufflers]
    links = [Direct(analyzer, i) for i in range(len(shufflers))]
    for i, shuffler in enumerate(shufflers):
        shuffler.close_round(1, [roster for j, roster in enumerate(rosters) if j != i])
        shuffler.forward(1, links[i])
    facts = {**analyzer.privacy(), "batch": shufflers[0].store.batch_id(1)}
    for party in (*shufflers, analyzer):
        party.close()
    return {**facts, "last_refused": facts["refused_messages"]}, links[0].said


def copied(household, upload):
    """Somebody else's upload, as the first user's."""
    return household.envelope(1).uploads[0]


def under_another_id(household, upload):
    return Upload(secrets.token_bytes(16), upload.sealed)


def for_another_round(household, upload):
    return household.sealed(0, household.content(0, upload), report=upload.report, round=2)


def for_another_shuffler(household, upload):
    return household.envelope(0).uploads[1]


def for_an_impostor(household, upload):
    """Sealed to a key that an impostor has put in the place of the shuffler's."""
    purpose = household.task.upload_purpose(1, 0, sender=household.users[0].public.key_id, report=upload.report)
    other = KeyPair.generate("seal").public
    return Upload(upload.report, seal(household.content(0, upload), other.sealing_key(), purpose))


def not_sealed(household, upload):
    return Upload(upload.report, household.content(0, upload))


def changed(household, upload):
    return Upload(upload.report, upload.sealed[:-1] + bytes([upload.sealed[-1] ^ 1]))


def cut(household, upload):
    return Upload(upload.report, upload.sealed[:-1])


def nothing(household, upload):
    return Upload(upload.report, b"")


@pytest.mark.parametrize(
    "wrong",
    [
        copied,
        under_another_id,
        for_another_round,
        for_another_shuffler,
        for_an_impostor,
        not_sealed,
        changed,
        cut,
        nothing,
    ],
)
def test_an_upload_that_its_sender_did_not_seal_to_this_shuffler_is_refused(tmp_path, wrong):
    household = Household(tmp_path, "split_and_mix", dim=2)
    shuffler, client = household.shuffler(0), household.users[0].public.key_id
    shuffler.store.open_round(1, head=b"head", closes=0.0)
    upload = household.envelope(0).uploads[0]
    with pytest.raises(
        Malformed, match="this upload is not sealed to shuffler 0 for round 1 by the key that signed it"
    ):
        shuffler.accept(1, client=client, upload=wrong(household, upload))
    assert shuffler.store.num_uploads(1) == 0
    assert shuffler.accept(1, client=client, upload=upload) == "accepted"
    shuffler.close()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_an_update_without_a_finite_square_counts_as_zero(bad):
    """Where hardly any noise is left: all of it, in every protocol."""
    update = np.array([bad, 1.0, -1.0, 0.0], np.float32)
    levels = messages_of("ss_simple", {"clip_value": 1.0, "eps_local": 60.0, "levels": 3, "randomizer": "rr"})
    sent = levels.randomize(update, sampler=ExactSampler())
    assert sent.body[:, 0].tolist() == [1, 1, 1, 1]
    shares = messages_of(
        "split_and_mix", {"clip_norm": 1.0, "noise_multiplier": 1e-9, "shufflers": 2, "mixing_error": 1e-4}
    )
    sent = shares.randomize(update, sampler=ExactSampler())
    words = sent.body.view("<u4").reshape(4, shares.shares).astype(object).sum(axis=1) % shares.modulus
    assert words.tolist() == [0, 0, 0, 0]


def messages_of(name, settings, dim=4):
    cohort = protocols.Cohort(participation=Everyone(), size=4, min_size=4, colluders=0)
    return protocols.build(name, settings).settle(cohort, dim).messages(dim)


@pytest.mark.parametrize("protocol", ["privunit", "ss_topk", "ss_simple", "split_and_mix"])
def test_an_update_of_nan_leaves_a_client_as_any_other(tmp_path, protocol):
    household = Household(tmp_path, protocol)
    envelope = household.envelope(0, update=np.full(6, np.nan))
    other = household.envelope(1, update=np.ones(6))
    assert [len(one.sealed) for one in envelope.uploads] == [len(one.sealed) for one in other.uploads]


class Clock:
    """Time that can be put forward."""

    def __init__(self):
        self.ahead = 0.0

    def time(self):
        return time.time() + self.ahead

    def monotonic(self):
        return time.monotonic() + self.ahead


async def uploads_below_the_minimum(household, service, clock, bodies):
    prefix = f"/v1/tasks/{household.task.task_id.hex()}/rounds/1/uploads/0"
    transport = httpx.ASGITransport(app=service.app)
    answers, waiting = collections.Counter(), collections.deque(zip(household.users, bodies, strict=True))
    store = service._party.store
    async with (
        service.app.router.lifespan_context(service.app),
        httpx.AsyncClient(transport=transport, base_url="http://shuffler") as http,
    ):

        async def upload():
            while waiting:
                key, body = waiting.popleft()
                answer = await http.post(prefix, content=body, headers=sign_request(key, "POST", prefix, body))
                answers[answer.text] += 1

        while store.state(1) == "unknown":
            await asyncio.sleep(0.01)
        await asyncio.gather(*(upload() for _ in range(32)))
        kept = b"".join(files_under(household.folder / "shuffler-0").values())
        clock.ahead = household.task.round_seconds + 1
        while store.state(1) != "done":
            await asyncio.sleep(0.01)
        body = household.sealed(0, bytes(4) + secrets.token_bytes(household.task.message_bytes)).encode()
        late = await http.post(prefix, content=body, headers=sign_request(household.users[0], "POST", prefix, body))
    return answers, kept, late


@pytest.mark.parametrize("clients", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_below_the_minimum_nothing_is_sent_or_kept(tmp_path, monkeypatch, clients):
    household = Household(
        tmp_path, "privunit", clients=clients, min_clients=clients + 1, max_clients=2 * clients, rounds=2
    )
    clock, analyzer, shuffler = Clock(), household.analyzer(), household.shuffler()
    monkeypatch.setattr(service_module, "time", clock)
    link = Direct(analyzer)
    service = IntermediaryService(shuffler, enrolled=household.enrolled, analyzer=link)
    messages = [secrets.token_bytes(household.task.message_bytes) for _ in range(clients)]
    bodies = [household.sealed(user, bytes(4) + message).encode() for user, message in enumerate(messages)]
    answers, kept, late = asyncio.run(uploads_below_the_minimum(household, service, clock, bodies))
    assert answers == {"accepted": clients} and service.counts["accepted"] == clients
    ids = [key.public.key_id for key in household.users]
    assert all(message in kept for message in messages[:50]) and all(one in kept for one in ids[:50])
    assert link.parts == []
    assert link.said == [(1, Closed(state="void", parts=0, uploads=clients, batch=shuffler.store.batch_id(1)))]
    left = b"".join(files_under(tmp_path / "shuffler-0", tmp_path / "analyzer").values())
    assert not any(message in left for message in messages) and not any(one in left for one in ids)
    assert (late.status_code, service.counts["refused 410"]) == (410, 1)
    assert late.text == "round 1 is closed and takes no more uploads"
    reason = f"{clients} users reported, and the task asks for {clients + 1}"
    ended = {"round": 1, "outcome": "void", "uploads": clients, "accuracy": None, "reason": reason}
    assert analyzer.privacy()["history"] == [ended]
    assert analyzer.status().round == 2 and analyzer.model(1) == analyzer.model(0)
    shuffler.close()
    analyzer.close()
