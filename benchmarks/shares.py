"""Shares against sealed messages: bytes, client seconds and server seconds per user, in one run.

FLAME's setting, d = 7,850: the same updates by `ss_simple` and `ss_topk`, once through a shuffler and once as shares
between two aggregators, with the parties that are deployed and without the network. A user uploads bytes, and shuffler
or aggregators hand bytes on to the analyzer: all messages, or a sum each after telling each other whose shares they
have. Server seconds are those of shuffler or
aggregators and analyzer together, from taking an upload to the released model. What a user uploads does not depend on
how many others there are, so a few users are measured and told per user; messages are slow, and fewer of them take
part. Beside it `secagg` at the headline's dimension and at a million coordinates, where peak memory is told too.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.learners.server import Server
from dovetail.parties.aggregator.party import Aggregator
from dovetail.parties.analyzer.learning import Learning
from dovetail.parties.analyzer.party import Analyzer
from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.task import TrainingTask, sign
from dovetail.parties.fleet import lenient_policy
from dovetail.parties.shuffler import Shuffler
from dovetail.parties.user.client import Client, Envelope

FLAME = 7850
RATIOS = ("bytes", "all_bytes", "client_seconds", "server_seconds")
SETTINGS: dict[str, dict[str, Any]] = {
    "ss_simple": {"clip_value": 0.1, "eps_local": 0.01},
    "ss_topk": {"clip_value": 0.1, "k": 157, "eps_local": 0.5},
    "secagg": {"clip_norm": 0.2, "noise_multiplier": 5.0},
}


class Straight:
    """The analyzer as an intermediary sees it, without a network between them."""

    def __init__(self, analyzer: Analyzer, index: int) -> None:
        self._analyzer = analyzer
        self._index = index
        self.bytes = 0

    def send_part(self, round: int, batch: bytes, number: int, part: bytes) -> None:
        self.bytes += len(part)
        self._analyzer.count_part(self._index, round, batch, number, part)

    def report_closed(self, round: int, closed: Any) -> None:
        self._analyzer.note_closed(self._index, round, closed)


def one_round(folder: Path, protocol: str, dim: int, users: int, *, aggregators: int) -> dict[str, Any]:
    """A round of so many users: seconds and bytes per user."""
    ring, kind = KeyRing(folder / "analyzer" / "keys", "seal"), Aggregator if aggregators else Shuffler
    pairs = [ServicePairs.add(folder / f"service-{i}" / "keys") for i in range(aggregators or 1)]
    named = {"aggregators" if aggregators else "shufflers": tuple(pair.public for pair in pairs)}
    task = TrainingTask(
        name="shares",
        protocol=protocol,
        settings=SETTINGS[protocol],
        dim=dim,
        rounds=1,
        min_clients=users,
        max_clients=users,
        round_seconds=3600.0,
        delta=5e-6,
        analyzer=ring.add().public,
        **named,
    )
    signed = sign(task, signer := KeyPair.generate("sign"))
    common = {"signed": signed, "signer": signer.public.key_id}
    parties = [kind(folder / f"service-{i}", **common, index=i, keys=pair) for i, pair in enumerate(pairs)]
    learning = Learning(initial=np.zeros(dim, np.float32), server=Server(learning_rate=1.0))
    analyzer = Analyzer(folder / "analyzer", **common, keys=ring, learning=learning, workers=1)
    for party in parties:
        party.store.open_round(1, head=analyzer.status().head, closes=0.0)
    envelopes, client = _make_envelopes(folder, signed, dim, users)
    begun = time.process_time()
    for envelope in envelopes:
        for party, upload in zip(parties, envelope.uploads, strict=True):
            party.accept(1, client=envelope.sender, upload=upload)
    roster_bytes = _close(parties)
    ways = [Straight(analyzer, index) for index in range(len(parties))]
    for party, way in zip(parties, ways, strict=True):
        party.forward(1, way)
    server = (time.process_time() - begun) / users
    if analyzer.privacy()["history"][0]["outcome"] != "released":
        raise RuntimeError(f"expected a released round, got {analyzer.privacy()['history']}")
    for party in parties:
        party.close()
    analyzer.close()
    sent = sum(len(upload.encode()) for upload in envelopes[0].uploads)
    handed_on = (roster_bytes + sum(way.bytes for way in ways)) / users
    sizes = {"bytes": sent, "bytes_handed_on": handed_on, "all_bytes": sent + handed_on}
    return {"users": users, **sizes, "client_seconds": client, "server_seconds": server}


def _make_envelopes(folder: Path, signed: Any, dim: int, users: int) -> tuple[list[Envelope], float]:
    """Everybody's envelopes, and the seconds that one takes after the first."""
    policy = lenient_policy(signed)
    update = np.zeros(dim, np.float32)
    envelopes = []
    begun = 0.0
    for user in range(users):
        if user == 1:
            begun = time.process_time()
        client = Client(folder / f"user-{user}", policy=policy, key=KeyPair.generate("sign"))
        envelopes.append(client.report(signed, 1, update))
    return envelopes, (time.process_time() - begun) / (users - 1)


def _close(parties: list[Any]) -> int:
    """End the round; the bytes of what parties tell each other of who is in it."""
    rosters = [party.store.freeze(1) for party in parties]
    for index, party in enumerate(parties):
        party.close_round(1, [roster for i, roster in enumerate(rosters) if i != index])
    return (len(parties) - 1) * sum(len(report) for roster in rosters for report in roster)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shuffled", type=int, default=3, help="users whose messages are shuffled")
    parser.add_argument("--shared", type=int, default=100, help="users whose reports are shared")
    parser.add_argument("--large", type=int, default=1_000_000, help="coordinates of the largest model; 0: none")
    arguments = parser.parse_args()
    cases = [(name, FLAME, count) for name in ("ss_simple", "ss_topk") for count in (0, 2)]
    cases += [("secagg", 6010, 2), *([("secagg", arguments.large, 2)] if arguments.large else [])]
    rows = []
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for protocol, dim, aggregators in cases:
        users = arguments.shared if aggregators else arguments.shuffled
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            row = one_round(Path(folder), protocol, dim, users, aggregators=aggregators)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        how = "shares" if aggregators else "messages"
        rows.append({"protocol": protocol, "dim": dim, "how": how, **row, "peak_mib": peak})
    for row in rows:
        other = [
            candidate
            for candidate in rows
            if candidate["how"] == "messages" and candidate["protocol"] == row["protocol"]
        ]
        for name in RATIOS:
            row[f"{name}_ratio"] = other[0][name] / row[name] if other and row["how"] == "shares" else None
    if arguments.json:
        print(json.dumps({"benchmark": "shares", "rows": rows}))
        return
    ratios = "messages / shares: bytes up, all bytes, client, server"
    headings = ("protocol", "d", "by", "bytes up", "handed on", "client ms", "server ms", ratios)
    table = Table(*headings, title="per user and round", caption=f"peak memory {rows[-1]['peak_mib']:.0f} MiB")
    for row in rows:
        ratios = [row[f"{name}_ratio"] for name in RATIOS]
        times = [f"{1000 * row[name]:.1f}" for name in ("client_seconds", "server_seconds")]
        shown = ", ".join(f"{ratio:,.0f}" for ratio in ratios) if ratios[0] else ""
        sizes = [f"{row[name]:,.0f}" for name in ("bytes", "bytes_handed_on")]
        table.add_row(row["protocol"], f"{row['dim']:,}", row["how"], *sizes, *times, shown)
    Console().print(table)


if __name__ == "__main__":
    main()
