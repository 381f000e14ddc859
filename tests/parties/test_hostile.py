"""Hostile input: refused in one sentence, counted, and without harm to anybody's round."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import logging
import random
import time

import httpx
import msgspec
import pytest
from parties.household import Direct, Household, in_processes, running
from parties.mutations import WRONG_JSON, Attack, Line, Mutator, Request, Victim, refusals_for
from starlette.routing import Route

from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.links import AnalyzerLink, ShufflerLink, Unreachable
from dovetail.parties.common.sealing import seal
from dovetail.parties.common.wire import PART, Closed, Packed, signed_headers
from dovetail.parties.http import _http as http_module
from dovetail.parties.http._http import Counts, Served
from dovetail.parties.http.shuffler import ShufflerService
from dovetail.parties.shuffler.store import Store

_LOG = logging.getLogger(__name__)
EXPIRED = KeyPair.generate("sign")
EXPIRED = dataclasses.replace(EXPIRED, public=msgspec.structs.replace(EXPIRED.public, expires=1))


def victims(household, up):
    """Both services, each with requests that it would take."""
    task, prefix = household.task, f"/v1/tasks/{household.task.task_id.hex()}/rounds/1"
    upload = household.envelope(0).uploads[0].encode()
    sealed = seal(bytes(task.messages().size), task.analyzer.sealing(), task.purpose(1))
    part = Packed.of([(0, sealed), (1, sealed)]).encode()
    closed = msgspec.json.encode(Closed(state="sent", parts=1, uploads=task.max_clients))
    shared = {
        "authority": up.authority,
        "expired": EXPIRED,
        "task_id": task.task_id,
        "length": task.length,
        "slots": task.messages().slots,
    }
    return [
        Victim(
            name="shuffler",
            address=up.shuffler,
            taken=(Request("POST", f"{prefix}/uploads/0", upload),),
            key=household.users[0],
            another=household.users[1],
            most=len(upload),
            **shared,
        ),
        Victim(
            name="analyzer",
            address=up.analyzer,
            taken=(Request("POST", f"{prefix}/parts/0", part), Request("POST", f"{prefix}/closed", closed)),
            key=household.shuffler_keys[0],
            another=household.users[1],
            most=PART * (4 + task.length),
            **shared,
        ),
    ]


def check(attack, answer):
    """One sentence, and no status that says that the service is to blame."""
    if answer.status is None:
        assert attack.leave or not attack.keep, attack.kind
        return
    assert answer.status in attack.statuses, (attack.kind, answer, attack.pieces[0][:300])
    if answer.status >= 400 and not answer.by_server and not attack.pieces[0].startswith(b"HEAD "):
        assert answer.text.startswith("expected "), (attack.kind, answer)
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
            answer = await line.send(attack, pause=0.002 if kind == "slow_body" else 0.0)
            check(attack, answer)
            expected += refusals_for(attack, answer)
            said = "left" if attack.leave else "by the server" if answer.by_server else str(answer.status)
            seen[(kind, said)] += 1
        await line.close()

    await asyncio.gather(*(send() for _ in range(lines)))
    return expected, seen


def await_count(read, expected):
    """What was counted, as soon as it is as expected: who hangs up is counted a moment later."""
    end = time.monotonic() + 20
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
    ("shuffler", "swapped_round", 425, "expected an upload to an open round, got one to round"),
    ("analyzer", "swapped_round", 425, "expected something about the open round, got round"),
    ("analyzer", "swapped_round_of_another_signature", 401, "expected a request with its sender's signature"),
    ("shuffler", "swapped_round_of_another_signature", 401, "expected a request with its sender's signature"),
    ("shuffler", "path_in_the_host_header", 401, "expected a request with its sender's signature"),
    ("shuffler", "swapped_task", 400, "expected task "),
    ("analyzer", "swapped_task", 400, "expected task "),
    ("shuffler", "wrong_key_id", 401, "expected a request "),
    ("shuffler", "unknown_key", 401, "expected a request signed by a known key, got another one"),
    ("analyzer", "unknown_key", 401, "expected a request signed by a known key, got another one"),
    ("shuffler", "expired_key", 401, "expected a request signed by a key that has not expired, got one that has"),
    ("shuffler", "upload_with_a_truncated_ciphertext", 400, "expected messages of 49 bytes with their slots, got"),
    ("shuffler", "upload_with_an_extended_ciphertext", 400, "expected messages of 49 bytes with their slots, got"),
    ("shuffler", "upload_out_of_range", 409, "expected slots from 0 to 5, got others"),
    ("analyzer", "part_out_of_range", 400, "expected slots from 0 to 5, got"),
    ("shuffler", "upload_of_one_slot_twice", 409, "expected one message per slot, got more"),
    ("shuffler", "upload_of_too_few", 409, "expected 6 messages, got"),
    ("shuffler", "oversize_body", 413, "expected a smaller body, got one that is too large"),
    ("analyzer", "oversize_body_in_chunks", 413, "expected a smaller body, got one that is too large"),
    ("analyzer", "closed_with_wrong_json", 400, "expected "),
    ("shuffler", "odd_number_in_the_path", 400, "expected a round as a number, got something else"),
    ("shuffler", "other_method", 405, "expected another method on this path"),
]


@pytest.mark.parametrize(("name", "kind", "status", "sentence"), SENTENCES)
def test_it_is_refused_in_one_sentence_and_counted(besieged, name, kind, status, sentence):
    _, up, targets = besieged
    counts = up.shuffler_counts if name == "shuffler" else up.analyzer_counts
    before = counts[f"refused {status}"]
    answer = send_one(targets[name], Mutator(targets[name], 1).attack(kind))
    assert answer.status == status
    assert answer.text.startswith(sentence)
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
        assert (answer.status, answer.text) == (404, "expected a path of this service, got another one")


def test_a_body_that_does_not_come_is_not_waited_for(besieged, monkeypatch):
    _, up, targets = besieged
    monkeypatch.setattr(http_module, "_SLOWEST", 0.2)
    request = targets["shuffler"].taken[0].signed(targets["shuffler"].key)
    answer = send_one(targets["shuffler"], Attack("", (request.head() + request.body[:20],), keep=False))
    assert (answer.status, answer.text) == (408, "expected the whole body in time, got a part of it")
    assert up.shuffler_counts["refused 408"] == 1


def test_who_is_too_early_or_not_written_down_tries_again(tmp_path, monkeypatch):
    """A shuffler may hear of a round after its users; a disk may be full for a while: nobody is turned away for it."""
    household = Household(tmp_path, "ss_topk", rounds=2)
    with running(household, monkeypatch) as up:
        link = ShufflerLink("https://{}:{}".format(*up.shuffler), ca=up.authority, key=household.users[0])
        envelope = household.envelope(0)
        with pytest.raises(Unreachable):
            link.upload(2, envelope.uploads[0])
        with monkeypatch.context() as broken:
            broken.setattr(Store, "_take", lambda store, arrival: 1 / 0)
            with pytest.raises(Unreachable):
                link.upload(1, envelope.uploads[0])
        link.upload(1, envelope.uploads[0])
        link.close()
        assert up.shuffler_counts == {"refused 425": 1, "accepted": 1}


def test_an_error_that_is_not_ours_says_nothing_of_us():
    async def stumble(request):
        raise ValueError("cannot reshape\narray of size 0")

    served = Served([Route("/", stumble)], Counts())

    async def ask():
        transport = httpx.ASGITransport(app=served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            return await http.get("/")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.text) == (400, "expected another request")
    assert served.counts == {"refused 400": 1}


def test_a_second_report_of_a_client_is_refused_and_the_first_one_stays(tmp_path, monkeypatch):
    household = Household(tmp_path, "ss_topk")
    with running(household, monkeypatch) as up:
        shuffler = victims(household, up)[0]
        (valid,) = shuffler.taken
        assert send_one(shuffler, Attack("", (valid.signed(shuffler.key).raw(),))).text == "accepted"
        again = valid.replace(body=bytes(16) + valid.body[16:])
        answer = send_one(shuffler, Attack("", (again.signed(shuffler.key).raw(),)))
        assert (answer.status, answer.text) == (409, "expected one upload per client and round, got another one")
        assert send_one(shuffler, Attack("", (valid.signed(shuffler.key).raw(),))).text == "known"
        assert up.shuffler_counts == {"accepted": 1, "known": 1, "refused 409": 1}


def test_some_hundred_mutations_harm_nobody(tmp_path, monkeypatch):
    """Every kind several times on both services: all counted, and the round of the honest users ends as it should."""
    household = Household(tmp_path, "ss_topk", more_keys=[EXPIRED])
    with running(household, monkeypatch) as up:
        for victim in victims(household, up):
            kinds = Mutator(victim, 0).kinds * 3
            expected, seen = asyncio.run(assault(victim, kinds, lines=4))
            assert sum(seen.values()) == len(kinds)
            counts = up.shuffler_counts if victim.name == "shuffler" else up.analyzer_counts
            assert await_count(lambda counts=counts: counts, expected) == expected
        finish(household, up)
        assert up.complaints.texts == []


@pytest.mark.soak
def test_a_hundred_thousand_mutations_harm_nobody(tmp_path):
    """The same against processes: they live on, log nothing, count everything, and the honest users' round ends."""
    household = Household(tmp_path, "ss_topk", more_keys=[EXPIRED], round_seconds=36_000.0)
    with in_processes(household) as (fleet, up):
        before = {name: process.pid for name, process in fleet.processes.items()}
        for victim in victims(household, up):
            kinds = some_of_every_kind(victim, 50_000)
            began = time.monotonic()
            expected, seen = asyncio.run(assault(victim, kinds, lines=12))
            seconds = time.monotonic() - began
            assert sum(seen.values()) == 50_000
            owner = None if victim.name == "analyzer" else household.shuffler_keys[0]
            link = AnalyzerLink("https://{}:{}".format(*victim.address), ca=up.authority, key=owner)
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
        finish(household, up)
        assert {name: process.pid for name, process in fleet.processes.items()} == before
        assert all(process.poll() is None for process in fleet.processes.values())
        for name in before:
            log = (tmp_path / f"{name}.log").read_text()
            assert len(log.splitlines()) == 1 and "listens on" in log, log[:2000]


