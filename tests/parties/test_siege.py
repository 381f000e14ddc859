"""Silent, slow, endless and half-closed connections: the door stays open to the honest, meanwhile and afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import pytest
from parties.household import running
from parties.siege import Besieger, besieged_by, unharmed
from parties.test_hostile import finish, small, victims

from dovetail.parties.common.http_clients import AnalyzerClient, IntermediaryClient

_LOG = logging.getLogger(__name__)


def honest(household, up, user):
    """One user reports to everybody, and asks the analyzer how it stands; the seconds that it took."""
    began = time.monotonic()
    for index, address in enumerate(up.services):
        link = IntermediaryClient("https://{}:{}".format(*address), index=index, ca=up.authority)
        household.envelope(user).send_upload(index, link)
        link.close()
    link = AnalyzerClient("https://{}:{}".format(*up.analyzer), ca=up.authority)
    assert link.status().round == 1
    link.close()
    return time.monotonic() - began


@pytest.mark.parametrize("transport", ["shuffler", "aggregators"])
def test_a_few_of_every_kind_keep_nobody_out(tmp_path, monkeypatch, transport):
    household = small(tmp_path, transport)
    with running(household, monkeypatch) as up:

        async def siege():
            service, analyzer = victims(household, up)
            async with besieged_by(service, Besieger.kinds * 2), besieged_by(analyzer, Besieger.kinds * 2):
                await asyncio.to_thread(honest, household, up, 1)

        asyncio.run(siege())
        finish(household, up)
        assert up.complaints.texts == []


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["shuffler", "aggregators"])
def test_a_thousand_keep_nobody_out_of_processes_with_few_files(tmp_path, transport):
    """With files for 384 connections: who only holds a place loses it in time, and memory does not grow."""
    household = small(tmp_path, transport, round_seconds=36_000.0)
    with unharmed(household, "prlimit", "--nofile=512:512") as (fleet, up):
        for victim in victims(household, up):
            pid = fleet.processes["analyzer" if victim.name == "analyzer" else f"{victim.name}-0"].pid
            seconds, held, gone = asyncio.run(_siege(household, up, victim, pid))
            _LOG.info(
                "%s: %d honest uploads in %.2f s at most; %d sockets at most, %d at the end; who noticed: %s",
                *(victim.name, len(seconds), max(seconds), max(held), held[-1], dict(gone)),
            )
            assert held[-1] < 150, "all but those who ask again and again are let go of"
        finish(household, up)


async def _siege(household, up, victim, pid):
    """A hundred of every kind for as long as a body may take: seconds of honest uploads, the victim's sockets."""
    async with besieged_by(victim, Besieger.kinds * 100) as gone:
        end, seconds, held = time.monotonic() + 85.0, [], []
        while time.monotonic() < end:
            seconds.append(await asyncio.to_thread(honest, household, up, 1 + len(seconds) % 2))
            await asyncio.sleep(1.0)
            held.append(_sockets(pid))
    return seconds, held, gone


def _sockets(pid):
    found = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(file.readlink()).startswith("socket:")
    return found
