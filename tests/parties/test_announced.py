"""What the analyzer says may come through any cache: what was changed, is old or another task's is refused."""

from __future__ import annotations

import asyncio
import http.server
import json
import logging
import re
import threading
import time
import types

import httpx
import msgspec
import numpy as np
import pytest
from parties.household import Direct, Household, running
from parties.proxies import cache_in_front_of, needs_nginx

from dovetail.parties.common import wire as status_module
from dovetail.parties.common.http_clients import IntermediaryClient, Rejected, Unreachable
from dovetail.parties.common.keys import KeyPair, KeyRing
from dovetail.parties.common.notices import Notices, announce_rotation, rotate_key, withdraw_task
from dovetail.parties.common.task import sign
from dovetail.parties.common.wire import RETRY_AFTER, SIGNATURE, Forged, RoundStatus, check_status, sign_status
from dovetail.parties.http.analyzer import AnalyzerService
from dovetail.parties.http.intermediary import IntermediaryService
from dovetail.parties.user import participation as participation_module
from dovetail.parties.user.client import Client
from dovetail.parties.user.participation import Participation
from dovetail.parties.user.policy import Refused
from dovetail.parties.user.spending import BudgetSpent

TASK = bytes(range(32))
KEY = KeyPair.generate("sign")
STATUS = sign_status(RoundStatus(task_id=TASK, round=3, over=False, head=bytes(32), closes=1_800_000_000), KEY)


@pytest.mark.parametrize(
    "changed",
    [
        {"round": 4},
        {"over": True},
        {"closes": STATUS.closes + 1},
        {"head": bytes(31) + b"\1"},
        {"signature": b""},
        {"signature": bytes(64)},
        {"signature": STATUS.signature[:-1] + bytes([STATUS.signature[-1] ^ 1])},
    ],
    ids=lambda changed: "".join(changed),
)
def test_every_field_of_a_status_is_signed(changed):
    check_status(STATUS, task_id=TASK, key=KEY.public)
    with pytest.raises(Forged, match="the status does not bear the analyzer's signature: it was changed"):
        check_status(msgspec.structs.replace(STATUS, **changed), task_id=TASK, key=KEY.public)
    with pytest.raises(Forged, match="this status belongs to another task than"):
        check_status(STATUS, task_id=bytes(32), key=None)


def got(app, path, **headers):
    """What a service answers, without a network before it."""

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://service") as asked:
            return await asked.get(path, headers=headers)

    return asyncio.run(ask())


class Cache(http.server.ThreadingHTTPServer):
    """A proxy in front of a service: it passes on what it is told, or what it keeps, or what it makes of it."""

    def __init__(self, app):
        super().__init__(("127.0.0.1", 0), _Handler)
        self._app, self.kept, self.change, self.asked = app, {}, {}, []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def keep(self, path):
        """From now on answer by itself what is asked for on a path."""
        self.kept[path] = got(self._app, path)
        assert self.kept[path].status_code == 200

    def answer(self, path):
        self.asked.append(path)
        answer = self.kept.get(path) or got(self._app, path)
        body, headers = answer.content, dict(answer.headers)
        what = path.split("/")[-1 if path.count("/") == 2 else -2]
        return answer.status_code, *self.change.get(what, lambda body, headers: (body, headers))(body, headers)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status, body, headers = self.server.answer(self.path)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said):
        pass


class Line(IntermediaryClient):
    """A user's link through the cache; what it uploads is kept."""

    def __init__(self, cache):
        super().__init__(f"http://127.0.0.1:{cache.server_port}", timeout=5.0)
        self.got = []

    def upload(self, task_id, round, upload, *, sender, signature):
        self.got.append((round, upload.report))


