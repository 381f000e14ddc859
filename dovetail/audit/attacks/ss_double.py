"""SS-Double with a fixed number of coordinates: the sum of all bits, and messages that travel whole.

As printed, a client's k reports are one message, and dummies are dealt into messages of the same length. How many
messages of how many ones there are shows the victim. Without links, a client still sends exactly k reports: the number
of ones in all slots together is a sum of binomials. That a slot overflows is charged to the slack.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import binom

from dovetail.audit.attacks import _own
from dovetail.audit.attacks._linked import messages_like_the_victims, ones
from dovetail.audit.attacks.registry import on_own_reports, shows_less, stronger
from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact import cells
from dovetail.audit.exact.cells import Binomial, counts
from dovetail.protocols import Cohort
from dovetail.protocols.flame.ss_double import SsDouble

__all__ = ["exact_attacks", "own_reports"]

shows_less.register(SsDouble, lambda protocol: protocol.inclusion == "fixed-k")


@stronger.register(SsDouble)
def exact_attacks(protocol: SsDouble, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The printed form, where k of `dim` coordinates are drawn; the repaired one is what its event says."""
    if protocol.inclusion != "fixed-k":
        return []
    users, width, pad_to = cohort.crowd(), protocol.fixed(dim), protocol.padding.pad_to
    others = users - cohort.colluders - 1
    overflow = dim * float(binom.sf(pad_to, users, width / dim)) * 1.01
    missing = dim * pad_to - users * width
    bits = ones(protocol.report)
    high, low, dummy = bits
    crowd = [Binomial(trials=others * width, prob=low), Binomial(trials=max(0, missing), prob=dummy)]
    worlds = [[*crowd, Binomial(trials=width, prob=prob)] for prob in (high, low)]
    found = [counts("ones in all slots together, others at the low end", worlds[0], worlds[1], slack=overflow)]
    if protocol.linkage == "vector":
        dummies = _full_messages(max(0, missing), width)
        found += messages_like_the_victims(bits, width, others=others, dummies=dummies, slack=overflow)
    return found


def _full_messages(dummies: int, width: int) -> int:
    """Messages of as many dummies as a client sends reports; shorter ones are no client's, and are set aside."""
    messages = max(1, -(-dummies // width))
    return max(0, min(messages, dummies - (width - 1) * messages))


@on_own_reports.register(SsDouble)
def own_reports(protocol: SsDouble, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Which coordinates are reported is seen, and depends on nobody's data."""
    if protocol.inclusion == "fixed-k":
        return _own.reports(protocol.report, protocol.fixed(dim))
    ends, beta = cells.of_report(protocol.report).ends(protocol.report.eps_local), np.longdouble(protocol.beta)
    high, low = (np.append(beta * end, 1 - beta) for end in ends)
    return _own.independent(high, low, dim)
