"""dp-accounting, imported on first use: that takes most of a second, and few bounds need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail._imports import LateModule

if TYPE_CHECKING:
    from dp_accounting import dp_event, privacy_accountant
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.pld import privacy_loss_mechanism as pld_mechanism
    from dp_accounting.rdp import rdp_privacy_accountant as rdp
else:
    dp_event = LateModule("dp_accounting.dp_event")
    privacy_accountant = LateModule("dp_accounting.privacy_accountant")
    pld_pmf = LateModule("dp_accounting.pld.pld_pmf")
    pld = LateModule("dp_accounting.pld.privacy_loss_distribution")
    pld_mechanism = LateModule("dp_accounting.pld.privacy_loss_mechanism")
    rdp = LateModule("dp_accounting.rdp.rdp_privacy_accountant")

__all__ = ["dp_event", "pld", "pld_mechanism", "pld_pmf", "privacy_accountant", "rdp"]
