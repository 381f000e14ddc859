"""Aggregators: what they take, agree on, add up, and forget."""

import shutil

import msgspec
import numpy as np
import pytest
from grids import diagonal, later
from sharing import Sharing, Straight, close, open_round

from dovetail.mechanisms import ExactSampler
from dovetail.parties.common.keys import ServicePairs
from dovetail.parties.common.sealing import open_sealed, seal
from dovetail.parties.common.sharing import decode_sum
from dovetail.parties.common.task import sign
from dovetail.parties.common.wire import Closed, Malformed, TooLate, Upload, decode_vector
from dovetail.parties.intermediary.store import UploadRefused
from dovetail.parties.user.policy import Policy, Refused


def whole_round(sharing, updates, *, round=1, parties=None, analyzer=None):
    """All users report, everybody closes and forwards; the analyzer, the aggregators and what passed."""
    analyzer = analyzer or sharing.analyzer()
    parties = parties or [sharing.aggregator(i) for i in range(len(sharing.keys))]
    open_round(parties, analyzer, round)
    for user, update in enumerate(updates):
        sharing.accept(parties, user, round=round, update=update)
    close(parties, round)
    links = [Straight(analyzer, index) for index in range(len(parties))]
    for party, link in zip(parties, links, strict=True):
        party.forward(round, link)
    return analyzer, parties, links


@pytest.mark.parametrize(("aggregators", "noise"), diagonal([2, 3], ["users", "aggregators"]))
def test_a_round_gives_the_mean_with_its_noise(tmp_path, aggregators, noise):
    """8 users hold .3 in every one of 400 coordinates; mean within 6 standard errors, std within 20 percent."""
    settings = {"noise": noise, "aggregators": aggregators, "clip_norm": 6.0, "noise_multiplier": 0.2}
    sharing = Sharing(tmp_path, dim=400, clients=8, aggregators=aggregators, settings=settings)
    analyzer, _, _ = whole_round(sharing, [np.full(400, 0.3, np.float32)] * 8)
    model, std = decode_vector(analyzer.model(1), 400), sharing.task.build()[0].noise_std(8, 400)
    assert abs(model.mean() - 0.3) < 6 * std / 20
    assert 0.8 < model.std() / std < 1.2
    assert analyzer.privacy()["history"] == [{"round": 1, "outcome": "released", "uploads": 8, "accuracy": None}]


@pytest.mark.parametrize("protocol", [later("ss_simple"), "ss_topk"])
def test_counts_travel_as_shares_too(tmp_path, protocol):
    sharing = Sharing(tmp_path, protocol, dim=6, clients=40)
    update = np.array([1, 1, 0, 0, 0, 0], np.float32)
    analyzer, _, _ = whole_round(sharing, [update] * 40)
    model = decode_vector(analyzer.model(1), 6)
    assert np.all(np.abs(model - update) < 0.6)


def test_users_count_at_all_aggregators_or_at_none(tmp_path):
    sharing = Sharing(tmp_path, clients=4, min_clients=3)
    analyzer, parties = sharing.analyzer(), [sharing.aggregator(i) for i in range(2)]
    open_round(parties, analyzer)
    for user in range(3):
        sharing.accept(parties, user)
    halfway = sharing.envelope(3)
    parties[0].accept(1, client=sharing.users[3].public.key_id, upload=halfway.uploads[0])
    assert close(parties) == ["sent", "sent"]
    assert [party.store.num_uploads(1) for party in parties] == [3, 3]
    assert parties[0].store.batch_id(1) == parties[1].store.batch_id(1)


def test_below_the_minimum_nothing_leaves(tmp_path):
    sharing = Sharing(tmp_path, clients=4, min_clients=3)
    analyzer, parties = sharing.analyzer(), [sharing.aggregator(i) for i in range(2)]
    open_round(parties, analyzer)
    for user in range(2):
        sharing.accept(parties, user)
    assert close(parties) == ["void", "void"]
    for index, party in enumerate(parties):
        link = Straight(analyzer, index)
        party.forward(1, link)
        assert link.parts == []
    assert analyzer.privacy()["history"][0]["outcome"] == "void"


def test_what_is_sent_again_is_the_same_bytes(tmp_path):
    """Noise is drawn once, also by an aggregator that was killed after it had closed the round."""
    sharing = Sharing(tmp_path, settings={"noise": "aggregators"})
    analyzer, parties = sharing.analyzer(), [sharing.aggregator(i) for i in range(2)]
    open_round(parties, analyzer)
    for user in range(4):
        sharing.accept(parties, user)
    close(parties)
    ((_, first),) = parties[0].store.parts(1, size=1)
    parties[0].close()
    again = sharing.aggregator(0)
    ((_, second),) = again.store.parts(1, size=1)
    assert first == second


