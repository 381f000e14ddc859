"""What an event implies is asked of its release, and of nobody else."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

import dovetail
from dovetail import accounting, events
from dovetail.accounting.releases import Release, release_of, releases
from dovetail.events import Everyone, Gaussian, Laplace, NonPrivate, Round
from dovetail.statements import Bound, Neighbors, NotApplicable, Scope, Theorem, Trust, Unit

SOURCE = Path(dovetail.__file__).parent
KINDS = {name for name in events.__all__ if isinstance(getattr(events, name), type)} - {
    *("Round", "View", "Report"),  # what holds events, and a part of one
    *("Disjoint", "Everyone", "FixedSize", "Poisson", "Separated"),  # who takes part
}
MAY_ASK = ("accounting/releases", "events")


def asks_for_the_type(node: ast.AST) -> bool:
    """isinstance(x, Event), `case Event(...)` and type(x) is Event."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
        return any(getattr(name, "id", "") in KINDS for name in ast.walk(node.args[1]))
    if isinstance(node, ast.MatchClass):
        return getattr(node.cls, "id", "") in KINDS
    return False


def test_nobody_else_asks_for_the_type_of_an_event():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if not str(path.relative_to(SOURCE)).startswith(MAY_ASK):
            tree = ast.parse(path.read_text())
            imported = {
                name.asname or name.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module == "dovetail.events"
                for name in node.names
            }
            if imported & KINDS:
                lines = [node.lineno for node in ast.walk(tree) if asks_for_the_type(node)]
                found += [f"{path.relative_to(SOURCE)}:{line}" for line in lines]
    assert not found


def test_the_kinds_of_events_were_found():
    assert {"Gaussian", "PaddedTopk", "SplitAndMix", "NonPrivate", "SampledSubject"} <= KINDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tossed:
    """A plug-in's event: one bit, told truly with probability e^eps/(1 + e^eps)."""

    eps_each: float

    @property
    def neighbors(self) -> Neighbors:
        return Neighbors.REPLACE_ONE


WARNER = Theorem(key="dovetail-test.warner", where="randomized response, by its definition")


@releases(Tossed)
class TossedRelease(Release[Tossed]):
    theorem = WARNER

    def renyi(self, sampling, orders):
        if sampling != Everyone():
            return super().renyi(sampling, orders)
        at = np.asarray(orders)
        lie = -np.log1p(np.exp(self.event.eps_each))
        keep = lie + self.event.eps_each
        return np.logaddexp(at * keep + (1 - at) * lie, at * lie + (1 - at) * keep) / (at - 1) * (1 + 1e-12)

    @property
    def pure_eps(self):
        return self.event.eps_each

    def local_bound(self, *, delta):
        return Bound(eps=self.event.eps_each, delta=0.0, proof=WARNER.proof)


SCOPE = Scope(trust=Trust.LOCAL, adversary="analyzer", neighbors=Neighbors.REPLACE_ONE, unit=Unit.USER)


def rounds(count, eps_each=0.1):
    return [Round(mechanism=Tossed(eps_each=eps_each), participation=Everyone())] * count


def test_an_event_from_outside_is_certified_by_its_own_theorem():
    one = accounting.certify(rounds(1), SCOPE, delta=1e-6)
    assert one.eps == pytest.approx(0.1)
    many = accounting.certify(rounds(400), SCOPE, delta=1e-6)
    assert 2.0 < many.eps < 400 * 0.1
    assert WARNER in many.proof.theorems and "Renyi composition" in str(many.proof)
    assert accounting.local_bound(rounds(3), delta=1e-6).eps == pytest.approx(0.3)


def test_an_event_from_outside_goes_to_a_ledger_and_back():
    event = Tossed(eps_each=0.25)
    assert events.from_plain(events.to_plain(event)) == event


def test_a_second_event_of_the_same_name_is_refused():
    with pytest.raises(ValueError, match="called 'Gaussian' is registered already"):
        events.register_event(dataclasses.make_dataclass("Gaussian", ["std"], frozen=True))
    assert events.from_plain({"event": "NonPrivate", "reason": "x"}) == NonPrivate(reason="x")


def test_what_a_bundled_event_implies_cannot_be_replaced():
    with pytest.raises(ValueError, match="Gaussian has a release already, GaussianRelease"):

        @releases(Gaussian)
        class Flattering(Release):
            mu = 0.0

    assert release_of(Gaussian(std=2.0, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE)).mu == 0.5


def test_what_a_release_does_not_answer_is_not_certified():
    @releases(silent := dataclasses.make_dataclass("Silent", [], frozen=True))
    class SilentRelease(Release):
        pass

    silent.neighbors = Neighbors.REPLACE_ONE
    told = [Round(mechanism=silent(), participation=Everyone())]
    with pytest.raises(NotApplicable, match="no Renyi bound here for Silent"):
        accounting.bound(told, delta=1e-6)


def test_an_event_without_a_release_is_refused_by_name():
    with pytest.raises(NotApplicable, match="no release is registered for dict"):
        release_of({})


def test_a_subclass_of_an_event_has_its_release():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Renamed(Gaussian):
        pass

    assert release_of(Renamed(std=2.0, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE)).mu == 0.5


def test_so_much_noise_that_the_divergence_rounds_to_nothing_is_no_missing_bound():
    for scale in (1e9, 1e17):
        event = Laplace(scale=scale, sensitivity=1.0, count=3, neighbors=Neighbors.REPLACE_ONE)
        found = release_of(event).renyi(Everyone(), (1.5, 2.0, 64.0))
        assert (found >= 0).all() and (found < 1e-15).all()
