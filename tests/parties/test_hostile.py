"""Hostile input: refused in one sentence, counted, and without harm to anybody's round."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import http
import json
import logging
import random
import re
import time

import httpx
import msgspec
import numpy as np
import pytest
from parties.household import Direct, Household, running
from parties.mutations import WRONG_JSON, Attack, Line, Mutator, Request, Victim, refusals_for
from parties.sharing import Sharing
from parties.siege import unharmed
from parties.unique_buckets import read_only
from starlette.routing import Route

from dovetail.parties.common.http_clients import AnalyzerClient, IntermediaryClient, Unreachable
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.sealing import seal
from dovetail.parties.common.sharing import encode_sum
from dovetail.parties.common.wire import PART, Closed, Packed, sign_request
from dovetail.parties.http import requests as http_module
from dovetail.parties.http.intermediary import IntermediaryService
from dovetail.parties.http.requests import Counts, ServiceApp
from dovetail.parties.shuffler import ShuffleStore

_LOG = logging.getLogger(__name__)
EXPIRED = KeyPair.generate("sign")
EXPIRED = dataclasses.replace(EXPIRED, public=msgspec.structs.replace(EXPIRED.public, expires=1))

PEERS_ASK = ("roster", "agreed", "challenge", "verifiers/0")


def victims(household, up):
    """The first shuffler or aggregator and the analyzer, each with requests that it would take."""
    return [service_of(household, up), analyzer_of(household, up)]


def prefix_of(task):
    return f"/v1/tasks/{task.task_id.hex()}/rounds/1"


def shared(household, up):
    """What both victims of a task have in common."""
    task, shuffled = household.task, not household.task.aggregators
    return {
        "authority": up.authority,
        "expired": EXPIRED,
        "task_id": task.task_id,
        "length": task.message_bytes if shuffled else household.sum_bytes,
        "slots": task.messages().slots if shuffled else 0,
    }


def service_of(household, up):
    task, envelope = household.task, household.envelope(0)
    upload, prefix = envelope.uploads[0].encode(), prefix_of(household.task)
    mine, *peers = (keys.sign for keys in household.keys)
    asked = [(Request("GET", f"{prefix}/{what}"), peers[0]) for what in PEERS_ASK if peers]
    return Victim(
        name="aggregator" if task.aggregators else "shuffler",
        address=up.services[0],
        taken=(Request("POST", f"{prefix}/uploads/0", upload),),
        key=household.users[0],
        another=household.users[1],
        most=len(upload),
        content=household.content(0, envelope.uploads[0]),
        sealed=lambda report, content, round=1: household.sealed(0, content, report=report, round=round).encode(),
        asked=(*asked, (Request("GET", "/v1/counts"), mine)) if peers else (),
        **shared(household, up),
    )


def analyzer_of(household, up):
    task, prefix, batch = household.task, prefix_of(household.task), bytes(16)
    if task.aggregators:
        form = task.contribution()
        total = encode_sum(np.zeros(form.length, np.uint32), form.bits)
        part = seal(total, task.analyzer.sealing_key(), task.sum_purpose(1, 0, batch=batch))
        most, another = 1024, household.keys[1].sign  # of what is said of a round that is closed
    else:
        sealed = seal(bytes(task.messages().size), task.analyzer.sealing_key(), task.message_purpose(1))
        part = Packed.of([(0, sealed), (1, sealed)]).encode()
        most, another = PART * (4 + task.message_bytes), household.users[1]
    closed = msgspec.json.encode(Closed(state="sent", parts=1, uploads=task.max_clients, batch=batch))
    return Victim(
        name="analyzer",
        address=up.analyzer,
        taken=(
            Request("POST", f"{prefix}/batches/{batch.hex()}/parts/0", part),
            Request("POST", f"{prefix}/closed", closed),
        ),
        key=household.keys[0].sign,
        another=another,
        most=most,
        **shared(household, up),
    )


def check(attack, answer):
    """One sentence, and no status that says that the service is to blame."""
    if answer.status is None:
        assert attack.leave or not attack.keep, attack.kind
        return
    assert answer.status in attack.statuses, (attack.kind, answer, attack.pieces[0][:300])
    if answer.status >= 400 and not answer.by_server and not attack.pieces[0].startswith(b"HEAD "):
        assert answer.text != http.HTTPStatus(answer.status).phrase.lower(), (attack.kind, answer)  # but a sentence
        assert len(answer.text.split()) > 2, (attack.kind, answer)
        assert len(answer.text) < 300 and answer.text.isprintable(), (attack.kind, answer)


def refused(counts):
    return sum(number for what, number in counts.items() if what.startswith("refused "))


async def assault(victim, kinds, *, lines):
    """Send an attack of every kind listed; what answered them, and how many refusals must have been counted."""
    waiting, expected, seen = collections.deque(enumerate(kinds)), 0, collections.Counter()

    async def send():
        nonlocal expected
        line = Line(victim)
        while waiting:
            seed, kind = waiting.popleft()
            attack = Mutator(victim, seed).attack(kind)
            pause = 0.002 if kind == "slow_body" else 0.0
            while (answer := await line.send(attack, pause=pause)).status == 429:  # another line has its turn
                expected += 1
            check(attack, answer)
            expected += refusals_for(attack, answer)
            said = "left" if attack.leave else "by the server" if answer.by_server else str(answer.status)
            seen[(kind, said)] += 1
        await line.close()

    await asyncio.gather(*(send() for _ in range(lines)))
    return expected, seen


def await_count(read, expected):
    """What was counted, as soon as it is as expected: who hangs up is counted a moment later."""
    end = time.monotonic() + 60
    while refused(read()) != expected and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.1)  # what is counted too often shows, too
    return refused(read())


def send_one(victim, attack):
    async def once():
        line = Line(victim)
        answer = await line.send(attack)
        await line.close()
        return answer

    return asyncio.run(once())


@pytest.fixture(scope="module")
def monkeymodule():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def besieged(tmp_path_factory, monkeymodule):
    """Both services, with a round that stays open."""
    household = Household(tmp_path_factory.mktemp("household"), "ss_topk", more_keys=[EXPIRED])
    with running(household, monkeymodule) as up:
        yield household, up, {victim.name: victim for victim in victims(household, up)}


SENTENCES = [
    ("shuffler", "swapped_round", 425, "round N is not open here yet"),
    ("analyzer", "swapped_round", 425, "round N is not open yet: round N is"),
    (
        "analyzer",
        "swapped_round_of_another_signature",
        401,
        "not signed by a key that is enrolled here and has not expired",
    ),
    (
        "shuffler",
        "swapped_round_of_another_signature",
        401,
        "not signed by a key that is enrolled here and has not expired",
    ),
    ("shuffler", "path_in_the_host_header", 401, "not signed by a key that is enrolled here and has not expired"),
    ("shuffler", "swapped_task", 400, "this service runs task "),
    ("analyzer", "swapped_task", 400, "this service runs task "),
    ("shuffler", "wrong_key_id", 401, "not signed by a key that is enrolled here"),
    ("shuffler", "unknown_key", 401, "not signed by a key that is enrolled here and has not expired"),
    ("analyzer", "unknown_key", 401, "not signed by a key that is enrolled here and has not expired"),
    ("shuffler", "expired_key", 401, "not signed by a key that is enrolled here and has not expired"),
    ("shuffler", "messages_with_a_truncated_ciphertext", 400, "expected messages of 49 bytes with their slots, got"),
    ("shuffler", "messages_with_an_extended_ciphertext", 400, "expected messages of 49 bytes with their slots, got"),
    ("shuffler", "messages_out_of_range", 409, "this shuffler has slots 0 to 5, and a message is for another one"),
    ("shuffler", "upload_that_is_not_sealed", 400, "this upload is not sealed to shuffler 0 for round N"),
    ("shuffler", "upload_with_a_changed_seal", 400, "this upload is not sealed to shuffler 0 for round N"),
    ("shuffler", "upload_with_a_truncated_seal", 400, "this upload is not sealed to shuffler 0 for round N"),
    ("shuffler", "upload_under_another_id", 400, "this upload is not sealed to shuffler 0 for round N"),
    ("shuffler", "upload_sealed_for_another_round", 400, "this upload is not sealed to shuffler 0 for round N"),
    ("shuffler", "upload_copied_by_another_client", 400, "this upload is not sealed to shuffler 0 for round N"),
    ("analyzer", "part_with_an_odd_batch", 400, "the id of a batch in the path must be 32 hexadecimal digits"),
    ("analyzer", "slots_out_of_range", 400, "slot N does not exist: shuffler 0 has slots 0 to 5"),
    ("shuffler", "messages_in_one_slot", 409, "two messages of this upload are for the same slot"),
    ("shuffler", "messages_too_few", 409, "an upload of this task has 6 messages"),
    ("shuffler", "oversize_body", 413, "the body is larger than anything that this path takes"),
    ("analyzer", "oversize_body_in_chunks", 411, "state the length of the body: one in chunks is not read"),
    ("analyzer", "closed_with_wrong_json", 400, "this does not say how a round was closed"),
    ("shuffler", "odd_number_in_the_path", 400, "the round in the path must be a number of at most 9 digits"),
    ("shuffler", "other_method", 405, "this path takes another method"),
]


def without_numbers(text):
    """Rounds and slots are drawn."""
    return re.sub(r"\b(round|slot) \d+", r"\1 N", text)


@pytest.mark.parametrize(("name", "kind", "status", "sentence"), SENTENCES)
def test_it_is_refused_in_one_sentence_and_counted(besieged, name, kind, status, sentence):
    _, up, targets = besieged
    counts = up.shuffler_counts if name == "shuffler" else up.analyzer_counts
    before = counts[f"refused {status}"]
    answer = send_one(targets[name], Mutator(targets[name], 1).attack(kind))
    assert answer.status == status
    assert without_numbers(answer.text).startswith(sentence)
    assert counts[f"refused {status}"] == before + 1
    assert up.complaints.texts == []


@pytest.fixture(scope="module")
def besieged_aggregator(tmp_path_factory, monkeymodule):
    """An aggregator and its analyzer, with a round that stays open."""
    sharing = small(tmp_path_factory.mktemp("sharing"), "aggregators")
    with running(sharing, monkeymodule) as up:
        yield up, {victim.name: victim for victim in victims(sharing, up)}


@pytest.mark.parametrize(
    ("name", "kind", "status", "sentence"),
    [
        ("aggregator", "swapped_round", 425, "round N is not open here yet"),
        ("aggregator", "unknown_key", 401, "not signed by a key that is enrolled here and has not expired"),
        ("aggregator", "share_of_another_length", 409, "expected a share of 40 bytes, got"),
        ("aggregator", "share_of_another_form", 409, "this is not a share of 6 integers modulo 2^"),
        ("aggregator", "share_that_is_too_long", 413, "the body is larger than anything that this path takes"),
        ("aggregator", "upload_that_is_not_sealed", 400, "this upload is not sealed to aggregator 0 for round N"),
        ("aggregator", "upload_copied_by_another_client", 400, "this upload is not sealed to aggregator 0 for round N"),
        ("aggregator", "question_unsigned", 401, "not signed by a key that is enrolled here and has not expired"),
        ("aggregator", "question_by_another", 401, "not signed by a key that is enrolled here and has not expired"),
        (
            "aggregator",
            "question_with_a_flipped_signature",
            401,
            "not signed by a key that is enrolled here and has not expired",
        ),
        ("aggregator", "question_with_an_odd_round", 400, "the round in the path must be a number of at most 9 digits"),
        ("aggregator", "question_of_another_task", 400, "this service runs task "),
        ("analyzer", "sum_with_a_changed_seal", 400, "this is not a sum that aggregator 0 sealed for round N"),
        ("analyzer", "sum_of_another_batch", 400, "this is not a sum that aggregator 0 sealed for round N"),
        ("analyzer", "sum_of_another_aggregator", 400, "this is not a sum that aggregator 1 sealed for round N"),
    ],
)
def test_what_is_not_for_an_aggregator_or_its_sum_is_refused_in_one_sentence(
    besieged_aggregator, name, kind, status, sentence
):
    up, targets = besieged_aggregator
    counts = up.analyzer_counts if name == "analyzer" else up.service_counts
    before = counts[f"refused {status}"]
    answer = send_one(targets[name], Mutator(targets[name], 1).attack(kind))
    assert (answer.status, without_numbers(answer.text)[: len(sentence)]) == (status, sentence)
    assert counts[f"refused {status}"] == before + 1
    assert up.complaints.texts == []


@pytest.mark.parametrize("body", WRONG_JSON, ids=range(len(WRONG_JSON)))
def test_what_a_shuffler_must_not_say_of_a_round_is_refused(besieged, body):
    _, up, targets = besieged
    victim, before = targets["analyzer"], up.analyzer_counts["refused 400"]
    request = victim.taken[1].replace(body=body).signed(victim.key)
    check(attack := Attack("wrong json", (request.raw(),), frozenset({400})), send_one(victim, attack))
    assert up.analyzer_counts["refused 400"] == before + 1
    assert up.complaints.texts == []


def test_there_are_no_redirects(besieged):
    _, _, targets = besieged
    for path in ("/v1/task/", "/v1/status/", "//v1/task"):
        answer = send_one(targets["shuffler"], Attack("", (Request("GET", path).raw(),)))
        assert (answer.status, answer.text) == (404, "this service has no such path")


def test_a_body_that_does_not_come_is_not_waited_for(besieged, monkeypatch):
    _, up, targets = besieged
    monkeypatch.setattr(http_module, "SLOWEST", 0.2)
    request = targets["shuffler"].taken[0].signed(targets["shuffler"].key)
    answer = send_one(targets["shuffler"], Attack("", (request.head() + request.body[:20],), keep=False))
    assert (answer.status, answer.text) == (408, "the body did not come in time: send it again, faster")
    assert up.shuffler_counts["refused 408"] == 1


def test_who_is_too_early_or_not_written_down_tries_again(tmp_path, monkeypatch):
    """A shuffler may hear of a round after its users; a disk may be full for a while: nobody is turned away for it."""
    household = Household(tmp_path, "ss_topk", rounds=2)
    with running(household, monkeypatch) as up:
        link = IntermediaryClient("https://{}:{}".format(*up.shuffler), ca=up.authority)
        envelope = household.envelope(0)
        early = household.sealed(0, household.content(0, envelope.uploads[0]), round=2)
        with pytest.raises(Unreachable):
            household.give(link, 0, early, round=2)
        with monkeypatch.context() as broken:
            broken.setattr(ShuffleStore, "_write_contents", lambda store, arrivals: 1 / 0)
            with pytest.raises(Unreachable):
                envelope.send_upload(0, link)
        envelope.send_upload(0, link)
        link.close()
        assert up.shuffler_counts == {"refused 425": 1, "accepted": 1}


def test_an_error_that_is_not_ours_says_nothing_of_us():
    async def stumble(request):
        raise ValueError("cannot reshape\narray of size 0")

    served = ServiceApp([Route("/", stumble)], Counts())

    async def ask():
        transport = httpx.ASGITransport(app=served)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            return await http.get("/")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.text) == (400, "bad request")
    assert served.counts == {"refused 400": 1}


def test_a_second_report_of_a_client_is_refused_and_the_first_one_stays(tmp_path, monkeypatch):
    household = Household(tmp_path, "ss_topk")
    with running(household, monkeypatch) as up:
        shuffler = victims(household, up)[0]
        (valid,) = shuffler.taken
        assert send_one(shuffler, Attack("", (valid.signed(shuffler.key).raw(),))).text == "accepted"
        again = valid.replace(body=shuffler.sealed(bytes(16), shuffler.content))
        answer = send_one(shuffler, Attack("", (again.signed(shuffler.key).raw(),)))
        assert (answer.status, answer.text) == (
            409,
            "this client has another upload in round 1: one counts per client and round",
        )
        assert send_one(shuffler, Attack("", (valid.signed(shuffler.key).raw(),))).text == "known"
        assert up.shuffler_counts == {"accepted": 1, "known": 1, "refused 409": 1}


def small(folder, transport, **task):
    """A task with everybody of it, by shuffler or by aggregators."""
    if transport == "aggregators":
        return Sharing(folder, rounds=1, more_keys=[EXPIRED], **task)
    return Household(folder, "ss_topk", more_keys=[EXPIRED], **task)


def rows(household):
    """All that is written in the services' files."""
    found = {}
    for file in sorted(household.folder.glob("*/*.db")):
        with read_only(file) as database:
            found[file] = list(database.iterdump())
    assert len(found) == 2 + len(household.keys)
    return found