class World:
    """One shuffler of a task behind a cache, and the user who asks through it."""

    def __init__(self, folder, **task):
        self.household = Household(folder, "privunit", dim=3, rounds=9, round_seconds=600.0, **task)
        self.analyzer, self.shuffler = self.household.analyzer(), self.household.shuffler()
        self.direct = Direct(self.analyzer)
        options = {"enrolled": self.household.enrolled, "analyzer": self.direct}
        self.service = IntermediaryService(self.shuffler, **options)
        self.follow()
        self.cache = Cache(self.service.app)
        self.line = Line(self.cache)
        self.model_path = f"/v1/tasks/{self.household.task.task_id.hex()}/models"

    def follow(self):
        """The shuffler hears what the analyzer says."""
        asyncio.run(self.service._follow_analyzer())

    def next_round(self):
        self.analyzer.give_up_round(self.analyzer.status().round)
        self.follow()

    def user(self):
        """A user's process, begun anew."""
        household = self.household
        client = Client(household.folder / "user-0", policy=household.policy, key=household.users[0])
        return Participation(client, [self.line], np.ones_like, patience=0.0)

    def spent(self):
        return sorted((self.household.folder / "user-0" / "spending").glob("task-*.db"))

    def close(self):
        self.line.close()
        self.cache.shutdown()
        self.cache.server_close()
        self.shuffler.close()
        self.analyzer.close()


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.close()


def flipped(body, headers):
    """A digit of a number in it, or the last byte."""
    place = body.find(b'"closes":')
    place = len(body) - 1 if place < 0 else place + len(b'"closes":1')
    return body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :], headers


def unsigned(body, headers):
    return body, {name: value for name, value in headers.items() if name != SIGNATURE}


def test_an_honest_cache_is_as_good_as_the_service(world):
    for path in ("/v1/task", "/v1/status", f"{world.model_path}/0"):
        world.cache.keep(path)
    user = world.user()
    assert user.step() is not None
    assert [round for round, _ in world.line.got] == [1] and len(world.spent()) == 1
    kept = {path: answer.headers for path, answer in world.cache.kept.items()}
    assert all(headers["etag"] and headers["cache-control"].startswith("public, max-age=") for headers in kept.values())
    assert kept[f"{world.model_path}/0"]["cache-control"] == "public, max-age=31536000"
    again = got(world.service.app, "/v1/status", **{"if-none-match": kept["/v1/status"]["etag"]})
    assert again.status_code == 304


@needs_nginx
def test_nginx_answers_for_a_service_as_operators_are_told_to_set_it_up(tmp_path, monkeypatch):
    """Users ask it again and again, the service hears of it once a second, and an upload goes through."""
    household, asked, answer = Household(tmp_path, "privunit", dim=3), [], IntermediaryService._get_status

    async def counted(service, request):
        asked.append(1)
        return await answer(service, request)

    monkeypatch.setattr(IntermediaryService, "_get_status", counted)
    with running(household, monkeypatch) as up, cache_in_front_of(up, tmp_path) as proxy:
        line = IntermediaryClient(proxy.url, ca=up.authority)
        status = next(found for _ in range(500) if (found := answered(line.status)))
        began, before = time.monotonic(), len(asked)
        assert all(line.status() == status for _ in range(100))
        assert len(asked) - before <= 2 + time.monotonic() - began
        client = Client(tmp_path / "user-0", policy=household.policy, key=household.users[0])
        Participation(client, [line], np.ones_like).step()
        line.close()
        assert up.service_counts == {"accepted": 1} and up.complaints.texts == []


def answered(ask):
    try:
        return ask()
    except Unreachable:
        time.sleep(0.02)
        return None


def test_operators_see_until_when_a_round_is_open(world, command):
    status, out, _ = command("party", "status", world.line.url)
    assert status == 0 and re.search(r"; ready; round 1, closes 20..-..-..T..:..:..Z$", out.strip())
    status, out, _ = command("party", "status", world.line.url, "http://127.0.0.1:1", "--json")
    told = json.loads(out)
    assert status == 1 and [one["ready"] for one in told] == [True, False]
    assert told[0]["closes"] > time.time() and told[1]["closes"] is None


