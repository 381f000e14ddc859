"""Attacks that know a protocol and not only the event of its round: one file for each family of protocols.

- `stronger`: attacks beyond those of `audit.exact` on the event;
- `shows_less`: where the event of a round stands for more than the analyzer sees;
- `on_own_reports`: attacks by all who receive anything, on the victim's reports with its name on them.
"""

from dovetail.audit.attacks import curator, flame, local, personal, sums
from dovetail.audit.attacks.registry import on_own_reports, shows_less, stronger

__all__ = ["curator", "flame", "local", "on_own_reports", "personal", "shows_less", "stronger", "sums"]