@pytest.mark.parametrize("transport", ["shuffler", "aggregators"])
def test_some_hundred_mutations_harm_nobody(tmp_path, monkeypatch, transport):
    """Every kind several times on both services: all counted, nothing written, and the round of the honest ends."""
    household = small(tmp_path, transport)
    with running(household, monkeypatch) as up:
        before = rows(household)
        for victim in victims(household, up):
            kinds = Mutator(victim, 0).kinds * 3
            expected, seen = asyncio.run(assault(victim, kinds, lines=4))
            assert sum(seen.values()) == len(kinds)
            counts = up.analyzer_counts if victim.name == "analyzer" else up.service_counts
            assert await_count(lambda counts=counts: counts, expected) == expected
            assert not {what for what in counts if what.startswith("refused 5")}
        assert rows(household) == before
        finish(household, up)
        assert up.complaints.texts == []


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["shuffler", "aggregators"])
def test_a_hundred_thousand_mutations_harm_nobody(tmp_path, transport):
    """The same against processes: they live on, log nothing, count everything, and the honest users' round ends."""
    household = small(tmp_path, transport, round_seconds=36_000.0)
    with unharmed(household) as (_, up):
        written = rows(household)
        for victim in victims(household, up):
            kinds = some_of_every_kind(victim, 50_000)
            began = time.monotonic()
            expected, seen = asyncio.run(assault(victim, kinds, lines=12))
            seconds = time.monotonic() - began
            assert sum(seen.values()) == 50_000
            owner = None if victim.name == "analyzer" else household.keys[0].sign
            link = AnalyzerClient("https://{}:{}".format(*victim.address), ca=up.authority, key=owner)
            counted = await_count(link.counts, expected)
            assert counted == expected
            by_status = collections.Counter()
            for (_, status), number in seen.items():
                by_status[status] += number
            _LOG.info(
                "%s: %d attacks in %.0f s, %d counted, %s", victim.name, 50_000, seconds, counted, dict(by_status)
            )
            _LOG.info("%s", json.dumps({" ".join(what): number for what, number in sorted(seen.items())}))
            link.close()
        assert rows(household) == written
        finish(household, up)


