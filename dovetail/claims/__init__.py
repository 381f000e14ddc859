"""The five papers' own formulas, as printed, so that their numbers recompute: claimed, never certified.

One file per paper: `flame`, `apes`, `geyer`, `subdp`, `survey`. What is about privacy returns a `Claim`, anything else
a `PrintedNumber`; both carry a verdict (holds, unproven, refuted) and the reason in one sentence. No certified
statement may rest on this package.

A protocol that was run names the formula of its paper (`protocols.Claimed`). Those of the shuffle protocols take the
event of one round, which is also one epoch of disjoint batches; those of dp_fl, central_sub and local_sub all rounds.
All take ``delta``; s_apes also ``kept`` (b), central_sub and local_sub ``items_per_subject`` (Z) and
``users_per_subject``, dp_fl ``clip`` ("median" unless told otherwise).
"""

from dovetail.claims import apes, flame, geyer, subdp, survey
from dovetail.claims._claim import Claim, PrintedNumber

__all__ = ["Claim", "PrintedNumber", "apes", "flame", "geyer", "subdp", "survey"]
