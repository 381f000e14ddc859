"""The analyzer without a network: paid for before it is open, counted once, and no way back."""

from __future__ import annotations

import contextlib
import shutil

import msgspec
import numpy as np
import pytest
from grids import later
from parties.household import Direct, opened

from dovetail.learners.moments import Moments
from dovetail.learners.server import Ridge, Server
from dovetail.mechanisms import ExactSampler
from dovetail.parties.analyzer.learning import Learner, Learning
from dovetail.parties.analyzer.party import Analyzer
from dovetail.parties.common.guarantees import certify_task
from dovetail.parties.common.http_clients import Gone, Unreachable
from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.wire import PART, Closed, Malformed, Packed, TooEarly, TooLate, decode_vector
from dovetail.parties.fleet import lenient_policy, make_deployment
from dovetail.parties.intermediary import party
from dovetail.parties.shuffler import Shuffler
from dovetail.parties.user.client import Client

DIM, USERS = 6, 4
LOUD = {"clip_value": 1.0, "eps_local": 40.0}  # the truth, but once in 2^57


class Small:
    """A task with few users, its parties as objects."""

    def __init__(self, folder, *, rounds=3, shufflers=1, protocol="ss_simple", settings=None, **more):
        fields = {
            "name": "small",
            "protocol": protocol,
            "settings": LOUD if settings is None else settings,
            "dim": DIM,
            "rounds": rounds,
            "min_clients": USERS,
            "max_clients": USERS,
            "round_seconds": 60.0,
            "delta": 1e-5,
            **more,
        }
        self.keys = [KeyPair.generate("sign") for _ in range(USERS)]
        self.deployment = make_deployment(
            folder, fields, shufflers=shufflers, enrolled=[pair.public for pair in self.keys]
        )
        self.folder, self.signed = folder, self.deployment.signed
        self.clients = [
            Client(folder / f"user-{i}", policy=lenient_policy(self.signed), key=pair)
            for i, pair in enumerate(self.keys)
        ]

    def analyzer(self, server=None):
        return Analyzer(
            self.folder / "analyzer",
            signed=self.signed,
            signer=self.signed.signer.key_id,
            keys=KeyRing(self.folder / "analyzer" / "keys", "seal"),
            learning=Learning(initial=np.zeros(DIM, np.float32), server=server or Server()),
            workers=1,
        )

    @property
    def pairs(self):
        """The keys of the shufflers."""
        return [
            ServicePairs.find(self.folder / name / "keys", keys)
            for name, keys in zip(self.deployment.services, self.deployment.task.shufflers, strict=True)
        ]

    def shufflers(self):
        return [
            Shuffler(
                self.folder / f"shuffler-{i}",
                signed=self.signed,
                signer=self.signed.signer.key_id,
                index=i,
                keys=pairs,
            )
            for i, pairs in enumerate(self.pairs)
        ]

    def content(self, user, *, round=1, index=0):
        """What a user's upload holds for a shuffler: messages for the analyzer."""
        upload = self.clients[user].report(self.signed, round, updates()[user]).uploads[index]
        task, keys = self.deployment.task, self.keys[user]
        return opened(task, upload, self.pairs[index], keys, round=round, index=index)


BATCH = bytes(range(16))


def updates(users=USERS):
    """User i marks coordinate i."""
    return -np.ones((users, DIM), np.float32) + 2 * np.eye(users, DIM, dtype=np.float32)


def play(small, analyzer, shufflers, *, users=range(USERS), round=None):
    """A whole round: reports, uploads, agreement, batches."""
    round = round or analyzer.status().round
    for shuffler in shufflers:
        shuffler.store.open_round(round, head=analyzer.status().head, closes=0.0)
    for user in users:
        envelope = small.clients[user].report(small.signed, round, updates()[user])
        for shuffler, upload in zip(shufflers, envelope.uploads, strict=True):
            shuffler.accept(round, client=small.keys[user].public.key_id, upload=upload)
    rosters = [set(shuffler.store.freeze(round)) for shuffler in shufflers]
    for index, shuffler in enumerate(shufflers):
        shuffler.close_round(round, [roster for i, roster in enumerate(rosters) if i != index])
        shuffler.forward(round, Direct(analyzer, index))


