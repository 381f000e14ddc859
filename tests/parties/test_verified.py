"""Verified rounds: honest users count, hostile ones do not, nobody loses a round, and only enrollers hear of it."""

import asyncio
import json
import math
import secrets
import threading
import time

import msgspec
import numpy as np
import pytest
from parties.household import running
from sharing import Sharing
from vdaf.pine_reports import hostile, two_squares
from verified_rounds import Peer, closed, forwarded, give, hostile_contents, opened, verified_task

from dovetail.parties.aggregator.store import REFUSED
from dovetail.parties.common.guarantees import _user_output_and_distance, certify_task
from dovetail.parties.common.http_clients import AnalyzerClient, IntermediaryClient
from dovetail.parties.common.task import TrainingTask
from dovetail.parties.common.wire import Malformed, decode_vector
from dovetail.parties.http.intermediary import IntermediaryService
from dovetail.parties.intermediary.store import UploadRefused
from dovetail.parties.user.client import Client
from dovetail.parties.user.hostile import HostileClient
from dovetail.parties.user.policy import Refused
from dovetail.statements import NotApplicable

UPDATE = np.array([0.6, 0.0, -0.8, 0.0, 0.0, 0.0], np.float32)


def names(folder, index=0):
    return [(one["round"], one["user"]) for one in json.loads((folder / f"aggregator-{index}" / REFUSED).read_text())]


@pytest.mark.parametrize("aggregators", [2, 3])
def test_honest_users_count(tmp_path, aggregators):
    sharing = verified_task(tmp_path, aggregators=aggregators)
    analyzer, parties = opened(sharing)
    for user in range(6):
        sharing.accept(parties, user, update=UPDATE if user < 5 else 10 * UPDATE)  # which it clips
    assert closed(parties) == ["sent"] * aggregators
    assert forwarded(analyzer, parties)["outcome"] == "released"
    assert np.allclose(decode_vector(analyzer.model(1), 6), UPDATE, atol=0.01)
    assert names(tmp_path) == []


def longer(sharing, factor):
    shared = sharing.task.contribution()
    norm = shared.encoding.norm * factor
    return np.array([int(0.6 * norm) + 1, 0, -int(0.8 * norm) - 1, 0, 0, 0])