def some_of_every_kind(victim, number):
    """Kinds at random, with every kind in it; those that need a connection of their own are rarer."""
    rng, kinds = random.Random(0), Mutator(victim, 0).kinds
    weights = [4 if Mutator(victim, 0).attack(kind).keep else 1 for kind in kinds]
    return kinds + rng.choices(kinds, weights, k=number - len(kinds))


def finish(household, up):
    """The honest users report; the round is released with all of them."""
    links = [
        IntermediaryClient("https://{}:{}".format(*address), index=index, ca=up.authority)
        for index, address in enumerate(up.services)
    ]
    for user in range(len(household.users)):
        envelope = household.envelope(user)
        for index, link in enumerate(links):
            envelope.send_upload(index, link)
    asked, end = AnalyzerClient("https://{}:{}".format(*up.analyzer), ca=up.authority), time.monotonic() + 120
    while not (facts := asked.privacy())["history"] and time.monotonic() < end:
        time.sleep(0.05)
    for link in (asked, *links):
        link.close()
    (ended,) = facts["history"]
    assert (ended["outcome"], ended["uploads"]) == ("released", len(household.users))
    each = 0 if household.task.aggregators else len(household.users) * household.task.messages().slots
    assert facts["messages"] == (each or len(links))
    assert facts["refused_messages"] == {"unsealable": 0, "out_of_range": 0, "repeated": 0}