@pytest.mark.parametrize(
    ("protocol", "settings", "shufflers"),
    [
        later("ss_simple", LOUD, 1),
        ("ss_simple", LOUD, 3),  # coordinates dealt to three processes
        later("ss_topk", {**LOUD, "k": DIM}, 2),
        ("split_and_mix", {"clip_norm": 4.0, "noise_multiplier": 1e-6, "shufflers": 3, "shares": 5}, 3),
        later("split_and_mix", {"clip_norm": 4.0, "noise_multiplier": 1e-6, "shufflers": 2, "shares": 4}, 4),
    ],
)
def test_a_round_is_the_sum_of_its_reports(tmp_path, protocol, settings, shufflers):
    small = Small(tmp_path / "fleet", protocol=protocol, settings=settings, shufflers=shufflers)
    analyzer, helpers = small.analyzer(), small.shufflers()
    assert analyzer.status().round == 1
    play(small, analyzer, helpers)
    assert analyzer.status().round == 2
    model = decode_vector(analyzer.model(1), DIM)
    assert np.allclose(model, updates().mean(axis=0), atol=2e-2 if protocol == "split_and_mix" else 1e-6)
    assert [entry.kind for entry in analyzer.ledger.entries] == ["open", "reserve", "release", "reserve"]
    history = analyzer.privacy()["history"]
    assert [(one["outcome"], one["uploads"]) for one in history] == [("released", USERS)]


def test_a_round_is_reserved_before_it_is_open_and_a_model_is_released_before_it_is_given(tmp_path):
    analyzer = Small(tmp_path / "fleet").analyzer()
    assert [entry.kind for entry in analyzer.ledger.entries] == ["open", "reserve"]
    assert np.array_equal(decode_vector(analyzer.model(0), DIM), np.zeros(DIM))
    with pytest.raises(TooLate, match="the model after round 1 is not released"):
        analyzer.model(1)


def test_a_part_counts_once_and_what_does_not_open_is_counted_as_refused(tmp_path):
    small = Small(tmp_path / "fleet")
    analyzer, task = small.analyzer(), small.deployment.task
    packed = small.content(0)
    broken = packed[:-1] + bytes([packed[-1] ^ 1])
    assert analyzer.count_part(0, 1, BATCH, 0, broken) == "accepted"
    assert analyzer.count_part(0, 1, BATCH, 0, packed) == "known"
    facts = analyzer.privacy()
    assert facts["messages"] == DIM
    assert facts["refused_messages"] == {"unsealable": 1, "out_of_range": 0, "repeated": 0}
    with pytest.raises(Malformed, match="slot 9 does not exist: shuffler 0 has slots 0 to 5"):
        analyzer.count_part(0, 1, BATCH, 1, Packed(np.full(1, 9), bytes(task.message_bytes)).encode())
    with pytest.raises(Malformed, match="expected messages of"):
        analyzer.count_part(0, 1, BATCH, 1, packed[:-1])
    with pytest.raises(TooEarly, match="round 2 is not open yet: round 1 is"):
        analyzer.count_part(0, 2, BATCH, 0, packed)
    with pytest.raises(Malformed, match="sender 0 closes round 1 with 2 parts, and 1 have come"):
        analyzer.note_closed(0, 1, Closed(state="sent", parts=2, uploads=1, batch=BATCH))
    assert len(packed) < PART * (4 + task.message_bytes)