@pytest.mark.parametrize("small", [-1, 1024], ids=["segments", "database"])
def test_nothing_is_left_after_a_round(tmp_path, monkeypatch, small):
    """Neither shares nor who sent them: not a byte of an opened share is in the aggregator's files."""
    monkeypatch.setattr("dovetail.parties.aggregator.store._SMALL", small)
    sharing = Sharing(tmp_path, dim=40)
    parties = [sharing.aggregator(i) for i in range(2)]
    kept = []
    for party in parties:
        keep, party.store._write_contents = party.store._write_contents, None

        def spy(arrivals, keep=keep):
            kept.extend(one.content[8:] for one in arrivals)
            keep(arrivals)

        party.store._write_contents = spy
    whole_round(sharing, [np.zeros(40, np.float32)] * 4, parties=parties)
    assert len(kept) == 8
    found = [path for i in range(2) for path in (tmp_path / f"aggregator-{i}").rglob("*") if path.is_file()]
    files = b"".join(path.read_bytes() for path in found if "keys" not in path.parts)
    assert not any(share in files for share in kept)
    assert not any(user.public.key_id in files for user in sharing.users)


def test_an_upload_is_its_senders_for_this_aggregator_and_round(tmp_path):
    sharing = Sharing(tmp_path)
    analyzer, parties = sharing.analyzer(), [sharing.aggregator(i) for i in range(2)]
    open_round(parties, analyzer)
    mine, other = (sharing.users[i].public.key_id for i in range(2))
    uploads = sharing.envelope(0).uploads
    for party, client, upload, round in (
        (parties[0], other, uploads[0], 1),  # another user's, copied
        (parties[0], mine, uploads[1], 1),  # for the other aggregator
        (parties[0], mine, uploads[0], 2),  # of another round
        (parties[0], mine, Upload(bytes(16), uploads[0].sealed), 1),  # under another id
        (parties[0], mine, Upload(uploads[0].report, uploads[0].sealed[:-1]), 1),
    ):
        with pytest.raises(Malformed, match="this upload is not sealed to aggregator"):
            party.accept(round, client=client, upload=upload)
    assert parties[0].accept(1, client=mine, upload=uploads[0]) == "accepted"
    assert parties[0].accept(1, client=mine, upload=uploads[0]) == "known"


def test_a_share_of_another_form_is_turned_away(tmp_path):
    sharing = Sharing(tmp_path)
    analyzer, party = sharing.analyzer(), sharing.aggregator(0)
    open_round([party], analyzer)
    client, report = sharing.users[0].public.key_id, bytes(range(16))
    purpose = sharing.task.upload_purpose(1, 0, sender=client, report=report)
    for content, reason in (
        (b"", "expected a share of 40 bytes, got 0 bytes"),
        (b"\x01" * 41, "expected a share of 40 bytes, got 41 bytes"),
        (b"\x01" * 40, "this is not a share of"),
    ):
        sealed = seal(content, sharing.keys[0].seal.public.sealing_key(), purpose)
        with pytest.raises(UploadRefused, match=reason):
            party.accept(1, client=client, upload=Upload(report, sealed))


def test_sums_over_different_users_spoil_the_round(tmp_path):
    """An aggregator that adds up whom it likes is noticed: the model stays as it is."""
    sharing = Sharing(tmp_path, clients=4, min_clients=3)
    analyzer, parties = sharing.analyzer(), [sharing.aggregator(i) for i in range(2)]
    open_round(parties, analyzer)
    reports = [sharing.accept(parties, user).uploads[0].report for user in range(4)]
    for party, left_out in zip(parties, (0, 1), strict=True):
        party.store.freeze(1)
        roster = {report for i, report in enumerate(reports) if i != left_out}
        party.store.close_round(1, roster=roster, batch=bytes([left_out]) * 16)
    for index, party in enumerate(parties):
        party.forward(1, Straight(analyzer, index))
    assert analyzer.privacy()["history"][0]["outcome"] == "spoiled"
    assert np.array_equal(decode_vector(analyzer.model(1), 6), np.zeros(6))


def test_a_second_sum_of_one_aggregator_is_no_sum(tmp_path):
    """An aggregator whose store was set back draws new noise over other users: the analyzer does not take both."""
    sharing = Sharing(tmp_path, clients=4, min_clients=3, settings={"noise": "aggregators"})
    analyzer, parties = sharing.analyzer(), [sharing.aggregator(i) for i in range(2)]
    open_round(parties, analyzer)
    for user in range(3):
        sharing.accept(parties, user)
    parties[0].close()
    shutil.copytree(tmp_path / "aggregator-0", tmp_path / "copy")
    parties[0] = sharing.aggregator(0)
    close(parties)
    batch = parties[0].store.batch_id(1)
    ((_, sealed),) = parties[0].store.parts(1, size=1)
    assert analyzer.count_part(0, 1, batch, 0, sealed) == "accepted"
    parties[0].close()
    shutil.rmtree(tmp_path / "aggregator-0")
    shutil.move(tmp_path / "copy", tmp_path / "aggregator-0")
    restored = sharing.aggregator(0)
    sharing.accept([restored, _Deaf()], 3)
    restored.store.freeze(1)
    restored.store.close_round(1, batch=b"another batch id")
    with pytest.raises(TooLate):
        restored.forward(1, Straight(analyzer, 0))
    assert analyzer.privacy()["history"][0]["outcome"] == "spoiled"


