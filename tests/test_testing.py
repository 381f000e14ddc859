"""The contract as an outsider runs it: it passes a correct protocol, and names what is wrong with a broken one."""

import dataclasses
import sys
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

from dovetail import testing
from dovetail.protocols import PROTOCOLS, Protocol, register
from dovetail.protocols.curator.dp_fl import DpFl
from dovetail.shufflers import Reports

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import own_protocol

OneBit = PROTOCOLS.pop("one_bit")  # the example registers itself; other tests go through those of the package


@pytest.fixture(autouse=True)
def registry():
    """What is registered in a test is gone after it."""
    before = dict(PROTOCOLS)
    yield
    PROTOCOLS.clear()
    PROTOCOLS.update(before)


def broken(protocol, obligation, settings=None):
    """What one obligation says of a protocol."""
    with pytest.raises(testing.ContractError) as refusal:
        testing.OBLIGATIONS[obligation](testing.Bench.build(protocol, settings or {}))
    return str(refusal.value)


def test_the_example_keeps_its_contract():
    report = testing.check_protocol(OneBit, trials=2000)
    assert "view" in report.kept
    assert "own reports" in report.kept
    assert "NaN and infinity count as zero" in report.kept
    assert "is not `Fast`" in report.not_owed["fast path"]
    assert "one_bit keeps its contract" in str(report)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassesNan(OneBit):
    """Clips by comparisons, all of which are false for NaN: it counts as the lower end."""

    name: ClassVar[str] = "passes_nan"

    def randomize(self, x, state, *, key, budget=None):
        x = jnp.where(x > -self.clip_value, jnp.minimum(x, self.clip_value), -self.clip_value)
        return super().randomize(x, state, key=key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpreadsNan(DpFl):
    """Adds up what is NaN."""

    name: ClassVar[str] = "spreads_nan"

    def randomize(self, x, state, *, key, budget=None):
        return Reports(slot=None, value=x / jnp.maximum(1, jnp.linalg.norm(x)), valid=jnp.ones(()))


def test_a_nan_that_counts_as_a_number_is_caught():
    assert "updates that are NaN count as -0." in broken(PassesNan, "NaN and infinity count as zero")
    assert "makes the estimate NaN or infinite; it must count as zero" in broken(
        SpreadsNan, "NaN and infinity count as zero"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Biased(OneBit):
    """Divides by one user too few of ten."""

    name: ClassVar[str] = "biased"

    def estimate(self, tally, size, state, *, key):
        mean, state = super().estimate(tally, size, state, key=key)
        return mean / 0.85, state


def test_a_biased_estimate_is_caught():
    assert "where 1 within" in broken(Biased, "estimate is unbiased, or as biased as stated")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaysTooLittle(OneBit):
    """Spends twice the budget that its event declares."""

    name: ClassVar[str] = "says_too_little"

    @property
    def local(self):
        return own_protocol.BinaryRandomizedResponse(2 * self.require("eps_local"))


def test_a_view_that_declares_less_than_is_spent_is_caught():
    with pytest.raises(testing.ContractError) as refusal:
        testing.check_protocol(SaysTooLittle, trials=5000)
    assert "view: `view` promises eps=" in str(refusal.value)
    assert "own reports: `own_reports` promises eps=" in str(refusal.value)
    assert "an attack on the code shows at least" in str(refusal.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadsOrder(OneBit):
    """Weighs the first message more."""

    name: ClassVar[str] = "reads_order"

    def tally(self, reports, dim):
        return super().tally(reports, dim).at[0].add(reports.value.ravel()[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountsAbsent(OneBit):
    """Forgets `valid`."""

    name: ClassVar[str] = "counts_absent"

    def tally(self, reports, dim):
        return super().tally(reports._replace(valid=jnp.ones_like(reports.valid)), dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TooQuiet(OneBit):
    """Declares half of its noise."""

    name: ClassVar[str] = "too_quiet"

    def noise_std(self, size, dim):
        return super().noise_std(size, dim) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoReports(OneBit):
    """Sends more than its layout says."""

    name: ClassVar[str] = "two_reports"

    def randomize(self, x, state, *, key, budget=None):
        one = super().randomize(x, state, key=key)
        return jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), one)


@pytest.mark.parametrize(
    ("protocol", "obligation", "sentence"),
    [
        (ReadsOrder, "tally adds up in any order", "the tally is not additive"),
        (CountsAbsent, "tally adds up in any order", "clients that are absent must add nothing"),
        (TooQuiet, "noise is as declared", "`noise_std` gives"),
        (TwoReports, "reports have the declared shape", "`layout` allows 1 reports per client, got 2"),
    ],
)
def test_other_broken_obligations_are_named(protocol, obligation, sentence):
    assert sentence in broken(protocol, obligation)


def test_what_cannot_be_checked_is_refused_with_the_reason():
    class Unfinished(Protocol):
        """Nothing is defined."""

        name: ClassVar[str] = "unfinished"

    with pytest.raises(testing.ContractError, match="must define estimate, layout, noise_std, randomize, view"):
        testing.check_protocol(Unfinished)
    with pytest.raises(ValueError, match=r"expected a subclass of dovetail\.Protocol"):
        testing.check_protocol(int)

    class Thawed(OneBit):
        """Its example does not fit."""

        name: ClassVar[str] = "thawed"

        @classmethod
        def example(cls, dim, settings):
            return {"clip_value": -1.0, "eps_local": 1.0}

    with pytest.raises(testing.ContractError, match="settled by its own example: expected clip_value > 0"):
        testing.check_protocol(Thawed)


def test_register_takes_a_name_that_is_free_and_replaces_its_own():
    assert register(PassesNan) is PassesNan
    assert PROTOCOLS["passes_nan"] is PassesNan

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Again(PassesNan):
        """The same cell of a notebook, run again."""

    assert PROTOCOLS[register(Again).name] is Again

    class Taken(OneBit):
        """A bundled protocol has this name."""

        name: ClassVar[str] = "dp_fl"

    with pytest.raises(ValueError, match="'dp_fl' is bundled with Dovetail"):
        register(Taken)
    with pytest.raises(ValueError, match="expected a subclass"):
        register(int)