def test_anybody_can_fetch_the_model_and_see_whose_it_is(world, tmp_path, command):
    signer = world.household.signer.public.key_id.hex()
    out = tmp_path / "model.npy"
    status, said, _ = command("party", "model", world.line.url, "--signer", signer, "--out", str(out))
    assert status == 0 and "parameters after no round yet, the first one" in " ".join(said.split())
    np.testing.assert_array_equal(np.load(out), world.line.model(0))
    for words, sentence in (
        (["--signer", "00" * 16, "--out", str(out)], "expected a task signed by 0000"),
        (["--signer", signer, "--out", str(out), "--config", "digits"], "--out must end with .npz with --config"),
        (
            ["--signer", signer, "--out", str(out.with_suffix(".npz")), "--config", "digits"],
            "this model has 3 parameters, and that of the config 650",
        ),
    ):
        status, _, err = command("party", "model", world.line.url, *words)
        assert status == 2 and sentence in " ".join(err.split())
    assert not out.with_suffix(".npz").exists()
    world.cache.change["models"] = flipped
    status, _, err = command("party", "model", world.line.url, "--signer", signer, "--out", str(out))
    assert status == 2 and "the model after round 0 does not bear the analyzer's signature" in " ".join(err.split())


def test_a_user_that_cannot_take_part_is_named_and_hears_of_a_withdrawal(world, tmp_path, command, monkeypatch):
    def run(signer, folder):
        made = [str(tmp_path / folder / "user-0"), "--signer", signer, "--analyzer", "00" * 16, "--min-clients", "1"]
        made.append("--any-service")
        assert command("client", "new", *made)[0] == 0
        words = ["--service", world.line.url, "--config", "digits", "--witness", str(tmp_path / "witness")]
        status, _, err = command("client", "run", str(tmp_path / folder), *words)
        return status, " ".join(err.split())

    status, said = run("11" * 16, "strangers")
    assert status == 2 and "dovetail: user 0: expected a task signed by 1111" in said
    assert said.endswith("user 0 reported in 0 rounds")
    household, task_id = world.household, world.household.task.task_id
    notices = Notices(household.signer.public.key_id, [withdraw_task(household.signer, task_id)])
    monkeypatch.setattr(world.service, "_notices", lambda: notices)
    world.analyzer.end_task("the signer has withdrawn the task")
    world.follow()
    status, said = run(household.signer.public.key_id.hex(), "users")
    assert status == 0 and said.endswith("user 0 reported in 0 rounds; the task was withdrawn")


@pytest.mark.parametrize(("hours", "words"), [(-3, "10800 seconds behind"), (3, "seconds ahead of")])
def test_a_service_whose_clock_is_off_says_so_and_is_not_ready(world, monkeypatch, caplog, hours, words):
    """Round after round was charged and void, and nobody said why."""
    assert got(world.service.app, "/readyz").status_code == 200
    now = time.time
    with monkeypatch.context() as wrong:
        wrong.setattr(status_module, "time", types.SimpleNamespace(time=lambda: now() + 3600 * hours))
        world.next_round()
        assert got(world.service.app, "/readyz").status_code == 503
    (said,) = caplog.messages
    assert "this machine's clock is" in said and words in re.sub("10(799|800|801) seconds", "10800 seconds", said)
    world.next_round()
    assert got(world.service.app, "/readyz").status_code == 200


def test_the_same_status_is_signed_once_and_told_by_all(world):
    first = world.analyzer.status()
    assert first is world.analyzer.status() and first.closes > time.time()
    told = got(AnalyzerService(world.analyzer).app, "/v1/status")
    assert told.content == got(world.service.app, "/v1/status").content