def test_a_void_round_moves_nothing_and_stays_spent(tmp_path):
    small = Small(tmp_path / "fleet", settings={"clip_value": 1.0, "eps_local": 1.0})
    analyzer, helpers = small.analyzer(), small.shufflers()
    spent = analyzer.ledger.total[0]
    play(small, analyzer, helpers, users=range(USERS - 1))
    assert analyzer.status().round == 2
    assert analyzer.ledger.total[0] > spent > 0
    assert np.array_equal(decode_vector(analyzer.model(1), DIM), np.zeros(DIM))
    play(small, analyzer, helpers)
    assert [one["outcome"] for one in analyzer.privacy()["history"]] == ["void", "released"]
    analyzer.give_up_round(3)
    assert analyzer.status().over
    assert [one["outcome"] for one in analyzer.privacy()["history"]] == ["void", "released", "void"]
    with pytest.raises(TooLate, match="round 3 is over"):
        analyzer.count_part(0, 3, BATCH, 0, b"")


def test_a_round_to_which_nobody_reports_costs_nothing(tmp_path):
    """Two rounds without a report reserved 23.4 of eps 30; the next round takes their place, also after a restart."""
    small = Small(tmp_path / "fleet", settings={"clip_value": 1.0, "eps_local": 1.0})
    analyzer, helpers = small.analyzer(), small.shufflers()
    one_round = certify_task(small.deployment.task, 1)[0].eps
    play(small, analyzer, helpers, users=range(0))
    facts = analyzer.privacy()
    assert analyzer.status().round == 2 and analyzer.ledger.reserved_rounds == [1, 2]
    assert facts["spent"]["eps"] == analyzer.ledger.total[0] == one_round == facts["statement"]["eps"]
    assert facts["without_trust"]["eps"] == certify_task(small.deployment.task, 2)[1].eps  # which takes nobody's word
    assert facts["rounds_unused"] == 1 and facts["history"][0]["unused"]
    assert facts["history"][0]["reason"].endswith("nothing came, so it costs nothing")
    analyzer.close()
    again = small.analyzer()
    play(small, again, helpers)
    assert [one["outcome"] for one in again.privacy()["history"]] == ["void", "released"]
    assert again.ledger.total[0] == certify_task(small.deployment.task, 2)[0].eps > one_round  # round 3 is open
    play(small, again, helpers, users=range(0))
    assert again.status().over
    assert again.privacy()["spent"]["eps"] == again.privacy()["statement"]["eps"] == one_round
    with pytest.raises(TooLate, match="round 1 is over"):
        again.count_part(0, 1, BATCH, 0, b"")


@pytest.mark.parametrize("case", ["a batch was sent", "one of two has users", "nobody says anything"])
def test_a_round_of_which_something_may_have_come_stays_spent(tmp_path, case):
    small = Small(tmp_path / "fleet", settings={"clip_value": 1.0, "eps_local": 1.0}, shufflers=2)
    analyzer, void = small.analyzer(), Closed(state="void", parts=0, uploads=0, batch=BATCH)
    if case == "a batch was sent":
        analyzer.count_part(0, 1, BATCH, 0, small.content(0))
    if case == "nobody says anything":
        analyzer.note_closed(0, 1, void)
        analyzer.give_up_round(1)
    else:
        analyzer.note_closed(0, 1, void)
        uploads = 1 if case == "one of two has users" else 0
        analyzer.note_closed(1, 1, msgspec.structs.replace(void, uploads=uploads))
    facts = analyzer.privacy()
    assert facts["history"][0]["outcome"] == "void" and "unused" not in facts["history"][0]
    assert facts["rounds_unused"] == 0
    assert facts["spent"]["eps"] == certify_task(small.deployment.task, 2)[0].eps


def test_a_share_that_does_not_open_spoils_the_round(tmp_path):
    settings = {"clip_norm": 4.0, "noise_multiplier": 1e-6, "shufflers": 2, "shares": 4}
    small = Small(tmp_path / "fleet", protocol="split_and_mix", settings=settings, shufflers=2)
    analyzer = small.analyzer()
    for index in range(2):
        for user in range(USERS):
            packed = small.content(user, index=index)
            last = packed[-1] ^ (index == 1 and user == 0)
            analyzer.count_part(index, 1, BATCH, user, packed[:-1] + bytes([last]))
        analyzer.note_closed(index, 1, Closed(state="sent", parts=USERS, uploads=USERS, batch=BATCH))
    assert [one["outcome"] for one in analyzer.privacy()["history"]] == ["spoiled"]
    assert np.array_equal(decode_vector(analyzer.model(1), DIM), np.zeros(DIM))


