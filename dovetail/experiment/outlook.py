"""What a training can be expected to give, said before its first round: noise against updates, in numbers and words.

How long the noise of a round is beside the longest update is public, and known beforehand. The mean of all rounds'
estimates still has 1 / sqrt(rounds) of that noise, and less where rounds take back noise of earlier ones: what is left
of it after the whole training (`Outlook.residual`) tells how much accuracy privacy will cost, by the study of
docs/concepts/defaults.md.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from typing import TYPE_CHECKING

import jax.numpy as jnp

from dovetail.numbers import at_most
from dovetail.protocols import Protocol
from dovetail.sampling import Sampler
from dovetail.statements import Trust

if TYPE_CHECKING:
    from dovetail.experiment.preparation import Plan

__all__ = ["Outlook", "noise_ratio_of"]

_LOG = logging.getLogger(__name__)
_FAR = 1e6  # longer than any clip norm
# of `Outlook.residual`, from the sets that the study chose by: below the first, privacy cost some .02 of AUC or R2;
# beyond the second it cost more than .1 in places, and numbers were predicted no better than by their mean; beyond the
# last, nothing is left to learn from
_LITTLE = 0.02
_MUCH = 0.03
_HOPELESS = 1.5
_SUMS = ("dp_fl", "secagg", "split_and_mix", "fedavg")  # have no more noise than a trusted curator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """The noise of a training beside its updates.

    Arguments:
        ratio: length of a round's noise over that of the longest update, both as they enter the estimated mean.
        longest: the longest update that counts; the clip norm where there is one.
        rounds: how many rounds are planned.
        users: how many users a round is planned for.
        dim: how many numbers are estimated in a round: the model's parameters.
        eps: the target, if there is one.
        protocol: the protocol's name.
        is_local: whether every user adds noise of its own, so that noise falls with the root of their number alone.
        has_secret_noise: whether the noise protects anybody; papers and comparisons are not refused.
        kept: of the noise of independent rounds, the share that the mean of all rounds' estimates keeps.
    """

    ratio: float
    longest: float
    rounds: int
    users: int
    dim: int
    eps: float | None
    protocol: str
    is_local: bool
    has_secret_noise: bool
    kept: float = 1.0

    @classmethod
    def of(cls, plan: Plan) -> Outlook:
        """The outlook of a plan, before it is run."""
        dim = plan.engine.dim
        return cls(
            ratio=noise_ratio_of(plan.sampler, dim=dim),
            longest=_longest_update(plan.sampler.protocol, dim),
            rounds=plan.num_rounds,
            users=plan.sampler.schedule.size_of(0),
            dim=dim,
            eps=plan.config.privacy.eps,
            protocol=plan.sampler.protocol.name,
            is_local=plan.guarantee.scope.trust is Trust.LOCAL,
            has_secret_noise=plan.config.noise == "os",
            kept=plan.sampler.protocol.noise_kept(plan.num_rounds),
        )

    @property
    def residual(self) -> float:
        """The noise on the mean of all rounds' estimates over the longest update."""
        return self.ratio / math.sqrt(self.rounds) * self.kept

    @property
    def is_hopeless(self) -> bool:
        """Whether no model can be expected that is better than a constant guess."""
        return self.residual > _HOPELESS

    @property
    def costs_much(self) -> bool:
        """Whether much accuracy will be lost, so that the caller should know beforehand."""
        return self.residual > _MUCH

    def describe(self) -> str:
        """The noise against updates, what to expect, and what would help; one to three sentences."""
        eps = "" if self.eps is None else f", eps {self.eps:g}"
        facts = (
            f"in each of {self.rounds} rounds the noise is {at_most(self.ratio, 2)} times as long as the longest "
            f"update ({self.longest:.3g}; {self.users:,} users, {self.dim:,} parameters{eps}, {self.protocol!r})"
        )
        if self.kept < 1:
            facts += f", of which later rounds take back all but {self.kept:.0%}"
        return f"{facts}: {self._expectation}{self._remedies}"

    @property
    def _expectation(self) -> str:
        """What to expect, in words."""
        if self.ratio == 0:
            return "nothing is lost to noise, and nothing is private"
        if self.residual <= _LITTLE:
            return "privacy should cost little accuracy, a point or two"
        if not self.costs_much:
            return "expect to lose a few points of accuracy to privacy"
        if not self.is_hopeless:
            return "expect to lose much accuracy to privacy; the model may be no better than a constant guess"
        return "the model would be noise, no better than a constant guess"

    @property
    def _remedies(self) -> str:
        """What would help where much is lost, with numbers at which little would be; otherwise nothing."""
        if not self.costs_much:
            return ""
        factor = self.residual / _LITTLE
        users = _round_up(self.users * factor ** (2 if self.is_local else 1))
        ways = [f"more users (about {users:,})"]
        if (fewer := int(self.dim / factor**2)) >= 1:
            ways.append(f"fewer parameters (about {fewer:,})")
        if self.eps is not None:
            ways.append("a larger eps")
        if self.protocol not in _SUMS:
            ways.append("a protocol with less noise ('secagg', or 'dp_fl' with a trusted curator)")
        return f". What would help: {', or '.join(ways)}"

    def refuse_if_hopeless(self, *, force: bool) -> None:
        """Refuse a training that is hopeless, unless the caller set its noise, or it is seeded and protects nobody.

        Arguments:
            force: train all the same.
        """
        if self.is_hopeless and self.has_secret_noise and self.eps is not None and not force:
            raise ValueError(f"{self.describe()}. To train all the same, pass force=True (on the command line --force)")

    def log_expectation(self) -> None:
        """Warn where much accuracy is lost to noise; log at level INFO what to expect where little is."""
        if self.costs_much:
            warnings.warn(self.describe(), UserWarning, stacklevel=3)
        else:
            _LOG.info("%s", self.describe())


def noise_ratio_of(sampler: Sampler, *, dim: int) -> float:
    """The length of the first round's noise over that of the longest update, both as they enter the estimated mean.

    Arguments:
        sampler: with a settled protocol.
        dim: how many parameters the model has.
    """
    std = sampler.noise_std(0, dim=dim) / sampler.sum_divisor(0, learning_rate=1)
    return std * math.sqrt(dim) / _longest_update(sampler.protocol, dim)


def _longest_update(protocol: Protocol, dim: int) -> float:
    """The largest L2 norm of an update after clipping; where single coordinates are clipped or nothing is, at most 1.

    Updates that are clipped by coordinate are nowhere near the corner of their cube, and few gradients are longer
    than 1 on inputs in [-1, 1].
    """
    longest = float(jnp.linalg.norm(protocol.clip_update(jnp.full(dim, _FAR, jnp.float32), protocol.init(dim))))
    return longest if getattr(protocol, "clip_norm", None) is not None else min(longest, 1.0)


def _round_up(value: float) -> int:
    """The value with two significant digits, rounded up."""
    unit = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit
