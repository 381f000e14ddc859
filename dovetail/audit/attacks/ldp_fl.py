"""LDP-FL: what the server sees is all there is."""

from __future__ import annotations

from dovetail.audit.attacks import _own
from dovetail.audit.attacks.registry import on_own_reports
from dovetail.protocols.local.ldp_fl import LdpFl

on_own_reports.register(LdpFl, _own.by_event)
