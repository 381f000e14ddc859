"""Shufflers among themselves: one cannot play a user's upload at another, nor read what is for its owner."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
from parties.household import Direct, Household

from dovetail.parties.common.wire import sign_request
from dovetail.parties.http.intermediary import IntermediaryService


class _Peer:
    """Another shuffler that never closes."""

    def roster(self, round):
        return None

    def agreed_digest(self, round):
        return None


async def _against_the_first(household, service):
    store, task = service._party.store, household.task
    prefix = f"/v1/tasks/{task.task_id.hex()}/rounds/1"
    mine, theirs = household.envelope(0).uploads
    content = household.content(0, mine)

    async with (
        service.app.router.lifespan_context(service.app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=service.app), base_url="http://shuffler") as http,
    ):
        while store.state(1) == "unknown":
            await asyncio.sleep(0.01)

        async def post(upload, *, to, signed_for, key=household.users[0]):
            body = upload.encode()
            headers = sign_request(key, "POST", f"{prefix}/uploads/{signed_for}", body)
            answer = await http.post(f"{prefix}/uploads/{to}", content=body, headers=headers)
            return answer.status_code, answer.text

        async def get(path, key=None):
            headers = {} if key is None else sign_request(key, "GET", path, b"")
            return await http.get(path, headers=headers)

        seen = {
            "for another": await post(theirs, to=1, signed_for=1),
            "readdressed": await post(theirs, to=0, signed_for=1),
            "own": await post(mine, to=0, signed_for=0),
            "again": await post(mine, to=0, signed_for=0),
            "under another name": await post(mine, to=0, signed_for=0, key=household.users[1]),
            "another's id": await post(
                household.sealed(1, content, report=mine.report), to=0, signed_for=0, key=household.users[1]
            ),
            "what was for another": await post(theirs, to=0, signed_for=0, key=household.users[2]),
            "by a shuffler": await post(mine, to=0, signed_for=0, key=household.shuffler_keys[1].sign),
        }
        own, other = (keys.sign for keys in household.shuffler_keys)
        counts = [await get("/v1/counts", key) for key in (None, household.users[0], own)]
        roster = [await get(f"{prefix}/roster", key) for key in (household.users[0], other)]
        agreed = await get(f"{prefix}/agreed", other)
    return seen, counts, roster, agreed


def test_an_upload_is_for_one_shuffler_and_counts_are_for_its_owner(tmp_path):
    household = Household(tmp_path, "split_and_mix", clients=20)
    analyzer, shuffler = household.analyzer(), household.shuffler(0)
    service = IntermediaryService(shuffler, enrolled=household.enrolled, analyzer=Direct(analyzer), peers=[_Peer()])
    seen, counts, roster, agreed = asyncio.run(_against_the_first(household, service))
    assert seen["for another"] == (400, "this is shuffler 0, and the path names another one")
    assert seen["readdressed"] == (401, "not signed by a key that is enrolled here and has not expired")
    assert seen["own"] == (200, "accepted")
    assert seen["again"] == (200, "known")
    unopened = (400, "this upload is not sealed to shuffler 0 for round 1 by the key that signed it")
    assert seen["under another name"] == seen["what was for another"] == unopened
    assert seen["by a shuffler"] == (401, "not signed by a key that is enrolled here and has not expired")
    assert seen["another's id"] == (
        409,
        "another client has used this report id in this round: seal the report again under a fresh one",
    )
    assert [answer.status_code for answer in counts] == [401, 401, 200]
    assert counts[2].json()["accepted"] == 1
    assert [answer.status_code for answer in roster] == [401, 200]
    assert msgspec.msgpack.decode(roster[1].content) is None  # the round is open
    assert msgspec.msgpack.decode(agreed.content) is None
    shuffler.close()
    analyzer.close()