@pytest.mark.parametrize(
    ("what", "change", "sentence"),
    [
        (
            "status",
            flipped,
            "the status does not bear the analyzer's signature: it was changed on its way, or is not the ana",
        ),
        (
            "models",
            flipped,
            "the model after round 0 does not bear the analyzer's signature: it was changed on its way, or",
        ),
        ("models", unsigned, "the model after round 0 does not bear the analyzer's signature: it was changed"),
    ],
)
def test_a_cache_that_changes_a_byte_is_refused(world, what, change, sentence):
    world.cache.change[what] = change
    with pytest.raises(Rejected, match=sentence) as refused:
        world.user().step()
    assert str(refused.value).endswith(f", from {world.line.url}") and "\n" not in str(refused.value)
    assert world.line.got == [] == world.spent()


def test_a_model_of_an_earlier_round_is_refused(world):
    world.cache.keep(f"{world.model_path}/0")
    world.next_round()
    world.cache.kept[f"{world.model_path}/1"] = world.cache.kept[f"{world.model_path}/0"]
    with pytest.raises(Rejected, match="the model after round 1 does not bear the analyzer's signature: it was"):
        world.user().step()
    assert world.line.got == [] == world.spent()


def test_a_status_from_before_makes_nobody_answer_twice(world):
    """Neither in the same process nor in one that begins anew; with the round of the day it goes on."""
    world.cache.keep("/v1/status")
    user = world.user()
    user.step()
    for one in (user, user, world.user()):
        one.step()
    assert len(world.line.got) == 1
    world.cache.kept.clear()
    world.next_round()
    user.step()
    assert [round for round, _ in world.line.got] == [1, 2]


def test_a_status_older_than_one_that_was_heard_is_refused(world):
    world.cache.keep("/v1/status")
    old = world.cache.kept.pop("/v1/status")
    world.next_round()
    user = world.user()
    user.step()
    world.cache.kept["/v1/status"] = old
    with pytest.raises(Unreachable, match="the status says round 1 after round 2: it is an old copy"):
        user.step()
    later = world.user()  # the process begins anew: its ledger knows
    assert later.step() is not None
    assert [round for round, _ in world.line.got] == [2]


def test_nothing_is_spent_on_a_round_that_was_spent_past(world):
    household, client = world.household, world.user()._client
    client.report(household.signed, 3, np.zeros(3))
    with pytest.raises(BudgetSpent, match="round 2 is over for this user, which has spent round 3"):
        client.report(household.signed, 2, np.zeros(3))


def test_yesterdays_status_is_refused_by_the_clock(world, monkeypatch, caplog):
    """A user that never heard of a later round spends nothing on one that has closed, and says so once."""
    user, now = world.user(), time.time

    class Tomorrow:
        monotonic = staticmethod(time.monotonic)
        time = staticmethod(lambda: now() + 86_400)

    with monkeypatch.context() as later, caplog.at_level(logging.WARNING):
        later.setattr(participation_module, "time", Tomorrow)
        later.setattr(status_module, "time", Tomorrow)
        assert user.step() is not None and user.step() is not None
    (said,) = caplog.messages
    assert re.match("round 1 closed 85[78].. seconds ago by this machine's clock, and is not reported to", said)
    assert world.line.got == [] == world.spent()
    user.step()
    assert [round for round, _ in world.line.got] == [1]


