"""What a connection costs a service, whatever is sent on it or left unread: docs/operating.md gives the figure."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from parties.household import Household, in_processes
from parties.siege import Besieger
from parties.test_hostile import victims

MOST = 640  # KiB; the page says about half a megabyte
LINES = 40


class Unread(Besieger):
    """One that asks for the model, 4 MB of it, eight times, and reads none of it."""

    model = ""

    async def _unread_model(self, reader, writer):
        writer.transport.pause_reading()
        writer.write(f"GET {self.model} HTTP/1.1\r\nhost: x\r\n\r\n".encode() * 8)
        await asyncio.sleep(600)


@pytest.mark.parametrize("kind", ["unread_model", "asks_ahead", "head_without_end"])
def test_a_connection_costs_half_a_megabyte_at_most(tmp_path, capsys, kind):
    """A stranger's unread model once cost twice its size, on every connection: 7.7 MiB here."""
    household = Household(tmp_path, "privunit", dim=1_000_000, round_seconds=36_000.0)
    with in_processes(household) as (fleet, up):
        victim = victims(household, up)[0]
        Unread.model = f"/v1/tasks/{household.task.task_id.hex()}/models/0"
        each = asyncio.run(cost(victim, kind, fleet.processes["shuffler-0"].pid))
    with capsys.disabled():
        sys.stdout.write(f"\n{kind}: {each:.0f} KiB for each of {LINES} connections\n")
    assert each < MOST


async def cost(victim, kind, pid):
    before = most = resident(pid)
    lines = [asyncio.create_task(Unread(victim, kind).run()) for _ in range(LINES)]
    end = time.monotonic() + 4
    while time.monotonic() < end:
        await asyncio.sleep(0.1)
        most = max(most, resident(pid))
    for line in lines:
        line.cancel()
    await asyncio.gather(*lines, return_exceptions=True)
    return (most - before) / LINES


def resident(pid):
    """KiB of a process in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
