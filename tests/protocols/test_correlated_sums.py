"""secagg with noise of aggregators that is correlated between rounds: its event, its noise, and what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail import accounting, protocols
from dovetail.audit.exact import exact_attacks_on_rounds
from dovetail.events import CorrelatedSum, Round, Separated, from_plain, to_plain
from dovetail.mechanisms import ExactSampler
from dovetail.protocols import Cohort
from dovetail.statements import Neighbors, NotApplicable

DIM, USERS, ROUNDS = 50, 400, 12
COHORT = Cohort(participation=Separated(uploads=2, separation=6, rounds=ROUNDS), size=USERS, min_size=0)
REPLACE, ADD = Neighbors.REPLACE_ONE, Neighbors.ADD_REMOVE


def settled(name="secagg", **settings):
    given = {"noise_multiplier": 3.0, **({"noise": "aggregators"} if name == "secagg" else {}), **settings}
    return protocols.build(name, given).settle(COHORT, DIM)


def rounds_of(protocol, neighbors=REPLACE):
    return [protocol.view(COHORT, DIM, neighbors=neighbors).round] * ROUNDS


@pytest.mark.parametrize("neighbors", [REPLACE, ADD])
def test_it_costs_what_a_curator_costs_but_for_rounding(neighbors):
    shared, curator = (
        accounting.bound(rounds_of(settled(name), neighbors), delta=1e-5) for name in ("secagg", "dp_fl")
    )
    assert curator.eps < shared.eps < 1.01 * curator.eps
    assert "dovetail.correlated-secagg" in shared.proof.key


def test_the_noise_of_one_aggregator_alone_is_counted_on():
    two, five = settled(), settled(aggregators=5)
    (event,) = {item.mechanism for item in rounds_of(two)}
    assert isinstance(event, CorrelatedSum)
    assert event.std == pytest.approx(two.std * two.scale, rel=1e-12)
    assert event.coefficients == two.coefficients
    assert from_plain(to_plain(event)) == event
    assert rounds_of(five)[0].mechanism.std / five.scale == pytest.approx(event.std / two.scale, rel=1e-12)


def released(protocol, keys, dim=60_000):
    """The estimates of some rounds in which nobody sends anything: noise alone."""
    state, rows = protocol.init(dim), []
    for key in keys:
        nobody = protocol.collect(jnp.zeros((1, dim)), jnp.ones(1, bool), state, keys=jax.random.split(key, 1))
        estimate, state = protocol.estimate(protocol.finish(nobody, key=key), 1, state, key=key)
        rows.append(np.asarray(estimate))
    return np.stack(rows)


def keys(rounds=4):
    return [jax.random.fold_in(jax.random.key(5), index) for index in range(rounds)]


def has_the_law(rows, protocol, aggregators):
    """Whether variances and covariances over many coordinates are those of C^-1 Z, within 4.5 standard errors."""
    rounds, dim = rows.shape
    inverse = np.zeros((rounds, rounds))
    for t in range(rounds):
        inverse[t, : t + 1] = protocol.coefficients[t::-1]
    wanted = aggregators * protocol.std**2 * inverse @ inverse.T
    errors = np.abs(np.cov(rows, bias=True) - wanted) / wanted.max()
    return errors.max() < 4.5 * math.sqrt(2 / dim)


@pytest.mark.parametrize("aggregators", [2, 5])
def test_the_estimates_have_the_rows_of_all_aggregators(aggregators):
    protocol = settled(aggregators=aggregators)
    assert has_the_law(released(protocol, keys()), protocol, aggregators)


@pytest.mark.parametrize("sabotage", ["a row is used twice", "a coefficient is too large", "noise is independent"])
def test_other_noise_is_told_apart(sabotage):
    protocol = settled()
    first, second, _, fourth = keys()
    given = {
        "a row is used twice": (protocol, [first, second, second, fourth]),
        "a coefficient is too large": (
            settled(coefficients=(1.0, protocol.coefficients[1] + 0.05, *protocol.coefficients[2:])),
            keys(),
        ),
        "noise is independent": (settled(correlation="none"), keys()),
    }
    assert not has_the_law(released(*given[sabotage]), protocol, 2)


def test_the_exact_attack_nearly_meets_the_certificate():
    rounds = rounds_of(settled())
    certified = accounting.bound(rounds, delta=1e-5).eps
    attacked = max(attack.eps(delta=1e-5).eps for attack in exact_attacks_on_rounds(rounds))
    assert 0.9 * certified < attacked <= certified


def test_a_noise_of_half_the_size_is_caught():
    """A statement about twice the noise that the rows have is below what the attack shows."""
    honest = rounds_of(settled())
    boastful = [Round(mechanism=event_with_std(item.mechanism, 2), participation=item.participation) for item in honest]
    attacked = max(attack.eps(delta=1e-5).eps for attack in exact_attacks_on_rounds(honest))
    assert attacked > accounting.bound(boastful, delta=1e-5).eps


def event_with_std(event, factor):
    return CorrelatedSum(
        **{name: getattr(event, name) for name in ("coordinates", "clip_norm", "scale", "coefficients", "neighbors")},
        std=event.std * factor,
    )


def test_users_noise_is_independent_between_rounds():
    with pytest.raises(ValueError, match=r"with protocol\.noise = 'aggregators' only"):
        protocols.build("secagg", {"noise_multiplier": 3.0, "correlation": "optimised"}).settle(COHORT, DIM)


def test_it_is_not_deployed_with_noise_that_a_round_does_not_know():
    contribution = settled().contribution(COHORT, DIM)
    assert contribution.length == DIM
    with pytest.raises(NotApplicable, match=r"simulated so far: .* protocol.correlation = 'none'"):
        contribution.noise(sampler=ExactSampler())


def test_the_modulus_has_room_for_the_noise_of_all_rounds():
    coefficients = (1.0, -0.9, -0.9)
    plain, wide = settled(correlation="none"), settled(coefficients=coefficients)
    assert wide._std_of_all_noise(USERS) == pytest.approx(plain._std_of_all_noise(USERS) * math.hypot(*coefficients))
