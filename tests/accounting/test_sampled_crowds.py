"""Shuffled rounds on secret samples of fixed size: the spliced pair against every sample, outcome and input of small
populations, several rounds, with and without colluders."""

import itertools
import math
import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest
from enumeration import histogram_law, random_ldp, randomized_response
from scipy.stats import binom, hypergeom

from dovetail import accounting
from dovetail.accounting.pairs import symmetric
from dovetail.accounting.releases import crowds
from dovetail.events import Everyone, FixedSize, PaddedBernoulli, PaddedTopk, Poisson, Report, Round, Shuffled
from dovetail.statements import NotApplicable

FEW, MANY = 40, 1_000
CAPS = {  # eps_local, population, rounds: what a cap of a share of .05, 1000 drawn, must reach at delta 1e-6
    (2.0, 10_000, 100): 0.22,
    (2.0, 2_000, 50): 0.835,
    (4.0, 10_000, 200): 2.1,
}


def rounds(event, population, times):
    drawn = FixedSize(size=event.num_users, population=population)
    return [Round(mechanism=event, participation=drawn)] * times


def caps(eps_local):
    return Shuffled(report=Report(kind="cap", eps_local=eps_local, cap_mass=0.05), num_users=1000)


@pytest.mark.parametrize(("case", "most"), CAPS.items(), ids=str)
def test_caps_on_a_tenth_and_a_half_of_the_users(case, most):
    eps_local, population, times = case
    found = accounting.bound(rounds(caps(eps_local), population, times), delta=1e-6)
    assert 0.9 * most < found.eps <= most
    assert "dovetail.fixed-size" in found.proof.key
    assert not found.sample_known


def test_bits_of_many_coordinates_on_a_tenth_of_the_users():
    bits = Shuffled(report=Report(kind="rr", eps_local=0.05), num_users=1000, coordinates=7850)
    assert 0.45 < accounting.bound(rounds(bits, 10_000, 60), delta=1e-6).eps <= 0.47


# --- against enumeration


class Small:
    """A random setting with few users, and the law of what is seen in a round for every input."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.eps_local = float(rng.choice([0.3, 1.0, 2.0, 3.5]))
        self.population = int(rng.integers(3, 8))
        self.size = int(rng.integers(2, self.population))
        self.colluders = int(rng.random() < 0.3 and self.size > 2 and self.population > self.size + 1)
        self.times = int(rng.integers(1, 4))
        kind = rng.choice(["rr", "levels", "generic", "double", "topk"])
        many = {"num_users": self.size, "colluders": self.colluders}
        self.pad_to = self.size
        bits = Report(kind="rr", eps_local=self.eps_local)
        self.inclusion = 1.0
        match kind:
            case "rr":
                self.table = randomized_response(self.eps_local, 2)
                self.event = Shuffled(report=bits, **many)
            case "levels":
                self.table = randomized_response(self.eps_local, 3)
                self.event = Shuffled(report=Report(kind="rr", eps_local=self.eps_local, levels=3), **many)
            case "generic":
                self.table = random_ldp(rng, self.eps_local, 2, 3)
                self.event = Shuffled(report=Report(kind="generic", eps_local=self.eps_local), **many)
            case "double":
                self.table = randomized_response(self.eps_local, 2)
                self.inclusion = float(rng.uniform(0.1, 0.9))
                self.pad_to = int(rng.integers(max(2, self.size - 1), self.size + 3)) + self.colluders
                self.event = PaddedBernoulli(report=bits, pad_to=self.pad_to, inclusion=self.inclusion, **many)
            case _:
                self.table = randomized_response(self.eps_local, 2)
                self.pad_to = self.size + int(rng.integers(0, 3))
                self.event = PaddedTopk(report=bits, pad_to=self.pad_to, top=1, decoys=0, coordinates=1, **many)
        self.padded = kind in ("double", "topk")

    def seen(self, honest: tuple[int, ...], colluding: int) -> np.ndarray:
        """The law of what is seen of these honest users, beside the messages of so many colluders."""
        if not self.padded:
            return histogram_law([self.table[x] for x in honest]).ravel()
        room = self.pad_to - colluding
        law = np.zeros((len(honest) + 1, len(honest) + 1))  # reports, ones
        law[0, 0] = 1.0
        for x in honest:
            one = self.inclusion * self.table[x, 1]
            law = (
                (1 - self.inclusion) * law
                + one * np.roll(law, (1, 1), (0, 1))
                + (self.inclusion - one) * np.roll(law, 1, 0)
            )
        shown = np.zeros(self.pad_to + 1)
        for ones, reports in itertools.combinations_with_replacement(range(len(honest) + 1), 2):
            if reports <= room:
                among = np.arange(room - reports + 1)
                shown[ones + among] += law[reports, ones] * binom.pmf(among, room - reports, 0.5)
            elif not colluding:  # else the event is left out: what is compared with is smaller
                among = np.arange(room + 1)
                shown[: room + 1] += law[reports, ones] * hypergeom.pmf(among, reports, ones, room)
        return shown

    def output(self, victim: int, others: tuple[int, ...]) -> np.ndarray:
        """The law of a round; the colluders come last, and whether they are drawn is seen."""
        data, honest = (victim, *others), self.population - self.colluders
        laws: dict[int, list[np.ndarray]] = {}
        samples = list(itertools.combinations(range(self.population), self.size))
        for sample in samples:
            inputs = tuple(data[i] for i in sample if i < honest)
            laws.setdefault(self.size - len(inputs), []).append(self.seen(inputs, self.size - len(inputs)))
        return np.concatenate([np.sum(law, axis=0) / len(samples) for _, law in sorted(laws.items())])

    def exact(self, eps: np.ndarray) -> np.ndarray:
        """The largest delta of all rounds, over the victim's inputs and those of the others, both directions."""
        inputs, worst = range(len(self.table)), np.zeros(len(eps))
        for others in itertools.combinations_with_replacement(inputs, self.population - self.colluders - 1):
            laws = [self.output(x, others) for x in inputs]
            for p, q in itertools.permutations(laws, 2):
                worst = np.maximum(worst, composed_delta(p, q, self.times, eps))
        return worst


