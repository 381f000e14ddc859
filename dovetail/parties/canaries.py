"""Canary users in real rounds: what analyzer and all aggregators but one see, when one user holds one of two updates.

Everything that is deployed runs: the client with its policy and ledger, sealing, the aggregators' stores, the analyzer
with its store; only the network is left out. The adversary holds the analyzer's key and all aggregators' but the first,
knows everybody else's update, and asks for sums again as if they had been lost. Each round is one trial, and its scores
are what the adversary makes of it; how much they tell is for an audit to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dovetail.learners.server import Server
from dovetail.parties.aggregator.party import Aggregator
from dovetail.parties.analyzer.learning import Learning
from dovetail.parties.analyzer.party import Analyzer
from dovetail.parties.common.guarantees import certify_task
from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.sealing import open_sealed
from dovetail.parties.common.sharing import add_share, decode_sum
from dovetail.parties.common.task import SignedTask, TrainingTask, sign
from dovetail.parties.fleet import lenient_policy
from dovetail.parties.user.client import Client
from dovetail.statements import Statement

__all__ = ["CanaryRounds"]

_REPETITIONS = 8  # of asking for a sum


class CanaryRounds:
    """A task on shares with all its parties in a folder, and a victim that holds one of two updates.

    Arguments:
        folder: for the parties' keys and stores.
        protocol: a protocol whose reports can be shared as sums.
        settings: its settings.
        dim: numbers of an update.
        users: users of a round, the victim among them.
        delta: of the guarantee.
        trials: rounds of the task.
        aggregators: how many; all but the first collude.
    """

    def __init__(
        self,
        folder: Path,
        protocol: str,
        settings: Mapping[str, Any],
        *,
        dim: int,
        users: int,
        delta: float,
        trials: int,
        aggregators: int = 2,
    ) -> None:
        self._ring = KeyRing(folder / "analyzer" / "keys", "seal")
        keys = [ServicePairs.add(folder / f"aggregator-{i}" / "keys") for i in range(aggregators)]
        self.task = TrainingTask(
            name="canaries",
            protocol=protocol,
            settings=dict(settings),
            dim=dim,
            rounds=trials,
            min_clients=users,
            max_clients=users,
            round_seconds=3600.0,
            delta=delta,
            analyzer=self._ring.add().public,
            aggregators=tuple(pair.public for pair in keys),
        )
        if self.task.has_proofs:
            raise ValueError("canary rounds cannot attack verified sums: set protocol.verified = false")
        self._signed = sign(self.task, signer := KeyPair.generate("sign"))
        options: dict[str, Any] = {"signed": self._signed, "signer": signer.public.key_id}
        self.parties = [
            Aggregator(folder / f"aggregator-{i}", **options, index=i, keys=pair) for i, pair in enumerate(keys)
        ]
        learning = Learning(initial=np.zeros(dim, np.float32), server=Server(learning_rate=1.0))
        self._analyzer = Analyzer(folder / "analyzer", **options, keys=self._ring, learning=learning, workers=1)
        self._folder = folder
        self.present = users
        self._users: list[Client] = []
        self._round = 0
        self._before = np.zeros(self.task.contribution().length, np.uint32)  # the victim's shares of the last round

    def statement(self) -> Statement:
        """The certified statement for one round."""
        return certify_task(self.task, 1)[0]

    def run(self, trials: int, observe: Callable[[int], None] = lambda done: None) -> dict[str, np.ndarray]:
        """Play so many rounds in each world, in turn; returns the scores by name, an array (2, trials) each."""
        rows: list[list[dict[str, float]]] = [[], []]
        for trial in range(2 * trials):
            rows[trial % 2].append(self.play_round(trial % 2))
            observe(trial + 1)
        return {name: np.array([[row[name] for row in world] for world in rows]) for name in rows[0][0]}

    def play_round(self, world: int) -> dict[str, float]:
        """One round with the victim's update of this world: what the adversary computes from what it sees."""
        self._round += 1
        direction = self._victim_update()
        for party in self.parties:
            party.store.open_round(self._round, head=self._analyzer.status().head, closes=0.0)
        seen = self._report_as_all_users(direction if world == 0 else -direction)
        self._close_round()
        score = float(np.mean([self._estimate_mean() for _ in range(_REPETITIONS)], axis=0) @ direction)
        for index, party in enumerate(self.parties):
            party.forward(self._round, _DirectAnalyzer(self._analyzer, index))  # type: ignore[arg-type]
        return {"the sum": score, "shares beside those of the round before": self._change_of_shares(seen) @ direction}

    def _change_of_shares(self, seen: np.ndarray) -> np.ndarray:
        """By how much the victim's shares at the colluding aggregators moved since the last round, with signs."""
        bits = self.task.contribution().bits
        moved = (seen - self._before) & np.uint32(2**bits - 1)
        self._before = seen
        return (moved.astype(np.int64) - (moved >= 2 ** (bits - 1)) * 2**bits)[: self.task.dim].astype(np.float64)

    def close(self) -> None:
        """Close the files of all parties."""
        for party in self.parties:
            party.close()
        self._analyzer.close()

    def _victim_update(self) -> np.ndarray:
        """The victim's update in the first world: as large as the clip norm allows, the same in all coordinates."""
        protocol = self.task.build()[0]
        clip = getattr(protocol, "clip_norm", None)
        if clip is not None:
            return np.full(self.task.dim, clip / math.sqrt(self.task.dim))
        return np.full(self.task.dim, float(getattr(protocol, "clip_value", 1.0)))

    def _report_as_all_users(self, update: np.ndarray) -> np.ndarray:
        """Let all users report, the victim first; returns the sum of its shares at the colluding aggregators."""
        contribution = self.task.contribution()
        seen = np.zeros(contribution.length, np.uint32)
        while len(self._users) < self.present:
            number = len(self._users)
            self._users.append(_make_client(self._folder / f"user-{number}", self._signed, number))
        for number, user in enumerate(self._users):
            mine = update if number == 0 else np.zeros(self.task.dim)
            envelope = user.report(self._signed, self._round, mine.astype(np.float32))
            for party, upload in zip(self.parties, envelope.uploads, strict=True):
                party.accept(self._round, client=envelope.sender, upload=upload)
                if number == 0 and party.index > 0:
                    content = party.open_upload(self._round, client=envelope.sender, upload=upload).content
                    add_share(seen, content, contribution.bits, last=party.index == len(self.parties) - 1)
            user.forget_envelope(envelope)
        return seen

    def _close_round(self) -> None:
        rosters = [party.store.freeze(self._round) for party in self.parties]
        for index, party in enumerate(self.parties):
            others = [roster for i, roster in enumerate(rosters) if i != index]
            party.decide_whom_to_count(self._round, others)
            party.close_round(self._round, others)

    def _estimate_mean(self) -> np.ndarray:
        """The mean update, from the sums as aggregators send them now."""
        contribution = self.task.contribution()
        key = self._ring.find(self.task.analyzer.key_id).opening_key()
        total = np.zeros(contribution.length, np.uint32)
        for index, party in enumerate(self.parties):
            ((_, sealed),) = party.store.parts(self._round, size=1)
            purpose = self.task.sum_purpose(self._round, index, batch=party.store.batch_id(self._round))
            total += decode_sum(open_sealed(sealed, key, purpose), contribution.length, contribution.bits)
        protocol, cohort = self.task.build()
        tally = contribution.tally(total & np.uint32(2**contribution.bits - 1), len(self._users))
        return np.asarray(
            protocol.estimate(tally, cohort.size, protocol.init(self.task.dim), key=jax.random.key(0))[0], np.float64
        )


class _DirectAnalyzer:
    """The analyzer as an aggregator's client sees it, without a network between them."""

    def __init__(self, analyzer: Analyzer, index: int) -> None:
        self._analyzer = analyzer
        self._index = index

    def send_part(self, round: int, batch: bytes, number: int, part: bytes) -> None:
        self._analyzer.count_part(self._index, round, batch, number, part)

    def report_closed(self, round: int, closed: Any) -> None:
        self._analyzer.note_closed(self._index, round, closed)


def _make_client(folder: Path, signed: SignedTask, number: int) -> Client:
    policy = lenient_policy(signed)
    return Client(folder, policy=policy.with_number(number), key=KeyPair.generate("sign"), witness=False)