def some_of_every_kind(victim, number):
    """Kinds at random, with every kind in it; those that need a connection of their own are rarer."""
    rng, kinds = random.Random(0), Mutator(victim, 0).kinds
    weights = [4 if Mutator(victim, 0).attack(kind).keep else 1 for kind in kinds]
    return kinds + rng.choices(kinds, weights, k=number - len(kinds))


def finish(household, up):
    """The honest users report; the round is released with all of them."""
    for user, key in enumerate(household.users):
        link = ShufflerLink("https://{}:{}".format(*up.shuffler), ca=up.authority, key=key)
        link.upload(1, household.envelope(user).uploads[0])
        link.close()
    asked, end = AnalyzerLink("https://{}:{}".format(*up.analyzer), ca=up.authority), time.monotonic() + 30
    while not (facts := asked.privacy())["history"] and time.monotonic() < end:
        time.sleep(0.05)
    asked.close()
    (ended,) = facts["history"]
    assert (ended["outcome"], ended["uploads"]) == ("released", len(household.users))
    assert facts["messages"] == len(household.users) * household.task.messages().slots
    assert facts["refused_messages"] == {"unsealable": 0, "out_of_range": 0}


def test_a_roster_is_for_the_other_shufflers_alone(tmp_path):
    household = Household(tmp_path, "split_and_mix", dim=2)
    analyzer, shuffler = household.analyzer(), household.shuffler(0)
    service = ShufflerService(shuffler, enrolled=household.enrolled, analyzer=Direct(analyzer))
    path = f"/v1/tasks/{household.task.task_id.hex()}/rounds/1/roster"
    mine, peer, user = household.shuffler_keys[0], household.shuffler_keys[1], household.users[0]

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
                headers = {} if key is None else signed_headers(key, "GET", signed, b"")
                yield await http.get(path, headers=headers)

    async def answers():
        return [answer async for answer in ask()]

    *refusals, answered = asyncio.run(answers())
    assert [one.status_code for one in refusals] == [401] * 4
    assert {one.text for one in refusals} == {
        "expected a request signed by a known key, got another one",
        "expected a request with its sender's signature, got another one",
    }
    assert msgspec.msgpack.decode(answered.content) is None
    assert service.counts == {"refused 401": 4}
    shuffler.shut()
    analyzer.shut()