def test_the_training_ends_when_the_budget_does(tmp_path):
    fields = {"settings": {"clip_value": 1.0, "eps_local": 0.5}, "rounds": 5}
    first = Small(tmp_path / "first", **fields).analyzer()
    one = first.ledger.total[0]
    small = Small(tmp_path / "fleet", **fields, eps=1.5 * one)
    analyzer = small.analyzer()
    analyzer.note_closed(
        0, 1, Closed(state="void", parts=0, uploads=1, batch=BATCH)
    )  # users would not have agreed to such a task
    assert analyzer.status().over
    assert analyzer.status().round == 1
    assert analyzer.ledger.total[0] == pytest.approx(one)
    analyzer.close()
    assert small.analyzer().status().over  # also after it is started again


@pytest.mark.parametrize("restored", ["ledger.db", "book.db"])
def test_a_ledger_or_a_book_from_an_older_copy_is_refused(tmp_path, restored):
    small = Small(tmp_path / "fleet")
    analyzer, helpers = small.analyzer(), small.shufflers()
    play(small, analyzer, helpers)
    analyzer.close()
    copy, home = tmp_path / "copy", tmp_path / "fleet" / "analyzer"
    shutil.copy(home / restored, copy)
    analyzer = small.analyzer()
    play(small, analyzer, helpers)
    analyzer.close()
    small.analyzer().close()  # as it was left
    shutil.copy(copy, home / restored)
    with pytest.raises(ValueError, match=f"so {restored} is older: restore book.db and ledger.db from one backup"):
        small.analyzer()


def test_both_from_an_older_copy_are_refused_by_the_shuffler(tmp_path):
    small = Small(tmp_path / "fleet")
    analyzer, helpers = small.analyzer(), small.shufflers()
    home = tmp_path / "fleet" / "analyzer"
    analyzer.close()
    shutil.copytree(home, tmp_path / "copy")
    analyzer = small.analyzer()
    play(small, analyzer, helpers)
    helpers[0].store.open_round(2, head=analyzer.status().head, closes=0.0)
    analyzer.close()
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "copy", home)
    back = small.analyzer().status()
    assert back.round == 1
    with pytest.raises(ValueError, match="opens round 1 after round 2: its ledger was restored from an older copy"):
        helpers[0].store.open_round(back.round, head=back.head, closes=0.0)


@pytest.mark.parametrize(("uploads", "copies"), [(USERS - 1, 1), (USERS, 2), (USERS + 1, 1)])
def test_a_round_of_other_numbers_than_its_users_send_is_spoiled(tmp_path, uploads, copies):
    small = Small(tmp_path / "fleet")
    analyzer = small.analyzer()
    number = 0
    for user in range(USERS):
        packed = small.content(user)
        for _ in range(copies):
            analyzer.count_part(0, 1, BATCH, number, packed)
            number += 1
    analyzer.note_closed(0, 1, Closed(state="sent", parts=number, uploads=uploads, batch=BATCH))
    assert [one["outcome"] for one in analyzer.privacy()["history"]] == ["spoiled"]


def test_after_closed_no_part_counts_and_two_processes_do_not_share_a_folder(tmp_path):
    small = Small(tmp_path / "fleet", shufflers=2)
    analyzer = small.analyzer()
    analyzer.note_closed(0, 1, Closed(state="sent", parts=0, uploads=USERS, batch=BATCH))
    with pytest.raises(Malformed, match="sender 0 has closed round 1"):
        analyzer.count_part(0, 1, BATCH, 0, small.content(0))
    with pytest.raises(ValueError, match="another process is working in"):
        small.analyzer()


