"""FedAvg: the server gets the update itself."""

from __future__ import annotations

from dovetail.audit.attacks import _own
from dovetail.audit.attacks.registry import on_own_reports
from dovetail.protocols.curator.fedavg import FedAvg

on_own_reports.register(FedAvg, _own.seen_by_the_server)
