"""From events to statements: one theorem family per file.

`certify` turns what was run into a `Statement`; `smallest_noise` finds the noise that meets a target; `subject_bound`
says what rounds that protect a user mean for a subject with records at several. Where to look:

- what one event implies: `releases`, one family per file, on dominating `pairs`;
- one shuffled report, by every bound that has a name: `amplification`;
- many rounds: `exposure` (what one user is exposed to), `accountants` (how it adds up, by `gaussian`, `conversion`,
  `loss_distributions` (summed by `tilting`)), `compose` (the best of them), `certification`; every number passes
  `numerics`;
- one client without a crowd: `compose.local_bound`;
- several users or items at once: `groups`; searches for a parameter: `search`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail._imports import lazy_getattr

if TYPE_CHECKING:
    from dovetail.accounting.certification import certify
    from dovetail.accounting.compose import bound, fits, local_bound
    from dovetail.accounting.exposure import reason_for_refusal
    from dovetail.accounting.groups import subject_bound
    from dovetail.accounting.search import smallest_integer, smallest_noise

__all__ = [
    "bound",
    "certify",
    "fits",
    "local_bound",
    "reason_for_refusal",
    "smallest_integer",
    "smallest_noise",
    "subject_bound",
]

__getattr__ = lazy_getattr(  # a bound for one report does not load the accountants of many rounds
    __name__,
    {
        "bound": "dovetail.accounting.compose",
        "certify": "dovetail.accounting.certification",
        "fits": "dovetail.accounting.compose",
        "local_bound": "dovetail.accounting.compose",
        "reason_for_refusal": "dovetail.accounting.exposure",
        "smallest_integer": "dovetail.accounting.search",
        "smallest_noise": "dovetail.accounting.search",
        "subject_bound": "dovetail.accounting.groups",
    },
)
