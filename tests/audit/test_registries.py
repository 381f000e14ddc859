"""Attacks are found by the type of an event and by the class of a protocol, also of those from outside."""

import ast
import dataclasses
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import dovetail.audit
from dovetail import audit as audits
from dovetail import events
from dovetail.audit import attacks, exact
from dovetail.audit.attacks import _own
from dovetail.audit.bounds import ExactAttack, disjoint_attack
from dovetail.events import Everyone, Gaussian, Poisson, Round, View
from dovetail.guarantee import quotes
from dovetail.protocols import PROTOCOLS, Cohort, fill_settings
from dovetail.protocols.curator.dp_fl import DpFl
from dovetail.protocols.personal.s_apes import SApes
from dovetail.statements import Neighbors, NotApplicable

SOURCE = Path(dovetail.audit.__file__).parent
PLAIN = {"clip_norm": 1.0, "noise_multiplier": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coin:
    """An event that Dovetail has never heard of: a bit that is told as it is with this probability, or else turned."""

    prob: float


@exact.registry.attacks_on_event.register(Coin)
def seen_coin(event: Coin, rounds: int) -> list[ExactAttack]:
    law = np.log([event.prob**rounds, 1 - event.prob**rounds])
    return [ExactAttack(attack="the coin", log_first=law, log_second=law[::-1])]


class BiasedCoin(Coin):
    """An event that is a coin, too."""


class Unknown:
    """An event that nobody registered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loud(DpFl):
    """A protocol from outside, whose rounds say something of their own."""

    name: ClassVar[str] = "loud"

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        view = super().view(cohort, dim, neighbors=neighbors)
        return dataclasses.replace(view, round=Round(mechanism=Coin(prob=0.9), participation=Everyone()))


class Louder(Loud):
    """Inherits what is known of it."""


@attacks.stronger_attacks.register(Loud)
def overheard(protocol: Loud, cohort: Cohort, dim: int) -> list[ExactAttack]:
    return [disjoint_attack("overheard")]


@attacks.attacks_on_own_reports.register(Loud)
def named(protocol: Loud, cohort: Cohort, dim: int) -> list[ExactAttack]:
    return [disjoint_attack("named")]


attacks.shows_less_than_event.register(Loud, lambda protocol: protocol.clip == "adaptive")


@pytest.mark.parametrize("event", [Coin(prob=0.9), BiasedCoin(prob=0.9)])
def test_an_event_from_outside_is_attacked_and_so_are_its_subtypes(event):
    (found,) = exact.exact_attacks(event, rounds=2)
    assert found.eps(delta=0.0).eps == pytest.approx(np.log(0.81 / 0.19), rel=1e-6)
    rounds = [Round(mechanism=event, participation=Everyone())] * 2
    assert audits.attack_training(rounds, delta=0.0) == found.eps(delta=0.0)


def test_an_event_that_nobody_registered_is_refused_in_a_sentence():
    with pytest.raises(NotApplicable, match="no exact attack is known on an event of type Unknown"):
        exact.exact_attacks(Unknown())
    with pytest.raises(NotApplicable, match="Gaussian sums"):
        exact.exact_attacks_on_rounds([Round(mechanism=Coin(prob=0.9), participation=Poisson(prob=0.5))])


def test_every_bundled_event_is_known():
    released = [kind for name in events.__all__ if isinstance(kind := getattr(events, name), type)]
    released = [kind for kind in released if kind.__module__.endswith(("_noise", "_shuffled"))]
    assert len(released) > 9
    for cls in set(released) - {events.DataIndependent, events.Report}:
        assert exact.registry.attacks_on_event.dispatch(cls) is not exact.registry.attacks_on_event.dispatch(object)


@pytest.mark.parametrize("cls", [Loud, Louder])
def test_a_protocol_from_outside_is_attacked_by_what_it_registered(cls, monkeypatch):
    cohort = Cohort(participation=Everyone(), size=10)
    protocol = cls(**PLAIN)
    assert [found.attack for found in attacks.stronger_attacks(protocol, cohort, 3)] == ["overheard"]
    assert [found.attack for found in attacks.attacks_on_own_reports(protocol, cohort, 3)] == ["named"]
    assert not attacks.shows_less_than_event(protocol)
    assert attacks.shows_less_than_event(cls(**PLAIN, clip="adaptive"))
    monkeypatch.setitem(PROTOCOLS, "loud", cls)
    asked = quotes.settle_protocol("loud", quotes.Terms(num_users=10, dim=3, delta=0.01, settings=PLAIN))
    found = audits.findings._exact_attacks(*asked, quotes.Terms(num_users=10, dim=3, delta=0.01), "analyzer")
    assert [attack.attack for attack in found] == ["overheard", "the coin"]


def test_a_subclass_of_a_bundled_protocol_inherits_its_attacks():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(DpFl):
        name: ClassVar[str] = "mine"

    class MyApes(SApes):
        name: ClassVar[str] = "my_apes"

    cohort = Cohort(participation=Everyone(), size=11)
    assert attacks.stronger_attacks(Mine(**PLAIN, clip="median"), cohort, 100)
    assert attacks.attacks_on_own_reports(Mine(**PLAIN), cohort, 100)
    assert attacks.shows_less_than_event(MyApes())


def settled(name):
    dim = PROTOCOLS[name].only_dim or 3
    terms = quotes.Terms(num_users=10, dim=dim, delta=0.01, settings=fill_settings(name, dim, {}))
    return *quotes.settle_protocol(name, terms), dim


def test_attacks_on_clients_own_reports_are_registered_or_follow_from_what_is_declared():
    default = attacks.attacks_on_own_reports.dispatch(object)
    for name, cls in PROTOCOLS.items():
        if attacks.attacks_on_own_reports.dispatch(cls) is default:
            try:
                assert attacks.attacks_on_own_reports(*settled(name))
            except NotApplicable as reason:  # then they are counted
                assert "no exact attack" in str(reason)


@pytest.mark.parametrize("name", ["binary_sum", "ss_simple", "ldp_fl"])
def test_what_follows_from_a_declaration_is_as_good_as_what_is_registered(name):
    registered, default = (
        max(attack.eps(delta=0.01).eps for attack in find(*settled(name)))
        for find in (attacks.attacks_on_own_reports, _own.attacks_on_declared_reports)
    )
    assert default == pytest.approx(registered, rel=1e-9) and default > 0


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_nothing_is_decided_by_an_events_type_outside_the_registries(file):
    """No `isinstance`, no `match` on the classes of `dovetail.events`."""
    names = {name for name in dir(events) if isinstance(getattr(events, name), type)}
    for node in ast.walk(ast.parse(file.read_text())):
        asked = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            asked = [part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)]
        if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name):
            asked = [node.cls.id]
        assert not names & set(asked), f"line {node.lineno}"


def test_gaussian_rounds_on_samples_are_attacked_by_what_is_registered_for_them():
    noise = Gaussian(std=1.0, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE)
    (found,) = exact.exact_attacks_on_rounds([Round(mechanism=noise, participation=Poisson(prob=0.5))] * 2)
    assert found.eps(delta=1e-3).eps > 0
