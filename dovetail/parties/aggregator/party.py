"""An aggregator: it adds up the shares of a round's users, and hands on the sum and nothing else.

A share alone is random. The sum that it makes of the agreed users' shares is, together with those of the other
aggregators, the sum of what users contributed, and with fewer of them random again. Where aggregators add the noise,
each adds all of it, so that one that is honest suffices.

What an aggregator remembers of a round that is verified: keys, what it found, and whom it refused.

When a round is frozen, every aggregator draws a part of the round's key; all parts make up the key that says at which
points proofs are tested, so that no user knew it when it reported. The first key that is formed stays, and there is one
answer per report to it: answers to two keys would tell more than a proof does. What was found is kept until the next
round opens, for others may still ask.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from dovetail.files import write_atomically
from dovetail.mechanisms import ExactSampler
from dovetail.parties.aggregator.store import SumStore
from dovetail.parties.common.keys import ServiceKeys
from dovetail.parties.common.links import IntermediaryLink
from dovetail.parties.common.sealing import Purpose, seal
from dovetail.parties.common.sharing import VerifiedSharing, proof_nonce
from dovetail.parties.common.task import TrainingTask
from dovetail.parties.common.wire import BATCH_ID, Malformed, Verifiers
from dovetail.parties.intermediary.party import Intermediary, heard
from dovetail.parties.intermediary.store import State
from dovetail.vdaf.systems import ProofSystem, SharedReport
from dovetail.vdaf.xof import SEED

__all__ = [
    "KEPT_NONCE",
    "REFUSED",
    "Aggregator",
    "VerifiedStore",
    "round_key",
]

REFUSED = "refused.json"  # whose proofs did not hold, for who enrols users


class Aggregator(Intermediary[SumStore]):
    """One of the aggregators of a task, without the network around it.

    Replicas with a database may keep shares as `segments` of a folder that they all reach.

    Guarantees:
        What leaves is one sum over at least the task's minimum of users, sealed to the analyzer, the same bytes however
        often it is sent.
        Noise that it owes is in the sum before the sum is written down.
        In a verified task a user counts only if all aggregators accept its proof; who does not is named in a file of
        this aggregator's, and to nobody else.
    """

    kind: ClassVar[str] = "aggregator"

    def __init__(self, folder: Path, *, segments: Path | None = None, **options: Any) -> None:
        self._sampler, self._folder, self._segments = ExactSampler(), folder, segments
        super().__init__(folder, **options)

    @classmethod
    def named(cls, task: TrainingTask) -> Sequence[ServiceKeys]:
        """The task's aggregators."""
        return task.aggregators

    def _open_store(self, where: Path | str, owner: bytes) -> SumStore:
        self._shared, self._sharing = self.task.contribution(), self.task.sharing()
        return (VerifiedStore if self.task.verified else SumStore)(
            where,
            sharing=self._sharing,
            index=self.index,
            finish=self._finish,
            min_uploads=self.task.min_clients,
            max_uploads=self.task.max_clients,
            owner=owner,
            segments=self._segments,
        )

    @property
    def largest_content(self) -> int:
        """A share."""
        return self._sharing.size(self.index)

    def exchange(self, round: int, peers: Sequence[IntermediaryLink]) -> State:
        """Agree with the others on whom to count, on whose proofs hold where there are proofs, and close.

        Parts of the round's key travel with the rosters, and what everybody found with the digests of what was agreed:
        verifying takes one exchange. Where users' proofs do not hold the round goes on without them.
        """
        if not isinstance(self.store, VerifiedStore):
            return super().exchange(round, peers)
        if (state := self.store.state(round)) not in ("unknown", "open", "frozen"):
            return state
        rosters, parts = heard([peer.roster(round) for peer in peers]), heard([peer.challenge(round) for peer in peers])
        own = self.store.challenge(round)
        if rosters is None or parts is None or own is None:
            return "frozen"
        roster, digest = self.decide(round, rosters)
        counted = set() if roster is None else roster
        self.store.answer(round, counted, round_key(self.task.task_id, round, [own, *parts]))
        agreed = heard([peer.agreed(round) for peer in peers])
        if agreed is None or any(other != digest for other in agreed):
            return "frozen" if agreed is None else self.close(round, rosters, agreed=agreed)
        told = heard([peer.verifiers(round, reports=len(counted)) for peer in peers])
        if told is None:
            return "frozen"
        valid = self.store.judge(round, counted, told)
        self.store.write_refused(self._folder / REFUSED)
        return self.close(round, rosters, agreed=agreed, valid=valid)

    def challenge(self, round: int) -> bytes | None:
        """Its part of the key that a round's proofs are tested with, once the round is frozen."""
        return self.store.challenge(round) if isinstance(self.store, VerifiedStore) else None

    def told(self, round: int, first: int) -> Verifiers | None:
        """What it found about a round's proofs, from this report on."""
        return self.store.told(round, first) if isinstance(self.store, VerifiedStore) else None

    def _content(self, opened: bytes, purpose: Purpose) -> bytes:
        """Where there is a proof, with what it must be bound to."""
        if not isinstance(self.store, VerifiedStore):
            return opened
        return proof_nonce(purpose.task_id, purpose.round, purpose.sender, purpose.report) + opened

    def _complete(self, round: int, roster: Collection[bytes] | None) -> None:
        """Partial sums, outside of the transaction that closes the round."""
        if roster is not None:
            self.store.add_up(round, roster)

    def _batch(self, digest: bytes) -> bytes:
        """The same at all aggregators that agree, so that the analyzer notices if they do not."""
        return digest[:BATCH_ID]

    def _finish(self, round: int, total: np.ndarray) -> bytes:
        """The sum with this aggregator's noise, sealed to the analyzer."""
        noise = self._shared.noise(sampler=self._sampler)
        purpose = self.task.sum_purpose(round, self.index, batch=self.store.batch(round))
        return seal(self._sharing.encode_sum(total, noise), self.task.analyzer.sealing(), purpose)