ATTACKS = {
    "norm 1.001": lambda sharing, user, report: hostile_contents(
        sharing, user, longer(sharing, 1.001), report, pine_of=hostile
    ),
    "norm 1000, claims the bound": lambda sharing, user, report: hostile_contents(
        sharing,
        user,
        longer(sharing, 1000),
        report,
        pine_of=lambda pine: hostile(pine, sharing.task.contribution().squared_norm),
    ),
    "wraps around": lambda sharing, user, report: hostile_contents(
        sharing, user, [*two_squares(), 0, 0, 0, 0], report, pine_of=hostile
    ),
    "proof for another round": lambda sharing, user, report: hostile_contents(
        sharing, user, [1, 2, 3, 4, 5, 6], report, round=2, pine_of=lambda pine: pine
    ),
    "proof for another task": lambda sharing, user, report: hostile_contents(
        sharing, user, [1, 2, 3, 4, 5, 6], report, task_id=bytes(len(sharing.task.task_id)), pine_of=lambda pine: pine
    ),
    "proof of another user": lambda sharing, user, report: hostile_contents(
        sharing, user - 1, [1, 2, 3, 4, 5, 6], report, pine_of=lambda pine: pine
    ),
    "proof under another report id": lambda sharing, user, report: hostile_contents(
        sharing, user, [1, 2, 3, 4, 5, 6], bytes(16), pine_of=lambda pine: pine
    ),
    "wrong public share for all": lambda sharing, user, report: hostile_contents(
        sharing,
        user,
        [1, 2, 3, 4, 5, 6],
        report,
        pine_of=lambda pine: pine,
        spoil=lambda public, parts: (bytes([public[0] ^ 1]) + public[1:], parts),
    ),
    "seeds of another report": lambda sharing, user, report: hostile_contents(
        sharing,
        user,
        [1, 2, 3, 4, 5, 6],
        report,
        pine_of=lambda pine: pine,
        spoil=lambda public, parts: (public, [parts[0], secrets.token_bytes(len(parts[1]))]),
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_user_does_not_count_and_costs_nothing(tmp_path, attack):
    sharing = verified_task(tmp_path, clients=4)
    analyzer, parties = opened(sharing)
    for user in range(3):
        sharing.accept(parties, user, update=UPDATE)
    report = secrets.token_bytes(16)
    give(sharing, parties, 3, ATTACKS[attack](sharing, 3, report), report)
    assert closed(parties) == ["sent", "sent"]
    assert [party.store.num_uploads(1) for party in parties] == [3, 3]
    assert forwarded(analyzer, parties)["outcome"] == "released"
    assert np.allclose(decode_vector(analyzer.model(1), 6), UPDATE, atol=0.01)
    expected = [(1, sharing.users[3].public.key_id.hex())]
    assert names(tmp_path, 0) == names(tmp_path, 1) == expected
    assert sharing.users[3].public.key_id.hex() not in json.dumps(analyzer.privacy())


@pytest.mark.parametrize(("which", "part"), [(0, 0), (0, 32), (1, 0), (1, 96)])  # its own part, and another's
def test_a_public_share_that_differs_between_aggregators_does_not_divide_them(tmp_path, which, part):
    """Whichever aggregator is lied to, about whichever part: both leave the user out, and the round goes on."""
    sharing = verified_task(tmp_path)
    analyzer, parties = opened(sharing)
    for user in range(3):
        sharing.accept(parties, user, update=UPDATE)
    report = secrets.token_bytes(16)
    contents = hostile_contents(sharing, 4, [1, 2, 3, 4, 5, 6], report, pine_of=lambda pine: pine)
    at = 8 + part
    contents[which] = contents[which][:at] + bytes([contents[which][at] ^ 1]) + contents[which][at + 1 :]
    give(sharing, parties, 4, contents, report)
    assert closed(parties) == ["sent", "sent"]
    assert parties[0].store.batch_id(1) == parties[1].store.batch_id(1)
    assert forwarded(analyzer, parties) == {"round": 1, "outcome": "released", "uploads": 3, "accuracy": None}


def test_refused_users_do_not_count_for_the_minimum(tmp_path):
    sharing = verified_task(tmp_path, clients=3, min_clients=3)
    analyzer, parties = opened(sharing)
    for user in range(2):
        sharing.accept(parties, user, update=UPDATE)
    report = secrets.token_bytes(16)
    give(sharing, parties, 2, ATTACKS["norm 1.001"](sharing, 2, report), report)
    assert closed(parties) == ["void", "void"]
    assert forwarded(analyzer, parties)["outcome"] == "void"
    assert names(tmp_path) == [(1, sharing.users[2].public.key_id.hex())]


def test_uploads_of_another_form_are_turned_away(tmp_path):
    sharing = verified_task(tmp_path)
    _, parties = opened(sharing)
    report = secrets.token_bytes(16)
    good = hostile_contents(sharing, 0, [1, 2, 3, 4, 5, 6], report, pine_of=lambda pine: pine)
    for index, wrong in (
        (0, good[0][:-1]),
        (0, good[1]),
        (1, good[0]),
        (0, b"\1\0" + good[0][2:]),
        (0, good[0][: 8 + 128] + b"\xff" * 8 + good[0][8 + 128 + 8 :]),
        (1, b""),
    ):
        upload = sharing.sealed(0, wrong, report=report, index=index)
        with pytest.raises((UploadRefused, Malformed)):
            parties[index].accept(1, client=sharing.users[0].public.key_id, upload=upload)


def test_an_upload_sealed_for_another_aggregator_does_not_open(tmp_path):
    sharing = verified_task(tmp_path)
    _, parties = opened(sharing)
    envelope = sharing.envelope(0, update=UPDATE)
    with pytest.raises(Malformed):
        parties[1].accept(1, client=sharing.users[0].public.key_id, upload=envelope.uploads[0])


def test_a_round_has_one_key_and_one_answer(tmp_path):
    """Whoever asks again, with another part of the key, gets the answer of before, or none."""
    sharing = verified_task(tmp_path)
    _, parties = opened(sharing)
    for user in range(4):
        sharing.accept(parties, user, update=UPDATE)
    for party in parties:
        assert party.challenge(1) is None  # before it is frozen
        party.store.freeze(1)
    parts = [party.challenge(1) for party in parties]
    assert parts == [party.challenge(1) for party in parties]
    assert parts[0] != parts[1]
    honest, other = parties
    assert honest.verifiers(1, 0) is None
    honest.agree_and_close(1, [Peer(other)])
    told = honest.verifiers(1, 0)
    assert told.total == 4

    class Another(Peer):
        def challenge(self, round):
            return bytes(32)

    with pytest.raises(ValueError, match="form another key for round 1 than before"):
        honest.agree_and_close(1, [Another(other)])
    assert honest.verifiers(1, 0) == told
    honest.close()
    again = sharing.aggregator(0)
    assert again.verifiers(1, 0) == told
    assert closed([again, other]) == ["sent", "sent"]
    assert again.verifiers(1, 0) == told  # until the next round opens
    again.store.open_round(2, head=b"h", closes=0.0)
    assert again.verifiers(1, 0) is None


def test_an_announced_round_gets_nobody_a_second_answer(tmp_path):
    """A peer never agrees, and holds its roster back until a dishonest analyzer has announced the next round."""
    sharing = verified_task(tmp_path)
    analyzer, (honest, other) = opened(sharing)
    for user in range(4):
        sharing.accept([honest, other], user, update=UPDATE)
    for party in (honest, other):
        party.store.freeze(1)
    announced, waiting, heard = analyzer.status(), threading.Event(), threading.Event()

    class Dishonest:
        round = 1

        def status(self):
            return msgspec.structs.replace(announced, round=self.round)

        def signed_model(self, round, dim=None):
            return bytes(24), b""

    class Silent(Peer):
        def agreed_digest(self, round):
            return None

        def roster(self, round):
            waiting.set()
            assert heard.wait(20)
            return super().roster(round)

    told_by = Dishonest()
    service = IntermediaryService(honest, enrolled={}, analyzer=told_by, peers=[Silent(other)])

    async def served():
        heard.set()
        await service._follow_analyzer()
        await service._close_rounds()
        first = honest.verifiers(1, 0)
        assert (honest.store.state(1), first.total) == ("frozen", 4)
        heard.clear(), waiting.clear()
        closing = asyncio.create_task(service._close_rounds())
        await asyncio.to_thread(waiting.wait, 20)
        told_by.round = 2
        await service._follow_analyzer()
        assert honest.store.state(2) == "open"
        heard.set()
        await closing
        assert honest.verifiers(1, 0) == first

    asyncio.run(served())


def test_no_part_of_a_key_is_drawn_for_a_round_that_is_closed(tmp_path):
    sharing = verified_task(tmp_path)
    _, parties = opened(sharing)
    for user in range(4):
        sharing.accept(parties, user, update=UPDATE)
    assert closed(parties) == ["sent", "sent"]
    parties[0].store.open_round(2, head=b"h", closes=0.0)
    assert parties[0].challenge(1) is None
    with pytest.raises(ValueError, match="round 1 is sent; proofs are tested while it is frozen"):
        parties[0].store.compute_verifiers(1, [], bytes(32))


def test_long_answers_come_in_pages(tmp_path, monkeypatch):
    sharing = verified_task(tmp_path)
    _, parties = opened(sharing)
    for user in range(5):
        sharing.accept(parties, user, update=UPDATE)
    for party in parties:
        party.store.freeze(1)
    parties[0].agree_and_close(1, [Peer(parties[1])])
    whole = parties[0].verifiers(1, 0)
    monkeypatch.setattr("dovetail.parties.aggregator.store._PAGE", 2 * len(whole.results[0]))
    pages = [parties[0].verifiers(1, first).results for first in (0, 2, 4)]
    assert [len(page) for page in pages] == [2, 2, 1]
    assert [one for page in pages for one in page] == whole.results


def test_an_aggregator_that_tells_nonsense_gets_users_refused_and_crashes_nobody(tmp_path):
    sharing = verified_task(tmp_path, clients=4)
    _, parties = opened(sharing)
    for user in range(4):
        sharing.accept(parties, user, update=UPDATE)

    class Liar(Peer):
        def verifiers(self, round, *, reports):
            found = super().verifiers(round, reports=reports)
            return found and msgspec.structs.replace(
                found, results=[b"", found.results[1][:-1], b"\xff" * 900, found.results[3]]
            )

    for party in parties:
        party.store.freeze(1)
    for _ in range(3):
        state = parties[0].agree_and_close(1, [Liar(parties[1])])
        parties[1].agree_and_close(1, [Peer(parties[0])]) if parties[1].store.state(1) == "frozen" else None
    assert state == "void"  # one of four is left, and three are the minimum
    assert len(names(tmp_path)) == 3


def test_after_a_round_nothing_says_who_sent_what(tmp_path):
    sharing = verified_task(tmp_path)
    analyzer, parties = opened(sharing)
    for user in range(6):
        sharing.accept(parties, user, update=UPDATE)
    closed(parties)
    forwarded(analyzer, parties)
    parties[0].close()
    for path in (tmp_path / "aggregator-0").glob("*"):
        if path.is_file():
            assert not any(pair.public.key_id in path.read_bytes() for pair in sharing.users), path


def test_policies_may_ask_for_it(tmp_path):
    plain = Sharing(tmp_path / "plain", settings={"noise": "aggregators"})
    proven = verified_task(tmp_path / "proven")
    asks = msgspec.structs.replace(plain.policy, verified=True)
    with pytest.raises(Refused, match="only where aggregators verify uploads; the task asks for no proofs"):
        asks.admit(plain.signed)
    assert msgspec.structs.replace(proven.policy, verified=True).admit(proven.signed) == proven.task


def test_the_statement_says_what_proofs_rest_on(tmp_path):
    """The zero-knowledge error is charged to delta, and eps is that of the same task without proofs."""
    settings = {"noise_multiplier": 3.0}
    proven = verified_task(tmp_path / "proven", settings=settings)
    plain = verified_task(tmp_path / "plain", settings={**settings, "verified": False})
    certified, local = certify_task(proven.task, 2)
    without, _ = certify_task(plain.task, 2)
    assert certified.eps == without.eps < 20
    assert proven.task.contribution().total_variation > 0 == plain.task.contribution().total_variation
    assert any("zero-knowledge error" in part.on for part in certified.proof.spent)
    assert "docs/proofs/verified.md" in str(certified.proof)
    assert local.is_unbounded
    said = " ".join(certified.assumptions)
    assert "HMAC-SHA256" in said and "robustness, not privacy" in said and "2^-5" in said
    assert "HMAC-SHA256" not in " ".join(without.assumptions)


def test_parameters_that_prove_nothing_are_refused_where_a_task_is_made(tmp_path):
    with pytest.raises(ValueError, match="every wraparound shows"):
        verified_task(tmp_path, dim=2**24, settings={"scale": 50_000.0, "noise_multiplier": 1.0})


def test_users_noise_cannot_be_verified(tmp_path):
    with pytest.raises(ValueError, match="noise = 'aggregators' with verified"):
        verified_task(tmp_path, settings={"noise": "users"})


def test_many_rounds_in_a_row(tmp_path):
    sharing = verified_task(tmp_path)
    analyzer, parties = opened(sharing)
    for round in (1, 2):
        if round > 1:
            for party in parties:
                party.store.open_round(round, head=analyzer.status().head, closes=0.0)
        for user in range(6):
            sharing.accept(parties, user, round=round, update=UPDATE)
        assert closed(parties, round) == ["sent", "sent"]
        assert forwarded(analyzer, parties, round)["outcome"] == "released"
    assert np.allclose(decode_vector(analyzer.model(2), 6), 2 * UPDATE, atol=0.02)


@pytest.mark.parametrize("protocol", ["ss_simple", "ss_topk"])
def test_counts_are_verified_too(tmp_path, protocol):
    """A user that reports a level of a thousand is left out; the others' counts come out."""
    sharing = Sharing(tmp_path, protocol, dim=6, clients=21, min_clients=15, settings={"verified": True})
    update = np.array([1, 1, 0, 0, 0, 0], np.float32)
    analyzer, parties = opened(sharing)
    for user in range(20):
        sharing.accept(parties, user, update=update)
    report, form = secrets.token_bytes(16), sharing.task.sharing()
    shares = form.shard(np.array([1, 0, 0, 1, 0, 1]), nonce=bytes(16))  # bound to nothing
    element = 8 + form.proof.public_size
    shares[0] = shares[0][:element] + (1000).to_bytes(8, "little") + shares[0][element + 8 :]
    give(sharing, parties, 20, shares, report)
    assert closed(parties) == ["sent", "sent"]
    assert forwarded(analyzer, parties)["uploads"] == 20
    assert np.all(np.abs(decode_vector(analyzer.model(1), 6) - update)[:2] < 0.6)  # six lies of 20, of odds 1 : 55 each
    assert names(tmp_path) == [(1, sharing.users[20].public.key_id.hex())]


def test_verified_counts_are_not_shuffled(tmp_path):
    sharing = Sharing(tmp_path, "ss_simple", settings={"verified": True})
    fields = {**msgspec.structs.asdict(sharing.task), "aggregators": (), "shufflers": sharing.task.aggregators[:1]}
    with pytest.raises(NotApplicable, match="expected aggregators for verified"):
        TrainingTask(**fields)


def test_over_the_network(tmp_path, monkeypatch):
    """Services with TLS agree on who cheated, and the model is that of the others."""
    sharing = verified_task(tmp_path, clients=4, rounds=1)
    with running(sharing, monkeypatch) as up:
        options = {"ca": up.authority}
        urls = [f"https://{host}:{port}" for host, port in (up.analyzer, *up.services)]
        analyzer = AnalyzerClient(urls[0], **options)
        links = [IntermediaryClient(url, index=index, **options) for index, url in enumerate(urls[1:])]
        for user in range(4):
            kind = HostileClient if user == 3 else Client
            client = kind(tmp_path / f"user-{user}", policy=sharing.policy, key=sharing.users[user])
            envelope = client.report(sharing.signed, 1, UPDATE)
            for index, link in enumerate(links):
                envelope.send_upload(index, link)
        end = time.monotonic() + 60
        while not analyzer.status().over and time.monotonic() < end:
            time.sleep(0.05)
        assert [(one["outcome"], one["uploads"]) for one in analyzer.privacy()["history"]] == [("released", 3)]
        assert np.allclose(analyzer.model(1, dim=6), UPDATE, atol=0.01)
    assert names(tmp_path, 0) == names(tmp_path, 1) == [(1, sharing.users[3].public.key_id.hex())]


@pytest.mark.parametrize("settings", [{}, {"verified": False}, {"verified": False, "noise": "users"}], ids=str)
def test_what_every_user_and_every_aggregator_is_off_by_adds_up(tmp_path, settings):
    task = verified_task(tmp_path, aggregators=3, clients=7, settings=settings).task
    shared, off = _user_output_and_distance(task)
    by_users, by_aggregators = [shared.total_variation] * 7, [shared.noise_total_variation] * 3
    assert off == pytest.approx(math.fsum(by_users + by_aggregators), rel=1e-12, abs=0)
    assert (shared.total_variation > 0) == (settings.get("noise") == "users" or not settings)
    assert (shared.noise_total_variation > 0) == ("noise" not in settings)
