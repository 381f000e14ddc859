"""Attacks that know a protocol and not only the event of its round: one file for each family of protocols.

- `stronger_attacks`: attacks beyond those of `audit.exact` on the event;
- `shows_less_than_event`: where the event of a round stands for more than the analyzer sees;
- `attacks_on_own_reports`: attacks by all who receive anything, on the victim's reports with its name on them.
"""

from dovetail.audit.attacks import curator, flame, local, personal, sums
from dovetail.audit.attacks.registry import attacks_on_own_reports, shows_less_than_event, stronger_attacks

__all__ = [
    "attacks_on_own_reports",
    "curator",
    "flame",
    "local",
    "personal",
    "shows_less_than_event",
    "stronger_attacks",
    "sums",
]