class _Deaf:
    def accept(self, round, *, client, upload):
        return "accepted"


def test_a_sum_is_bound_to_its_aggregator_round_and_batch(tmp_path):
    sharing = Sharing(tmp_path)
    analyzer, parties = sharing.analyzer(), [sharing.aggregator(i) for i in range(2)]
    open_round(parties, analyzer)
    for user in range(4):
        sharing.accept(parties, user)
    close(parties)
    batch = parties[0].store.batch_id(1)
    ((_, sealed),) = parties[0].store.parts(1, size=1)
    with pytest.raises(Malformed, match="this is not a sum that aggregator 1 sealed"):
        analyzer.count_part(1, 1, batch, 0, sealed)
    with pytest.raises(Malformed, match="a sealed sum of this task has"):
        analyzer.count_part(0, 1, batch, 0, sealed[:-1])
    assert analyzer.count_part(0, 1, batch, 0, sealed) == "accepted"
    assert analyzer.count_part(0, 1, batch, 0, sealed) == "known"
    with pytest.raises(Malformed, match="with 2 parts, and"):
        analyzer.note_closed(0, 1, Closed(state="sent", parts=2, uploads=4, batch=batch))


def test_one_aggregators_sum_alone_is_random(tmp_path):
    """What one of two aggregators hands on, opened, is uniform whatever users hold: the first 12 bits, 2,000 times."""
    sharing = Sharing(tmp_path, dim=2000, settings={"clip_norm": 100.0})
    analyzer, parties = sharing.analyzer(), [sharing.aggregator(i) for i in range(2)]
    open_round(parties, analyzer)
    for user in range(4):
        sharing.accept(parties, user, update=np.full(2000, 1.0, np.float32))
    close(parties)
    shared, key = sharing.task.contribution(), sharing.ring.current().opening_key()
    for index, party in enumerate(parties):
        ((_, sealed),) = party.store.parts(1, size=1)
        purpose = sharing.task.sum_purpose(1, index, batch=party.store.batch_id(1))
        total = decode_sum(open_sealed(sealed, key, purpose), shared.length, shared.bits)
        mean = total.astype(np.float64).mean() / 2**shared.bits
        assert abs(mean - 0.5) < 6 / np.sqrt(12 * 2000)


def test_a_policy_pins_aggregators(tmp_path):
    sharing = Sharing(tmp_path)
    pinned = tuple(keys.public.key_id for keys in sharing.keys)
    policy = msgspec.structs.replace(sharing.policy, aggregators=pinned)
    assert policy.admit(sharing.signed) == sharing.task
    stranger = ServicePairs.add(tmp_path / "stranger").public
    task = msgspec.structs.replace(sharing.task, aggregators=(sharing.task.aggregators[0], stranger))
    with pytest.raises(Refused, match="not among this user's pinned aggregators"):
        policy.admit(sign(task, sharing.signer))
    assert isinstance(policy, Policy)


@pytest.mark.parametrize("aggregators", [0, 1])
def test_one_aggregator_is_none(tmp_path, aggregators):
    with pytest.raises(ValueError, match="aggregators"):
        Sharing(tmp_path, aggregators=aggregators)


def test_the_clients_contribution_is_what_its_shares_add_up_to(tmp_path):
    sharing = Sharing(tmp_path, dim=50, settings={"noise": "aggregators", "clip_norm": 10.0})
    shared, update = sharing.task.contribution(), np.linspace(-1, 1, 50, dtype=np.float32)
    drawn = shared.draw(update, sampler=ExactSampler())
    assert drawn.dtype == np.uint32
    assert drawn.max() < 2**shared.bits


def test_a_mean_is_over_those_who_counted_and_not_over_as_many_as_might_have_come(tmp_path):
    """8 of up to 80 users hold .3: the mean is .3, not .03."""
    settings = {"clip_norm": 6.0, "noise_multiplier": 0.02}
    sharing = Sharing(tmp_path, dim=400, clients=8, settings=settings, min_clients=8, max_clients=80)
    analyzer, _, _ = whole_round(sharing, [np.full(400, 0.3, np.float32)] * 8)
    assert abs(decode_vector(analyzer.model(1), 400).mean() - 0.3) < 0.05