@pytest.mark.parametrize("same_keys", [True, False])
def test_another_tasks_status_and_models_are_refused(tmp_path, same_keys):
    """Also if the same analyzer, with the same keys, runs both."""
    ours, theirs = World(tmp_path / "ours"), World(tmp_path / "theirs")
    if same_keys:
        for pair in KeyRing(theirs.household.ring.folder, "sign").all_pairs():
            (ours.household.ring.folder / f"sign-{pair.public.key_id.hex()}.json").unlink(missing_ok=True)
            pair.save(ours.household.ring.folder / f"sign-{pair.public.key_id.hex()}.json")
        task = msgspec.structs.replace(ours.household.task, analyzer_sign=theirs.household.task.analyzer_sign)
        ours.household.task, ours.household.signed = task, sign(task, ours.household.signer)
        ours.household.policy = msgspec.structs.replace(ours.household.policy, analyzer=task.analyzer_id)
        ours.close()
        ours.household.folder = tmp_path / "again"
        ours.analyzer, ours.shuffler = ours.household.analyzer(), ours.household.shuffler()
        options = {"enrolled": ours.household.enrolled, "analyzer": Direct(ours.analyzer)}
        ours.service = IntermediaryService(ours.shuffler, **options)
        ours.follow()
        ours.cache = Cache(ours.service.app)
        ours.line, ours.model_path = Line(ours.cache), f"/v1/tasks/{task.task_id.hex()}/models"
    theirs.cache.keep("/v1/status")
    theirs.cache.keep(f"{theirs.model_path}/0")
    ours.cache.kept["/v1/status"] = theirs.cache.kept["/v1/status"]
    task_id = ours.household.task.task_id.hex()
    with pytest.raises(Rejected, match=f"this status belongs to another task than {task_id}, from http"):
        ours.user().step()
    ours.cache.kept = {f"{ours.model_path}/0": theirs.cache.kept[f"{theirs.model_path}/0"]}
    with pytest.raises(Rejected, match="it was changed on its way, or is another round's or task's"):
        ours.user().step()
    assert ours.line.got == [] == ours.spent()
    ours.cache.kept = {"/v1/task": got(theirs.service.app, "/v1/task"), **theirs.cache.kept}
    ours.line = Line(ours.cache)
    with pytest.raises(Refused, match="expected a task signed by"):  # and all of it together
        ours.user().step()
    theirs.close()
    ours.close()


def test_a_ledger_that_was_set_back_is_noticed_by_users(world):
    user, status = world.user(), world.analyzer.status()
    user.step()
    pair = KeyRing(world.household.ring.folder, "sign").current()
    world.service._status = sign_status(msgspec.structs.replace(status, head=bytes(32)), pair)
    with pytest.raises(Rejected, match="opened round 1 twice on other ledgers: its ledger was set back"):
        user.step()


def test_who_follows_hears_of_the_signers_new_key_before_its_task(world):
    """From services that were started with the new key, and understand nothing that the old one has signed."""
    household, new = world.household, KeyPair.generate("sign")
    signed, heard = sign(household.task, new), rotate_key(household.signer.public, new.public, by=household.signer)
    world.shuffler.signed = signed
    with pytest.raises(Refused, match="expected a task signed by"):
        world.user().step()
    world.line._signed = None
    world.service._notices = lambda: Notices(new.public.key_id, [announce_rotation(household.signer, heard)])
    household.policy = msgspec.structs.replace(household.policy, follow_rotations=True)
    world.user().step()
    assert [round for round, _ in world.line.got] == [1]


def test_nobody_is_kept_away_for_longer_than_the_round_takes(world):
    world.cache.change["status"] = lambda body, headers: (body, {**headers, RETRY_AFTER: "600000"})
    user = world.user()
    user.step()
    user.step()
    assert world.line.retry_after == 600_000
    assert user._backoff() < 1.3 * 601


def test_a_task_without_a_key_for_it_is_not_signed(tmp_path):
    made = World(tmp_path, analyzer_sign=None)
    assert made.analyzer.status().signature == b"" and b"analyzer_sign" not in made.household.task.body
    made.user().step()
    assert [round for round, _ in made.line.got] == [1]
    made.close()


def test_a_round_keeps_its_end_through_restarts_and_begins_again_if_nobody_was_there(tmp_path, monkeypatch):
    household, clock = Household(tmp_path, "privunit", rounds=3), time.time
    first = household.analyzer()
    status = first.status()
    first.close()
    monkeypatch.setattr("dovetail.parties.analyzer.party.time.time", lambda: clock() + 300)
    second = household.analyzer()
    assert second.status() == status
    second.close()
    monkeypatch.setattr("dovetail.parties.analyzer.party.time.time", lambda: clock() + 900)
    third = household.analyzer()
    assert third.status().closes >= status.closes + 899 and third.status().head == status.head
    third.close()
