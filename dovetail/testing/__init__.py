"""The contract that every protocol owes, run on a class of your own.

    from dovetail.testing import check_protocol

    def test_my_protocol():
        print(check_protocol(MyProtocol))

`check_protocol` goes through `OBLIGATIONS`, each a function of a `Bench`: a settled protocol, updates to try it on, and
what its code makes of them. Dovetail's own protocols are held to the same functions. Then it attacks the code as
`dovetail audit` does, and compares what an attack finds with what `view` and `own_reports` promise.

Keys are fixed, so the same code gives the same answer. Averages may be five standard errors off, and variances three. A
protocol that passes shows no error in these rounds; that is no proof of privacy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dovetail import audit
from dovetail.guarantee import quotes
from dovetail.protocols import PROTOCOLS, Protocol, register
from dovetail.statements import NotApplicable
from dovetail.testing.bench import Bench, tally_from_messages, tally_from_sum, tally_on_fast_path
from dovetail.testing.obligations import OBLIGATIONS, ContractError, NotOwed, pairs_of_log_densities, refuse

__all__ = [
    "OBLIGATIONS",
    "Bench",
    "ContractError",
    "ContractReport",
    "NotOwed",
    "check_protocol",
    "tally_from_messages",
    "tally_from_sum",
    "tally_on_fast_path",
]

# rounds that can be attacked by counting
_SMALL_USERS = 10
_SMALL_DIM = 2
_SMALL_DELTA = 0.01
_ATTACKED_EPS = 1.0  # what noise is calibrated to before an attack, where it can be
_TRIALS = 10_000


@dataclasses.dataclass(frozen=True)
class ContractReport:
    """What `check_protocol` went through.

    `kept` names the obligations that were checked, with the settings they were checked under; `not_owed` says why the
    others do not concern this protocol.
    """

    protocol: str
    kept: tuple[str, ...]
    not_owed: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.protocol} keeps its contract", *(f"  kept: {item}" for item in self.kept)]
        return "\n".join([*lines, *(f"  not owed: {item}: {reason}" for item, reason in self.not_owed.items())])


def check_protocol(protocol: type[Protocol], *, trials: int = _TRIALS) -> ContractReport:
    """Run the contract on a protocol class, under its `variants`; takes a minute or so.

    Arguments:
        protocol: your class; it need not be registered.
        trials: rounds of the code that each attack counts in either of two neighbouring worlds.

    Returns: what was checked, and which obligations the protocol does not have.

    Raises:
        ContractError: with one sentence for every obligation that is broken.
    """
    if not issubclass(protocol, Protocol):
        raise ValueError(f"expected a subclass of dovetail.Protocol, got {protocol!r}")
    broken = []
    kept = []
    not_owed = {}
    _check_class(protocol)

    def go_through(name: str, check: Callable[[], None]) -> None:
        """Run one check and note under its name how it ended."""
        try:
            check()
        except NotOwed as reason:
            not_owed[name] = str(reason)
        except ContractError as sentence:
            broken.append(f"{name}: {sentence}")
        except Exception as error:  # whatever the code of somebody else raises
            broken.append(f"{name}: {type(error).__name__} was raised: {error}")
        else:
            kept.append(name)

    for settings in protocol.variants(protocol.only_dim or 40, 150):
        bench = Bench.build(protocol, settings)
        for name, obligation in OBLIGATIONS.items():
            go_through(_label(name, settings), functools.partial(obligation, bench))
    with _registration(protocol):
        for settings in protocol.variants(protocol.only_dim or _SMALL_DIM, _SMALL_USERS):
            for name, promise in _PROMISES.items():
                go_through(_label(name, settings), functools.partial(promise, protocol, settings, trials))
    if broken:
        raise ContractError(f"{protocol.name} breaks its contract:\n" + "\n".join(f"- {line}" for line in broken))
    return ContractReport(protocol.name, tuple(kept), not_owed)


def _label(name: str, settings: Mapping[str, Any]) -> str:
    """The name of an obligation with the settings that it is checked under."""
    return f"{name} ({', '.join(f'{key}={value!r}' for key, value in settings.items())})" if settings else name


def _check_class(protocol: type[Protocol]) -> None:
    """A frozen dataclass with a name, nothing left abstract, that its own example builds."""
    if inspect.isabstract(protocol):
        missing = ", ".join(sorted(protocol.__abstractmethods__))
        raise ContractError(f"{protocol.__name__} must define {missing}")
    if not isinstance(getattr(protocol, "name", None), str):
        raise ContractError(f"{protocol.__name__} must have a `name`, by which configs ask for it")
    if not getattr(getattr(protocol, "__dataclass_params__", None), "frozen", False):
        raise ContractError(f"{protocol.name} must be a frozen dataclass: dataclasses.dataclass(frozen=True)")
    for settings in protocol.variants(protocol.only_dim or 40, 150):
        try:
            bench = Bench.build(protocol, settings)
            hash(bench.protocol)
        except (TypeError, ValueError) as error:
            raise ContractError(f"{protocol.name} cannot be built and settled by its own example: {error}") from error
        if not bench.protocol.is_calibrated:
            raise ContractError(f"{protocol.name}.example must set {bench.protocol.noise_field!r}")


@contextlib.contextmanager
def _registration(protocol: type[Protocol]) -> Iterator[None]:
    """The protocol by its name, for as long as it is checked."""
    before = PROTOCOLS.get(protocol.name)
    if before is not protocol:
        register(protocol)
    try:
        yield
    finally:
        if before is None:
            PROTOCOLS.pop(protocol.name, None)
        else:
            PROTOCOLS[protocol.name] = before


def _small_terms(protocol: type[Protocol], settings: Mapping[str, Any]) -> quotes.Terms:
    """A small round of the protocol, with noise that is calibrated where it can be."""
    dim = protocol.only_dim or _SMALL_DIM
    filled = {**protocol.example(dim, settings), **settings}
    terms = quotes.Terms(num_users=_SMALL_USERS, dim=dim, delta=_SMALL_DELTA, settings=filled)
    try:
        parameter, value, _ = quotes.calibrate(protocol.name, terms, eps=_ATTACKED_EPS)
    except (NotApplicable, ValueError):
        return terms
    return terms.with_setting(parameter, value)


def _check_noise_direction(protocol: type[Protocol], settings: Mapping[str, Any], trials: int) -> None:
    """More noise is more private."""
    terms = _small_terms(protocol, settings)
    built = protocol(**terms.settings)
    if built.noise_field is None:
        raise NotOwed("it has no noise to calibrate")
    try:
        eps = [
            quotes.quote(protocol.name, _terms_at_noise(terms, built, factor)).certified.eps for factor in (1.0, 2.0)
        ]
    except NotApplicable as reason:
        raise NotOwed(str(reason)) from None
    if eps[1] > eps[0]:
        refuse(f"twice the noise must not cost more: eps {eps[0]:.4g} becomes {eps[1]:.4g}")


def _terms_at_noise(terms: quotes.Terms, built: Protocol, factor: float) -> quotes.Terms:
    """The terms with the noise multiplied by `factor`, or a budget divided by it."""
    field = built.noise_field or ""
    value = getattr(built, field)
    if not isinstance(value, int | float):
        raise NotOwed(f"{field} is no number")
    return terms.with_setting(field, value * factor if field == "noise_multiplier" else value / factor)


def _check_view(protocol: type[Protocol], settings: Mapping[str, Any], trials: int) -> None:
    """Attacks on the running code find no more than `view` promises against whoever its scope names."""
    _attack(protocol, _small_terms(protocol, settings), "analyzer", trials)


def _check_own_reports(protocol: type[Protocol], settings: Mapping[str, Any], trials: int) -> None:
    """Attacks on a client's own reports find no more than `own_reports` promises."""
    terms = _small_terms(protocol, settings)
    _attack(protocol, terms, "colluding", trials)
    local = quotes.quote(protocol.name, terms).local
    bench = Bench(unsettled=protocol(**terms.settings), dim=terms.dim, clients=terms.num_users)
    if local.delta > 0:
        return
    with contextlib.suppress(NotOwed):
        reached = max(float(np.abs((own - other).sum(axis=1)).max()) for own, other in pairs_of_log_densities(bench))
        if reached > local.eps * (1 + 1e-6) + 1e-6:
            refuse(
                f"`own_reports` promises eps={local.eps:.4g}, but `randomize` sent reports whose log densities on two "
                f"updates differ by {reached:.4g}"
            )


def _attack(protocol: type[Protocol], terms: quotes.Terms, view: Any, trials: int) -> None:
    """Audit the running code and refuse a promise that an attack exceeds.

    Arguments:
        protocol: registered by its name.
        terms: the round that is attacked.
        view: whose view is attacked, "analyzer" or "colluding".
        trials: rounds that an attack counts in either world.
    """
    try:
        finding = audit.audit(protocol.name, terms, view=view, trials=trials, confidence=0.9999)
    except NotApplicable as reason:
        raise NotOwed(str(reason)) from None
    if finding.certified.is_unbounded:
        raise NotOwed("nothing is promised")
    if not finding.is_consistent:
        what = "`view`" if view == "analyzer" else "`own_reports`"
        refuse(
            f"{what} promises eps={finding.certified.eps:.4g} at delta={finding.bound.delta:.2g} for {terms.num_users} "
            f"users, but an attack on the code shows at least {finding.bound.eps:.4g} ({finding.bound.attack})"
        )


_PROMISES: dict[str, Callable[[type[Protocol], Mapping[str, Any], int], None]] = {
    "more noise is more private": _check_noise_direction,
    "view": _check_view,
    "own reports": _check_own_reports,
}