class Failing(Direct):
    """An analyzer that a shuffler cannot reach any more after some parts; who is too late is told so."""

    def __init__(self, analyzer, parts=None):
        super().__init__(analyzer)
        self._left = parts

    def send_part(self, round, batch, number, part):
        if self._left is not None and len(self.parts) >= self._left:
            raise Unreachable("the line is cut")
        with gone():
            super().send_part(round, batch, number, part)

    def report_closed(self, round, closed):
        with gone():
            super().report_closed(round, closed)


@contextlib.contextmanager
def gone():
    """Status 410, to a link."""
    try:
        yield
    except TooLate as error:
        raise Gone(str(error)) from error


def restored_while_forwarding(tmp_path, monkeypatch, *, closed):
    """A shuffler that forwarded some of its parts goes on from a copy of its store, from before or after closing."""
    monkeypatch.setattr(party, "PART", DIM)  # several parts
    monkeypatch.setattr(party, "_IN_FLIGHT", 1)
    small = Small(tmp_path / "fleet", rounds=2)
    analyzer, (shuffler,) = small.analyzer(), small.shufflers()
    shuffler.store.open_round(1, head=analyzer.status().head, closes=0.0)
    for user in range(USERS):
        upload = small.clients[user].report(small.signed, 1, updates()[user]).uploads[0]
        shuffler.accept(1, client=small.keys[user].public.key_id, upload=upload)
    shuffler.store.freeze(1)
    if closed:
        shuffler.close_round(1)
    home = small.folder / "shuffler-0"
    shutil.copytree(home, tmp_path / "copy")
    shuffler.close_round(1)
    with pytest.raises(Unreachable):
        shuffler.forward(1, Failing(analyzer, parts=2))
    assert analyzer.privacy()["messages"] == 2 * DIM
    shuffler.close()
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "copy", home)
    analyzer.close()  # the analyzer starts again, too: what it pinned is on disk
    analyzer, (shuffler,) = small.analyzer(), small.shufflers()
    shuffler.close_round(1)
    shuffler.forward(1, Failing(analyzer))
    assert shuffler.store.state(1) == "done"
    return small, analyzer, shuffler


def test_a_shuffler_whose_store_was_restored_while_it_forwarded_spoils_the_round(tmp_path, monkeypatch):
    """It shuffled again: its parts are not those that were counted, so nothing of the round is used."""
    small, analyzer, shuffler = restored_while_forwarding(tmp_path, monkeypatch, closed=False)
    history = analyzer.privacy()["history"]
    assert [(one["outcome"], one["uploads"]) for one in history] == [("spoiled", 0)]
    assert np.array_equal(decode_vector(analyzer.model(1), DIM), np.zeros(DIM))
    assert [entry.kind for entry in analyzer.ledger.entries] == ["open", "reserve", "reserve"]  # it stays spent
    play(small, analyzer, [shuffler], round=2)
    assert np.allclose(decode_vector(analyzer.model(2), DIM), updates().mean(axis=0), atol=1e-6)