def test_a_roster_is_for_the_other_shufflers_alone(tmp_path):
    household = Household(tmp_path, "split_and_mix", dim=2)
    analyzer, shuffler = household.analyzer(), household.shuffler(0)
    service = IntermediaryService(shuffler, enrolled=household.enrolled, analyzer=Direct(analyzer))
    path = f"/v1/tasks/{household.task.task_id.hex()}/rounds/1/roster"
    (mine, peer), user = (keys.sign for keys in household.shuffler_keys), household.users[0]

    async def ask():
        transport = httpx.ASGITransport(app=service.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shuffler") as http:
            for key, signed in (
                (None, path),
                (user, path),
                (mine, path),
                (peer, path.replace("/1/", "/2/")),
                (peer, path),
            ):
                headers = {} if key is None else sign_request(key, "GET", signed, b"")
                yield await http.get(path, headers=headers)

    async def answers():
        return [answer async for answer in ask()]

    *refusals, answered = asyncio.run(answers())
    assert [one.status_code for one in refusals] == [401] * 4
    assert {one.text for one in refusals} == {"not signed by a key that is enrolled here and has not expired"}
    assert msgspec.msgpack.decode(answered.content) is None
    assert service.counts == {"refused 401": 4}
    shuffler.close()
    analyzer.close()