KEPT_NONCE = 16  # bytes that a kept content begins with
_MIGRATIONS = (
    """
CREATE TABLE IF NOT EXISTS challenges (round INTEGER PRIMARY KEY, part BLOB NOT NULL, key BLOB) STRICT;
CREATE TABLE IF NOT EXISTS verifiers (round INTEGER, report BLOB, told BLOB, PRIMARY KEY (round, report)) STRICT;
CREATE TABLE IF NOT EXISTS refused (round INTEGER, client BLOB, PRIMARY KEY (round, client)) STRICT;
""",
)
_AT_ONCE = 1 << 18  # elements that are verified at a time
_PAGE = 1 << 22  # bytes of verifiers in an answer, about
_JUDGED = 1024  # reports that are judged at a time
_DIGEST = 32


def round_key(task_id: bytes, round: int, parts: Collection[bytes]) -> bytes:
    """The key of a round, from every aggregator's part, in whatever order."""
    return hashlib.sha256(b"dovetail key\0" + task_id + round.to_bytes(4, "big") + b"".join(sorted(parts))).digest()


class VerifiedStore(SumStore):
    """The store of an aggregator of a verified task.

    Guarantees:
        A round has one key, and a report one answer to it, also after a crash.
        A refused user is written down with its round, and nowhere but here.
    """

    migrations: ClassVar[Mapping[str, tuple[str, ...]]] = {**SumStore.migrations, "proofs": _MIGRATIONS}
    _sharing: VerifiedSharing

    def open_round(self, round: int, *, head: bytes, closes: float) -> None:
        """Begin to take uploads; nobody asks about rounds any more that were closed before.

        What was answered stays while the shares do, whoever announces which round: a second answer would tell of them.
        """
        super().open_round(round, head=head, closes=closes)
        still = "SELECT round FROM rounds WHERE state IN ('open', 'frozen')"
        with self._transaction():
            for table in ("challenges", "verifiers"):
                self._do(f"DELETE FROM {table} WHERE round < ? AND round NOT IN ({still})", round)

    def challenge(self, round: int) -> bytes | None:
        """This aggregator's part of the round's key, drawn while the round is frozen, and kept."""
        with self._transaction():
            if self.state(round) == "frozen":
                drawn = round, secrets.token_bytes(SEED)
                self._do("INSERT INTO challenges (round, part) VALUES (?, ?) ON CONFLICT DO NOTHING", *drawn)
        found = self._one("SELECT part FROM challenges WHERE round = ?", round)
        return None if found is None else found[0]

    def answer(self, round: int, roster: Collection[bytes], key: bytes) -> None:
        """Find out about the reports on the roster, with the round's key; what was found before stays."""
        with self._transaction():
            if (state := self.state(round)) != "frozen":
                raise ValueError(f"expected a round that is frozen, got round {round}, {state}")
            self._do("UPDATE challenges SET key = ? WHERE round = ? AND key IS NULL", key, round)
        if self._one("SELECT key FROM challenges WHERE round = ?", round) != (key,):
            raise ValueError(f"expected the key of round {round} that was formed before, got another one")
        done = {row[0] for row in self._rows("SELECT report FROM verifiers WHERE round = ?", round)}
        missing, proof = sorted(set(roster) - done), self._sharing.proof
        step = max(1, _AT_ONCE // proof.elements)
        for low in range(0, len(missing), step):
            names = missing[low : low + step]
            reports = self._reports(round, names)
            found = proof.query(key, self._index, reports)
            told = [
                (round, name, one.verifier + hashlib.sha256(report.public).digest())
                for name, report, one in zip(names, reports, found, strict=True)
            ]
            with self._transaction():
                self._database.many("INSERT INTO verifiers VALUES (?, ?, ?) ON CONFLICT DO NOTHING", told)

    def told(self, round: int, first: int = 0) -> Verifiers | None:
        """What was found, in the order of reports, from the one with this number on; None if something is missing.

        As much as fits into an answer.
        """
        agreed = self.agreed(round)
        if agreed is None:
            return None
        names = self._rows("SELECT report FROM verifiers WHERE round = ? ORDER BY report", round)
        if hashlib.sha256(b"".join(name for (name,) in names)).digest() != agreed:
            return None
        size = max(1, _PAGE // (self._sharing.proof.verifier_size + _DIGEST))
        return Verifiers(index=self._index, total=len(names), told=self._found(round, first, size))

    def judge(self, round: int, roster: Collection[bytes], others: Sequence[Verifiers]) -> set[bytes]:
        """The reports that everybody accepts, given what the others found; users of the others are written down.

        All aggregators judge by the same: what all found, and the public share, which must be the same everywhere and
        be what was found.
        """
        names, proof = sorted(roster), self._sharing.proof
        by_index = {one.index: one.told for one in others}
        by_index[self._index] = self._found(round, 0, len(names))
        if sorted(by_index) != list(range(proof.shares)) or any(len(told) != len(names) for told in by_index.values()):
            raise ValueError(f"expected what every aggregator found of {len(names)} reports, got something else")
        rows = list(zip(*(by_index[index] for index in range(proof.shares)), strict=True))
        fine: set[bytes] = set()
        for low in range(0, len(rows), _JUDGED):
            some = rows[low : low + _JUDGED]
            decided = proof.decide([[told[:-_DIGEST] for told in row] for row in some])
            fine |= {
                name
                for name, row, message in zip(names[low : low + _JUDGED], some, decided, strict=True)
                if message is not None and _same_public(proof, row)
            }
        self._write_down(round, set(names) - fine)
        return fine

    def refused(self) -> list[dict[str, Any]]:
        """Whose proofs were refused, by round."""
        return [
            {"round": round, "user": client.hex()}
            for round, client in self._rows("SELECT round, client FROM refused ORDER BY round, client")
        ]

    def write_refused(self, path: Path) -> None:
        """For who enrols users."""
        write_atomically(path, msgspec.json.format(msgspec.json.encode(self.refused())) + b"\n")

    def _share(self, content: bytes) -> bytes:
        if len(content) < KEPT_NONCE:
            raise Malformed("expected a share after its nonce, got less")
        return content[KEPT_NONCE:]

    def _reports(self, round: int, names: Sequence[bytes]) -> list[SharedReport]:
        found = dict(self._contents(round, names))
        if len(found) != len(names):
            raise ValueError(f"expected the share of every report on the roster of round {round}, got none of one")
        return [self._sharing.report(found[name][KEPT_NONCE:], found[name][:KEPT_NONCE]) for name in names]

    def _found(self, round: int, first: int, count: int) -> list[bytes]:
        query = "SELECT told FROM verifiers WHERE round = ? ORDER BY report LIMIT ? OFFSET ?"
        return [told for (told,) in self._rows(query, round, count, first)]

    def _write_down(self, round: int, reports: set[bytes]) -> None:
        query = (
            "INSERT INTO refused SELECT round, client FROM uploads WHERE round = ? AND report = ? "
            "ON CONFLICT DO NOTHING"
        )
        with self._transaction():
            self._database.many(query, [(round, report) for report in sorted(reports)])


def _same_public(proof: ProofSystem, row: Sequence[bytes]) -> bool:
    """Whether the public share is the same everywhere, and is what aggregators found."""
    found = proof.public_of([told[:-_DIGEST] for told in row])
    return {told[-_DIGEST:] for told in row} == {hashlib.sha256(found).digest()}
