"""Attacks that know a protocol and not only the event of its round: one file each, which registers what it knows.

- `stronger`: attacks beyond those of `audit.exact` on the event;
- `shows_less`: where the event of a round stands for more than the analyzer sees;
- `on_own_reports`: attacks by all who receive anything, on the victim's reports with its name on them.
"""

from dovetail.audit.attacks import (
    central_sub,
    dp_fl,
    fedavg,
    ldp_fl,
    personal,
    privunit,
    s_apes,
    secagg,
    split_and_mix,
    ss_double,
    ss_simple,
    ss_topk,
    sums,
)
from dovetail.audit.attacks.registry import on_own_reports, shows_less, stronger

__all__ = [
    "central_sub",
    "dp_fl",
    "fedavg",
    "ldp_fl",
    "on_own_reports",
    "personal",
    "privunit",
    "s_apes",
    "secagg",
    "shows_less",
    "split_and_mix",
    "ss_double",
    "ss_simple",
    "ss_topk",
    "stronger",
    "sums",
]
