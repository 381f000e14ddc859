"""Connections that no honest party makes: silent, slow, without end, half closed; held for as long as they are let."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import ssl
from pathlib import Path

from parties.household import in_processes

_LOG = logging.getLogger(__name__)
_DRIP = 0.05  # seconds between two bytes of who is slow


class Besieger:
    """One connection to a victim of `mutations`, of one kind; `gone` once the service has let go of it."""

    kinds = (
        "silent",
        "silent_after_tls",
        "slow_head",
        "head_without_end",
        "slow_body",
        "body_without_end",
        "half_closed_in_the_head",
        "half_closed_in_the_body",
        "reads_nothing",
        "asks_ahead",
        "asks_for_ever",
    )

    def __init__(self, victim, kind):
        self._victim, self.kind, self.gone = victim, kind, False

    async def run(self):
        """Until the service has had enough, or the siege is called off."""
        tls = None if self.kind == "silent" else ssl.create_default_context(cafile=str(self._victim.authority))
        writer = None
        try:
            reader, writer = await asyncio.open_connection(*self._victim.address, ssl=tls)
            await getattr(self, f"_{self.kind}")(reader, writer)
            await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.gone = True
            if writer is not None:
                writer.transport.abort()

    async def _silent(self, reader, writer):
        pass

    async def _silent_after_tls(self, reader, writer):
        pass

    async def _slow_head(self, reader, writer):
        await _drip(writer, self._request().head() + bytes(1 << 16))

    async def _head_without_end(self, reader, writer):
        writer.write(b"GET /v1/status HTTP/1.1\r\nhost: x\r\n")
        while not writer.is_closing():
            writer.write(b"x: y\r\n" * 16)
            await writer.drain()
            await asyncio.sleep(_DRIP)

    async def _slow_body(self, reader, writer):
        request = self._request()
        writer.write(request.head())
        await _drip(writer, request.body[:-1])

    async def _body_without_end(self, reader, writer):
        writer.write(self._request().head(length=f"content-length: {1 << 40}"))
        while not writer.is_closing():
            writer.write(bytes(1024))
            await writer.drain()
            await asyncio.sleep(_DRIP)

    async def _half_closed_in_the_head(self, reader, writer):
        writer.write(b"GET /v1/sta")
        _half_close(writer)

    async def _half_closed_in_the_body(self, reader, writer):
        request = self._request()
        writer.write(request.raw()[:-1])
        _half_close(writer)

    async def _reads_nothing(self, reader, writer):
        writer.transport.pause_reading()
        while not writer.is_closing():
            writer.write(b"GET /v1/task HTTP/1.1\r\nhost: x\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(_DRIP)

    async def _asks_ahead(self, reader, writer):
        writer.write(b"GET /v1/task HTTP/1.1\r\nhost: x\r\n\r\n" * 5000)
        await writer.drain()

    async def _asks_for_ever(self, reader, writer):
        while not writer.is_closing():
            writer.write(b"GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n")
            await writer.drain()
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(_DRIP)

    def _request(self):
        """Of a user whom the service knows, and whose upload it would take if it came."""
        return self._victim.taken[0].signed(self._victim.key)


def _half_close(writer):
    """Say that nothing more comes, beneath TLS, which has no word for it."""
    writer.transport.get_extra_info("socket").shutdown(1)


async def _drip(writer, data):
    for byte in data:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(_DRIP)


@contextlib.asynccontextmanager
async def besieged_by(victim, kinds):
    """A connection of each of these kinds, until the block ends; of which kinds how many saw that they had to go."""
    besiegers = [Besieger(victim, kind) for kind in kinds]
    tasks = [asyncio.create_task(one.run()) for one in besiegers]
    gone = collections.Counter()
    try:
        await asyncio.sleep(0.2)
        yield gone
    finally:
        gone.update(one.kind for one in besiegers if one.gone)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def most_memory(pid):
    """The most memory that a process has had at a time, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


@contextlib.contextmanager
def unharmed(household, *within):
    """The parties as processes, which afterwards are the same, have grown little and said nothing but their address."""
    with in_processes(household, *within) as (fleet, up):
        pids = {name: process.pid for name, process in fleet.processes.items()}
        before = {name: most_memory(pid) for name, pid in pids.items()}
        yield fleet, up
        most = {name: (before[name], most_memory(pid)) for name, pid in pids.items()}
        _LOG.info("most memory before and after, in MB: %s", most)
        assert all(after < first + 150 for first, after in most.values())  # of which an analyzer takes sixty to learn
        assert {name: process.pid for name, process in fleet.processes.items()} == pids
        assert all(process.poll() is None for process in fleet.processes.values())
        for name in pids:
            log = (household.folder / f"{name}.log").read_text()
            assert len(log.splitlines()) == 1 and "listens on" in log, log[:2000]
