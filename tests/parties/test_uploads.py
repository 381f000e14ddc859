"""Uploads over connections of their own: taken once, by whom they say, one at a time, in time."""

import asyncio
import time

from parties.household import Direct, Household
from parties.test_door import Opened

from dovetail.parties.common.wire import Upload, sign_request, upload_path
from dovetail.parties.http import requests as http_module
from dovetail.parties.http.intermediary import IntermediaryService

STATUS = b"GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n"


class Posted:
    """A shuffler behind a door, and lines of users to it."""

    def __init__(self, tmp_path):
        self.household = Household(tmp_path, "ss_topk")
        party = self.household.shuffler()
        party.store.open_round(1, head=b"", closes=time.time() + 3600)
        analyzer = Direct(None)
        self.service = IntermediaryService(party, enrolled=self.household.enrolled, analyzer=analyzer)
        self.opened = Opened(tmp_path, app=self.service.app)

    async def __aenter__(self):
        await self.opened.__aenter__()
        return self

    async def __aexit__(self, *error):
        await self.opened.__aexit__(*error)
        self.service._party.close()

    @property
    def uploads(self):
        return self.service._uploads

    def request(self, user, upload=None, **changed):
        """Head and body of an upload."""
        path = upload_path(self.household.task.task_id, 1, 0)
        body = (self.household.envelope(user).uploads[0] if upload is None else upload).encode()
        headers = sign_request(self.household.users[user], "POST", path, body)
        lines = [f"{name}: {value}" for name, value in {**headers, "content-length": len(body), **changed}.items()]
        return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", *lines, "", ""]).encode(), body

    async def line(self):
        return await asyncio.open_connection(*self.opened.address)


async def answer(reader):
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    return int(head[9:12]), (await reader.readexactly(length)).decode()


def test_an_upload_is_taken_once_and_is_known_when_it_comes_again(tmp_path):
    async def post():
        async with Posted(tmp_path) as posted:
            reader, writer = await posted.line()
            head, body = posted.request(0)
            said = []
            for part in (head + body, head, body[:9], body[9:]):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.02)
                said += [await answer(reader)] if part.endswith(body[9:]) else []
            return said, posted.service.counts, posted.uploads.in_progress

    said, counts, in_progress = asyncio.run(post())
    assert said == [(200, "accepted"), (200, "known")]
    assert counts == {"accepted": 1, "known": 1} and not in_progress


def test_answers_come_in_the_order_of_requests(tmp_path):
    async def post():
        async with Posted(tmp_path) as posted:
            reader, writer = await posted.line()
            writer.write(b"".join(posted.request(0)) + STATUS + STATUS)
            said = [await answer(reader) for _ in range(3)]
            writer.write(b"".join(posted.request(1)))
            return [*said, await answer(reader)]

    first, *others, last = asyncio.run(post())
    assert first == last == (200, "accepted") and [status for status, _ in others] == [503, 503]


def test_a_stranger_is_refused_at_once_and_nothing_of_its_body_is_kept(tmp_path):
    async def post():
        async with Posted(tmp_path) as posted:
            reader, writer = await posted.line()
            head, body = posted.request(0, **{"dovetail-signature": "00" * 64})
            writer.write(head)
            said = [await answer(reader)]
            writer.write(body)
            await asyncio.sleep(0.05)
            (connection,) = posted.opened.door.server_state.connections
            assert not connection.cycle.body
            writer.write(b"".join(posted.request(0)))
            return [*said, await answer(reader)]

    stranger, known = asyncio.run(post())
    assert stranger == (401, "not signed by a key that is enrolled here and has not expired")
    assert known == (200, "accepted")


def test_what_is_not_sealed_to_it_or_is_another_body_is_refused(tmp_path):
    async def post():
        async with Posted(tmp_path) as posted:
            reader, writer = await posted.line()
            said = []
            head, body = posted.request(0)
            for request in (head + bytes(len(body)), b"".join(posted.request(0, Upload(bytes(16), bytes(90))))):
                writer.write(request)
                said.append(await answer(reader))
            return said, posted.uploads.in_progress

    (changed, unsealed), in_progress = asyncio.run(post())
    assert (changed[0], unsealed[0]) == (401, 400) and not in_progress
    assert unsealed[1] == "this upload is not sealed to shuffler 0 for round 1 by the key that signed it"


def test_one_upload_of_a_sender_at_a_time_and_none_of_who_left(tmp_path):
    async def post():
        async with Posted(tmp_path) as posted:
            head, body = posted.request(0)
            (_, half), (reader, writer) = await posted.line(), await posted.line()
            half.write(head + body[:5])
            while not posted.uploads.in_progress:
                await asyncio.sleep(0.01)
            writer.write(head + body)
            said = [await answer(reader)]
            half.close()
            while posted.uploads.in_progress:
                await asyncio.sleep(0.01)
            writer.write(head + body)
            return [*said, await answer(reader)]

    assert [status for status, _ in asyncio.run(post())] == [429, 200]


def test_a_body_that_does_not_come_in_time_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(http_module, "SLOWEST", 0.05)

    async def post():
        async with Posted(tmp_path) as posted:
            reader, writer = await posted.line()
            head, body = posted.request(0)
            writer.write(head + body[:5])
            return await answer(reader), posted.uploads.in_progress

    said, in_progress = asyncio.run(post())
    assert said == (408, "the body did not come in time: send it again, faster") and not in_progress


def test_an_error_of_ours_is_no_fault_of_the_sender(tmp_path, monkeypatch):
    async def post():
        async with Posted(tmp_path) as posted:
            reader, writer = await posted.line()
            monkeypatch.setattr(posted.service._party, "open_upload", lambda *_, **__: 1 / 0)
            writer.write(b"".join(posted.request(0)))
            return await answer(reader), posted.uploads.in_progress

    said, in_progress = asyncio.run(post())
    assert said == (500, "internal server error") and not in_progress
