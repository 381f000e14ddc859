"""The five papers' own formulas, as printed, so that their numbers recompute: claimed, never certified.

One file a paper: `flame`, `apes`, `geyer`, `subdp`, `survey`. What is about privacy returns a `Claim`, anything else a
`Figure`; both carry a verdict (holds, unproven, refuted) and the reason in one sentence. No certified statement may
rest on this package.

`CLAIMS` answers what its paper claims for a protocol that was run. The shuffle protocols take the event of one round,
which is also one epoch of disjoint batches; dp_fl, central_sub and local_sub take all rounds. All take ``delta``;
s_apes also ``kept`` (b), central_sub and local_sub ``items_per_subject`` (Z) and ``users_per_subject``, dp_fl ``clip``
("median" unless told otherwise).
"""

from collections.abc import Callable

from dovetail.accounting.published import apes, flame, geyer, subdp, survey
from dovetail.accounting.published._claim import Claim, Figure

__all__ = ["CLAIMS", "Claim", "Figure", "apes", "flame", "geyer", "subdp", "survey"]

CLAIMS: dict[str, Callable[..., Claim]] = {
    "ss_simple": flame.ss_simple,
    "ss_double": flame.ss_double,
    "ss_topk": flame.ss_topk,
    "apes": apes.apes,
    "unis": apes.unis,
    "s_apes": apes.s_apes,
    "pldp": apes.pldp,
    "ldp_min": apes.ldp_min,
    "dp_fl": geyer.dp_fl,
    "central_sub": subdp.central_sub,
    "local_sub": subdp.local_sub,
}
