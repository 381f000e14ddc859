"""A small task whose reports travel as shares, with all its parties in one process."""

from __future__ import annotations

import numpy as np
from parties.household import opened, sealed

from dovetail.learners.server import Server
from dovetail.parties.aggregator.party import Aggregator
from dovetail.parties.analyzer.learning import Learning
from dovetail.parties.analyzer.party import Analyzer
from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.sealing import OVERHEAD
from dovetail.parties.common.sharing import share_size
from dovetail.parties.common.task import TrainingTask, sign
from dovetail.parties.user.client import Client
from dovetail.parties.user.policy import Policy

SETTINGS = {
    "secagg": {"clip_norm": 1.0, "noise_multiplier": 0.1},
    "ss_simple": {"clip_value": 1.0, "eps_local": 4.0},
    "ss_topk": {"clip_value": 1.0, "k": 2, "eps_local": 4.0},
}


class Sharing:
    """Everybody of one task with aggregators."""

    def __init__(
        self, folder, protocol="secagg", *, dim=6, clients=4, aggregators=2, settings=None, more_keys=(), **task
    ):
        self.folder = folder
        self.signer = KeyPair.generate("sign")
        self.ring = KeyRing(folder / "analyzer" / "keys", "seal")
        self.keys = [ServicePairs.add(folder / f"aggregator-{i}" / "keys") for i in range(aggregators)]
        self.users = [KeyPair.generate("sign") for _ in range(clients)]
        asked = {"rounds": 2, "min_clients": clients, "max_clients": clients, "round_seconds": 600.0, "delta": 1e-5}
        asked["analyzer_sign"] = KeyRing(self.ring.folder, "sign").add().public
        self.task = TrainingTask(
            name="small",
            protocol=protocol,
            settings={**SETTINGS.get(protocol, {}), **(settings or {})},
            dim=dim,
            analyzer=self.ring.add().public,
            aggregators=tuple(keys.public for keys in self.keys),
            **{**asked, **task},
        )
        self.signed = sign(self.task, self.signer)
        self.enrolled = {pair.public.key_id: pair.public for pair in (*self.users, *more_keys)}
        self.policy = Policy(
            signer=self.signer.public.key_id,
            analyzer=self.task.analyzer_id,
            min_clients=1,
            eps_round=None,
            eps_task=None,
            eps_lifetime=None,
            delta_lifetime=0.5,
        )

    def analyzer(self, *, initial=None, home="analyzer", store=None):
        length = self.task.dim if initial is None else initial
        return Analyzer(
            self.folder / home,
            signed=self.signed,
            signer=self.signer.public.key_id,
            keys=self.ring,
            learning=Learning(initial=np.zeros(length, np.float32), server=Server(learning_rate=1.0)),
            workers=1,
            store=store,
        )

    def aggregator(self, index, *, home=None, store=None, segments=None):
        return Aggregator(
            self.folder / (home or f"aggregator-{index}"),
            signed=self.signed,
            signer=self.signer.public.key_id,
            index=index,
            keys=self.keys[index],
            store=store,
            segments=segments,
        )

    @property
    def sum_bytes(self):
        """Of a sealed sum."""
        shared = self.task.contribution()
        return share_size(shared.length, shared.bits, last=True) + OVERHEAD

    def party(self, index=0):
        return self.aggregator(index)

    def content(self, user, upload, *, round=1, index=0):
        """The share in an upload of a user, as its aggregator sees it."""
        return opened(self.task, upload, self.keys[index], self.users[user], round=round, index=index)

    def sealed(self, user, content, *, report=None, round=1, index=0):
        """An upload of a user that holds this, whatever it is."""
        return sealed(self.task, content, self.users[user], report=report, round=round, index=index)

    def envelope(self, user, *, round=1, update=None, facts=None):
        client = Client(self.folder / f"user-{user}", policy=self.policy, key=self.users[user])
        return client.report(self.signed, round, np.zeros(self.task.dim) if update is None else update, facts or {})

    def accept(self, parties, user, *, round=1, update=None, facts=None):
        """One user's uploads, to everybody."""
        envelope = self.envelope(user, round=round, update=update, facts=facts)
        for party, upload in zip(parties, envelope.uploads, strict=True):
            party.accept(round, client=self.users[user].public.key_id, upload=upload)
        return envelope


def close(parties, round=1):
    """Agree on whom to count, and close."""
    rosters = [party.store.freeze(round) for party in parties]
    for index, party in enumerate(parties):
        party.decide_whom_to_count(round, [roster for i, roster in enumerate(rosters) if i != index])
    agreed = [party.store.agreed_digest(round) for party in parties]
    return [
        party.close_round(
            round,
            [roster for i, roster in enumerate(rosters) if i != index],
            agreed=[digest for i, digest in enumerate(agreed) if i != index],
        )
        for index, party in enumerate(parties)
    ]


class Straight:
    """An analyzer as one of its aggregators sees it, without a network between them; remembers what passed."""

    def __init__(self, analyzer, index):
        self._analyzer, self._index, self.parts, self.said = analyzer, index, [], []

    def send_part(self, round, batch, number, part):
        self.parts.append(part)
        self._analyzer.count_part(self._index, round, batch, number, part)

    def report_closed(self, round, closed):
        self.said.append(closed)
        self._analyzer.note_closed(self._index, round, closed)


def open_round(parties, analyzer, round=1):
    """As a service does when the analyzer says so."""
    for party in parties:
        party.store.open_round(round, head=analyzer.status().head, closes=0.0)