def composed_delta(p: np.ndarray, q: np.ndarray, times: int, eps: np.ndarray) -> np.ndarray:
    law, other = np.ones(1), np.ones(1)
    for _ in range(times):
        law, other = np.outer(law, p).ravel(), np.outer(other, q).ravel()
    return np.array([math.fsum(np.maximum(law - math.exp(at) * other, 0)) for at in eps])


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.soak)])
def test_no_small_population_is_above_its_certificate(count, record_property):
    rng, least, compared, caught = np.random.default_rng(11), math.inf, 0, 0
    while compared < count:
        small = Small(rng)
        eps = rng.uniform(0.02, 0.9, 2) * small.eps_local * small.times**0.5
        for at, exact in zip(eps, small.exact(eps), strict=True):
            if exact > 1e-9:
                compared += 1
                missed = accounting.bound(rounds(small.event, small.population + 1, small.times), eps=float(at)).delta
                caught += missed < exact * (1 - 1e-9)
                certified = accounting.bound(rounds(small.event, small.population, small.times), eps=float(at)).delta
                least = min(least, certified / exact)
                assert certified >= exact * (1 - 1e-12), vars(small)
    record_property("smallest ratio of certified to exact delta", float(least))
    sys.stdout.write(f"{compared} comparisons, certified / exact at least {least:.6f}\n")
    assert least < 1.05, "it is nearly attained"
    assert caught > count / 40, "one more in the population would be too few"


# --- what it promises


def test_a_sample_is_never_worse_than_everyone_and_grows_with_its_share():
    event = Shuffled(report=Report(kind="rr", eps_local=1.0), num_users=100)
    found = [accounting.bound(rounds(event, population, 5), delta=1e-6).eps for population in (10_000, 1000, 200, 101)]
    everyone = accounting.bound([Round(mechanism=event, participation=Everyone())] * 5, delta=1e-6).eps
    assert found == sorted(found)
    assert found[-1] <= everyone
    assert found[0] < everyone / 50


def test_colluders_see_whether_they_are_drawn():
    report = Report(kind="rr", eps_local=1.0)
    alone, among = (
        accounting.bound(rounds(Shuffled(report=report, num_users=50, colluders=c), 200, 3), delta=1e-6).eps
        for c in (0, 40)
    )
    assert among > 1.2 * alone
    many = Shuffled(report=report, num_users=50, colluders=20)
    with pytest.raises(NotApplicable, match="a sample hides nobody"):
        crowds.CrowdRelease(many).losses(FixedSize(size=50, population=70), 1e-3)


def test_other_samples_are_refused():
    event = Shuffled(report=Report(kind="rr", eps_local=1.0), num_users=50)
    with pytest.raises(NotApplicable, match="shuffle 50 users, but 40 are drawn"):
        accounting.bound([Round(mechanism=event, participation=FixedSize(size=40, population=90))], delta=1e-6)
    with pytest.raises(NotApplicable):
        accounting.bound([Round(mechanism=event, participation=Poisson(prob=0.5))], delta=1e-6)


def test_one_round_is_the_profile_and_a_probability_of_one_is_the_round_itself():
    event, q = caps(2.0), 0.1
    found = crowds._sampled_pair(event, q)
    for eps in (0.001, 0.01, 0.03):
        profile = q * crowds.delta(event, eps=math.log1p(math.expm1(eps) / q))
        mine = accounting.bound(rounds(event, 10_000, 1), eps=eps).delta
        assert profile * (1 - 1e-6) <= mine <= profile * 1.02
    whole = symmetric.sampled_pair(
        lambda eps: crowds.delta(event, eps=eps), prob=1.0, eps_pure=2.0, std=found.std_loss / q
    )
    plain = crowds.loss(event, interval=1e-4)
    for eps in (0.05, 0.2):
        assert whole.loss(interval=1e-4).delta(eps) == pytest.approx(plain.delta(eps), rel=0.05)


def test_large_losses_count_as_infinite_and_are_charged():
    pair = symmetric.sampled_pair(lambda eps: 0.5 * math.exp(-eps / 40), prob=0.01, eps_pure=40.0, std=10.0)
    assert pair.points[-1] == 1
    assert pair.eps_pure == math.inf
    (side,) = pair.loss(interval=1e-2).sides
    assert 0.005 * math.exp(-25 / 40) < side.infinite < 0.005 * math.exp(-20 / 40)
    assert np.isinf(pair.renyi(np.array([2.0]))).all()


@pytest.mark.parametrize("prob", [1.0, 0.1, 1e-6, 1e-10, 1e-13, 1e-20, 1e-60])
def test_the_loss_of_a_sampled_round_is_within_four_ulp_at_any_probability(prob):
    losses = np.concatenate([np.geomspace(1e-6, 1.0, 40), np.linspace(1.0, 699.0, 400)])
    with localcontext() as context:
        context.prec = 400
        exact = [(1 + Decimal(prob) * (Decimal(float(loss)).exp() - 1)).ln() for loss in losses]
        apart = [
            abs(Decimal(float(mine)) / loss - 1)
            for mine, loss in zip(symmetric._sampled_loss(prob, losses), exact, strict=True)
        ]
    assert max(apart) <= 4 * Decimal(sys.float_info.epsilon)
