"""The five papers' own formulas, as printed, so that their numbers recompute: claimed, never certified.

One file per paper: `flame`, `apes`, `geyer`, `subdp`, `survey`. What is about privacy returns a `Claim`, anything else
a `PrintedNumber`; both carry a verdict (holds, unproven, refuted) and the reason in one sentence. No certified
statement may rest on this package.

`CLAIMS` answers what its paper claims for a protocol that was run. The shuffle protocols take the event of one round,
which is also one epoch of disjoint batches; dp_fl, central_sub and local_sub take all rounds. All take ``delta``;
s_apes also ``kept`` (b), central_sub and local_sub ``items_per_subject`` (Z) and ``users_per_subject``, dp_fl ``clip``
("median" unless told otherwise).
"""

import functools
from collections.abc import Callable

from dovetail.claims import apes, flame, geyer, subdp, survey
from dovetail.claims._claim import Claim, PrintedNumber
from dovetail.statements import NotApplicable

__all__ = ["CLAIMS", "Claim", "PrintedNumber", "apes", "flame", "geyer", "subdp", "survey"]


def _in_numbers(claim: Callable[..., Claim]) -> Callable[..., Claim]:
    """The same claim; `NotApplicable` where its formula leaves what a computer holds."""

    @functools.wraps(claim)
    def asked(*args: object, **chosen: object) -> Claim:
        try:
            return claim(*args, **chosen)
        except ArithmeticError:
            raise NotApplicable(f"the formula of {claim.__name__} gives no number here") from None

    return asked


CLAIMS: dict[str, Callable[..., Claim]] = {
    "ss_simple": _in_numbers(flame.ss_simple),
    "ss_double": _in_numbers(flame.ss_double),
    "ss_topk": _in_numbers(flame.ss_topk),
    "apes": _in_numbers(apes.apes),
    "unis": _in_numbers(apes.unis),
    "s_apes": _in_numbers(apes.s_apes),
    "pldp": _in_numbers(apes.pldp),
    "ldp_min": _in_numbers(apes.ldp_min),
    "dp_fl": _in_numbers(geyer.dp_fl),
    "central_sub": _in_numbers(subdp.central_sub),
    "local_sub": _in_numbers(subdp.local_sub),
}
