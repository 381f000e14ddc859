"""Verified tasks with all parties in one process: peers without a network between them, and hostile users."""

import secrets

import numpy as np
from sharing import Sharing, Straight, open_round

from dovetail.parties.common.sharing import proof_nonce

SETTINGS = {"noise": "aggregators", "verified": True, "noise_multiplier": 1e-3, "clip_norm": 1.0}


class Peer:
    """An aggregator as the others see it."""

    def __init__(self, party):
        self._party = party

    def roster(self, round):
        found = self._party.store.roster(round)
        return None if found is None else set(found)

    def agreed_digest(self, round):
        return self._party.store.agreed_digest(round)

    def challenge(self, round):
        return self._party.challenge(round)

    def verifiers(self, round, *, reports):
        return self._party.verifiers(round, 0)


def verified_task(folder, *, aggregators=2, clients=6, min_clients=3, dim=6, settings=None, **options):
    own = {**SETTINGS, "aggregators": aggregators, **(settings or {})}
    return Sharing(
        folder, dim=dim, clients=clients, min_clients=min_clients, aggregators=aggregators, settings=own, **options
    )


def opened(sharing, round=1):
    analyzer = sharing.analyzer()
    parties = [sharing.aggregator(index) for index in range(len(sharing.keys))]
    open_round(parties, analyzer, round)
    return analyzer, parties


def closed(parties, round=1, *, tries=6):
    """Everybody asks everybody else, again and again, until all have closed."""
    for party in parties:
        party.store.freeze(round)
    states = []
    for _ in range(tries):
        states = [
            party.agree_and_close(round, [Peer(other) for other in parties if other is not party])
            if party.store.state(round) == "frozen"
            else party.store.state(round)
            for party in parties
        ]
        if "frozen" not in states:
            break
    return states


def forwarded(analyzer, parties, round=1):
    for index, party in enumerate(parties):
        party.forward(round, Straight(analyzer, index))
    return analyzer.privacy()["history"][-1]


def hostile_contents(
    sharing, user, integers, report, *, round=1, task_id=None, pine_of, spoil=lambda public, parts: None
):
    """What every aggregator would get of any integers, with a proof that claims what it must."""
    form = sharing.task.sharing()
    nonce = proof_nonce(task_id or sharing.task.task_id, round, sharing.users[user].public.key_id, report)
    public, parts = pine_of(form.proof).shard(np.asarray(integers), nonce, secrets.token_bytes(form.proof.rand_size))
    public, parts = spoil(public, parts) or (public, parts)
    return [form._share_head(index) + public + part for index, part in enumerate(parts)]


def give(sharing, parties, user, contents, report, *, round=1):
    for index, (party, content) in enumerate(zip(parties, contents, strict=True)):
        upload = sharing.sealed(user, content, report=report, round=round, index=index)
        party.accept(round, client=sharing.users[user].public.key_id, upload=upload)