def test_a_store_that_was_copied_after_closing_goes_on_with_its_batch(tmp_path, monkeypatch):
    _, analyzer, _ = restored_while_forwarding(tmp_path, monkeypatch, closed=True)
    history = analyzer.privacy()["history"]
    assert [(one["outcome"], one["uploads"]) for one in history] == [("released", USERS)]
    assert np.allclose(decode_vector(analyzer.model(1), DIM), updates().mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("how", ["a part", "another part", "closed"])
def test_a_second_batch_of_one_sender_spoils_the_round(tmp_path, how):
    small = Small(tmp_path / "fleet")
    analyzer, other = small.analyzer(), bytes(16)
    assert analyzer.count_part(0, 1, BATCH, 0, small.content(0)) == "accepted"
    with pytest.raises(TooLate, match="sender 0 began another batch in round 1"):
        if how == "closed":
            analyzer.note_closed(0, 1, Closed(state="sent", parts=1, uploads=USERS, batch=other))
        else:
            analyzer.count_part(0, 1, other, int(how == "another part"), small.content(1))
    assert [one["outcome"] for one in analyzer.privacy()["history"]] == ["spoiled"]
    assert analyzer.status().round == 2
    with pytest.raises(TooLate, match="round 1 is over"):
        analyzer.count_part(0, 1, BATCH, 1, small.content(1))
    assert (
        analyzer.count_part(0, 2, other, 0, small.content(0, round=2)) == "accepted"
    )  # another round has another batch


def test_what_is_refused_begins_no_batch(tmp_path):
    small = Small(tmp_path / "fleet")
    analyzer, other = small.analyzer(), bytes(16)
    with pytest.raises(Malformed, match="expected messages of"):
        analyzer.count_part(0, 1, other, 0, small.content(0)[:-1])
    with pytest.raises(Malformed, match="sender 0 closes round 1 with 2 parts, and 0 have come"):
        analyzer.note_closed(0, 1, Closed(state="sent", parts=2, uploads=USERS, batch=other))
    for user in range(USERS):
        assert analyzer.count_part(0, 1, BATCH, user, small.content(user)) == "accepted"
    analyzer.note_closed(0, 1, Closed(state="sent", parts=USERS, uploads=USERS, batch=BATCH))
    assert [one["outcome"] for one in analyzer.privacy()["history"]] == ["released"]


def test_shufflers_have_batches_of_their_own(tmp_path):
    small = Small(tmp_path / "fleet", shufflers=2)
    analyzer = small.analyzer()
    assert analyzer.count_part(0, 1, BATCH, 0, small.content(0)) == "accepted"
    assert analyzer.count_part(1, 1, bytes(16), 0, small.content(0, index=1)) == "accepted"


@pytest.mark.parametrize("together", [True, False], ids=["in one part", "in several parts"])
def test_a_message_that_is_sent_again_counts_once(tmp_path, together):
    """A shuffler that has the second user's messages twice in place of the first's: no report counts twice."""
    small = Small(tmp_path / "fleet")
    analyzer, task = small.analyzer(), small.deployment.task
    sent = [small.content(user) for user in (1, 1, 2, 3)]
    if together:
        packed = [Packed.decode(one, length=task.message_bytes) for one in sent]
        sent = [Packed(np.concatenate([one.slots for one in packed]), b"".join(one.sealed for one in packed)).encode()]
    for number, part in enumerate(sent):
        assert analyzer.count_part(0, 1, BATCH, number, part) == "accepted"
    assert analyzer.privacy()["refused_messages"] == {"unsealable": 0, "out_of_range": 0, "repeated": DIM}
    analyzer.note_closed(0, 1, Closed(state="sent", parts=len(sent), uploads=USERS, batch=BATCH))
    model = decode_vector(analyzer.model(1), DIM)
    assert np.allclose(model, updates()[1:].sum(axis=0) / USERS, atol=1e-6)
    assert analyzer.count_part(0, 2, bytes(16), 0, small.content(1, round=2)) == "accepted"
    assert analyzer.privacy()["refused_messages"]["repeated"] == 0  # what was seen in a round is forgotten with it


def test_an_encapsulation_that_is_used_again_is_not_opened(tmp_path):
    """Whatever follows it: nobody honest uses one twice, so what is behind the second is not even looked at."""
    small = Small(tmp_path / "fleet")
    analyzer, packed = small.analyzer(), small.content(0)
    assert analyzer.count_part(0, 1, BATCH, 0, packed) == "accepted"
    assert analyzer.count_part(0, 1, BATCH, 1, packed[:-1] + bytes([packed[-1] ^ 1])) == "accepted"
    assert analyzer.privacy()["refused_messages"] == {"unsealable": 0, "out_of_range": 0, "repeated": DIM}


def test_one_message_in_two_parts_that_come_at_once_counts_once(tmp_path, monkeypatch):
    """The second part is counted while the first one is still being read, which is then read again."""
    small = Small(tmp_path / "fleet")
    analyzer, part, reads = small.analyzer(), small.content(0), []
    read = analyzer.incoming.read_part

    def interrupted(sender, round, batch, data, *, repeated):
        reads.append(len(repeated))
        found = read(sender, round, batch, data, repeated=repeated)
        if len(reads) == 1:
            assert analyzer.count_part(0, 1, BATCH, 1, part) == "accepted"
        return found

    monkeypatch.setattr(analyzer.incoming, "read_part", interrupted)
    assert analyzer.count_part(0, 1, BATCH, 0, part) == "accepted"
    assert reads == [0, 0, DIM]
    facts = analyzer.privacy()
    assert facts["messages"] == 2 * DIM
    assert facts["refused_messages"] == {"unsealable": 0, "out_of_range": 0, "repeated": DIM}


def test_one_share_that_is_sent_twice_spoils_the_round(tmp_path):
    """Where all shares must be there, a share in another one's place is missed."""
    settings = {"clip_norm": 4.0, "noise_multiplier": 1e-6, "shufflers": 2, "shares": 4}
    small = Small(tmp_path / "fleet", protocol="split_and_mix", settings=settings, shufflers=2)
    analyzer = small.analyzer()
    for index in range(2):
        for number, user in enumerate((1, 1, 2, 3) if index else range(USERS)):
            analyzer.count_part(index, 1, BATCH, number, small.content(user, index=index))
        analyzer.note_closed(index, 1, Closed(state="sent", parts=USERS, uploads=USERS, batch=BATCH))
    assert [one["outcome"] for one in analyzer.privacy()["history"]] == ["spoiled"]


def test_shufflers_that_decided_differently_let_nothing_out(tmp_path):
    small = Small(tmp_path / "fleet", shufflers=3)
    analyzer, helpers = small.analyzer(), small.shufflers()
    for shuffler in helpers:
        shuffler.store.open_round(1, head=analyzer.status().head, closes=0.0)
    for user in range(USERS):
        envelope = small.clients[user].report(small.signed, 1, updates()[user])
        for shuffler, upload in zip(helpers, envelope.uploads, strict=True):
            shuffler.accept(1, client=small.keys[user].public.key_id, upload=upload)
    rosters = [set(shuffler.store.freeze(1)) for shuffler in helpers]
    lie = set(list(rosters[2])[:1])
    _, told = helpers[0].decide_whom_to_count(1, rosters[1:])
    _, other = helpers[1].decide_whom_to_count(1, [rosters[0], lie])  # the third told it another roster
    assert told != other
    assert helpers[0].close_round(1, rosters[1:], agreed=[other, told]) == "void"
    with pytest.raises(ValueError, match="the rosters of round 1 are not those of before"):
        helpers[1].decide_whom_to_count(1, [rosters[0], rosters[2]])
    helpers[1].drop_round(1)
    assert not list(helpers[1].store.parts(1, size=10))


@pytest.mark.parametrize(("average", "count"), [(0.5, 2), (0.75, 3)])
def test_the_mean_of_the_last_models_is_published_when_training_is_over(tmp_path, average, count):
    """Users go on from the iterates; a restart in between changes nothing; the statement says what is published."""
    small, mean = Small(tmp_path / "fleet", rounds=4), Server(average=average)
    analyzer, helpers = small.analyzer(mean), small.shufflers()
    for round in range(1, 5):
        play(small, analyzer, helpers, round=round)
        if round == 3:
            third = decode_vector(analyzer.model(3), DIM)
            analyzer.close()
            analyzer = small.analyzer(mean)
            np.testing.assert_array_equal(decode_vector(analyzer.model(3), DIM), third)
    assert analyzer.status().over
    steps = np.diff([decode_vector(analyzer.model(round), DIM) for round in range(4)], axis=0)
    np.testing.assert_allclose(steps, np.broadcast_to(steps[0], steps.shape), atol=1e-6)  # almost no noise
    assert np.abs(steps[0]).max() > 0.4
    np.testing.assert_allclose(decode_vector(analyzer.model(4), DIM), third + steps[0] * (3 - count) / 2, atol=1e-6)
    said = analyzer.privacy()["statement"]["assumptions"]
    assert any(f"mean of the models after the last {count} of 4 rounds" in line for line in said)
    analyzer.close()


def test_sums_are_divided_by_how_many_users_counted(tmp_path):
    """Which is released with every round, where neighbours have as many."""
    task = Small(tmp_path).deployment.task
    learner = Learner(task, Learning(initial=np.zeros(DIM, np.float32), server=Server(learning_rate=1.0)))
    first, nothing = learner.initial_leaves(), learner.zero_sums()
    something = [one + 2 for one in nothing]
    all_of_them, half = (learner.step(first, something, users=users)[0][0] for users in (USERS, USERS / 2))
    assert np.any(all_of_them != 0)
    np.testing.assert_allclose(half, 2 * all_of_them, rtol=1e-5)


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        ("ss_simple", None),
        ("privunit", {"clip_norm": 1.0, "eps_local": 2.0}),
        ("split_and_mix", {"clip_norm": 1.0, "noise_multiplier": 1.0, "shares": 4}),
    ],
)
def test_messages_that_are_tallied_some_at_a_time_add_up_to_the_whole(tmp_path, monkeypatch, protocol, settings):
    """What is expanded at a time bounds memory, and nothing else: neither sums nor counts of refused messages."""
    small = Small(tmp_path, protocol=protocol, settings=settings, shufflers=2 if protocol == "split_and_mix" else 1)
    task = small.deployment.task
    learner = Learner(task, Learning(initial=np.zeros(DIM, np.float32), server=Server()))
    sent = [task.messages().randomize(update, sampler=ExactSampler()) for update in updates()]
    slot, body = (np.concatenate([getattr(one, name) for one in sent]) for name in ("slot", "body"))
    body[[0, -1]] = 255
    whole, refused = learner.tally(slot, body)
    for at_a_time in (1, 3):
        monkeypatch.setattr("dovetail.parties.analyzer.learning._LARGEST_BLOCK", at_a_time * DIM)
        parts, counted = learner.tally(slot, body)
        assert counted == refused
        for one, other in zip(parts, whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_model_of_its_own_length_is_solved_from_moments(tmp_path):
    moments = Moments(features=1, classes=2, constant=1.0)
    settings = {"clip_norm": 4.0, "noise_multiplier": 1e-6, "shares": 4}
    small = Small(
        tmp_path / "fleet", rounds=1, dim=moments.dim, protocol="split_and_mix", settings=settings, shufflers=2
    )
    learning = Learning(initial=np.zeros(moments.dim, np.float32), server=Ridge(), moments=moments)
    learner = Learner(small.deployment.task, learning)
    first, nothing = learner.initial_leaves(), learner.zero_sums()
    mean = np.asarray(moments(np.array([[1.0], [-1.0]], np.float32), np.array([0, 1]), 2))
    np.testing.assert_allclose(
        learner.model_to_publish([mean, *first[1:]]).reshape(2, 2), [[0.5, -0.5], [0, 0]], rtol=1e-2, atol=1e-6
    )
    assert learner.model_to_publish(learner.step(first, nothing, users=USERS)[0]).shape == (4,)
    something = [np.full_like(one, 5) for one in nothing]
    planned, fewer = (learner.step(first, something, users=users)[0][0] for users in (USERS, USERS - 1))
    assert np.any(planned != 0)
    np.testing.assert_array_equal(planned, fewer)  # noise and ridge are those of the planned number
    with pytest.raises(ValueError, match="rounds = 1"):
        Learner(Small(tmp_path / "long", rounds=2, dim=moments.dim).deployment.task, learning)
